"""The formula of both norms: what the kernels compute, for every type."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass.runtime.dispatch import needs_grad, under_functorch
from onepass.runtime.formula import formula_by_blocks

if TYPE_CHECKING:
    from onepass.gradients.vectors import VectorGrads


DEFAULT_EPS = {"rms_norm": 1e-6, "layer_norm": 1e-5}  # what `rms_norm` and `layer_norm` have, for ops that take a norm by name


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


def norm_by_formula(x: Tensor, weight: Tensor | None, bias: Tensor | None, options: NormOptions) -> Tensor:
    """Return y by PyTorch's own function where there is one."""
    layer, eps, centered = options
    formula = partial(norm_formula, layer=layer, eps=eps, zero_centered_gamma=centered, native=True)
    return formula_by_blocks(formula, x, weight, bias)  # type: ignore[no-any-return]


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


def norm_backward_formula(
    vectors: VectorGrads | None, dy: Tensor, dh: Tensor | None, x: Tensor, weight: Tensor | None, bias: Tensor | None,
    stats: Tensor | None, options: NormOptions, *rest: Any, into_dy: bool,
) -> tuple[None, Tensor | None, Tensor | None, Tensor | None, Tensor]:  # fmt: skip
    """Do what `kernels.backward_into` does, by autograd. It adds to no main_grad."""
    if vectors is not None:
        weight, bias = vectors.wide(weight, bias)
    *needs, dx_type, _ = rest
    wide = torch.promote_types(x.dtype, torch.float32)
    leaves = [
        None if t is None else t.detach().to(wide).requires_grad_(need) for t, need in zip((x, weight, bias), needs, strict=True)
    ]
    with torch.enable_grad():
        normed = norm_by_formula(leaves[0], leaves[1], leaves[2], options)  # type: ignore[arg-type]
    asked = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
    grads = iter(torch.autograd.grad(normed, asked, dy.to(wide)) if asked else ())
    dx, dweight, dbias = (
        next(grads) if need and t is not None else None for t, need in zip((x, weight, bias), needs, strict=True)
    )
    if dx is not None and dh is not None:
        dx += dh  # autograd made it for us
    types = (dx_type, *(None if t is None else t.dtype for t in (weight, bias)))
    dx, dweight, dbias = (None if t is None else t.to(dtype) for t, dtype in zip((dx, dweight, dbias), types, strict=True))
    return None, dx, dweight, dbias, normed.detach().to(x.dtype)
