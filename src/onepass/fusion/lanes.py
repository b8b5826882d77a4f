"""A group's operands and results: one tensor that holds all lanes, and where the lanes are in it.

A lane is one of the tensors that the one tensor replaces. Lanes of one shape are *stacked*: an extra dimension counts them. It
stands where the lanes lie in memory: slices of 128 columns of x[2048, 2048] are x viewed as [2048, 16, 128], with lanes along
dimension 1. Lanes that differ in one dimension are *packed*: they lie one after another along it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch.fx import Node

from onepass.fusion.graph import Emitter, aten, shape, value


@dataclass(frozen=True)
class Shared:
    """An operand that is one tensor for all lanes."""

    node: Node

    @property
    def rank(self) -> int:
        return int(value(self.node).dim())


@dataclass(frozen=True)
class Stacked:
    """Lanes of one shape. Dimension `dim` of the tensor counts them."""

    node: Node
    dim: int

    @property
    def rank(self) -> int:
        """The number of dimensions of one lane."""
        return int(value(self.node).dim()) - 1

    @property
    def behind(self) -> int:
        """How many dimensions of a lane come after `dim`."""
        return self.rank - self.dim

    def moved(self, emit: Emitter, dim: int) -> Stacked:
        return Stacked(emit.move(self.node, self.dim, dim), dim)

    def piece(self, emit: Emitter, lane_dim: int, start: int, length: int, squeezed: bool) -> Stacked:
        """Return the same slice of each lane. `squeezed`: select one index instead, which drops the dimension."""
        dim = lane_dim + (lane_dim >= self.dim)
        if squeezed:
            return Stacked(emit(aten.select.int, self.node, dim, start), self.dim - (dim < self.dim))
        return Stacked(emit(aten.slice.Tensor, self.node, dim, start, start + length), self.dim)


@dataclass(frozen=True)
class Packed:
    """Lanes that lie one after another along `dim`, with these widths."""

    node: Node
    dim: int
    widths: tuple[int, ...]

    @property
    def rank(self) -> int:
        return int(value(self.node).dim())

    @property
    def offsets(self) -> list[int]:
        return [0, *accumulate(self.widths)]


@dataclass(frozen=True)
class Flat:
    """Contiguous lanes of any shapes, one after another in a one-dimensional tensor."""

    node: Node
    shapes: tuple[tuple[int | torch.SymInt, ...], ...]

    @property
    def rank(self) -> int:
        return len(self.shapes[0])


Operand = Shared | Stacked | Packed | Flat
Result = Stacked | Packed | Flat


def lane(emit: Emitter, result: Result, index: int) -> Node:
    """Return one lane as a view."""
    if isinstance(result, Stacked):
        return emit(aten.select.int, result.node, result.dim, index)
    if isinstance(result, Packed):
        start = sum(result.widths[:index])
        return emit(aten.slice.Tensor, result.node, result.dim, start, start + result.widths[index])
    sizes: list[Any] = [math.prod(shape) for shape in result.shapes]
    start = sum(sizes[:index])
    piece = emit(aten.slice.Tensor, result.node, 0, start, start + sizes[index])
    return emit(aten.view.default, piece, list(result.shapes[index]))


def concat_lanes(emit: Emitter, operand: Stacked | Packed | Flat, dim: int) -> Node | None:
    """Return torch.cat of the lanes along `dim`, or None where that takes a cat."""
    if isinstance(operand, Flat):
        return None
    if isinstance(operand, Packed):
        return operand.node if operand.dim == dim else None
    stacked = operand.moved(emit, dim)
    sizes = shape(stacked.node)
    return emit.view(stacked.node, [*sizes[:dim], sizes[dim] * sizes[dim + 1], *sizes[dim + 2 :]])


def part(emit: Emitter, operand: Stacked | Packed, first: int, count: int) -> Stacked | Packed:
    """Return the operand of `count` lanes from lane `first` on."""
    if isinstance(operand, Stacked):
        if count == shape(operand.node)[operand.dim]:
            return operand
        return Stacked(emit(aten.slice.Tensor, operand.node, operand.dim, first, first + count), operand.dim)
    if count == len(operand.widths):
        return operand
    offsets, widths = operand.offsets, operand.widths[first : first + count]
    piece = emit(aten.slice.Tensor, operand.node, operand.dim, offsets[first], offsets[first + count])
    return Packed(piece, operand.dim, widths)


def of_slices(emit: Emitter, base: Node, dim: int, start: int, widths: Sequence[int], squeezed: bool) -> Stacked | Packed:
    """Return the operand whose lanes are consecutive slices of `base` along `dim`. `squeezed`: a lane is one index of `dim`."""
    length = sum(widths)
    if start != 0 or shape(base)[dim] != length:
        base = emit(aten.slice.Tensor, base, dim, start, start + length)
    if squeezed:
        return Stacked(base, dim)
    if len(set(widths)) > 1:
        return Packed(base, dim, tuple(widths))
    sizes = shape(base)
    return Stacked(emit.view(base, [*sizes[:dim], len(widths), widths[0], *sizes[dim + 1 :]]), dim)
