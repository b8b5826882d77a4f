"""LayerNorm and RMSNorm: torch.nn's modules with onepass kernels and an optional residual. GatedRMSNorm: RMSNorm and a gate."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from onepass.nn.fp8_state import FP8Module, shown
from onepass.ops.norm.gated_norm import check_gate, gated_rms_norm
from onepass.ops.norm.norm import layer_norm, rms_norm
from onepass.runtime.checks import check_eps


class MarkedParameters(FP8Module):
    """A module whose norm parameters carry `sequence_parallel`, as Megatron marks them.

    `onepass.parallel.reduce_sequence_parallel_grads` finds them by this attribute. A move from the meta device, a copy, and
    load_state_dict(assign=True) make new parameters, which are marked again.
    """

    sequence_parallel: bool
    gradient_accumulation_fusion = True  # whether ops add gradients to main_grad. Otherwise they go to .grad
    _marked: tuple[str, ...]  # names of the marked parameters

    def given(self, parameter: Any) -> Any:
        """Return the parameter as ops take it. Without gradient_accumulation_fusion it is a view, which carries no main_grad."""
        return parameter if parameter is None or self.gradient_accumulation_fusion else parameter.view_as(parameter)

    def mark_parameters(self) -> None:
        for name in self._marked:
            parameter = getattr(self, name)
            if parameter is not None:
                parameter.sequence_parallel = self.sequence_parallel

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        applied = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.mark_parameters()
        return applied

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *rest)
        self.mark_parameters()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.mark_parameters()


class _Norm(MarkedParameters):
    """The base class of the norms: options and a weight."""

    weight: nn.Parameter | None
    eps: float | None
    _marked: tuple[str, ...] = ("weight",)

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None,
        elementwise_affine: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        zero_centered_gamma: bool,
        memory_efficient: bool,
        return_input: bool,
        sequence_parallel: bool,
    ) -> None:
        super().__init__()
        if zero_centered_gamma and not elementwise_affine:
            raise ValueError("zero_centered_gamma says how weight is kept, but elementwise_affine=False leaves none")
        self.normalized_shape = (_one_size(normalized_shape),)
        self.eps = None if eps is None else check_eps(eps)
        self.elementwise_affine = elementwise_affine
        self.zero_centered_gamma, self.memory_efficient = zero_centered_gamma, memory_efficient
        self.return_input: Any = return_input  # no overload takes a plain bool
        self.sequence_parallel = sequence_parallel
        weight = torch.empty(self.normalized_shape, device=device, dtype=dtype) if elementwise_affine else None
        self.register_parameter("weight", None if weight is None else nn.Parameter(weight))

    def reset_parameters(self) -> None:
        if self.weight is not None:
            nn.init.constant_(self.weight, 0.0 if self.zero_centered_gamma else 1.0)

    def _check(self, x: Tensor) -> None:
        """Check the last dimension of x. With a weight, the op itself checks it."""
        if self.weight is None and x.shape[-1:] != self.normalized_shape:
            raise ValueError(f"x's last dimension must be {self.normalized_shape[0]}, but x has shape {tuple(x.shape)}")

    def extra_repr(self) -> str:
        parts = [f"{self.normalized_shape}", f"eps={self.eps}", f"elementwise_affine={self.elementwise_affine}"]
        options = ("zero_centered_gamma", "memory_efficient", "return_input", "sequence_parallel")
        return ", ".join(parts + shown(self, **dict.fromkeys(options, False)))


class LayerNorm(_Norm):
    """torch.nn.LayerNorm over the last dimension, by `onepass.layer_norm`. It has the same arguments and the same state dict.

    Args:
        normalized_shape: the size of x's last dimension, as a number or as a shape of one.
        eps, elementwise_affine, bias, device, dtype: as in torch.nn.LayerNorm.
        zero_centered_gamma: store weight - 1, which starts at 0. A state dict does not record this: load it into a module with
            the same setting.
        memory_efficient, return_input: as in `onepass.layer_norm`.
        sequence_parallel: mark the parameters as Megatron does. Their gradients are partial sums, to be reduced over the ranks of
            a sequence (`onepass.parallel.reduce_sequence_parallel_grads`).
    """

    bias: nn.Parameter | None
    eps: float
    _marked = ("weight", "bias")

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        zero_centered_gamma: bool = False,
        memory_efficient: bool = False,
        return_input: bool = False,
        sequence_parallel: bool = False,
    ) -> None:
        options = zero_centered_gamma, memory_efficient, return_input, sequence_parallel
        super().__init__(normalized_shape, check_eps(eps), elementwise_affine, device, dtype, *options)
        start = torch.empty(self.normalized_shape, device=device, dtype=dtype) if elementwise_affine and bias else None
        self.register_parameter("bias", None if start is None else nn.Parameter(start))
        self.reset_parameters()
        self.mark_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        """Return the norm of x. With a residual, return (y, h), where h is x + residual and y its norm; with return_input (y, h)
        always."""
        self._check(x)
        return layer_norm(
            x,
            self.given(self.weight),
            self.given(self.bias),
            self.eps,
            residual=residual,
            zero_centered_gamma=self.zero_centered_gamma,
            memory_efficient=self.memory_efficient,
            return_input=self.return_input,
        )

    def extra_repr(self) -> str:
        without = self.elementwise_affine and self.bias is None
        return super().extra_repr() + (", bias=False" if without else "")


class RMSNorm(_Norm):
    """torch.nn.RMSNorm over the last dimension, by `onepass.rms_norm`. Its state dict and arguments are the same, except for eps.

    Args:
        normalized_shape: the size of x's last dimension, as a number or as a shape of one.
        eps: 1e-6 by default. None is torch's default: the machine epsilon of the arithmetic's type, which is fp32 unless x is
            fp64.
        elementwise_affine, device, dtype: as in torch.nn.RMSNorm.
        zero_centered_gamma: store weight - 1, which starts at 0. A state dict does not record this: load it into a module with
            the same setting.
        memory_efficient, return_input: as in `onepass.rms_norm`.
        sequence_parallel: mark weight as Megatron does. Its gradient is a partial sum, to be reduced over the ranks of a sequence
            (`onepass.parallel.reduce_sequence_parallel_grads`).
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = 1e-6,
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        zero_centered_gamma: bool = False,
        memory_efficient: bool = False,
        return_input: bool = False,
        sequence_parallel: bool = False,
    ) -> None:
        options = zero_centered_gamma, memory_efficient, return_input, sequence_parallel
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype, *options)
        self.reset_parameters()
        self.mark_parameters()

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        """Return the norm of x. With a residual, return (y, h), where h is x + residual and y its norm; with return_input (y, h)
        always."""
        self._check(x)
        return rms_norm(
            x,
            self.given(self.weight),
            _machine_epsilon(x) if self.eps is None else self.eps,
            residual=residual,
            zero_centered_gamma=self.zero_centered_gamma,
            memory_efficient=self.memory_efficient,
            return_input=self.return_input,
        )


