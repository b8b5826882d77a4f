"""Forward of both norms: short rows in registers, several to a program; long ones in pieces, read again from the caches.

A long row is read from memory once: while a program is at it, the row stays in the multiprocessor's own cache, and its second
reading (third, for LayerNorm) costs less than the registers would that could hold it: those are better spent on more rows at a
time. The last reading goes backwards, as what was read last is the surest to be there.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from onepass.kernels.rows import aligned, known_align, load_block, load_scale, load_vector
from onepass.runtime.lang import device_function, tl
from onepass.runtime.launch import Bound, Grid, kernel
from onepass.runtime.layout import as_rows
from onepass.runtime.sizes import ceil_div, power_of_two

SHORT = 512  # the longest row that is kept in registers


@kernel
def _short_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, h_ptr, mean_ptr, rstd_ptr,
    M, X_ROW, R_ROW, eps,
    H: tl.constexpr, LAYER: tl.constexpr, CENTERED: tl.constexpr, ALIGN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    X_ROW, R_ROW = aligned(X_ROW, ALIGN), aligned(R_ROW, ALIGN)
    columns = tl.arange(0, BLOCK_H)
    within = columns < H
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    real = rows < M
    inside = real[:, None] & within[None, :]
    at = rows[:, None] * H + columns[None, :]
    x = load_block(x_ptr, rows, columns, X_ROW, inside)
    if residual_ptr is not None:
        h = (x + load_block(residual_ptr, rows, columns, R_ROW, inside)).to(h_ptr.dtype.element_ty)
        tl.store(h_ptr + at, h, mask=inside)
        x = h.to(tl.float32)
    if LAYER:
        mean = tl.sum(x, 1) / H
        x = tl.where(inside, x - mean[:, None], 0.0)
        if mean_ptr is not None:
            tl.store(mean_ptr + rows, mean, mask=real)
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, 1) / H + eps)
    if rstd_ptr is not None:
        tl.store(rstd_ptr + rows, rstd, mask=real)
    weight = load_scale(weight_ptr, columns, within, CENTERED)[None, :]
    bias = load_vector(bias_ptr, columns, within)[None, :]
    tl.store(y_ptr + at, x * rstd[:, None] * weight + bias, mask=inside)


@device_function
def _piece(x_ptr, residual_ptr, h_ptr, row, columns, inside, X_ROW, R_ROW, POLICY: tl.constexpr):
    """A piece of a row of x in fp32, or of x + residual as h holds it."""
    x = tl.load(x_ptr + row * X_ROW + columns, mask=inside, other=0.0, eviction_policy=POLICY).to(tl.float32)
    if residual_ptr is not None:
        x += tl.load(residual_ptr + row * R_ROW + columns, mask=inside, other=0.0, eviction_policy=POLICY).to(tl.float32)
        x = x.to(h_ptr.dtype.element_ty).to(tl.float32)
    return x


@kernel
def _long_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, h_ptr, mean_ptr, rstd_ptr,
    X_ROW, R_ROW, eps,
    H: tl.constexpr, LAYER: tl.constexpr, CENTERED: tl.constexpr, ALIGN: tl.constexpr,
    BLOCK_H: tl.constexpr, CACHE: tl.constexpr,
):  # fmt: skip
    X_ROW, R_ROW = aligned(X_ROW, ALIGN), aligned(R_ROW, ALIGN)
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK_H)
    total = tl.zeros([BLOCK_H], tl.float32)
    for first in range(0, H, BLOCK_H):
        columns = first + lanes
        x = _piece(x_ptr, residual_ptr, h_ptr, row, columns, columns < H, X_ROW, R_ROW, "evict_last")
        total += x if LAYER else x * x
    if LAYER:  # the squares of distances from the mean: those of x less the mean's would cancel where the mean is large
        mean = tl.sum(total, 0) / H
        total = tl.zeros([BLOCK_H], tl.float32)
        for first in range(0, H, BLOCK_H):
            columns = first + lanes
            x = _piece(x_ptr, residual_ptr, h_ptr, row, columns, columns < H, X_ROW, R_ROW, "evict_last")
            away = tl.where(columns < H, x - mean, 0.0)
            total += away * away
        if mean_ptr is not None:
            tl.store(mean_ptr + row, mean)
    rstd = 1.0 / tl.sqrt(tl.sum(total, 0) / H + eps)
    if rstd_ptr is not None:
        tl.store(rstd_ptr + row, rstd)
    if y_ptr is not None:
        LAST: tl.constexpr = (H - 1) // BLOCK_H * BLOCK_H
        for back in range(0, H, BLOCK_H):
            columns = LAST - back + lanes
            inside = columns < H
            x = _piece(x_ptr, residual_ptr, h_ptr, row, columns, inside, X_ROW, R_ROW, "evict_first")
            if h_ptr is not None:
                tl.store(h_ptr + row * H + columns, x, mask=inside, cache_modifier=CACHE)
            if LAYER:
                x -= mean
            y = x * rstd * load_scale(weight_ptr, columns, inside, CENTERED) + load_vector(bias_ptr, columns, inside)
            tl.store(y_ptr + row * H + columns, y, mask=inside, cache_modifier=CACHE)


# ---- tiles ----


class Tiles(NamedTuple):
    short: bool
    block_m: int  # rows a program
    block_h: int
    num_warps: int
    cache: str = ""


def forward_tiles(H: int, layer: bool, wide: bool) -> Tiles:
    """Of short rows 32 values a thread (of fp32, `wide`, 16); of a long one 8, and as many threads as the row can use."""
    if H <= SHORT:
        block_h = power_of_two(H)
        return Tiles(True, (1024 if wide else 2048) // block_h, block_h, 2)
    num_warps = 2 if H <= 1024 else 4 if H <= 2048 else 8 if H < 8192 else 16 if H <= 24576 else 32
    block_h = num_warps * 256
    if H >= 65536:  # what is written should not drive the row from the caches
        return Tiles(False, 1, 8192, 16, ".cs") if layer else Tiles(False, 1, 16384, 32, ".cs")
    if H % block_h and H % (block_h // 2) == 0:  # no piece partly idle
        block_h //= 2
    return Tiles(False, 1, block_h, num_warps)


@lru_cache(4096)
def _forward_plan(
    M: int, H: int, x_row: int, r_row: int, eps: float, layer: bool, centered: bool, wide: bool
) -> tuple[Grid, Bound]:
    tiles = forward_tiles(H, layer, wide)
    return (ceil_div(M, tiles.block_m), 1, 1), _bind(tiles, H, x_row, r_row, eps, layer, centered)


@lru_cache(1024)
def _bind(tiles: Tiles, H: int, x_row: int, r_row: int, eps: float, layer: bool, centered: bool) -> Bound:
    fixed = x_row, r_row, eps, H, layer, centered, known_align(x_row, r_row)
    bound: Bound
    if tiles.short:
        bound = _short_kernel.bind(*fixed, tiles.block_m, tiles.block_h, num_warps=tiles.num_warps)
    else:
        bound = _long_kernel.bind(*fixed, tiles.block_h, tiles.cache, num_warps=tiles.num_warps)
    return bound


# ---- calls ----


def norm_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None,
    eps: float, layer: bool, centered: bool, keep: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """y, and h where there is a residual, and the rows' mean (of LayerNorm) and 1 / deviation where they are to be kept."""
    y, h = _like(x), None
    x, x_row = as_rows(x)
    r_row = x_row
    if residual is not None:
        h = torch.empty_like(y)
        residual, r_row = as_rows(residual)
    return y, h, *_launch(x, x_row, residual, r_row, weight, bias, y, h, eps, layer, centered, keep)


