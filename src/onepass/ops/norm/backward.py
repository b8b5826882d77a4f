"""Backward of both norms: dx, dweight and dbias in one kernel, and the normalised rows again where they are asked for.

With x' a normalised row, g = weight * dy, and means over the row:
    dx = (g - x' mean(g x') - mean(g)) / deviation + dh        (RMSNorm has no mean(g); dh is h's own gradient)
    dweight = sum over rows of dy x',  dbias = sum over rows of dy

Rows     a program holds whole rows in registers, while its next rows are on their way, and sums dweight and dbias. Where neither
         is asked for, most widths have a program a row.
Shared   a wide row is shared by programs that run at the same time, each with the sums of its own columns. They meet through
         memory: each publishes its parts of the next row's means before it needs the others' parts of this row's.
Either way neighbouring programs work on neighbouring rows, all over the tensor at the same pace, which the memory likes 5 %
better than strips of rows; and the last programs to arrive add up the programs' sums. Few rows are few_rows.py's.
"""

# mypy: disable-error-code="assignment"
# (kernels grow tuples, whose length is part of their type)

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from onepass.kernels.column_reduce import helper_count, join_helpers, leave_helpers, share_strips, share_tiles
from onepass.kernels.grid_sync import await_all, clear, publish
from onepass.kernels.language import device_function, tl
from onepass.kernels.launch import Bound, kernel
from onepass.kernels.layout import Groups, as_groups, as_rows
from onepass.kernels.rows import aligned, inside_row, known_align, load_block, load_scale, load_vector
from onepass.kernels.scratch import new_scratch, stream_scratch
from onepass.ops.norm.few_rows import are_few, few_rows_backward
from onepass.ops.norm.formula import NormOptions
from onepass.ops.norm.forward import SHORT, norm_statistics
from onepass.runtime.sizes import ceil_div, power_of_two, processors, shared_memory

WORDS = tl.constexpr(32)  # of int32, from the counters to the first word: words lie on lines of the cache of their own,
LINE = tl.constexpr(16)  # each slot's, of int64: half the speed is lost where many programs poll a line that others write
ALWAYS_HELD = 8192  # rows up to this are held by one program, whatever their type
SLOTS = 4  # rounds whose words may be in use at a time: one is written while the one before is read, by the slowest two back


@device_function
def _add_pairs(a, b, c, d):
    return a + c, b + d


@device_function
def _statistics(xs, H: tl.constexpr, eps, LAYER: tl.constexpr, BLOCK_H: tl.constexpr, CHUNKS: tl.constexpr):
    """The mean and 1 / deviation of rows in chunks [BLOCK_M, BLOCK_H], 0 outside."""
    mean = tl.zeros([xs[0].shape[0], 1], tl.float32)
    if LAYER:
        total = xs[0]
        for i in tl.static_range(1, CHUNKS):
            total += xs[i]
        mean = (tl.sum(total, 1) / H)[:, None]
    total = tl.zeros(xs[0].shape, tl.float32)
    for i in tl.static_range(CHUNKS):
        away = xs[i]
        if LAYER:
            away = tl.where((i * BLOCK_H + tl.arange(0, BLOCK_H) < H)[None, :], away - mean, 0.0)
        total = tl.fma(away, away, total)
    return mean, (1.0 / tl.sqrt(tl.sum(total, 1) / H + eps))[:, None]


@device_function
def _chunk(x_ptr, rows, columns, ROW, real, H: tl.constexpr, WHOLE: tl.constexpr, GAP=None, INNER: tl.constexpr = 0):
    """A block [BLOCK_M, BLOCK_H] of rows as `load_block` has it; WHOLE: no column of it lies past H."""
    mask = real[:, None] & inside_row(columns, H, WHOLE)[None, :]
    return load_block(x_ptr, rows, columns, ROW, mask, GAP, INNER)


@device_function
def _store_chunk(x_ptr, rows, columns, real, value, H: tl.constexpr, WHOLE: tl.constexpr):
    mask = real[:, None] & inside_row(columns, H, WHOLE)[None, :]
    tl.store(x_ptr + rows[:, None] * H + columns[None, :], value, mask=mask)


