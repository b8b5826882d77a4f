"""The formula of both norms: what the kernels compute, for every type."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass.runtime.dispatch import needs_grad, under_functorch


class NormOptions(NamedTuple):
    """What a norm takes besides tensors."""

    layer: bool  # LayerNorm, not RMSNorm
    eps: float
    zero_centered_gamma: bool


def norm_formula(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    layer: bool,
    eps: float,
    zero_centered_gamma: bool = False,
    native: bool = False,
) -> Tensor:
    """y of each row of x, in the wider of x's type and fp32: the caller rounds it.

    `native`: by PyTorch's own function where there is one, which on a CPU is three times as fast. It is no baseline to judge by:
    how it sums is its own affair.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    z = x.to(wide)
    if weight is not None:
        weight = weight.to(wide) + 1.0 if zero_centered_gamma else weight.to(wide)
    if bias is not None:
        bias = bias.to(wide)
    if layer and native:
        return F.layer_norm(z, z.shape[-1:], weight, bias, eps)
    if layer:
        z = z - z.mean(-1, keepdim=True)
    y = z * torch.rsqrt(z.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * weight
    return y if bias is None else y + bias


def add_rounded(x: Tensor, residual: Tensor, stored: torch.dtype) -> Tensor:
    """x + residual with the value that a tensor of type `stored` holds, in the wider of x's type and fp32.

    The gradient passes as if nothing were rounded: a cast's own would round the gradient too.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    h = x.to(wide) + residual.to(wide)
    if stored == wide:
        return h
    rounded = h.detach().to(stored).to(wide)
    if not (needs_grad(h) or under_functorch()):
        return rounded
    rest = rounded - h.detach()
    return h + torch.where(rest.isnan() | (rest == 0), -0.0, rest)  # inf - inf is NaN; -0.0 changes nothing, not even 0's sign
