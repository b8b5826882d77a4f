"""rope with a norm of each head first: its registered ops, autograd, and the "torch" backend."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onepass.gradients.main_grad import grad_requests
from onepass.gradients.vectors import KernelTargets, VectorGrads, contiguous_param, saved_vectors, with_fp32_grads
from onepass.ops.attention.rope_formula import QKNorm, normed_rope_blocks
from onepass.ops.attention.rope_kernels import rotate
from onepass.ops.attention.rope_norm_kernels import HeadGradients, rotate_back
from onepass.runtime.dispatch import fast_apply, needs_grad, not_twice_differentiable
from onepass.runtime.op import Registered


class NormedRopeOptions(NamedTuple):
    """What rope takes besides tensors, with a norm."""

    interleaved: bool
    eps: float
    zero_centered_gamma: bool


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
    options: NormedRopeOptions, needs: HeadGradients, **direct: Any,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    interleaved, eps, centered = options
    return rotate_back(cos, sin, (dq, dk), (q, k), QKNorm(q_weight, k_weight, eps, centered), interleaved, needs, **direct)


def _normed_back_fake(
    cos: Any, sin: Any, dq: Any, dk: Any, q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor,
    options: Any, needs: HeadGradients,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    needed = zip((q, k, q_weight, k_weight), needs, (dq, dk, dq, dk), strict=True)
    return tuple(t.new_empty(t.shape) if need and dy is not None else None for t, need, dy in needed)


_normed_op = Registered(
    "rope_normed(Tensor cos, Tensor sin, Tensor q, Tensor k, Tensor q_weight, Tensor k_weight, NormedRopeOptions options) "
    "-> (Tensor, Tensor)",
    _normed,
    _normed_fake,
    NormedRopeOptions,
)
_normed_back_op = Registered(
    "rope_normed_backward(Tensor cos, Tensor sin, Tensor? dq, Tensor? dk, Tensor q, Tensor k, Tensor q_weight, Tensor k_weight, "
    "NormedRopeOptions options, HeadGradients needs) -> (Tensor?, Tensor?, Tensor?, Tensor?)",
    _normed_back,
    _normed_back_fake,
    NormedRopeOptions,
    HeadGradients,
    dispatched=partial(_normed_back, keep_scratch=False),
)


# ---- autograd ----


class WeightGrads(NamedTuple):
    """Where the gradients of both weights go."""

    vectors: VectorGrads | None  # None: to autograd
    into: KernelTargets | None  # what the kernel adds to, if it can

    def direct(self) -> dict[str, Any]:
        """What the kernel's call is told."""
        return {} if self.into is None else {"into": self.into.tensors}

    def put(self, dweights: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Return what autograd gets."""
        return dweights if self.vectors is None else self.vectors.put(self.into, *dweights)


def weight_grads(
    ctx: Any, count: int, operands: tuple[Tensor | None, ...], weights: Sequence[Tensor | None]
) -> tuple[tuple[bool, ...], Sequence[Tensor | None], WeightGrads]:
    """Return which gradients the pass wants, the weights for the kernel, and where their gradients go.

    The weights are the last two of the Function's first `count` arguments. ctx.vectors is what `saved_vectors` returned.
    operands: what else the kernel reads.
    """
    needs = ctx.needs_input_grad[:count]
    if ctx.vectors is None:
        return needs, weights, WeightGrads(None, None)
    vectors, main_grads = ctx.vectors
    grads = VectorGrads(vectors, main_grads, grad_requests(ctx, count)[-2:])
    into = grads.into(*operands, *weights)
    if into is None:
        weights = tuple(grads.wide(*weights))
    return (*needs[:-2], *grads.needed()), weights, WeightGrads(grads, into)


class _NormedRopeFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, options: NormedRopeOptions
    ) -> Any:
        ctx.options = options
        ctx.vectors = saved_vectors(ctx, 2, q_weight, k_weight)
        ctx.set_materialize_grads(False)  # one of the two may have been used alone
        ctx.save_for_backward(cos, sin, q, k, q_weight, k_weight)
        rotated = _normed_op(cos, sin, q, k, q_weight, k_weight, options)
        need_q, need_k, need_q_weight, need_k_weight, *_ = ctx.needs_input_grad
        for y, needs in zip(rotated, (need_q or need_q_weight, need_k or need_k_weight), strict=True):
            if not needs:  # the result of frozen inputs is frozen too
                ctx.mark_non_differentiable(y)
        return rotated

    @staticmethod
    @not_twice_differentiable
    def backward(ctx: Any, dq: Tensor | None, dk: Tensor | None) -> tuple[Tensor | None, ...]:
        cos, sin, q, k, *weights = ctx.saved_tensors
        needs, weights, grads = weight_grads(ctx, 4, (dq, dk, q, k), weights)
        asked = HeadGradients(*needs)
        dq, dk, *dweights = _normed_back_op(cos, sin, dq, dk, q, k, *weights, ctx.options, asked, **grads.direct())
        return dq, dk, *grads.put(dweights), None, None, None


_apply = fast_apply(_NormedRopeFunction)


# ---- the call ----


def normed_rope(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, options: NormedRopeOptions,
    use_triton: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return q and k normalised and rotated, by the kernels or by PyTorch."""
    if not use_triton:
        weights = with_fp32_grads(q_weight, k_weight)
        q, k = (normed_rope_blocks(x, w, cos, sin, *options) for x, w in zip((q, k), weights, strict=True))
        return q, k
    q_weight, k_weight = contiguous_param(q_weight), contiguous_param(k_weight)  # type: ignore[assignment]
    if needs_grad(q, k, q_weight, k_weight):
        return _apply(q, k, q_weight, k_weight, cos, sin, options)  # type: ignore[no-any-return]
    return _normed_op(cos, sin, q, k, q_weight, k_weight, options)  # type: ignore[no-any-return]