def norm_statistics(x: Tensor, eps: float, layer: bool) -> tuple[Tensor | None, Tensor | None]:
    """The mean and 1 / deviation of long rows, as the forward finds them: they are read once more, and nothing else is done."""
    x, x_row = as_rows(x)
    return _launch(x, x_row, None, x_row, None, None, None, None, eps, layer, False, True)


def _launch(
    x: Tensor, x_row: int, residual: Tensor | None, r_row: int, weight: Tensor | None, bias: Tensor | None,
    y: Tensor | None, h: Tensor | None, eps: float, layer: bool, centered: bool, keep: bool,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    H = x.shape[-1]
    M = x.numel() // H
    mean = x.new_empty(M, dtype=torch.float32) if keep and layer else None
    rstd = x.new_empty(M, dtype=torch.float32) if keep else None
    grid, launch = _forward_plan(M, H, x_row, r_row, eps, layer, centered, x.dtype is torch.float32)
    if H <= SHORT:
        launch(grid, x, residual, weight, bias, y, h, mean, rstd, M)
    else:
        launch(grid, x, residual, weight, bias, y, h, mean, rstd)
    return mean, rstd


def _like(x: Tensor) -> Tensor:
    return torch.empty_like(x) if x.is_contiguous() else x.new_empty(x.shape)
