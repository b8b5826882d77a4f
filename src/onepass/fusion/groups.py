"""Find operators that do the same to many tensors, and replace each group of them by one operator.

Candidates launch the same operator at the same depth, with the same options, on tensors of the same kind. Operators of one depth
can't depend on each other (`graph.depths`). Candidates are split into families by the origin of their operands: slices of one
tensor, results of an earlier group, one tensor that all share, or inputs of the graph. A family's operands then usually are
views of one tensor. Other operands are copied together, where the copy costs less than the launches that it saves (`cost`).
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from onepass.fusion import ragged
from onepass.fusion.cost import LaunchCost
from onepass.fusion.graph import (
    LOOKUPS,
    Depth,
    Emitter,
    NoRule,
    arguments,
    aten,
    backward_nodes,
    depths,
    epochs,
    frozen,
    is_impure,
    is_pointwise,
    is_random,
    is_tangent,
    is_view,
    launches,
    leaves,
    nbytes,
    only_for_backward,
    operands_of,
    readers,
    shape,
    size_key,
    tensor_key,
    value,
)
from onepass.fusion.lanes import Result, Shared, Stacked, concat_lanes
from onepass.fusion.lookups import Lookups
from onepass.fusion.operands import LaneGroup, Listed, Source, ValueLocation, ValueMap, is_shared, kind_of
from onepass.fusion.report import FusedGroup, UnfusedGroup
from onepass.fusion.restore_lanes import RestoreLanes
from onepass.fusion.rules import apply, has_rule, is_multiple
from onepass.fusion.strides import replace

_log = logging.getLogger("onepass.fusion")
_MUCH = 1 << 20  # bytes that a group computed from parameters alone may hold
_FEW = 4  # tensors that a compiler concatenates in one expression, without a kernel for each


@dataclass
class Sweep:
    """One pass over a graph, from its inputs on. `found` has the groups that it fused, `refused` those that it did not."""

    graph: Graph
    machine: LaunchCost
    parameters: set[Node]
    compiled: bool = False  # whether inductor follows, which writes all parts of a cat in one kernel
    found: dict[LaneGroup, FusedGroup] = field(default_factory=dict)
    refused: list[UnfusedGroup] = field(default_factory=list)
    joined: set[Node] = field(default_factory=set)  # cats that are now views of their lanes' memory

    def __post_init__(self) -> None:
        self.emit = Emitter(self.graph)
        self.where = ValueMap(self.parameters, self.compiled)
        self.lookups = Lookups(self.emit, self.where)
        self.listed: set[Node] = set()  # operators of `Listed` groups: the compiler makes one kernel of each group
        self.listed_groups = 0
        self.order = {node: i for i, node in enumerate(self.graph.nodes)}
        self.depth = depths(self.graph)
        self.backward = backward_nodes(self.graph)

    def run(self) -> None:
        by_depth: dict[Depth, list[Node]] = defaultdict(list)
        for node in self.graph.nodes:
            if launches(node) and node.all_input_nodes:
                by_depth[self.depth[node]].append(node)
        epoch, backward = epochs(self.graph), self.backward
        for depth in sorted(by_depth):
            buckets: dict[object, list[Node]] = defaultdict(list)
            for node in by_depth[depth]:
                if node.target is aten.cat.default and self._join(node):
                    continue
                if not is_impure(node):
                    buckets[epoch[node], node in backward, kind_of(node)].append(node)
            for nodes in buckets.values():
                if len(nodes) > 1:
                    self._take(nodes)
        self._refuse_random()
        back = RestoreLanes(self.graph, self.emit, self.where.places, self.order, only_for_backward(self.graph, self.backward))
        back.run()
        self.listed, self.listed_groups = back.together, back.groups
        for group in back.left:
            del self.found[group]

    def _refuse_random(self) -> None:
        """Report random operators as refused. `depths` puts them at different depths, so they are never candidates."""
        by_kind: dict[object, list[Node]] = defaultdict(list)
        for node in self.graph.nodes:
            if is_random(node):
                by_kind[node.target].append(node)
        for nodes in by_kind.values():
            if len(nodes) > 1:
                self._refuse(nodes, "draws random numbers, whose order must stay")

    # ---- families ----

    def _take(self, nodes: list[Node]) -> None:
        if nodes[0].target in LOOKUPS:
            for family in self._families(nodes):
                self._fuse_lookups(family)
            return
        if not has_rule(nodes[0]):
            self._refuse(nodes, "no rule puts this operator's lanes together")
            return
        rest: list[Node] = []
        for family in self._families(nodes):
            if len(family) > 1:
                rest.extend(self._fuse(family))
            else:
                rest.extend(family)
        if len(rest) > 1:
            for alike in _alike(sorted(rest, key=self.order.__getitem__)):
                if len(alike) > 1:
                    self._fuse_equal(alike)

    def _families(self, nodes: list[Node]) -> list[list[Node]]:
        slots = [operands_of(node) for node in nodes]
        keys: list[list[object]] = [[] for _ in nodes]
        for column in zip(*slots, strict=True):
            bases = Counter(self.where.base(operand) for operand in set(column))
            origins = {operand: self.where.origin(operand, bases) for operand in column}
            siblings, uses = Counter(origins.values()), Counter(column)
            fewest = min(uses.values()) if len(uses) > 1 else 0  # a lane may use its own operand in several calls
            for key, operand in zip(keys, column, strict=True):
                alone = siblings[origins[operand]] == 1 or origins[operand] in ("own", "input")
                shared = alone and uses[operand] > max(fewest, 1)
                key.append(("shared", operand) if shared else origins[operand])
        families: dict[object, list[Node]] = defaultdict(list)
        for key, node in zip(keys, nodes, strict=True):
            families[tuple(key)].append(node)
        return [ordered for family in families.values() for ordered in self._in_order(family)]

    def _in_order(self, family: list[Node]) -> list[list[Node]]:
        """Sort the family by the memory order of the first operand that has one.

        Where one operand serves several calls, such as a[i] - b[i] and a[i] - c[i], split the family: one part for each use.
        """
        for column in zip(*map(operands_of, family), strict=True):
            positions = [self.where.position(operand) for operand in column]
            if len(set(positions)) == 1 or None in positions:
                continue
            found: dict[int, list[tuple[int, Node]]] = defaultdict(list)
            times: Counter[int] = Counter()
            for position, node in zip(positions, family, strict=True):
                assert position is not None
                found[times[position]].append((position, node))
                times[position] += 1
            return [[node for _, node in sorted(calls, key=lambda call: call[0])] for calls in found.values()]
        return [family]

    # ---- one group ----

    def _fuse(self, family: list[Node]) -> list[Node]:
        """Fuse the whole family, or its subsets of equal shapes. Return the nodes that were not fused."""
        alike = _alike(family)
        if len(alike) == 1:
            self._fuse_equal(family)
            return []
        if self._fuse_ragged(family):
            return []
        left = []
        for part_of_it in alike:
            if len(part_of_it) == 1 or not self._fuse_equal(part_of_it):
                left.extend(part_of_it)
        return left

    def _fuse_equal(self, nodes: list[Node]) -> bool:
        columns = list(zip(*map(operands_of, nodes), strict=True))
        sources = [self.where.source(list(column)) for column in columns]
        if all(source is not None and is_shared(column) for source, column in zip(sources, columns, strict=True)):
            return False  # equal calls are common subexpressions, which PyTorch removes itself
        if self._holds_weights(nodes, columns):
            self._refuse(nodes, "of weights alone: made together, they would all be held from the beginning on")
            return False
        copied = sum(source.copied for source in sources)
        if self._stays_listed(nodes, sources):
            return self._list(nodes)
        rewrite = ragged.rewrite_of(self, nodes) if copied else None
        if rewrite is not None:
            return self._rewrite(nodes, rewrite, "tensors of their own, one launch", 0)
        if not self.machine.pays(launches_saved=len(nodes) - 1, bytes_copied=copied):
            self._refuse(nodes, f"copying {copied:,} bytes together would cost more than {len(nodes) - 1} launches")
            return False
        how = "copied together" if copied else _how(columns, self.parameters)
        return self._rewrite(nodes, lambda: self._applied(nodes, sources), how, copied)

    def _holds_weights(self, nodes: Sequence[Node], columns: Sequence[Sequence[Node]]) -> bool:
        """Whether these operators read only parameters and hold much memory, as the casts of all weights do under autocast."""
        of_weights = all(is_shared(column) or self.where.parameters.issuperset(column) for column in columns)
        return of_weights and sum(map(nbytes, nodes)) > _MUCH

    def _fuse_ragged(self, nodes: list[Node]) -> bool:
        rewrite = ragged.rewrite_of(self, nodes)
        if rewrite is not None:
            return self._rewrite(nodes, rewrite, "different widths, one launch", 0)
        columns = list(zip(*map(operands_of, nodes), strict=True))
        if not all(is_shared(column) or isinstance(value(column[0]), Tensor) for column in columns):
            self._refuse(nodes, "their widths change from call to call, each in its own way")
            return False
        sources = [self.where.source(list(column), uneven=True) for column in columns]
        copied = sum(source.copied for source in sources)
        if self._stays_listed(nodes, sources):
            return self._list(nodes)
        if not self.machine.pays(launches_saved=len(nodes) - 1, bytes_copied=copied):
            return False
        how = "different widths, copied together" if copied else "different widths, one view"
        return self._rewrite(nodes, lambda: self._applied(nodes, sources), how, copied)

    def _fuse_lookups(self, nodes: list[Node]) -> None:
        if len(nodes) == 1:
            return
        try:
            build, copied = self.lookups.rewrite_of(nodes)
        except NoRule as reason:
            self._refuse(nodes, str(reason))
            return
        if not self.machine.pays(launches_saved=len(nodes) - 1, bytes_copied=copied):
            self._refuse(nodes, f"copying {copied:,} bytes together would cost more than {len(nodes) - 1} launches")
            return
        self._rewrite(nodes, build, "tables side by side, ids copied together" if copied else "tables side by side", copied)

    def _stays_listed(self, nodes: Sequence[Node], sources: Sequence[Source]) -> bool:
        if not self.compiled or not _is_listable(nodes[0]) or not any(source.copied or source.listed for source in sources):
            return False
        whole = all(isinstance(size, int) for node in nodes for size in shape(node))
        return whole and self.machine.small(max(sum(map(nbytes, [node, *node.all_input_nodes])) for node in nodes))

    def _list(self, nodes: list[Node]) -> bool:
        return self._rewrite(nodes, lambda: [Listed(nodes)], "tensors of their own, one launch", 0)

    def _applied(self, nodes: list[Node], sources: Sequence[Source]) -> list[Result]:
        def operand(used: Node, source: Source) -> Any:
            return source.build(self.emit) if isinstance(value(used), Tensor) else used  # a symbolic number

        in_order = iter([operand(used, source) for used, source in zip(operands_of(nodes[0]), sources, strict=True)])
        args, kwargs = map_arg((nodes[0].args, nodes[0].kwargs), lambda _: next(in_order))
        return apply(self.emit, nodes[0], args, kwargs, len(nodes))

    def _rewrite(self, nodes: list[Node], build: Callable[[], list[Any]], how: str, copied: int) -> bool:
        first = min(nodes, key=self.order.__getitem__)
        self.emit.before = first
        try:
            results = build()
            _check(results, nodes[0])
        except NoRule as reason:
            self._refuse(nodes, str(reason))
            return False
        except Exception as error:  # a wrong rule must not break the user's program
            _log.warning("onepass.fuse leaves %s as it is, please report: %r", nodes[0].target, error)
            self._refuse(nodes, f"a rule failed, please report: {error!r}")
            return False
        group = LaneGroup(nodes, results)
        for index, node in enumerate(nodes):
            self.where.places[node] = ValueLocation(group, index, 0)
            if is_multiple(node):
                for user in node.users:
                    self.where.places[user] = ValueLocation(group, index, arguments(user)[1])
        self.found[group] = FusedGroup(_name(nodes[0]), len(nodes), how, copied)
        return True

    def _refuse(self, nodes: list[Node], why: str) -> None:
        self.refused.append(UnfusedGroup(_name(nodes[0]), len(nodes), why))

    # ---- cats of lanes ----

    def _join(self, node: Node) -> bool:
        """Replace each run of lanes in a cat by the tensor that holds them all. Return whether there was such a run."""
        tensors, dim = list(arguments(node)[0]), _cat_dim(node)
        parts: list[Node] = []
        at = 0
        self.emit.before = node
        while at < len(tensors):
            count = self._run_length(tensors[at:])
            whole = self._joined(tensors[at : at + count], dim) if count > 1 else None
            parts.extend([whole] if whole is not None else tensors[at : at + count])
            at += count
        if len(parts) == len(tensors) or (len(parts) == 1 and self._must_own(node, tensors)):
            return False
        if len(parts) == 1:
            self.joined.add(node)
        replace(self.emit, node, parts[0] if len(parts) == 1 else self.emit(aten.cat.default, parts, dim))
        return True

    def _must_own(self, cat: Node, tensors: Sequence[Node]) -> bool:
        """Whether someone could notice that the cat has its lanes' memory.

        A caller may write to what the graph returns, and to its inputs, before backward reads what forward saved.
        """
        leaving = leaves(cat, self.graph.output_node())
        saved = bool(self.backward) and cat not in self.backward
        if not leaving and not saved:
            return False
        roots = {self._memory_of(tensor) for tensor in tensors}
        if any(root.op == "placeholder" and (leaving or not is_tangent(root)) for root in roots):
            return True
        others = {user for root in roots for user in readers(root)} - {cat}
        return bool(others) and ((leaving and saved) or any(user.op == "output" or user in self.joined for user in others))

    def _memory_of(self, node: Node) -> Node:
        """Return the lane, the operator's result or the input that the node is a view of."""
        while is_view(node) and node not in self.where.places:
            viewed = arguments(node)[0]
            if is_multiple(viewed) and not is_view(viewed):
                break  # one of an operator's results
            node = viewed
        return node

    def _run_length(self, tensors: Sequence[Node]) -> int:
        """Return how many of the first tensors have one origin."""
        first, count = self._run_key(tensors[0]), 1
        if first is None:
            return 1
        while count < len(tensors):
            following = self._run_key(tensors[count])
            if following is None or following[0] != first[0]:
                break
            count += 1
        return count

    def _run_key(self, node: Node) -> tuple[object, int] | None:
        position = self.where.position(node)
        return None if position is None else (self.where.origin(node, Counter({self.where.base(node): 2})), position)

    def _joined(self, tensors: list[Node], dim: int) -> Node | None:
        source = self.where.source(tensors, uneven=True)
        if source.copied or source.listed:
            return None
        try:
            operand = source.build(self.emit)
            return None if isinstance(operand, Shared) else concat_lanes(self.emit, operand, dim)
        except NoRule:
            return None


