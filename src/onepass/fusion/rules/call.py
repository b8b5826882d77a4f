"""The arguments and results of a rule, and the registry of rules.

A rule takes the call of one lane, with operands (`lanes`) in place of its tensors. It returns the results of all lanes. It
inserts operators into the graph and computes nothing: PyTorch's meta functions give the results' shapes and dtypes. A rule that
does not apply raises NoRule.
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
    """The call `node` of one lane, with the operands of all lanes in place of its tensors."""

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

    def emitted(self, change: Callable[[Any], Any]) -> Node:
        """Insert the operator with changed operands."""
        kwargs = {name: _mapped(arg, change) for name, arg in self.kwargs.items()}
        return self.emit(self.target, *_mapped(self.args, change), **kwargs)


def _mapped(argument: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(argument, list | tuple):
        return type(argument)(_mapped(item, change) for item in argument)
    return change(argument)


Rule = Callable[[LaneCall], list[Result]]
RULES: dict[object, Rule] = {}


def rule(*targets: object) -> Callable[[Rule], Rule]:
    def register(found: Rule) -> Rule:
        RULES.update(dict.fromkeys(targets, found))
        return found

    return register


# ---- helpers of several rules ----


def keepdim(call: LaneCall) -> bool:
    """Return the call's keepdim. var_mean and var take it as a keyword only, others also as the third argument."""
    if "keepdim" in call.kwargs:
        return bool(call.kwargs["keepdim"])
    return len(call.args) > 2 and bool(call.args[2])


def stacked(operand: Any) -> Stacked:
    if not isinstance(operand, Stacked):
        raise NoRule("its first operand is the same for all lanes")
    return operand


def stacked_at(call: LaneCall, operand: Operand, dim: int) -> Node:
    """Return the operand with its lane dimension at `dim`. What all lanes share is expanded."""
    if isinstance(operand, Shared):
        lone = call.emit(aten.unsqueeze.default, operand.node, dim)
        return call.emit(aten.expand.default, lone, [-1] * dim + [call.lanes] + [-1] * (operand.rank - dim))
    return stacked(operand).moved(call.emit, dim).node


def laid(call: LaneCall, operand: Operand, like: Stacked) -> Node:
    """Return `stacked_at`, contiguous. ATen's norm backward assumes it without a check, because autograd guarantees it."""
    node = stacked_at(call, operand, like.dim)
    return node if value(node).is_contiguous() else call.emit(aten.clone.default, node, memory_format=torch.contiguous_format)


def beside(dim: int, lane_dim: int) -> int:
    """Return where a lane's dimension is in a tensor whose dimension `lane_dim` counts lanes."""
    return dim + (dim >= lane_dim)


def several(call: LaneCall, result: Node, dim: int) -> list[Result]:
    outputs = value(result)
    if isinstance(outputs, tuple | list):
        return [Stacked(call.emit.item(result, i), dim) for i in range(len(outputs))]
    return [Stacked(result, dim)]
