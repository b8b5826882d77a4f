"""Rules for operators along dimensions: reductions, softmax, cumsum and cat; for views; and for packed lanes."""

from __future__ import annotations

import math
from typing import Any

from onepass.fusion.graph import NoRule, aten, shape, size_key, value
from onepass.fusion.lanes import Packed, Result, Stacked
from onepass.fusion.rules.call import LaneCall, Rule, beside, keepdim, rule, several, stacked, stacked_at


@rule(
    aten.sum.dim_IntList,
    aten.mean.dim,
    aten.amax.default,
    aten.amin.default,
    aten.any.dim,
    aten.all.dim,
    aten.var.correction,
    aten.var_mean.correction,
    aten.logsumexp.default,
    aten.argmax.default,
    aten.argmin.default,
    aten.prod.dim_int,
    aten.sum.default,
    aten.mean.default,
)
def _reduction(call: LaneCall) -> list[Result]:
    x = stacked(call.args[0])
    dims = call.args[1] if len(call.args) > 1 else call.kwargs.get("dim")
    if dims is None and call.target in (aten.argmax.default, aten.argmin.default):
        if keepdim(call):
            raise NoRule("the place in a whole tensor, its dimensions kept")
        flat = call.emit.view(x.moved(call.emit, 0).node, [call.lanes, math.prod(shape(call.node.all_input_nodes[0]))])
        return [Stacked(call.emit(call.target, flat, 1), 0)]
    single = isinstance(dims, int)
    dims = [dims] if isinstance(dims, int) else list(dims or range(x.rank))
    dims = [dim % x.rank for dim in dims] if x.rank else []
    kept = keepdim(call)
    target, moved = call.target, [beside(dim, x.dim) for dim in dims]
    if target is aten.sum.default or target is aten.mean.default:
        if not moved:
            raise NoRule("a sum of a number")
        target = aten.sum.dim_IntList if target is aten.sum.default else aten.mean.dim
        result = call.emit(target, x.node, moved, **call.kwargs)
    elif not moved:
        raise NoRule("a reduction of a number")
    else:
        kwargs = {name: arg for name, arg in call.kwargs.items() if name != "dim"}
        result = call.emit(target, x.node, moved[0] if single else moved, *call.args[2:], **kwargs)
    dim = x.dim if kept else x.dim - sum(d < x.dim for d in moved)
    return several(call, result, dim)


@rule(aten._softmax.default, aten._log_softmax.default, aten.cumsum.default)
def _along_one(call: LaneCall) -> list[Result]:
    x = stacked(call.args[0])
    dim = beside(call.args[1] % x.rank, x.dim)
    return [Stacked(call.emit(call.target, x.node, dim, *call.args[2:], **call.kwargs), x.dim)]


@rule(aten._softmax_backward_data.default, aten._log_softmax_backward_data.default)
def _along_one_backward(call: LaneCall) -> list[Result]:
    output = stacked(call.args[1])
    gradient = stacked_at(call, call.args[0], output.dim)
    dim = beside(call.args[2] % output.rank, output.dim)
    return [Stacked(call.emit(call.target, gradient, output.node, dim, *call.args[3:]), output.dim)]


@rule(aten.cat.default)
def _cat(call: LaneCall) -> list[Result]:
    first = next(operand for operand in call.args[0] if isinstance(operand, Stacked))
    dim = (call.args[1] if len(call.args) > 1 else call.kwargs.get("dim", 0)) % first.rank
    nodes = [stacked_at(call, operand, first.dim) for operand in call.args[0]]
    return [Stacked(call.emit(aten.cat.default, nodes, beside(dim, first.dim)), first.dim)]


# ---- views ----


@rule(aten.view.default, aten._unsafe_view.default)
def _view(call: LaneCall) -> list[Result]:
    """Keep the lane dimension in place if the dimensions before it keep their product. Otherwise move it to the front."""
    x = stacked(call.args[0])
    sizes = list(value(call.node).shape)
    lead = [s for i, s in enumerate(shape(x.node)) if i < x.dim]
    for dim in range(len(sizes) + 1):
        if _same_product(lead, sizes[:dim]):
            return [Stacked(call.emit.view(x.node, [*sizes[:dim], call.lanes, *sizes[dim:]]), dim)]
    front = x.moved(call.emit, 0)
    return [Stacked(call.emit.view(front.node, [call.lanes, *sizes]), 0)]


