"""A norm and the linear layer after it, as one op."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from onepass.gradients.deferred import DeferredWgrad
from onepass.nn.norm import MarkedParameters, is_size
from onepass.ops.norm.norm_linear import norm_linear
from onepass.runtime.checks import check_eps

_EPS = {"rms_norm": 1e-6, "layer_norm": 1e-5}


class NormLinear(MarkedParameters):
    """`norm_linear` with its parameters: a norm over the last dimension and a linear layer; backward keeps the norm's input.

    The state dict has the keys of Transformer Engine's LayerNormLinear, whose own loads here; an `_extra_state` in it is passed
    over. Ours has none: load it there with strict=False.

    Args:
        in_features, out_features: the sizes of the last dimensions of x and of y.
        norm: ``rms_norm`` or ``layer_norm``.
        bias: False leaves the linear layer's bias away.
        eps: the norm's; 1e-6 for ``rms_norm`` and 1e-5 for ``layer_norm`` where it isn't given.
        norm_bias: False leaves ``layer_norm``'s bias away; ``rms_norm`` has none.
        zero_centered_gamma: keep the norm's weight as its distance from 1: it starts at 0.
        return_norm_output, return_input: return (y, the normalised h), (y, h) or (y, the normalised h, h). With a residual
            h = x + residual, and is returned in any case.
        sequence_parallel: mark the norm's parameters as Megatron does: their gradients are parts, to be summed over the ranks of
            a sequence (`onepass.parallel.reduce_sequence_parallel_grads`).
    """

    layer_norm_weight: nn.Parameter
    layer_norm_bias: nn.Parameter | None
    weight: nn.Parameter
    bias: nn.Parameter | None
    deferred: DeferredWgrad | None = None
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
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if norm not in _EPS:
            raise ValueError(f"norm must be one of {', '.join(_EPS)}, but is {norm!r}")
        for name, size in (("in_features", in_features), ("out_features", out_features)):
            if not is_size(size):
                raise ValueError(f"{name} must be a size of at least 1, but is {size!r}")
        self.in_features, self.out_features, self.norm = in_features, out_features, norm
        self.eps = _EPS[norm] if eps is None else check_eps(eps)
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
        """The norm starts as one that changes nothing more, the linear layer as torch.nn.Linear does."""
        nn.init.constant_(self.layer_norm_weight, 0.0 if self.zero_centered_gamma else 1.0)
        if self.layer_norm_bias is not None:
            nn.init.zeros_(self.layer_norm_bias)
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.bias is not None:
            bound = 1 / math.sqrt(self.in_features)
            nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        """y; after it the normalised h with return_norm_output, and h with a residual or return_input."""
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
        )

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        extra = prefix + "_extra_state"  # Transformer Engine's: the scales of its fp8
        super()._load_from_state_dict({key: value for key, value in state_dict.items() if key != extra}, prefix, *rest)

    def extra_repr(self) -> str:
        said = [f"{self.in_features}", f"{self.out_features}", f"norm={self.norm!r}", f"bias={self.bias is not None}"]
        said += [f"eps={self.eps}"]
        said += ["norm_bias=False"] if self.norm == "layer_norm" and self.layer_norm_bias is None else []
        options = ("zero_centered_gamma", "return_norm_output", "return_input", "sequence_parallel")
        return ", ".join(said + [f"{name}=True" for name in options if getattr(self, name)])
