"""The kernels of a bias and an activation whose results are operands of eight-bit products.

Forward   codes of y: rows with a scale each, or tiles at one scale that is known before.
Backward  tiles of x and dy: codes of dx, and turned copies of dx and of y, which is rebuilt in the order of forward's arithmetic.
          A tile also writes its column sums of dx, for the bias, and its row sums of y * dy, for the token weight.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from onepass.kernels.column_sum import column_sum
from onepass.kernels.fp8 import operand_codes, power_of_two, scale_exponents
from onepass.kernels.fp8_cast import HELD, SLOTS, note_amax, store_turned
from onepass.kernels.language import device_function, tl
from onepass.kernels.launch import Bound, grid_of, kernel
from onepass.kernels.layout import as_rows
from onepass.kernels.rows import aligned, inside_row, known_align, load_rows, load_vector
from onepass.ops.activation.activations import Activation, activation_of
from onepass.ops.activation.formula import ActivationOptions
from onepass.ops.activation.kernels import clamp_halves
from onepass.runtime.fp8 import E5M2, MULTIPLE, FP8Target
from onepass.runtime.sizes import ceil_div
from onepass.runtime.sizes import power_of_two as next_power_of_two

FORWARD_VALUES = 4096  # of a forward tile: a program raises one slot for all of them
TILE_M, TILE_H = 64, 64  # of backward, at most: turned rows of 64 bytes, rows of x of 128

# ---- device functions ----


@device_function
def _load_part(x_ptr, bias_ptr, rows, columns, H, X_ROW, inside, PART: tl.constexpr, PARTS: tl.constexpr):
    """Load x + bias of one half of a gated activation's rows, or of whole rows."""
    x = load_rows(x_ptr, None, rows, columns, H, X_ROW, inside, PART, PARTS, 1)
    return x + load_vector(bias_ptr, columns + PART * H, columns < H)[None, :]


@device_function
def _activated(
    x_ptr, bias_ptr, weight_ptr, rows, columns, inside, M, H, X_ROW, clamp, offset, ACT: tl.constexpr, GATED: tl.constexpr
):  # fmt: skip
    """Return a tile of y in fp32, zeros outside. `_backward_codes_kernel` repeats the arithmetic: codes are the same."""
    PARTS: tl.constexpr = 2 if GATED else 1
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
    return tl.where(inside, y, 0.0)


@device_function
def _store_gradient(
    codes_ptr, turned_ptr, amax_ptr, saturated_ptr, dx, scale, rows, columns, inside, M, H,
    PART: tl.constexpr, PARTS: tl.constexpr, E5M2: tl.constexpr, SLOTS: tl.constexpr, MULTIPLE: tl.constexpr,
):  # fmt: skip
    """Store the codes of a tile of dx, plain and turned, and note its largest magnitude."""
    codes = operand_codes(dx, scale, E5M2)
    if codes_ptr is not None:
        tl.store(codes_ptr + rows[:, None] * (PARTS * H) + (columns + PART * H)[None, :], codes, mask=inside)
    if turned_ptr is not None:
        store_turned(turned_ptr, codes, rows, columns + PART * H, M, columns < H, MULTIPLE)
    if amax_ptr is not None:
        note_amax(amax_ptr, saturated_ptr, dx, scale, E5M2, SLOTS)


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
        y = _activated(x_ptr, bias_ptr, weight_ptr, rows, columns, inside, M, H, X_ROW, clamp, offset, ACT, GATED)
        sizes = tl.abs(y)
        amax = tl.maximum(amax, tl.max(tl.where(sizes < float("inf"), sizes, 0.0), 1))
    biased = scale_exponents(amax, E5M2)
    scale = power_of_two(biased)
    tl.store(inverse_ptr + rows, power_of_two(254 - biased), mask=there)
    for back in range(0, H, BLOCK_H):  # backwards: what was read last is still in caches
        columns = (H - 1) // BLOCK_H * BLOCK_H - back + lanes
        inside = there[:, None] & inside_row(columns, H, H % BLOCK_H == 0)[None, :]
        if H > BLOCK_H:
            y = _activated(x_ptr, bias_ptr, weight_ptr, rows, columns, inside, M, H, X_ROW, clamp, offset, ACT, GATED)
        tl.store(codes_ptr + rows[:, None] * H + columns[None, :], operand_codes(y, scale[:, None], E5M2), mask=inside)


