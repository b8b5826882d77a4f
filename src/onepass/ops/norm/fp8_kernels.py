"""Kernels of norms that write operands of eight-bit products: codes from x, and their transpose from what forward has kept.

A row's own scale needs y's largest magnitude, and y needs the row's statistics. So a long row is gone through three times:
held in registers where it fits, else read again from the caches.
"""

from __future__ import annotations

from onepass.kernels.fp8 import (
    finite_sizes,
    is_low,
    operand_codes,
    past_largest,
    power_of_two,
    saturated_count,
    scale_exponents,
    underflow_count,
)
from onepass.kernels.fp8_tile import note_amax, packed_codes, store_transposed
from onepass.kernels.language import device_function, tl
from onepass.kernels.launch import kernel
from onepass.kernels.rows import aligned, inside_row, load_block, still_packed
from onepass.ops.norm.forward import long_statistics, normed_piece, row_piece, short_rows


@kernel
def short_codes_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, codes_ptr, inverse_ptr, h_ptr, stats_ptr, scale_ptr, amax_ptr, saturated_ptr,
    underflowed_ptr, M, X_ROW, X_GAP, R_ROW, eps,
    X_INNER: tl.constexpr, H: tl.constexpr, LAYER: tl.constexpr, CENTERED: tl.constexpr, ALIGN: tl.constexpr,
    E5M2: tl.constexpr, SLOTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    x, rstd, weight, bias, at, inside = short_rows(
        x_ptr, residual_ptr, weight_ptr, bias_ptr, h_ptr, stats_ptr, M, X_ROW, X_GAP, R_ROW, eps,
        X_INNER, H, LAYER, CENTERED, ALIGN, BLOCK_M, BLOCK_H,
    )  # fmt: skip
    y = tl.fma(x * rstd, weight, bias)
    if inverse_ptr is not None:
        rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        biased = scale_exponents(tl.maximum(tl.max(finite_sizes(tl.where(inside, y, 0.0)), 1), 0.0), E5M2)
        tl.store(inverse_ptr + rows, power_of_two(254 - biased), mask=rows < M)
        scale = power_of_two(biased)[:, None]
    else:
        scale = tl.load(scale_ptr)
    tl.store(codes_ptr + at, operand_codes(y, scale, E5M2), mask=inside)
    if amax_ptr is not None:  # rows past the last are the bias
        note_amax(amax_ptr, saturated_ptr, underflowed_ptr, tl.where(inside, y, 0.0), scale, E5M2, SLOTS)


@device_function
def _sizes_of(sizes, y, inside, WHOLE: tl.constexpr):
    """Return the larger of `sizes` and a piece's magnitudes. Past a row's end lies the bias."""
    return tl.maximum(sizes, finite_sizes(y if WHOLE else tl.where(inside, y, 0.0)))


@device_function
def _store_piece(
    codes_ptr, h_ptr, amax_ptr, weight_ptr, bias_ptr, row, columns, inside, x, mean, rstd, scale, sizes, WHOLE: tl.constexpr,
    H: tl.constexpr, LAYER: tl.constexpr, CENTERED: tl.constexpr, E5M2: tl.constexpr, CACHE: tl.constexpr,
):  # fmt: skip
    """Store a piece of codes, and of h where there is a residual. Return sizes with those of this piece."""
    if h_ptr is not None:
        tl.store(h_ptr + row * H + columns, x, mask=inside, cache_modifier=CACHE)
    y = normed_piece(weight_ptr, bias_ptr, columns, inside, x, mean, rstd, LAYER, CENTERED)
    tl.store(codes_ptr + row * H + columns, operand_codes(y, scale, E5M2), mask=inside, cache_modifier=CACHE)
    if amax_ptr is not None:
        sizes = _sizes_of(sizes, y, inside, WHOLE)
    return sizes


