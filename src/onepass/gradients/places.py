"""Gradients in their place: an op writes its input's gradient where it lies in a wider one.

One product makes what several ops read, such as q, k and v, and gates. Its gradient has the columns of all. An op whose backward
takes its input's place writes them there, and nothing is put together afterwards.
A place is given out once in a pass: where several ops read a part, their gradients' sum lies elsewhere. What does not lie in its
place is copied there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from onepass.runtime.dispatch import fast_apply, needs_dispatcher, needs_grad, under_functorch

Place = Callable[[], Tensor | None]  # in backward, returns memory for a gradient, or None where that was given out


class _WideGradient:
    """The gradient of a product, and which of its parts have been given out in this pass."""

    def __init__(self, made: Tensor, sizes: list[int]) -> None:
        self.shape, self.dtype, self.device = made.shape, made.dtype, made.device
        self.sizes = sizes
        self.whole: Tensor | None = None
        self.free: set[int] = set()
        self.stream = 0  # that the memory is of: on others an older use of it may still run

    def take(self, part: int) -> Tensor | None:
        if self.whole is None:
            self.whole = torch.empty(self.shape, dtype=self.dtype, device=self.device)
            self.free, self.stream = set(range(len(self.sizes))), _stream(self.device)
        if part not in self.free or self.stream != _stream(self.device):
            return None
        self.free.remove(part)
        return columns_of(self.whole, self.sizes)[part]

    def finish(self, grads: Sequence[Tensor | None]) -> Tensor | None:
        """Return the gradient of this pass, from those of the parts."""
        whole, free = self.whole, self.free
        self.whole, self.free = None, set()
        if all(grad is None for grad in grads):
            return None
        if whole is not None and self.stream == _stream(self.device):
            places = columns_of(whole, self.sizes)
            elsewhere = [i for i, grad in enumerate(grads) if not _lies_at(grad, places[i])]
            if free.issuperset(elsewhere):  # else somebody has written there, and may still read it
                for i in elsewhere:
                    grad = grads[i]
                    places[i].zero_() if grad is None else places[i].copy_(grad)
                return whole
        shapes = [(*self.shape[:-1], size) for size in self.sizes]
        zero = torch.zeros((), dtype=self.dtype, device=self.device)
        return torch.cat([zero.expand(s) if grad is None else grad for grad, s in zip(grads, shapes, strict=True)], -1)


def _stream(device: torch.device) -> int:
    return torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0


def _lies_at(grad: Tensor | None, place: Tensor) -> bool:
    if grad is None or needs_dispatcher(grad):
        return False
    return grad.data_ptr() == place.data_ptr() and grad.stride() == place.stride()


class _Parts(torch.autograd.Function):
    """Split a product's columns into tensors that share its memory but are no views to autograd.

    Views by split can't be written in place, as OLMo does. With views by narrow, each gradient is as wide as the product and
    full of zeros, and autograd adds them up.
    """

    @staticmethod
    def forward(ctx: Any, made: Tensor, gradient: _WideGradient) -> tuple[Tensor, ...]:
        ctx.gradient = gradient
        ctx.set_materialize_grads(False)
        storage, at, parts = made.untyped_storage(), made.storage_offset(), []
        for size in gradient.sizes:
            parts.append(made.new_empty(0).set_(storage, at, (*made.shape[:-1], size), made.stride()))
            at += size * made.stride(-1)
        return tuple(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return ctx.gradient.finish(grads), None


_apart = fast_apply(_Parts)


def parts_of(made: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
    """Split `made` into column ranges that can each be written in place. Nothing else may read `made` afterwards."""
    if len(sizes) == 1 or not needs_grad(made) or needs_dispatcher(made) or under_functorch():
        return columns_of(made, sizes)
    gradient = _WideGradient(made, sizes)
    parts: tuple[Tensor, ...] = _apart(made, gradient)
    if made.is_contiguous():  # so that a part's gradient lies as the part does
        for i, part in enumerate(parts):
            part._gradient_place = partial(gradient.take, i)  # type: ignore[attr-defined]
    return parts


def columns_of(made: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
    """Return views, which unlike those of `split` can be written in place where autograd watches."""
    return tuple(made.narrow(-1, end - size, size) for end, size in zip(accumulate(sizes), sizes, strict=True))


# ---- for ops ----


def place_of(x: Tensor) -> Place | None:
    """In forward, return the place of x's gradient, or None where x is no part."""
    return None if torch.compiler.is_compiling() else getattr(x, "_gradient_place", None)


def empty_gradient(x: Tensor, place: Place | None) -> Tensor:
    """In backward, return memory for x's gradient: its place, if that lies as x does, or contiguous. An x that hooks have
    unpacked, as those of an offload, may lie otherwise than in forward."""
    taken = None if place is None else place()
    if taken is not None and (laid := taken.view(x.shape)).stride() == x.stride():
        return laid
    return torch.empty_like(x, memory_format=torch.contiguous_format)
