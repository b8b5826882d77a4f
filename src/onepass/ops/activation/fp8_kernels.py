"""The kernels of a bias and an activation whose results are operands of eight-bit products.

Forward   codes of y: rows with a scale each, or tiles at one scale that is known before.
Backward  tiles of x and dy: codes of dx, and transposed copies of dx and of y, which is rebuilt in forward's order of arithmetic.
          A tile also writes its column sums of dx, for the bias, and its row sums of y * dy, for the token weight.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from onepass.kernels.column_reduce import column_sum
from onepass.kernels.fp8 import (
    QUAD,
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
from onepass.kernels.language import device_function, tl
from onepass.kernels.launch import Bound, grid_of, kernel
from onepass.kernels.layout import as_rows
from onepass.kernels.rows import aligned, inside_row, known_align, load_vector, still_packed
from onepass.ops.activation.activations import Activation, activation_of
from onepass.ops.activation.formula import ActivationOptions
from onepass.ops.activation.kernels import clamp_halves
from onepass.ops.activation.saved_rows import load_rows
from onepass.runtime.fp8 import E5M2, MULTIPLE, SLOTS, FP8Target
from onepass.runtime.sizes import ceil_div
from onepass.runtime.sizes import power_of_two as next_power_of_two

FORWARD_VALUES = 4096  # of a forward tile: a program raises one slot for all of them
_HELD = 16384  # the longest row that a program holds in registers: 32 values a thread
TILE_M, TILE_H = 32, 64  # of backward, at most: transposed rows of 32 bytes, rows of x of 128; 2 warps beat others, as measured

# ---- device functions ----


@device_function
def _load_part(x_ptr, bias_ptr, rows, columns, H, X_ROW, inside, PART: tl.constexpr, PARTS: tl.constexpr):
    """Load x + bias of one half of a gated activation's rows, or of whole rows."""
    x = load_rows(x_ptr, None, rows, columns, H, X_ROW, inside, PART, PARTS, 1)
    return x + load_vector(bias_ptr, columns + PART * H, columns < H)[None, :]


@device_function
def _is_ragged(block, tile, M, H, BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr):
    """Return whether a tile has places after the last row or column, whose values mean nothing."""
    return ((block + 1) * BLOCK_M > M) | ((tile + 1) * BLOCK_H > H)


@device_function
def _activated(x_ptr, bias_ptr, weight_ptr, tile, shape, clamp, offset, ACT: tl.constexpr, GATED: tl.constexpr):
    """Return a tile of y in fp32. `_backward_codes_kernel` repeats the arithmetic: codes are the same."""
    PARTS: tl.constexpr = 2 if GATED else 1
    rows, columns, inside = tile
    M, H, X_ROW = shape
    z = _load_part(x_ptr, bias_ptr, rows, columns, H, X_ROW, inside, 0, PARTS)
    if GATED:
        linear = _load_part(x_ptr, bias_ptr, rows, columns, H, X_ROW, inside, 1, PARTS)
        if clamp is not None:
            z, linear = clamp_halves(z, linear, clamp)
        if offset is not None:
            linear += offset
        y = ACT(z) * linear
    else:
        y = ACT(z)
    if weight_ptr is not None:
        y *= tl.load(weight_ptr + rows, mask=rows < M, other=0.0).to(tl.float32)[:, None]
    return y


# ---- kernels ----


