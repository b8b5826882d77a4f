"""Embedding look-ups as one, in a table of all rows: ids get an offset, and the tables lie side by side in memory.

Tables may differ in rows, not in width. An id outside of its own table would read a neighbour's row. So it becomes an id outside
of all tables, and raises as before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from torch.fx import Node

from onepass.fusion.graph import Emitter, NoRule, arguments, aten, shape, value
from onepass.fusion.lanes import Packed, Result, Shared, Stacked
from onepass.fusion.operands import Source, ValueMap, is_shared
from onepass.fusion.side_by_side import whole_of


@dataclass
class Lookups:
    """The look-ups of one graph. `beside` has, for each table that lies beside others, all of them in order."""

    emit: Emitter
    where: ValueMap
    beside: dict[Node, tuple[Node, ...]] = field(default_factory=dict)
    indices: dict[object, tuple[Node, int]] = field(default_factory=dict)  # which backward shares with forward

    def rewrite_of(self, nodes: Sequence[Node]) -> tuple[Callable[[], list[Result]], int]:
        """Return a function that replaces these look-ups by one, and the bytes that it copies. Raise NoRule with the reason."""
        if nodes[0].target is aten.embedding.default:
            return self._forward(nodes)
        return self._backward(nodes)

    def _forward(self, nodes: Sequence[Node]) -> tuple[Callable[[], list[Result]], int]:
        emit, tables = self.emit, tuple(arguments(node)[0] for node in nodes)
        ids = self._source(nodes, 1)
        if (*arguments(nodes[0]), False, False, False)[4]:
            raise NoRule("sparse gradients, which are a table's own")
        if is_shared(tables):

            def looked_up() -> list[Result]:
                operand = _stacked(emit, ids, len(nodes))
                return [Stacked(emit(aten.embedding.default, tables[0], operand.node), operand.dim)]

            return looked_up, ids.copied
        self._may_be_neighbours(tables)

        def build() -> list[Result]:
            self.beside.update(dict.fromkeys(tables, tables))
            index, dim = self._index(nodes, ids, [int(shape(table)[0]) for table in tables])
            return [Stacked(emit(aten.embedding.default, whole_of(emit, tables, stacked=False), index), dim)]

        return build, ids.copied

    def _may_be_neighbours(self, tables: tuple[Node, ...]) -> None:
        if len(set(tables)) < len(tables):
            raise NoRule("one table is looked up more often than others")
        if not self.where.parameters.issuperset(tables):
            raise NoRule("their tables are no parameters, which fuse could lay side by side")
        if any(self.beside.get(table, tables) != tables for table in tables):
            raise NoRule("a table lies beside those of other look-ups already")

    def _backward(self, nodes: Sequence[Node]) -> tuple[Callable[[], list[Result]], int]:
        """Raise NoRule where a gradient is added to another: it would be held until that one is there, beside all others."""
        emit = self.emit
        if any(user.target is aten.add.Tensor for node in nodes for user in node.users):
            raise NoRule("a table that is used twice adds its gradients one by one")
        gradients, ids = self._source(nodes, 0), self._source(nodes, 1)
        rows: list[Any] = [node.args[2] for node in nodes]
        if not all(isinstance(count, int) for count in rows):
            raise NoRule("tables whose rows change from call to call")
        padding, by_frequency = arguments(nodes[0])[3:5]

        def build() -> list[Result]:
            index, dim = self._index(nodes, ids, rows, padding)
            dy = _stacked(emit, gradients, len(nodes), dim).moved(emit, dim).node
            dtables = emit(aten.embedding_dense_backward.default, dy, index, sum(rows), padding, by_frequency)
            if len(set(rows)) == 1:
                return [Stacked(emit.view(dtables, [len(nodes), rows[0], *shape(dtables)[1:]]), 0)]
            return [Packed(dtables, 0, tuple(rows))]

        known = _index_key(nodes, rows) in self.indices
        return build, gradients.copied + (0 if known else ids.copied)

    def _source(self, nodes: Sequence[Node], place: int) -> Source:
        return self.where.source([arguments(node)[place] for node in nodes])

    def _index(self, nodes: Sequence[Node], ids: Source, rows: Sequence[int], padding: int = -1) -> tuple[Node, int]:
        """Return the ids among the rows of all tables, and the dimension that counts tables.

        Every lane's padding becomes the first lane's, because a look-up has one row of padding.
        """
        key = _index_key(nodes, rows)
        if key not in self.indices:
            self.indices[key] = _offset_ids(self.emit, _stacked(self.emit, ids, len(nodes)), rows)
        index, dim = self.indices[key]
        if padding < 0:
            return index, dim
        emit, behind = self.emit, value(index).dim() - 1 - dim
        paddings = emit.constant([offset + padding for offset in _offsets(rows)], index, behind)
        return emit(aten.where.ScalarSelf, emit(aten.eq.Tensor, index, paddings), padding, index), dim


def _index_key(nodes: Sequence[Node], rows: Sequence[int]) -> object:
    return tuple(node.args[1] for node in nodes), tuple(rows)


def _offset_ids(emit: Emitter, ids: Stacked, rows: Sequence[int]) -> tuple[Node, int]:
    sizes, offsets = (emit.constant(numbers, ids.node, ids.behind) for numbers in (rows, _offsets(rows)))
    inside = emit(aten.bitwise_and.Tensor, emit(aten.ge.Scalar, ids.node, 0), emit(aten.lt.Tensor, ids.node, sizes))
    return emit(aten.where.ScalarOther, inside, emit(aten.add.Tensor, ids.node, offsets), sum(rows)), ids.dim


def _offsets(rows: Sequence[int]) -> list[int]:
    return [0, *accumulate(rows[:-1])]


def _stacked(emit: Emitter, source: Source, lanes: int, dim: int = 0) -> Stacked:
    """Return the tensors of all lanes as one. What all lanes share is repeated along `dim`, without a copy."""
    operand = source.build(emit)
    if isinstance(operand, Shared):
        lone = emit(aten.unsqueeze.default, operand.node, dim)
        return Stacked(emit(aten.expand.default, lone, [-1] * dim + [lanes] + [-1] * (operand.rank - dim)), dim)
    if not isinstance(operand, Stacked):
        raise NoRule("ids or gradients of different shapes")
    return operand
