"""The operands of a group: where the tensor of each lane comes from, and how the lanes' tensors become one tensor.

Consecutive slices of a tensor are a view of that tensor. Results of an earlier group are that group's result. Equal views of
such lanes are the same view of the whole. Parameters are packed side by side in memory. All other tensors are copied together.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from onepass.fusion import foreach_cat
from onepass.fusion.graph import (
    LOOKUPS,
    NORM_SHAPE,
    Emitter,
    NoRule,
    arguments,
    aten,
    frozen,
    is_view,
    nbytes,
    shape,
    size_key,
    tensor_key,
    value,
)  # fmt: skip
from onepass.fusion.lanes import Flat, Operand, Packed, Result, Shared, Stacked, of_slices, part
from onepass.fusion.pieces import Piece, piece_of, run_of
from onepass.fusion.rules import apply
from onepass.fusion.side_by_side import whole_of

_NEVER = 1 << 62  # bytes: a copy that never pays


@dataclass(eq=False)
class LaneGroup:
    """Operators that became one, in the order of their lanes, and the results of the one."""

    nodes: list[Node]
    results: list[Result | Listed]


@dataclass(frozen=True)
class ValueLocation:
    """Where a node's value is now: lane `lane` of result `output` of a group."""

    group: LaneGroup
    lane: int
    output: int

    @property
    def result(self) -> Result | Listed:
        return self.group.results[self.output]


@dataclass(eq=False)
class Listed:
    """Lanes that stay separate operators, because their operands lie apart, but whose results become one tensor.

    The compiler writes all parts of a cat in one kernel (`one_launch`). So a chain of these reads its operands in place, and
    writes each result to its place in the cat. No step in between writes a tensor.
    """

    nodes: list[Node]
    made: Stacked | Flat | None = None
    making: set[Node] = field(default_factory=set)

    def whole(self, emit: Emitter) -> Stacked | Flat:
        if self.made is None:
            equal = len({tensor_key(node) for node in self.nodes}) == 1
            self.made = _stacked(emit, self.nodes) if equal else _flattened(emit, self.nodes)
            self.making = _between(self.made.node, self.nodes)
            for cat in self.cats():
                foreach_cat.mark(cat)
            self.mark_parts()
        return self.made

    def mark_parts(self) -> None:
        for node in self.nodes:
            if node.target is aten.cat.default:
                foreach_cat.mark_part(node)

    def cats(self) -> list[Node]:
        return [node for node in self.making if node.target is aten.cat.default]


@dataclass(frozen=True)
class Source:
    """How the lanes' tensors of one operand become one tensor, and what that costs."""

    build: Callable[[Emitter], Operand]
    copied: int = 0  # bytes to copy together first
    listed: bool = False


class ValueMap:
    """Where the values of a graph's nodes are during the rewrite."""

    def __init__(self, parameters: set[Node], compiled: bool) -> None:
        self.parameters = parameters
        self.compiled = compiled
        self.places: dict[Node, ValueLocation] = {}

    # ---- the origin of tensors ----

    def base(self, node: Node) -> object:
        piece = piece_of(node)
        if piece is not None:
            return "slice", piece.base, piece.dim, piece.squeezed
        return ("view", node.target, self.base(_viewed(node))) if is_view(node) and node not in self.places else None

    def origin(self, node: Node, bases: Counter[object]) -> object:
        """Return a key that is equal for the operands of a family."""
        base = self.base(node)
        if base is not None and bases[base] > 1:
            return base
        place = self.places.get(node)
        if place is not None:
            return "group", id(place.group), place.output
        if is_view(node):
            return "view", node.target, self.origin(_viewed(node), bases)
        return "input" if node in self.parameters else "own"

    def position(self, node: Node) -> int | None:
        if node in self.places:
            return self.places[node].lane
        piece = piece_of(node)
        if piece is not None and piece.base not in self.places:
            return piece.start
        return self.position(_viewed(node)) if is_view(node) else None

    # ---- one tensor for all ----

    def source(self, nodes: list[Node], uneven: bool = False) -> Source:
        """Return how the nodes of all lanes become one tensor: an existing one, or a copy."""
        if is_shared(nodes):
            return Source(lambda emit: Shared(nodes[0]))
        known = self._known(nodes)
        if known is not None:
            place = self.places.get(nodes[0])
            return Source(known, listed=place is not None and isinstance(place.result, Listed))
        viewed = self._through_views(nodes)
        if viewed is not None and not viewed.copied:
            return viewed
        if not uneven and all(node in self.parameters for node in nodes):
            return Source(lambda emit: Stacked(whole_of(emit, nodes, stacked=True), 0))
        if uneven and all(node in self.parameters and len(shape(node)) == 1 for node in nodes):
            widths = tuple(int(shape(node)[0]) for node in nodes)
            return Source(lambda emit: Packed(whole_of(emit, nodes, stacked=False), 0, widths))
        copied = sum(map(nbytes, nodes)) or 1
        if uneven and not self.compiled and not all(value(node).is_contiguous() for node in nodes):
            copied = _NEVER  # each lane would be copied before the cat
        return Source(lambda emit: (_flattened if uneven else _stacked)(emit, nodes), copied)

    def _known(self, nodes: list[Node]) -> Callable[[Emitter], Operand] | None:
        places = [self.places.get(node) for node in nodes]
        first = places[0]
        if first is not None:
            whole = first.result
            complete = len(nodes) == len(first.group.nodes)
            together = all(
                p is not None and (p.group, p.output, p.lane) == (first.group, first.output, first.lane + i)
                for i, p in enumerate(places)
            )
            if together and isinstance(whole, Stacked | Packed):
                return lambda emit: part(emit, whole, first.lane, len(nodes))
            if together and complete and isinstance(whole, Flat):
                return lambda emit: whole
            if together and complete and isinstance(whole, Listed):
                return whole.whole
        pieces = [piece_of(node) for node in nodes]
        if run_of(pieces):
            slices: list[Piece] = [piece for piece in pieces if piece is not None]
            start, widths = slices[0].start, [piece.length for piece in slices]
            return lambda emit: of_slices(emit, slices[0].base, slices[0].dim, start, widths, slices[0].squeezed)
        return None

    def _through_views(self, nodes: list[Node]) -> Source | None:
        """Return equal views of lanes as the same view of the whole, or None."""
        if not all(is_view(node) and node not in self.places for node in nodes):
            return None
        pieces = [piece for piece in map(piece_of, nodes) if piece is not None]
        if len(pieces) == len(nodes):
            return self._through_slices(pieces)
        if len({kind_of(node) for node in nodes}) > 1 or len({tensor_key(_viewed(node)) for node in nodes}) > 1:
            return None
        under = self.source([_viewed(node) for node in nodes])

        def build(emit: Emitter) -> Operand:
            inner = under.build(emit)
            rest = nodes[0].args[1:]
            (result,) = apply(emit, nodes[0], (inner, *rest), nodes[0].kwargs, len(nodes))
            assert isinstance(result, Stacked | Packed)
            return result

        return Source(build, under.copied)

    def _through_slices(self, pieces: list[Piece]) -> Source | None:
        """Return equal slices of lanes as the same slice of the whole, or None."""
        first = pieces[0]
        if any((p.dim, p.start, p.length, p.squeezed) != (first.dim, first.start, first.length, first.squeezed) for p in pieces):
            return None
        if len({tensor_key(piece.base) for piece in pieces}) > 1:
            return None
        under = self.source([piece.base for piece in pieces])

        def build(emit: Emitter) -> Operand:
            inner = under.build(emit)
            if not isinstance(inner, Stacked):
                raise NoRule("slices of lanes that differ in width")
            return inner.piece(emit, first.dim, first.start, first.length, first.squeezed)

        return Source(build, under.copied)


