"""What an op's `samples.py` is made of: small calls for self-tests, and calls that between them launch every kernel.

Only tools import these: `onepass doctor`, `onepass explain`, the ahead-of-time compiler and the contract tests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sample:
    """A small call of an op: its tensors in order, its other options, and the formula that takes the same.

    A family's SAMPLES has one for each op under the op's name, for self-tests, and may have more under "op: what is special",
    for the contract tests.
    """

    tensors: Callable[[torch.device, torch.dtype], tuple[Tensor, ...]]
    formula: Callable[..., Any]
    options: dict[str, Any] = field(default_factory=dict)
    keywords: tuple[str, ...] = ()  # names of the last tensors, where they are given by name
    frozen: int = 0  # of the tensors, the last ones: they get no gradient
    dtype: torch.dtype = torch.float32  # one that the kernels take
    roundings: float = 1.0  # times the formula's error: above 1 where operands of products inside are rounded, which it does not

    def call(self, function: Callable[..., Any], *tensors: Tensor, **more: Any) -> Any:
        """Call the op, or the formula, with these tensors in place of the sample's."""
        split = len(tensors) - len(self.keywords)
        named = dict(zip(self.keywords, tensors[split:], strict=True))
        return function(*tensors[:split], **named, **self.options, **more)


@dataclass(frozen=True)
class CoveringCall:
    """A call that launches kernels, on tensors of the meta device; `run` returns what to differentiate."""

    label: str
    dtype: torch.dtype
    run: Callable[[], Tensor]
    least_arch: int = 80  # the first architecture that has the instructions


LARGE = (16384, 16384)
SHAPES = ((16384, 14336), (2048, 16384), (600_000, 64), (777, 5000), (131_072, 1408), (37, 1))
NARROW = ((37, 1), (60_000, 16), (4096, 96))  # fp8 has a scale a block of columns: here a row is less than one, or few
SEED, THRESHOLD = 1 << 62, 6554  # as a number, as it is in eager mode on a GPU


def random_tensors(shapes: tuple[tuple[int, ...], ...], device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Normal numbers, the same in each call."""
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(*shape, generator=generator, device="cpu").to(device, dtype) for shape in shapes)


def weights_of(y: Tensor) -> Tensor:
    """A gradient to come back to y. Not ones: the sum of a softmax, or of a norm, is a number that x has no part in."""
    return torch.linspace(0.5, 1.5, y.numel(), dtype=torch.float64, device=y.device).view(y.shape).to(y.dtype)


def meta(*shape: int, dtype: torch.dtype, requires_grad: bool = True) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta", requires_grad=requires_grad)


def give_main_grad(*parameters: Any) -> None:
    for parameter in parameters:
        parameter.main_grad = torch.empty_like(parameter, dtype=torch.float32, requires_grad=False)
