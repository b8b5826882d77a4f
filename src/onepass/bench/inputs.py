"""Draw the tensors of a case."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Parameter

from onepass.bench.model import BenchCase


class Random:
    """Draws tensors of normal numbers in the case's dtype. Called, it returns one that is not differentiated."""

    def __init__(self, case: BenchCase, device: torch.device, generator: torch.Generator) -> None:
        self.dtype, self.device, self.generator = case.dtype, device, generator

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, device=self.device, dtype=self.dtype)

    def input(self, *shape: int) -> Tensor:
        return self(*shape).requires_grad_()

    def parameter(self, *shape: int) -> Parameter:
        return Parameter(self(*shape))

    def weight(self, outer: int, inner: int) -> Parameter:
        """Return a product's weight, which leaves numbers as large as they are."""
        return Parameter(self(outer, inner).mul_(inner**-0.5))

    def integers(self, top: int, *shape: int) -> Tensor:
        return torch.randint(top, shape, generator=self.generator, device=self.device)

    def rotations(self, tokens: int, width: int) -> dict[str, Tensor]:
        """Return tables of rotary positions."""
        speeds = 10000 ** -torch.arange(0, 1, 2 / width, device=self.device)
        angles = torch.arange(tokens, device=self.device)[:, None] * speeds
        return {"cos": angles.cos(), "sin": angles.sin()}


def give_main_grad(parameter: Tensor) -> None:
    """Give a parameter an fp32 main_grad, and a hook that adds .grad to it. onepass adds to main_grad and leaves no .grad."""
    main_grad = torch.zeros_like(parameter, dtype=torch.float32)
    parameter.main_grad = main_grad  # type: ignore[attr-defined]

    def add(parameter: Tensor) -> None:
        if parameter.grad is not None:
            main_grad.add_(parameter.grad)
            parameter.grad = None

    parameter.register_post_accumulate_grad_hook(add)
