"""Triton, or a stand-in where it is not installed: everything still imports, and runs as PyTorch."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from onepass.runtime.extras import install

SUPPORTED = ("3.5.", "3.6.", "3.7.")  # the versions the kernels are written for; `onepass doctor` says when yours is another


class _Missing:
    """Stands where `triton.language` would: any attribute, any call."""

    def __getattr__(self, name: str) -> _Missing:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self


triton: Any
tl: Any
try:
    import triton
    import triton.language as tl
except ImportError:
    triton, tl = None, _Missing()

INTERPRETED = triton is not None and os.environ.get("TRITON_INTERPRET") == "1"


PTX = tl.constexpr(triton is not None and not INTERPRETED and torch.version.hip is None)  # whether kernels may hold some


def device_function(function: Any) -> Any:
    """Mark a function that kernels call."""
    return triton.jit(function) if triton else function


def no_triton(x: Tensor) -> str | None:
    """Why Triton can't run on x, or None. Under the interpreter CPU tensors are as good as any."""
    if triton is None:
        return f"triton is not installed ({install('triton')})"
    if INTERPRETED:
        return None if x.device.type == "cpu" else "Triton's interpreter takes CPU tensors only"
    if not x.is_cuda:
        return f"x is on {x.device.type}"
    if type(x) is not Tensor and type(x).__name__ == "DTensor":
        return "x is a DTensor, for which the kernels have no sharding rule"
    index = x.get_device()
    if index not in _no_kernels and not torch.compiler.is_compiling():
        _no_kernels[index] = _why_no_kernels(index)
    return _no_kernels.get(index)


_no_kernels: dict[int, str | None] = {}  # what was found out about each GPU, in a form that the compiler can look up


def _why_no_kernels(index: int) -> str | None:
    if torch.version.hip is not None:
        return "the kernels were written for and tried on NVIDIA GPUs only"
    major, minor = torch.cuda.get_device_capability(index)
    return None if major >= 8 else f"the GPU has compute capability {major}.{minor}, and the kernels need 8.0"
