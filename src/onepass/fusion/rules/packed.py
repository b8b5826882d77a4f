"""Rules for packed lanes, which differ in width: operators along the other dimensions."""

from __future__ import annotations

from onepass.fusion.graph import NoRule, aten
from onepass.fusion.lanes import Packed, Result
from onepass.fusion.rules.call import LaneCall, Rule, keepdim


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
