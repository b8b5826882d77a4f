"""Helpers for case files of ops with a matrix product: shapes for each device, random tensors and main_grad."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from onepass.bench.model import BenchCase
from onepass.runtime.fp8 import unfit_gpu

Shape = tuple[str, int, int, int]  # variant, tokens, input features, output features
CaseOf = Callable[[str, int, int, int, torch.dtype], BenchCase]  # makes a case from a Shape and a dtype


@dataclass(frozen=True)
class Shapes:
    """A case file's shapes for a GPU and for a CPU. Many CPUs multiply bf16 at 1 GFLOP/s. Small shapes are for --quick."""

    full: list[Shape]
    small: list[Shape]
    cpu: list[Shape]
    cpu_small: list[Shape]

    def cases(self, case_of: CaseOf) -> Callable[[torch.device, torch.dtype, bool], list[BenchCase]]:
        """Return a function that lists the cases for a device and a dtype, fewer with `quick`."""

        def listed(device: torch.device, dtype: torch.dtype, quick: bool) -> list[BenchCase]:
            gpu, cpu = (self.small, self.cpu_small) if quick else (self.full, self.cpu)
            cases = [case_of(*shape, dtype) for shape in (gpu if device.type == "cuda" else cpu)]
            return [case for case in cases if not case.fp8 or has_fp8(device)]

        return listed


def has_fp8(device: torch.device) -> bool:
    """Whether eight bits run on the device. A GPU that is named on a machine without one counts as one that has them."""
    return device.type != "cuda" or not torch.cuda.is_available() or unfit_gpu(device) is None


def tiny(case_of: CaseOf) -> Callable[[BenchCase], BenchCase]:
    """Return a function that makes a case so small that the CPU's time dominates."""
    return lambda case: case_of(case.variant, 64, 128, 128, case.dtype)


def random_of(case: BenchCase, device: torch.device, generator: torch.Generator) -> Callable[..., Tensor]:
    """Return a function that makes random tensors of a shape, in the case's dtype."""

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=case.dtype)

    return random


def give_main_grad(parameter: Tensor) -> None:
    """Give a parameter an fp32 main_grad, and a hook that adds .grad to it. onepass adds to main_grad and leaves no .grad."""
    main_grad = torch.zeros_like(parameter, dtype=torch.float32)
    parameter.main_grad = main_grad  # type: ignore[attr-defined]

    def add(parameter: Tensor) -> None:
        if parameter.grad is not None:
            main_grad.add_(parameter.grad)
            parameter.grad = None

    parameter.register_post_accumulate_grad_hook(add)
