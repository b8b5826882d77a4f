"""Where qkv lies: what kernels can read in place, and what may be written over."""

from __future__ import annotations

import torch
from torch import Tensor

from onepass.runtime.dispatch import has_address, needs_dispatcher, needs_grad, under_functorch


def as_readable(x: Tensor) -> Tensor:
    """Return x, or a copy where 16 bytes at a time can't be read: rows must be contiguous and begin at multiples of 16 bytes."""
    *outer, last = x.stride()
    in_rows = last == 1 and not any(stride % 8 for stride in outer) and all(outer) and x.data_ptr() % 16 == 0
    return x if in_rows else x.clone(memory_format=torch.contiguous_format)


def is_read_by_address(x: Tensor) -> bool:
    """Whether PyTorch's kernels read x where it begins, 16 bytes at a time, and don't look where that is."""
    return x.is_cuda and has_address(x)


def is_sequence_first(x: Tensor) -> bool:
    """Whether x ``[B, S, ...]`` lies in memory as ``[S, B, ...]``."""
    return x.shape[0] > 1 and x.stride(0) < x.stride(1)


def check_overwritable(qkv: Tensor) -> None:
    """Raise where autograd would lose values: PyTorch refuses to write the same tensors in place."""
    owner = qkv._base if qkv._is_view() and qkv._base is not None else qkv
    if needs_grad(owner) and owner.is_leaf:
        raise ValueError(
            "overwrite must be False where qkv, or what it is a view of, is a leaf that requires grad, but is True: its values "
            "would be lost"
        )


def mark_overwritten(qkv: Tensor) -> None:
    """Bump qkv's version so that autograd rejects stale saves. Call it after qkv's first use: bumping a view earlier loses its
    base."""
    if not qkv.is_inference():
        torch.autograd.graph.increment_version(qkv)


def can_overwrite(qkv: Tensor, *tables: Tensor | None) -> bool:
    """Whether q and k can be rotated in qkv's memory: not in a graph or a transform, nor where elements share an address."""
    if needs_dispatcher(qkv, *tables) or under_functorch():  # not whether an op is called: registered ops write over nothing
        return False
    extent = 1
    for stride, size in sorted(zip(qkv.stride(), qkv.shape, strict=True)):
        if size > 1 and stride < extent:
            return False
        extent = max(extent, stride * size)
    return True
