"""How a tensor of any shape lies as rows."""

from __future__ import annotations

from torch import Tensor

Groups = tuple[int, int | None, int]  # rows lie ROW apart, and after every INNER of them GAP further; None and 0: never
_MOST = 128  # rows of a group: their number is compiled in, as a model's heads may be, but not the length of a sequence


def as_rows(x: Tensor) -> tuple[Tensor, int]:
    """x, or a copy where its rows are not evenly spaced or not contiguous; and the distance from row to row."""
    if x.is_contiguous():
        return x, x.shape[-1]
    levels = _levels(x)
    return (x, levels[0][1]) if len(levels) == 1 else (x.contiguous(), x.shape[-1])


def as_groups(x: Tensor, heads: bool) -> tuple[Tensor, Groups]:
    """As `as_rows`, but where `heads`, rows may also be those of [B, S, heads, D] that is a part of a product's rows."""
    if x.is_contiguous():
        return x, (x.shape[-1], None, 0)
    levels = _levels(x)
    if len(levels) == 1:
        return x, (levels[0][1], None, 0)
    if heads and len(levels) == 2 and x.dim() > 3 and levels[1][0] <= _MOST:
        (_, outer), (inner, row) = levels
        return x, (row, outer - inner * row, inner)
    return x.contiguous(), (x.shape[-1], None, 0)


def _levels(x: Tensor) -> list[tuple[int, int]]:
    """Sizes and strides of x's rows' dimensions, of which neighbours that lie evenly are one; none where rows must be copied."""
    levels: list[tuple[int, int]] = []
    for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
        if size == 1:
            continue
        if x.stride(-1) != 1 or stride < x.shape[-1]:  # overlapping rows are expanded ones
            return []
        if levels and levels[-1][1] == size * stride:
            size *= levels.pop()[0]
        levels.append((size, stride))
    return levels
