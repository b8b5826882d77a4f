"""A tensor that now lies otherwise in memory: who may be given it as it is, and who needs it as it was.

A lane of a whole is a view with the whole's strides, where its operator gave a contiguous tensor. Most operators look at
strides. A view may be possible only with the old ones, and what is no part of PyTorch, or gives its result to the user, may
count on them: those get a copy that lies as the tensor did.
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
# Beside those that have rules. Not simply all of ATen: what the call around an operator made contiguous is no call in the graph
# where it was contiguous already, and then its kernel doesn't look.
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
    """Give users of `node`, which was a tensor like `was` when they were traced, a copy where they need that one's strides."""
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
    """Take the view of what lies otherwise, if there is one, and settle its users."""
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
    """Where a dimension has one element its stride says nothing."""
    return all(
        size_key(size) == 1 or size_key(a) == size_key(b)
        for size, a, b in zip(now.shape, now.stride(), was.stride(), strict=True)
    )
