"""What the checks of ops take: an op's sample call, by one backend on one device."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onepass.runtime.op import Op
from onepass.runtime.samples import Sample, weights_of


@dataclass(frozen=True)
class Subject:
    """An op's sample call by one backend on one device."""

    op: Op
    backend: str | None
    device: torch.device
    sample: Sample

    def tensors(self, dtype: torch.dtype | None = None) -> list[Tensor]:
        """Return the sample's tensors. Floating-point ones require grad, except for the last `sample.frozen`."""
        tensors = self.sample.tensors(self.device, dtype or (self.sample.dtype if self.backend == "triton" else torch.float32))
        last = len(tensors) - self.sample.frozen
        return [t.requires_grad_(t.is_floating_point() and i < last) for i, t in enumerate(tensors)]

    def names(self) -> list[str]:
        """Return the names of the arguments that the sample's tensors are given as."""
        split = len(self.sample.tensors(self.device, torch.float32)) - len(self.sample.keywords)
        return [*list(inspect.signature(self.op.function).parameters)[:split], *self.sample.keywords]

    def run(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return as_tuple(self.sample.call(self.op.function, *tensors, backend=self.backend))

    def gradients(self, tensors: list[Tensor], ys: tuple[Tensor, ...] | None = None, **how: Any) -> list[Tensor]:
        """Return the gradients of a weighted sum of all outputs, by the tensors that require grad."""
        ys = self.run(*tensors) if ys is None else ys
        return list(torch.autograd.grad(weighted_sum(ys), [t for t in tensors if t.requires_grad], **how))


def as_tuple(found: Any) -> tuple[Tensor, ...]:
    """Return the results as a tuple, without those that were not asked for."""
    return tuple(y for y in found if y is not None) if isinstance(found, tuple) else (found,)


def weighted_sum(ys: tuple[Tensor, ...]) -> Tensor:
    """Return one number that depends on every element of the results that have gradients."""
    # under torch.func nothing requires grad, and what is no function of the inputs has no tangent either
    floating = [y for y in ys if y.is_floating_point()]
    asked = [y for y in floating if y.requires_grad] or floating
    total: Tensor = sum((y.float() * weights_of(y).float()).sum() for y in asked)  # type: ignore[assignment]
    return total
