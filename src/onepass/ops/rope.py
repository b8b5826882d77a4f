"""rope: rotary positions, the pairs of numbers of each head of q and k turned by a token's angles.

Formula  (y1, y2) = (x1 cos - x2 sin, x2 cos + x1 sin) for each pair: (x[i], x[i + R/2]), or interleaved (x[2i], x[2i + 1]);
         what lies past the first R numbers of a head is copied. fp32 all the way, rounded once, where y is stored.
Shapes   q [..., S, Hq, D], k [..., S, Hk, D]; cos and sin [..., S, R/2], whose leading dimensions broadcast against q's.
Saves    cos and sin: backward turns the gradients by the same kernel with sin's sign changed. That is the transposed, which is no
         inverse where cos and sin have a common factor (as stretched positions have).
Bytes    forward reads q, k and the tables and writes both results; backward the same of the gradients. One launch each.
Kernels  kernels/rope.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onepass.kernels.rope import check_tables, rope_variant, rotate
from onepass.kernels.rope_formula import rope_blocks, rope_formula
from onepass.runtime.backend import NATIVE, choose, register_op, run_other
from onepass.runtime.checks import check_device, check_floating
from onepass.runtime.dispatch import bare_apply, needs_grad, once, registered, transformed, watched
from onepass.runtime.lang import no_triton

WIDEST = 4096  # of heads
_TYPES = (torch.bfloat16, torch.float32, torch.float16)

Maybe = Tensor | None


def rope_reference(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> tuple[Tensor, Tensor]:
    """The formula, for every type: fp64 inputs make it the oracle, others the `torch` backend (fp32 inside)."""
    return rope_formula(q, cos, sin, interleaved), rope_formula(k, cos, sin, interleaved)


# ---- registered: opaque to the compiler, visible to checkpointing; it returns tensors only, empty ones for what there is not


def _rotate_all(q: Maybe, k: Maybe, cos: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    q_out, k_out = (cos.new_empty(0) if x is None else x for x in rotate(q, k, cos, *rest))
    return q_out, k_out


def _rotate_fake(q: Maybe, k: Maybe, cos: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    q_out, k_out = (cos.new_empty(0) if x is None else x.new_empty(x.shape) for x in (q, k))
    return q_out, k_out


_rope_op = registered(
    "rope(Tensor? q, Tensor? k, Tensor cos, Tensor sin, bool interleaved, bool back) -> (Tensor, Tensor)",
    _rotate_all,
    _rotate_fake,
)


def _run(q: Maybe, k: Maybe, cos: Tensor, sin: Tensor, interleaved: bool, back: bool, native: bool) -> tuple[Maybe, Maybe]:
    """q and k turned, or back, or one of them: by the kernel, as a registered op where somebody watches; or by PyTorch."""
    if not native:
        q_out, k_out = (None if x is None else rope_blocks(x, cos, sin, interleaved, back) for x in (q, k))
        return q_out, k_out
    if not watched(q, k, cos, sin):
        return rotate(q, k, cos, sin, interleaved, back)
    q_out, k_out = _rope_op(q, k, cos, sin, interleaved, back)
    return None if q is None else q_out, None if k is None else k_out


# ---- autograd ----


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, native: bool) -> Any:
        ctx.call = interleaved, native
        ctx.set_materialize_grads(False)  # one of the two may have been used alone
        ctx.save_for_backward(cos, sin)
        turned = _run(q, k, cos, sin, interleaved, False, native)
        need_q, need_k, *_ = ctx.needs_input_grad
        if not (need_q and need_k):  # what comes of the frozen one is frozen too
            ctx.mark_non_differentiable(turned[1 if need_q else 0])
        return turned

    @staticmethod
    def backward(ctx: Any, dq: Maybe, dk: Maybe) -> tuple[Maybe, ...]:
        native = ctx.call[1]
        return (_back_once if native else _back)(ctx, dq, dk)


def _back(ctx: Any, dq: Maybe, dk: Maybe) -> tuple[Maybe, ...]:
    interleaved, native = ctx.call
    need_q, need_k = ctx.needs_input_grad[:2]
    dq, dk = dq if need_q else None, dk if need_k else None
    cos, sin = ctx.saved_tensors
    if torch.is_grad_enabled() and not native:  # this backward will itself be differentiated
        dq, dk = (None if dy is None else rope_formula(dy, cos, -sin, interleaved) for dy in (dq, dk))
    else:
        dq, dk = _run(dq, dk, cos, sin, interleaved, True, native)
    return dq, dk, None, None, None, None


_back_once = once(_back)
_apply = bare_apply(_Rope)


# ---- the public face: say what is wrong, choose who does it, return ----


def _check(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> None:
    check_floating("q", q)  # written out, as it is most of a call
    check_floating("k", k)
    check_floating("cos", cos)
    check_floating("sin", sin)
    if q.dim() < 3:
        raise ValueError(f"q must have at least three dimensions, tokens, heads and numbers, but has shape {tuple(q.shape)}")
    q_shape, k_shape = q.shape, k.shape
    tokens, D = q_shape[:-2], q_shape[-1]
    if k_shape != q_shape and (k.dim() != q.dim() or k_shape[:-2] != tokens or k_shape[-1] != D):
        raise ValueError(f"k must have q's shape {tuple(q_shape)} but for the heads, its last but one, but has {tuple(k_shape)}")
    check_device("k", k, q, "q")
    check_tables(cos, sin, q, tokens, D, "q")


def unsupported(q: Tensor, k: Tensor, *args: Any, **options: Any) -> str | None:
    """Why the kernel can't take this call, or None."""
    if q.dtype not in _TYPES:
        return f"q is {q.dtype}"
    if k.dtype not in _TYPES:
        return f"k is {k.dtype}"
    if q.shape[-1] > WIDEST:
        return f"heads of {q.shape[-1]} are wider than {WIDEST}"
    if transformed():
        return "vmap, a functional derivative or forward-mode differentiation is in force"
    reason = no_triton(q)
    return None if reason is None else reason.replace("x is", "q is")