def kind_of(node: Node) -> object:
    """Return a key that calls must share to become one. It ignores the sizes of tensors."""
    args, kwargs = map_arg((_without_width(node), node.kwargs), _slot_kind)
    return node.target, frozen(args), frozen(kwargs), _lookup_sizes(node)


def _without_width(node: Node) -> tuple[Any, ...]:
    """Return the arguments with a norm's width or a table's rows masked: those of different sizes may form one group."""
    args: tuple[Any, ...] = arguments(node)
    if node.target is aten.embedding_dense_backward.default:
        return (*args[:2], "rows", *args[3:])
    place = NORM_SHAPE.get(node.target)
    if place is None or len(args[place]) != 1:
        return args
    return (*args[:place], "width", *args[place + 1 :])


def _lookup_sizes(node: Node) -> object:
    """Return the sizes that look-ups of one group share: those of the ids, and the width of a row."""
    if node.target not in LOOKUPS:
        return None
    first, ids = arguments(node)[:2]  # the table or the gradient
    return size_key(shape(first)[-1]), tuple(map(size_key, shape(ids)))


class _TensorKind(tuple[object, ...]):
    """Replaces a tensor in a key: its dtype, device and rank."""


def _slot_kind(node: Node) -> Any:
    tensor = value(node)
    return _TensorKind((tensor.dtype, tensor.device, tensor.dim())) if isinstance(tensor, Tensor) else node


def is_shared(nodes: Sequence[Node]) -> bool:
    return all(node is nodes[0] for node in nodes)


def _viewed(node: Node) -> Node:
    base: Node = arguments(node)[0]
    return base


def _between(last: Node, first: Sequence[Node]) -> set[Node]:
    """Return the nodes that compute `last` from the nodes in `first`, without the latter."""
    between, waiting = set(), [last]
    while waiting:
        node = waiting.pop()
        if node not in first and node not in between:
            between.add(node)
            waiting.extend(node.all_input_nodes)
    return between


def _stacked(emit: Emitter, nodes: list[Node]) -> Stacked:
    if not shape(nodes[0]):
        nodes = [emit(aten.unsqueeze.default, node, 0) for node in nodes]
        return Stacked(emit(aten.cat.default, nodes, 0), 0)
    sizes = shape(nodes[0])
    together = emit(aten.cat.default, nodes, 0)
    return Stacked(emit.view(together, [len(nodes), *sizes]), 0)


def _flattened(emit: Emitter, nodes: list[Node]) -> Flat:
    shapes = [tuple(shape(node)) for node in nodes]
    if any(not isinstance(size, int) for sizes in shapes for size in sizes):
        raise NoRule("lanes of different widths and of sizes that change from call to call")
    flat = [emit.view(node, [math.prod(sizes)]) for node, sizes in zip(nodes, shapes, strict=True)]
    return Flat(emit(aten.cat.default, flat, 0), tuple(shapes))
