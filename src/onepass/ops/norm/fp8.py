"""Norms that write operands of eight-bit products: codes of the fp32 y, which is never rounded to 16 bits first.

Shapes   as ops/norm/norm.py has them. Codes are contiguous and of x's shape. Transposed codes are [H, rows], with zeros up to a
         multiple of 16 rows: the operand of the weight's gradient, which sums over rows.
Scales   the target's, or where it has none each row's own: the largest power of two that the row's largest number allows.
Bytes    of 16-bit x, 3 a number, and 7 with a residual, which is read, and h, which is written. Transposed, from h, 3 a number.
Kernels  A row's own scale needs y's largest magnitude, and y needs the row's statistics. So a long row is gone through three
         times: held in registers where it fits, else read again from the caches.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from onepass.kernels.fp8 import (
    QUAD,
    TILE_H,
    TILE_M,
    finite_sizes,
    is_low,
    note_amax,
    operand_codes,
    packed_codes,
    past_largest,
    power_of_two,
    saturated_count,
    scale_exponents,
    store_transposed,
    underflow_count,
)
from onepass.kernels.language import device_function, tl
from onepass.kernels.launch import Bound, grid_of, kernel
from onepass.kernels.layout import Groups, as_groups, as_rows
from onepass.kernels.rows import aligned, inside_row, known_align, load_block, still_packed
from onepass.ops.norm.formula import NormOptions, add_rounded, norm_formula
from onepass.ops.norm.forward import (
    SHORT,
    NormForwardTiles,
    forward_tiles,
    long_statistics,
    new_stats,
    norm_statistics,
    normed_piece,
    row_piece,
    short_rows,
    store_piece,
    store_statistics,
)
from onepass.runtime import fp8
from onepass.runtime.fp8 import E5M2, MULTIPLE, SLOTS, FP8Target, FP8Tensor, describe_output
from onepass.runtime.op import Registered
from onepass.runtime.sizes import ceil_div

_SHORT = 2048  # the longest row that lies in one program's registers whole: one more than a norm's of 16 bits, as measured
_HELD = 4  # pieces: a longer row of as many is held whole where it has its own scale, 32 values a thread or fewer
_PIECE = 4096  # columns, the most: codes need registers besides y's, and longer pieces spill


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


@kernel
def long_codes_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, codes_ptr, inverse_ptr, h_ptr, stats_ptr, scale_ptr, amax_ptr, saturated_ptr,
    underflowed_ptr, M, X_ROW, R_ROW, eps,
    H: tl.constexpr, LAYER: tl.constexpr, CENTERED: tl.constexpr, ALIGN: tl.constexpr, E5M2: tl.constexpr, SLOTS: tl.constexpr,
    BLOCK_H: tl.constexpr, HELD: tl.constexpr, CACHE: tl.constexpr,
):  # fmt: skip
    AGAIN: tl.constexpr = ((H + BLOCK_H - 1) // BLOCK_H - HELD) * BLOCK_H  # columns that are read again; the others are held
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * aligned(X_ROW, ALIGN)
    codes_ptr += row * H
    if residual_ptr is not None:
        residual_ptr += row * aligned(R_ROW, ALIGN)
        h_ptr += row * H
    lanes = tl.arange(0, BLOCK_H)
    whole = inside_row(lanes, H, True)
    held, mean, rstd = long_statistics(x_ptr, residual_ptr, h_ptr, eps, H, LAYER, BLOCK_H, HELD, AGAIN)
    store_statistics(stats_ptr, row, M, mean, rstd, LAYER)
    sizes = tl.zeros([BLOCK_H], tl.float32)
    if inverse_ptr is not None:
        for i in tl.static_range(HELD):
            columns = AGAIN + i * BLOCK_H + lanes
            inside = inside_row(columns, H, AGAIN + (i + 1) * BLOCK_H <= H)
            y = normed_piece(weight_ptr, bias_ptr, columns, inside, still_packed(held[i]), mean, rstd, LAYER, CENTERED)
            sizes = _sizes_of(sizes, y, inside, AGAIN + (i + 1) * BLOCK_H <= H)
        for back in range(0, AGAIN, BLOCK_H):  # backwards: what was read last is the surest to be in the cache
            columns = AGAIN - BLOCK_H - back + lanes
            x = row_piece(x_ptr, residual_ptr, h_ptr, columns, whole, "evict_last")
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
        x = still_packed(held[i])
        store_piece(h_ptr, columns, inside, x, CACHE)
        y = normed_piece(weight_ptr, bias_ptr, columns, inside, x, mean, rstd, LAYER, CENTERED)
        store_piece(codes_ptr, columns, inside, operand_codes(y, scale, E5M2), CACHE)
        if amax_ptr is not None:
            sizes = _sizes_of(sizes, y, inside, AGAIN + (i + 1) * BLOCK_H <= H)
    for turn in range(0, AGAIN, BLOCK_H):  # in the other direction than the last time
        columns = (turn if inverse_ptr is not None else AGAIN - BLOCK_H - turn) + lanes
        x = row_piece(x_ptr, residual_ptr, h_ptr, columns, whole, "evict_first")
        store_piece(h_ptr, columns, whole, x, CACHE)
        y = normed_piece(weight_ptr, bias_ptr, columns, whole, x, mean, rstd, LAYER, CENTERED)
        store_piece(codes_ptr, columns, whole, operand_codes(y, scale, E5M2), CACHE)
        if amax_ptr is not None:
            sizes = _sizes_of(sizes, y, whole, True)
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
                x = row_piece(x_ptr, residual_ptr, h_ptr, columns, inside, "evict_first")
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
    BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr,
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


# ---- launches ----


def codes_tiles(H: int, layer: bool, wide: bool, residual: bool, by_row: bool) -> NormForwardTiles:
    """Return the tiles of `norm_forward`, in shorter pieces, and with few pieces held where they would be read three times."""
    tiles = forward_tiles(H, layer, wide, residual)
    if SHORT < H <= _SHORT:
        return NormForwardTiles(True, 1 if wide else 2, _SHORT, 4)
    if tiles.block_h > _PIECE:
        tiles = tiles._replace(block_h=_PIECE, num_warps=16 if wide else 8, held=min(1, H % _PIECE))
    elif tiles.block_h == _PIECE and H <= _HELD * _PIECE and not (wide or residual) and H % (_PIECE // 2) == 0:
        tiles = tiles._replace(block_h=_PIECE // 2, num_warps=8)  # 12 % faster at 8192
    pieces = ceil_div(H, tiles.block_h)
    return tiles._replace(held=pieces) if by_row and not tiles.short and pieces <= _HELD else tiles


@lru_cache(1024)
def _codes_plan(
    H: int, x_lies: Groups, r_row: int, options: NormOptions, wide: bool, residual: bool, by_row: bool, e5m2: bool
) -> tuple[int, Bound]:
    layer, eps, centered = options
    tiles = codes_tiles(H, layer, wide, residual, by_row)
    x_row, x_gap, x_inner = x_lies
    fixed = H, layer, centered, known_align(x_row, x_gap or 0, r_row), e5m2, SLOTS
    bound: Bound
    if tiles.short:
        bound = short_codes_kernel.bind(
            x_row, x_gap, r_row, eps, x_inner, *fixed, tiles.block_m, tiles.block_h, num_warps=tiles.num_warps
        )
    else:
        bound = long_codes_kernel.bind(
            x_row, r_row, eps, *fixed, tiles.block_h, tiles.held, tiles.cache, num_warps=tiles.num_warps
        )
    return tiles.block_m, bound


@lru_cache(1024)
def _transposed_plan(H: int, h_row: int, layer: bool, centered: bool, e5m2: bool) -> Bound:
    bound: Bound = transposed_codes_kernel.bind(
        h_row, H, layer, centered, known_align(h_row, H), e5m2, MULTIPLE, TILE_M, TILE_H, num_warps=4
    )
    return bound


def norm_codes(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None,
    options: NormOptions, target: FP8Target, keep: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Return y's codes, the inverses of the rows' scales, h where there is a residual, and the rows' statistics where `keep`.

    The inverses, fp32 [rows, 1], are None where the target has a scale. Only then are its amax and its counts written.
    """
    H, by_row = x.shape[-1], target.scale is None
    M = x.numel() // H
    codes = torch.empty(x.shape, dtype=target.dtype, device=x.device)
    inverse = x.new_empty(M, 1, dtype=torch.float32) if by_row else None
    h = None if residual is None else x.new_empty(x.shape)
    stats = new_stats(x, M, options.layer) if keep else None
    if M:
        x, x_lies = as_groups(x, H <= SHORT)
        r_row = x_lies[0]
        if residual is not None:
            residual, r_row = as_rows(residual)
        block_m, launch = _codes_plan(
            H, x_lies, r_row, options, x.dtype is torch.float32, residual is not None, by_row, target.dtype is E5M2
        )
        noted = (None, None, None) if by_row else target[2:]
        results = codes.view(torch.uint8), inverse, h, stats
        launch((ceil_div(M, block_m), 1, 1), x, residual, weight, bias, *results, target.scale, *noted, M)
    return codes, inverse, h, stats


