"""Where the tensors of a group's operand come from, lane by lane, and how they become one tensor.

Slices that follow one another in a tensor are that tensor, seen another way. Results of a group found before are its result.
Equal views of such lanes are that view of the whole. Parameters are laid side by side in memory. What is none of these is
copied together.
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

from onepass.fusion import foreach_cat, ragged
from onepass.fusion.graph import Emitter, NoRule, arguments, aten, frozen, is_view, nbytes, shape, tensor_key, value
from onepass.fusion.lanes import Flat, Operand, Packed, Result, Shared, Stacked, of_slices, part
from onepass.fusion.pieces import Piece, piece_of, run_of
from onepass.fusion.rules import apply
from onepass.fusion.side_by_side import whole_of

_NEVER = 1 << 62  # bytes


@dataclass(eq=False)
class LaneGroup:
    """Operators that became one, in the order of their lanes, and its results."""

    nodes: list[Node]
    results: list[Result | Listed]


@dataclass(frozen=True)
class ValueLocation:
    """Where a node's value is now."""

    group: LaneGroup
    lane: int
    output: int

    @property
    def result(self) -> Result | Listed:
        return self.group.results[self.output]


@dataclass(eq=False)
class Listed:
    """Lanes that stay operators of their own, because their operands lie apart, and whose results are one tensor.

    The compiler makes one kernel of what writes the parts of a cat (`one_launch`). So a chain of these reads its operands where
    they are and writes each result where it belongs; steps between are no tensors at all.
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
    """Where the tensors of one operand come from, lane by lane, and what it costs to have them in one."""

    build: Callable[[Emitter], Operand]
    copied: int = 0  # bytes that must be copied together first
    listed: bool = False


class ValueMap:
    """Where the values of a graph's nodes are while it is being rewritten."""

    def __init__(self, parameters: set[Node], compiled: bool) -> None:
        self.parameters = parameters
        self.compiled = compiled
        self.places: dict[Node, ValueLocation] = {}

    # ---- what tensors have in common ----

    def base(self, node: Node) -> object:
        piece = piece_of(node)
        if piece is not None:
            return "slice", piece.base, piece.dim, piece.squeezed
        return ("view", node.target, self.base(_viewed(node))) if is_view(node) and node not in self.places else None

    def origin(self, node: Node, bases: Counter[object]) -> object:
        """What the operands of a family have in common."""
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
        """One tensor for those of all lanes: one that is there already, or a copy."""
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
            copied = _NEVER  # each would be a copy of its own first
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
        """Equal views of the lanes of something: the same view of all of it."""
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
        """The same slice of each lane of something: that slice of all of it."""
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
    """What calls must have in common, their tensors' sizes aside, to be one."""
    args, kwargs = map_arg((ragged.masked(arguments(node), node), node.kwargs), _slot_kind)
    return node.target, frozen(args), frozen(kwargs)


class _TensorKind(tuple[object, ...]):
    """A tensor's kind in the place of the tensor."""


def _slot_kind(node: Node) -> Any:
    tensor = value(node)
    return _TensorKind((tensor.dtype, tensor.device, tensor.dim())) if isinstance(tensor, Tensor) else node


def is_shared(nodes: Sequence[Node]) -> bool:
    return all(node is nodes[0] for node in nodes)


def _viewed(node: Node) -> Node:
    base: Node = arguments(node)[0]
    return base


def _between(last: Node, first: Sequence[Node]) -> set[Node]:
    """The nodes by which `last` was made of the first ones."""
    found, waiting = set(), [last]
    while waiting:
        node = waiting.pop()
        if node not in first and node not in found:
            found.add(node)
            waiting.extend(node.all_input_nodes)
    return found


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
