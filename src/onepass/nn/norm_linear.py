"""NormLinear: a norm and the linear layer after it, as one op."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from onepass.gradients.deferred import DeferredWgrad
from onepass.nn.fp8_state import shown
from onepass.nn.norm import MarkedParameters
from onepass.nn.sharding import check_size
from onepass.ops.norm.formula import DEFAULT_EPS
from onepass.ops.norm.norm_linear import norm_linear
from onepass.product.lora import Adapters
from onepass.runtime.checks import check_eps
from onepass.runtime.fp8_recipe import Precision, recipe_of


class NormLinear(MarkedParameters):
    """`norm_linear` with parameters: a norm over the last dimension and a linear layer. The norm's input is saved for backward.

    The state dict has the keys of Transformer Engine's LayerNormLinear. A state dict of Transformer Engine loads here: its
    `_extra_state` is ignored. The state dict here has no `_extra_state`: load it into Transformer Engine with strict=False.

    Args:
        in_features, out_features: the sizes of the last dimensions of x and of y.
        norm: ``rms_norm`` or ``layer_norm``.
        bias: False omits the linear layer's bias.
        eps: the norm's eps. By default 1e-6 for ``rms_norm`` and 1e-5 for ``layer_norm``.
        norm_bias: False omits the bias of ``layer_norm``; ``rms_norm`` has none.
        zero_centered_gamma: store the norm's weight - 1, which starts at 0.
        return_norm_output, return_input: return (y, the normalised h), (y, h) or (y, the normalised h, h). With a residual, h is
            x + residual and is always returned.
        sequence_parallel: mark the norm's parameters as Megatron does. Their gradients are partial sums, to be reduced over the
            ranks of a sequence (`onepass.parallel.reduce_sequence_parallel_grads`).
        precision: ``fp8`` or an `onepass.FP8Recipe` runs the products in eight bits.
    """

    layer_norm_weight: nn.Parameter
    layer_norm_bias: nn.Parameter | None
    weight: nn.Parameter
    bias: nn.Parameter | None
    deferred: DeferredWgrad | None = None
    precision: Precision = None
    _marked = ("layer_norm_weight", "layer_norm_bias")

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        norm: str = "rms_norm",
        bias: bool = True,
        eps: float | None = None,
        norm_bias: bool = True,
        zero_centered_gamma: bool = False,
        return_norm_output: bool = False,
        return_input: bool = False,
        sequence_parallel: bool = False,
        precision: Precision = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if norm not in DEFAULT_EPS:
            raise ValueError(f"norm must be one of {', '.join(DEFAULT_EPS)}, but is {norm!r}")
        for name, size in (("in_features", in_features), ("out_features", out_features)):
            check_size(name, size)
        recipe_of(precision)
        self.precision = precision
        self.in_features, self.out_features, self.norm = in_features, out_features, norm
        self.eps = DEFAULT_EPS[norm] if eps is None else check_eps(eps)
        self.zero_centered_gamma, self.sequence_parallel = zero_centered_gamma, sequence_parallel
        self.return_norm_output, self.return_input = return_norm_output, return_input

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        self.layer_norm_weight = parameter(in_features)
        has_norm_bias = norm == "layer_norm" and norm_bias
        self.register_parameter("layer_norm_bias", parameter(in_features) if has_norm_bias else None)
        self.weight = parameter(out_features, in_features)
        self.register_parameter("bias", parameter(out_features) if bias else None)
        self.reset_parameters()
        self.mark_parameters()

    def reset_parameters(self) -> None:
        """Initialise the norm to scale by 1 and shift by 0, and the linear layer as torch.nn.Linear does."""
        nn.init.constant_(self.layer_norm_weight, 0.0 if self.zero_centered_gamma else 1.0)
        if self.layer_norm_bias is not None:
            nn.init.zeros_(self.layer_norm_bias)
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.bias is not None:
            bound = 1 / math.sqrt(self.in_features)
            nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, x: Tensor, residual: Tensor | None = None, *, lora: Adapters = None) -> Any:
        """Return y, then the normalised h with return_norm_output, then h with a residual or return_input.

        `lora`: an `onepass.LoRA` of the weight, or several.
        """
        return norm_linear(
            x,
            self.given(self.layer_norm_weight),
            self.given(self.weight),
            self.given(self.bias),
            residual=residual,
            norm=self.norm,
            norm_bias=self.given(self.layer_norm_bias),
            eps=self.eps,
            zero_centered_gamma=self.zero_centered_gamma,
            return_norm_output=self.return_norm_output,
            return_input=self.return_input,
            deferred=self.deferred,
            precision=self.precision,
            lora=lora,
        )

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        extra = prefix + "_extra_state"  # Transformer Engine's fp8 scales
        super()._load_from_state_dict({key: value for key, value in state_dict.items() if key != extra}, prefix, *rest)

    def extra_repr(self) -> str:
        parts = [f"{self.in_features}", f"{self.out_features}", f"norm={self.norm!r}", f"bias={self.bias is not None}"]
        parts += [f"eps={self.eps}"]
        parts += ["norm_bias=False"] if self.norm == "layer_norm" and self.layer_norm_bias is None else []
        options = ("zero_centered_gamma", "return_norm_output", "return_input", "sequence_parallel")
        return ", ".join(parts + shown(self, **dict.fromkeys(options, False), precision=None))
