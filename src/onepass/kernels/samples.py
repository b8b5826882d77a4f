"""Calls that launch the kernels which several families share, in every form that is shipped."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from onepass.kernels import fp8, fp8_cast, fp8_transpose
from onepass.runtime.fp8 import E4M3, E5M2, FP8Target
from onepass.runtime.samples import CoveringCall, meta


def covering_calls() -> Iterator[CoveringCall]:
    """Casts by row, by column and by tensor: both types, rows that are held and read again, even and odd multiples of 16."""
    for width in (2048, 4096, 14336, 28672, 5008):
        for dtype in (torch.bfloat16, torch.float32):
            for to in (E4M3, E5M2):
                yield _cast_call(width, dtype, to)


def _cast_call(width: int, dtype: torch.dtype, to: torch.dtype) -> CoveringCall:
    def run() -> Tensor:
        x, scale = meta(8192, width, dtype=dtype), torch.empty((), device="meta")
        noted = fp8.new_notes("meta")
        fp8_cast.cast_rows(x.detach(), to)
        fp8_cast.cast_columns(x.detach().view(2, 4096, width))
        fp8_cast.cast_tensor(x.detach(), FP8Target(to, scale, *noted), transposed=True)
        fp8_cast.cast_tensor(x.detach(), FP8Target(to, scale, *noted[:2]))
        codes, _ = fp8_cast.cast_tensor(x.detach(), FP8Target(to, scale))
        assert codes is not None
        fp8_transpose.transpose_codes(codes)
        return x

    return CoveringCall(f"fp8 cast 8192x{width} {'e5m2' if to is E5M2 else 'e4m3'}", dtype, run, 89)
