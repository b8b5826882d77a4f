"""Triton, or a placeholder where it is not installed: everything still imports, and runs as PyTorch."""

from __future__ import annotations

import os
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor

from onepass.runtime.dispatch import under_functorch
from onepass.runtime.errors import install_hint

# the versions the kernels are written for; `onepass doctor` says when yours is another
SUPPORTED = ("3.5.", "3.6.", "3.7.", "3.8.", "3.9.")


class _Missing:
    """Replaces `triton.language`: it has every attribute and takes every call."""

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

VERSION = (0, 0) if triton is None else tuple(map(int, triton.__version__.split(".")[:2]))
INTERPRETED = triton is not None and os.environ.get("TRITON_INTERPRET") == "1"


PTX = tl.constexpr(triton is not None and not INTERPRETED and torch.version.hip is None)  # whether kernels may hold inline PTX


def device_function(function: Any) -> Any:
    """Mark a function that kernels call. `jit` hands it to Triton, which at import would take 1 ms to read its source."""
    function.__dict__["is_device_function"] = True
    return function


def as_device_function(function: Any) -> Any:
    """Return what Triton makes of a marked function, and anything else as it is."""
    if not isinstance(function, FunctionType) or "is_device_function" not in function.__dict__:
        return function
    if "jit" not in function.__dict__:
        function.__dict__["jit"] = jit(function)
    return function.__dict__["jit"]


def jit(function: Any, **options: Any) -> Any:
    """`triton.jit`, after the device functions that the function names have been handed to Triton."""
    for names in (function.__globals__, *_modules_of(function)):
        for name in function.__code__.co_names:
            if name in names:
                names[name] = as_device_function(names[name])
    return triton.jit(function, **options)


def _modules_of(function: FunctionType) -> list[dict[str, Any]]:
    named = (function.__globals__.get(name) for name in function.__code__.co_names)
    return [vars(module) for module in named if isinstance(module, ModuleType) and module.__name__.startswith("onepass.")]


def triton_unsupported(x: Tensor) -> str | None:
    """Return why Triton can't run on x, or None. The interpreter takes CPU tensors."""
    if triton is None:
        return f"triton is not installed ({install_hint('triton')})" if x.is_cuda else f"x is on {x.device.type}"
    if INTERPRETED:
        return None if x.device.type == "cpu" else "Triton's interpreter takes CPU tensors only"
    if not x.is_cuda:
        return f"x is on {x.device.type}"
    index = x.get_device()
    if index not in _no_kernels and not torch.compiler.is_compiling():
        _no_kernels[index] = _why_no_kernels(index)
    return _no_kernels.get(index)


def kernels_unsupported(name: str, x: Tensor) -> str | None:
    """Return why kernels can't take a call on x, the argument `name`, or None: transforms can only follow formulas."""
    if under_functorch():
        return "vmap, a functional derivative or forward-mode differentiation is in force"
    reason = triton_unsupported(x)
    return None if reason is None else reason.replace("x is", f"{name} is")


_no_kernels: dict[int, str | None] = {}  # by GPU, so that compiled code can look it up


def _why_no_kernels(index: int) -> str | None:
    if torch.version.hip is not None:
        return "the kernels were written for and tried on NVIDIA GPUs only"
    major, minor = torch.cuda.get_device_capability(index)
    return None if major >= 8 else f"the GPU has compute capability {major}.{minor}, and the kernels need 8.0"
