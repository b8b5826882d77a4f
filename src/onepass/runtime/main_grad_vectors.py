"""main_grad of biases and norm weights: gathered by the kernel whose column sums they are, or by a formula's gradient in fp32."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onepass.runtime.dispatch import once, transformed, watched
from onepass.runtime.main_grad import (
    Asked,
    asked,
    has_own_place,
    in_fsdp,
    main_grad_of,
    main_grads_of,
    place_for,
    settled,
    vector_gradient,
)

# ---- by the kernel ----


def vectors_of(ctx: Any, first: int, *vectors: Tensor | None) -> tuple[Any, Any] | None:
    """In forward, what `Sums` is to know of them: arguments `first` and on. None where none has a place of its own, as usual."""
    for vector in vectors:  # a loop, not any(...): as in `watched`
        if has_own_place(vector):
            return vectors, main_grads_of(ctx.needs_input_grad[first:], *vectors)
    return None


class Sums(NamedTuple):
    """In backward, the gradients of a call's biases and norm weights, some of which have a place of their own.

    Where it can be, the op's kernel adds to main_grad: `into`. Elsewhere the kernel is given those vectors in fp32, `wide`, so
    that the gradients which it makes are fp32 when they are added. `settled` is what autograd gets.
    """

    vectors: tuple[Tensor | None, ...]
    main_grads: tuple[Tensor | None, ...]
    wanted: Sequence[Asked]

    def needed(self) -> tuple[bool, ...]:
        """Whose gradients the pass wants at all."""
        return tuple(wanted is not Asked.NOT for wanted in self.wanted)

    def into(self) -> tuple[Tensor | None, ...] | None:
        """What a kernel adds to: main_grads, and zeros for what is autograd's. None where it is to add to none, or can't."""
        moved = list(map(_is_moved, self.vectors, self.wanted))
        if not any(moved):
            return None
        for vector, main_grad, elsewhere in zip(self.vectors, self.main_grads, moved, strict=True):
            if vector is None or not elsewhere:
                continue
            if main_grad is None or in_fsdp(vector) or not main_grad.is_contiguous() or watched(main_grad):
                return None
        return tuple(map(_summed_into, *self))

    def wide(self, *vectors: Tensor | None) -> Iterator[Tensor | None]:
        """These vectors, as forward kept them, in fp32 or wider where their gradients go elsewhere than to autograd."""
        for vector, parameter, wanted in zip(vectors, self.vectors, self.wanted, strict=True):
            if vector is not None and _is_moved(parameter, wanted):
                vector = vector.to(torch.promote_types(vector.dtype, torch.float32))
            yield vector

    def settled(self, into: object, *found: Tensor | None) -> Iterator[Tensor | None]:
        """What autograd gets for gradients that are in `into`, or are still to be put where they belong."""
        for vector, main_grad, wanted, sums in zip(*self, found, strict=True):
            if vector is None or sums is None:
                yield None
            elif into is not None and _is_moved(vector, wanted):
                yield settled(vector, wanted)
            else:
                yield vector_gradient(sums, vector, main_grad, wanted)


def sums_of(vectors: tuple[Any, Any] | None, wanted: Sequence[Asked]) -> Sums | None:
    """Of what `vectors_of` found, and what the pass that runs wants of each."""
    return None if vectors is None else Sums(*vectors, wanted)


def _is_moved(vector: Tensor | None, wanted: Asked) -> bool:
    return wanted in (Asked.GATHERED, Asked.CAPTURED) and has_own_place(vector)


def _summed_into(vector: Tensor | None, main_grad: Tensor | None, wanted: Asked) -> Tensor | None:
    if wanted is Asked.NOT or vector is None:
        return None
    return torch.zeros_like(vector) if main_grad is None else place_for(main_grad, wanted)


def packed(vector: Tensor | None) -> Tensor | None:
    """A contiguous vector, for the kernels of an op that has `Sums`: itself, or one that has to be copied."""
    if vector is None or vector.is_contiguous():  # not vector.contiguous(): a compiler's has no main_grad
        return vector
    wide: Any = gathered(vector)
    return wide.contiguous()  # type: ignore[no-any-return]


# ---- for formulas, which know nothing of it ----


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, vector: Tensor) -> Tensor:
        ctx.vector, ctx.main_grad = vector, main_grad_of(vector)
        return vector.to(torch.promote_types(vector.dtype, torch.float32))

    @staticmethod
    @once
    def backward(ctx: Any, sums: Tensor) -> Tensor | None:
        return vector_gradient(sums, ctx.vector, ctx.main_grad, asked(ctx, True)[0])


def gathered(vector: Tensor | None) -> Tensor | None:
    """The vector for an op to use: where it has a main_grad, in fp32, so that its gradient is fp32 when it gets there.

    A bias or a norm's weight is a row: its conversion and its gradient's addition are next to nothing, but for Python. Others
    come back at once.
    """
    if vector is None or not has_own_place(vector):  # the usual case
        return vector
    if not (vector.requires_grad and torch.is_grad_enabled()) or transformed():
        return vector
    wide: Tensor = _Gathered.apply(vector)  # type: ignore[no-untyped-call]
    return wide
