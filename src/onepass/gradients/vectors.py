"""main_grad of biases and norm weights: an op's kernel adds the column sums there, or a formula's gradient comes in fp32."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onepass.gradients.main_grad import (
    GradRequest,
    VectorSums,
    accumulates_elsewhere,
    grad_requests,
    in_fsdp,
    kernel_target,
    main_grad_of,
    main_grads_of,
    mark_added,
    placeholder,
    vector_gradients,
)
from onepass.runtime.dispatch import fast_apply, needs_dispatcher, not_twice_differentiable, under_functorch

# ---- by the kernel ----


def saved_vectors(ctx: Any, first: int, *vectors: Tensor | None) -> tuple[Any, Any] | None:
    """In forward, return what `VectorGrads` needs of these vectors, which are arguments `first` and on.

    None, the usual case: all gradients go to autograd.
    """
    for vector in vectors:  # a loop, not any(...): as in `needs_dispatcher`
        if accumulates_elsewhere(vector):
            return vectors, main_grads_of(ctx.needs_input_grad[first:], *vectors)
    return None


class KernelTargets(NamedTuple):
    """What a kernel adds to, and what autograd gets for those that are main_grads: allocated before the kernel runs."""

    tensors: tuple[Tensor | None, ...]  # main_grads, and zeros for autograd's gradients
    placeholders: Sequence[Tensor | None]


class VectorGrads(NamedTuple):
    """In backward, the gradients of a call's biases and norm weights, some of which carry main_grad.

    Where it can, the op's kernel adds to main_grad: `into`. Elsewhere the kernel gets those vectors in fp32, `wide`, so that it
    makes fp32 gradients, which are added afterwards. `put` puts the others where they belong.
    """

    vectors: tuple[Tensor | None, ...]
    main_grads: tuple[Tensor | None, ...]
    requests: Sequence[GradRequest]

    def needed(self) -> tuple[bool, ...]:
        """Which gradients the pass wants at all."""
        return tuple(request is not GradRequest.SKIP for request in self.requests)

    def accumulated(self, *names: str) -> list[str]:
        """Return the names of those vectors whose gradients go to main_grad."""
        moved = map(accumulates, self.vectors, self.requests)
        return [name for name, elsewhere in zip(names, moved, strict=True) if elsewhere]

    def into(self, *tensors: Tensor | None) -> KernelTargets | None:
        """Return what a kernel adds to, or None where it can't or need not."""
        moved = list(map(accumulates, self.vectors, self.requests))
        if not any(moved) or needs_dispatcher(*tensors):  # a registered op writes none of its inputs
            return None
        for vector, main_grad, elsewhere in zip(self.vectors, self.main_grads, moved, strict=True):
            if vector is None or not elsewhere:
                continue
            if main_grad is None or in_fsdp(vector) or not main_grad.is_contiguous() or needs_dispatcher(main_grad):
                return None
        placeholders = [
            placeholder(vector, request) if vector is not None and elsewhere else None
            for vector, request, elsewhere in zip(self.vectors, self.requests, moved, strict=True)
        ]
        return KernelTargets(tuple(map(_kernel_output, *self)), placeholders)

    def wide(self, *vectors: Tensor | None) -> Iterator[Tensor | None]:
        """Yield these vectors, as forward kept them, in fp32 or wider where their gradients go to main_grad."""
        for vector, parameter, request in zip(vectors, self.vectors, self.requests, strict=True):
            if vector is not None and accumulates(parameter, request):
                vector = vector.to(torch.promote_types(vector.dtype, torch.float32))
            yield vector

    def pending(self, into: KernelTargets | None, *found: Tensor | None) -> list[VectorSums | None]:
        """Return, for `vector_gradients`, what the kernel did not add to main_grad. Set the flags of the others."""
        left: list[VectorSums | None] = []
        for vector, main_grad, request, sums in zip(*self, found, strict=True):
            by_kernel = into is not None and accumulates(vector, request)
            if by_kernel:
                mark_added(vector)
            left.append(None if by_kernel or vector is None or sums is None else (sums, vector, main_grad, request))
        return left

    def autograd_grads(self, into: KernelTargets | None, put: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return what autograd gets. `put`: what `vector_gradients` returned for those that were pending."""
        return list(put) if into is None else [b if a is None else a for a, b in zip(put, into.placeholders, strict=True)]

    def put(self, into: KernelTargets | None, *found: Tensor | None) -> list[Tensor | None]:
        """Return what autograd gets, after gradients that are not in `into` have been put where they belong."""
        return self.autograd_grads(into, vector_gradients(self.pending(into, *found))[0])


def vector_grads(vectors: tuple[Any, Any] | None, request: Sequence[GradRequest]) -> VectorGrads | None:
    """Return the `VectorGrads` of what `saved_vectors` returned and the running pass wants."""
    return None if vectors is None else VectorGrads(*vectors, request)


def accumulates(vector: Tensor | None, request: GradRequest) -> bool:
    """Whether the pass adds the vector's gradient to main_grad."""
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


class _WithFp32Grads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *vectors: Tensor) -> tuple[Tensor, ...]:
        ctx.vectors, ctx.main_grads = vectors, [main_grad_of(vector) for vector in vectors]
        ctx.set_materialize_grads(False)
        return tuple([vector.to(torch.promote_types(vector.dtype, torch.float32)) for vector in vectors])

    @staticmethod
    @not_twice_differentiable
    def backward(ctx: Any, *sums: Tensor | None) -> tuple[Tensor | None, ...]:
        requests = grad_requests(ctx, len(sums))
        each = zip(sums, ctx.vectors, ctx.main_grads, requests, strict=True)
        return tuple(vector_gradients([None if s is None else (s, *rest) for s, *rest in each])[0])


_widened = fast_apply(_WithFp32Grads)


def with_fp32_grads(*vectors: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return the vectors; those that carry main_grad in fp32, so that their gradients are fp32 when they are added there.

    A bias or a norm's weight is one row: converting it and adding its gradient cost little but Python.
    """
    moved = [vector is not None and accumulates_elsewhere(vector) and vector.requires_grad for vector in vectors]
    if not any(moved) or not torch.is_grad_enabled() or under_functorch():
        return vectors
    wide: Any = _widened(*[vector for vector, moves in zip(vectors, moved, strict=True) if moves])
    found = iter(wide)
    return tuple([next(found) if moves else vector for vector, moves in zip(vectors, moved, strict=True)])


def with_fp32_grad(vector: Tensor | None) -> Tensor | None:
    """`with_fp32_grads` of one vector."""
    return vector if vector is None or not accumulates_elsewhere(vector) else with_fp32_grads(vector)[0]
