"""dropout_add's options, and its gradients in plain PyTorch, over blocks of rows on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onepass.kernels.philox import dropout_formula, row_numbers
from onepass.runtime.dispatch import cast

_BLOCK = 1 << 17  # elements


class DropoutOptions(NamedTuple):
    """What dropout_add takes besides tensors."""

    threshold: int  # how many of 65536 elements are dropped
    seed_number: int | None  # the seed where it is no tensor: in plain eager mode on a GPU


def global_rows(x: Tensor, first_row: Tensor | None, threshold: int) -> Tensor | None:
    """The number of each row of x in the whole sequence, or None where nothing is dropped."""
    if not threshold:
        return None
    return row_numbers(x) if first_row is None else row_numbers(x) + first_row.view(())


def backward_formula(
    dy: Tensor, seed: Tensor | None, first_row: Tensor | None, options: DropoutOptions,
    dx_type: torch.dtype | None, dbias_type: torch.dtype | None,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """dx and dbias, each where it has a type. Autograd can differentiate them again."""
    threshold, number = options
    drawn: Any = seed if number is None else number
    wide = torch.float32
    for dtype in (dy.dtype, dx_type, dbias_type):
        wide = wide if dtype is None else torch.promote_types(wide, dtype)
    pieces, sums = [], dy.new_zeros(dy.shape[-1], dtype=wide)
    for dz, rows in _row_blocks(dy, global_rows(dy, first_row, threshold)):
        dz = dz.to(wide)
        if rows is not None:
            dz = dropout_formula(dz, drawn, rows, threshold)
        if dx_type is not None:
            pieces.append(dz.to(dx_type))
        if dbias_type is not None:
            sums = sums + dz.sum(0)
    return (
        None if dx_type is None else torch.cat(pieces).view(dy.shape),
        None if dbias_type is None else cast(sums, dbias_type),
    )


def _row_blocks(dy: Tensor, rows: Tensor | None) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Blocks of dy's rows with their numbers; on a GPU one block of all rows."""
    M, H = prod(dy.shape[:-1]), dy.shape[-1]
    step = max(1, _BLOCK // max(H, 1) if dy.device.type == "cpu" else M)
    dy, rows = dy.reshape(M, H), None if rows is None else rows.view(M)
    for start in range(0, max(M, 1), step):
        yield dy[start : start + step], None if rows is None else rows[start : start + step]
