"""PyTorch's attention, after our rotation of q and k, whose gradients come back in one tensor."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from onepass.gradients.vectors import contiguous_param, saved_vectors, with_fp32_grads
from onepass.ops.attention.formula import (
    AttentionOptions,
    Parts,
    Weights,
    attention_by_pytorch,
    attention_formula,
    contiguous_tokens,
    empty_tokens,
    gated_formula,
    norm_of,
    parts_of,
    rotated_parts,
    ungrouped,
    without_gates,
)
from onepass.ops.attention.grouped import (
    empty_parts,
    group_parts,
    rotate_groups,
    rotate_groups_back,
    values_of,
)
from onepass.ops.attention.layout import as_readable, is_read_by_address, mark_overwritten
from onepass.ops.attention.rope_formula import rope_blocks
from onepass.ops.attention.rope_kernels import rotate
from onepass.ops.attention.rope_norm import NormedRopeOptions, normed_rope, weight_grads
from onepass.ops.attention.rope_norm_kernels import HeadGradients, rotate_back
from onepass.runtime.dispatch import (
    fast_apply,
    needs_dispatcher,
    needs_grad,
    not_twice_differentiable,
    under_functorch,
)
from onepass.runtime.documents import tables_of_documents
from onepass.runtime.formula import run_formula
from onepass.runtime.op import Registered


def _rotate(
    qkv: Tensor, cos: Tensor, sin: Tensor, options: AttentionOptions, *, overwrite: bool = False, by_kernel: bool = True
) -> Parts:
    """Return q and k rotated, in qkv's memory with `overwrite`, and v, a view of qkv; by group all apart."""
    if options.by_group:
        return rotate_groups(qkv, cos, sin, empty_parts(qkv, options), options, None)
    if qkv.stride(-1) != 1:  # neither the kernel nor `view` can write there
        qkv, overwrite = qkv.contiguous(), True
    q, k, v = parts_of(qkv, options.heads, options.groups)
    into = (q, k) if overwrite else (q.new_empty(q.shape), k.new_empty(k.shape))
    rotate_into(into, q, k, cos, sin, options.interleaved, False, by_kernel)
    if overwrite:
        mark_overwritten(qkv)
    return *into, v


def _rotate_apart(qkv: Tensor, cos: Tensor, sin: Tensor, options: AttentionOptions) -> tuple[Tensor | None, ...]:
    """`_rotate` for the dispatcher, which takes no results that share memory with qkv or each other."""
    if options.by_group:
        return _rotate(qkv, cos, sin, options)
    q, k, v = parts_of(qkv, options.heads, options.groups)
    return *rotate(cos, sin, q, k, options.interleaved, False), v.clone(memory_format=torch.contiguous_format)


def _rotate_fake(qkv: Tensor, cos: Tensor, sin: Tensor, options: AttentionOptions) -> tuple[Tensor, ...]:
    if options.by_group:
        return empty_parts(qkv, options)
    return tuple(x.new_empty(x.shape) for x in parts_of(qkv, options.heads, options.groups))


def _rotate_back(
    dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, options: AttentionOptions, *, by_kernel: bool = True
) -> Tensor:
    """Return dqkv, with dq and dk rotated back."""
    dqkv = _empty_qkv(dq, dk, dv, cos, sin, options)
    if options.by_group:
        rotate_groups_back((dq, dk), dqkv, cos, sin, options, None)
        group_parts(dqkv, options)[2].copy_(dv)
        return dqkv
    into_q, into_k, into_v = parts_of(dqkv, options.heads, options.groups)
    rotate_into((into_q, into_k), dq, dk, cos, sin, options.interleaved, True, by_kernel)
    into_v.copy_(dv)
    return dqkv


def _empty_qkv(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, options: AttentionOptions) -> Tensor:
    return empty_tokens(q, options, (options.heads + 2 * options.groups) * q.shape[-1])


def rotate_into(
    into: tuple[Tensor, Tensor], q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, back: bool, by_kernel: bool
) -> None:
    if by_kernel:
        rotate(cos, sin, q, k, interleaved, back, into)
        return
    for x, out in zip((q, k), into, strict=True):
        rope_blocks(x, cos, sin, interleaved, back, out)


def rotate_again(
    qkv: Tensor, heads: int, groups: int, cos: Tensor, sin: Tensor, cu_seqlens: Tensor | None, interleaved: bool, by_kernel: bool
) -> None:  # fmt: skip
    """Rotate q and k in qkv's memory, to the bits that `attention` with `overwrite` leaves there."""
    cos, sin = tables_of_documents(cos, sin, cu_seqlens, qkv.shape[1])
    q, k, _ = parts_of(qkv, heads, groups)
    rotate_into((q, k), q, k, cos, sin, interleaved, False, by_kernel)


