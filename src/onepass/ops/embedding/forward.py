"""embedding's kernel forward: it looks the rows up, and orders the tokens by row for backward meanwhile.

The order is a radix sort of two digits. A program takes four values of a digit and reads all tokens: it counts those of lesser
values, and stores its own behind them, in their order. So programs of one digit need not know of each other. Most programs copy
rows in the meantime. Programs of the second digit wait for those of the first, which have started before and wait for nobody: a
program's number is the order in which it started.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from onepass.kernels import grid_sync
from onepass.kernels.language import VERSION, device_function, tl
from onepass.kernels.launch import Bound, kernel
from onepass.kernels.rows import aligned, inside_row, known_align
from onepass.kernels.scratch import new_scratch, stream_scratch
from onepass.runtime.sizes import ceil_div, power_of_two

_MOST_ROWS = (1 << 20) - 1  # of a table whose tokens the kernel orders
_FEW_TOKENS, _WIDE = 1 << 16, 2048  # PyTorch's sort is faster for more tokens of narrower rows
_TILE = 8192  # numbers of the rows that a program looks up at a time
_WARPS = 8
# the dimension of a block that Triton gives to a warp where addresses tell it nothing: the first up to 3.6, then the last
LANES_AT = tl.constexpr(0 if VERSION < (3, 7) else 1)


class OrderTiles(NamedTuple):
    """How programs order tokens."""

    second_at: int  # eighths of the launch after which programs of the second digit begin
    segments: int  # of the tokens, a few for each warp
    resident: int  # programs that share a multiprocessor's registers


_ORDER = OrderTiles(4, 64, 2)


class EmbeddingOptions(NamedTuple):
    padding_idx: int  # -1: none
    vocab_start: int  # the id of weight's first row
    vocab_size: int


# ---- kernels ----


@device_function
def _load_tokens(in_ptr, tokens, M, SECOND: tl.constexpr):
    """Load tokens' ids, or for the second digit words. Other programs wrote these: not from this multiprocessor's L1.

    By a minimum and not by a mask, each thread loads one token, and a warp 32 neighbours: as words are stored. So no layout is
    exchanged through shared memory. LANES_AT is the dimension of the neighbours for this.
    """
    at = tl.minimum(tokens, M - 1)
    if SECOND:
        return tl.load(in_ptr + at, cache_modifier=".cg")
    else:
        return tl.load(in_ptr + at)


@device_function
def _digits(loaded, tokens, M, ROWS, FIRST, PADDING, LOW_BITS: tl.constexpr, SECOND: tl.constexpr):
    """Return one digit of tokens' rows, and the tokens' words. Tokens past the last one have a digit above all others.

    The row of tokens whose id trains none is ROWS.
    """
    if SECOND:
        digits, words = (loaded >> (32 + LOW_BITS)).to(tl.int32), loaded
    else:
        rows = loaded.to(tl.int64) - FIRST
        rows = tl.where((rows >= 0) & (rows < ROWS) & (loaded != PADDING), rows, ROWS).to(tl.int32)
        digits, words = rows & ((1 << LOW_BITS) - 1), (rows.to(tl.int64) << 32) | tokens
    return tl.where(tokens < M, digits, 0x7FFFFFFF), words


@device_function
def _sum_field(packed, FIELD: tl.constexpr):
    """Return a segment's tokens of one of the four digits."""
    return tl.sum(((packed >> (16 * FIELD)) & 0xFFFF).to(tl.int32), LANES_AT)


