"""The formula of a bias and an activation: what the kernels compute, for every type."""

from __future__ import annotations

import torch
from torch import Tensor

from onepass.kernels.activations import Activation


def activation_formula(
    x: Tensor,
    bias: Tensor | None,
    token_weight: Tensor | None,
    act: Activation,
    *,
    clamp: float | None = None,
    linear_offset: float = 0.0,
) -> Tensor:
    """y in the wider of x's type and fp32: the caller rounds it."""
    wide = torch.promote_types(x.dtype, torch.float32)
    z = x.to(wide) if bias is None else x.to(wide) + bias.to(wide)
    if act.gated:
        gate, linear = z.chunk(2, -1)
        if clamp is not None:
            gate, linear = gate.clamp(max=clamp), linear.clamp(-clamp, clamp)
        y = act.formula(gate) * (linear + linear_offset)
    else:
        y = act.formula(z)
    return y if token_weight is None else y * token_weight.to(wide).reshape(*x.shape[:-1], 1)