@kernel
def long_codes_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, codes_ptr, inverse_ptr, h_ptr, stats_ptr, scale_ptr, amax_ptr, saturated_ptr,
    underflowed_ptr, M, X_ROW, R_ROW, eps,
    H: tl.constexpr, LAYER: tl.constexpr, CENTERED: tl.constexpr, ALIGN: tl.constexpr, E5M2: tl.constexpr, SLOTS: tl.constexpr,
    BLOCK_H: tl.constexpr, HELD: tl.constexpr, CACHE: tl.constexpr,
):  # fmt: skip
    X_ROW, R_ROW = aligned(X_ROW, ALIGN), aligned(R_ROW, ALIGN)
    AGAIN: tl.constexpr = ((H + BLOCK_H - 1) // BLOCK_H - HELD) * BLOCK_H  # columns that are read again; the others are held
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK_H)
    whole = inside_row(lanes, H, True)
    held, mean, rstd = long_statistics(
        x_ptr, residual_ptr, h_ptr, stats_ptr, row, lanes, M, X_ROW, R_ROW, eps, H, LAYER, BLOCK_H, HELD, AGAIN
    )
    sizes = tl.zeros([BLOCK_H], tl.float32)
    if inverse_ptr is not None:
        for i in tl.static_range(HELD):
            columns = AGAIN + i * BLOCK_H + lanes
            inside = inside_row(columns, H, AGAIN + (i + 1) * BLOCK_H <= H)
            y = normed_piece(weight_ptr, bias_ptr, columns, inside, still_packed(held[i]), mean, rstd, LAYER, CENTERED)
            sizes = _sizes_of(sizes, y, inside, AGAIN + (i + 1) * BLOCK_H <= H)
        for back in range(0, AGAIN, BLOCK_H):  # backwards: what was read last is the surest to be in the cache
            columns = AGAIN - BLOCK_H - back + lanes
            x = row_piece(x_ptr, residual_ptr, h_ptr, row, columns, whole, X_ROW, R_ROW, "evict_last")
            y = normed_piece(weight_ptr, bias_ptr, columns, whole, x, mean, rstd, LAYER, CENTERED)
            sizes = _sizes_of(sizes, y, whole, True)
        biased = scale_exponents(tl.max(sizes, 0), E5M2)
        tl.store(inverse_ptr + row, power_of_two(254 - biased))
        scale = power_of_two(biased)
    else:
        scale = tl.load(scale_ptr)
    for i in tl.static_range(HELD):
        columns = AGAIN + i * BLOCK_H + lanes
        inside = inside_row(columns, H, AGAIN + (i + 1) * BLOCK_H <= H)
        sizes = _store_piece(
            codes_ptr, h_ptr, amax_ptr, weight_ptr, bias_ptr, row, columns, inside, still_packed(held[i]), mean, rstd, scale,
            sizes, AGAIN + (i + 1) * BLOCK_H <= H, H, LAYER, CENTERED, E5M2, CACHE,
        )  # fmt: skip
    for turn in range(0, AGAIN, BLOCK_H):  # in the other direction than the last time
        columns = (turn if inverse_ptr is not None else AGAIN - BLOCK_H - turn) + lanes
        x = row_piece(x_ptr, residual_ptr, h_ptr, row, columns, whole, X_ROW, R_ROW, "evict_first")
        sizes = _store_piece(
            codes_ptr, h_ptr, amax_ptr, weight_ptr, bias_ptr, row, columns, whole, x, mean, rstd, scale,
            sizes, True, H, LAYER, CENTERED, E5M2, CACHE,
        )  # fmt: skip
    if amax_ptr is not None:
        largest = tl.max(sizes, 0)
        slot = tl.program_id(0) % SLOTS
        tl.atomic_max(amax_ptr + slot, largest.to(tl.int32, bitcast=True), sem="relaxed")
        again = past_largest(largest * scale, E5M2)
        if underflowed_ptr is not None:
            again |= is_low(largest, scale, E5M2)
        if again:  # rare: the row is gone through once more
            for first in range(0, H, BLOCK_H):
                columns = first + lanes
                inside = inside_row(columns, H, H % BLOCK_H == 0)
                x = row_piece(x_ptr, residual_ptr, h_ptr, row, columns, inside, X_ROW, R_ROW, "evict_first")
                y = normed_piece(weight_ptr, bias_ptr, columns, inside, x, mean, rstd, LAYER, CENTERED)
                y = tl.where(inside, y, 0.0)
                tl.atomic_add(saturated_ptr + slot, saturated_count(y, scale, E5M2), sem="relaxed")
                if underflowed_ptr is not None and is_low(largest, scale, E5M2):
                    tl.atomic_add(underflowed_ptr + slot, underflow_count(y, scale, E5M2), sem="relaxed")


@kernel
def transposed_codes_kernel(
    h_ptr, stats_ptr, weight_ptr, bias_ptr, transposed_ptr, scale_ptr,
    M, H_ROW, H,
    LAYER: tl.constexpr, CENTERED: tl.constexpr, ALIGN: tl.constexpr, E5M2: tl.constexpr, MULTIPLE: tl.constexpr,
    QUAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    H_ROW, H = aligned(H_ROW, ALIGN), aligned(H, ALIGN)
    tile = tl.program_id(1) + 65535 * tl.program_id(2)
    quads = tile.to(tl.int64) * (BLOCK_M // QUAD) + tl.arange(0, BLOCK_M // QUAD)
    columns = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    within = columns < H
    scale = tl.load(scale_ptr)
    packed = tl.zeros([BLOCK_M // QUAD, BLOCK_H], tl.uint32)
    for i in tl.static_range(QUAD):
        rows = quads * QUAD + i
        real = rows < M
        mean = 0.0
        if LAYER:
            mean = tl.load(stats_ptr + M + rows, mask=real, other=0.0)[:, None]
        rstd = tl.load(stats_ptr + rows, mask=real, other=0.0)[:, None]
        h = load_block(h_ptr, rows, columns, H_ROW, real[:, None] & within[None, :])
        y = normed_piece(weight_ptr, bias_ptr, columns[None, :], within[None, :], h, mean, rstd, LAYER, CENTERED)
        if (tile + 1) * BLOCK_M > M:  # past the last row lies the bias
            y = tl.where(real[:, None], y, 0.0)
        packed = packed_codes(packed, operand_codes(y, scale, E5M2), i)
    store_transposed(transposed_ptr, packed, quads, columns, M, within, MULTIPLE)
