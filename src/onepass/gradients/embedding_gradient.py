"""main_grad of an embedding's weight: the gradient of a lookup is added to the rows that were looked up."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onepass.gradients.main_grad import GradientKind, GradRequest, as_op, overwrite_main_grad, put_gradient
from onepass.gradients.releasable_storage import ensure_written
from onepass.runtime.dispatch import registered
from onepass.runtime.op import Registered


def rows_gradient(dy: Tensor, ids: Tensor, weight: Tensor, main_grad: Tensor | None, request: GradRequest) -> Tensor | None:
    """Put the gradient of `weight[ids]` by weight where it belongs, and return what autograd gets. dy is [M, K], ids [M].

    Rows of one id are summed in fp32 or wider, in their order. A narrower gradient is rounded once.
    """
    return put_gradient(_ROWS, (dy, ids), weight, main_grad, request)


def add_rows(main_grad: Tensor, dy: Tensor, ids: Tensor) -> None:
    """Add dy to main_grad[ids], with fp32 sums, without atomics and without waiting for a GPU."""
    main_grad = ensure_written(main_grad)
    if main_grad.dtype in (torch.float32, torch.float64):
        _add_in_order(main_grad, ids, dy.to(main_grad.dtype))
        return
    if not ids.shape[0]:
        return
    ids, order = ids.sort(stable=True)
    new = torch.ones_like(ids)
    new[1:] = ids[1:] != ids[:-1]
    which = new.cumsum(0) - 1  # index among the distinct ids
    sums = torch.zeros(dy.shape, dtype=torch.float32, device=dy.device)
    _add_in_order(sums, which, dy[order].float())
    # written once for each occurrence of an id, with the same value
    main_grad.index_copy_(0, ids, (main_grad[ids].float() + sums[which]).to(main_grad.dtype))


def _add_in_order(total: Tensor, ids: Tensor, rows: Tensor) -> None:
    if total.is_cuda:
        total.index_put_((ids,), rows, accumulate=True)  # sorts. index_add_ is atomic on a GPU, this one on a CPU
    else:
        total.index_add_(0, ids, rows)


def _scatter(dy: Tensor, ids: Tensor, weight: Tensor) -> Tensor:
    dweight = torch.zeros_like(weight)
    add_rows(dweight, dy, ids)
    return dweight


def _overwrite_rows(dy: Tensor, ids: Tensor, weight: Any) -> Tensor:
    return overwrite_main_grad(weight, lambda main_grad: add_rows(main_grad.zero_(), dy, ids))


_lookup_gradient = Registered(
    "scattered_gradient(Tensor dy, Tensor ids, Tensor weight) -> Tensor",
    _scatter,
    lambda dy, ids, weight: torch.empty_like(weight),
)
_add_rows_op = registered(
    "add_rows_gradient(Tensor(a!) main_grad, Tensor dy, Tensor ids, Tensor weight) -> ()",
    as_op(add_rows),
    lambda *_: None,
)
_overwrite_rows_op = registered(
    "overwrite_rows_gradient(Tensor dy, Tensor ids, Tensor weight) -> Tensor",
    _overwrite_rows,
    lambda dy, ids, weight: torch.empty_like(weight),
)
_ROWS = GradientKind(_lookup_gradient, _overwrite_rows, _overwrite_rows_op, add_rows, _add_rows_op)
