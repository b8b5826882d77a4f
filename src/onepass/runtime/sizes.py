"""Arithmetic on sizes that every room needs."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def power_of_two(n: int) -> int:
    """The least power of two that is at least n."""
    return 1 << (n - 1).bit_length()


def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; 1 elsewhere."""
    # compilers warn of caches that they look behind
    return (_processors.__wrapped__ if torch.compiler.is_compiling() else _processors)(device)


@lru_cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def compute_capability(device: torch.device) -> tuple[int, int]:
    """Of a GPU; (0, 0) elsewhere."""
    return (_compute_capability.__wrapped__ if torch.compiler.is_compiling() else _compute_capability)(device)


@lru_cache
def _compute_capability(device: torch.device) -> tuple[int, int]:
    if device.type != "cuda":
        return 0, 0
    gpu = torch.cuda.get_device_properties(device)  # get_device_capability breaks a compiled graph
    return gpu.major, gpu.minor


@lru_cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program of a GPU may have; elsewhere those of a Hopper GPU."""
    if device.type != "cuda":
        return 232448
    properties: Any = torch.cuda.get_device_properties(device)  # PyTorch's types know not all of it
    return int(properties.shared_memory_per_block_optin)


def is_lost(device: torch.device) -> bool:
    """Whether this process can't use a GPU any more, as after an access to an address that isn't there."""
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
    except (RuntimeError, AssertionError):  # the second by a PyTorch without CUDA
        return True
    return False