@kernel
def _tiles_kernel(
    x_ptr, bias_ptr, weight_ptr, codes_ptr, scale_ptr, amax_ptr, saturated_ptr, M, H, X_ROW, clamp, offset,
    ACT: tl.constexpr, GATED: tl.constexpr, ALIGN: tl.constexpr, E5M2: tl.constexpr, SLOTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    H, X_ROW = aligned(H, ALIGN), aligned(X_ROW, ALIGN)
    block = tl.program_id(1).to(tl.int64) + 65535 * tl.program_id(2)
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    inside = (rows < M)[:, None] & (columns < H)[None, :]
    y = _activated(x_ptr, bias_ptr, weight_ptr, rows, columns, inside, M, H, X_ROW, clamp, offset, ACT, GATED)
    scale = tl.load(scale_ptr)
    tl.store(codes_ptr + rows[:, None] * H + columns[None, :], operand_codes(y, scale, E5M2), mask=inside)
    if amax_ptr is not None:
        note_amax(amax_ptr, saturated_ptr, y, scale, E5M2, SLOTS)


@kernel
def _backward_codes_kernel(
    # x [M, PARTS * H] and dy [M, H], rows X_ROW and DY_ROW apart; without dy only y is written
    x_ptr, dy_ptr, bias_ptr, weight_ptr,
    # codes of dx [M, PARTS * H], of its transpose, of y's transpose
    codes_ptr, turned_ptr, y_turned_ptr,
    # column sums of each block of rows [blocks, PARTS * H], row sums of each tile of columns [tiles, M]
    partial_ptr, row_sums_ptr,
    dx_scale_ptr, amax_ptr, saturated_ptr, y_scale_ptr, M, H, DY_ROW, X_ROW, clamp, offset,
    ACT: tl.constexpr, DERIVATIVE: tl.constexpr, MASKS: tl.constexpr, GATED: tl.constexpr, ALIGN: tl.constexpr,
    DX_E5M2: tl.constexpr, Y_E5M2: tl.constexpr, SLOTS: tl.constexpr, MULTIPLE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    PARTS: tl.constexpr = 2 if GATED else 1
    H, DY_ROW, X_ROW = aligned(H, ALIGN), aligned(DY_ROW, ALIGN), aligned(X_ROW, ALIGN)
    tile = tl.program_id(0)
    block = tl.program_id(1).to(tl.int64) + 65535 * tl.program_id(2)
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tile * BLOCK_H + tl.arange(0, BLOCK_H)
    real = rows < M
    inside = real[:, None] & (columns < H)[None, :]
    z = _load_part(x_ptr, bias_ptr, rows, columns, H, X_ROW, inside, 0, PARTS)
    if GATED:
        linear = _load_part(x_ptr, bias_ptr, rows, columns, H, X_ROW, inside, 1, PARTS)
        if clamp is not None:  # the boundary itself passes gradient, NaN does not: as in torch.clamp
            passes, passes2 = z <= clamp, (linear <= clamp) & (linear >= -clamp)
            z, linear = clamp_halves(z, linear, clamp)
        if offset is not None:
            linear += offset
        y = ACT(z) * linear
    else:
        y = ACT(z)
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + rows, mask=real, other=0.0).to(tl.float32)[:, None]
    if dy_ptr is not None:
        dy = tl.load(dy_ptr + rows[:, None] * DY_ROW + columns[None, :], mask=inside, other=0.0).to(tl.float32)
        if row_sums_ptr is not None:
            tl.store(row_sums_ptr + tile * M.to(tl.int64) + rows, tl.sum(tl.where(inside, y * dy, 0.0), 1), mask=real)
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
            dz2 = tl.where(inside, dz2, 0.0)
        dz = tl.where(inside, dz, 0.0)  # past the end dy is 0, but 0 times an infinite derivative is NaN
        if partial_ptr is not None:
            at = partial_ptr + block * (PARTS * H) + columns
            there = (columns < H) & (block * BLOCK_M < M)
            tl.store(at, tl.sum(dz, 0), mask=there)
            if GATED:
                tl.store(at + H, tl.sum(dz2, 0), mask=there)
        if dx_scale_ptr is not None:
            scale = tl.load(dx_scale_ptr)
            _store_gradient(
                codes_ptr, turned_ptr, amax_ptr, saturated_ptr, dz, scale, rows, columns, inside, M, H,
                0, PARTS, DX_E5M2, SLOTS, MULTIPLE,
            )  # fmt: skip
            if GATED:
                _store_gradient(
                    codes_ptr, turned_ptr, amax_ptr, saturated_ptr, dz2, scale, rows, columns, inside, M, H,
                    1, PARTS, DX_E5M2, SLOTS, MULTIPLE,
                )  # fmt: skip
    if y_turned_ptr is not None:
        if weight_ptr is not None:
            y = y * weight
        y_codes = operand_codes(tl.where(inside, y, 0.0), tl.load(y_scale_ptr), Y_E5M2)
        store_turned(y_turned_ptr, y_codes, rows, columns, M, columns < H, MULTIPLE)


# ---- tiles: from the shape, never by trial ----


@lru_cache(1024)
def _rows_plan(act: Activation, H: int, x_row: int, clamp: float | None, offset: float | None, e5m2: bool) -> tuple[int, Bound]:
    block_h = min(HELD // 2 if H > HELD else HELD, next_power_of_two(H))
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
    block_h = min(256, next_power_of_two(H))
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
    bound: Bound = _backward_codes_kernel.bind(
        H, dy_row, x_row, clamp, offset, act.forward, act.derivative, act.masks, act.gated, known_align(H, dy_row, x_row),
        dx_e5m2, y_e5m2, SLOTS, MULTIPLE, TILE_M, _backward_width(H), num_warps=8,
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
    launch(grid, x, bias, weight, codes.view(torch.uint8), target.scale, target.amax, target.saturated, M)
    return codes, None


def backward_codes(
    dy: Tensor | None, x: Tensor, bias: Tensor | None, weight: Tensor | None, options: ActivationOptions,
    dx_target: FP8Target | None, y_target: FP8Target | None, codes: bool, turned: bool, need_dbias: bool, need_dweight: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Return `fp8.activation_backward_codes` of an x that has elements."""
    act = activation_of(options.activation)
    W = x.shape[-1]
    H, M = W // act.parts, x.numel() // W
    device, long = x.device, ceil_div(M, MULTIPLE) * MULTIPLE
    across, down = ceil_div(H, _backward_width(H)), ceil_div(M, TILE_M)
    to, y_to = dx_target or FP8Target(), y_target or FP8Target()
    dx = torch.empty(x.shape, dtype=to.dtype, device=device) if codes else None
    dx_turned = torch.empty(W, long, dtype=to.dtype, device=device) if turned else None
    y_turned = torch.empty(H, long, dtype=y_to.dtype, device=device) if y_target is not None else None
    partial = torch.empty(down, W, dtype=torch.float32, device=device) if need_dbias else None
    row_sums = torch.empty(across, M, dtype=torch.float32, device=device) if need_dweight else None
    x, x_row = as_rows(x)
    dy, dy_row = (None, H) if dy is None else as_rows(dy)
    launch = _backward_plan(act, H, dy_row, x_row, options.clamp, options.linear_offset, to.dtype is E5M2, y_to.dtype is E5M2)
    given = (t if t is None else t.view(torch.uint8) for t in (dx, dx_turned, y_turned))
    launch(grid_of(across, down), x, dy, bias, weight, *given, partial, row_sums, to.scale, to.amax, to.saturated, y_to.scale, M)
    dbias = column_sum(partial, torch.empty_like(bias)) if partial is not None and bias is not None else None
    dweight = column_sum(row_sums, torch.empty_like(weight)) if row_sums is not None and weight is not None else None
    return dx, dx_turned, y_turned, dbias, dweight
