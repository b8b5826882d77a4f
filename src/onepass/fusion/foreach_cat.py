"""A cat whose parts are written by one kernel. Inductor does this itself only where all parts are copies of inputs.

`mark` marks such a cat in the graph. The mark survives the partition into forward and backward. Before inductor lowers one of
the two graphs, `lower_marked` replaces each marked cat by an operator. Its lowering is the cat's own, plus one step: it registers
the operations that write the parts as a list, as a foreach operator does. A list has no order, and needs none: the parts don't
depend on each other.

A part may be a cat itself, such as the gradient of a gate beside that of its value (`mark_part`). Inductor would write both by
separate kernels and then copy them. Here such a part is one expression, which selects its input by position.
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
_MOST = 8  # inputs of a part that is one expression: each element selects among them


def _cat(parts: Sequence[Tensor], dim: int) -> Tensor:
    return torch.cat(list(parts), dim)


one_launch = registered("one_launch(Tensor[] parts, int dim) -> Tensor", _cat, _cat)
one_part = registered("one_launch_part(Tensor[] parts, int dim) -> Tensor", _cat, _cat)


def mark(cat: Node) -> None:
    cat.meta[_MARK] = True


def mark_part(cat: Node) -> None:
    cat.meta[_PART] = True


def lower_marked(graph: Graph) -> None:
    """Replace the marked cats by operators that inductor lowers into one kernel."""
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
    """Yield the operations that write the parts, and those of nested cats. A list allows only elementwise ones."""
    from torch._inductor.ir import BaseView, ComputedBuffer, ConcatKernel, MutableBox, Pointwise

    while isinstance(part, MutableBox | BaseView):
        part = part.data
    if isinstance(part, ConcatKernel):
        for inner in part.inputs:
            yield from _writers(inner)
    elif isinstance(part, ComputedBuffer) and isinstance(part.data, Pointwise):
        yield part.get_operation_name()
