"""Weight initialisation. Each weight has its own random stream, so its values do not depend on how ranks divide the model."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Initializer:
    """Fill a whole weight with normal values of this standard deviation. They depend on the weight's name and the seed only.

    The values are drawn in fp32 on the weight's device, so dtypes differ only by rounding.
    """

    seed: int
    std: float
    name: str = ""

    def of(self, name: str, scale: float = 1.0) -> Initializer:
        """Return the initializer of the child `name`, a module or weight, with the standard deviation times `scale`."""
        return Initializer(self.seed, self.std * scale, f"{self.name}.{name}" if self.name else name)

    def __call__(self, weight: Tensor) -> None:
        if weight.is_meta:
            return
        digest = hashlib.blake2b(f"{self.seed} {self.name}".encode(), digest_size=8).digest()
        generator = torch.Generator(weight.device).manual_seed(int.from_bytes(digest, "little") >> 1)
        drawn = torch.empty(weight.shape, dtype=torch.float32, device=weight.device)
        weight.copy_(drawn.normal_(0.0, self.std, generator=generator))
