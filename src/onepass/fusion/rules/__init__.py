"""Rules: for each kind of operator, the one call that does to all lanes what the operator did to each."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from onepass.fusion.graph import Emitter, NoRule, is_pointwise, is_view, value
from onepass.fusion.lanes import Flat, Packed, Result
from onepass.fusion.rules import dimensions, norms, products  # noqa: F401  the import registers their rules
from onepass.fusion.rules.call import RULES, LaneCall, Rule
from onepass.fusion.rules.dimensions import PACKED, no_packed_rule
from onepass.fusion.rules.pointwise import flat_pointwise, packed_pointwise, pointwise

__all__ = ["apply", "has_rule", "is_multiple", "rule_of"]


def rule_of(node: Node) -> Rule | None:
    if node.target in RULES:
        return RULES[node.target]
    return pointwise if is_pointwise(node) else None


def apply(emit: Emitter, node: Node, args: Any, kwargs: Any, lanes: int) -> list[Result]:
    """Return the results of a group: one for each output of its operator."""
    rule = rule_of(node)
    if rule is None:
        raise NoRule(f"no rule for {node.target}")
    call = LaneCall(emit, node, tuple(args), dict(kwargs), lanes)
    if any(isinstance(operand, Flat) for operand in call.operands()):
        rule = flat_pointwise if is_pointwise(node) else no_packed_rule
    elif any(isinstance(operand, Packed) for operand in call.operands()):
        rule = PACKED.get(node.target, packed_pointwise if is_pointwise(node) else no_packed_rule)
    return rule(call)


def is_multiple(node: Node) -> bool:
    return isinstance(value(node), tuple | list)


def has_rule(node: Node) -> bool:
    return rule_of(node) is not None and not is_view(node)
