"""Strides of a tensor of any shape as rows, and how far one tensor lies from another."""

from __future__ import annotations

from torch import Tensor

Groups = tuple[int, int | None, int]  # ROW, GAP, INNER: rows are ROW apart, with a gap after every INNER; None and 0: no gap
_MOST = 128  # rows of a group. Their number is compiled in, which suits a model's heads but not a sequence's length


def as_rows(x: Tensor) -> tuple[Tensor, int]:
    """Return x, or a copy where its rows are not evenly spaced or not contiguous, and the distance from row to row."""
    if x.is_contiguous():
        return x, x.shape[-1]
    levels = _levels(x)
    return (x, levels[0][1]) if len(levels) == 1 else (x.contiguous(), x.shape[-1])


def as_matrix(x: Tensor) -> tuple[Tensor, bool]:
    """Return x as [rows, columns], by `as_rows`, and whether that is a copy."""
    rows, _ = as_rows(x)
    return rows if rows.dim() == 2 else rows.view(x.shape[:-1].numel(), x.shape[-1]), rows is not x


def as_groups(x: Tensor, heads: bool) -> tuple[Tensor, Groups]:
    """Like `as_rows`; with `heads`, also accepts a head-split slice of a fused projection, without copying."""
    if x.is_contiguous():
        return x, (x.shape[-1], None, 0)
    lies = groups_of(x, heads)
    return (x.contiguous(), (x.shape[-1], None, 0)) if lies is None else (x, lies)


def groups_of(x: Tensor, heads: bool) -> Groups | None:
    """Return how x's rows lie, or None where `as_groups` copies them."""
    levels = _levels(x)
    if len(levels) == 1:
        return levels[0][1], None, 0
    if heads and len(levels) == 2 and x.dim() > 3 and levels[1][0] <= _MOST:
        (_, outer), (inner, row) = levels
        return row, outer - inner * row, inner
    return None


def as_grouped_rows(x: Tensor, size: int, group: int) -> tuple[Tensor, int, int]:
    """Return x, or a copy, as rows of `size` in groups of `group` together, and the distances from row to row and group to group.

    The last dimension is a group, and where a row has several, the one before numbers them.
    """
    groups = size // group
    if not x.is_contiguous():
        levels = _levels(x)
        if len(levels) == 1 and (groups == 1 or levels[0][0] % groups == 0):
            return x, levels[0][1] * groups, levels[0][1]
        if len(levels) == 2 and groups > 1 and levels[1][0] == groups:
            return x, levels[0][1], levels[1][1]
        x = x.contiguous()
    return x, size, group


def _levels(x: Tensor) -> list[tuple[int, int]]:
    """Return sizes and strides of x's leading dimensions, merged where evenly spaced, or [] where rows must be copied."""
    levels: list[tuple[int, int]] = []
    for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
        if size == 1:
            continue
        if x.stride(-1) != 1 or stride < x.shape[-1]:  # rows of an expanded tensor overlap
            return []
        if levels and levels[-1][1] == size * stride:
            size *= levels.pop()[0]
        levels.append((size, stride))
    return levels


def distance(tensor: Tensor, base: Tensor) -> int:
    """Return the number of values from base's first to tensor's: a kernel that is given the first of many reaches the others so.

    The interpreter notes which memory a kernel may reach.
    """
    return (tensor.data_ptr() - base.data_ptr()) // tensor.element_size()


def lies_evenly(x: Tensor) -> bool:
    """Whether matrices can be read 16 bytes at a time: they begin at multiples of that, as do all of their rows or columns."""
    strides = x.stride()
    uneven = [stride * x.element_size() % 16 > 0 for stride in strides]
    return x.data_ptr() % 16 == 0 and 1 in strides[-2:] and sum(uneven) == 1