@device_function
def _place_digit(
    in_ptr, out_ptr, M, least, ROWS, FIRST, PADDING,
    LOW_BITS: tl.constexpr, SECOND: tl.constexpr, SEGMENTS: tl.constexpr,
):  # fmt: skip
    """Store the words of this program's four digits, from `least` on, behind those of lesser ones, in the order that they have.

    Each warp has segments of the tokens for itself, so no warp waits for another while it counts or ranks. The loads of a step
    are under way during the step before.
    """
    LANES: tl.constexpr = 32  # a warp's tokens of a segment in a step
    span = tl.cdiv(M, SEGMENTS * LANES) * LANES  # tokens of a segment
    begins = tl.expand_dims(tl.arange(0, SEGMENTS) * span, LANES_AT) + tl.expand_dims(tl.arange(0, LANES), 1 - LANES_AT)
    lesser = tl.zeros(begins.shape, tl.int32)
    own = tl.zeros(begins.shape, tl.int64)  # 16 bits for each of the four
    ahead = _load_tokens(in_ptr, begins, M, SECOND)
    for start in range(0, span, LANES):
        loaded = ahead
        ahead = _load_tokens(in_ptr, begins + (start + LANES), M, SECOND)
        digits, _ = _digits(loaded, begins + start, M, ROWS, FIRST, PADDING, LOW_BITS, SECOND)
        field = digits - least
        mine = (field >= 0) & (field < 4)
        lesser += (field < 0).to(tl.int32)
        own += mine.to(tl.int64) << (16 * tl.where(mine, field, 0)).to(tl.int64)
    count0, count1, count2, count3 = _sum_field(own, 0), _sum_field(own, 1), _sum_field(own, 2), _sum_field(own, 3)
    before = tl.sum(tl.sum(lesser, LANES_AT), 0)
    place0 = before + tl.cumsum(count0, 0) - count0
    before += tl.sum(count0, 0)
    place1 = before + tl.cumsum(count1, 0) - count1
    before += tl.sum(count1, 0)
    place2 = before + tl.cumsum(count2, 0) - count2
    before += tl.sum(count2, 0)
    place3 = before + tl.cumsum(count3, 0) - count3
    ahead = _load_tokens(in_ptr, begins, M, SECOND)
    for start in range(0, span, LANES):
        loaded = ahead
        ahead = _load_tokens(in_ptr, begins + (start + LANES), M, SECOND)
        digits, words = _digits(loaded, begins + start, M, ROWS, FIRST, PADDING, LOW_BITS, SECOND)
        field = digits - least
        mine = (field >= 0) & (field < 4)
        shift = 8 * tl.where(mine, field, 0)
        one = mine.to(tl.int32) << shift  # 8 bits for each of the four
        rank = ((tl.cumsum(one, LANES_AT) >> shift) & 0xFF) - 1
        low = tl.where(field == 0, tl.expand_dims(place0, LANES_AT), tl.expand_dims(place1, LANES_AT))
        high = tl.where(field == 2, tl.expand_dims(place2, LANES_AT), tl.expand_dims(place3, LANES_AT))
        tl.store(out_ptr + (tl.where(field < 2, low, high) + rank), words, mask=mine)
        count = tl.sum(one, LANES_AT)
        place0 += count & 0xFF
        place1 += (count >> 8) & 0xFF
        place2 += (count >> 16) & 0xFF
        place3 += (count >> 24) & 0xFF


