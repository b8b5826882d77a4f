"""Option values that all subcommands share: the names of dtypes and devices."""

from __future__ import annotations

import re

import torch

from onepass.runtime.ceilings import default_device
from onepass.runtime.errors import CommandError

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}


def short(dtype: torch.dtype) -> str:
    return next((name for name, known in DTYPES.items() if known is dtype), str(dtype))


def find_device(named: str | None, pretend: bool = False) -> torch.device:
    """Return the device that `--device` names; by default a GPU if there is one. Raise CommandError if there is no such device.

    `pretend`: accept any GPU's name on a machine that has no GPU at all.
    """
    if named is None:
        return default_device()
    match = re.fullmatch(r"cpu|cuda(?::(\d+))?", named)
    if match is None:
        raise CommandError(f"--device must be cuda, cuda:N or cpu, but is {named!r}")
    count = torch.cuda.device_count()
    if named != "cpu" and int(match[1] or 0) >= count and not (pretend and not count):
        here = f"one of the {count} GPUs here, cuda:0 to cuda:{count - 1}" if count else "cpu, as PyTorch sees no GPU here"
        raise CommandError(f"--device must be {here}, but is {named}")
    return torch.device(named)
