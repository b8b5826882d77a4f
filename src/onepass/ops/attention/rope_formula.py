"""The formula of rotary positions for every type, and the same over blocks of tokens, which is the "torch" backend.

With weights, RMSNorm of each head comes first: x / sqrt(mean(x^2) + eps) * weight.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onepass.runtime.formula import run_formula

_BLOCK = 1 << 18  # elements at a time: their fp32 copies stay in the caches


def rope_formula(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Return x's heads rotated, contiguous."""
    wide = torch.promote_types(x.dtype, torch.float32)
    R = 2 * cos.shape[-1]
    cos, sin = cos.to(wide).unsqueeze(-2), sin.to(wide).unsqueeze(-2)  # the same for all heads
    rotating, rest = x.split((R, x.shape[-1] - R), -1)  # not narrow, whose gradients are tensors of zeros as wide as x
    x1, x2 = (half.to(wide) for half in _pairs(rotating, R, interleaved))
    rotated = x1 * cos - x2 * sin, x2 * cos + x1 * sin
    y = torch.stack(rotated, -1).flatten(-2) if interleaved else torch.cat(rotated, -1)
    return torch.cat([y.to(x.dtype), rest], -1).contiguous()


class QKNorm(NamedTuple):
    """RMSNorm of each head of q and of k, before they are rotated."""

    q_weight: Tensor  # [D], as k_weight
    k_weight: Tensor
    eps: float
    zero_centered_gamma: bool  # the weights are kept as their distances from 1


def normed_rope_formula(
    x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, eps: float, zero_centered_gamma: bool
) -> Tensor:
    """Return x's heads normalised and rotated, contiguous, rounded once."""
    wide = torch.promote_types(x.dtype, torch.float32)
    z, weight = x.to(wide), weight.to(wide)
    normed = z * torch.rsqrt(z.square().mean(-1, keepdim=True) + eps) * (weight + 1.0 if zero_centered_gamma else weight)
    return rope_formula(normed, cos, sin, interleaved).to(x.dtype)


def _pairs(x: Tensor, R: int, interleaved: bool) -> tuple[Tensor, ...]:
    """Return views of the first and the second element of each pair."""
    x = x if x.shape[-1] == R else x.narrow(-1, 0, R)
    return x.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else x.chunk(2, -1)


@torch.no_grad()
def rope_blocks(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, back: bool, out: Tensor | None = None) -> Tensor:
    """Return x's heads rotated, or rotated back, in `out` where it is given: that may be x itself.

    Nothing of x's size is allocated except the result.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    R = 2 * cos.shape[-1]
    y = x.new_empty(x.shape) if out is None else out
    S = x.shape[-3] if x.numel() else 0
    step = max(1, _BLOCK * S // x.numel()) if S and x.device.type == "cpu" else max(1, S)
    for first in range(0, S, step):
        count = min(step, S - first)
        block, rotated = x.narrow(-3, first, count), y.narrow(-3, first, count)
        c, s = (table.narrow(-2, first, count).to(wide).unsqueeze(-2) for table in (cos, sin))
        x1, x2 = (half.to(wide) for half in _pairs(block, R, interleaved))
        y1, y2 = _pairs(rotated, R, interleaved)
        first_of_each = (x1 * c).addcmul_(x2, s, value=1 if back else -1)
        y2.copy_((x2 * c).addcmul_(x1, s, value=-1 if back else 1))
        y1.copy_(first_of_each)  # last: x1 may be the same memory, and is read twice
        rest = x.shape[-1] - R
        if rest and y is not x:
            rotated.narrow(-1, R, rest).copy_(block.narrow(-1, R, rest))
    return y


def normed_rope_blocks(
    x: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, interleaved: bool, eps: float, zero_centered_gamma: bool
) -> Tensor:
    """Do what `normed_rope_formula` does, a block of tokens at a time. Autograd keeps the arguments only."""
    tables = [table.expand(*x.shape[:-2], table.shape[-1]) for table in (cos, sin)]
    formula = partial(_of_tokens, shape=x.shape[-2:], interleaved=interleaved, eps=eps, zero_centered_gamma=zero_centered_gamma)
    y: Tensor = run_formula(formula, "input", x.flatten(-2), shared=(weight,), per_row=tuple(tables))
    return y.view(x.shape)


def _of_tokens(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, shape: torch.Size, **options: Any) -> Tensor:
    return normed_rope_formula(x.unflatten(-1, shape), weight, cos, sin, **options).flatten(-2)
