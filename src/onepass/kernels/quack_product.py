"""QuACK's grouped product a[rows of g].T @ b[rows of g], where it is installed and was measured to be faster.

It adds to an fp32 main_grad as it stores, where PyTorch's returns 16 bits that a pass of its own adds. Its wheel compiles a
kernel of each kind at the first call, in two seconds. Each tile is one program's, so sums have one order.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass.runtime.sizes import compute_capability
from onepass.runtime.wheels import Wheel, find_functions

_CALLED_BY = {"A", "B", "out", "cu_seqlens_k", "tuned"}
_PARAMETERS = {"gemm": _CALLED_BY, "gemm_add_inplace": _CALLED_BY}
_WARNS = r"(cutlass|quack)\b"
_WHEEL = Wheel("QuACK", "quack-kernels", "pip install quack-kernels", "quack.gemm_interface", _PARAMETERS, _WARNS)
_ALIGNED = 16  # bytes
_LEAST = 1 << 26  # numbers of main_grad: that saves 130 us of memory's time, where QuACK's call takes the CPU 200 us more
_CAPABILITY = 9, 0  # what it was measured on


class QuackFunctions(NamedTuple):
    write: Any
    add: Any


@lru_cache(1)
def quack_functions() -> QuackFunctions | str:
    """Return QuACK's functions, or why there are none. Imports the package, which takes seconds."""
    found = find_functions(_WHEEL)
    return found if isinstance(found, str) else QuackFunctions(*found)


def quack_adds(a: Tensor, main_grad: Tensor) -> bool:
    """Whether QuACK's product may add to main_grad [G, N, K]: in fp32, on a GPU for which it was measured."""
    return (
        a.is_cuda
        and a.dtype is torch.bfloat16
        and main_grad.dtype is torch.float32
        and main_grad.numel() >= _LEAST
        and main_grad.is_contiguous()
        and main_grad.data_ptr() % _ALIGNED == 0
        and compute_capability(a.device) == _CAPABILITY
        and not isinstance(quack_functions(), str)
    )


def add_by_quack(main_grad: Tensor, a: Tensor, b: Tensor, ends: Tensor, keep: bool) -> None:
    """Add a[rows of g].T @ b[rows of g] to main_grad[g], or write it there. `ends` [G] int32: where each group's rows end."""
    functions = quack_functions()
    assert not isinstance(functions, str)
    call = functions.add if keep else functions.write
    with torch.cuda.device_of(a):
        boundaries = F.pad(ends, (1, 0))
        try:
            call(a.t(), b, out=main_grad, cu_seqlens_k=boundaries, tuned=False)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # its compiler, or a library that it loads at the first call
            raise RuntimeError(
                f"QuACK's grouped product failed: {type(error).__name__}: {error}\n"
                "repair the installation of quack-kernels, or uninstall it: PyTorch's product is taken where it is missing"
            ) from error