def _check(results: Sequence[Any], node: Node) -> None:
    """Raise NoRule where a result's dtype or shape is not that of the original operators.

    Dtypes can differ because a zero-dimensional tensor has no part in type promotion, but a stack of such tensors does.
    """
    original = value(node)
    for result, expected in zip(results, original if isinstance(original, tuple | list) else [original], strict=False):
        if not isinstance(expected, Tensor) or isinstance(result, Listed):
            continue
        now = value(result.node)
        if now.dtype != expected.dtype:
            raise NoRule(f"together they would be {now.dtype}, and are {expected.dtype}")
        if isinstance(result, Stacked):
            sizes = [size_key(size) for dim, size in enumerate(now.shape) if dim != result.dim]
            if sizes != [size_key(size) for size in expected.shape]:
                raise NoRule("together they would have another shape")


def _is_listable(node: Node) -> bool:
    """Whether the compiler fuses this operator with its neighbours in the lane into one kernel."""
    return is_pointwise(node) or (node.target is aten.cat.default and len(node.all_input_nodes) <= _FEW)


def _alike(nodes: Iterable[Node]) -> list[list[Node]]:
    """Group the nodes by the shapes of their operands and by their other arguments."""
    found: dict[object, list[Node]] = defaultdict(list)
    for node in nodes:
        sizes = tuple(tensor_key(used) if isinstance(value(used), Tensor) else used for used in operands_of(node))
        found[sizes, frozen(map_arg(node.args, lambda _: None))].append(node)
    return list(found.values())


def _how(columns: Sequence[Sequence[Node]], parameters: set[Node]) -> str:
    if any(all(node in parameters for node in column) for column in columns if not is_shared(column)):
        return "weights side by side"
    return "one view, no copy"


def _cat_dim(node: Node) -> int:
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    assert isinstance(dim, int)
    return dim % len(shape(node))


def _name(node: Node) -> str:
    return str(node.target).removeprefix("aten.").removeprefix("prims.").split(".")[0]
