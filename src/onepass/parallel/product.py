"""The product of a linear layer, y = x @ weight.T + bias, on one rank or spread over those of a group.

               x of a rank          weight          y of a rank          forward           backward
    alone      [S, ..., K]          [N, K]          [S, ..., N]
    column     [S, ..., K]          [N / ranks, K]  [S, ..., N / ranks]                    dx is summed
      sequence [S / ranks, ..., K]  [N / ranks, K]  [S, ..., N / ranks]  x is gathered     x is gathered again, dx is
                                                                                           summed and each has its part
    row        [S, ..., K / ranks]  [N, K / ranks]  [S, ..., N]          y is summed
      sequence [S, ..., K / ranks]  [N, K / ranks]  [S / ranks, ..., N]  y is summed,      dy is gathered
                                                                         each has its part

Spread by row, the bias is added after the sum. In backward what is sent is on its way while a product is made: x and dx under the
products that need neither, dy under the product of this rank's own rows, which need nobody. Parameters' gradients go where
runtime/main_grad.py says. Operands have one type, autocast's where that is on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from onepass.parallel.collectives import Pending, start_all_gather, start_all_reduce, start_reduce_scatter, with_others
from onepass.runtime.dispatch import bare_apply, cast, once
from onepass.runtime.main_grad import Asked, asked, main_grad_of, vector_gradient, weight_gradient

if TYPE_CHECKING:
    from onepass.parallel.deferred import DeferredWgrad


class Spread(NamedTuple):
    """How a product is spread over the ranks of a group, of which there are several."""

    group: dist.ProcessGroup
    by_row: bool  # each rank has some columns of x, and y is the sum; otherwise some columns of y, and dx is the sum
    sequence: bool  # what all would have alike, x or y, is divided along the first dimension


def spread_over(group: dist.ProcessGroup | None, *, by_row: bool, sequence: bool) -> Spread | None:
    """None where there is nobody to share with."""
    group = with_others(group)
    return None if group is None else Spread(group, by_row, sequence)


def check_divisible(x: Tensor, group: dist.ProcessGroup | None) -> None:
    """Where y is divided along the first dimension: before any product is made."""
    group = with_others(group)
    if group is not None and x.shape[0] % group.size():
        raise ValueError(
            f"x's first dimension must be a multiple of {group.size()}, the size of tp_group, as sequence_parallel divides y "
            f"along it, but x has shape {tuple(x.shape)}"
        )


# ---- pieces, for ops that do something before or after ----


def rows_of(x: Tensor) -> Tensor:
    """[rows, x's last dimension], either of which may be 0."""
    return x if x.dim() == 2 else x.reshape(x.shape[:-1].numel(), x.shape[-1])


def start_whole(x: Tensor, spread: Spread | None) -> Pending:
    """All rows of the x that the product takes."""
    return start_all_gather(x, spread.group) if spread is not None and spread.sequence and not spread.by_row else Pending(x)


def spread_product(x: Tensor, weight: Tensor, bias: Tensor | None, spread: Spread | None) -> Tensor:
    """y of an x in the product's type; parameters are rounded to it."""
    weight, bias = cast(weight, x.dtype), None if bias is None else cast(bias, x.dtype)
    if spread is None:
        return F.linear(x, weight, bias)
    if not spread.by_row:
        return F.linear(start_whole(x, spread).wait(), weight, bias)
    y = _start_sum(F.linear(x, weight), spread).wait()
    return y if bias is None else y + bias


def start_input_gradient(dy: Tensor, weight: Tensor, spread: Spread) -> Pending:
    """dx, before the parameters' gradients are made: by then it is summed."""
    return _start_sum(input_gradient(dy, weight), spread)


def input_gradient(dy: Tensor, weight: Tensor) -> Tensor:
    """This rank's own."""
    return (rows_of(dy) @ weight).view(*dy.shape[:-1], weight.shape[1])


def row_gradients(dy: Tensor, weight: Tensor | None, need_rows: bool, spread: Spread | None) -> tuple[Tensor, Tensor | None]:
    """All rows of dy, where they are needed, and dx where there is a weight, of a product that is spread by row or not at all."""
    if spread is not None and spread.sequence and (need_rows or weight is not None):
        return _whole_output_gradient(dy, weight, spread)
    return dy, None if weight is None else input_gradient(dy, weight)


def _whole_output_gradient(dy: Tensor, weight: Tensor | None, spread: Spread) -> tuple[Tensor, Tensor | None]:
    """dx of this rank's own rows is made while the others come."""
    gathering = start_all_gather(dy, spread.group)
    if weight is None:
        return gathering.wait(), None
    if torch.compiler.is_compiling():  # it has its own mind about what runs when
        whole = gathering.wait()
        return whole, input_gradient(whole, weight)
    own, rank, ranks = rows_of(dy), spread.group.rank(), spread.group.size()
    rows = own.shape[0]
    dx = own.new_empty(rows * ranks, weight.shape[1])
    torch.mm(own, weight, out=dx[rows * rank : rows * (rank + 1)])
    whole = gathering.wait()
    flat = rows_of(whole)
    for first, last in ((0, rows * rank), (rows * (rank + 1), rows * ranks)):
        if first < last:
            torch.mm(flat[first:last], weight, out=dx[first:last])
    return whole, dx.view(*whole.shape[:-1], weight.shape[1])


def start_all_rows(dy: Tensor, x: Tensor, spread: Spread | None) -> tuple[Pending, Pending]:
    """All rows of both, for the weight's gradient: of one of them this rank may have a part."""
    if spread is None or not spread.by_row:
        return Pending(dy), start_whole(x, spread)
    return start_all_gather(dy, spread.group) if spread.sequence else Pending(dy), Pending(x)


def _start_sum(x: Tensor, spread: Spread) -> Pending:
    """x is this rank's own, and written."""
    return (start_reduce_scatter if spread.sequence else start_all_reduce)(x, spread.group)


def postponed(deferred: DeferredWgrad | None, weight: Tensor, wanted: Asked) -> bool:
    """Whether the weight's gradient is not to be made in backward, but kept."""
    return deferred is not None and deferred.takes(weight, wanted)


def products_said(deferred: DeferredWgrad | None) -> str:
    """For `explain`."""
    return "products by cuBLAS" if deferred is None else "products by cuBLAS, the weight's gradient's in flush()"


def leave_graph(deferred: DeferredWgrad | None) -> None:
    """In the forward of a Function that may put a gradient off: a compiled graph has nowhere to keep what it is made of."""
    if deferred is not None and torch.compiler.is_compiling():
        torch._dynamo.graph_break(msg="onepass: a compiled graph can't keep what a deferred gradient is made of")


def column_sums(dy: Tensor) -> Tensor:
    """Of each column, in fp32 or wider: a bias's gradient before it is rounded."""
    return rows_of(dy).sum(0, dtype=torch.promote_types(dy.dtype, torch.float32))


# ---- the whole of it ----


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, spread: Spread | None, deferred: DeferredWgrad | None
    ) -> Tensor:
        leave_graph(deferred)
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad  # once: autograd makes it anew each time
        weight_place = main_grad_of(weight) if needs_weight else None  # not by main_grads_of: 2 us, of a call that takes 20
        bias_place = main_grad_of(bias) if bias is not None and needs_bias else None
        ctx.call = weight, bias, (weight_place, bias_place), spread, deferred
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None)
        return spread_product(x, weight, bias, spread)

    @staticmethod
    @once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        own_weight, own_bias, main_grads, spread, deferred = ctx.call
        wanted_x, wanted_weight, wanted_bias = asked(ctx, True, True, own_bias is not None)
        weight = cast(weight, dy.dtype) if wanted_x is not Asked.NOT else None
        x = x if wanted_weight is not Asked.NOT else None
        dweight = dbias = None
        if postponed(deferred, own_weight, wanted_weight):
            dweight, x = deferred.keep(dy, x, own_weight, main_grads[0], spread), None
        whole_dy, dx, gathering, summing = dy, None, None, None
        if spread is None:
            dx = None if weight is None else input_gradient(dy, weight)
        elif spread.by_row:
            whole_dy, dx = row_gradients(dy, weight, x is not None, spread)
        else:
            gathering = None if x is None else start_whole(x, spread)
            summing = None if weight is None else start_input_gradient(dy, weight, spread)
        if wanted_bias is not Asked.NOT:
            dbias = vector_gradient(column_sums(dy), own_bias, main_grads[1], wanted_bias)
        if x is not None:
            rows = rows_of(whole_dy), rows_of(x if gathering is None else gathering.wait())
            dweight = weight_gradient(*rows, own_weight, main_grads[0], wanted_weight)
        return dx if summing is None else summing.wait(), dweight, dbias, None, None


_apply = bare_apply(_Product)


def linear_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, spread: Spread | None = None, deferred: DeferredWgrad | None = None
) -> Tensor:
    """Of x in the product's type; parameters are rounded to it."""
    y: Tensor = _apply(x, weight, bias, spread, deferred)
    return y
