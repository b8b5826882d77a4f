"""dropout_add's kernels, their tiles, and the registered ops that launch them."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from onepass.gradients.vectors import VectorGrads
from onepass.kernels.column_reduce import ColumnTiles, arrive, sum_strips
from onepass.kernels.language import tl
from onepass.kernels.launch import Bound, Grid, grid_of, kernel
from onepass.kernels.layout import as_rows
from onepass.kernels.philox import GROUP, apply_dropout, load_seed, probability
from onepass.kernels.rows import aligned, known_align, load_block, load_vector
from onepass.kernels.scratch import new_scratch, stream_scratch
from onepass.ops.dropout.formula import DropoutOptions
from onepass.runtime.op import Registered
from onepass.runtime.sizes import ceil_div, power_of_two, processors

# ---- kernels ----


@kernel
def _dropout_kernel(
    x_ptr, residual_ptr, bias_ptr, y_ptr, first_ptr, seed_ptr, M, SEED, H, X_ROW, RESIDUAL_ROW, threshold, scale,
    ALIGN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    H, X_ROW, RESIDUAL_ROW = aligned(H, ALIGN), aligned(X_ROW, ALIGN), aligned(RESIDUAL_ROW, ALIGN)
    left = tl.program_id(0) * BLOCK_H
    columns = left + tl.arange(0, BLOCK_H)
    block = tl.program_id(1).to(tl.int64) + 65535 * tl.program_id(2)
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = (rows < M)[:, None] & (columns < H)[None, :]
    z = load_block(x_ptr, rows, columns, X_ROW, inside)
    if residual_ptr is not None:
        residual = load_block(residual_ptr, rows, columns, RESIDUAL_ROW, inside)
    z += load_vector(bias_ptr, columns, columns < H)[None, :]
    if threshold is not None:
        numbers = rows if first_ptr is None else rows + tl.load(first_ptr)
        z = apply_dropout(z, load_seed(seed_ptr, SEED), numbers, left, threshold, scale, BLOCK_H)
    if residual_ptr is not None:
        z += residual
    tl.store(y_ptr + rows[:, None] * H + columns[None, :], z, mask=inside)


@kernel
def _dropout_backward_kernel(
    dy_ptr, dx_ptr, dbias_ptr, partial_ptr, arrived_ptr, first_ptr, seed_ptr, M, ROWS, SEED, H, DY_ROW, threshold, scale,
    ALIGN: tl.constexpr, ADD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_S: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    H, DY_ROW = aligned(H, ALIGN), aligned(DY_ROW, ALIGN)
    tile, strip = tl.program_id(0), tl.program_id(1).to(tl.int64)
    left = tile * BLOCK_H
    columns = left + tl.arange(0, BLOCK_H)
    if threshold is not None:
        seed = load_seed(seed_ptr, SEED)
        offset = 0 if first_ptr is None else tl.load(first_ptr)
    dbias = tl.zeros([BLOCK_M, BLOCK_H], tl.float32)
    for start in tl.range(0, ROWS, BLOCK_M, num_stages=STAGES):
        rows = strip * ROWS + start + tl.arange(0, BLOCK_M)  # ROWS is a multiple of BLOCK_M: strips don't overlap
        inside = (rows < M)[:, None] & (columns < H)[None, :]
        dz = load_block(dy_ptr, rows, columns, DY_ROW, inside)
        if threshold is not None:
            dz = apply_dropout(dz, seed, rows + offset, left, threshold, scale, BLOCK_H)
        if dx_ptr is not None:
            tl.store(dx_ptr + rows[:, None] * H + columns[None, :], dz, mask=inside)
        dbias += dz
    tl.store(partial_ptr + strip * H + columns, tl.sum(dbias, 0), mask=columns < H)
    if arrive(arrived_ptr, tile):
        sum_strips(partial_ptr, dbias_ptr, columns, tl.num_programs(1), H, columns < H, ADD, BLOCK_S, BLOCK_H)
        tl.store(arrived_ptr + tile, 0)


# ---- tiles: from the shape and the device, never by trial ----


def forward_tiles(M: int, H: int) -> ColumnTiles:
    """Sixteen values a thread, of two rows, whose random numbers share a column's work. Short rows take eight values."""
    block_h = max(GROUP, min(power_of_two(H), 512 if H % 1024 else 1024))
    values = 1024 if H <= 64 else 2048
    return ColumnTiles(values // block_h, block_h, ceil_div(H, block_h), ceil_div(M, values // block_h), 0, 4)


def backward_tiles(M: int, H: int, multiprocessors: int) -> ColumnTiles:
    """Few strips, each with the loads of several blocks in flight: summing twice as many strips costs a tenth of the time."""
    if H <= 64:
        block_h = max(GROUP, power_of_two(H))
        block_m, num_warps, resident, stages = 2048 // block_h, 8, 4, 3
    else:
        block_m, block_h, num_warps, resident, stages = 8, 128, 2, 6, 4
    across = ceil_div(H, block_h)
    strips = max(1, min(ceil_div(M, block_m), resident * multiprocessors // across))
    rows = ceil_div(ceil_div(M, strips), block_m) * block_m
    return ColumnTiles(block_m, block_h, across, ceil_div(M, rows), rows, num_warps, stages)


@lru_cache(1024)
def _bind_forward(H: int, x_row: int, residual_row: int, threshold: int, block_m: int, block_h: int, num_warps: int) -> Bound:
    sizes = H, x_row, residual_row
    bound: Bound = _dropout_kernel.bind(
        *sizes, *probability(threshold), known_align(*sizes), block_m, block_h, num_warps=num_warps
    )
    return bound


@lru_cache(4096)
def _forward_plan(M: int, H: int, x_row: int, residual_row: int, threshold: int) -> tuple[Grid, Bound]:
    tiles = forward_tiles(M, H)
    bound = _bind_forward(H, x_row, residual_row, threshold, tiles.block_m, tiles.block_h, tiles.num_warps)
    return grid_of(tiles.across, tiles.down), bound


@lru_cache(1024)
def _bind_backward(
    H: int, dy_row: int, threshold: int, add: bool, block_m: int, block_h: int, num_warps: int, stages: int
) -> Bound:
    block_s = max(1, 1024 * num_warps // block_h)  # the last program sums 32 values a thread at once
    bound: Bound = _dropout_backward_kernel.bind(
        H, dy_row, *probability(threshold), known_align(H, dy_row), add, block_m, block_h, block_s, stages, num_warps=num_warps
    )
    return bound


@lru_cache(4096)
def _backward_plan(M: int, H: int, dy_row: int, threshold: int, add: bool, device: torch.device) -> tuple[ColumnTiles, Bound]:
    t = backward_tiles(M, H, processors(device))
    return t, _bind_backward(H, dy_row, threshold, add, t.block_m, t.block_h, t.num_warps, t.stages)


# ---- launches ----


def dropout_add_forward(
    x: Tensor, residual: Tensor | None, bias: Tensor | None, seed: Tensor | None, first_row: Tensor | None,
    options: DropoutOptions, y_type: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """Return y, in the residual's type or `y_type`; without a residual, what would be added to it."""
    threshold, number = options
    H = x.shape[-1]
    M = x.numel() // H
    y = torch.empty_like(x if residual is None else residual, dtype=y_type, memory_format=torch.contiguous_format)
    x, x_row = as_rows(x)
    residual, residual_row = (None, H) if residual is None else as_rows(residual)
    grid, launch = _forward_plan(M, H, x_row, residual_row, threshold)
    launch(grid, x, residual, bias, y, first_row, seed, M, number)
    return y


def dropout_add_backward(
    dy: Tensor, seed: Tensor | None, first_row: Tensor | None, options: DropoutOptions,
    dx_type: torch.dtype | None, dbias_type: torch.dtype | None, *, into: Tensor | None = None, keep_scratch: bool = True,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Return dx and dbias, each where it has a type. `into`: a contiguous tensor that dbias is added to."""
    if dbias_type is None:
        return None if dx_type is None else dropout_add_forward(dy, None, None, seed, first_row, options, dx_type), None
    threshold, number = options
    H = dy.shape[-1]
    M = dy.numel() // H
    dx = None if dx_type is None else torch.empty_like(dy, dtype=dx_type, memory_format=torch.contiguous_format)
    dy, dy_row = as_rows(dy)
    dbias = dy.new_empty(H, dtype=dbias_type) if into is None else into
    tiles, launch = _backward_plan(M, H, dy_row, threshold, into is not None, dy.device)
    partials, arrived = (stream_scratch if keep_scratch else new_scratch)(tiles.down * H, tiles.across, dy.device)
    launch((tiles.across, tiles.down, 1), dy, dx, dbias, partials, arrived, first_row, seed, M, tiles.rows, number)
    return dx, dbias


# ---- registered ops ----


def _forward_fake(x: Tensor, residual: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(residual, memory_format=torch.contiguous_format)


def _backward_fake(
    dy: Tensor, seed: Any, first_row: Any, options: DropoutOptions, dx_type: torch.dtype | None, dbias_type: torch.dtype | None
) -> tuple[Tensor | None, ...]:
    return (
        None if dx_type is None else dy.new_empty(dy.shape, dtype=dx_type),
        None if dbias_type is None else dy.new_empty(dy.shape[-1], dtype=dbias_type),
    )


forward = Registered(
    "dropout_add(Tensor x, Tensor residual, Tensor? bias, Tensor? seed, Tensor? first_row, DropoutOptions options) -> Tensor",
    dropout_add_forward,
    _forward_fake,
    DropoutOptions,
)
backward = Registered(
    "dropout_add_backward(Tensor dy, Tensor? seed, Tensor? first_row, DropoutOptions options, ScalarType? dx_type, "
    "ScalarType? dbias_type) -> (Tensor?, Tensor?)",
    dropout_add_backward,
    _backward_fake,
    DropoutOptions,
    dispatched=partial(dropout_add_backward, keep_scratch=False),
)


def backward_into(
    grads: VectorGrads, dy: Tensor, seed: Tensor | None, first_row: Tensor | None, options: DropoutOptions,
    dx_type: torch.dtype | None, dbias_type: torch.dtype | None,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """`backward`, with dbias put where `grads` says."""
    into = grads.into(dy, seed, first_row)
    if into is None and dbias_type is not None:
        (like,) = grads.wide(*grads.vectors)
        dbias_type = None if like is None else like.dtype
    target = None if into is None else into.tensors[0]
    dx, dbias = backward(dy, seed, first_row, options, dx_type, dbias_type, into=target)
    (dbias,) = grads.put(into, dbias)
    return dx, dbias