class GatedRMSNorm(_Norm):
    """RMSNorm over the last dimension and a gate, by `onepass.gated_rms_norm`. Its state dict is RMSNorm's.

    Args:
        normalized_shape: the size of x's last dimension, as a number or as a shape of one.
        eps, activation, norm_before_gate, group_size: as in `onepass.gated_rms_norm`.
        elementwise_affine, device, dtype: as in torch.nn.RMSNorm.
        zero_centered_gamma, sequence_parallel: as in `onepass.nn.RMSNorm`.
    """

    eps: float

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-6,
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        zero_centered_gamma: bool = False,
        activation: str = "silu",
        norm_before_gate: bool = True,
        group_size: int | None = None,
        sequence_parallel: bool = False,
    ) -> None:
        options = zero_centered_gamma, False, False, sequence_parallel
        super().__init__(normalized_shape, check_eps(eps), elementwise_affine, device, dtype, *options)
        check_gate("normalized_shape", self.normalized_shape[0], activation, group_size)
        self.activation, self.norm_before_gate, self.group_size = activation, norm_before_gate, group_size
        self.reset_parameters()
        self.mark_parameters()

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        """Return the norm of x, times the weight and the activation of z, in the order that norm_before_gate says."""
        self._check(x)
        return gated_rms_norm(
            x,
            z,
            self.given(self.weight),
            self.eps,
            zero_centered_gamma=self.zero_centered_gamma,
            activation=self.activation,
            norm_before_gate=self.norm_before_gate,
            group_size=self.group_size,
        )

    def extra_repr(self) -> str:
        parts = [super().extra_repr(), f"activation={self.activation}", f"norm_before_gate={self.norm_before_gate}"]
        return ", ".join(parts + shown(self, group_size=None))


def _machine_epsilon(x: Tensor) -> float:
    return torch.finfo(torch.float64 if x.dtype is torch.float64 else torch.float32).eps


def _one_size(shape: int | Sequence[int]) -> int:
    sizes = [shape] if isinstance(shape, Integral) else list(shape) if isinstance(shape, Sequence) else []
    if len(sizes) > 1:
        raise ValueError(f"normalized_shape must be one size, the last dimension's, but is {shape!r}: flatten x's others into it")
    if len(sizes) != 1 or not is_size(sizes[0]):
        raise ValueError(f"normalized_shape must be a size of at least 1, but is {shape!r}")
    return int(sizes[0])


def is_size(value: object) -> bool:
    return not isinstance(value, bool) and isinstance(value, Integral) and int(value) >= 1
