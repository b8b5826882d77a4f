"""Seeds of an op's random numbers, from PyTorch's default generator of the device, without waiting for the device.

torch.manual_seed repeats a seed, and so does restoring a generator's state, as activation checkpointing does. In plain eager mode
on a GPU the CPU reads the generator's offset and advances it, and the seed is a number: no launch, and nothing kept on the GPU.
Under CUDA graphs, compilers and transforms the seed is a tensor that a small kernel makes, and each replay draws a new one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onepass.kernels.device_tables import is_capturing
from onepass.runtime.dispatch import needs_dispatcher, under_functorch

_TOP = 1 << 62  # set in all numbers: Triton would compile kernels again for numbers of 32 bits
_STEP = 0x9E3779B97F4A7C15  # 2**64 over the golden ratio: keeps offsets of one seed, and of nearby seeds, apart
_TAKEN = 4  # generators count random numbers in fours


def draw_seed(x: Tensor, *others: Tensor | None) -> Tensor | int:
    """Draw a seed below 2**63 for a call on these tensors: a number, or [1] int64 on x's device. It advances the generator."""
    # needs_dispatcher: a graph that is traced must draw the seed itself
    if x.is_cuda and not (needs_dispatcher(x, *others) or under_functorch() or is_capturing(x.device)):
        generator: Any = torch.cuda.default_generators[x.get_device()]
        place = generator.get_offset()
        generator.set_offset(place + _TAKEN)
        return _mix(generator.initial_seed(), place)
    return torch.randint((1 << 63) - 1, (1,), dtype=torch.int64, device=x.device)


def _mix(seed: int, place: int) -> int:
    """Mix a generator's seed and offset into one number. It is a key: neighbouring keys give unrelated bits."""
    return (seed + (place // _TAKEN + 1) * _STEP) & (_TOP - 1) | _TOP


def as_tensor(seed: Tensor | int, device: torch.device) -> Tensor:
    """Return the seed as a tensor on the device."""
    return seed if isinstance(seed, Tensor) else torch.full((1,), seed, dtype=torch.int64, device=device)
