"""Sample calls with LoRA: of layers, and of heads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onepass.product.lora import LoRA
from onepass.runtime.random_calls import Draw, RandomTensor
from onepass.runtime.samples import Sample


def with_lora(named: dict[str, Tensor]) -> dict[str, Any]:
    """Make a LoRA of the tensors whose names end in ".a" and ".b", if there are such."""
    arguments: dict[str, Any] = dict(named)
    for lora in [name.removesuffix(".a") for name in named if name.endswith(".a")]:
        arguments[lora] = LoRA(arguments.pop(f"{lora}.a"), arguments.pop(f"{lora}.b"), 0.7)
    return arguments


def random_lora(
    draw: Draw, name: str, N: int, K: int, dtype: torch.dtype, kind: str = "weight", likely: float = 0.3
) -> dict[str, RandomTensor]:  # fmt: skip
    """Return a LoRA's parts, or none."""
    if not draw.flag(likely):
        return {}
    rank, of_type = draw.choose((4, 1, 9)), draw.choose((dtype, torch.promote_types(dtype, torch.float32)))
    parameter = kind == "weight"
    return {
        f"{name}.a": RandomTensor((rank, K), of_type, kind, parameter, top=K),
        f"{name}.b": RandomTensor((N, rank), of_type, kind, parameter, top=rank),
    }


@dataclass(frozen=True)
class LoRASample(Sample):
    """A call with LoRA. All tensors have keywords, and those of its a and b end in ".a" and ".b"."""

    def call(self, function: Callable[..., Any], *tensors: Tensor, **more: Any) -> Any:
        return function(**with_lora(dict(zip(self.keywords, tensors, strict=True))), **self.options, **more)
