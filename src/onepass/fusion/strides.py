"""Tensors whose strides fusion changes: which users accept the new strides, and which need a copy with the old ones.

A lane of a whole is a view with the whole's strides. Its operator returned a contiguous tensor. Most operators read strides. A
view may be possible only with the old strides. An operator outside of PyTorch, or the graph's output, may depend on them. Those
users get a contiguous copy.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from onepass.fusion.graph import Emitter, aten, is_pointwise, is_view, size_key, value
from onepass.fusion.rules import rule_of
from onepass.ops.norm.ragged.ragged_norm import (
    columns_norm_backward,
    columns_norm_forward,
    ragged_norm_backward,
    ragged_norm_forward,
)

_COUNTS_ON_THEM = {aten.native_layer_norm_backward.default, aten._fused_rms_norm_backward.default}
# Operators without rules that accept any strides. Not all of ATen does: some kernels assume contiguous inputs, because their
# callers call contiguous(). Where the input was contiguous already, that call is not in the graph.
_TAKES_ANY = {
    ragged_norm_forward,
    ragged_norm_backward,
    columns_norm_forward,
    columns_norm_backward,
    aten.slice_backward.default,
    aten.select_backward.default,
    aten.native_dropout.default,
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


def settle(emit: Emitter, node: Node, was: Any, users: Iterable[Node]) -> None:
    """Give users of `node` a copy where they need the strides of `was`, the tensor that they were traced with."""
    if isinstance(was, Tensor) and _lies_the_same(value(node), was):
        return
    for user in list(users):
        if is_view(user):
            if not _retraced(emit, user):
                _copy_for(emit, node, was, user)
        elif not _looks_at_strides(user):
            _copy_for(emit, node, was, user)


def _looks_at_strides(user: Node) -> bool:
    if user.target in _COUNTS_ON_THEM:
        return False
    return user.target in _TAKES_ANY or is_pointwise(user) or rule_of(user) is not None


def _retraced(emit: Emitter, view: Node) -> bool:
    """Recompute a view of a tensor with new strides, and settle its users. Return False if the view is not possible."""
    args, kwargs = map_arg((view.args, view.kwargs), value)
    target: Any = view.target
    try:
        now = target(*args, **kwargs)
    except (RuntimeError, ValueError):
        return False
    was = value(view)
    view.meta["val"] = now
    settle(emit, view, was, view.users)
    return True


def _copy_for(emit: Emitter, node: Node, was: Any, user: Node) -> None:
    if isinstance(was, Tensor) and was.is_contiguous():
        emit.before = user
        copy = emit(aten.clone.default, node, memory_format=torch.contiguous_format)
        user.replace_input_with(node, copy)


def _lies_the_same(now: Tensor, was: Tensor) -> bool:
    """Whether all strides are equal, except in dimensions of one element."""
    return all(
        size_key(size) == 1 or size_key(a) == size_key(b)
        for size, a, b in zip(now.shape, now.stride(), was.stride(), strict=True)
    )
