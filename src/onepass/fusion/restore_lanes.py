"""The end of a sweep: each remaining user of one lane gets a view of the group's tensor."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import Graph, Node

from onepass.fusion import foreach_cat
from onepass.fusion.graph import Emitter, NoRule, aten, is_pointwise, is_reduction, is_view, leaves, remove_dead, shape, value
from onepass.fusion.lanes import Flat, Stacked, lane
from onepass.fusion.operands import LaneGroup, Listed, ValueLocation
from onepass.fusion.rules import is_multiple
from onepass.fusion.strides import replace


class RestoreLanes:
    def __init__(
        self, graph: Graph, emit: Emitter, places: dict[Node, ValueLocation], order: dict[Node, int], backward: set[Node]
    ) -> None:
        self.graph, self.emit, self.places, self.order, self.backward = graph, emit, places, order, backward
        self.together: set[Node] = set()  # operators and cats of `Listed` groups: the compiler makes one kernel of a group
        self.groups = 0
        self.dissolved: set[Node] = set()  # operators of `Listed` groups that are not fused after all
        self.left: list[LaneGroup] = []  # groups that are not fused after all

    def run(self) -> None:
        groups = list(dict.fromkeys(place.group for place in self.places.values()))
        for group in reversed(groups):
            listed = group.results[0]
            if isinstance(listed, Listed):
                if not self._write_together(listed):
                    self.left.append(group)
                    continue
                self.groups += 1
                self.together |= {*group.nodes, *listed.cats()}
        for group in groups:
            if not isinstance(group.results[0], Listed):
                self._give_back(group)
        remove_dead(self.graph, reversed(list(self.graph.nodes)))

    def _give_back(self, group: LaneGroup) -> None:
        output = self.graph.output_node()
        members = [node for node in group.nodes if not is_multiple(node)]
        members += [user for node in group.nodes if is_multiple(node) for user in node.users]
        outside = [node for node in members if any(user not in self.places for user in node.users)]
        first = self._first(group.nodes)
        self.emit.before = first
        self._lanes_first(group, [node for node in outside if leaves(node, output) and value(node).is_contiguous()])
        for node in outside:
            self.emit.before = first
            place = self.places[node]
            result: Any = place.result
            replace(self.emit, node, lane(self.emit, result, place.lane))

    def _first(self, nodes: Iterable[Node]) -> Node:
        return min(nodes, key=self.order.__getitem__)

    def _write_together(self, listed: Listed) -> bool:
        """Give users outside of the chain views of the whole tensor. Return False where the group is better not fused.

        A cat that joins the lanes needs no views: it is marked instead. If the compiler fuses a user with its lane into one
        kernel, the lanes are better left as separate operators.
        """
        outside = {node: [user for user in node.users if not self._goes_on(node, user, listed)] for node in listed.nodes}
        everybody = {user for users in outside.values() for user in users}
        if not everybody:
            return True
        user = next(iter(everybody))
        if len(everybody) == 1 and user.target is aten.cat.default:
            foreach_cat.mark(user)
            listed.mark_parts()
            return True
        if listed.made is None and any(self._fuses(node, user) for node, users in outside.items() for user in users):
            self.dissolved.update(listed.nodes)
            return False
        self.emit.before = self._first(listed.nodes)
        try:
            whole = listed.whole(self.emit)
        except NoRule:
            return False
        for index, (node, users) in enumerate(outside.items()):
            if users:
                replace(self.emit, node, lane(self.emit, whole, index), only=users.__contains__)
        return True

    def _fuses(self, node: Node, user: Node) -> bool:
        """Whether a compiler fuses the lane with this user, so that it writes no tensor between them."""
        if is_view(user):
            return any(self._fuses(node, behind) for behind in user.users)
        if (user in self.backward) != (node in self.backward):
            return False
        if user in self.places and user not in self.dissolved:
            return False
        return is_pointwise(user) or is_reduction(user)

    def _goes_on(self, node: Node, user: Node, listed: Listed) -> bool:
        """Whether the user is the chain's next step. It must be in the same pass: what forward saves for backward is a tensor."""
        place = self.places.get(user)
        going = place is not None and isinstance(place.result, Listed) and user not in self.dissolved
        going = going and (user in self.backward) == (node in self.backward)
        return going or user in listed.making

    def _lanes_first(self, group: LaneGroup, leaving: list[Node]) -> None:
        """Move the lane dimension to the front for contiguous results that leave the graph, as each must stay so.

        Static sizes allow a one-dimensional result. Of more dimensions a compiler keeps the order of strides, not the strides.
        """
        for output in {self.places[node].output for node in leaving}:
            result = group.results[output]
            if isinstance(result, Stacked) and result.dim > 0 and sum(self.places[n].output == output for n in leaving) > 1:
                moved = result.moved(self.emit, 0).node
                lanes, *sizes = shape(moved)
                if all(isinstance(size, int) for size in sizes):
                    group.results[output] = Flat(self.emit.view(moved, [math.prod([lanes, *sizes])]), (tuple(sizes),) * lanes)
                else:
                    clone = self.emit(aten.clone.default, moved, memory_format=torch.contiguous_format)
                    group.results[output] = Stacked(clone, 0)
