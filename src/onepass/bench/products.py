"""What the cases of ops with a matrix product share: their shapes by machine, and their random tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from onepass.bench.model import Case

Shape = tuple[str, int, int, int]  # variant, tokens, and the features that go in and come out


@dataclass(frozen=True)
class Shapes:
    """A case file's, for a GPU and for a CPU, of which many multiply bf16 at 1 GFLOP/s; `small` is for --quick."""

    full: list[Shape]
    small: list[Shape]
    cpu: list[Shape]
    cpu_small: list[Shape]

    def of(self, device: torch.device, quick: bool) -> list[Shape]:
        gpu, cpu = (self.small, self.cpu_small) if quick else (self.full, self.cpu)
        return gpu if device.type == "cuda" else cpu


def random_of(case: Case, device: torch.device, generator: torch.Generator) -> Callable[..., Tensor]:
    """Makes tensors of a shape, in the case's type."""

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=case.dtype)

    return random
