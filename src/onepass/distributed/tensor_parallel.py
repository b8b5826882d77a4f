"""The product of a linear layer, y = x @ weight.T + bias, on one rank or over those of a group.

               x of a rank          weight          y of a rank          forward           backward
    one rank   [S, ..., K]          [N, K]          [S, ..., N]
    column     [S, ..., K]          [N / ranks, K]  [S, ..., N / ranks]                    dx is summed
      sequence [S / ranks, ..., K]  [N / ranks, K]  [S, ..., N / ranks]  x is gathered     x is gathered again, dx is
                                                                                           summed and each has its part
    row        [S, ..., K / ranks]  [N, K / ranks]  [S, ..., N]          y is summed
      sequence [S, ..., K / ranks]  [N, K / ranks]  [S / ranks, ..., N]  y is summed,      dy is gathered
                                                                         each has its part

Row-parallel layers add the bias after the sum. Backward communicates under its products: x and dx under those that need neither,
dy under the product of this rank's own rows. Operands have one type, autocast's where that is on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from onepass.distributed.collectives import Pending, group_of_several, start_all_gather, start_all_reduce, start_reduce_scatter
from onepass.runtime.dispatch import add_matmul


class TPLayout(NamedTuple):
    """How a product is divided over the ranks of a group of several."""

    group: dist.ProcessGroup
    by_row: bool  # each rank has some columns of x, and y is the sum; otherwise some columns of y, and dx is the sum
    sequence: bool  # the tensor that all would have alike, x or y, is divided along the first dimension

    @property
    def gathers_x(self) -> bool:
        """Whether each rank has some rows of x."""
        return self.sequence and not self.by_row

    @property
    def gathers_dy(self) -> bool:
        """Whether each rank has some rows of dy."""
        return self.sequence and self.by_row


def tp_layout(group: dist.ProcessGroup | None, *, by_row: bool, sequence: bool) -> TPLayout | None:
    """Return the layout, or None where the group has one rank."""
    group = group_of_several(group)
    return None if group is None else TPLayout(group, by_row, sequence)


def check_divisible(x: Tensor, group: dist.ProcessGroup | None) -> None:
    """Raise where y's first dimension can't be divided over the ranks, before any product is made."""
    group = group_of_several(group)
    if group is not None and x.shape[0] % group.size():
        raise ValueError(
            f"x's first dimension must be a multiple of {group.size()}, the size of tp_group, as sequence_parallel divides y "
            f"along it, but x has shape {tuple(x.shape)}"
        )


# ---- pieces, for ops that fuse a product with something else ----


def rows_of(x: Tensor) -> Tensor:
    """View x as [rows, last dimension], either of which may be 0."""
    return x if x.dim() == 2 else x.reshape(x.shape[:-1].numel(), x.shape[-1])


def start_gather(x: Tensor, layout: TPLayout | None) -> Pending:
    """Gather all rows of the x that the product takes."""
    return start_all_gather(x, layout.group) if layout is not None and layout.gathers_x else Pending(x)


Start = Callable[[Tensor, int, Tensor | None], Tensor]  # of rows, y's width and a bias, what a product is added to


def tp_product(x: Tensor, weight: Tensor, bias: Tensor | None, layout: TPLayout | None, start: Start | None = None) -> Tensor:
    """Return y. x has the product's type, and parameters are rounded to it. `start` makes what the product is added to."""
    if weight.dtype is not x.dtype:
        weight = weight.to(x.dtype)
    if bias is not None and bias.dtype is not x.dtype:
        bias = bias.to(x.dtype)
    if layout is None:
        return F.linear(x, weight, bias) if start is None else _started(x, weight, bias, start)
    if not layout.by_row:
        x = start_gather(x, layout).wait()
        return F.linear(x, weight, bias) if start is None else _started(x, weight, bias, start)
    y = start_sum(F.linear(x, weight) if start is None else _started(x, weight, None, start), layout).wait()
    return y if bias is None else y + bias


def _started(x: Tensor, weight: Tensor, bias: Tensor | None, start: Start) -> Tensor:
    if x.dim() == 2:
        return add_matmul(start(x, weight.shape[0], bias), x, weight.t())
    y = start(x, weight.shape[0], bias)
    return add_matmul(y, rows_of(x), weight.t()).view(*x.shape[:-1], -1 if y.numel() else weight.shape[0])


def input_gradient(dy: Tensor, weight: Tensor) -> Tensor:
    """Return this rank's dx."""
    if dy.dim() == 2:
        return dy @ weight  # a view of its own shape takes as long as half a product's launch
    return (rows_of(dy) @ weight).view(*dy.shape[:-1], weight.shape[1])


def row_gradients(dy: Tensor, weight: Tensor | None, need_rows: bool, layout: TPLayout | None) -> tuple[Tensor, Tensor | None]:
    """Return all rows of dy, if needed, and dx, if there is a weight, of a row-parallel product or one on a single rank."""
    if layout is not None and layout.gathers_dy and (need_rows or weight is not None):
        return _gathered_output_gradient(dy, weight, layout)
    return dy, None if weight is None else input_gradient(dy, weight)


def _gathered_output_gradient(dy: Tensor, weight: Tensor | None, layout: TPLayout) -> tuple[Tensor, Tensor | None]:
    """Gather dy, and make dx of this rank's own rows meanwhile."""
    gathering = start_all_gather(dy, layout.group)
    if weight is None:
        return gathering.wait(), None
    if torch.compiler.is_compiling():  # a compiler orders the work itself
        whole = gathering.wait()
        return whole, input_gradient(whole, weight)
    own, rank, ranks = rows_of(dy), layout.group.rank(), layout.group.size()
    rows = own.shape[0]
    dx = own.new_empty(rows * ranks, weight.shape[1])
    torch.mm(own, weight, out=dx[rows * rank : rows * (rank + 1)])
    whole = gathering.wait()
    flat = rows_of(whole)
    for first, last in ((0, rows * rank), (rows * (rank + 1), rows * ranks)):
        if first < last:
            torch.mm(flat[first:last], weight, out=dx[first:last])
    return whole, dx.view(*whole.shape[:-1], weight.shape[1])


def start_gather_rows(dy: Tensor, x: Tensor, layout: TPLayout | None) -> tuple[Pending, Pending]:
    """Gather all rows of dy and x, for the weight's gradient. This rank may have a part of one of them."""
    if layout is None or not layout.by_row:
        return Pending(dy), start_gather(x, layout)
    return start_all_gather(dy, layout.group) if layout.sequence else Pending(dy), Pending(x)


def start_sum(x: Tensor, layout: TPLayout) -> Pending:
    """Sum a product over the ranks: y of a row-parallel layer, dx of a column-parallel one. x is overwritten."""
    return (start_reduce_scatter if layout.sequence else start_all_reduce)(x, layout.group)


def column_sums(dy: Tensor) -> Tensor:
    """Sum each column in fp32 or wider: a bias's gradient before it is rounded."""
    return rows_of(dy).sum(0, dtype=torch.promote_types(dy.dtype, torch.float32))
