"""QuACK's grouped products, where it is installed and was measured to be faster: of rows, and of weights' gradients.

The latter, a[rows of g].T @ b[rows of g], are added to an fp32 main_grad as they are stored, where PyTorch's returns 16 bits that
a pass of its own adds. The wheel compiles a kernel of each kind at the first call, in two seconds. Each tile is one program's, so
sums have one order.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass.kernels.layout import lies_evenly
from onepass.runtime.dispatch import has_address
from onepass.runtime.sizes import compute_capability
from onepass.runtime.wheels import Wheel, find_functions

_CALLED_BY = {"A", "B", "out", "cu_seqlens_k", "tuned"}
_PARAMETERS = {"gemm": {*_CALLED_BY, "cu_seqlens_m"}, "gemm_add_inplace": _CALLED_BY}
_WARNS = r"(cutlass|quack)\b"
_WHEEL = Wheel("QuACK", "quack-kernels", "pip install quack-kernels", "quack.gemm_interface", _PARAMETERS, _WARNS)
_LEAST_ADDED = 1 << 26  # numbers of main_grad: that saves 130 us of memory's time, where the call takes the CPU 200 us more
_LEAST_MULTIPLIED = 1 << 37  # multiplications: half as many, of rows, take 6 % more than PyTorch's, and twice as many 6 % less
_CAPABILITY = 9, 0  # what it was measured on


class QuackFunctions(NamedTuple):
    write: Any
    add: Any


@lru_cache(1)
def quack_functions() -> QuackFunctions | str:
    """Return QuACK's functions, or why there are none. Imports the package, which takes seconds."""
    found = find_functions(_WHEEL)
    return found if isinstance(found, str) else QuackFunctions(*found)


def _can(*operands: Tensor) -> bool:
    """Whether QuACK is there, for a GPU for which it was measured, and takes these as they lie."""
    return (
        all([has_address(operand) and lies_evenly(operand) for operand in operands])
        and compute_capability(operands[0].device) == _CAPABILITY
        and not isinstance(quack_functions(), str)
    )


def quack_multiplies(a: Tensor, b: Tensor, multiplications: int, of_gradient: bool = False) -> bool:
    """Whether QuACK's product of rows, or of a gradient, in 16 bits is faster than PyTorch's, by more than its call takes."""
    least = _LEAST_MULTIPLIED // 2 if of_gradient else _LEAST_MULTIPLIED  # it saves twice as much of a gradient
    return a.is_cuda and a.dtype is torch.bfloat16 and multiplications >= least and _can(a, b)


def quack_adds(a: Tensor, main_grad: Tensor, *more: Tensor) -> bool:
    """Whether QuACK's product may add to main_grad [G, N, K]: in fp32. more: the other operand, where it is there already."""
    return (
        a.is_cuda
        and a.dtype is torch.bfloat16
        and main_grad.dtype is torch.float32
        and main_grad.numel() >= _LEAST_ADDED
        and main_grad.is_contiguous()
        and _can(a, main_grad, *more)
    )


def multiply_by_quack(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """Return a @ b[g].T for each group's rows, b [G, N, K]. `ends` [G] int32: where each group's rows end."""
    y = a.new_empty(a.shape[0], b.shape[1])
    _call("write", a, b.mT, out=y, cu_seqlens_m=F.pad(ends, (1, 0)))
    return y


def add_by_quack(out: Tensor, a: Tensor, b: Tensor, ends: Tensor, keep: bool) -> None:
    """Add a[rows of g].T @ b[rows of g] to out[g], or write it there."""
    _call("add" if keep else "write", a.t(), b, out=out, cu_seqlens_k=F.pad(ends, (1, 0)))


def _call(name: str, *operands: Tensor, **options: Any) -> None:
    with torch.cuda.device_of(operands[0]):
        try:
            getattr(quack_functions(), name)(*operands, **options, tuned=False)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # its compiler, or a library that it loads at the first call
            raise RuntimeError(
                f"QuACK's grouped product failed: {type(error).__name__}: {error}\n"
                "repair the installation of quack-kernels, or uninstall it: PyTorch's product is taken where it is missing"
            ) from error
