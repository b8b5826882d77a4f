"""Initial values of fp32 master weights: the random values before their rounding to the model's dtype.

A master that starts as its bf16 weight is in the middle of the interval that rounds to it. The weight would not change until
steps add up to half a unit in its last place. With a slow learning-rate warmup the first steps would have no effect.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn


def narrow_type(model: nn.Module) -> torch.dtype:
    """Return the narrowest dtype of the parameters: that of matrices, as norms may have a wider one."""
    types = {parameter.dtype for parameter in model.parameters()}
    return min(types, key=lambda dtype: dtype.itemsize, default=torch.float32)


@torch.no_grad()
def drawn(model: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, fp32 initial values) of each parameter that its module's `reset_parameters` initialises, module by module.

    Elements of a parameter that are not these values rounded to `dtype`, such as loaded ones, are yielded as they are.
    """
    seen: set[int] = set()
    for path, module in model.named_modules():
        own = {name: p for name, p in module._parameters.items() if p is not None and id(p) not in seen}
        seen |= set(map(id, own.values()))
        if not own or not hasattr(module, "reset_parameters"):
            continue
        for name, values in _started_in_fp32(module, own).items():
            parameter = own[name]
            kept = torch.where(values.to(dtype) == parameter, values, parameter.float())
            yield f"{path}.{name}" if path else name, kept


def _started_in_fp32(module: Any, own: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    stock = module._parameters
    made = {name: nn.Parameter(torch.empty_like(p, dtype=torch.float32), requires_grad=False) for name, p in own.items()}
    module._parameters = {**stock, **made}
    try:
        module.reset_parameters()
    finally:
        module._parameters = stock
    return {name: parameter.detach() for name, parameter in made.items()}
