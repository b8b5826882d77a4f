"""Norms whose lanes differ in width or lie in separate tensors: one launch forward and one backward (`ragged_norm`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.fx import Node

from onepass.fusion.graph import NORM_SHAPE, Emitter, NoRule, aten, is_norm, is_pointwise, is_view, shape, size_key, value
from onepass.fusion.lanes import Flat, Packed, Result, Stacked, concat_lanes
from onepass.fusion.operands import ValueMap
from onepass.kernels.language import triton_unsupported
from onepass.ops.norm.ragged.ragged_norm import (
    columns_norm_backward,
    columns_norm_forward,
    ragged_norm_backward,
    ragged_norm_forward,
)

# Each forward op: the norm's name, and the position of eps among the op's arguments.
_FORWARD = {aten.native_layer_norm.default: ("layer_norm", 4), aten._fused_rms_norm.default: ("rms_norm", 3)}
_BACKWARD = {aten.native_layer_norm_backward.default: "layer_norm", aten._fused_rms_norm_backward.default: "rms_norm"}
_FAR = 50  # nodes after a lane that `_meet_again` visits to find a cat


class _Sweep(Protocol):
    emit: Emitter
    where: ValueMap


def rewrite_of(sweep: _Sweep, nodes: Sequence[Node]) -> Callable[[], list[Result]] | None:
    """Return a function that replaces these norms by one operator. Return None where the operator would not be one launch."""
    if not is_norm(nodes[0]) or not _fits(nodes):
        return None
    if nodes[0].target in _FORWARD:
        return lambda: _forward(sweep, nodes)
    return lambda: _backward(sweep, nodes)


def _fits(nodes: Sequence[Node]) -> bool:
    xs = [_x(node) for node in nodes]
    if triton_unsupported(value(xs[0])) is not None or len(_sizes(nodes[0])) != 1:
        return False
    lead = [size_key(s) for s in shape(xs[0])[:-1]]
    return all(isinstance(shape(x)[-1], int) and shape(x)[-1] > 0 and [size_key(s) for s in shape(x)[:-1]] == lead for x in xs)


def _x(node: Node) -> Node:
    x = node.args[0 if node.target in _FORWARD else 1]
    assert isinstance(x, Node)
    return x


def _sizes(node: Node) -> Sequence[int]:
    sizes: Any = node.args[NORM_SHAPE[node.target]]
    return list(sizes)


def _forward(sweep: _Sweep, nodes: Sequence[Node]) -> list[Result]:
    emit = sweep.emit
    norm, eps_place = _FORWARD[nodes[0].target]  # type: ignore[index]
    xs = [_x(node) for node in nodes]
    weights = _listed(nodes, 2)
    biases = _listed(nodes, 3) if norm == "layer_norm" else []
    stated = nodes[0].args[eps_place]
    # None is the epsilon of the type that the norm is computed in, not of what it reads
    eps = stated if stated is not None else float(torch.finfo(torch.promote_types(value(xs[0]).dtype, torch.float32)).eps)
    whole = _columns(sweep, xs, weights, biases)
    if whole is not None:
        packed = True
        outputs = emit(columns_norm_forward, *whole, _widths(xs), norm, eps)
    else:
        packed = _meet_again(nodes)
        outputs = emit(ragged_norm_forward, xs, weights, biases, norm, eps, packed)
    y = _lanes(emit, emit.item(outputs, 0), xs, packed)
    stats = [1, 2] if norm == "layer_norm" else [2]
    return [y, *(_statistics(emit, emit.item(outputs, place), xs[0]) for place in stats)]


def _backward(sweep: _Sweep, nodes: Sequence[Node]) -> list[Result]:
    emit = sweep.emit
    norm = _BACKWARD[nodes[0].target]  # type: ignore[index]
    columns: list[list[Any]] = [list(column) for column in zip(*(node.args for node in nodes), strict=True)]
    dys, xs = columns[0], columns[1]
    if norm == "layer_norm":
        means, rstds, weights, mask = columns[3], columns[4], columns[5], columns[7][0]
    else:
        means, rstds, weights, mask = [], columns[3], columns[4], [*columns[5][0], False]
    weights = [] if weights[0] is None else weights
    rstd = _together(sweep, rstds)
    mean = _together(sweep, means) if means else emit(aten.slice.Tensor, emit(aten.view.default, rstd, [-1]), 0, 0, 0)
    asked = bool(mask[1]), bool(mask[2])
    whole_dy = _columns(sweep, dys)
    whole = None if whole_dy is None else _columns(sweep, xs, weights)
    if whole_dy is not None and whole is not None:
        packed = True
        gradients = emit(columns_norm_backward, *whole_dy, *whole, mean, rstd, _widths(xs), norm, *asked)
    else:
        packed = _meet_again(nodes)
        gradients = emit(ragged_norm_backward, dys, xs, weights, mean, rstd, norm, packed, *asked)
    vectors: list[Result] = [Packed(emit.item(gradients, i), 0, tuple(_widths(xs))) for i in (1, 2)]
    return [_lanes(emit, emit.item(gradients, 0), xs, packed), *vectors]


def _columns(sweep: _Sweep, xs: list[Node], *vectors: list[Node]) -> list[Node | None] | None:
    """Return the tensors whose columns are the lanes `xs` and each list of `vectors`.

    An empty list has None for its tensor. Return None where some lanes or vectors lie in separate tensors.
    """
    last = len(shape(xs[0])) - 1
    wholes: list[Node | None] = []
    for nodes in (xs, *vectors):
        if not nodes:
            wholes.append(None)
            continue
        source = sweep.where.source(nodes, uneven=True)
        operand = None if source.copied or source.listed else source.build(sweep.emit)
        if isinstance(operand, Stacked) and nodes is xs and operand.dim == last:
            whole = concat_lanes(sweep.emit, operand, last)
        elif isinstance(operand, Packed) and operand.dim == (last if nodes is xs else 0):
            whole = operand.node
        else:
            return None
        wholes.append(whole)
    return wholes


def _widths(xs: Sequence[Node]) -> list[int]:
    return [int(shape(x)[-1]) for x in xs]


def _listed(nodes: Sequence[Node], place: int) -> list[Any]:
    vectors = [node.args[place] for node in nodes]
    return [] if vectors[0] is None else vectors


def _lanes(emit: Emitter, node: Node, xs: Sequence[Node], packed: bool) -> Result:
    widths, lead = tuple(_widths(xs)), shape(xs[0])[:-1]
    equal = len(set(widths)) == 1
    if packed:
        if equal:
            return Stacked(emit.view(node, [*lead, len(xs), widths[0]]), len(lead))
        return Packed(node, len(lead), widths)
    return Stacked(emit.view(node, [len(xs), *lead, widths[0]]), 0) if equal else Flat(node, tuple(tuple(shape(x)) for x in xs))


def _statistics(emit: Emitter, node: Node, x: Node) -> Stacked:
    """View statistics [lanes, rows] as [lanes, *lead, 1], the shape of ATen's own statistics."""
    lanes = shape(node)[0]
    return Stacked(emit.view(node, [lanes, *shape(x)[:-1], 1]), 0)


def _together(sweep: _Sweep, statistics: list[Node]) -> Node:
    """Return the lanes' statistics, [*lead, 1] each, as one tensor [lanes, rows]."""
    operand = sweep.where.source(statistics).build(sweep.emit)
    if not isinstance(operand, Stacked):
        raise NoRule("statistics of different kinds")
    return sweep.emit.view(operand.moved(sweep.emit, 0).node, [len(statistics), -1])


def _meet_again(nodes: Sequence[Node]) -> bool:
    """Whether the norms should write packed outputs, because a later cat joins the lanes along the last dimension.

    Symbolic sizes need packed outputs too: the offset of a lane in a flat tensor would change with the size.
    """
    if any(not isinstance(size, int) for size in shape(_x(nodes[0]))):
        return True
    waiting, seen = [nodes[0]], {nodes[0]}
    rank = len(shape(_x(nodes[0])))
    while waiting and len(seen) < _FAR:
        for user in waiting.pop().users:
            if user.target is aten.cat.default:
                dim: Any = user.args[1] if len(user.args) > 1 else 0
                return bool(dim % rank == rank - 1)
            if user not in seen and (is_view(user) or is_pointwise(user)):
                seen.add(user)
                waiting.append(user)
    return False
