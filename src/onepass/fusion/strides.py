"""Tensors whose strides fusion changes: which users accept the new strides, and which get a copy with the old ones.

A lane of a whole is a view with the whole's strides, where its operator returned a dense tensor. Most operators accept any
strides, and some pass them on to their results. A view may be possible only with the old strides. An operator outside of
PyTorch, a random one, or the graph's output may depend on them. `replace` notes the old strides, and `settle` then walks the
graph once: it traces again what accepts new strides, and copies for what doesn't.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import SymInt, Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from onepass.fusion.graph import Emitter, arguments, aten, can_be_viewed, is_pointwise, is_random, is_view, size_key, value
from onepass.fusion.rules import is_multiple, rule_of
from onepass.ops.norm.ragged.ragged_norm import (
    columns_norm_backward,
    columns_norm_forward,
    ragged_norm_backward,
    ragged_norm_forward,
)

_TRACED = "onepass_traced"  # in a node's meta: the tensor that its users were traced with
_ASSUMES_CONTIGUOUS = {aten.native_layer_norm_backward.default, aten._fused_rms_norm_backward.default}
# Operators without rules that accept any strides. Not all of ATen does: some kernels assume contiguous inputs, because their
# callers call contiguous(). Where the input was contiguous already, that call is not in the graph.
_ACCEPTS_ANY = {
    ragged_norm_forward,
    ragged_norm_backward,
    columns_norm_forward,
    columns_norm_backward,
    aten.clone.default,
    aten.slice_backward.default,
    aten.select_backward.default,
    aten.sym_size.int,
    aten.index.Tensor,
    aten.gather.default,
    aten.embedding.default,
    aten.convolution.default,
    aten.constant_pad_nd.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
}


def replace(emit: Emitter, old: Node, new: Node, only: Callable[[Node], bool] = lambda user: True) -> None:
    """Let the users of `old`, or `only` some of them, read `new`. Its strides may differ: see `settle`."""
    if not _same_strides(value(new), value(old)):
        if new.users or new.op == "placeholder":  # its other users were traced with its own strides
            new = emit(aten.alias.default, new)
        new.meta[_TRACED] = value(old)
    old.replace_all_uses_with(new, delete_user_cb=only)


def settle(graph: Graph) -> None:
    """Give all users of replaced tensors strides that they accept. The graph must be sorted, and stays so."""
    moved = _Moved(Emitter(graph))
    for node in list(graph.nodes):
        moved.visit(node)


class _Moved:
    """The nodes whose strides are not those of the trace. `traced` has the tensors of the trace."""

    def __init__(self, emit: Emitter) -> None:
        self.emit = emit
        self.traced: dict[Node, Any] = {}
        self.replaced: set[Node] = set()
        self.copies: dict[Node, Node] = {}

    def visit(self, node: Node) -> None:
        moved = [used for used in node.all_input_nodes if used in self.traced]
        if moved:
            was = value(node)
            if not self._accepts(node) or not _trace_again(node):
                self.emit.before = node
                for used in moved:
                    node.replace_input_with(used, self._as_traced(used))
            elif not _same_strides(value(node), was):
                self.traced[node] = was
        if _TRACED in node.meta:
            self.traced[node] = node.meta.pop(_TRACED)
            self.replaced.add(node)

    def _accepts(self, user: Node) -> bool:
        if user.target is aten.native_dropout.default:  # a CPU draws in the order of a dense tensor, whatever lies between rows
            x: Any = user.args[0]
            return value(x).device.type == "cpu" and _order(value(x)) == _order(self.traced.get(x, value(x)))
        if user.target in _ASSUMES_CONTIGUOUS or is_random(user):
            return False
        return is_view(user) or user.target in _ACCEPTS_ANY or is_pointwise(user) or rule_of(user) is not None

    def _as_traced(self, node: Node) -> Node:
        """Return the node's value with the strides of the trace: a copy, or the node's view of a copy."""
        if node not in self.traced:
            return node
        if node not in self.copies:
            base: Any = node.args[0]
            if node not in self.replaced and is_view(node) and (is_view(base) or not is_multiple(base)):
                target: Any = node.target
                self.copies[node] = self.emit(target, self._as_traced(base), *node.args[1:], **node.kwargs)
            else:
                self.copies[node] = self._copy(node)
        return self.copies[node]

    def _copy(self, node: Node) -> Node:
        """Copy a tensor into the strides of the trace. An operator's result is dense, so their order says all."""
        order = _order(self.traced[node])
        if order == sorted(order):
            return self.emit(aten.clone.default, node, memory_format=torch.contiguous_format)
        order += [dim for dim in range(self.traced[node].dim()) if dim not in order]
        ordered = self.emit(aten.permute.default, node, order)
        copy = self.emit(aten.clone.default, ordered, memory_format=torch.contiguous_format)
        return self.emit(aten.permute.default, copy, [order.index(dim) for dim in range(len(order))])


def _order(tensor: Tensor) -> list[int]:
    """Return the dimensions of more than one element, from the outermost in memory to the innermost."""
    given: list[Any] = list(tensor.stride())
    strides = [s.node.hint if isinstance(s, SymInt) else s for s in given]
    dims = [dim for dim, size in enumerate(tensor.shape) if size_key(size) != 1]
    return sorted(dims, key=strides.__getitem__, reverse=True)


def _trace_again(node: Node) -> bool:
    """Compute the node's fake value from its inputs' present strides. Return False if those don't allow the operator."""
    args, kwargs = map_arg((arguments(node), node.kwargs), value)
    target: Any = node.target
    if target in (aten.view.default, aten._unsafe_view.default) and not can_be_viewed(args[0], list(value(node).shape)):
        return False
    try:
        with torch.no_grad():
            node.meta["val"] = target(*args, **kwargs)
    except (RuntimeError, ValueError):
        return False
    return True


def _same_strides(now: Any, was: Any) -> bool:
    """Whether all strides are equal, except in dimensions of one element. Values that are no tensors have none."""
    if isinstance(was, list | tuple):
        return all(map(_same_strides, now, was))
    return not isinstance(was, Tensor) or all(
        size_key(size) == 1 or size_key(a) == size_key(b)
        for size, a, b in zip(now.shape, now.stride(), was.stride(), strict=True)
    )