@kernel
def _rows_kernel(
    x_ptr, bias_ptr, weight_ptr, codes_ptr, inverse_ptr, M, X_ROW, clamp, offset,
    H: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr, ALIGN: tl.constexpr, E5M2: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    X_ROW = aligned(X_ROW, ALIGN)
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    there = rows < M
    lanes = tl.arange(0, BLOCK_H)
    amax = tl.zeros([BLOCK_M], tl.float32)
    y = tl.zeros([BLOCK_M, BLOCK_H], tl.float32)
    for first in range(0, H, BLOCK_H):
        columns = first + lanes
        inside = there[:, None] & inside_row(columns, H, H % BLOCK_H == 0)[None, :]
        y = _activated(x_ptr, bias_ptr, weight_ptr, (rows, columns, inside), (M, H, X_ROW), clamp, offset, ACT, GATED)
        if H % BLOCK_H:
            y = tl.where(inside, y, 0.0)
        amax = tl.maximum(amax, tl.max(finite_sizes(y), 1))
    biased = scale_exponents(amax, E5M2)
    scale = power_of_two(biased)
    tl.store(inverse_ptr + rows, power_of_two(254 - biased), mask=there)
    for back in range(0, H, BLOCK_H):  # backwards: what was read last is still in caches
        columns = (H - 1) // BLOCK_H * BLOCK_H - back + lanes
        inside = there[:, None] & inside_row(columns, H, H % BLOCK_H == 0)[None, :]
        if H > BLOCK_H:
            y = _activated(x_ptr, bias_ptr, weight_ptr, (rows, columns, inside), (M, H, X_ROW), clamp, offset, ACT, GATED)
        tl.store(codes_ptr + rows[:, None] * H + columns[None, :], operand_codes(y, scale[:, None], E5M2), mask=inside)


@kernel
def _tiles_kernel(
    x_ptr, bias_ptr, weight_ptr, codes_ptr, scale_ptr, amax_ptr, saturated_ptr, underflowed_ptr,
    M, H, X_ROW, clamp, offset,
    ACT: tl.constexpr, GATED: tl.constexpr, ALIGN: tl.constexpr, E5M2: tl.constexpr, SLOTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    H, X_ROW = aligned(H, ALIGN), aligned(X_ROW, ALIGN)
    block = tl.program_id(1).to(tl.int64) + 65535 * tl.program_id(2)
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    inside = (rows < M)[:, None] & (columns < H)[None, :]
    y = _activated(x_ptr, bias_ptr, weight_ptr, (rows, columns, inside), (M, H, X_ROW), clamp, offset, ACT, GATED)
    scale = tl.load(scale_ptr)
    if amax_ptr is not None:
        if _is_ragged(block, tl.program_id(0), M, H, BLOCK_M, BLOCK_H):
            y = tl.where(inside, y, 0.0)
        largest = largest_of(tl.abs(y))
        rare = is_rare(largest, scale, E5M2)
        codes = tile_codes(y, scale, rare, E5M2)
        note_tiles(amax_ptr, saturated_ptr, underflowed_ptr, largest, rare, (y,), 1, scale, E5M2, SLOTS)
    else:
        codes = operand_codes(y, scale, E5M2)
    tl.store(codes_ptr + rows[:, None] * H + columns[None, :], codes, mask=inside)


@kernel
def _backward_codes_kernel(
    # x [M, PARTS * H] and dy [M, H], rows X_ROW and DY_ROW apart; without dy only y is written
    x_ptr, dy_ptr, bias_ptr, weight_ptr,
    # codes of dx [M, PARTS * H], of its transpose, of y's transpose
    codes_ptr, transposed_ptr, y_transposed_ptr,
    # column sums of each block of rows [blocks, PARTS * H], row sums of each tile of columns [tiles, M]
    partial_ptr, row_sums_ptr,
    dx_scale_ptr, amax_ptr, saturated_ptr, underflowed_ptr, y_scale_ptr, M, H, DY_ROW, X_ROW, clamp, offset,
    ACT: tl.constexpr, DERIVATIVE: tl.constexpr, MASKS: tl.constexpr, GATED: tl.constexpr, ALIGN: tl.constexpr,
    DX_E5M2: tl.constexpr, Y_E5M2: tl.constexpr, SLOTS: tl.constexpr, MULTIPLE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    PARTS: tl.constexpr = 2 if GATED else 1
    H, DY_ROW, X_ROW = aligned(H, ALIGN), aligned(DY_ROW, ALIGN), aligned(X_ROW, ALIGN)
    tile = tl.program_id(0)
    block = tl.program_id(1).to(tl.int64) + 65535 * tl.program_id(2)
    quads = block * (BLOCK_M // QUAD) + tl.arange(0, BLOCK_M // QUAD)
    columns = tile * BLOCK_H + tl.arange(0, BLOCK_H)
    within = columns < H
    ragged = _is_ragged(block, tile, M, H, BLOCK_M, BLOCK_H)
    sums, sums2 = tl.zeros([BLOCK_H], tl.float32), tl.zeros([BLOCK_H], tl.float32)
    sizes = tl.zeros([BLOCK_M // QUAD, BLOCK_H], tl.float32)
    y_packed = tl.zeros([BLOCK_M // QUAD, BLOCK_H], tl.uint32)
    bias = load_vector(bias_ptr, columns, within)[None, :]
    bias2 = load_vector(bias_ptr, columns + (PARTS - 1) * H, within)[None, :]
    loaded = ()  # all before the arithmetic, which would hold back what is loaded after it
    for i in tl.static_range(QUAD):
        rows = quads * QUAD + i
        inside = (rows < M)[:, None] & within[None, :]
        x_at = x_ptr + rows[:, None] * X_ROW + columns[None, :]
        z = tl.load(x_at, mask=inside, other=0.0)
        linear = tl.load(x_at + H, mask=inside, other=0.0) if GATED else z
        dy = tl.load(dy_ptr + rows[:, None] * DY_ROW + columns[None, :], mask=inside, other=0.0) if dy_ptr is not None else z
        loaded += (z, linear, dy)  # type: ignore[assignment]
    tiles = ()  # of dx: those of a row's halves are neighbours
    for i in tl.static_range(QUAD):
        rows = quads * QUAD + i
        real = rows < M
        inside = real[:, None] & within[None, :]
        z = still_packed(loaded[3 * i]).to(tl.float32) + bias
        if GATED:
            linear = still_packed(loaded[3 * i + 1]).to(tl.float32) + bias2
            if clamp is not None:  # the boundary itself passes gradient, NaN does not
                passes, passes2 = z <= clamp, (linear <= clamp) & (linear >= -clamp)
                z, linear = clamp_halves(z, linear, clamp)
            if offset is not None:
                linear += offset
            y = ACT(z) * linear
        else:
            y = ACT(z)
        if ragged:
            y = tl.where(inside, y, 0.0)
        if weight_ptr is not None:
            weight = tl.load(weight_ptr + rows, mask=real, other=0.0).to(tl.float32)[:, None]
        if dy_ptr is not None:
            dy = still_packed(loaded[3 * i + 2]).to(tl.float32)
            if row_sums_ptr is not None:
                tl.store(row_sums_ptr + tile * M.to(tl.int64) + rows, tl.sum(y * dy, 1), mask=real)
            if weight_ptr is not None:
                dy *= weight
            derivative = DERIVATIVE(z)
            dz = dy * derivative
            if GATED:
                dz *= linear
            if MASKS:
                dz = tl.where(derivative == 0.0, 0.0, dz)
            if GATED:
                dz2 = dy * ACT(z)
                if clamp is not None:
                    dz, dz2 = tl.where(passes, dz, 0.0), tl.where(passes2, dz2, 0.0)
            if ragged:  # past the end dy is 0, but 0 times an infinite derivative is NaN
                dz = tl.where(inside, dz, 0.0)
                if GATED:
                    dz2 = tl.where(inside, dz2, 0.0)
            tiles += (dz,)  # type: ignore[assignment]
            sizes = tl.maximum(sizes, tl.abs(dz))
            if partial_ptr is not None:
                sums += tl.sum(dz, 0)
            if GATED:
                tiles += (dz2,)  # type: ignore[assignment]
                sizes = tl.maximum(sizes, tl.abs(dz2))
                if partial_ptr is not None:
                    sums2 += tl.sum(dz2, 0)
        if y_transposed_ptr is not None:
            if weight_ptr is not None:
                y = y * weight
            y_packed = packed_codes(y_packed, operand_codes(y, tl.load(y_scale_ptr), Y_E5M2), i)
    if partial_ptr is not None:
        at = partial_ptr + block * (PARTS * H) + columns
        there = within & (block * BLOCK_M < M)
        tl.store(at, sums, mask=there)
        if GATED:
            tl.store(at + H, sums2, mask=there)
    if y_transposed_ptr is not None:
        store_transposed(y_transposed_ptr, y_packed, quads, columns, M, within, MULTIPLE)
    if dx_scale_ptr is not None:
        scale = tl.load(dx_scale_ptr)
        largest = largest_of(sizes)
        rare = is_rare(largest, scale, DX_E5M2)
        if amax_ptr is not None:
            note_tiles(amax_ptr, saturated_ptr, underflowed_ptr, largest, rare, tiles, QUAD * PARTS, scale, DX_E5M2, SLOTS)
        for part in tl.static_range(PARTS):
            packed = tl.zeros([BLOCK_M // QUAD, BLOCK_H], tl.uint32)
            for i in tl.static_range(QUAD):
                codes = tile_codes(tiles[i * PARTS + part], scale, rare, DX_E5M2)
                if codes_ptr is not None:
                    rows = quads * QUAD + i
                    inside = (rows < M)[:, None] & within[None, :]
                    tl.store(codes_ptr + rows[:, None] * (PARTS * H) + (columns + part * H)[None, :], codes, mask=inside)
                packed = packed_codes(packed, codes, i)
            if transposed_ptr is not None:
                store_transposed(transposed_ptr, packed, quads, columns + part * H, M, within, MULTIPLE)


# ---- tiles: from the shape, never by trial ----


@lru_cache(1024)
def _rows_plan(act: Activation, H: int, x_row: int, clamp: float | None, offset: float | None, e5m2: bool) -> tuple[int, Bound]:
    block_h = next_power_of_two(H) if H <= _HELD else _HELD // 2  # a longer row is read twice
    block_m = max(1, 2048 // block_h)
    bound: Bound = _rows_kernel.bind(
        x_row, clamp, offset, H, act.forward, act.gated, known_align(H, x_row), e5m2, block_m, block_h,
        num_warps=max(4, min(16, block_m * block_h // 512)),
    )  # fmt: skip
    return block_m, bound


@lru_cache(1024)
def _tiles_plan(
    act: Activation, H: int, x_row: int, clamp: float | None, offset: float | None, e5m2: bool
) -> tuple[int, int, Bound]:
    block_h = min(512, next_power_of_two(H))
    block_m = FORWARD_VALUES // block_h
    bound: Bound = _tiles_kernel.bind(
        H, x_row, clamp, offset, act.forward, act.gated, known_align(H, x_row), e5m2, SLOTS, block_m, block_h, num_warps=8
    )
    return block_m, block_h, bound


def _backward_width(H: int) -> int:
    return max(16, min(TILE_H, next_power_of_two(H)))


@lru_cache(1024)
def _backward_plan(
    act: Activation, H: int, dy_row: int, x_row: int, clamp: float | None, offset: float | None, dx_e5m2: bool, y_e5m2: bool
) -> Bound:
    width = _backward_width(H)
    bound: Bound = _backward_codes_kernel.bind(
        H, dy_row, x_row, clamp, offset, act.forward, act.derivative, act.masks, act.gated, known_align(H, dy_row, x_row),
        dx_e5m2, y_e5m2, SLOTS, MULTIPLE, TILE_M, width, num_warps=2 if width == TILE_H else 1,
    )  # fmt: skip
    return bound


# ---- launches ----


def forward_codes(
    x: Tensor, bias: Tensor | None, weight: Tensor | None, options: ActivationOptions, target: FP8Target
) -> tuple[Tensor, Tensor | None]:
    """Return `fp8.activation_codes` of an x that has elements."""
    act, clamp, offset = activation_of(options.activation), options.clamp, options.linear_offset
    W = x.shape[-1]
    H, M = W // act.parts, x.numel() // W
    codes = torch.empty((*x.shape[:-1], H), dtype=target.dtype, device=x.device)
    x, x_row = as_rows(x)
    shape = act, H, x_row, clamp, offset, target.dtype is E5M2
    if target.scale is None:
        inverse = x.new_empty(M, 1, dtype=torch.float32)
        block_m, launch = _rows_plan(*shape)
        launch((ceil_div(M, block_m), 1, 1), x, bias, weight, codes.view(torch.uint8), inverse, M)
        return codes, inverse
    block_m, block_h, launch = _tiles_plan(*shape)
    grid = grid_of(ceil_div(H, block_h), ceil_div(M, block_m))
    launch(grid, x, bias, weight, codes.view(torch.uint8), *target[1:], M)
    return codes, None


class ActivationNeeds(NamedTuple):
    """Which results of a backward are asked for, beside y's codes."""

    dx: bool = True
    dx_transposed: bool = True
    dbias: bool = False
    dtoken_weight: bool = False


def backward_codes(
    dy: Tensor | None, x: Tensor, bias: Tensor | None, weight: Tensor | None, options: ActivationOptions,
    dx_target: FP8Target | None, y_target: FP8Target | None, needs: ActivationNeeds,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Return `fp8.activation_backward_codes` of an x that has elements."""
    act = activation_of(options.activation)
    codes, transposed, need_dbias, need_dweight = needs
    W = x.shape[-1]
    H, M = W // act.parts, x.numel() // W
    device, long = x.device, ceil_div(M, MULTIPLE) * MULTIPLE
    across, down = ceil_div(H, _backward_width(H)), ceil_div(M, TILE_M)
    to, y_to = dx_target or FP8Target(), y_target or FP8Target()
    dx = torch.empty(x.shape, dtype=to.dtype, device=device) if codes else None
    dx_transposed = torch.empty(W, long, dtype=to.dtype, device=device) if transposed else None
    y_transposed = torch.empty(H, long, dtype=y_to.dtype, device=device) if y_target is not None else None
    partial = torch.empty(down, W, dtype=torch.float32, device=device) if need_dbias else None
    row_sums = torch.empty(across, M, dtype=torch.float32, device=device) if need_dweight else None
    x, x_row = as_rows(x)
    dy, dy_row = (None, H) if dy is None else as_rows(dy)
    launch = _backward_plan(act, H, dy_row, x_row, options.clamp, options.linear_offset, to.dtype is E5M2, y_to.dtype is E5M2)
    across_given = (t if t is None else t.view(torch.int32) for t in (dx_transposed, y_transposed))
    given = dx if dx is None else dx.view(torch.uint8), *across_given
    launch(grid_of(across, down), x, dy, bias, weight, *given, partial, row_sums, *to[1:], y_to.scale, M)
    dbias = column_sum(partial, torch.empty_like(bias)) if partial is not None and bias is not None else None
    dweight = column_sum(row_sums, torch.empty_like(weight)) if row_sums is not None and weight is not None else None
    return dx, dx_transposed, y_transposed, dbias, dweight
