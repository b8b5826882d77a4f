"""Rules for layer_norm and rms_norm, forward and backward. Each lane has its own weight, bias and gradients of these."""

from __future__ import annotations

import torch
from torch.fx import Node

from onepass.fusion.graph import Emitter, NoRule, aten, value
from onepass.fusion.lanes import Operand, Result, Shared, Stacked
from onepass.fusion.rules.call import LaneCall, laid, rule, several, stacked

_HALVES = (torch.float16, torch.bfloat16)


@rule(aten.native_layer_norm.default)
def _layer_norm(call: LaneCall) -> list[Result]:
    x, sizes, weight, bias, eps = call.args
    emit, x = call.emit, _before(call, x, len(sizes))
    if not isinstance(weight, Stacked) and not isinstance(bias, Stacked):
        norm = emit(aten.native_layer_norm.default, x.node, sizes, _plain(weight), _plain(bias), eps)
        return several(call, norm, x.dim)
    if any(value(operand.node).dtype != value(x.node).dtype for operand in (weight, bias) if operand is not None):
        raise NoRule("a norm with weights of another type, whose statistics have a type that its trace doesn't show")
    norm = emit(aten.native_layer_norm.default, _wide(emit, x.node), sizes, None, None, eps)
    y = _affine(call, emit.item(norm, 0), x, weight, bias)
    statistics = [_cast(emit, emit.item(norm, i), value(call.node)[i].dtype) for i in (1, 2)]
    return [Stacked(y, x.dim), *(Stacked(each, x.dim) for each in statistics)]


@rule(aten._fused_rms_norm.default)
def _rms_norm(call: LaneCall) -> list[Result]:
    x, sizes, weight, eps = call.args
    emit, x = call.emit, _before(call, x, len(sizes))
    if not isinstance(weight, Stacked):
        return several(call, emit(aten._fused_rms_norm.default, x.node, sizes, _plain(weight), eps), x.dim)
    norm = emit(aten._fused_rms_norm.default, _wide(emit, x.node), sizes, None, eps)
    return [Stacked(_affine(call, emit.item(norm, 0), x, weight, None), x.dim), Stacked(emit.item(norm, 1), x.dim)]


@rule(aten.native_layer_norm_backward.default)
def _layer_norm_backward(call: LaneCall) -> list[Result]:
    dy, x, sizes, mean, rstd, weight, _, mask = call.args
    emit, x = call.emit, _before(call, x, len(sizes))
    wide = _wide(emit, x.node)
    gradient, mean, rstd = (_wide(emit, laid(call, operand, x)) for operand in (dy, mean, rstd))
    scaled = gradient if weight is None else emit(aten.mul.Tensor, gradient, _wide(emit, _scale(call, weight, x)))
    back = emit(aten.native_layer_norm_backward.default, scaled, wide, sizes, mean, rstd, None, None, [True, False, False])
    dx = _narrow(emit, emit.item(back, 0), x.node)
    normed = emit(aten.mul.Tensor, emit(aten.sub.Tensor, wide, mean), rstd) if mask[1] else None
    return [Stacked(dx, x.dim), *_of_weights(call, x, gradient, normed, mask[1:])]


@rule(aten._fused_rms_norm_backward.default)
def _rms_norm_backward(call: LaneCall) -> list[Result]:
    dy, x, sizes, rstd, weight, mask = call.args
    emit, x = call.emit, _before(call, x, len(sizes))
    wide = _wide(emit, x.node)
    gradient, rstd = (_wide(emit, laid(call, operand, x)) for operand in (dy, rstd))
    scaled = gradient if weight is None else emit(aten.mul.Tensor, gradient, _wide(emit, _scale(call, weight, x)))
    back = emit(aten._fused_rms_norm_backward.default, scaled, wide, sizes, rstd, None, [True, False])
    normed = emit(aten.mul.Tensor, wide, rstd) if mask[1] else None
    return [Stacked(_narrow(emit, emit.item(back, 0), x.node), x.dim), *_of_weights(call, x, gradient, normed, mask[1:])]


def _of_weights(call: LaneCall, x: Stacked, gradient: Node, normed: Node | None, mask: list[bool]) -> list[Result]:
    """Return each lane's sums over rows: gradient * normed for the weight, and gradient for the bias."""
    normalized = len(call.args[2])
    rows = [dim for dim in range(x.rank + 1 - normalized) if dim != x.dim]
    found: list[Result] = []
    for index, asked in enumerate(mask):
        if not asked:
            found.append(Stacked(gradient, x.dim))  # a placeholder that no node reads
            continue
        terms = gradient if index == 1 or normed is None else call.emit(aten.mul.Tensor, gradient, normed)
        sums = call.emit(aten.sum.dim_IntList, terms, rows) if rows else terms
        like = value(call.node)[1 + index]
        found.append(Stacked(_cast(call.emit, sums, like.dtype), 0))
    return found


def _before(call: LaneCall, operand: Operand, normalized: int) -> Stacked:
    """Return the stacked operand with its lane dimension before the normalized dimensions."""
    x = stacked(operand)
    last = x.rank - normalized
    return x if x.dim <= last else x.moved(call.emit, last)


def _scale(call: LaneCall, weight: Operand, x: Stacked) -> Node:
    """Return the weight, one per lane or shared, in a shape that broadcasts against x."""
    if isinstance(weight, Shared):
        return weight.node
    node = stacked(weight).moved(call.emit, 0).node
    for _ in range(x.behind - (int(value(node).dim()) - 1)):
        node = call.emit(aten.unsqueeze.default, node, 1)
    return node


def _affine(call: LaneCall, normed: Node, x: Stacked, weight: Operand | None, bias: Operand | None) -> Node:
    emit, y = call.emit, normed
    if weight is not None:
        y = emit(aten.mul.Tensor, y, _wide(emit, _scale(call, weight, x)))
    if bias is not None:
        y = emit(aten.add.Tensor, y, _wide(emit, _scale(call, bias, x)))
    return _narrow(emit, y, x.node)


def _plain(operand: Operand | None) -> Node | None:
    return None if operand is None else operand.node


def _wide(emit: Emitter, node: Node) -> Node:
    """Return 16-bit tensors in fp32, because a norm rounds its result once."""
    return _cast(emit, node, torch.float32) if value(node).dtype in _HALVES else node


def _narrow(emit: Emitter, node: Node, like: Node) -> Node:
    return _cast(emit, node, value(like).dtype)


def _cast(emit: Emitter, node: Node, dtype: torch.dtype) -> Node:
    return node if value(node).dtype == dtype else emit(torch.ops.prims.convert_element_type.default, node, dtype)
