"""Slices of one tensor, in one form for split, chunk, unbind, slicing and select."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch.fx import Graph, Node

from onepass.fusion.graph import Emitter, arguments, aten, remove_dead, shape, size_key, value
from onepass.fusion.strides import replace


@dataclass(frozen=True)
class Piece:
    """base[..., start : start + length] along `dim`. `squeezed`: one index of `dim`, without the dimension."""

    base: Node
    dim: int
    start: int
    length: int
    squeezed: bool


def piece_of(node: Node) -> Piece | None:
    """Return the node as a slice, resolved through slices of slices. Return None for other nodes, and for symbolic bounds."""
    piece = _piece_of(node)
    if piece is None or piece.squeezed:
        return piece
    outer = piece_of(piece.base)
    if outer is not None and not outer.squeezed and outer.dim == piece.dim:
        return Piece(outer.base, outer.dim, outer.start + piece.start, piece.length, squeezed=False)
    return piece


def _piece_of(node: Node) -> Piece | None:
    if node.target is operator.getitem:
        source, index = arguments(node)
        return _of_split(source, index)
    if node.target is aten.slice.Tensor:
        return _of_slice(node)
    if node.target is aten.select.int:
        base, dim, index = arguments(node)
        size = shape(base)[dim]
        if not isinstance(index, int) or not isinstance(size, int):
            return None
        return Piece(base, dim % len(shape(base)), index % size, 1, squeezed=True)
    return None


def _of_split(source: Node, index: int) -> Piece | None:
    if source.target not in (aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int):
        return None
    base = arguments(source)[0]
    rank = len(shape(base))
    if source.target is aten.unbind.int:
        dim = _int(source, 1, "dim", 0) % rank
        return Piece(base, dim, index, 1, squeezed=True)
    dim = _int(source, 2, "dim", 0) % rank
    lengths = [piece.shape[dim] for piece in value(source)]
    if not all(isinstance(length, int) for length in lengths):
        return None
    return Piece(base, dim, sum(lengths[:index]), lengths[index], squeezed=False)


def _of_slice(node: Node) -> Piece | None:
    base = arguments(node)[0]
    dim = _int(node, 1, "dim", 0) % len(shape(base))
    start, end, step = (_argument(node, i, name) for i, name in ((2, "start"), (3, "end"), (4, "step")))
    size = shape(base)[dim]
    start, step = 0 if start is None else start, 1 if step is None else step
    if step != 1 or not all(isinstance(n, int) for n in (start, size)) or not (end is None or isinstance(end, int)):
        return None
    first, last, _ = slice(start, end).indices(size)
    return Piece(base, dim, first, max(last - first, 0), squeezed=False)


def _argument(node: Node, place: int, name: str) -> Any:
    return node.args[place] if len(node.args) > place else node.kwargs.get(name)


def _int(node: Node, place: int, name: str, default: int) -> int:
    found = _argument(node, place, name)
    return default if found is None else int(found)


def run_of(pieces: Sequence[Piece | None]) -> bool:
    """Whether these are consecutive slices of one tensor: each begins where the previous one ends."""
    first = pieces[0]
    if first is None:
        return False
    end = first.start
    for piece in pieces:
        if piece is None or piece.start != end:
            return False
        if (piece.base, piece.dim, piece.squeezed) != (first.base, first.dim, first.squeezed):
            return False
        end += piece.length
    return True


def gather_gradients(graph: Graph) -> None:
    """Replace the sum of slices' gradients, each padded with zeros to the whole tensor, by one cat.

    The backward of slicing pads gradients (slice_backward, select_backward), and autograd adds the padded ones. That is as much
    work as the number of slices times the whole tensor. Slices that don't overlap have no two nonzero terms at one element, so a
    cat gives the same numbers.
    """
    emit = Emitter(graph)
    for node in list(graph.nodes):
        if node.target is aten.add.Tensor and not node.kwargs and not _is_inner_sum(node):
            terms, sums = _terms(node)
            for whole in _wholes(terms):
                emit.before = node
                terms = [*(term for term in terms if term not in whole), _cat(emit, whole)]
            if len(terms) < len(sums) + 1:
                emit.before = node
                total = terms[0]
                for term in terms[1:]:
                    total = emit(aten.add.Tensor, total, term)
                replace(emit, node, total)
                remove_dead(graph, [node])


def _is_inner_sum(node: Node) -> bool:
    """Whether the only user of this sum is another sum."""
    users = list(node.users)
    return len(users) == 1 and users[0].target is aten.add.Tensor and not users[0].kwargs and _same(node, users[0])


def _same(node: Node, other: Node) -> bool:
    mine, theirs = value(node), value(other)
    return bool(mine.dtype == theirs.dtype and [size_key(s) for s in mine.shape] == [size_key(s) for s in theirs.shape])


def _terms(node: Node) -> tuple[list[Node], list[Node]]:
    """Return the terms of a tree of sums, and the sums."""
    terms: list[Node] = []
    sums: list[Node] = []
    waiting = [node]
    while waiting:
        current = waiting.pop()
        inner = current.target is aten.add.Tensor and not current.kwargs and (current is node or _is_inner_sum(current))
        if inner and all(isinstance(arg, Node) and _same(arg, node) for arg in current.args):
            sums.append(current)
            waiting.extend(arg for arg in reversed(current.args) if isinstance(arg, Node))
        else:
            terms.append(current)
    return terms, sums


def _padded(node: Node) -> Piece | None:
    """Return a padded gradient as the piece of the whole that it is, with the gradient as its base, or None."""
    if node.target is aten.slice_backward.default:
        gradient, sizes, dim, start, end, step = arguments(node)
        dim %= len(sizes)
        size = sizes[dim]
        if step != 1 or not all(isinstance(n, int) for n in (size, start, end)):
            return None
        first, last, _ = slice(start, end).indices(size)
        return Piece(gradient, dim, first, max(last - first, 0), squeezed=False)
    if node.target is aten.select_backward.default:
        gradient, sizes, dim, index = arguments(node)
        dim %= len(sizes)
        if not isinstance(index, int) or not isinstance(sizes[dim], int):
            return None
        return Piece(gradient, dim, index % sizes[dim], 1, squeezed=True)
    return None


def _wholes(terms: Sequence[Node]) -> list[list[Node]]:
    """Return lists of terms that fit into one tensor, in order: at least two, along one dimension, without overlap."""
    by_dim: dict[int, list[tuple[Piece, Node]]] = {}
    for term in terms:
        padded = _padded(term)
        if padded is not None and len(term.users) == 1:
            by_dim.setdefault(padded.dim, []).append((padded, term))
    found = []
    for placed in by_dim.values():
        placed.sort(key=lambda each: (each[0].start, each[0].length))
        if len(placed) > 1 and all(a.start + a.length <= b.start for (a, _), (b, _) in pairwise(placed)):
            found.append([term for _, term in placed])
    return found


def _cat(emit: Emitter, terms: Sequence[Node]) -> Node:
    parts: list[Node] = []
    end = 0
    whole = value(terms[0])
    dim = 0
    for term in terms:
        piece = _padded(term)
        assert piece is not None
        dim = piece.dim
        if piece.start > end:
            parts.append(_zeros(emit, terms[0], dim, piece.start - end))
        parts.append(emit(aten.unsqueeze.default, piece.base, dim) if piece.squeezed else piece.base)
        end = piece.start + piece.length
    if end < whole.shape[dim]:
        parts.append(_zeros(emit, terms[0], dim, whole.shape[dim] - end))
    return emit(aten.cat.default, parts, dim)


def _zeros(emit: Emitter, like: Node, dim: int, width: int) -> Node:
    whole = value(like)
    sizes: list[int | torch.SymInt] = list(whole.shape)
    sizes[dim] = 1
    sizes = emit.sizes(sizes, like)
    sizes[dim] = width
    return emit(aten.full.default, sizes, 0, dtype=whole.dtype, device=whole.device, pin_memory=False)