rotate_op = Registered(
    "attention_rotated(Tensor qkv, Tensor cos, Tensor sin, AttentionOptions options) -> (Tensor, Tensor, Tensor)",
    _rotate,
    _rotate_fake,
    AttentionOptions,
    dispatched=_rotate_apart,
)
rotate_back_op = Registered(
    "attention_rotated_back(Tensor dq, Tensor dk, Tensor dv, Tensor cos, Tensor sin, AttentionOptions options) -> Tensor",
    _rotate_back,
    _empty_qkv,
    AttentionOptions,
)


class _RotatedParts(torch.autograd.Function):
    """q and k rotated, and v, for PyTorch's attention; their gradients come back in one tensor."""

    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, options: AttentionOptions, overwrite: bool, by_kernel: bool
    ) -> Parts:
        ctx.call = options, by_kernel
        ctx.save_for_backward(cos, sin)
        return _rotated(qkv, cos, sin, options, overwrite, by_kernel)

    @staticmethod
    @not_twice_differentiable
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        (cos, sin), (options, by_kernel) = ctx.saved_tensors, ctx.call
        if by_kernel:
            dqkv = rotate_back_op(dq, dk, dv, cos, sin, options)
        else:
            dqkv = _rotate_back(dq, dk, dv, cos, sin, options, by_kernel=False)
        return dqkv, None, None, None, None, None


def _rotated(qkv: Tensor, cos: Tensor, sin: Tensor, options: AttentionOptions, overwrite: bool, by_kernel: bool) -> Parts:
    if by_kernel:
        return rotate_op(qkv, cos, sin, options, overwrite=overwrite)  # type: ignore[no-any-return]
    return _rotate(qkv, cos, sin, options, overwrite=overwrite, by_kernel=False)


_apply_rotation = fast_apply(_RotatedParts)


# ---- with a norm of each head first ----


def _normed(
    qkv: Tensor, cos: Tensor, sin: Tensor, q_weight: Tensor, k_weight: Tensor, options: AttentionOptions
) -> tuple[Tensor | None, Tensor | None]:
    """Return q and k normalised and rotated, of a tensor of their own each."""
    if options.by_group:
        into = empty_parts(qkv, options)[:2]
        return rotate_groups(qkv, cos, sin, into, options, norm_of(options, q_weight, k_weight))[:2]
    q, k, _ = parts_of(qkv, options.heads, options.groups)
    return rotate(cos, sin, q, k, options.interleaved, False, None, norm_of(options, q_weight, k_weight))


def _normed_fake(qkv: Tensor, cos: Any, sin: Any, q_weight: Any, k_weight: Any, options: AttentionOptions) -> Any:
    return _rotate_fake(qkv, cos, sin, options)[:2]


def _normed_back(
    dq: Tensor, dk: Tensor, dv: Tensor, qkv: Tensor, cos: Tensor, sin: Tensor, q_weight: Tensor, k_weight: Tensor,
    options: AttentionOptions, needs: HeadGradients, **direct: Any,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Return the gradients of qkv, which is needed where q is, and both weights."""
    dqkv = _empty_qkv(dq, dk, dv, cos, sin, options) if needs.of_q else None
    norm = norm_of(options, q_weight, k_weight)
    if options.by_group:
        dweights = rotate_groups_back((dq, dk), dqkv, cos, sin, options, (norm, qkv, needs), **direct)
        if dqkv is not None:
            group_parts(dqkv, options)[2].copy_(dv)
        return dqkv, *dweights
    into = None
    if dqkv is not None:
        into_q, into_k, into_v = parts_of(dqkv, options.heads, options.groups)
        into_v.copy_(dv)
        into = into_q, into_k
    heads = parts_of(qkv, options.heads, options.groups)[:2]
    dweights = rotate_back(cos, sin, (dq, dk), heads, norm, options.interleaved, needs, into, **direct)[2:]
    return dqkv, *dweights


def _normed_back_fake(
    dq: Tensor, dk: Any, dv: Any, qkv: Tensor, cos: Any, sin: Any, q_weight: Tensor, k_weight: Tensor, options: Any,
    needs: HeadGradients,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    dqkv = _empty_qkv(dq, dk, dv, cos, sin, options) if needs.of_q else None
    return dqkv, *(t.new_empty(t.shape) if need else None for t, need in zip((q_weight, k_weight), needs[2:], strict=True))


normed_op = Registered(
    "attention_normed(Tensor qkv, Tensor cos, Tensor sin, Tensor q_weight, Tensor k_weight, AttentionOptions options) "
    "-> (Tensor, Tensor)",
    _normed,
    _normed_fake,
    AttentionOptions,
)
normed_back_op = Registered(
    "attention_normed_back(Tensor dq, Tensor dk, Tensor dv, Tensor qkv, Tensor cos, Tensor sin, Tensor q_weight, "
    "Tensor k_weight, AttentionOptions options, HeadGradients needs) -> (Tensor?, Tensor?, Tensor?)",
    _normed_back,
    _normed_back_fake,
    AttentionOptions,
    HeadGradients,
    dispatched=partial(_normed_back, keep_scratch=False),
)


class _NormedParts(torch.autograd.Function):
    """q and k normalised and rotated, and v, for PyTorch's attention; their gradients come back in one tensor."""

    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, options: AttentionOptions
    ) -> Parts:
        ctx.options = options
        ctx.vectors = saved_vectors(ctx, 1, q_weight, k_weight)
        ctx.save_for_backward(qkv, cos, sin, q_weight, k_weight)
        return *normed_op(qkv, cos, sin, q_weight, k_weight, options), values_of(qkv, options)

    @staticmethod
    @not_twice_differentiable
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        qkv, cos, sin, *weights = ctx.saved_tensors
        needs, weights, grads = weight_grads(ctx, 3, (dq, dk, dv, qkv), weights)
        asked = HeadGradients(needs[0], *needs)
        dqkv, *dweights = normed_back_op(dq, dk, dv, qkv, cos, sin, *weights, ctx.options, asked, **grads.direct())
        return dqkv, *grads.put(dweights), None, None, None


