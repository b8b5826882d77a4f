"""The options and the formula of a bias and an activation: what the kernels compute, for every type."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from onepass.ops.activation.activations import activation_of


class ActivationOptions(NamedTuple):
    """What a bias and an activation take besides tensors."""

    activation: str  # the key, not the name: a name may be registered again, and existing graphs keep the old activation
    clamp: float | None
    linear_offset: float | None  # None for 0: the kernels are then compiled without it
    threshold: int = 0  # how many of 65536 elements dropout drops
    seed_number: int | None = None  # dropout's seed where it is no tensor: in plain eager mode on a GPU


def _clamped(x: Tensor, low: float, high: float) -> Tensor:
    """Clamp x. The boundary passes gradient, as torch.clamp's does only before PyTorch 2.14. NaN does not."""
    return torch.where((x >= low) & (x <= high), x, x.detach().clamp(low, high))


def activation_formula(
    x: Tensor, bias: Tensor | None, token_weight: Tensor | None, options: ActivationOptions, linear: Tensor | None = None
) -> Tensor:
    """Return y without dropout, in the wider of x's type and fp32: the caller rounds it.

    With `linear`, x is the gate alone.
    """
    act = activation_of(options.activation)
    wide = torch.promote_types(x.dtype, torch.float32)
    z = x.to(wide) if bias is None else x.to(wide) + bias.to(wide)
    if act.gated:
        gate, linear = z.chunk(2, -1) if linear is None else (z, linear.to(wide))
        if options.clamp is not None:
            gate, linear = _clamped(gate, -torch.inf, options.clamp), _clamped(linear, -options.clamp, options.clamp)
        if options.linear_offset:  # -0.0 + 0.0 would be 0.0
            linear = linear + options.linear_offset
        y = act.formula(gate) * linear
    else:
        y = act.formula(z)
    return y if token_weight is None else y * token_weight.to(wide).reshape(*x.shape[:-1], 1)
