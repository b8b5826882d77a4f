"""The formula of rotary positions, for every type; and the same over blocks of tokens, which is how PyTorch runs it."""

from __future__ import annotations

import torch
from torch import Tensor

_BLOCK = 1 << 18  # numbers at a time: what is widened to fp32 stays in the caches


def rope_formula(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x's heads turned; contiguous."""
    wide = torch.promote_types(x.dtype, torch.float32)
    R = 2 * cos.shape[-1]
    cos, sin = cos.to(wide).unsqueeze(-2), sin.to(wide).unsqueeze(-2)  # the same for all heads
    x1, x2 = (half.to(wide) for half in _pairs(x, R, interleaved))
    turned = x1 * cos - x2 * sin, x2 * cos + x1 * sin
    y = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    rest = x.narrow(-1, R, x.shape[-1] - R)
    return torch.cat([y.to(x.dtype), rest], -1).contiguous()


def _pairs(x: Tensor, R: int, interleaved: bool) -> tuple[Tensor, ...]:
    """The first and the second number of each pair, as views."""
    x = x.narrow(-1, 0, R)
    return x.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else x.chunk(2, -1)


@torch.no_grad()
def rope_blocks(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, back: bool, out: Tensor | None = None
) -> Tensor:  # fmt: skip
    """x's heads turned, or back, with nothing of x's size made but the result, or that in `out`, which may be x itself."""
    wide = torch.promote_types(x.dtype, torch.float32)
    R = 2 * cos.shape[-1]
    y = x.new_empty(x.shape) if out is None else out
    S = x.shape[-3] if x.numel() else 0
    step = max(1, _BLOCK * S // x.numel()) if S and x.device.type == "cpu" else max(1, S)
    for first in range(0, S, step):
        count = min(step, S - first)
        block, turned = x.narrow(-3, first, count), y.narrow(-3, first, count)
        c, s = (table.narrow(-2, first, count).to(wide).unsqueeze(-2) for table in (cos, sin))
        x1, x2 = (half.to(wide) for half in _pairs(block, R, interleaved))
        y1, y2 = _pairs(turned, R, interleaved)
        first_of_each = (x1 * c).addcmul_(x2, s, value=1 if back else -1)
        y2.copy_((x2 * c).addcmul_(x1, s, value=-1 if back else 1))
        y1.copy_(first_of_each)  # not before x1, which may lie there, has been read twice
        rest = x.shape[-1] - R
        if rest and y is not x:
            turned.narrow(-1, R, rest).copy_(block.narrow(-1, R, rest))
    return y
