"""Cast a matrix to operands of eight-bit products: by row or column with scales of their own, or by one scale.

By row    a row is read from memory once and scaled by the largest power of two that its largest number allows.
By column the transpose, as x's gradient takes a weight. It is read twice: for the columns' largest magnitudes, and to be written.
By tensor a tile is read once and written twice, the second time transposed. The scale is known before. The pass finds the largest
          magnitude for the next scale and counts what saturates.
Bytes     of 16-bit x, 3 a number by row, 5 by column, and 4 by tensor with the transpose.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from onepass.kernels.fp8 import (
    QUAD,
    TILE_H,
    TILE_M,
    finite_sizes,
    is_rare,
    largest_of,
    note_tiles,
    operand_codes,
    packed_codes,
    power_of_two,
    scale_exponents,
    store_transposed,
    tile_codes,
)
from onepass.kernels.language import tl, triton_unsupported
from onepass.kernels.launch import Bound, grid_of, kernel
from onepass.kernels.layout import as_rows
from onepass.kernels.rows import aligned, inside_row, known_align
from onepass.runtime.fp8 import E4M3, E5M2, MULTIPLE, SLOTS, FP8Target, quantise_rows, quantise_tensor, transpose
from onepass.runtime.sizes import ceil_div
from onepass.runtime.sizes import power_of_two as next_power_of_two

_HELD = 8192  # the longest row that a program holds in registers
_AMAX_N, _AMAX_K = 64, 128  # of the pass that finds columns' largest magnitudes


@kernel
def _rows_kernel(
    x_ptr, codes_ptr, inverse_ptr, M, X_ROW,
    H: tl.constexpr, ALIGN: tl.constexpr, E5M2: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    X_ROW = aligned(X_ROW, ALIGN)
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    there = rows < M
    lanes = tl.arange(0, BLOCK_H)
    amax = tl.zeros([BLOCK_M], tl.float32)
    x = tl.zeros([BLOCK_M, BLOCK_H], tl.float32)
    for first in range(0, H, BLOCK_H):
        columns = first + lanes
        inside = there[:, None] & inside_row(columns, H, H % BLOCK_H == 0)[None, :]
        x = tl.load(x_ptr + rows[:, None] * X_ROW + columns[None, :], mask=inside, other=0.0).to(tl.float32)
        amax = tl.maximum(amax, tl.max(finite_sizes(x), 1))
    biased = scale_exponents(amax, E5M2)
    scale = power_of_two(biased)
    tl.store(inverse_ptr + rows, power_of_two(254 - biased), mask=there)
    for back in range(0, H, BLOCK_H):  # backwards: what was read last is still in registers or caches
        columns = (H - 1) // BLOCK_H * BLOCK_H - back + lanes
        inside = there[:, None] & inside_row(columns, H, H % BLOCK_H == 0)[None, :]
        if H > BLOCK_H:
            x = tl.load(x_ptr + rows[:, None] * X_ROW + columns[None, :], mask=inside, other=0.0).to(tl.float32)
        tl.store(codes_ptr + rows[:, None] * H + columns[None, :], operand_codes(x, scale[:, None], E5M2), mask=inside)


@kernel
def _tiles_kernel(
    x_ptr, codes_ptr, transposed_ptr, scale_ptr, amax_ptr, saturated_ptr, underflowed_ptr, M, X_ROW, H,
    ALIGN: tl.constexpr, E5M2: tl.constexpr, SLOTS: tl.constexpr, MULTIPLE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    X_ROW, H = aligned(X_ROW, ALIGN), aligned(H, ALIGN)
    PARTS: tl.constexpr = 1 if transposed_ptr is None else QUAD
    block = tl.program_id(1).to(tl.int64) + 65535 * tl.program_id(2)
    groups = block * (BLOCK_M // PARTS) + tl.arange(0, BLOCK_M // PARTS)  # of PARTS rows
    columns = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    within = columns < H
    sizes = tl.zeros([BLOCK_M // PARTS, BLOCK_H], tl.float32)
    tiles = ()
    for i in tl.static_range(PARTS):
        rows = groups * PARTS + i
        inside = (rows < M)[:, None] & within[None, :]
        x = tl.load(x_ptr + rows[:, None] * X_ROW + columns[None, :], mask=inside, other=0.0).to(tl.float32)
        sizes = tl.maximum(sizes, tl.abs(x))
        tiles += (x,)  # type: ignore[assignment]
    scale = tl.load(scale_ptr)
    rare = True
    if amax_ptr is not None:
        largest = largest_of(sizes)
        rare = is_rare(largest, scale, E5M2)
        note_tiles(amax_ptr, saturated_ptr, underflowed_ptr, largest, rare, tiles, PARTS, scale, E5M2, SLOTS)
    packed = tl.zeros([BLOCK_M // PARTS, BLOCK_H], tl.uint32)
    for i in tl.static_range(PARTS):
        codes = tile_codes(tiles[i], scale, rare, E5M2)
        if codes_ptr is not None:
            rows = groups * PARTS + i
            inside = (rows < M)[:, None] & within[None, :]
            tl.store(codes_ptr + rows[:, None] * H + columns[None, :], codes, mask=inside)
        if transposed_ptr is not None:
            packed = packed_codes(packed, codes, i)
    if transposed_ptr is not None:
        store_transposed(transposed_ptr, packed, groups, columns, M, within, MULTIPLE)


@kernel
def _column_amax_kernel(
    x_ptr, amax_ptr, N, K,
    ALIGN: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Raise amax [matrices, K], bits of fp32 numbers, to the largest magnitudes of x's columns. A maximum has no order."""
    K = aligned(K, ALIGN)
    matrix = tl.program_id(2).to(tl.int64)
    columns = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    within = columns < K
    amax = tl.zeros([BLOCK_K], tl.float32)
    for step in range(STEPS):
        rows = (tl.program_id(1) * STEPS + step) * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = (rows < N)[:, None] & within[None, :]
        x = tl.load(x_ptr + (matrix * N + rows)[:, None] * K + columns[None, :], mask=inside, other=0.0).to(tl.float32)
        amax = tl.maximum(amax, tl.max(finite_sizes(x), 0))
    tl.atomic_max(amax_ptr + matrix * K + columns, amax.to(tl.int32, bitcast=True), mask=within, sem="relaxed")


