"""A cat whose parts one kernel writes: what inductor does of itself only where all parts are copies of inputs.

`mark` says in the graph which cats these are, and the mark survives the cut into forward and backward. Before inductor lowers
a half, `lower_marked` makes each of them an operator whose lowering is the cat's own, followed by one line: what writes its
parts is a list of operations like that of a foreach operator. Between lists no order is lost: the parts don't depend on one
another.

A part may be a cat itself, such as a gate's gradient beside that of what it gates (`mark_part`). Inductor would have the two
written by kernels of their own and then copied: here such a part is one expression, which looks where it is.
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

_MARK, _PART = "onepass_one_launch", "onepass_one_launch_part"
_MOST = 8  # inputs of a part that is one expression: each element is looked for among them


def _cat(parts: Sequence[Tensor], dim: int) -> Tensor:
    return torch.cat(list(parts), dim)


one_launch = registered("one_launch(Tensor[] parts, int dim) -> Tensor", _cat, _cat)
one_part = registered("one_launch_part(Tensor[] parts, int dim) -> Tensor", _cat, _cat)


def mark(cat: Node) -> None:
    cat.meta[_MARK] = True


def mark_part(cat: Node) -> None:
    cat.meta[_PART] = True


def lower_marked(graph: Graph) -> None:
    """Make the marked cats what inductor lowers into one kernel."""
    for node in graph.find_nodes(op="call_function", target=aten.cat.default):
        parts, *dim = node.args
        if _MARK in node.meta or (_PART in node.meta and len(parts) <= _MOST):
            _register_lowering()
            node.target = one_launch if _MARK in node.meta else one_part
            node.args = parts, dim[0] % node.meta["val"].dim() if dim else 0


@functools.cache
def _register_lowering() -> None:
    from torch._inductor.lowering import lowerings, pointwise_cat, register_lowering

    def lowered(parts: Any, dim: int) -> Any:
        made = lowerings[aten.cat.default](parts, dim)
        _list(made)
        return made

    register_lowering(one_launch, type_promotion_kind=None)(lowered)
    register_lowering(one_part, type_promotion_kind=None)(pointwise_cat)


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
