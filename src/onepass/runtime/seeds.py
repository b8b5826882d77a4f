"""Where an op's random numbers begin: a seed from PyTorch's default generator of the device, without waiting for the device.

torch.manual_seed repeats it, and so does whatever saves a generator's state and puts it back, as activation checkpointing does.
In plain eager mode on a GPU the CPU reads the generator's place in its sequence and moves it on, and the seed is a number:
nothing is launched, nothing kept on the GPU. Where a graph is recorded, or a compiler or a transform looks on, it is a tensor,
which a small kernel makes, and each replay draws anew.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onepass.runtime.dispatch import transformed, watched
from onepass.runtime.tables import capturing

_TOP = 1 << 62  # set in all that are numbers: kernels would be compiled once more for those that 32 bits hold
_STEP = 0x9E3779B97F4A7C15  # 2**64 over the golden ratio: places of one seed, and of seeds near it, stay apart
_TAKEN = 4  # generators count random numbers in fours


def drawn_seed(x: Tensor, *others: Tensor | None) -> Tensor | int:
    """A seed below 2**63 for a call on these tensors: a number, or [1] int64 on x's device. Each call moves the generator on."""
    if x.is_cuda and not (watched(x, *others) or transformed() or capturing(x.device)):
        generator: Any = torch.cuda.default_generators[x.get_device()]
        place = generator.get_offset()
        generator.set_offset(place + _TAKEN)
        return _mixed(generator.initial_seed(), place)
    return torch.randint((1 << 63) - 1, (1,), dtype=torch.int64, device=x.device)


def _mixed(seed: int, place: int) -> int:
    """One number of a generator's seed and its place. It is a key, whose neighbours give bits as unlike as any."""
    return (seed + (place // _TAKEN + 1) * _STEP) & (_TOP - 1) | _TOP


def as_tensor(seed: Tensor | int, device: torch.device) -> Tensor:
    """The seed on the device."""
    return seed if isinstance(seed, Tensor) else torch.full((1,), seed, dtype=torch.int64, device=device)