_apply_norm = fast_apply(_NormedParts)


def _normed_parts(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, options: AttentionOptions, by_kernel: bool
) -> Parts:
    if not by_kernel:
        q, k, v = parts_of(qkv, options.heads, options.groups)
        norm = NormedRopeOptions(options.interleaved, options.eps, options.zero_centered_gamma)
        return *normed_rope(q, k, q_weight, k_weight, cos, sin, norm, by_kernel), v
    q_weight, k_weight = contiguous_param(q_weight), contiguous_param(k_weight)  # type: ignore[assignment]
    if not needs_grad(qkv, q_weight, k_weight):
        return *normed_op(qkv, cos, sin, q_weight, k_weight, options), values_of(qkv, options)
    return _apply_norm(qkv, q_weight, k_weight, cos, sin, options)  # type: ignore[no-any-return]


def attend_by_pytorch(
    qkv: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    cu_seqlens: Tensor | None,
    sinks: Tensor | None,
    weights: Weights,
    options: AttentionOptions,
    overwrite: bool,
    by_kernel: bool,
    attend: Callable[..., Tensor] = attention_by_pytorch,
) -> Tensor:
    """Return y by PyTorch's attention, which chooses what it saves, after our rotation; empty or transformed, by the formula.

    attend: what takes the parts, the options, the boundaries and the sinks.

    Its kernels read 16 bytes at a time and don't look at addresses: what they read, dy too, is copied where it must be. So is a
    dy that doesn't lie as y: PyTorch finds cuDNN's plan of a backward by the strides of q, k and v alone.
    """
    if options.gated:  # a copy of ours
        ungated, gates = without_gates(qkv, options)
        rest = cos, sin, cu_seqlens, sinks, weights, options._replace(gated=False), True, by_kernel, attend
        y: Tensor = run_formula(gated_formula, "input", attend_by_pytorch(ungated, *rest), per_row=(gates,))
        return y
    if not by_kernel and options.by_group:
        (qkv, options), overwrite = ungrouped(qkv, options), True  # a copy of ours
    if under_functorch() or not qkv.numel():
        return attention_formula(qkv, cos, sin, options, cu_seqlens, sinks, with_fp32_grads(*weights))  # type: ignore[arg-type]
    by_address = is_read_by_address(qkv)
    if by_address:
        qkv = as_readable(qkv)
    # not whether an op is called: a compiler, or a mode that watches, sees the formula whole and chooses what to save
    by_formula = not by_kernel and needs_dispatcher(qkv, cos, sin)
    q_weight, k_weight = weights
    if cos is not None and sin is not None and q_weight is not None and k_weight is not None:
        cos, sin = tables_of_documents(cos, sin, cu_seqlens, qkv.shape[1])
        parts = _normed_parts(qkv, q_weight, k_weight, cos, sin, options, by_kernel)
    elif cos is None or sin is None or by_formula:
        parts = rotated_parts(qkv, cos, sin, options, cu_seqlens)
    else:
        cos, sin = tables_of_documents(cos, sin, cu_seqlens, qkv.shape[1])
        parts = (_apply_rotation if needs_grad(qkv) else _rotated)(qkv, cos, sin, options, overwrite, by_kernel)
    y = attend(parts, options, cu_seqlens, sinks)
    if by_address and y.requires_grad:
        y.register_hook(lambda dy: as_readable(contiguous_tokens(dy, options)))
    return y
