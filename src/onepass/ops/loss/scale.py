"""Multiply values by one number that is in memory, into another type: it finishes gradients that were made before it was known.

For a head of 128256 x 2048 PyTorch's product takes 1.3 ms of an H200; its bytes need 0.4 ms.
"""

from __future__ import annotations

from functools import lru_cache

from torch import Tensor

from onepass.kernels.language import tl
from onepass.kernels.launch import Bound, kernel
from onepass.kernels.rows import aligned, known_align
from onepass.runtime.sizes import ceil_div

_BLOCK = 2048  # 16 values a thread


@kernel
def _scaled_kernel(values_ptr, factor_ptr, out_ptr, M, ALIGN: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < aligned(M, ALIGN)
    values = tl.load(values_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, values * tl.load(factor_ptr).to(tl.float32), mask=inside)


@lru_cache
def _bound(align: int) -> Bound:
    bound: Bound = _scaled_kernel.bind(align, _BLOCK)
    return bound


def scale_into(values: Tensor, factor: Tensor, out: Tensor) -> Tensor:
    """Write values * factor, computed in fp32 and rounded once, to out, which may be values. Both have the same strides and no
    gaps."""
    size = values.numel()
    if size:
        _bound(known_align(size))((ceil_div(size, _BLOCK), 1, 1), values, factor, out, size)
    return out
