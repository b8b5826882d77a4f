"""The ragged norms of lanes that are columns of one tensor: where each lies follows from their widths.

A call looks at no lane: its tables are the same for every tensor of its shape and strides. With 64 lanes that is most of what a
call of `ragged_norm` costs the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from onepass.kernels.device_tables import device_table, device_zeros
from onepass.kernels.layout import as_rows
from onepass.ops.norm.ragged.kernels import backward_plan, forward_plan
from onepass.ops.norm.ragged.lanes import LanePlan, Lanes, table_of

_MOST_PLANS = 256
_plans: dict[tuple[Any, ...], tuple[LanePlan, tuple[int, ...]]] = {}


def columns_forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, widths: tuple[int, ...], layer: bool, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`ragged_forward` of x's columns, its weights and biases one behind the other; y is as x is."""
    x = as_rows(x)[0]
    key = "forward", x.shape, x.stride(), x.dtype, x.device, widths, layer, eps
    plan, at = _columns_plan(key, (x,), widths, lambda lanes: forward_plan(lanes, layer, eps, True))
    y = x.new_empty(x.shape)
    rstd = x.new_empty((len(widths), plan.M), dtype=torch.float32)
    mean = torch.empty_like(rstd) if layer else None
    if plan.M:
        weight, bias = (None if vector is None else vector.contiguous() for vector in (weight, bias))
        plan.bounds[_lie_evenly(plan, x, weight, bias)](
            plan.grid, x, weight, bias, y, mean, rstd, table_of(plan, x.device), device_table(at, x.device), plan.M
        )
    return y, x.new_empty(0, dtype=torch.float32) if mean is None else mean, rstd


def columns_backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor, widths: tuple[int, ...],
    layer: bool, dweights: bool, dbiases: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`ragged_backward` of columns; dx is as x is."""
    dy, x = as_rows(dy)[0], as_rows(x)[0]
    vector_type = x.dtype if weight is None else weight.dtype
    key = "backward", x.shape, x.stride(), dy.stride(), x.dtype, x.device, widths, layer
    L = len(widths)
    plan, at = _columns_plan(key, (dy, x), widths, lambda lanes: backward_plan(lanes[:L], lanes[L:], layer, True))
    dx = x.new_empty(x.shape)
    make = x.new_empty if plan.M else x.new_zeros
    dweight, dbias = (make(plan.total if asked else 0, dtype=vector_type) for asked in (dweights, dbiases))
    if plan.M:
        weight, means = None if weight is None else weight.contiguous(), mean.contiguous() if layer else None
        partial = arrived = None
        if dweights or dbiases:
            partial = x.new_empty(plan.partials * (dweights + dbiases), dtype=torch.float32)
            arrived = device_zeros(2 * L, x.device)
        plan.bounds[_lie_evenly(plan, dy, x, weight)](
            plan.grid, dy, x, weight, means, rstd.contiguous(), dx, dweight if dweights else None,
            dbias if dbiases else None, partial, arrived, table_of(plan, x.device), device_table(at, x.device), plan.M,
        )  # fmt: skip
    return dx, dweight, dbias


def _columns_plan(
    key: tuple[Any, ...], wholes: tuple[Tensor, ...], widths: tuple[int, ...], make: Callable[[Lanes], LanePlan]
) -> tuple[LanePlan, tuple[int, ...]]:
    """The plan, and the distances of lanes from their whole's first value: of x (after dy's, in backward) and of the vectors."""
    known = _plans.get(key)
    if known is None:
        if len(_plans) >= _MOST_PLANS:
            _plans.clear()
        starts = [0, *accumulate(widths)][:-1]
        lanes = [lane for whole in wholes for lane in whole.split(list(widths), -1)]
        known = _plans[key] = make(lanes), tuple(starts) * 3
    return known


def _lie_evenly(plan: LanePlan, *tensors: Tensor | None) -> bool:
    return plan.aligned and not any(tensor is not None and tensor.data_ptr() % 16 for tensor in tensors)