def variant(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> str:
    """Which kernel a call runs, and its tiles."""
    if not q.numel() and not k.numel():
        return "the PyTorch formula, as there is nothing to do"
    some_q, some_k = (x if x.numel() else None for x in (q, k))
    return f"{rope_variant(some_q, some_k, cos, sin, interleaved)}; backward the same, turning back; keeps cos and sin"


def rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """Rotary positions on q and k in one kernel, and one backward.

    Args:
        q: ``[..., S, Hq, D]``, of any strides: a part of a fused projection, or ``[B, H, S, D]`` with two dimensions exchanged.
        k: ``[..., S, Hk, D]``.
        cos, sin: ``[..., S, R/2]``, one number for each pair, R at most D; of any floating-point type. Their leading dimensions
            broadcast: ``[S, R/2]`` for all sequences alike, ``[B, S, R/2]`` where each has positions of its own. They get no
            gradient. What lies past the first R numbers of a head stays as it is.
        interleaved: the pairs are neighbours, ``(2i, 2i + 1)``; otherwise they are ``(i, i + R/2)``.
        backend: ``auto``, ``triton``, ``torch`` or a registered name; None leaves it to `use_backend` and ONEPASS_BACKEND.

    Returns:
        q and k, turned, of their own shapes and types, contiguous. Arithmetic is in fp32 and rounded once. For an attention that
        wants ``[B, H, S, D]``, `transpose(1, 2)` is a view.
    """
    _check(q, k, cos, sin)
    chosen = choose("rope", backend, unsupported(q, k))
    if chosen not in NATIVE:
        return run_other("rope", chosen, q, k, cos, sin, interleaved=interleaved)  # type: ignore[no-any-return]
    native = chosen == "triton" and bool(q.numel() or k.numel())
    if not native and (watched(q, k, cos, sin) or transformed()):  # these choose by themselves what to keep
        return rope_reference(q, k, cos, sin, interleaved=interleaved)
    if needs_grad(q, k):
        return _apply(q, k, cos, sin, bool(interleaved), native)  # type: ignore[no-any-return]
    return _run(q, k, cos, sin, bool(interleaved), False, native)  # type: ignore[return-value]


register_op(rope, _check, unsupported, variant)