def norm_codes_transposed(
    h: Tensor, stats: Tensor | None, weight: Tensor | None, bias: Tensor | None, options: NormOptions, target: FP8Target
) -> Tensor:
    """Return the transpose of y's codes at the target's scale from the norm's input: x, or with a residual h.

    From the statistics that `norm_codes` has kept, the codes are its own, bit for bit. Without them the rows are read once more,
    and sums that are taken in another order may differ in their last bit. Nothing is added to the target's amax and counts.
    """
    assert target.scale is not None, "the transpose of rows with scales of their own is no operand"
    H = h.shape[-1]
    M = h.numel() // H
    transposed = torch.empty(H, ceil_div(M, MULTIPLE) * MULTIPLE, dtype=target.dtype, device=h.device)
    if M:
        h, h_row = as_rows(h)
        if stats is None:
            stats = norm_statistics(h, options)
        launch = _transposed_plan(H, h_row, options.layer, options.zero_centered_gamma, target.dtype is E5M2)
        grid = grid_of(ceil_div(H, TILE_H), ceil_div(M, TILE_M))
        launch(grid, h, stats, weight, bias, transposed.view(torch.int32), target.scale, M)
    return transposed


# ---- by PyTorch ----


def norm_codes_formula(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None,
    options: NormOptions, target: FP8Target, keep: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Return what `norm_codes` does, by PyTorch."""
    x = x.detach()
    h = None if residual is None else add_rounded(x, residual.detach(), x.dtype).to(x.dtype)
    stats = _statistics_formula(x if h is None else h, options) if keep else None
    y = _formula(x if h is None else h, weight, bias, options)
    if target.scale is None:
        return *fp8.quantise_rows(y, target.dtype), h, stats
    return fp8.quantise_tensor(y, target), None, h, stats


def norm_codes_transposed_formula(
    h: Tensor, stats: Tensor | None, weight: Tensor | None, bias: Tensor | None, options: NormOptions, target: FP8Target
) -> Tensor:
    """Return what `norm_codes_transposed` does, by PyTorch: the statistics are computed again."""
    assert target.scale is not None, "the transpose of rows with scales of their own is no operand"
    return fp8.transpose(fp8.quantise(_formula(h, weight, bias, options), target.scale, target.dtype))


def _formula(h: Tensor, weight: Tensor | None, bias: Tensor | None, options: NormOptions) -> Tensor:
    weight, bias = (None if vector is None else vector.detach().float() for vector in (weight, bias))
    layer, eps, centered = options
    return norm_formula(h.detach().float(), weight, bias, layer=layer, eps=eps, zero_centered_gamma=centered).contiguous()


def _statistics_formula(h: Tensor, options: NormOptions) -> Tensor:
    rows = h.detach().float().reshape(-1, h.shape[-1])
    mean = rows.mean(1)
    if options.layer:
        rows = rows - mean[:, None]
    rstd = torch.rsqrt(rows.square().mean(1) + options.eps)
    return torch.cat((rstd, mean)) if options.layer else rstd


# ---- `out=` of the norms: a registered op, which compilers see ----


def _output(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, scale: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor | None]:
    *notes, options, dtype, use_triton = rest
    run = norm_codes if use_triton and x.numel() else norm_codes_formula
    codes, inverse, h, _ = run(x, residual, weight, bias, options, FP8Target(dtype, scale, *notes), False)
    if scale is not None:
        inverse = 1 / scale
    assert inverse is not None
    return codes, inverse.view(*x.shape[:-1], 1) if scale is None else inverse, h


def _output_fake(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, scale: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor | None]:
    *_, dtype, _use_triton = rest
    inverse = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32) if scale is None else torch.empty_like(scale)
    return x.new_empty(x.shape, dtype=dtype), inverse, None if residual is None else x.new_empty(x.shape)


_output_op = Registered(
    "norm_codes(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, Tensor? scale, Tensor(a!)? amax, "
    "Tensor(b!)? saturated, Tensor(c!)? underflowed, NormOptions options, ScalarType dtype, bool use_triton) -> "
    "(Tensor, Tensor, Tensor?)",
    _output,
    _output_fake,
    NormOptions,
)


def norm_output(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None,
    options: NormOptions, target: FP8Target, use_triton: bool,
) -> FP8Tensor | tuple[FP8Tensor, Tensor]:  # fmt: skip
    """Return y as codes, with a residual (y, h)."""
    codes, inverse, h = _output_op(x, residual, weight, bias, *target[1:], options, target.dtype, use_triton)
    y = FP8Tensor(codes, inverse)
    return y if h is None else (y, h)


def output_variant(x: Tensor, residual: Tensor | None, layer: bool, target: FP8Target) -> str:
    """Describe the kernel of a call with `out=`, and its tiles."""
    if not x.numel():
        return "the PyTorch formula, as there is nothing to do"
    tiles = codes_tiles(x.shape[-1], layer, x.dtype is torch.float32, residual is not None, target.scale is None)
    if tiles.short:
        description = f"forward with {tiles.block_m} rows a program, in registers"
    else:
        description = f"forward with one row a program, in pieces of {tiles.block_h}, {tiles.held} of them held in registers"
    return f"{description}; {describe_output(target)}; no backward"
