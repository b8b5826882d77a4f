"""Backward of both norms for few rows: programs with a row each of dx and y, and programs with columns of dweight and dbias.

Where statistics were kept, dweight needs nothing of dx: the sum over rows of dy x'. So programs need not meet, nor keep sums for
others to add up. Each tensor is read twice, the second time from the cache, which takes less time than to meet.
"""

# mypy: disable-error-code="assignment"
# (kernels grow blocks)

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from torch import Tensor

from onepass.kernels.language import device_function, tl
from onepass.kernels.launch import Bound, kernel
from onepass.kernels.rows import aligned, inside_row, known_align, load_block, load_scale, load_vector
from onepass.ops.norm.formula import NormOptions
from onepass.runtime.batch_invariance import invariant
from onepass.runtime.sizes import ceil_div, power_of_two

MOST_ROWS, MOST_COLUMNS = 1024, 8192
_MOST = 1 << 22  # values of x: as far as it was measured, and the caches have room for x and dy


@device_function
def _row_gradient(
    dy_ptr, dh_ptr, x_ptr, weight_ptr, bias_ptr, stats_ptr, dx_ptr, y_ptr, row, M, DY_ROW, DH_ROW, X_ROW,
    H: tl.constexpr, LAYER: tl.constexpr, CENTERED: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """dx of one row, with h's own gradient added, and its y again."""
    columns = tl.arange(0, BLOCK_H)
    inside = inside_row(columns, H, BLOCK_H == H)
    rstd = tl.load(stats_ptr + row)
    x = tl.load(x_ptr + row * X_ROW + columns, mask=inside, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + row * DY_ROW + columns, mask=inside, other=0.0).to(tl.float32)
    z = (x - tl.load(stats_ptr + M + row) if LAYER else x) * rstd  # outside the row this is no 0, but there dy is
    weight = load_scale(weight_ptr, columns, columns < H, CENTERED)
    if y_ptr is not None:
        y = tl.fma(z, weight, load_vector(bias_ptr, columns, columns < H))
        tl.store(y_ptr + row * H + columns, y, mask=inside)
    if dx_ptr is not None:
        g = dy * weight
        dx = tl.fma(z, -(tl.sum(g * z, 0) / H), g)
        if LAYER:
            dx -= tl.sum(g, 0) / H
        if dh_ptr is not None:
            dx = tl.fma(dx, rstd, tl.load(dh_ptr + row * DH_ROW + columns, mask=inside, other=0.0).to(tl.float32))
        else:
            dx *= rstd
        tl.store(dx_ptr + row * H + columns, dx, mask=inside)


@device_function
def _store_columns(out_ptr, columns, total, H: tl.constexpr, ADD: tl.constexpr):
    """ADD: add to out, a main_grad, in fp32 and round once."""
    if ADD:
        total += tl.load(out_ptr + columns, mask=columns < H, other=0.0).to(tl.float32)
    tl.store(out_ptr + columns, total, mask=columns < H)


@kernel
def _few_rows_kernel(
    dy_ptr, dh_ptr, x_ptr, weight_ptr, bias_ptr, stats_ptr, dx_ptr, y_ptr, dweight_ptr, dbias_ptr, M,
    DY_ROW, DH_ROW, X_ROW, H: tl.constexpr, LAYER: tl.constexpr, CENTERED: tl.constexpr, ADD: tl.constexpr, ALIGN: tl.constexpr,
    BLOCK_H: tl.constexpr, TILES: tl.constexpr, TILE_M: tl.constexpr, TILE_H: tl.constexpr,
):  # fmt: skip
    DY_ROW, DH_ROW, X_ROW = aligned(DY_ROW, ALIGN), aligned(DH_ROW, ALIGN), aligned(X_ROW, ALIGN)
    program = tl.program_id(0)
    if program >= TILES:  # the tiles of columns come first, as each takes longer than a row
        row = (program - TILES).to(tl.int64)
        _row_gradient(
            dy_ptr, dh_ptr, x_ptr, weight_ptr, bias_ptr, stats_ptr, dx_ptr, y_ptr, row, M, DY_ROW, DH_ROW, X_ROW,
            H, LAYER, CENTERED, BLOCK_H,
        )  # fmt: skip
    else:
        columns = program * TILE_H + tl.arange(0, TILE_H)
        dweight, dbias = tl.zeros([TILE_M, TILE_H], tl.float32), tl.zeros([TILE_M, TILE_H], tl.float32)
        for first in range(0, M, TILE_M):
            rows = (first + tl.arange(0, TILE_M)).to(tl.int64)
            real = rows < M
            inside = real[:, None] & inside_row(columns, H, H % TILE_H == 0)[None, :]
            dy = load_block(dy_ptr, rows, columns, DY_ROW, inside)
            if dweight_ptr is not None:
                z = load_block(x_ptr, rows, columns, X_ROW, inside)
                if LAYER:
                    z -= tl.load(stats_ptr + M + rows, mask=real, other=0.0)[:, None]
                z *= tl.load(stats_ptr + rows, mask=real, other=0.0)[:, None]
                dweight = tl.fma(dy, z, dweight)
            dbias += dy
        if dweight_ptr is not None:
            _store_columns(dweight_ptr, columns, tl.sum(dweight, 0), H, ADD)
        if dbias_ptr is not None:
            _store_columns(dbias_ptr, columns, tl.sum(dbias, 0), H, ADD)


# ---- plans: from the shape, never by trial ----


class FewRowsTiles(NamedTuple):
    """Of the programs that sum columns."""

    block_m: int
    block_h: int
    num_warps: int


def few_rows_tiles(H: int) -> FewRowsTiles:
    return FewRowsTiles(128, 16, 8) if H <= 1024 else FewRowsTiles(128, 32, 4 if H <= 4096 else 8)


@lru_cache(4096)
def _plan(
    H: int, dy_row: int, dh_row: int, x_row: int, layer: bool, centered: bool, sums: bool, add: bool
) -> tuple[int, Bound]:  # fmt: skip
    """The programs that sum columns, and the kernel."""
    tiles = few_rows_tiles(H)
    across = ceil_div(H, tiles.block_h) if sums else 0
    bound: Bound = _few_rows_kernel.bind(
        dy_row, dh_row, x_row, H, layer, centered, add, known_align(dy_row, dh_row, x_row),
        power_of_two(H), across, tiles.block_m, tiles.block_h, num_warps=tiles.num_warps, fused=False,
    )  # fmt: skip
    return across, bound


# ---- calls ----


def are_few(M: int, H: int) -> bool:
    return not invariant() and M <= MOST_ROWS and H <= MOST_COLUMNS and M * H <= _MOST


def few_rows_backward(
    tensors: tuple[Tensor | None, ...], rows: tuple[int, int, int], options: NormOptions, add: bool
) -> None:
    """Write those of dx, y, dweight and dbias that are not None.

    Args:
        tensors: dy, dh, x, weight, bias, statistics, dx, y, dweight and dbias. Only dh, weight, bias and results may be None.
        rows: how far rows of dy, of dh and of x are apart.
        add: add to dweight and dbias.
    """
    _, _, x, _, _, _, dx, y, dweight, dbias = tensors
    assert x is not None
    H = x.shape[-1]
    M = x.numel() // H
    sums = dweight is not None or dbias is not None
    across, launch = _plan(H, *rows, options.layer, options.zero_centered_gamma, sums, add)
    of_rows = 0 if dx is None and y is None else M
    launch((across + of_rows, 1, 1), *tensors, M)
