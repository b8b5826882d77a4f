"""Rules for elementwise operators on stacked, packed and flat lanes."""

from __future__ import annotations

from typing import Any

import torch

from onepass.fusion.graph import NoRule, aten, shape, size_key, value
from onepass.fusion.lanes import Flat, Packed, Result, Shared, Stacked
from onepass.fusion.rules.call import LaneCall


def pointwise(call: LaneCall) -> list[Result]:
    """Align the lane dimensions. Operands broadcast from the right, so all need the same number of dimensions after it."""
    rank = int(value(call.node).dim())
    operands = list(call.operands())
    stacked = [operand for operand in operands if isinstance(operand, Stacked)]
    numbers = any(operand.rank == 0 for operand in stacked)
    if numbers and value(call.node).dtype == torch.bool and len({value(operand.node).dtype for operand in operands}) > 1:
        raise NoRule("numbers of another type, in which their stack would be compared")
    largest = max(stacked, key=lambda operand: (operand.rank, -operand.dim))
    behind = largest.behind if largest.rank == rank else rank

    def aligned(operand: Any) -> Any:
        if isinstance(operand, Shared):
            if operand.rank <= behind:
                return operand.node
            return call.emit(aten.unsqueeze.default, operand.node, operand.rank - behind)
        if not isinstance(operand, Stacked):
            return operand
        node = operand.node
        if operand.behind == behind:
            return node
        if operand.rank >= behind:
            return call.emit.move(node, operand.dim, operand.rank - behind)
        node = call.emit.move(node, operand.dim, 0)
        for _ in range(behind - operand.rank):
            node = call.emit(aten.unsqueeze.default, node, 1)
        return node

    return [Stacked(call.emitted(aligned), rank - behind)]


def packed_pointwise(call: LaneCall) -> list[Result]:
    rank = int(value(call.node).dim())
    operands = list(call.operands())
    packed = [operand for operand in operands if isinstance(operand, Packed)]
    behind = {(operand.rank - operand.dim, operand.widths) for operand in packed}
    if len(behind) != 1 or any(isinstance(operand, Stacked) for operand in operands):
        raise NoRule("operands of different widths lie in different ways")
    place = packed[0].rank - packed[0].dim
    for operand in operands:
        if isinstance(operand, Shared) and operand.rank >= place and size_key(shape(operand.node)[-place]) != 1:
            raise NoRule("an operand that all lanes share has their width")
    return [Packed(call.emitted(_whole), rank - place, packed[0].widths)]


def flat_pointwise(call: LaneCall) -> list[Result]:
    """Apply the operator to the flat tensor. Elementwise operators do not depend on where rows end."""
    operands = list(call.operands())
    flat = [operand for operand in operands if isinstance(operand, Flat)]
    if any(operand.shapes != flat[0].shapes for operand in flat) or any(
        not isinstance(operand, Flat) and not (isinstance(operand, Shared) and operand.rank == 0) for operand in operands
    ):
        raise NoRule("operands of different widths lie in different ways")
    if list(value(call.node).shape) != list(flat[0].shapes[0]):
        raise NoRule("an operand of different widths is broadcast")
    return [Flat(call.emitted(_whole), flat[0].shapes)]


def _whole(operand: Any) -> Any:
    return operand.node if isinstance(operand, Shared | Packed | Flat) else operand
