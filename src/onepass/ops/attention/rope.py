"""rope: rotary positions, which rotate the pairs of elements of each head of q and k by a token's angles.

With weights for q and k, RMSNorm of each head comes first.

Formula  (y1, y2) = (x1 cos - x2 sin, x2 cos + x1 sin) for each pair: (x[i], x[i + R/2]), or interleaved (x[2i], x[2i + 1]);
         what lies past the first R elements of a head is copied. With weights x is z / sqrt(mean(z^2) + eps) * weight for each
         head z, zero_centered_gamma: weight + 1 in its place. fp32 all the way, rounded once, where y is stored.
Shapes   q [..., S, Hq, D], k [..., S, Hk, D]; cos and sin [..., S, R/2], whose leading dimensions broadcast against q's.
Saves    cos and sin: backward rotates the gradients by the same kernel with sin's sign changed. That is the transpose, and no
         inverse where cos and sin have a common factor (as stretched positions have). With weights q and k too, as they came.
Bytes    forward reads q, k and the tables and writes both results; backward the same of the gradients, and with weights it reads
         q and k again. One launch each; the weights' gradients are sums of the same launch, in a fixed order.
Kernels  ops/attention/rope_kernels.py, ops/attention/rope_norm_kernels.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from onepass.kernels.language import kernels_unsupported
from onepass.ops.attention.arguments import check_tables_of
from onepass.ops.attention.rope_formula import normed_rope_formula, rope_blocks, rope_formula
from onepass.ops.attention.rope_kernels import check_tables, check_weights, rope_variant, rotate
from onepass.ops.attention.rope_norm import NormedRopeOptions, normed_rope
from onepass.ops.attention.rope_norm_kernels import backward_variant
from onepass.ops.attention.sharding import shard_rope
from onepass.runtime.backend import NATIVE, choose, run_other
from onepass.runtime.checks import check_device, check_floating
from onepass.runtime.dispatch import fast_apply, needs_dispatcher, needs_grad, not_twice_differentiable, under_functorch
from onepass.runtime.documents import check_documents, tables_of_documents
from onepass.runtime.op import Call, Registered, define_op
from onepass.runtime.sharding import has_dtensor, run_on_shards

WIDEST = 4096  # of heads
_TYPES = (torch.bfloat16, torch.float32, torch.float16)


def rope_reference(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
    cu_seqlens: Tensor | None = None,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
    zero_centered_gamma: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return q and k rotated, by the formula, for every type: fp64 inputs make it the oracle. Other types compute in fp32."""
    cos, sin = _tables(q, cos, sin, cu_seqlens)
    if q_weight is not None and k_weight is not None:
        options = interleaved, eps, zero_centered_gamma
        return normed_rope_formula(q, q_weight, cos, sin, *options), normed_rope_formula(k, k_weight, cos, sin, *options)
    return rope_formula(q, cos, sin, interleaved), rope_formula(k, cos, sin, interleaved)