@device_function
def _order_tokens(
    ids_ptr, sorted_ptrs, M, ROWS, FIRST, PADDING,
    LOW_BITS: tl.constexpr, SECONDS: tl.constexpr, SECOND_AT: tl.constexpr, SEGMENTS: tl.constexpr,
):  # fmt: skip
    """Do this program's part of the sort, and return the program's number, by which it started.

    The first programs have the first digit, and SECONDS programs after them the second. At least as many run.
    Counters: programs that have started, and those that are done with the first digit, and past waiting. They end as zeros.
    """
    FIRSTS: tl.constexpr = (1 << LOW_BITS) // 4
    halfway_ptr, order_ptr, arrived_ptr = sorted_ptrs
    program = tl.atomic_add(arrived_ptr, 1, sem="relaxed")
    if program == tl.num_programs(0) - 1:  # all have started
        tl.store(arrived_ptr, 0)
    if program < FIRSTS:
        _place_digit(ids_ptr, halfway_ptr, M, program * 4, ROWS, FIRST, PADDING, LOW_BITS, False, SEGMENTS)
        tl.debug_barrier()  # all of this program's words are written before it counts itself in
        tl.atomic_add(arrived_ptr + 1, 1, sem="acq_rel")
    second = program - tl.maximum(FIRSTS, (tl.num_programs(0) - SECONDS) * SECOND_AT // 8)  # later: few wait
    if (second >= 0) & (second < SECONDS):
        while tl.atomic_add(arrived_ptr + 1, 0, sem="acquire") < FIRSTS:
            grid_sync.yield_to_programs()
        _place_digit(halfway_ptr, order_ptr, M, second * 4, ROWS, FIRST, PADDING, LOW_BITS, True, SEGMENTS)
        if tl.atomic_add(arrived_ptr + 2, 1, sem="acq_rel") == SECONDS - 1:  # nobody waits any more
            tl.store(arrived_ptr + 1, 0)
            tl.store(arrived_ptr + 2, 0)
    return program


@kernel
def _embedding_kernel(
    ids_ptr, weight_ptr, y_ptr,  # [M], [ROWS, H], [M, H]
    halfway_ptr, order_ptr, arrived_ptr,  # None where no gradient is asked for
    M, ROWS, FIRST,  # FIRST: the id of the first row
    VOCABULARY, PADDING, H, W_ROW, W_COLUMN,
    LOW_BITS: tl.constexpr, SECONDS: tl.constexpr,  # bits of the first digit, programs of the second
    WHOLE: tl.constexpr, ALIGN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr,
    SECOND_AT: tl.constexpr, SEGMENTS: tl.constexpr,
):  # fmt: skip
    H, W_ROW = aligned(H, ALIGN), aligned(W_ROW, ALIGN)
    program = tl.program_id(0)
    if order_ptr is not None:
        program = _order_tokens(
            ids_ptr, (halfway_ptr, order_ptr, arrived_ptr), M, ROWS, FIRST, PADDING,
            LOW_BITS, SECONDS, SECOND_AT, SEGMENTS,
        )  # fmt: skip
    tokens = program.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    real = tokens < M
    ids = tl.load(ids_ptr + tokens, mask=real, other=0).to(tl.int64)
    rows = ids - FIRST
    here = real & (rows >= 0) & (rows < ROWS)
    fill = tl.where((ids >= 0) & (ids < VOCABULARY), 0.0, float("nan"))
    for start in range(0, H, BLOCK_H):
        columns = start + tl.arange(0, BLOCK_H)
        inside = inside_row(columns, H, WHOLE)[None, :]
        at = weight_ptr + rows[:, None] * W_ROW + columns[None, :].to(tl.int64) * W_COLUMN
        y = tl.load(at, mask=here[:, None] & inside, other=fill[:, None])
        tl.store(y_ptr + tokens[:, None] * H + columns[None, :], y, mask=real[:, None] & inside)


# ---- plans: from the shape, never by trial ----


class LookUpTiles(NamedTuple):
    block_m: int  # tokens a program
    block_h: int


def look_up_tiles(H: int) -> LookUpTiles:
    block_h = min(2048, power_of_two(H))
    return LookUpTiles(max(1, _TILE // max(8, block_h)), block_h)


def order_programs(rows: int) -> tuple[int, int]:
    """Return the bits of the first digit, and the programs of the second: both digits have about as many values."""
    low = max(2, ceil_div(rows.bit_length(), 2))
    return low, ceil_div((rows >> low) + 1, 4)


def orders_in_kernel(tokens: int, rows: int, H: int) -> bool:
    """Whether the kernel orders the tokens, in the time that rows of 2048 columns take. Otherwise PyTorch's sort does."""
    return rows <= _MOST_ROWS and (tokens <= _FEW_TOKENS or H >= _WIDE)


@lru_cache(4096)
def _plan(H: int, strides: tuple[int, int], rows: int, vocab_size: int, padding_idx: int, sorts: bool) -> tuple[int, int, Bound]:
    """Tokens a program, the least number of programs, and the kernel."""
    tiles = look_up_tiles(H)
    low, seconds = order_programs(rows) if sorts else (0, 0)
    bound: Bound = _embedding_kernel.bind(
        vocab_size, padding_idx, H, *strides, low, seconds, H % tiles.block_h == 0, known_align(H, strides[0]),
        *tiles, *_ORDER[:2], num_warps=_WARPS, resident=_ORDER.resident if sorts else 2,
    )  # fmt: skip
    return tiles.block_m, (1 << low) // 4 + seconds if sorts else 1, bound


# ---- calls ----


def look_up(
    ids: Tensor, weight: Tensor, options: EmbeddingOptions, ordered: bool, *, keep_scratch: bool = True
) -> tuple[Tensor, Tensor | None]:
    """Return y, and where `ordered` the words [M] of all tokens in the order of their rows.

    A word has the row in its upper 32 bits and the token's number in its lower. The rows of tokens that have no gradient to give
    are weight's number of rows.
    """
    rows, H = weight.shape
    y = weight.new_empty(*ids.shape, H)
    ids = ids.contiguous().view(-1)
    M = ids.shape[0]
    sorts = ordered and orders_in_kernel(M, rows, H)
    halfway = order = arrived = None
    if sorts:
        halfway, order = ids.new_empty(M, dtype=torch.int64), ids.new_empty(M, dtype=torch.int64)
        arrived = (stream_scratch if keep_scratch else new_scratch)(0, 3, weight.device)[1]
    block_m, least, launch = _plan(H, weight.stride(), rows, options.vocab_size, options.padding_idx, sorts)
    programs = max(ceil_div(M, block_m), least)
    launch((programs, 1, 1), ids, weight, y, halfway, order, arrived, M, rows, options.vocab_start)
    if ordered and not sorts:
        order = _sort(ids, rows, options)
    return y, order


def _sort(ids: Tensor, rows: int, options: EmbeddingOptions) -> Tensor:
    """The order by PyTorch. No two words are equal, so the sort need not be stable."""
    local = ids.long() - options.vocab_start
    trained = (local >= 0) & (local < rows) & (ids != options.padding_idx)
    words = torch.where(trained, local, rows) << 32 | torch.arange(ids.shape[0], device=ids.device)
    return words.sort().values
