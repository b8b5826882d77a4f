"""causal_conv1d's kernels: programs that go down a chunk of a sequence's rows, a tile of columns wide.

With x_t row t, p = bias + sum_j w_j x_{t-j}, s = silu(p), and h = s / |s| of each head where a piece is normalised,
|s| = sqrt(sum s^2 + eps), r = 1 / |s|:
    ds = r (dh - s r^2 sum(dh s)),  c = ds silu'(p)
    dx_t = sum_j w_j c_{t+j},  dw_j = sum_t c_t x_{t-j},  dbias = sum_t c_t
Rows of all sequences follow each other, and chunks are cut anywhere: a sequence begins as a document does.
A turn takes some rows at once and hands the last W - 1 of x on in registers, and in backward of c: each row is loaded once.
A turn's rows, and its last row's position, are loaded before the turn before them is computed. Backward makes dx of a row when it
has c of the W - 1 rows after it; those of the next chunk it computes again.

`since` has each row's position in its document, -1 where the boundaries are wrong, which makes NaN. A turn is whole where no
document begins in it or W - 2 rows before: its last row tells. Whole turns take no masks. The rows of others, and those past a
chunk's end, are taken one by one, and each asks. Both do the same arithmetic in the same order, so a row has the bits that it has
in a document of its own.

The kernels are bound by instructions as much as by bytes (note 0034): a turn's branch costs less than masks on every row.
"""
# mypy: disable-error-code="assignment, var-annotated"

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from onepass.gradients.places import Place, empty_gradient
from onepass.kernels.column_reduce import helper_count, join_helpers, leave_helpers, share_columns
from onepass.kernels.language import device_function, tl
from onepass.kernels.launch import Bound, kernel
from onepass.kernels.layout import as_rows
from onepass.kernels.rows import inside_row, load_vector, widen
from onepass.kernels.scratch import new_scratch, stream_scratch
from onepass.kernels.sigmoid import LOG2_E, sigmoid
from onepass.ops.convolution.norm_factors import norm_factors
from onepass.ops.convolution.tiles import ConvOptions, ConvTiles, backward_tiles, chunk_rows, forward_tiles
from onepass.runtime.sizes import ceil_div


class ConvKept(NamedTuple):
    """What backward has of a call."""

    dy: Tensor
    second_dy: Tensor | None
    third_dy: Tensor | None
    x: Tensor
    weight: Tensor
    bias: Tensor | None
    since: Tensor | None


# ---- a tile: columns of one piece ----