@device_function
def _add_rows(sums, values, FOLD: tl.constexpr):
    """values [BLOCK_M, BLOCK_H] added to sums: over the rows at once, where a thread has all rows of its columns."""
    return sums + (tl.sum(values, 0)[None, :] if FOLD else values)


@device_function
def _add_products(sums, a, b, FOLD: tl.constexpr):
    """`_add_rows` of a * b."""
    if FOLD and a.shape[0] > 1:
        return sums + tl.sum(a * b, 0)[None, :]
    else:
        return tl.fma(a, b, sums)


@device_function
def _store_sums(out_ptr, partial_ptr, sums, alone, H: tl.constexpr):
    """The sums of a program's rows, in chunks: where it is alone, they are the result."""
    BLOCK_H: tl.constexpr = sums[0].shape[1]
    for i in tl.static_range(len(sums)):
        columns = i * BLOCK_H + tl.arange(0, BLOCK_H)
        total = tl.sum(sums[i], 0)
        tl.store(out_ptr + columns, total, mask=(columns < H) & alone)
        tl.store(partial_ptr + columns, total, mask=(columns < H) & (alone == 0))


@device_function
def finish_sums(
    dweight_ptr, dbias_ptr, partial_ptr, arrived_ptr, dweights, dbiases,
    H: tl.constexpr, ADD: tl.constexpr, SHARE_S: tl.constexpr, SHARE_H: tl.constexpr,
):  # fmt: skip
    """Sum dweight and dbias over the programs of the grid's first dimension, each of which has the sums of its own rows."""
    program, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    PARTS: tl.constexpr = (dweight_ptr is not None) + (dbias_ptr is not None)
    if PARTS > 0:
        alone = (programs == 1) & (not ADD)  # to be added, they take the way of several programs: one place adds
        at = partial_ptr + program * (PARTS * H)
        if dweight_ptr is not None:
            _store_sums(dweight_ptr, at, dweights, alone, H)
        if dbias_ptr is not None:
            _store_sums(dbias_ptr, at + (PARTS - 1) * H, dbiases, alone, H)
        if alone == 0:
            helpers = helper_count()
            helper = join_helpers(arrived_ptr, programs, helpers)
            if helper >= 0:
                share_strips(partial_ptr, dweight_ptr, dbias_ptr, helper, helpers, programs, H, ADD, SHARE_S, SHARE_H)
                leave_helpers(arrived_ptr, helpers)


