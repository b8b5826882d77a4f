"""main_grad of biases and norm weights: an op's kernel adds the column sums there, or a formula's gradient comes in fp32."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onepass.gradients.main_grad import (
    GradRequest,
    accumulates_elsewhere,
    grad_requests,
    in_fsdp,
    kernel_target,
    main_grad_of,
    main_grads_of,
    mark_accumulated,
    vector_gradient,
)
from onepass.runtime.dispatch import needs_dispatcher, not_twice_differentiable, under_functorch

# ---- by the kernel ----


def saved_vectors(ctx: Any, first: int, *vectors: Tensor | None) -> tuple[Any, Any] | None:
    """In forward, return what `VectorGrads` needs of these vectors, which are arguments `first` and on.

    None, the usual case: all gradients go to autograd.
    """
    for vector in vectors:  # a loop, not any(...): as in `needs_dispatcher`
        if accumulates_elsewhere(vector):
            return vectors, main_grads_of(ctx.needs_input_grad[first:], *vectors)
    return None


class VectorGrads(NamedTuple):
    """In backward, the gradients of a call's biases and norm weights, some of which carry main_grad.

    Where it can, the op's kernel adds to main_grad: `into`. Elsewhere the kernel gets those vectors in fp32, `wide`, so that it
    makes fp32 gradients, which are added afterwards. `autograd_grads` is what autograd gets.
    """

    vectors: tuple[Tensor | None, ...]
    main_grads: tuple[Tensor | None, ...]
    requests: Sequence[GradRequest]

    def needed(self) -> tuple[bool, ...]:
        """Which gradients the pass wants at all."""
        return tuple(request is not GradRequest.SKIP for request in self.requests)

    def into(self, *tensors: Tensor | None) -> tuple[Tensor | None, ...] | None:
        """Return what a kernel adds to: main_grads, and zeros for autograd's gradients. None where it can't or need not."""
        moved = list(map(_accumulates, self.vectors, self.requests))
        if not any(moved) or needs_dispatcher(*tensors):  # a registered op writes none of its inputs
            return None
        for vector, main_grad, elsewhere in zip(self.vectors, self.main_grads, moved, strict=True):
            if vector is None or not elsewhere:
                continue
            if main_grad is None or in_fsdp(vector) or not main_grad.is_contiguous() or needs_dispatcher(main_grad):
                return None
        return tuple(map(_kernel_output, *self))

    def wide(self, *vectors: Tensor | None) -> Iterator[Tensor | None]:
        """Yield these vectors, as forward kept them, in fp32 or wider where their gradients go to main_grad."""
        for vector, parameter, request in zip(vectors, self.vectors, self.requests, strict=True):
            if vector is not None and _accumulates(parameter, request):
                vector = vector.to(torch.promote_types(vector.dtype, torch.float32))
            yield vector

    def autograd_grads(self, into: object, *found: Tensor | None) -> Iterator[Tensor | None]:
        """Yield what autograd gets, after gradients that are not in `into` have been put where they belong."""
        for vector, main_grad, request, sums in zip(*self, found, strict=True):
            if vector is None or sums is None:
                yield None
            elif into is not None and _accumulates(vector, request):
                yield mark_accumulated(vector, request)
            else:
                yield vector_gradient(sums, vector, main_grad, request)


def vector_grads(vectors: tuple[Any, Any] | None, request: Sequence[GradRequest]) -> VectorGrads | None:
    """Return the `VectorGrads` of what `saved_vectors` returned and the running pass wants."""
    return None if vectors is None else VectorGrads(*vectors, request)


def _accumulates(vector: Tensor | None, request: GradRequest) -> bool:
    return request in (GradRequest.ACCUMULATE, GradRequest.CAPTURE) and accumulates_elsewhere(vector)


def _kernel_output(vector: Tensor | None, main_grad: Tensor | None, request: GradRequest) -> Tensor | None:
    if request is GradRequest.SKIP or vector is None:
        return None
    return torch.zeros_like(vector) if main_grad is None else kernel_target(main_grad, request)


def contiguous_param(vector: Tensor | None) -> Tensor | None:
    """Return the vector, or a contiguous copy, for the kernels of an op that has `VectorGrads`."""
    if vector is None or vector.is_contiguous():  # not vector.contiguous(): a compiler's result has no main_grad
        return vector
    wide: Any = with_fp32_grad(vector)
    return wide.contiguous()  # type: ignore[no-any-return]


# ---- for formulas ----


class _WithFp32Grad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, vector: Tensor) -> Tensor:
        ctx.vector, ctx.main_grad = vector, main_grad_of(vector)
        return vector.to(torch.promote_types(vector.dtype, torch.float32))

    @staticmethod
    @not_twice_differentiable
    def backward(ctx: Any, sums: Tensor) -> Tensor | None:
        return vector_gradient(sums, ctx.vector, ctx.main_grad, grad_requests(ctx, True)[0])


def with_fp32_grad(vector: Tensor | None) -> Tensor | None:
    """Return the vector; one that carries main_grad in fp32, so that its gradient is fp32 when it is added there.

    A bias or a norm's weight is one row: converting it and adding its gradient cost little but Python.
    """
    if vector is None or not accumulates_elsewhere(vector):  # the usual case
        return vector
    if not (vector.requires_grad and torch.is_grad_enabled()) or under_functorch():
        return vector
    wide: Tensor = _WithFp32Grad.apply(vector)  # type: ignore[no-untyped-call]
    return wide