@device_function
def _tile(
    tile, first_ptr, second_ptr, third_ptr, SIZE0: tl.constexpr, SIZE1: tl.constexpr, SIZE2: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Return the piece's tensor, its size, where it begins in x, where the tile begins in it, and the piece's bit."""
    piece_ptr, size, begin, at, bit = first_ptr, SIZE0, 0, tile, 1
    if SIZE1:
        second = tile - (SIZE0 + COLUMNS - 1) // COLUMNS
        piece_ptr, size = tl.where(second < 0, piece_ptr, second_ptr), tl.where(second < 0, size, SIZE1)
        begin, at, bit = tl.where(second < 0, begin, SIZE0), tl.where(second < 0, at, second), tl.where(second < 0, bit, 2)
        if SIZE2:
            third = second - (SIZE1 + COLUMNS - 1) // COLUMNS
            piece_ptr, size = tl.where(third < 0, piece_ptr, third_ptr), tl.where(third < 0, size, SIZE2)
            begin, at = tl.where(third < 0, begin, SIZE0 + SIZE1), tl.where(third < 0, at, third)
            bit = tl.where(third < 0, bit, 4)
    return piece_ptr, size, begin, at * COLUMNS, bit


@device_function
def _columns(at, size, HEADS: tl.constexpr, HEAD: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr):
    """Return a tile's columns [HEADS, BLOCK] in its piece, and which of them are there."""
    within = tl.arange(0, BLOCK)[None, :]
    columns = at + tl.arange(0, HEADS)[:, None] * HEAD + within
    inside = inside_row(columns, size, WHOLE)
    return columns, inside if WHOLE else inside & (within < HEAD)


@device_function
def _taps(weight_ptr, columns, inside, W: tl.constexpr):
    """Return the weights of a row and of those before it, in fp32."""
    weights = ()
    for j in tl.static_range(W):
        weights += (tl.load(weight_ptr + columns * W + (W - 1 - j), mask=inside, other=0.0).to(tl.float32),)
    return weights


@device_function
def _position(since_ptr, row, M, S):
    """Return a row's position in its document, or in its sequence; 0 of rows outside of x, -1 where boundaries are wrong."""
    if since_ptr is not None:
        return tl.load(since_ptr + row, mask=(row >= 0) & (row < M), other=0)
    else:
        return tl.maximum(row, 0) % S


@device_function
def _position_ahead(since_ptr, row, M):
    """Return a row's position in its document, a turn before it is asked for. Where there are only sequences nobody asks."""
    if since_ptr is not None:
        return tl.load(since_ptr + tl.minimum(row, M - 1))
    else:
        return 0


@device_function
def _is_whole(since_ptr, last_position, position, S, COUNT: tl.constexpr, W: tl.constexpr):
    """Whether no document begins in a turn's COUNT rows, or W - 2 rows before.

    `last_position`: of the turn's last row in its document; `position`: of its first in its sequence.
    """
    if since_ptr is not None:
        return last_position >= COUNT + W - 2
    else:
        return (position >= W - 1) & (position + COUNT <= S)


@device_function
def _offset(row, DISTANCE):
    """Return where a row begins. It can pass 31 bits, which numbers of rows don't."""
    return (tl.zeros([], tl.int64) + row) * DISTANCE


@device_function
def _load_rows(x_ptr, ROW, row, end, inside, COUNT: tl.constexpr):
    """Return COUNT rows, the first of which is number `row`; zeros from `end` on."""
    rows = ()
    x_ptr += _offset(row, ROW)
    for u in tl.static_range(COUNT):
        rows += (tl.load(x_ptr + u * ROW, mask=inside & (row + u < end), other=0.0),)
    return rows


@device_function
def _rows_before(x_ptr, row, inside, ROW: tl.constexpr, W: tl.constexpr):
    """Return the W - 1 rows before `row`, zeros before the first of all."""
    rows = ()
    for j in tl.static_range(W - 1):
        at = row - (W - 1) + j
        rows += (tl.load(x_ptr + _offset(at, ROW), mask=inside & (at >= 0), other=0.0),)
    return rows


@device_function
def _convolve(rows, weights, bias, position, AT: tl.constexpr, W: tl.constexpr, MASKED: tl.constexpr):
    """Return p of rows[AT], and its own and the rows before it in fp32, zeros outside of its document."""
    x = widen(rows[AT])
    taps = (x,)
    p = weights[0] * x + bias
    for j in tl.static_range(1, W):
        x = widen(rows[AT - j])
        if MASKED:
            x = tl.where(position >= j, x, 0.0)
        taps += (x,)
        p = tl.fma(weights[j], x, p)
    if MASKED:
        p = tl.where(position < 0, float("nan"), p)
    return p, taps


# ---- forward ----


@device_function
def _forward_turn(pointers, rows, weights, bias, bounds, inside, eps, SHAPE, COUNT: tl.constexpr, MASKED: tl.constexpr):
    """Make COUNT rows from `row` on. `rows`: the W - 1 before, and those themselves. Return the last W - 1."""
    _, since_ptr, y_ptr = pointers
    row, _, last, M, S, SIZE = bounds
    W: tl.constexpr = SHAPE[1]
    SILU: tl.constexpr = SHAPE[2]
    NORMED: tl.constexpr = SHAPE[3]
    y_ptr += _offset(row, SIZE)
    for u in tl.static_range(COUNT):
        position = _position(since_ptr, row + u, M, S) if MASKED else 0
        s, _ = _convolve(rows, weights, bias, position, W - 1 + u, W, MASKED)
        if SILU:
            gate, _ = sigmoid(-LOG2_E * s)
            s = s * gate
        if NORMED:
            s = s * tl.rsqrt(tl.sum(s * s, 1) + eps)[:, None]
        tl.store(y_ptr + u * SIZE, s, mask=inside & (row + u < last) if MASKED else inside)
    left = ()
    for j in tl.static_range(W - 1):
        left += (rows[COUNT + j],)
    return left


@device_function
def _forward_chunk(pointers, weights, bias, bounds, inside, eps, SHAPE, COUNT: tl.constexpr):
    x_ptr, since_ptr, _ = pointers
    first, last, M, S, SIZE = bounds
    ROW: tl.constexpr = SHAPE[0]
    W: tl.constexpr = SHAPE[1]
    rows = _rows_before(x_ptr, first, inside, ROW, W)
    position = first % S
    ahead = _load_rows(x_ptr, ROW, first, last, inside, COUNT)
    last_position = _position_ahead(since_ptr, first + COUNT - 1, M)
    for row in tl.range(first, last, COUNT, num_stages=1):
        now = ahead
        ahead = _load_rows(x_ptr, ROW, row + COUNT, last, inside, COUNT)
        whole = (row + COUNT <= last) & _is_whole(since_ptr, last_position, position, S, COUNT, W)
        last_position = _position_ahead(since_ptr, row + 2 * COUNT - 1, M)
        if whole:
            at = (row, first, last, M, S, SIZE)
            rows = _forward_turn(pointers, rows + now, weights, bias, at, inside, eps, SHAPE, COUNT, False)
        else:
            for each in tl.range(row, tl.minimum(row + COUNT, last), num_stages=1):
                at = (each, first, last, M, S, SIZE)
                one = _load_rows(x_ptr, ROW, each, last, inside, 1)
                rows = _forward_turn(pointers, rows + one, weights, bias, at, inside, eps, SHAPE, 1, True)
        position += COUNT
        position = tl.where(position >= S, position - S, position)  # of sequences shorter than a turn no turn is whole


@kernel
def _conv_forward_kernel(
    x_ptr, weight_ptr, bias_ptr, since_ptr, first_ptr, second_ptr, third_ptr,  # x [M, C]; weight [C, W]; since [M]; y's pieces
    M, ROWS, S,  # all rows, those of a chunk, those of a sequence
    eps, ROW: tl.constexpr, W: tl.constexpr, SIZE0: tl.constexpr, SIZE1: tl.constexpr, SIZE2: tl.constexpr,
    NORMED: tl.constexpr, SILU: tl.constexpr, TILES: tl.constexpr, HEADS: tl.constexpr, HEAD: tl.constexpr,
    BLOCK: tl.constexpr, WHOLE: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    y_ptr, size, begin, at, bit = _tile(program % TILES, first_ptr, second_ptr, third_ptr, SIZE0, SIZE1, SIZE2, HEADS * HEAD)
    columns, inside = _columns(at, size, HEADS, HEAD, BLOCK, WHOLE)
    weights = _taps(weight_ptr, begin + columns, inside, W)
    bias = load_vector(bias_ptr + begin if bias_ptr is not None else None, columns, inside)
    first = program // TILES * ROWS
    last = tl.minimum(first + ROWS, M)
    x_ptr += begin + columns
    y_ptr += columns
    pointers, bounds = (x_ptr, since_ptr, y_ptr), (first, last, M, S, size)
    if (bit & NORMED) != 0:
        _forward_chunk(pointers, weights, bias, bounds, inside, eps, (ROW, W, SILU, True), COUNT)
    else:
        _forward_chunk(pointers, weights, bias, bounds, inside, eps, (ROW, W, SILU, False), COUNT)


# ---- backward ----


@device_function
def _backward_turn(pointers, taken, weights, bias, bounds, inside, eps, SHAPE, COUNT: tl.constexpr, MASKED: tl.constexpr):
    """Take COUNT rows from `row` on, of x and dy, and make dx of as many from W - 1 rows before on.

    Carried are the W - 1 rows before of x and of c, the weight's sums and the bias's. Return these for the next turn.
    """
    _, since_ptr, _, dx_ptr, _ = pointers
    carried, loaded = taken
    rows, grads, sums, dbias = carried
    xs, dys = loaded
    rows += xs
    row, first, last, M, S, _ = bounds
    DX_ROW: tl.constexpr = SHAPE[8]
    IN_WARP: tl.constexpr = SHAPE[9]
    TOGETHER: tl.constexpr = 2 if IN_WARP and COUNT % 2 == 0 else 1
    W: tl.constexpr = SHAPE[2]
    SILU: tl.constexpr = SHAPE[3]
    NORMED: tl.constexpr = SHAPE[4]
    DX: tl.constexpr = SHAPE[5]
    DW: tl.constexpr = SHAPE[6]
    DB: tl.constexpr = SHAPE[7]
    if DX:
        dx_ptr += _offset(row - (W - 1), DX_ROW)
    positions = ()
    for i in tl.static_range(COUNT + W - 1):
        positions += (_position(since_ptr, row - (W - 1) + i, M, S) if MASKED else 0,)
    for start in tl.static_range(0, COUNT, TOGETHER):
        ss, gs, slopes, all_taps = (), (), (), ()
        for v in tl.static_range(TOGETHER):
            s, taps = _convolve(rows, weights, bias, positions[W - 1 + start + v], W - 1 + start + v, W, MASKED)
            slope = 1.0
            if SILU:
                gate, _ = sigmoid(-LOG2_E * s)
                s = s * gate
                slope = tl.fma(s, 1.0 - gate, gate)
            ss += (s,)
            gs += (widen(dys[start + v]),)
            slopes += (slope,)
            all_taps += (taps,)
        if NORMED:
            inverses, factors = norm_factors(ss, gs, eps, TOGETHER, IN_WARP)
        for v in tl.static_range(TOGETHER):
            g = gs[v]
            if NORMED:
                g = tl.fma(ss[v], factors[v], g) * inverses[v]
            c = g * slopes[v] if SILU else g
            if MASKED:  # rows past the end have no gradient, whatever is made of zeros and the rows before them
                c = tl.where(row + start + v < M, tl.where(positions[W - 1 + start + v] < 0, float("nan"), c), 0.0)
            grads += (c,)
            own = tl.where(row + start + v < last, c, 0.0) if MASKED else c
            if DB:
                dbias += own
            if DW:
                more = ()
                for j in tl.static_range(W):
                    more += (tl.fma(own, all_taps[v][j], sums[j]),)
                sums = more
            if DX:
                dx = weights[0] * grads[start + v]
                for j in tl.static_range(1, W):
                    c = grads[start + v + j]
                    if MASKED:
                        c = tl.where(positions[start + v + j] >= j, c, 0.0)
                    dx = tl.fma(weights[j], c, dx)
                out = row - (W - 1) + start + v
                # the rows before are another chunk's
                tl.store(dx_ptr + (start + v) * DX_ROW, dx, mask=inside & (out >= first))
    left, grads_left = (), ()
    for j in tl.static_range(W - 1):
        left += (rows[COUNT + j],)
        grads_left += (grads[COUNT + j],)
    return left, grads_left, sums, dbias


@device_function
def _load_both(x_ptr, dy_ptr, ROW, SIZE, row, M, inside, COUNT: tl.constexpr):
    """Return COUNT rows of x and of dy, the first of which is number `row`."""
    return _load_rows(x_ptr, ROW, row, M, inside, COUNT), _load_rows(dy_ptr, SIZE, row, M, inside, COUNT)


@device_function
def _backward_chunk(pointers, weights, bias, bounds, columns, inside, eps, SHAPE, COUNT: tl.constexpr):
    x_ptr, since_ptr, dy_ptr, _, partial_ptr = pointers
    first, last, M, S, SIZE = bounds
    ROW: tl.constexpr = SHAPE[0]
    C: tl.constexpr = SHAPE[1]
    W: tl.constexpr = SHAPE[2]
    DX: tl.constexpr = SHAPE[5]
    DW: tl.constexpr = SHAPE[6]
    DB: tl.constexpr = SHAPE[7]
    zeros, grads, sums = tl.zeros(inside.shape, tl.float32), (), ()
    for _ in tl.static_range(W - 1):
        grads += (zeros,)
    for _ in tl.static_range(W):
        sums += (zeros,)
    carried = (_rows_before(x_ptr, first, inside, ROW, W), grads, sums, zeros)
    end = last + (W - 1 if DX else 0)
    position = first % S
    ahead = _load_both(x_ptr, dy_ptr, ROW, SIZE, first, M, inside, COUNT)
    last_position = _position_ahead(since_ptr, first + COUNT - 1, M)
    for row in tl.range(first, end, COUNT, num_stages=1):
        now = ahead
        ahead = _load_both(x_ptr, dy_ptr, ROW, SIZE, row + COUNT, M, inside, COUNT)
        whole = (row + COUNT <= last) & _is_whole(since_ptr, last_position, position, S, COUNT, W)
        last_position = _position_ahead(since_ptr, row + 2 * COUNT - 1, M)
        if whole:
            at = (row, first, last, M, S, SIZE)
            carried = _backward_turn(pointers, (carried, now), weights, bias, at, inside, eps, SHAPE, COUNT, False)
        else:
            for each in tl.range(row, tl.minimum(row + COUNT, end), num_stages=1):
                at = (each, first, last, M, S, SIZE)
                one = _load_both(x_ptr, dy_ptr, ROW, SIZE, each, M, inside, 1)
                carried = _backward_turn(pointers, (carried, one), weights, bias, at, inside, eps, SHAPE, 1, True)
        position += COUNT
        position = tl.where(position >= S, position - S, position)
    _, _, sums, dbias = carried
    if DW:
        for j in tl.static_range(W):
            tl.store(partial_ptr + columns * W + (W - 1 - j), sums[j], mask=inside)
    if DB:
        tl.store(partial_ptr + (C * W if DW else 0) + columns, dbias, mask=inside)


@kernel
def _conv_backward_kernel(
    x_ptr, weight_ptr, bias_ptr, since_ptr, first_ptr, second_ptr, third_ptr,  # as in forward; the gradients of y's pieces
    dx_ptr, dweight_ptr, dbias_ptr, partial_ptr, arrived_ptr,  # the gradients; a row of sums a chunk, and two counters
    M, ROWS, S,  # all rows, those of a chunk, those of a sequence
    eps, ROW: tl.constexpr, DX_ROW: tl.constexpr, W: tl.constexpr, SIZE0: tl.constexpr, SIZE1: tl.constexpr, SIZE2: tl.constexpr,
    NORMED: tl.constexpr, SILU: tl.constexpr, ADD: tl.constexpr, TILES: tl.constexpr, HEADS: tl.constexpr, HEAD: tl.constexpr,
    BLOCK: tl.constexpr, WHOLE: tl.constexpr, IN_WARP: tl.constexpr, COUNT: tl.constexpr, SHARE_S: tl.constexpr,
    SHARE_H: tl.constexpr,
):  # fmt: skip
    C: tl.constexpr = SIZE0 + SIZE1 + SIZE2
    DX: tl.constexpr = dx_ptr is not None
    DW: tl.constexpr = dweight_ptr is not None
    DB: tl.constexpr = dbias_ptr is not None
    WIDTH: tl.constexpr = (C * W if DW else 0) + (C if DB else 0)
    program = tl.program_id(0)
    dy_ptr, size, begin, at, bit = _tile(program % TILES, first_ptr, second_ptr, third_ptr, SIZE0, SIZE1, SIZE2, HEADS * HEAD)
    columns, inside = _columns(at, size, HEADS, HEAD, BLOCK, WHOLE)
    weights = _taps(weight_ptr, begin + columns, inside, W)
    bias = load_vector(bias_ptr + begin if bias_ptr is not None else None, columns, inside)
    strip = program // TILES
    first = strip * ROWS
    last = tl.minimum(first + ROWS, M)
    dy_ptr += columns
    columns += begin
    x_ptr += columns
    dx = dx_ptr + columns if DX else x_ptr  # not None, which Triton's tuples can't hold
    sums = partial_ptr + _offset(strip, WIDTH) if WIDTH else x_ptr
    pointers, bounds = (x_ptr, since_ptr, dy_ptr, dx, sums), (first, last, M, S, size)
    if (bit & NORMED) != 0:
        _backward_chunk(
            pointers, weights, bias, bounds, columns, inside, eps, (ROW, C, W, SILU, True, DX, DW, DB, DX_ROW, IN_WARP), COUNT
        )  # fmt: skip
    else:
        _backward_chunk(
            pointers, weights, bias, bounds, columns, inside, eps, (ROW, C, W, SILU, False, DX, DW, DB, DX_ROW, False), COUNT
        )  # fmt: skip
    if WIDTH:
        programs, helpers = tl.num_programs(0), helper_count()
        helper = join_helpers(arrived_ptr, programs, helpers)
        if helper >= 0:
            strips = programs // TILES
            if DW:
                share_columns(partial_ptr, dweight_ptr, helper, helpers, strips, WIDTH, C * W, ADD, SHARE_S, SHARE_H)
            if DB:
                share_columns(partial_ptr + WIDTH - C, dbias_ptr, helper, helpers, strips, WIDTH, C, ADD, SHARE_S, SHARE_H)
            leave_helpers(arrived_ptr, helpers)


# ---- calls ----


@lru_cache(4096)
def _forward_plan(row: int, W: int, size: int, options: ConvOptions) -> tuple[ConvTiles, Bound]:
    """`row`: from a row of x to the next."""
    silu, eps, *sizes, normed, _ = options
    tiles = forward_tiles(options, W, size)
    bound: Bound = _conv_forward_kernel.bind(
        eps, row, W, *sizes, normed, silu, tiles.tiles, tiles.heads, tiles.head, tiles.block, tiles.are_whole(options),
        tiles.rows, num_warps=tiles.num_warps, resident=tiles.resident, fused=False,
    )  # fmt: skip
    return tiles, bound


@lru_cache(4096)
def _backward_plan(row: int, dx_row: int, W: int, size: int, options: ConvOptions, add: bool) -> tuple[ConvTiles, Bound]:
    silu, eps, *sizes, normed, _ = options
    tiles = backward_tiles(options, W, size)
    bound: Bound = _conv_backward_kernel.bind(
        eps, row, dx_row, W, *sizes, normed, silu, add, tiles.tiles, tiles.heads, tiles.head, tiles.block,
        tiles.are_whole(options), tiles.is_in_warp, tiles.rows, 32, 32, num_warps=tiles.num_warps, resident=tiles.resident,
        fused=False,
    )  # fmt: skip
    return tiles, bound


def conv_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, since: Tensor | None, options: ConvOptions
) -> tuple[Tensor | None, ...]:  # fmt: skip
    ys: list[Tensor | None] = [x.new_empty(*x.shape[:-1], size) if size else None for size in options[2:5]]
    S, M = x.shape[-2], x.shape[:-1].numel()
    x, row = as_rows(x)
    tiles, launch = _forward_plan(row, weight.shape[-1], x.element_size(), options)
    rows = chunk_rows(M, tiles, x.device)
    launch((tiles.tiles * ceil_div(M, rows), 1, 1), x, weight, bias, since, *ys, M, rows, S)
    return tuple(ys)


def conv_backward(
    kept: ConvKept, options: ConvOptions, need_dx: bool, need_dweight: bool, need_dbias: bool,
    into: Sequence[Tensor | None] | None = None, place: Place | None = None, keep_scratch: bool = True,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Return dx, dweight and dbias: each where it is needed. `into`: what the last two are added to; `place`: dx's."""
    *dys, x, weight, bias, since = kept
    C, W = options.first + options.second + options.third, weight.shape[-1]
    S, M = x.shape[-2], x.shape[:-1].numel()
    dys = [None if dy is None else dy.contiguous() for dy in dys]
    dx = empty_gradient(x, place) if need_dx else None
    given: list[Tensor | None] = [weight if need_dweight else None, bias if need_dbias else None]
    dweight, dbias = [None if t is None else torch.empty_like(t) for t in given] if into is None else into
    x, row = as_rows(x)
    dx_row = C if dx is None else as_rows(dx)[1]
    tiles, launch = _backward_plan(row, dx_row, W, x.element_size(), options, into is not None)
    rows = chunk_rows(M, tiles, x.device)
    chunks = ceil_div(M, rows)
    partial = arrived = None
    if need_dweight or need_dbias:
        width = C * (W * need_dweight + need_dbias)
        partial, arrived = (stream_scratch if keep_scratch else new_scratch)(chunks * width, 2, x.device)
    launch((tiles.tiles * chunks, 1, 1), x, weight, bias, since, *dys, dx, dweight, dbias, partial, arrived, M, rows, S)
    return dx, dweight, dbias
