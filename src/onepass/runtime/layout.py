"""How a tensor of any shape lies as rows."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor


def as_rows(x: Tensor) -> tuple[Tensor, int]:
    """x, or a copy where its rows are not evenly spaced or not contiguous; and the distance from row to row."""
    if x.is_contiguous():
        return x, x.shape[-1]
    stride = _row_stride(x)
    return (x, stride) if stride else (x.contiguous(), x.shape[-1])


def _row_stride(x: Tensor) -> int:
    """The distance from row to row, or 0 where there is no single one."""
    if x.stride(-1) != 1:
        return 0
    rows = [(size, stride) for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True) if size != 1]
    if not rows or rows[-1][1] < x.shape[-1]:  # overlapping rows (expanded ones) are copied
        return 0
    for (_, outer), (size, inner) in pairwise(rows):
        if outer != size * inner:
            return 0
    return rows[-1][1]
