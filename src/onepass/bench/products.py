"""What the cases of ops with a matrix product share: their shapes by machine, and their random tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from onepass.bench.model import BenchCase

Shape = tuple[str, int, int, int]  # variant, tokens, and the features that go in and come out
CaseOf = Callable[[str, int, int, int, torch.dtype], BenchCase]  # of a shape and a type


@dataclass(frozen=True)
class Shapes:
    """A case file's, for a GPU and for a CPU, of which many multiply bf16 at 1 GFLOP/s; `small` is for --quick."""

    full: list[Shape]
    small: list[Shape]
    cpu: list[Shape]
    cpu_small: list[Shape]

    def cases(self, case_of: CaseOf) -> Callable[[torch.device, torch.dtype, bool], list[BenchCase]]:
        """What lists a case file's cases for a device and a type, few of them if asked to be quick."""

        def listed(device: torch.device, dtype: torch.dtype, quick: bool) -> list[BenchCase]:
            gpu, cpu = (self.small, self.cpu_small) if quick else (self.full, self.cpu)
            return [case_of(*shape, dtype) for shape in (gpu if device.type == "cuda" else cpu)]

        return listed


def tiny(case_of: CaseOf) -> Callable[[BenchCase], BenchCase]:
    """What makes a case so small that its call is all that takes time."""
    return lambda case: case_of(case.variant, 64, 128, 128, case.dtype)


def random_of(case: BenchCase, device: torch.device, generator: torch.Generator) -> Callable[..., Tensor]:
    """Makes tensors of a shape, in the case's type."""

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=case.dtype)

    return random


def give_main_grad(parameter: Tensor) -> None:
    """And the hook that adds what comes as .grad there: ours leaves nothing in it."""
    main_grad = torch.zeros_like(parameter, dtype=torch.float32)
    parameter.main_grad = main_grad  # type: ignore[attr-defined]

    def add(parameter: Tensor) -> None:
        if parameter.grad is not None:
            main_grad.add_(parameter.grad)
            parameter.grad = None

    parameter.register_post_accumulate_grad_hook(add)
