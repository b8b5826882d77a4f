"""embedding's gradient by its weight: returned, or added to main_grad's rows that were looked up."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from onepass.gradients.main_grad import GradientKind, GradRequest, as_op, overwrite_main_grad, put_gradient
from onepass.gradients.releasable_storage import ensure_written, is_first_write, mark_written
from onepass.ops.embedding.backward import sum_rows
from onepass.runtime.dispatch import registered
from onepass.runtime.op import Registered


def rows_gradient(
    dy: Tensor, rows: Tensor | None, order: Tensor | None, weight: Tensor, main_grad: Tensor | None, request: GradRequest
) -> Tensor | None:
    """Put the gradient of `weight[rows]` by weight where it belongs, and return what autograd gets. dy is [M, H].

    By the kernel where `order` is given, the words of forward.py; else by PyTorch, of rows [M]. Rows are summed in fp32 or wider,
    always in the same order. A narrower gradient is rounded once.
    """
    return put_gradient(_ROWS, (dy, rows, order), weight, main_grad, request)


def add_rows(
    main_grad: Tensor, dy: Tensor, rows: Tensor | None, order: Tensor | None = None, *, keep_scratch: bool = True
) -> None:
    """Add dy to main_grad[rows], with fp32 sums, without atomics on floats and without waiting for a GPU."""
    if order is not None:
        first = is_first_write(main_grad)
        if first:
            main_grad.zero_()
        sum_rows(dy, order, main_grad, not first, keep_scratch)
        if first:
            mark_written(main_grad)
    elif rows is not None:
        _add_rows(ensure_written(main_grad), dy, rows)


def _add_rows(main_grad: Tensor, dy: Tensor, rows: Tensor) -> None:
    if not rows.shape[0]:
        return
    if main_grad.dtype in (torch.float32, torch.float64):
        _add_in_order(main_grad, rows, dy.to(main_grad.dtype))
        return
    rows, order = rows.sort(stable=True)
    new = torch.ones_like(rows)
    new[1:] = rows[1:] != rows[:-1]
    which = new.cumsum(0) - 1  # index among the distinct rows
    sums = torch.zeros(dy.shape, dtype=torch.float32, device=dy.device)
    _add_in_order(sums, which, dy[order].float())
    # written once for each occurrence of a row, with the same value
    main_grad.index_copy_(0, rows, (main_grad[rows].float() + sums[which]).to(main_grad.dtype))


def _add_in_order(total: Tensor, rows: Tensor, values: Tensor) -> None:
    if total.is_cuda:
        total.index_put_((rows,), values, accumulate=True)  # sorts. index_add_ is atomic on a GPU, this one on a CPU
    else:
        total.index_add_(0, rows, values)


def _write(zeros: Tensor, dy: Tensor, rows: Tensor | None, order: Tensor | None, keep_scratch: bool) -> None:
    """Write the gradient over zeros."""
    if order is None:
        add_rows(zeros, dy, rows)
    else:
        sum_rows(dy, order, zeros, False, keep_scratch)


# ---- registered ops ----


def _returned(
    dy: Tensor, rows: Tensor | None, order: Tensor | None, weight: Tensor, *, keep_scratch: bool = True
) -> Tensor:
    dweight = torch.zeros_like(weight)
    _write(dweight, dy, rows, order, keep_scratch)
    return dweight


def _overwrite(dy: Tensor, rows: Tensor | None, order: Tensor | None, weight: Any, *, keep_scratch: bool = True) -> Tensor:
    return overwrite_main_grad(weight, lambda main_grad: _write(main_grad.zero_(), dy, rows, order, keep_scratch))


def _like_weight(dy: Tensor, rows: Tensor | None, order: Tensor | None, weight: Tensor) -> Tensor:
    return torch.empty_like(weight)


_OPERANDS = "Tensor dy, Tensor? rows, Tensor? order, Tensor weight"
_returned_op = Registered(
    f"embedding_gradient({_OPERANDS}) -> Tensor", _returned, _like_weight, dispatched=partial(_returned, keep_scratch=False)
)
_add_op = registered(
    f"add_rows_gradient(Tensor(a!) main_grad, {_OPERANDS}) -> ()",
    as_op(partial(add_rows, keep_scratch=False)),
    lambda *_: None,
)
_overwrite_op = registered(
    f"overwrite_rows_gradient({_OPERANDS}) -> Tensor", partial(_overwrite, keep_scratch=False), _like_weight
)
_ROWS = GradientKind(_returned_op, _overwrite, _overwrite_op, add_rows, _add_op)
