"""What is known of FLA's kernels, and of other wheels', by the ops that call them."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from onepass.kernels.language import triton
from onepass.runtime.sizes import compute_capability
from onepass.runtime.wheels import constant

_TYPES = (torch.bfloat16, torch.float16)
_WRONG = (3, 4, 0), (3, 7, 1)  # from the first on, before the second


@constant
def has_wrong_triton() -> bool:
    """Whether gradients of gated rules are wrong on Hopper with the installed Triton (FLA's issue 640)."""
    if triton is None:  # an explanation for a GPU that is elsewhere
        return False
    first, fixed = _WRONG
    version = tuple(int(part) for part in re.findall(r"\d+", triton.__version__)[:3])
    return first <= version < fixed


def refused_operands(**operands: Tensor) -> str | None:
    """Say why no wheel's kernels can take these operands, or None."""
    (first, whole), *_ = operands.items()
    if not whole.is_cuda:
        return f"{first} is on {whole.device}, and kernels of wheels need a GPU"
    for name, operand in operands.items():
        if operand.dtype not in _TYPES or operand.dtype is not whole.dtype:
            *others, last = operands
            return f"{name} is {operand.dtype}, and kernels of wheels take {', '.join(others)} and {last} of one type of 16 bits"
    return None


def refused_gradients(device: torch.device, instead: str) -> str | None:
    """Say why FLA's gradients can't be taken on a device, or None. `instead`: another wheel."""
    if compute_capability(device)[0] != 9 or not has_wrong_triton():
        return None
    return f"FLA's gradients are wrong with Triton {triton.__version__} on Hopper: install Triton 3.7.1 or newer, or {instead}"
