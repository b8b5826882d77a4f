"""How weights start: each from its own random numbers, so that a rank that has a part of a model makes the same."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Initializer:
    """Called on a whole weight: normal numbers of this spread, of the weight's name and the model's seed alone.

    They are drawn in fp32 on the weight's device, so that types differ by their rounding only.
    """

    seed: int
    std: float
    name: str = ""

    def of(self, name: str, scale: float = 1.0) -> Initializer:
        """For the weight of that name below this one's."""
        return Initializer(self.seed, self.std * scale, f"{self.name}.{name}" if self.name else name)

    def __call__(self, weight: Tensor) -> None:
        if weight.is_meta:
            return
        digest = hashlib.blake2b(f"{self.seed} {self.name}".encode(), digest_size=8).digest()
        generator = torch.Generator(weight.device).manual_seed(int.from_bytes(digest, "little") >> 1)
        drawn = torch.empty(weight.shape, dtype=torch.float32, device=weight.device)
        weight.copy_(drawn.normal_(0.0, self.std, generator=generator))