@kernel
def _columns_kernel(
    x_ptr, transposed_ptr, amax_ptr, inverse_ptr, N, K,
    ALIGN: tl.constexpr, MULTIPLE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    K = aligned(K, ALIGN)
    matrix = tl.program_id(2).to(tl.int64)
    quads = tl.program_id(1) * (BLOCK_N // QUAD) + tl.arange(0, BLOCK_N // QUAD)
    columns = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    within = columns < K
    amax = tl.load(amax_ptr + matrix * K + columns, mask=within, other=0).to(tl.float32, bitcast=True)
    biased = scale_exponents(amax, False)
    scale = power_of_two(biased)
    tl.store(inverse_ptr + matrix * K + columns, power_of_two(254 - biased), mask=within & (tl.program_id(1) == 0))
    packed = tl.zeros([BLOCK_N // QUAD, BLOCK_K], tl.uint32)
    for i in tl.static_range(QUAD):
        rows = quads * QUAD + i
        inside = (rows < N)[:, None] & within[None, :]
        x = tl.load(x_ptr + (matrix * N + rows)[:, None] * K + columns[None, :], mask=inside, other=0.0).to(tl.float32)
        packed = packed_codes(packed, operand_codes(x, scale[None, :], False), i)
    store_transposed(transposed_ptr + matrix * K * (N // QUAD), packed, quads, columns, N, within, MULTIPLE)


@lru_cache(1024)
def _columns_plan(N: int, K: int) -> tuple[int, Bound, Bound]:
    steps = min(8, ceil_div(N, _AMAX_N))
    amax: Bound = _column_amax_kernel.bind(N, K, known_align(K), _AMAX_N, _AMAX_K, steps, num_warps=4)
    transposed: Bound = _columns_kernel.bind(N, K, known_align(K), MULTIPLE, TILE_M, TILE_H, num_warps=4)
    return steps, amax, transposed


@lru_cache(1024)
def _rows_plan(H: int, x_row: int, e5m2: bool) -> tuple[int, Bound]:
    block_h = min(_HELD // 2 if H > _HELD else _HELD, next_power_of_two(H))
    block_m = max(1, 2048 // block_h)
    bound: Bound = _rows_kernel.bind(
        x_row, H, known_align(x_row), e5m2, block_m, block_h, num_warps=max(4, min(16, block_m * block_h // 512))
    )
    return block_m, bound


@lru_cache(1024)
def _tiles_plan(H: int, x_row: int, e5m2: bool, transposed: bool) -> tuple[int, int, Bound]:
    block_m, block_h, num_warps = (TILE_M, TILE_H, 4) if transposed else (8, 512, 4)
    bound: Bound = _tiles_kernel.bind(
        x_row, H, known_align(x_row, H), e5m2, SLOTS, MULTIPLE, block_m, block_h, num_warps=num_warps
    )
    return block_m, block_h, bound


def cast_rows(x: Tensor, dtype: torch.dtype = E4M3) -> tuple[Tensor, Tensor]:
    """Return x's codes, and the inverses of its rows' scales, fp32 [rows, 1]. Leading dimensions are rows."""
    if triton_unsupported(x) is not None:
        return quantise_rows(x, dtype)
    H, M = x.shape[-1], math.prod(x.shape[:-1])
    codes, inverse = torch.empty(x.shape, dtype=dtype, device=x.device), x.new_empty(M, 1, dtype=torch.float32)
    if x.numel():
        x, x_row = as_rows(x)
        block_m, launch = _rows_plan(H, x_row, dtype is E5M2)
        launch((ceil_div(M, block_m), 1, 1), x, codes.view(torch.uint8), inverse, M)
    else:
        inverse.fill_(1)
    return codes, inverse


def cast_columns(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return what `cast_rows(x.mT)` does of matrices [..., N, K], in e4m3: codes [..., K, N] and inverses [columns, 1]."""
    *lead, N, K = x.shape
    if triton_unsupported(x) is not None or N % MULTIPLE or not x.is_contiguous() or not x.numel():
        return cast_rows(x.mT)
    count = math.prod(lead)
    codes, inverse = torch.empty(*lead, K, N, dtype=E4M3, device=x.device), x.new_empty(count * K, 1, dtype=torch.float32)
    amax = torch.zeros(count * K, dtype=torch.int32, device=x.device)
    steps, find_amax, write = _columns_plan(N, K)
    find_amax((ceil_div(K, _AMAX_K), ceil_div(N, _AMAX_N * steps), count), x, amax)
    write((ceil_div(K, TILE_H), ceil_div(N, TILE_M), count), x, codes.view(torch.int32), amax, inverse)
    return codes, inverse


def cast_tensor(
    x: Tensor, target: FP8Target, *, codes: bool = True, transposed: bool = False
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Return x's codes at the target's scale, and those of its transpose, [H, rows] with zeros up to a multiple of 16 rows.

    `codes` and `transposed` say which of the two to write.
    """
    if triton_unsupported(x) is not None:
        quantised = quantise_tensor(x, target)
        return quantised if codes else None, transpose(quantised) if transposed else None
    H, M = x.shape[-1], math.prod(x.shape[:-1])
    plain = torch.empty(x.shape, dtype=target.dtype, device=x.device) if codes else None
    across = torch.empty(H, ceil_div(M, MULTIPLE) * MULTIPLE, dtype=target.dtype, device=x.device) if transposed else None
    if x.numel():
        x, x_row = as_rows(x)
        outputs = None if plain is None else plain.view(torch.uint8), None if across is None else across.view(torch.int32)
        block_m, block_h, launch = _tiles_plan(H, x_row, target.dtype is E5M2, transposed)
        grid = grid_of(ceil_div(H, block_h), ceil_div(M, block_m))
        launch(grid, x, *outputs, *target[1:], M)
    return plain, across