def _same_product(first: list[Any], second: list[Any]) -> bool:
    left, right = [size_key(s) for s in first if size_key(s) != 1], [size_key(s) for s in second if size_key(s) != 1]
    if left == right:
        return True
    if not all(isinstance(s, int) for s in [*left, *right]):
        return False
    return bool(math.prod(first) == math.prod(second))


@rule(aten.permute.default, aten.transpose.int, aten.t.default)
def _permute(call: LaneCall) -> list[Result]:
    x = stacked(call.args[0])
    order = list(range(x.rank))
    if call.target is aten.permute.default:
        order = [dim % x.rank for dim in call.args[1]]
    elif x.rank > 1:
        a, b = (call.args[1] % x.rank, call.args[2] % x.rank) if call.target is aten.transpose.int else (0, 1)
        order[a], order[b] = order[b], order[a]
    moved = [beside(dim, x.dim) for dim in order]
    moved.insert(x.dim, x.dim)
    return [Stacked(call.emit(aten.permute.default, x.node, moved), x.dim)]


@rule(aten.expand.default)
def _expand(call: LaneCall) -> list[Result]:
    x = stacked(call.args[0]).moved(call.emit, 0)
    sizes = list(value(call.node).shape)
    node = x.node
    for _ in range(len(sizes) - x.rank):
        node = call.emit(aten.unsqueeze.default, node, 1)
    return [Stacked(call.emit(aten.expand.default, node, [call.lanes, *call.emit.sizes(sizes, call.node)]), 0)]


@rule(aten.unsqueeze.default)
def _unsqueeze(call: LaneCall) -> list[Result]:
    x = stacked(call.args[0])
    place = call.args[1] % (x.rank + 1)
    if place <= x.dim:
        return [Stacked(call.emit(aten.unsqueeze.default, x.node, place), x.dim + 1)]
    return [Stacked(call.emit(aten.unsqueeze.default, x.node, place + 1), x.dim)]


@rule(aten.squeeze.dim, aten.squeeze.dims)
def _squeeze(call: LaneCall) -> list[Result]:
    x = stacked(call.args[0])
    dims = [call.args[1]] if isinstance(call.args[1], int) else call.args[1]
    moved = sorted(beside(dim % x.rank, x.dim) for dim in dims)
    gone = [dim for dim in moved if size_key(shape(x.node)[dim]) == 1]
    return [Stacked(call.emit(aten.squeeze.dims, x.node, moved), x.dim - sum(dim < x.dim for dim in gone))]


@rule(aten.slice.Tensor, aten.select.int)
def _slice(call: LaneCall) -> list[Result]:
    x = stacked(call.args[0])
    lane_dim = (call.args[1] if len(call.args) > 1 else 0) % x.rank
    dim = beside(lane_dim, x.dim)
    gone = call.target is aten.select.int and dim < x.dim
    return [Stacked(call.emit(call.target, x.node, dim, *call.args[2:]), x.dim - gone)]


# ---- packed lanes, which differ in width: along the other dimensions ----


def _packed_reduction(call: LaneCall) -> list[Result]:
    x = call.args[0]
    dims = call.args[1] if len(call.args) > 1 else None
    listed = [dims] if isinstance(dims, int) else list(dims or range(x.rank))
    listed = [dim % x.rank for dim in listed]
    if x.dim in listed:
        raise NoRule("a reduction over the dimension in which the lanes differ")
    result = call.emit(call.target, x.node, *call.args[1:], **call.kwargs)
    dim = x.dim if keepdim(call) else x.dim - sum(d < x.dim for d in listed)
    return [Packed(result, dim, x.widths)]


def _packed_permute(call: LaneCall) -> list[Result]:
    x = call.args[0]
    order = [1, 0] if call.target is aten.t.default else [dim % x.rank for dim in call.args[1]]
    return [Packed(call.emit(aten.permute.default, x.node, order), order.index(x.dim), x.widths)]


def no_packed_rule(call: LaneCall) -> list[Result]:
    raise NoRule(f"no rule for {call.target} of lanes that differ in width")


PACKED: dict[object, Rule] = {
    aten.sum.dim_IntList: _packed_reduction,
    aten.mean.dim: _packed_reduction,
    aten.amax.default: _packed_reduction,
    aten.amin.default: _packed_reduction,
    aten.permute.default: _packed_permute,
    aten.t.default: _packed_permute,
}
