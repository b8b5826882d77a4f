"""Forward of both norms: short rows in registers, several to a program; long ones in pieces, read again from the caches.

A long row is read from memory once: while a program is at it, the row stays in the multiprocessor's own cache, and its second
reading costs less than the registers would that could hold it: those are better spent on more rows at a
time. The last reading goes backwards, as what was read last is the surest to be there. The pieces at the end of a row can be
held in registers: a ragged one is, so that all others need no mask, and so is what the cache has no room for.
"""

# mypy: disable-error-code="assignment"
# (kernels grow tuples, whose length is part of their type)

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from onepass.kernels.language import device_function, tl
from onepass.kernels.launch import Bound, Grid, kernel
from onepass.kernels.layout import Groups, as_groups, as_rows
from onepass.kernels.rows import aligned, inside_row, known_align, load_block, load_scale, load_vector, still_packed
from onepass.ops.norm.formula import NormOptions
from onepass.runtime.sizes import ceil_div, power_of_two

SHORT = 1024  # the longest row that is kept in registers, and the longest that may lie in groups


@device_function
def short_rows(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, h_ptr, stats_ptr,
    M, X_ROW, X_GAP, R_ROW, eps,
    X_INNER: tl.constexpr, H: tl.constexpr, LAYER: tl.constexpr, CENTERED: tl.constexpr, ALIGN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Store a program's h and statistics. Return what makes y, x * rstd * weight + bias, then its places and which are inside.

    In LayerNorm x is its distance from the mean.
    """
    X_ROW, R_ROW = aligned(X_ROW, ALIGN), aligned(R_ROW, ALIGN)
    if X_INNER:
        X_GAP = aligned(X_GAP, ALIGN)
    columns = tl.arange(0, BLOCK_H)
    within = inside_row(columns, H, H == BLOCK_H)
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    real = rows < M
    inside = real[:, None] & within[None, :]
    at = rows[:, None] * H + columns[None, :]
    x = load_block(x_ptr, rows, columns, X_ROW, inside, X_GAP, X_INNER)
    weight = load_scale(weight_ptr, columns, within, CENTERED)[None, :]
    bias = load_vector(bias_ptr, columns, within)[None, :]
    if residual_ptr is not None:
        h = (x + load_block(residual_ptr, rows, columns, R_ROW, inside)).to(h_ptr.dtype.element_ty)
        tl.store(h_ptr + at, h, mask=inside)
        x = h.to(tl.float32)
    if LAYER:
        mean = tl.sum(x, 1) / H
        x = tl.where(within[None, :], x - mean[:, None], 0.0)
        if stats_ptr is not None:
            tl.store(stats_ptr + M + rows, mean, mask=real)
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, 1) / H + eps)
    if stats_ptr is not None:
        tl.store(stats_ptr + rows, rstd, mask=real)
    return x, rstd[:, None], weight, bias, at, inside


@kernel
def _short_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, post_ptr, y_ptr, h_ptr, stats_ptr,
    M, X_ROW, X_GAP, R_ROW, eps,
    X_INNER: tl.constexpr, H: tl.constexpr, LAYER: tl.constexpr, CENTERED: tl.constexpr, ALIGN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    x, rstd, weight, bias, at, inside = short_rows(
        x_ptr, residual_ptr, weight_ptr, bias_ptr, h_ptr, stats_ptr, M, X_ROW, X_GAP, R_ROW, eps,
        X_INNER, H, LAYER, CENTERED, ALIGN, BLOCK_M, BLOCK_H,
    )  # fmt: skip
    if y_ptr is not None:
        y = tl.fma(x * rstd, weight, bias)
        if post_ptr is not None:
            rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
            y += load_block(post_ptr, rows, tl.arange(0, BLOCK_H), aligned(R_ROW, ALIGN), inside)
        tl.store(y_ptr + at, y, mask=inside)


@device_function
def row_piece(x_ptr, residual_ptr, h_ptr, columns, inside, POLICY: tl.constexpr):
    """A piece of a row of x in its own type, or of x + residual in h's."""
    x = tl.load(x_ptr + columns, mask=inside, other=0.0, eviction_policy=POLICY)
    if residual_ptr is None:
        return x
    else:
        residual = tl.load(residual_ptr + columns, mask=inside, other=0.0, eviction_policy=POLICY)
        return (x.to(tl.float32) + residual.to(tl.float32)).to(h_ptr.dtype.element_ty)


@device_function
def _groups(x, GROUP: tl.constexpr):
    """A piece in fp32, as groups of neighbours that one thread has."""
    return tl.reshape(x, [x.shape[0] // GROUP, GROUP]).to(tl.float32)


@device_function
def _add_groups(means, squares, met, x, GROUP: tl.constexpr):
    """One more piece: each group of it joins the ones before, `met` of them, in their mean and their squares about it."""
    mean = tl.sum(x, 1) / GROUP
    away = x - mean[:, None]
    step = mean - means
    part = 1.0 / (met + 1.0)
    # step by step, as the square of the first step, the mean itself, may be more than fp32 holds
    squares = tl.fma(step, step * (GROUP * met * part), squares + tl.sum(away * away, 1))
    return tl.fma(step, part, means), squares, met + 1.0


@device_function
def normed_piece(
    weight_ptr, bias_ptr, columns, inside, x, mean, rstd, LAYER: tl.constexpr, CENTERED: tl.constexpr, post_ptr=None
):  # fmt: skip
    """Return a piece of y in fp32."""
    z = x.to(tl.float32)
    if LAYER:
        z -= mean
    y = tl.fma(z * rstd, load_scale(weight_ptr, columns, inside, CENTERED), load_vector(bias_ptr, columns, inside))
    if post_ptr is not None:
        y += tl.load(post_ptr + columns, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
    return y


@device_function
def long_statistics(
    x_ptr, residual_ptr, h_ptr, eps,
    H: tl.constexpr, LAYER: tl.constexpr, BLOCK_H: tl.constexpr, HELD: tl.constexpr, AGAIN: tl.constexpr,
):  # fmt: skip
    """Return a row's pieces that are held, those after the first AGAIN columns, and its mean and 1 / deviation."""
    tl.static_assert(AGAIN >= 0 and AGAIN <= H)
    GROUP: tl.constexpr = 128 // x_ptr.dtype.element_ty.primitive_bitwidth if LAYER else 1  # what a thread reads at once, or less
    EACH: tl.constexpr = AGAIN // (BLOCK_H // GROUP)  # values that are read again, of each group
    lanes = tl.arange(0, BLOCK_H)
    whole = inside_row(lanes, H, True)
    means = tl.zeros([BLOCK_H // GROUP], tl.float32)  # of each group's values, of LayerNorm
    squares = tl.zeros([BLOCK_H // GROUP], tl.float32)  # summed: of the values, or of their distances from their group's mean
    met = 0.0
    for first in range(0, AGAIN, BLOCK_H):
        x = row_piece(x_ptr, residual_ptr, h_ptr, first + lanes, whole, "evict_last")
        if LAYER:
            means, squares, met = _add_groups(means, squares, met, _groups(x, GROUP), GROUP)
        else:
            x = x.to(tl.float32)
            squares = tl.fma(x, x, squares)
    held = ()
    for i in tl.static_range(HELD):
        columns = AGAIN + i * BLOCK_H + lanes
        inside = inside_row(columns, H, AGAIN + (i + 1) * BLOCK_H <= H)
        held += (row_piece(x_ptr, residual_ptr, h_ptr, columns, inside, "evict_first"),)
    mean = 0.0
    if LAYER:  # distances from a mean, as the squares of x itself would cancel where the mean is large
        sums = means * EACH
        for i in tl.static_range(HELD):
            sums += tl.sum(_groups(held[i], GROUP), 1)
        mean = tl.sum(sums, 0) / H
        squares += (means - mean) * (means - mean) * EACH
    for i in tl.static_range(HELD):
        x = (still_packed(held[i]) if LAYER else held[i]).to(tl.float32)
        if LAYER:
            x = tl.where(inside_row(AGAIN + i * BLOCK_H + lanes, H, AGAIN + (i + 1) * BLOCK_H <= H), x - mean, 0.0)
            squares += tl.sum(_groups(x * x, GROUP), 1)
        else:
            squares = tl.fma(x, x, squares)
    return held, mean, 1.0 / tl.sqrt(tl.sum(squares, 0) / H + eps)


@device_function
def store_statistics(stats_ptr, row, M, mean, rstd, LAYER: tl.constexpr):
    """Store a row's statistics where they are kept."""
    if stats_ptr is not None:
        tl.store(stats_ptr + row, rstd)
        if LAYER:
            tl.store(stats_ptr + M + row, mean)


@device_function
def store_piece(out_ptr, columns, inside, piece, CACHE: tl.constexpr):
    """Store a piece of a row where it is asked for: h's before y is computed, so that registers hold one of them."""
    if out_ptr is not None:
        tl.store(out_ptr + columns, piece, mask=inside, cache_modifier=CACHE)


@kernel
def _long_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, post_ptr, y_ptr, h_ptr, stats_ptr,
    M, X_ROW, R_ROW, eps,
    H: tl.constexpr, LAYER: tl.constexpr, CENTERED: tl.constexpr, ALIGN: tl.constexpr,
    BLOCK_H: tl.constexpr, HELD: tl.constexpr, CACHE: tl.constexpr,
):  # fmt: skip
    AGAIN: tl.constexpr = ((H + BLOCK_H - 1) // BLOCK_H - HELD) * BLOCK_H  # columns that are read again; the others are held
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * aligned(X_ROW, ALIGN)
    if residual_ptr is not None:
        residual_ptr += row * aligned(R_ROW, ALIGN)
        h_ptr += row * H
    if post_ptr is not None:
        post_ptr += row * aligned(R_ROW, ALIGN)
    lanes = tl.arange(0, BLOCK_H)
    whole = inside_row(lanes, H, True)
    held, mean, rstd = long_statistics(x_ptr, residual_ptr, h_ptr, eps, H, LAYER, BLOCK_H, HELD, AGAIN)
    store_statistics(stats_ptr, row, M, mean, rstd, LAYER)
    if y_ptr is not None:
        y_ptr += row * H
        for i in tl.static_range(HELD):
            columns = AGAIN + i * BLOCK_H + lanes
            inside = inside_row(columns, H, AGAIN + (i + 1) * BLOCK_H <= H)
            h = still_packed(held[i])
            store_piece(h_ptr, columns, inside, h, CACHE)
            y = normed_piece(weight_ptr, bias_ptr, columns, inside, h, mean, rstd, LAYER, CENTERED, post_ptr)
            store_piece(y_ptr, columns, inside, y, CACHE)
        for back in range(0, AGAIN, BLOCK_H):
            columns = AGAIN - BLOCK_H - back + lanes
            h = row_piece(x_ptr, residual_ptr, h_ptr, columns, whole, "evict_first")
            store_piece(h_ptr, columns, whole, h, CACHE)
            y = normed_piece(weight_ptr, bias_ptr, columns, whole, h, mean, rstd, LAYER, CENTERED, post_ptr)
            store_piece(y_ptr, columns, whole, y, CACHE)


# ---- tiles ----


class NormForwardTiles(NamedTuple):
    short: bool
    block_m: int  # rows a program
    block_h: int
    num_warps: int
    held: int = 0  # pieces of block_h at the row's end
    cache: str = ""


def forward_tiles(H: int, layer: bool, wide: bool, residual: bool) -> NormForwardTiles:
    """`wide`: x is fp32; `residual`: one is added, before or after. As measured: short rows 32 values a thread, 16 of fp32; long
    ones mostly a quarter to half a row a piece and 8 values a thread, twice the threads where there is a residual to wait for."""
    if H <= SHORT:
        num_warps = 1 if layer and not residual else 2
        block_h = power_of_two(H)
        return NormForwardTiles(True, max(1, (512 if wide else 1024) * num_warps // block_h), block_h, num_warps)
    block_h = 16384 if H >= 49152 else 8192 if H >= 24576 else min(4096, power_of_two(H + 1) // 4)
    num_warps = 8 if layer and 8192 <= H < 12288 else block_h // 256
    num_warps = min(32, num_warps * 2 if residual else num_warps)
    held = min(1, H % block_h)
    if H >= 65536:  # a few rows are more than a multiprocessor's cache holds, and there are registers left
        held = max(held, min(H // 32768, 2 if layer or wide or residual else 3))
    elif layer and 12288 < H < 24576:
        held = 2  # 2 to 10 % faster than one; why is not known
    streams = H >= 65536 or (residual and H >= 16384)  # what is written should not drive the row from the caches
    return NormForwardTiles(False, 1, block_h, num_warps, held, ".cs" if streams else "")


@lru_cache(4096)
def _forward_plan(
    M: int, H: int, x_lies: Groups, r_row: int, eps: float, layer: bool, centered: bool, wide: bool, residual: bool
) -> tuple[Grid, Bound]:
    tiles = forward_tiles(H, layer, wide, residual)
    return (ceil_div(M, tiles.block_m), 1, 1), _bind(tiles, H, x_lies, r_row, eps, layer, centered)


@lru_cache(1024)
def _bind(tiles: NormForwardTiles, H: int, x_lies: Groups, r_row: int, eps: float, layer: bool, centered: bool) -> Bound:
    x_row, x_gap, x_inner = x_lies
    fixed = H, layer, centered, known_align(x_row, x_gap or 0, r_row)
    bound: Bound  # not fused, so that y has the same bits whether or not statistics are stored
    if tiles.short:
        lies = x_row, x_gap, r_row, eps, x_inner
        bound = _short_kernel.bind(*lies, *fixed, tiles.block_m, tiles.block_h, num_warps=tiles.num_warps, fused=False)
    else:
        lies = x_row, r_row, eps
        bound = _long_kernel.bind(*lies, *fixed, tiles.block_h, tiles.held, tiles.cache, num_warps=tiles.num_warps, fused=False)
    return bound


# ---- calls ----
# A row's statistics are 1 / deviation, of all rows, and for LayerNorm after those the means, in one fp32 tensor.


def norm_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, post: Tensor | None,
    options: NormOptions, keep: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Return y, h where there is a residual, and the rows' statistics where `keep`. `post` is added to y; then no residual is."""
    layer, eps, centered = options
    H = x.shape[-1]
    M = x.numel() // H
    if x.is_contiguous():
        y, x_lies = torch.empty_like(x), (H, None, 0)
    else:
        y = x.new_empty(x.shape)
        x, x_lies = as_groups(x, H <= SHORT)
    h, r_row = None, x_lies[0]
    if residual is not None:
        h = torch.empty_like(y)
        residual, r_row = as_rows(residual)
    elif post is not None:
        post, r_row = as_rows(post)
    stats = new_stats(x, M, layer) if keep else None
    more = residual is not None or post is not None
    grid, launch = _forward_plan(M, H, x_lies, r_row, eps, layer, centered, x.dtype is torch.float32, more)
    launch(grid, x, residual, weight, bias, post, y, h, stats, M)
    return y, h, stats


def norm_statistics(x: Tensor, options: NormOptions) -> Tensor:
    """Return the rows' statistics, as the forward finds them: rows are read once more, and nothing else is done."""
    H = x.shape[-1]
    M = x.numel() // H
    x, x_row = as_rows(x)
    stats = new_stats(x, M, options.layer)
    grid, launch = _forward_plan(
        M, H, (x_row, None, 0), x_row, options.eps, options.layer, False, x.dtype is torch.float32, False
    )
    launch(grid, x, None, None, None, None, None, None, stats, M)
    return stats


def new_stats(x: Tensor, M: int, layer: bool) -> Tensor:
    return x.new_empty(2 * M if layer else M, dtype=torch.float32)
