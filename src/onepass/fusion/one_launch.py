"""A cat whose parts one kernel writes: what inductor does of itself only where all parts are copies of inputs.

`mark` says in the graph which cats these are, and the mark survives the cut into forward and backward. Before inductor lowers
a half, `hand_over` makes each of them an operator whose lowering is the cat's own, followed by one line: what writes its parts is
a list of operations like that of a foreach operator. Between lists no order is lost: the parts don't depend on one another.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from onepass.fusion.graph import aten
from onepass.runtime.dispatch import registered

_MARK = "onepass_one_launch"


def _cat(parts: Sequence[Tensor], dim: int) -> Tensor:
    return torch.cat(list(parts), dim)


one_launch = registered("one_launch(Tensor[] parts, int dim) -> Tensor", _cat, _cat)


def mark(cat: Node) -> None:
    cat.meta[_MARK] = True


def hand_over(graph: Graph) -> None:
    """Make the marked cats what inductor lowers into one kernel."""
    cats = [node for node in graph.find_nodes(op="call_function", target=aten.cat.default) if _MARK in node.meta]
    for node in cats:
        _lowering()
        parts, *dim = node.args
        node.target, node.args = one_launch, (parts, *(dim or [0]))


@functools.cache
def _lowering() -> None:
    """Tell inductor, once."""
    from torch._inductor.lowering import lowerings, register_lowering

    def lowered(parts: Any, dim: int) -> Any:
        made = lowerings[aten.cat.default](parts, dim)
        _list(made)
        return made

    register_lowering(one_launch, type_promotion_kind=None)(lowered)


def _list(made: Any) -> None:
    from torch._inductor.codegen.common import BackendFeature
    from torch._inductor.virtualized import V

    if V.graph.has_feature(made.get_device(), BackendFeature.FOREACH):
        listed = {name for names in V.graph.lists.values() for name in names}
        names = [name for name in _writers(made) if name not in listed]
        if len(names) > 1:
            V.graph.register_operation_list(names)


def _writers(part: Any) -> Iterator[str]:
    """The operations that write what is joined, through cats in the cat; element-wise ones, as a list's must be."""
    from torch._inductor.ir import BaseView, ComputedBuffer, ConcatKernel, MutableBox, Pointwise

    while isinstance(part, MutableBox | BaseView):
        part = part.data
    if isinstance(part, ConcatKernel):
        for inner in part.inputs:
            yield from _writers(inner)
    elif isinstance(part, ComputedBuffer) and isinstance(part.data, Pointwise):
        yield part.get_operation_name()