@kernel
def _rows_kernel(
    dy_ptr, dh_ptr, x_ptr, weight_ptr, bias_ptr, stats_ptr, dx_ptr, y_ptr, dweight_ptr, dbias_ptr,
    partial_ptr, arrived_ptr, M, ROWS, DY_ROW, DY_GAP, DH_ROW, X_ROW, X_GAP, eps,
    DY_INNER: tl.constexpr, X_INNER: tl.constexpr,
    H: tl.constexpr, LAYER: tl.constexpr, CENTERED: tl.constexpr, ADD: tl.constexpr, ALIGN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr, CHUNKS: tl.constexpr, FOLD: tl.constexpr, RELOADED: tl.constexpr,
    STAGES: tl.constexpr, SHARE_S: tl.constexpr, SHARE_H: tl.constexpr,
):  # fmt: skip
    DY_ROW, DH_ROW, X_ROW = aligned(DY_ROW, ALIGN), aligned(DH_ROW, ALIGN), aligned(X_ROW, ALIGN)
    if DY_INNER:
        DY_GAP = aligned(DY_GAP, ALIGN)
    if X_INNER:
        X_GAP = aligned(X_GAP, ALIGN)
    SUMS: tl.constexpr = 1 if FOLD else BLOCK_M
    program, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    weights, dweights, dbiases = (), (), ()
    for i in tl.static_range(CHUNKS):
        columns = i * BLOCK_H + tl.arange(0, BLOCK_H)
        if not RELOADED:
            weights += (load_scale(weight_ptr, columns, columns < H, CENTERED)[None, :],)
        dweights += (tl.zeros([SUMS, BLOCK_H], tl.float32),)
        dbiases += (tl.zeros([SUMS, BLOCK_H], tl.float32),)
    # each turn, all programs together take the next programs * BLOCK_M rows; ROWS of all fall to each
    for first in tl.range(program * BLOCK_M, ROWS * programs.to(tl.int64), programs * BLOCK_M, num_stages=STAGES):
        rows = first + tl.arange(0, BLOCK_M)
        real = rows < M
        xs = ()
        if stats_ptr is None:
            for i in tl.static_range(CHUNKS):
                columns = i * BLOCK_H + tl.arange(0, BLOCK_H)
                xs += (_chunk(x_ptr, rows, columns, X_ROW, real, H, (i + 1) * BLOCK_H <= H, X_GAP, X_INNER),)
            mean, rstd = _statistics(xs, H, eps, LAYER, BLOCK_H, CHUNKS)
        else:
            rstd = tl.load(stats_ptr + rows, mask=real, other=0.0)[:, None]
            if LAYER:
                mean = tl.load(stats_ptr + M + rows, mask=real, other=0.0)[:, None]
        normed, gs, new_dweights, new_dbiases = (), (), (), ()
        products = tl.zeros([BLOCK_M, BLOCK_H], tl.float32)
        sum_g = tl.zeros([BLOCK_M, BLOCK_H], tl.float32)
        for i in tl.static_range(CHUNKS):
            columns = i * BLOCK_H + tl.arange(0, BLOCK_H)
            dy = _chunk(dy_ptr, rows, columns, DY_ROW, real, H, (i + 1) * BLOCK_H <= H, DY_GAP, DY_INNER)
            x = xs[i] if stats_ptr is None else _chunk(
                x_ptr, rows, columns, X_ROW, real, H, (i + 1) * BLOCK_H <= H, X_GAP, X_INNER
            )  # fmt: skip
            z = (x - mean if LAYER else x) * rstd  # outside the row this is no 0, but there dy is
            normed += (z,)
            if dweight_ptr is not None:
                new_dweights += (_add_products(dweights[i], dy, z, FOLD),)
            if dbias_ptr is not None:
                new_dbiases += (_add_rows(dbiases[i], dy, FOLD),)
            weight = load_scale(weight_ptr, columns, columns < H, CENTERED)[None, :] if RELOADED else weights[i]
            if y_ptr is not None:
                y = tl.fma(z, weight, load_vector(bias_ptr, columns, columns < H)[None, :])
                _store_chunk(y_ptr, rows, columns, real, y, H, (i + 1) * BLOCK_H <= H)
            g = dy * weight
            gs += (g,)
            products = tl.fma(g, z, products)
            if LAYER:
                sum_g = tl.fma(dy, weight, sum_g)
        if dweight_ptr is not None:
            dweights = new_dweights
        if dbias_ptr is not None:
            dbiases = new_dbiases
        if dx_ptr is not None:
            product = (tl.sum(products, 1) / H)[:, None]
            if LAYER:
                mean_g = (tl.sum(sum_g, 1) / H)[:, None]
        for i in tl.static_range(CHUNKS):
            columns = i * BLOCK_H + tl.arange(0, BLOCK_H)
            if dx_ptr is not None:
                dx = tl.fma(normed[i], -product, gs[i])
                if LAYER:
                    dx -= mean_g
                if dh_ptr is not None:
                    dx = tl.fma(dx, rstd, _chunk(dh_ptr, rows, columns, DH_ROW, real, H, (i + 1) * BLOCK_H <= H))
                else:
                    dx *= rstd
                _store_chunk(dx_ptr, rows, columns, real, dx, H, (i + 1) * BLOCK_H <= H)
    finish_sums(dweight_ptr, dbias_ptr, partial_ptr, arrived_ptr, dweights, dbiases, H, ADD, SHARE_S, SHARE_H)


