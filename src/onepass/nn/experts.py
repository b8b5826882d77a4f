"""Experts: the weights of a mixture's experts, and `onepass.experts`."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from onepass.nn.fp8_state import GroupedLayer, shown
from onepass.nn.linear import check_input
from onepass.nn.sharding import check_size
from onepass.ops.activation.activations import find_activation
from onepass.ops.activation.formula import check_options
from onepass.ops.experts.experts import experts
from onepass.ops.routing.routing import Routing
from onepass.product.lora import LoRA
from onepass.runtime.fp8_recipe import Precision, recipe_of


class ExpertsOptions(NamedTuple):
    """What `Experts` passes on to `onepass.experts` by name."""

    activation: str
    clamp: float | None = None
    linear_offset: float = 0.0
    interleaved: bool = False
    transposed: bool = False


class Experts(GroupedLayer):
    """A mixture's experts, each an MLP, by `onepass.experts`. A `Router` says which of them see a token.

        router = onepass.nn.Router(1024, 64, 8, aux=1e-2)
        experts = onepass.nn.Experts(1024, 512, 64)
        routing = router(x)
        y = experts(x, routing)                 # add routing.aux_loss to the loss

    ``up`` is ``[num_experts, 2 * intermediate_size, hidden_size]``, gates first, or without the 2 where the activation is not
    gated. ``down`` is ``[num_experts, hidden_size, intermediate_size]``. Each expert's weights and biases start as those of its
    own torch.nn.Linear layers.

    Args:
        hidden_size: the size of x's last dimension.
        intermediate_size: the size of each expert's activation.
        num_experts: how many there are.
        activation: as in `onepass.bias_activation`.
        bias: have ``up_bias`` and ``down_bias``, a row an expert.
        recompute: keep x and the order of rows alone for backward, which multiplies by ``up`` again.
        precision: ``fp8`` or an `onepass.FP8Recipe` runs the products in eight bits where PyTorch can and it gains.
        device, dtype: of the parameters.
        options: ``clamp``, ``linear_offset``, ``interleaved`` and ``transposed``, as in `onepass.experts`. Weights that are
            transposed have their last two dimensions exchanged.
    """

    up: nn.Parameter
    down: nn.Parameter
    up_bias: nn.Parameter | None
    down_bias: nn.Parameter | None
    grouped_weights = ("up", "down")

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        activation: str = "swiglu",
        *,
        bias: bool = False,
        recompute: bool = False,
        precision: Precision = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.options = ExpertsOptions(activation, **options)
        act = find_activation(activation)
        check_options(act, self.options.clamp, self.options.linear_offset, "input")
        recipe_of(precision)
        if self.options.interleaved and not act.gated:
            raise ValueError(f"interleaved needs a gated activation, but activation is {activation!r}")
        sizes = {"hidden_size": hidden_size, "intermediate_size": intermediate_size, "num_experts": num_experts}
        for name, size in sizes.items():
            check_size(name, size)
        self.hidden_size, self.intermediate_size, self.num_experts = hidden_size, intermediate_size, num_experts
        self.recompute, self.precision = recompute, precision
        shapes = {"up": (intermediate_size * act.parts, hidden_size), "down": (hidden_size, intermediate_size)}
        for name, shape in shapes.items():
            weight = torch.empty(num_experts, *(shape[::-1] if self.options.transposed else shape), device=device, dtype=dtype)
            self.register_parameter(name, nn.Parameter(weight))
            vector = nn.Parameter(weight.new_empty(num_experts, shape[0])) if bias else None
            self.register_parameter(f"{name}_bias", vector)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Re-initialise all parameters, as torch.nn.Linear's of each expert."""
        for weight, bias, inputs in (
            (self.up, self.up_bias, self.hidden_size),
            (self.down, self.down_bias, self.intermediate_size),
        ):
            bound = 1 / math.sqrt(inputs)
            nn.init.uniform_(weight, -bound, bound)
            if bias is not None:
                nn.init.uniform_(bias, -bound, bound)

    def forward(
        self,
        x: Tensor,
        routing: Routing | tuple[Tensor, Tensor],
        shared: Tensor | None = None,
        *,
        lora: tuple[LoRA | None, LoRA | None] | None = None,
    ) -> Tensor:
        """Return each token's sum of its experts' results, times the router's weights.

        Args:
            x: ``[..., hidden_size]``.
            routing: what `Router` or `onepass.route` returned for x, or a pair of weights and chosen experts ``[..., k]``.
            shared: ``[..., hidden_size]``, added in the sum's pass: the result of an expert that all tokens see.
            lora: an `onepass.LoRA` of ``up`` and one of ``down``, each with an adapter an expert, or None.
        """
        check_input(x, self.hidden_size, "hidden_size")
        weights, chosen, *_ = routing
        return experts(
            x,
            self.up,
            self.down,
            chosen,
            weights,
            up_bias=self.up_bias,
            down_bias=self.down_bias,
            shared=shared,
            lora=lora,
            recompute=self.recompute,
            precision=self.precision,
            **self.options._asdict(),
        )

    def extra_repr(self) -> str:
        parts = [f"{self.hidden_size}, {self.intermediate_size}, {self.num_experts}", f"activation={self.options.activation!r}"]
        parts += ["bias=True"] * (self.up_bias is not None)
        defaults = ExpertsOptions._field_defaults.items()
        parts += [f"{name}={value!r}" for name, default in defaults if (value := getattr(self.options, name)) != default]
        return ", ".join(parts + shown(self, recompute=False, precision=None))
