"""The formula of both norms: what the kernels compute, for every type."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def norm_formula(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    layer: bool,
    eps: float,
    zero_centered_gamma: bool = False,
) -> Tensor:
    """y of each row of x, in the wider of x's type and fp32: the caller rounds it."""
    wide = torch.promote_types(x.dtype, torch.float32)
    z = x.to(wide)
    if weight is not None:
        weight = weight.to(wide) + 1.0 if zero_centered_gamma else weight.to(wide)
    if bias is not None:
        bias = bias.to(wide)
    if layer:  # PyTorch's own, as on a CPU it is three times as fast as its parts; of RMSNorm it has no more than those
        return F.layer_norm(z, z.shape[-1:], weight, bias, eps)
    y = z * torch.rsqrt(z.square().mean(-1, keepdim=True) + eps)
    return y if weight is None else y * weight


def add_rounded(x: Tensor, residual: Tensor, stored: torch.dtype) -> Tensor:
    """x + residual with the value that a tensor of type `stored` holds, in the wider of x's type and fp32.

    The gradient passes as if nothing were rounded: a cast's own would round the gradient too.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    h = x.to(wide) + residual.to(wide)
    return h + (h.to(stored).to(wide) - h).detach() if stored != wide else h