@device_function
def _tile(x_ptr, row, M, columns, ROW, H: tl.constexpr, WHOLE: tl.constexpr):
    """A tile of a row in its storage type, zeros past the last row."""
    mask = inside_row(columns, H, WHOLE) & (row < M)
    return tl.load(x_ptr + row * ROW + columns, mask=mask, other=0.0)


@device_function
def _publish_parts(word_ptr, dy, x, mean, weight, round, LAYER: tl.constexpr, SLOT: tl.constexpr):
    """This tile's parts of sum(g (x - mean)) and, for LayerNorm, sum(g)."""
    g = dy.to(tl.float32) * weight
    z = x.to(tl.float32)
    products = g * (z - mean if LAYER else z)
    if LAYER:
        product, sum_g = tl.reduce((products, g), 0, _add_pairs)
        publish(word_ptr + SLOT, sum_g, round)
    else:
        product = tl.sum(products, 0)
    publish(word_ptr, product, round)


@kernel
def _shared_kernel(
    dy_ptr, dh_ptr, x_ptr, weight_ptr, bias_ptr, stats_ptr, dx_ptr, y_ptr, dweight_ptr, dbias_ptr,
    partial_ptr, arrived_ptr, M, DY_ROW, DH_ROW, X_ROW,
    H: tl.constexpr, LAYER: tl.constexpr, CENTERED: tl.constexpr, ADD: tl.constexpr, ALIGN: tl.constexpr,
    BLOCK_H: tl.constexpr, TILES: tl.constexpr, SLOTS: tl.constexpr, STAGES: tl.constexpr,
    SHARE_S: tl.constexpr, SHARE_H: tl.constexpr,
):  # fmt: skip
    DY_ROW, DH_ROW, X_ROW = aligned(DY_ROW, ALIGN), aligned(DH_ROW, ALIGN), aligned(X_ROW, ALIGN)
    WHOLE: tl.constexpr = H % BLOCK_H == 0
    USED: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H  # of TILES, which is a power of two
    SLOT: tl.constexpr = TILES if TILES > LINE else LINE  # to Triton 3.5, max(...) is no constant
    MEANS: tl.constexpr = 2 if LAYER else 1
    tile, group = tl.program_id(0) % USED, tl.program_id(0) // USED
    groups = tl.num_programs(0) // USED
    columns = tile * BLOCK_H + tl.arange(0, BLOCK_H)
    within = columns < H
    weight = load_scale(weight_ptr, columns, within, CENTERED)
    dweight = tl.zeros([BLOCK_H], tl.float32)
    dbias = tl.zeros([BLOCK_H], tl.float32)
    others = tl.arange(0, TILES)
    there = others < USED
    others = tl.minimum(others, USED - 1)
    all_words_ptr = (arrived_ptr + WORDS).to(tl.pointer_type(tl.int64), bitcast=True)
    words_ptr = all_words_ptr + group * (SLOTS * MEANS * SLOT)
    row = group.to(tl.int64)
    dy = _tile(dy_ptr, row, M, columns, DY_ROW, H, WHOLE)
    x = _tile(x_ptr, row, M, columns, X_ROW, H, WHOLE)
    mean = tl.load(stats_ptr + M + row) if LAYER else 0.0
    if dx_ptr is not None:
        _publish_parts(words_ptr + tile, dy, x, mean, weight, 1, LAYER, SLOT)
    for turn in tl.range(0, tl.cdiv(M - group, groups), num_stages=STAGES):
        row = group + turn * groups.to(tl.int64)
        next_dy = _tile(dy_ptr, row + groups, M, columns, DY_ROW, H, WHOLE)
        next_x = _tile(x_ptr, row + groups, M, columns, X_ROW, H, WHOLE)
        next_mean = tl.load(stats_ptr + M + row + groups, mask=row + groups < M, other=0.0) if LAYER else 0.0
        rstd = tl.load(stats_ptr + row)
        z = x.to(tl.float32)
        if LAYER:
            z -= mean
        z *= rstd
        d = dy.to(tl.float32)
        if dx_ptr is not None:
            next_words = words_ptr + (turn + 1) % SLOTS * (MEANS * SLOT)
            _publish_parts(next_words + tile, next_dy, next_x, next_mean, weight, turn + 2, LAYER, SLOT)
            words = words_ptr + turn % SLOTS * (MEANS * SLOT) + others
            parts = tl.where(there, await_all(words, turn + 1), 0.0)
            if LAYER:
                g_parts = tl.where(there, await_all(words + SLOT, turn + 1), 0.0)
                product, sum_g = tl.reduce((parts, g_parts), 0, _add_pairs)
                dx = tl.fma(z, -(product * rstd / H), tl.fma(d, weight, -sum_g / H))
            else:
                dx = tl.fma(z, -(tl.sum(parts, 0) * rstd / H), d * weight)
            if dh_ptr is not None:
                dx = tl.fma(dx, rstd, _tile(dh_ptr, row, M, columns, DH_ROW, H, WHOLE).to(tl.float32))
            else:
                dx *= rstd
            tl.store(dx_ptr + row * H + columns, dx, mask=within)
        if y_ptr is not None:
            tl.store(y_ptr + row * H + columns, tl.fma(z, weight, load_vector(bias_ptr, columns, within)), mask=within)
        if dweight_ptr is not None:
            dweight = tl.fma(d, z, dweight)
        if dbias_ptr is not None:
            dbias += d
        dy, x, mean = next_dy, next_x, next_mean
    PARTS: tl.constexpr = (dweight_ptr is not None) + (dbias_ptr is not None)
    at = partial_ptr + group.to(tl.int64) * (PARTS * H) + columns
    if dweight_ptr is not None:
        tl.store(at, dweight, mask=within)
    if dbias_ptr is not None:
        tl.store(at + (PARTS - 1) * H, dbias, mask=within)
    helpers = tl.num_programs(0)  # all: they are together anyway
    helper = join_helpers(arrived_ptr, tl.num_programs(0), helpers)
    if PARTS > 0:
        share_tiles(partial_ptr, dweight_ptr, dbias_ptr, helper, helpers, groups, H, ADD, SHARE_S, SHARE_H)
    if leave_helpers(arrived_ptr, helpers):
        clear(all_words_ptr, groups * (SLOTS * MEANS * SLOT))


