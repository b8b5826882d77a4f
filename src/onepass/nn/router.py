"""Router: a linear layer to one logit an expert, and `onepass.route`."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from onepass.nn.linear import check_input
from onepass.nn.norm import MarkedParameters
from onepass.ops.routing.logits import router_logits
from onepass.ops.routing.route import route
from onepass.ops.routing.routing import Routing


class Router(MarkedParameters):
    """Send each token to k of a mixture's experts, by `onepass.route`. Logits are at least fp32, whatever x and weight are.

        router = Router(1024, 64, 8, score="sigmoid", expert_bias=True, groups=(8, 4), aux=1e-4)
        routing = router(x)                     # .weights, .chosen, .counts, .aux_loss
        router.update_bias(routing.counts)      # after the step, of the counts of all ranks

    weight ``[num_experts, hidden_size]`` starts as torch.nn.Linear's.

    Args:
        hidden_size: the size of x's last dimension.
        num_experts: how many there are.
        k: how many see a token.
        expert_bias: have a buffer of that name, of fp32 zeros at first, which is added to scores where experts are chosen.
        sequence_parallel: mark weight as Megatron does. Its gradient is a partial sum, to be reduced over the ranks of a sequence
            (`onepass.parallel.reduce_sequence_parallel_grads`).
        device, dtype: of weight.
        options: ``score``, ``normalise``, ``groups``, ``scale``, ``aux`` and ``z``, as in `onepass.route`.
    """

    weight: nn.Parameter
    expert_bias: Tensor | None
    _marked = ("weight",)

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        k: int,
        *,
        expert_bias: bool = False,
        sequence_parallel: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.k, self.sequence_parallel = k, sequence_parallel
        self.options = options
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size, device=device, dtype=dtype))
        bias = torch.zeros(num_experts, device=device, dtype=torch.float32) if expert_bias else None
        self.register_buffer("expert_bias", bias)
        self.reset_parameters()
        self.mark_parameters()

    def reset_parameters(self) -> None:
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.expert_bias is not None:
            nn.init.zeros_(self.expert_bias)

    def forward(self, x: Tensor) -> Routing:
        """Return the routing of x ``[..., hidden_size]``."""
        check_input(x, self.weight.shape[1], "hidden_size")
        return route(router_logits(x, self.weight), self.k, bias=self.expert_bias, **self.options)

    @torch.no_grad()
    def update_bias(self, counts: Tensor, rate: float = 1e-3) -> None:
        """Move expert_bias by ``rate``: up for experts with fewer tokens than the mean, down for others, as DeepSeek V3 does.

        counts ``[num_experts]`` are those of a step: `Routing.counts`, summed over microbatches and over ranks.
        """
        if self.expert_bias is None:
            raise ValueError("update_bias needs a Router with expert_bias=True, but this has none")
        if counts.shape != self.expert_bias.shape:
            raise ValueError(f"counts must have shape {tuple(self.expert_bias.shape)}, but has {tuple(counts.shape)}")
        counts = counts.to(self.expert_bias)
        self.expert_bias.add_((counts.mean() - counts).sign(), alpha=rate)

    def extra_repr(self) -> str:
        experts, hidden = self.weight.shape
        parts = [f"hidden_size={hidden}", f"num_experts={experts}", f"k={self.k}"]
        parts += ["expert_bias=True"] * (self.expert_bias is not None)
        return ", ".join(parts + [f"{name}={value!r}" for name, value in self.options.items()])
