"""Time a graph as written and as fused, on random inputs of the shapes that it was compiled for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import GraphModule

from onepass.fusion.report import Times
from onepass.runtime.ceilings import clock_for


@dataclass(frozen=True)
class InputSpec:
    """The properties of a graph's input. The input itself is not kept, because it is as large as the user's data."""

    made: Callable[[], Any]
    is_parameter: bool

    @classmethod
    def like(cls, example: Any) -> InputSpec:
        if isinstance(example, torch.SymInt):
            hint = example.node.hint
            return cls(lambda: hint, is_parameter=False)
        if not isinstance(example, Tensor):
            return cls(lambda: example, is_parameter=False)
        sizes, strides = ([int(n) for n in numbers] for numbers in (example.shape, example.stride()))
        dtype, device, wants_grad = example.dtype, example.device, example.requires_grad
        parameter = isinstance(example, nn.Parameter)

        def made() -> Tensor:
            tensor = torch.empty_strided(sizes, strides, dtype=dtype, device=device)
            own = torch.Generator(device)  # keeps the user's random state unchanged
            with torch.no_grad():
                tensor.normal_(generator=own) if dtype.is_floating_point else tensor.zero_()
            return nn.Parameter(tensor, wants_grad) if parameter else tensor.requires_grad_(wants_grad)

        return cls(made, parameter)


@dataclass
class FusionTrial:
    written: GraphModule
    fused: Callable[..., Any]
    inputs: list[InputSpec]
    device: torch.device

    def times(self) -> Times:
        with unset_fake_temporarily():
            inputs = [spec.made() for spec in self.inputs]
            clock = clock_for(self.device)
            return Times(*(clock.median(_step(fn, inputs), budget_ms=20.0) for fn in (self.written, self.fused)))


def _step(fn: Callable[..., Any], inputs: list[Any]) -> Callable[[Any], object]:
    wanted = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]

    def step(_: Any) -> object:
        outputs = fn(*inputs)
        outputs = [y for y in (outputs if isinstance(outputs, tuple | list) else [outputs]) if isinstance(y, Tensor)]
        ends = [y for y in outputs if y.requires_grad]
        if not wanted or not ends or not torch.is_grad_enabled():
            return outputs
        return torch.autograd.grad(ends, wanted, [torch.ones_like(y) for y in ends], allow_unused=True)

    return step