# ---- tiles: from the shape and the device, never by trial ----


class NormBackwardTiles(NamedTuple):
    shared: bool
    block_m: int  # rows a program takes at a time
    block_h: int
    pieces: int  # of block_h in a row: chunks of one program, or tiles of as many
    num_warps: int
    stages: int
    resident: int  # programs a multiprocessor
    reloaded: bool = False  # no registers to keep weight and bias in: they come with each row


def backward_tiles(H: int, layer: bool, size: int, residual: bool, vector_bytes: int, room: int) -> NormBackwardTiles:
    """`size`: bytes of a value of x. `vector_bytes`: of weight and bias, which may be reloaded with each row. `room`: the shared
    memory that a multiprocessor has for what is on its way."""
    wide = size > 2
    row_bytes = size * H * (3 if residual else 2)
    if H <= 1024:
        block_h = power_of_two(H)
        tiles = NormBackwardTiles(False, (2048 if layer else 4096) // block_h, block_h, 1, 4, 3, 3 if layer else 2)
    elif H <= 4096:
        tiles = NormBackwardTiles(False, 1, 1024, ceil_div(H, 1024), 4, 7 - ceil_div(H, 1024), 2)
    elif H <= 5120:
        tiles = NormBackwardTiles(False, 1, 1024, ceil_div(H, 1024), 4 if layer else 8, 3, 2)
    elif H <= ALWAYS_HELD or (H <= 12288 and not wide):
        tiles = NormBackwardTiles(False, 1, 2048, ceil_div(H, 2048), 8, 4 if H <= 6144 else 3, 1)
    elif H <= 65536 and (wide or not layer):
        tiles = NormBackwardTiles(True, 1, 2048, ceil_div(H, 2048), 4, 3, 3 if layer else 4)
    elif H <= 131072:
        tiles = NormBackwardTiles(True, 1, 4096, ceil_div(H, 4096), 4, 4, 2)
    else:
        tiles = NormBackwardTiles(True, 1, 8192, ceil_div(H, 8192), 8, 3, 1)
    if layer and tiles.pieces > 5 and not tiles.shared:
        row_bytes += vector_bytes
        tiles = tiles._replace(reloaded=True, stages=2 if residual else tiles.stages)  # with three that spills on sm_100
    share = tiles.block_m * row_bytes // (tiles.pieces if tiles.shared else 1)  # of a stage
    return tiles._replace(stages=min(tiles.stages, 1 + room // tiles.resident // max(share, 1)))


def tiles_for(x: Tensor, dh: object, weight: Tensor | None, bias: Tensor | None, layer: bool) -> NormBackwardTiles:
    """For rows of x, with h's gradient or None, and the vectors that y is made of; without a bias where no y is."""
    return _tiles_on(x.shape[-1], layer, x.element_size(), dh is not None, _vector_bytes(weight, bias), x.device)


def _vector_bytes(weight: Tensor | None, bias: Tensor | None) -> int:
    """Bytes a column of the weight and the bias that y is made of: shared memory holds them where they are reloaded."""
    return (0 if weight is None else weight.element_size()) + (0 if bias is None else bias.element_size())


def reads_twice(tiles: NormBackwardTiles) -> bool:
    """Whether statistics that were not kept are found in a reading of their own: there are no registers to find them in."""
    return tiles.shared or tiles.pieces > 4


def runs_once(tiles: NormBackwardTiles, layer: bool, residual: bool) -> bool:
    """Whether a program takes no second turn where no weight asks for a gradient, and so nothing is kept from turn to turn.

    It is faster where enough programs fit on a multiprocessor.
    """
    return not tiles.shared and (tiles.pieces < 3 if residual else tiles.num_warps == 4 or not layer)


def too_few_processors(x: Tensor) -> str | None:
    """Why rows this wide can't be shared by programs that run at the same time, or None: they would not all find a place."""
    columns = 6144 if x.shape[-1] <= 65536 else 8192  # that a multiprocessor has, at least, in every shape of tiles
    needed, there = ceil_div(x.shape[-1], columns), processors(x.device)
    return f"rows of {x.shape[-1]} need {needed} multiprocessors, and the GPU has {there}" if needed > there else None


@lru_cache(1024)
def _tiles_on(H: int, layer: bool, size: int, residual: bool, vectors: int, device: torch.device) -> NormBackwardTiles:
    room = shared_memory(device) - 16384  # what sums need, and more
    return backward_tiles(H, layer, size, residual, vectors * H, room)


@lru_cache(4096)
def _plan(
    H: int, lies: tuple[Groups, int, Groups], options: NormOptions, add: bool, size: int, residual: bool, vectors: int,
    sums: bool, device: torch.device,
) -> tuple[NormBackwardTiles, int, Bound]:  # fmt: skip
    """The tiles, how many programs there are at most (0: as many as that takes), and the kernel.

    `lies`: how rows of dy, of dh and of x do.
    """
    layer, eps, centered = options
    tiles = _tiles_on(H, layer, size, residual, vectors, device)
    if not sums and runs_once(tiles, layer, residual):
        tiles = tiles._replace(stages=1, resident=0)
    most = tiles.resident * processors(device)
    (dy_row, dy_gap, dy_inner), dh_row, (x_row, x_gap, x_inner) = lies
    align = known_align(dy_row, dy_gap or 0, dh_row, x_row, x_gap or 0)
    bound: Bound
    if tiles.shared:
        at_once = 512 * tiles.num_warps  # values of the last sums: 16 a thread
        share_s = min(power_of_two(max(1, most // tiles.pieces)), at_once)  # all strips
        bound = _shared_kernel.bind(
            dy_row, dh_row, x_row, H, layer, centered, add, align, tiles.block_h, power_of_two(tiles.pieces), SLOTS,
            tiles.stages, share_s, at_once // share_s,
            num_warps=tiles.num_warps, together=True, resident=tiles.resident, fused=False,
        )  # fmt: skip
    else:
        fold = tiles.block_h >= 256 * tiles.num_warps
        share = (128, 8 * tiles.num_warps) if tiles.pieces < 5 else (16 * tiles.num_warps, 32)  # 32 values a thread, or 16
        told = tiles.resident if layer or tiles.pieces < 5 else 0  # RMSNorm of more pieces spills with it, the rest without
        bound = _rows_kernel.bind(
            dy_row, dy_gap, dh_row, x_row, x_gap, eps, dy_inner, x_inner, H, layer, centered, add, align,
            tiles.block_m, tiles.block_h, tiles.pieces, fold, tiles.reloaded, tiles.stages, *share,
            num_warps=tiles.num_warps, resident=told, fused=False,
        )  # fmt: skip
    return tiles, most, bound


# ---- calls ----


def norm_backward(
    dy: Tensor, dh: Tensor | None, x: Tensor, weight: Tensor | None, bias: Tensor | None,
    stats: Tensor | None, options: NormOptions,
    need_dx: bool, need_dweight: bool, need_dbias: bool, dx_type: torch.dtype,
    rebuild: bool = False, *, into_dy: bool = False, into: Sequence[Tensor | None] | None = None, keep_scratch: bool = True,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Return dx (of x and of the residual alike), dweight, dbias, and y where it is to be rebuilt.

    Args:
        into_dy: dx may be written over dy.
        into: contiguous tensors that dweight and dbias are added to, as many as are needed of them.
    """
    H, device = x.shape[-1], x.device
    dy, dy_lies = as_groups(dy, H <= SHORT)
    x, x_lies = as_groups(x, H <= SHORT)
    dh_row = dy_lies[0]
    if dh is not None:
        dh, dh_row = as_rows(dh)
    M = x.numel() // H
    sums = (need_dweight + need_dbias) * H
    few = are_few(M, H) and stats is not None and not (dy_lies[2] or x_lies[2])
    if not few:
        vectors = _vector_bytes(weight, bias if rebuild else None)
        lies = dy_lies, dh_row, x_lies
        tiles, wanted, launch = _plan(
            H, lies, options, into is not None, x.element_size(), dh is not None, vectors, sums > 0, device
        )  # fmt: skip
        if stats is None and reads_twice(tiles):
            stats = norm_statistics(x, options)
    dx = dweight = dbias = y = None
    if need_dx:  # other programs of few rows read dy
        dx = dy if into_dy and not few else torch.empty_like(x, dtype=dx_type, memory_format=torch.contiguous_format)
    if rebuild:
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if into is not None:
        dweight, dbias = into
    elif need_dweight:
        assert weight is not None
        dweight = torch.empty_like(weight)
    if need_dbias and into is None:
        assert bias is not None
        dbias = torch.empty_like(bias)
    scratch = stream_scratch if keep_scratch else new_scratch
    tensors = dy, dh, x, weight, bias, stats, dx, y, dweight, dbias
    if few:
        few_rows_backward(tensors, (dy_lies[0], dh_row, x_lies[0]), options, into is not None)
    elif tiles.shared:
        groups = min(M, max(1, wanted // tiles.pieces))
        words = groups * SLOTS * (2 if options.layer else 1) * max(power_of_two(tiles.pieces), LINE.value)
        partial, arrived = scratch(groups * sums, WORDS.value + 2 * words, device)
        wanted = launch.most_at_once(*tensors, partial, arrived, M)
        groups = min(groups, max(1, wanted // tiles.pieces))
        launch((groups * tiles.pieces, 1, 1), *tensors, partial, arrived, M)
    else:
        blocks = ceil_div(M, tiles.block_m)
        programs = min(blocks, wanted or blocks)
        partial = arrived = None
        if sums:
            partial, arrived = scratch(programs * sums, 2, device)
        launch((programs, 1, 1), *tensors, partial, arrived, M, ceil_div(blocks, programs) * tiles.block_m)
    return dx, dweight, dbias, y
