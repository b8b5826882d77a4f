"""What a rule is given and gives, and who has which rule.

A rule gets the call of one lane, its tensors replaced by operands (`lanes`), and gives the results of all. It puts new
operators into the graph and never computes anything: what comes of them is said by PyTorch's own meta functions. A rule that
can't raises NoRule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from onepass.fusion.graph import Emitter, NoRule, aten, value
from onepass.fusion.lanes import Flat, Operand, Packed, Result, Shared, Stacked


@dataclass
class LaneCall:
    """A call of one lane, `node`, with the operands of all lanes in the place of its tensors."""

    emit: Emitter
    node: Node
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    lanes: int

    @property
    def target(self) -> Any:
        return self.node.target

    def operands(self) -> Iterator[Operand]:
        for arg in [*self.args, *self.kwargs.values()]:
            for item in arg if isinstance(arg, list | tuple) else [arg]:
                if isinstance(item, Shared | Stacked | Packed | Flat):
                    yield item


Rule = Callable[[LaneCall], list[Result]]
RULES: dict[object, Rule] = {}


def rule(*targets: object) -> Callable[[Rule], Rule]:
    def register(found: Rule) -> Rule:
        RULES.update(dict.fromkeys(targets, found))
        return found

    return register


# ---- what several rules need ----


def mapped(argument: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(argument, list | tuple):
        return type(argument)(mapped(item, change) for item in argument)
    return change(argument)


def keepdim(call: LaneCall) -> bool:
    """var_mean and var have it by name only; the others third, or by name."""
    if "keepdim" in call.kwargs:
        return bool(call.kwargs["keepdim"])
    return len(call.args) > 2 and bool(call.args[2])


def product(sizes: list[int]) -> int:
    result = 1
    for size in sizes:
        result *= size
    return result


def stacked(operand: Any) -> Stacked:
    if not isinstance(operand, Stacked):
        raise NoRule("its first operand is the same for all lanes")
    return operand


def stacked_at(call: LaneCall, operand: Operand, like: Stacked) -> Node:
    """The operand with its lanes counted where `like` counts them; a lane has as many dimensions in both."""
    if isinstance(operand, Shared):
        lone = call.emit(aten.unsqueeze.default, operand.node, like.dim)
        sizes = [-1] * like.dim + [call.lanes] + [-1] * (operand.rank - like.dim)
        return call.emit(aten.expand.default, lone, sizes)
    return stacked(operand).moved(call.emit, like.dim).node


def laid(call: LaneCall, operand: Operand, like: Stacked) -> Node:
    """`stacked_at`, contiguous: ATen's norm backward takes it to be so without looking, as autograd always makes it so."""
    node = stacked_at(call, operand, like)
    return node if value(node).is_contiguous() else call.emit(aten.clone.default, node, memory_format=torch.contiguous_format)


def beside(dim: int, lane_dim: int) -> int:
    """Where a lane's dimension stands once another, at lane_dim, counts lanes."""
    return dim + (dim >= lane_dim)


def several(call: LaneCall, result: Node, dim: int) -> list[Result]:
    outputs = value(result)
    if isinstance(outputs, tuple | list):
        return [Stacked(call.emit.item(result, i), dim) for i in range(len(outputs))]
    return [Stacked(result, dim)]
