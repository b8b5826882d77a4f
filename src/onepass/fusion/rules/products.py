"""Rules for matrix products. With one shared right operand: one product of a taller matrix. Otherwise: a batched product."""

from __future__ import annotations

from torch.fx import Node

from onepass.fusion.graph import NoRule, aten, shape
from onepass.fusion.lanes import Operand, Result, Shared, Stacked
from onepass.fusion.rules.call import LaneCall, rule, stacked_at


@rule(aten.mm.default)
def _mm(call: LaneCall) -> list[Result]:
    a, b = call.args
    if isinstance(b, Shared):
        return [Stacked(_taller(call, a, b), 0)]
    return [Stacked(call.emit(aten.bmm.default, stacked_at(call, a, 0), stacked_at(call, b, 0)), 0)]


@rule(aten.addmm.default)
def _addmm(call: LaneCall) -> list[Result]:
    """Return a product with its bias, also where an operand is shared: a product and a sum would round twice."""
    if call.kwargs:
        raise NoRule("addmm with alpha or beta")
    bias, a, b = call.args
    if bias.rank != 1:
        raise NoRule("addmm that adds a matrix")
    if isinstance(b, Shared) and isinstance(bias, Shared):
        return [Stacked(_taller(call, a, b, bias), 0)]
    row = bias.node if isinstance(bias, Shared) else call.emit(aten.unsqueeze.default, stacked_at(call, bias, 0), 1)
    return [Stacked(call.emit(aten.baddbmm.default, row, stacked_at(call, a, 0), stacked_at(call, b, 0)), 0)]


@rule(aten.bmm.default)
def _bmm(call: LaneCall) -> list[Result]:
    a, b = (stacked_at(call, operand, 0) for operand in call.args)
    (lanes, batch, m, k), n = shape(a), shape(b)[-1]
    product = call.emit(aten.bmm.default, call.emit.view(a, [lanes * batch, m, k]), call.emit.view(b, [lanes * batch, k, n]))
    return [Stacked(call.emit.view(product, [lanes, batch, m, n]), 0)]


def _taller(call: LaneCall, a: Operand, b: Shared, bias: Shared | None = None) -> Node:
    """Return the products [lanes, M, N] with a shared right operand, as one product of a taller matrix."""
    left = stacked_at(call, a, 0)
    lanes, m, k = shape(left)
    rows = call.emit.view(left, [lanes * m, k])
    given = (rows, b.node) if bias is None else (bias.node, rows, b.node)
    product = call.emit(aten.mm.default if bias is None else aten.addmm.default, *given)
    return call.emit.view(product, [lanes, m, shape(b.node)[1]])
