"""Transpose codes of eight-bit products: the transpose of a matrix of bytes.

Codes that ranks gather are by rows. The product that makes a weight's gradient sums over rows: it takes both operands transposed.

Shapes   codes [..., H], contiguous, of M rows; transposed [H, M up to a multiple of 16], with zeros after the last row.
Bytes    1 read and 1 written a number. A cast of the 16-bit rows would read 2, and gathering those would send 2.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from onepass.kernels.fp8 import QUAD, packed_codes, store_transposed
from onepass.kernels.language import tl, triton_unsupported
from onepass.kernels.launch import Bound, grid_of, kernel
from onepass.kernels.rows import aligned, known_align
from onepass.runtime.fp8 import MULTIPLE, transpose
from onepass.runtime.sizes import ceil_div

TILE_M, TILE_H = 128, 128  # whole cache lines of either matrix


@kernel
def _turn_kernel(
    codes_ptr, transposed_ptr, M, H,
    ALIGN: tl.constexpr, MULTIPLE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    H = aligned(H, ALIGN)
    block = tl.program_id(1).to(tl.int64) + 65535 * tl.program_id(2)
    quads = block * (BLOCK_M // QUAD) + tl.arange(0, BLOCK_M // QUAD)
    columns = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    within = columns < H
    packed = tl.zeros([BLOCK_M // QUAD, BLOCK_H], tl.uint32)
    for i in tl.static_range(QUAD):
        rows = quads * QUAD + i
        inside = (rows < M)[:, None] & within[None, :]
        codes = tl.load(codes_ptr + rows[:, None] * H + columns[None, :], mask=inside, other=0)
        packed = packed_codes(packed, codes, i)
    store_transposed(transposed_ptr, packed, quads, columns, M, within, MULTIPLE)


@lru_cache(1024)
def _turn_plan(H: int) -> Bound:
    bound: Bound = _turn_kernel.bind(H, known_align(H), MULTIPLE, TILE_M, TILE_H, num_warps=8)
    return bound


def transpose_codes(codes: Tensor) -> Tensor:
    """Return the transpose of eight-bit codes, [H, rows] with zeros up to a multiple of 16 rows. Leading dimensions are rows."""
    if triton_unsupported(codes) is not None:
        return transpose(codes)
    H, M = codes.shape[-1], math.prod(codes.shape[:-1])
    transposed = torch.empty(H, ceil_div(M, MULTIPLE) * MULTIPLE, dtype=codes.dtype, device=codes.device)
    if codes.numel():
        grid = grid_of(ceil_div(H, TILE_H), ceil_div(M, TILE_M))
        _turn_plan(H)(grid, codes.contiguous().view(torch.uint8), transposed.view(torch.int32), M)
    return transposed