def _tables(q: Tensor, cos: Tensor, sin: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the tables with a row for each token, `[T, R/2]`, where they have one for each position within a document."""
    if cu_seqlens is None or cos.dim() > 2:
        return cos, sin
    cos, sin = tables_of_documents(cos, sin, cu_seqlens, q.shape[-3])
    return cos[0], sin[0]


# ---- by the kernel, a registered op: opaque to the compiler, visible to checkpointing; or by PyTorch, in blocks ----


def _rotate_fake(
    cos: Tensor, sin: Tensor, q: Tensor | None, k: Tensor | None, interleaved: bool, back: bool
) -> tuple[Tensor | None, Tensor | None]:
    q_out, k_out = (None if x is None else x.new_empty(x.shape) for x in (q, k))
    return q_out, k_out


_rotate_op = Registered(
    "rope(Tensor cos, Tensor sin, Tensor? q, Tensor? k, bool interleaved, bool back) -> (Tensor?, Tensor?)",
    rotate,
    _rotate_fake,
)


def _rotate_blocks(
    cos: Tensor, sin: Tensor, q: Tensor | None, k: Tensor | None, interleaved: bool, back: bool
) -> tuple[Tensor | None, Tensor | None]:
    q_out, k_out = (None if x is None else rope_blocks(x, cos, sin, interleaved, back) for x in (q, k))
    return q_out, k_out


# ---- autograd ----


class _RopeFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, use_triton: bool) -> Any:
        ctx.call = interleaved, use_triton
        ctx.set_materialize_grads(False)  # one of the two may have been used alone
        ctx.save_for_backward(cos, sin)
        rotated = (_rotate_op if use_triton else _rotate_blocks)(cos, sin, q, k, interleaved, False)
        need_q, need_k, *_ = ctx.needs_input_grad
        if not (need_q and need_k):  # the result of a frozen input is frozen too
            ctx.mark_non_differentiable(rotated[1 if need_q else 0])
        return rotated

    @staticmethod
    def backward(ctx: Any, dq: Tensor | None, dk: Tensor | None) -> tuple[Tensor | None, ...]:
        use_triton = ctx.call[1]
        return (_backward_once if use_triton else _backward)(ctx, dq, dk)


def _backward(ctx: Any, dq: Tensor | None, dk: Tensor | None) -> tuple[Tensor | None, ...]:
    interleaved, use_triton = ctx.call
    need_q, need_k = ctx.needs_input_grad[:2]
    dq, dk = dq if need_q else None, dk if need_k else None
    cos, sin = ctx.saved_tensors
    if torch.is_grad_enabled() and not use_triton:  # this backward will itself be differentiated
        dq, dk = (None if dy is None else rope_formula(dy, cos, -sin, interleaved) for dy in (dq, dk))
    else:
        dq, dk = (_rotate_op if use_triton else _rotate_blocks)(cos, sin, dq, dk, interleaved, True)
    return dq, dk, None, None, None, None


_backward_once = not_twice_differentiable(_backward)
_apply = fast_apply(_RopeFunction)


# ---- the public function: say what is wrong, choose who does it, return ----


def _check(given: Mapping[str, Any]) -> None:
    q, k, cos, sin, cu_seqlens = given["q"], given["k"], given["cos"], given["sin"], given["cu_seqlens"]
    q_weight, k_weight, zero_centered_gamma = given["q_weight"], given["k_weight"], given["zero_centered_gamma"]
    check_floating("q", q)  # no loop: the checks are most of a call's time
    check_floating("k", k)
    check_floating("cos", cos)
    check_floating("sin", sin)
    q_shape, k_shape = q.shape, k.shape
    if len(q_shape) < 3:
        raise ValueError(f"q must have at least three dimensions, tokens, heads and numbers, but has shape {tuple(q_shape)}")
    tokens, D = q_shape[:-2], q_shape[-1]
    if k_shape != q_shape and (len(k_shape) != len(q_shape) or k_shape[:-2] != tokens or k_shape[-1] != D):
        raise ValueError(f"k must have q's shape {tuple(q_shape)} but for the heads, its last but one, but has {tuple(k_shape)}")
    check_device("k", k, q, "q")
    if cu_seqlens is None:
        check_tables(cos, sin, q, tokens, D, "q")
    else:
        check_documents(cu_seqlens, q, tuple(tokens), "q")
        check_tables_of(cos, sin, cu_seqlens, q, tuple(tokens), D, "q")
    if q_weight is not None or k_weight is not None or zero_centered_gamma:
        check_weights(q_weight, k_weight, given["eps"], zero_centered_gamma, q, D, "q")


def _unsupported(q: Tensor, k: Tensor) -> str | None:
    """Why the kernel can't take this call, or None."""
    if q.dtype not in _TYPES:
        return f"q is {q.dtype}"
    if k.dtype not in _TYPES:
        return f"k is {k.dtype}"
    if q.shape[-1] > WIDEST:
        return f"heads of {q.shape[-1]} are wider than {WIDEST}"
    return kernels_unsupported("q", q)


def _variant(call: Call) -> str:
    """Which kernel a call runs, and its tiles."""
    q, k = (x if x.numel() else None for x in (call.q, call.k))
    if q is None and k is None:
        return "the PyTorch formula, as there is nothing to do"
    description = rope_variant(q, k, call.cos, call.sin, call.interleaved)
    if call.q_weight is None:
        return f"{description}; backward the same, rotating back; keeps cos and sin"
    return f"{description}, normalised first; {backward_variant(q, k, call.cos, call.interleaved)}; keeps q, k, cos and sin"


def rope(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
    cu_seqlens: Tensor | None = None,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
    zero_centered_gamma: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Rotary positions on q and k, and before that RMSNorm of each head, in one kernel forward and one backward.

    Args:
        q: ``[..., S, Hq, D]``, of any strides: a part of a fused projection, or ``[B, H, S, D]`` transposed.
        k: ``[..., S, Hk, D]``.
        cos, sin: ``[..., S, R/2]``, one element for each pair, R at most D; of any floating-point type. Their leading dimensions
            broadcast: ``[S, R/2]`` for all sequences alike, ``[B, S, R/2]`` where each has its own positions. They get no
            gradient. Elements past the first R of a head are copied.
        interleaved: the pairs are neighbours, ``(2i, 2i + 1)``; otherwise they are ``(i, i + R/2)``.
        cu_seqlens: int32 ``[documents + 1]``, on q's device: the boundaries, from 0 to S, of documents that follow each other in
            a q of ``[1, S, Hq, D]`` or ``[S, Hq, D]``. Tables of ``[longest, R/2]`` are then looked up by position within the
            document; those of more dimensions are taken as they are.
        q_weight, k_weight: ``[D]``, of any floating-point type: each head of q and of k is normalised over its D elements, and
            multiplied by the weight, before it is rotated. None for both only rotates.
        eps: added to the mean of the squares; above 0.
        zero_centered_gamma: the weights are kept as their distances from 1; the sum is fp32.
        backend: ``auto``, ``triton``, ``torch`` or a registered name; None leaves it to `use_backend` and ONEPASS_BACKEND.

    Returns:
        q and k rotated, of their own shapes and types, contiguous. Arithmetic is in fp32 and rounded once. For an attention that
        takes ``[B, H, S, D]``, `transpose(1, 2)` is a view.
    """
    given = {
        "q": q, "k": k, "cos": cos, "sin": sin, "interleaved": interleaved, "cu_seqlens": cu_seqlens, "q_weight": q_weight,
        "k_weight": k_weight, "eps": eps, "zero_centered_gamma": zero_centered_gamma,
    }  # fmt: skip
    if has_dtensor(q, k):
        return run_on_shards("rope", **given, backend=backend)  # type: ignore[no-any-return]
    _check(given)
    chosen = choose("rope", backend, _unsupported(q, k))
    if chosen not in NATIVE:
        return run_other("rope", chosen, **given)  # type: ignore[no-any-return]
    cos, sin = _tables(q, cos, sin, cu_seqlens)
    interleaved, use_triton = bool(interleaved), chosen == "triton" and bool(q.numel() or k.numel())
    if q_weight is not None and k_weight is not None:
        options = NormedRopeOptions(interleaved, float(eps), bool(zero_centered_gamma))
        return normed_rope(q, k, q_weight, k_weight, cos, sin, options, use_triton)
    # not whether an op is called: a compiler, a mode that watches or a transform sees the formula whole, and chooses what to save
    if not use_triton and (needs_dispatcher(q, k, cos, sin) or under_functorch()):
        return rope_reference(q, k, cos, sin, interleaved=interleaved)
    if needs_grad(q, k):
        return _apply(q, k, cos, sin, interleaved, use_triton)  # type: ignore[no-any-return]
    return (_rotate_op if use_triton else _rotate_blocks)(cos, sin, q, k, interleaved, False)  # type: ignore[return-value]


define_op(
    rope,
    check=lambda call: _check(vars(call)),
    unsupported=lambda call: _unsupported(call.q, call.k),
    variant=_variant,
    sharding=shard_rope,
)
