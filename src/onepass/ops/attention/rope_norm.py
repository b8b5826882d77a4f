"""rope with a norm of each head first: its registered ops, autograd, and the "torch" backend."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onepass.gradients.main_grad import grad_requests
from onepass.gradients.vectors import VectorGrads, contiguous_param, saved_vectors, with_fp32_grads
from onepass.ops.attention.rope_formula import QKNorm, normed_rope_blocks
from onepass.ops.attention.rope_kernels import rotate
from onepass.ops.attention.rope_norm_kernels import HeadGradients, rotate_back
from onepass.runtime.checks import check_device, check_eps, check_floating
from onepass.runtime.dispatch import fast_apply, needs_grad, not_twice_differentiable
from onepass.runtime.op import Registered


class NormedRopeOptions(NamedTuple):
    """What rope takes besides tensors, with a norm."""

    interleaved: bool
    eps: float
    zero_centered_gamma: bool


def check_weights(
    q_weight: Tensor | None, k_weight: Tensor | None, eps: float, zero_centered_gamma: bool, x: Tensor, D: int, name: str
) -> None:
    """Raise unless the norm's weights fit x, called `name`, whose heads have D elements."""
    if q_weight is None or k_weight is None:
        if q_weight is not None or k_weight is not None:
            missing, other = ("q_weight", "k_weight") if q_weight is None else ("k_weight", "q_weight")
            raise ValueError(f"{missing} must be given where {other} is, but is None")
        if zero_centered_gamma:
            raise ValueError("zero_centered_gamma says how q_weight and k_weight are kept, but they are None")
        return
    check_eps(eps)
    for of, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        check_floating(of, weight)
        if weight.shape != (D,):
            raise ValueError(f"{of} must have shape ({D},), a number for each of a head's elements, but has {tuple(weight.shape)}")
        check_device(of, weight, x, name)


# ---- by the kernels, as registered ops ----


def _normed(
    cos: Tensor, sin: Tensor, q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, options: NormedRopeOptions
) -> tuple[Tensor, Tensor]:
    interleaved, eps, centered = options
    return rotate(cos, sin, q, k, interleaved, False, None, QKNorm(q_weight, k_weight, eps, centered))  # type: ignore[return-value]


def _normed_fake(cos: Any, sin: Any, q: Tensor, k: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape)


def _normed_back(
    cos: Tensor, sin: Tensor, dq: Tensor | None, dk: Tensor | None, q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor,
    options: NormedRopeOptions, of_q: bool, of_k: bool, of_q_weight: bool, of_k_weight: bool, **direct: Any,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    interleaved, eps, centered = options
    norm, needs = QKNorm(q_weight, k_weight, eps, centered), HeadGradients(of_q, of_k, of_q_weight, of_k_weight)
    return rotate_back(cos, sin, dq, dk, q, k, norm, interleaved, needs, **direct)


def _normed_back_fake(
    cos: Any, sin: Any, dq: Any, dk: Any, q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor,
    options: Any, of_q: bool, of_k: bool, of_q_weight: bool, of_k_weight: bool,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    has_q, has_k = dq is not None, dk is not None
    needed = (q, of_q and has_q), (k, of_k and has_k), (q_weight, of_q_weight and has_q), (k_weight, of_k_weight and has_k)
    return tuple(t.new_empty(t.shape) if needs else None for t, needs in needed)


_normed_op = Registered(
    "rope_normed(Tensor cos, Tensor sin, Tensor q, Tensor k, Tensor q_weight, Tensor k_weight, NormedRopeOptions options) "
    "-> (Tensor, Tensor)",
    _normed,
    _normed_fake,
    NormedRopeOptions,
)
_normed_back_op = Registered(
    "rope_normed_backward(Tensor cos, Tensor sin, Tensor? dq, Tensor? dk, Tensor q, Tensor k, Tensor q_weight, Tensor k_weight, "
    "NormedRopeOptions options, bool of_q, bool of_k, bool of_q_weight, bool of_k_weight) "
    "-> (Tensor?, Tensor?, Tensor?, Tensor?)",
    _normed_back,
    _normed_back_fake,
    NormedRopeOptions,
    dispatched=partial(_normed_back, keep_scratch=False),
)


# ---- autograd ----


class _NormedRopeFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, options: NormedRopeOptions
    ) -> Any:
        ctx.options = options
        ctx.vectors = saved_vectors(ctx, 2, q_weight, k_weight)
        ctx.set_materialize_grads(False)  # one of the two may have been used alone
        ctx.save_for_backward(cos, sin, q, k, q_weight, k_weight)
        turned = _normed_op(cos, sin, q, k, q_weight, k_weight, options)
        need_q, need_k, need_q_weight, need_k_weight, *_ = ctx.needs_input_grad
        for y, needs in zip(turned, (need_q or need_q_weight, need_k or need_k_weight), strict=True):
            if not needs:  # the result of frozen inputs is frozen too
                ctx.mark_non_differentiable(y)
        return turned

    @staticmethod
    @not_twice_differentiable
    def backward(ctx: Any, dq: Tensor | None, dk: Tensor | None) -> tuple[Tensor | None, ...]:
        cos, sin, q, k, *weights = ctx.saved_tensors
        needs, into, grads = ctx.needs_input_grad[:4], None, None
        if ctx.vectors is not None:
            grads = VectorGrads(*ctx.vectors, grad_requests(ctx, *[True] * 4)[2:])
            needs = *needs[:2], *grads.needed()
            into = grads.into(dq, dk, q, k, *weights)
            weights = weights if into is not None else list(grads.wide(*weights))
        direct = {} if into is None else {"into": into.tensors}
        *dx, dq_weight, dk_weight = _normed_back_op(cos, sin, dq, dk, q, k, *weights, ctx.options, *needs, **direct)
        dweights = (dq_weight, dk_weight) if grads is None else grads.put(into, dq_weight, dk_weight)
        return *dx, *dweights, None, None, None


_apply = fast_apply(_NormedRopeFunction)


# ---- the call ----


def normed_rope(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, options: NormedRopeOptions,
    use_triton: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return q and k normalised and turned, by the kernels or by PyTorch."""
    if not use_triton:
        weights = with_fp32_grads(q_weight, k_weight)
        q, k = (normed_rope_blocks(x, w, cos, sin, *options) for x, w in zip((q, k), weights, strict=True))
        return q, k
    q_weight, k_weight = contiguous_param(q_weight), contiguous_param(k_weight)  # type: ignore[assignment]
    if needs_grad(q, k, q_weight, k_weight):
        return _apply(q, k, q_weight, k_weight, cos, sin, options)  # type: ignore[no-any-return]
    return _normed_op(cos, sin, q, k, q_weight, k_weight, options)  # type: ignore[no-any-return]
