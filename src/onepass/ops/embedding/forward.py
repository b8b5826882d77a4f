"""embedding's kernel forward: it looks the rows up, and orders the tokens by row for backward meanwhile.

The order is a radix sort of two digits. A digit's place among all takes no counters: one program a digit reads all tokens, counts
those of lesser digits, and stores its own behind them, in their order. Copying rows takes longer, so the sort costs next to
nothing beside it. Programs of the second digit wait for those of the first, which have started before and wait for nobody: a
program's number is the order in which it started.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from onepass.kernels import grid_sync
from onepass.kernels.language import device_function, tl
from onepass.kernels.launch import Bound, kernel
from onepass.kernels.rows import aligned, inside_row, known_align
from onepass.kernels.scratch import stream_scratch
from onepass.runtime.sizes import ceil_div, power_of_two

_MOST_ROWS = (1 << 20) - 1  # of a table whose tokens the kernel orders: a digit has at most 1024 values
_MOST_READS = 1 << 28  # ids that all digits read together: more take longer than PyTorch's sort
_TILE = 8192  # numbers of the rows that a program looks up at a time
_BLOCK_T = 4096  # tokens that are ordered at a time
_WARPS = 8


class EmbeddingOptions(NamedTuple):
    padding_idx: int  # -1: none
    vocab_start: int  # the id of weight's first row
    vocab_size: int


# ---- kernels ----


@device_function
def _words(ids_ptr, tokens, M, ROWS, FIRST, PADDING):
    """Return words of these tokens: the row that gets a token's gradient, or ROWS for nobody's, above the token's number."""
    ids = tl.load(ids_ptr + tokens, mask=tokens < M, other=0).to(tl.int64)
    rows = ids - FIRST
    trained = (rows >= 0) & (rows < ROWS) & (ids != PADDING)
    return (tl.where(trained, rows, ROWS) << 32) | tokens


@device_function
def _digits(words, tokens, M, SHIFT: tl.constexpr, MASK: tl.constexpr):
    return tl.where(tokens < M, (words >> SHIFT).to(tl.int32) & MASK, MASK + 1)


@device_function
def _place_first_digit(
    ids_ptr, halfway_ptr, M, ROWS, FIRST, digit, PADDING, LOW_BITS: tl.constexpr, BLOCK_T: tl.constexpr
):  # fmt: skip
    """Store the words of rows whose low bits are `digit` behind those of lesser ones, in the order of tokens."""
    MASK: tl.constexpr = (1 << LOW_BITS) - 1
    lesser = tl.zeros([BLOCK_T], tl.int32)
    for start in range(0, M, BLOCK_T):
        tokens = start + tl.arange(0, BLOCK_T)
        lesser += (_digits(_words(ids_ptr, tokens, M, ROWS, FIRST, PADDING), tokens, M, 32, MASK) < digit).to(tl.int32)
    place = tl.sum(lesser, 0)
    for start in range(0, M, BLOCK_T):
        tokens = start + tl.arange(0, BLOCK_T)
        words = _words(ids_ptr, tokens, M, ROWS, FIRST, PADDING)
        mine = _digits(words, tokens, M, 32, MASK) == digit
        place = _place(halfway_ptr, words, mine, place)


@device_function
def _place_second_digit(
    halfway_ptr, order_ptr, M, digit, LOW_BITS: tl.constexpr, BLOCK_T: tl.constexpr
):  # fmt: skip
    """Store the words of rows whose high bits are `digit` behind those of lesser ones, in the order of the first digits."""
    MASK: tl.constexpr = (1 << (31 - LOW_BITS)) - 1
    lesser = tl.zeros([BLOCK_T], tl.int32)
    for start in range(0, M, BLOCK_T):
        at = start + tl.arange(0, BLOCK_T)
        # others wrote it: not from this multiprocessor's L1
        words = tl.load(halfway_ptr + at, mask=at < M, other=0, cache_modifier=".cg")
        lesser += (_digits(words, at, M, 32 + LOW_BITS, MASK) < digit).to(tl.int32)
    place = tl.sum(lesser, 0)
    for start in range(0, M, BLOCK_T):
        at = start + tl.arange(0, BLOCK_T)
        words = tl.load(halfway_ptr + at, mask=at < M, other=0, cache_modifier=".cg")
        place = _place(order_ptr, words, _digits(words, at, M, 32 + LOW_BITS, MASK) == digit, place)


@device_function
def _place(out_ptr, words, mine, place):
    """Store my words from `place` on, and return the place after them."""
    count = mine.to(tl.int32)
    tl.store(out_ptr + place + tl.cumsum(count, 0) - 1, words, mask=mine)
    return place + tl.sum(count, 0)


@device_function
def _order_tokens(
    ids_ptr, halfway_ptr, order_ptr, arrived_ptr, M, ROWS, FIRST, PADDING,
    LOW_BITS: tl.constexpr, SECOND: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Do this program's part of the sort, and return the program's number, by which it started.

    The first programs have a value of the first digit each, the last ones of the second digit. At least as many programs run.
    Counters: programs that have started, and those that are done with their digit, of the first and of the second.
    """
    FIRSTS: tl.constexpr = 1 << LOW_BITS
    program = tl.atomic_add(arrived_ptr, 1, sem="relaxed")
    digit = program - (tl.num_programs(0) - SECOND)
    if program < FIRSTS:
        _place_first_digit(ids_ptr, halfway_ptr, M, ROWS, FIRST, program, PADDING, LOW_BITS, BLOCK_T)
        tl.debug_barrier()  # all of this program's words are written before it counts itself in
        tl.atomic_add(arrived_ptr + 1, 1, sem="acq_rel")
    if digit >= 0:
        while tl.atomic_add(arrived_ptr + 1, 0, sem="acquire") < FIRSTS:
            grid_sync.yield_to_programs()
        _place_second_digit(halfway_ptr, order_ptr, M, digit, LOW_BITS, BLOCK_T)
        tl.debug_barrier()
        if tl.atomic_add(arrived_ptr + 2, 1, sem="acq_rel") == SECOND - 1:  # all have started: zeros for the next launch
            tl.store(arrived_ptr, 0)
            tl.store(arrived_ptr + 1, 0)
            tl.store(arrived_ptr + 2, 0)
    return program


@kernel
def _embedding_kernel(
    ids_ptr, weight_ptr, y_ptr,  # [M], [ROWS, H], [M, H]
    halfway_ptr, order_ptr, arrived_ptr,  # None where no gradient is asked for
    M, ROWS, FIRST,  # FIRST: the id of the first row
    VOCABULARY, PADDING, H, W_ROW, W_COLUMN,
    LOW_BITS: tl.constexpr, SECOND: tl.constexpr,  # bits of the first digit, values of the second
    WHOLE: tl.constexpr, ALIGN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    H, W_ROW = aligned(H, ALIGN), aligned(W_ROW, ALIGN)
    program = tl.program_id(0)
    if order_ptr is not None:
        program = _order_tokens(
            ids_ptr, halfway_ptr, order_ptr, arrived_ptr, M, ROWS, FIRST, PADDING, LOW_BITS, SECOND, BLOCK_T
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
    return LookUpTiles(max(1, _TILE // block_h), block_h)


def digits_of(rows: int) -> tuple[int, int]:
    """Return the bits of the first digit, and how many values the second has: both digits have about as many."""
    low = ceil_div(rows.bit_length(), 2)
    return low, (rows >> low) + 1


def orders_in_kernel(tokens: int, rows: int) -> bool:
    """Whether the kernel orders the tokens. PyTorch's sort does where that is faster: of millions of rows or tokens."""
    low, second = digits_of(rows)
    return rows <= _MOST_ROWS and tokens * ((1 << low) + second) <= _MOST_READS


@lru_cache(4096)
def _plan(H: int, strides: tuple[int, int], rows: int, vocab_size: int, padding_idx: int, sorts: bool) -> tuple[int, int, Bound]:
    """Tokens a program, the least number of programs, and the kernel."""
    tiles = look_up_tiles(H)
    low, second = digits_of(rows) if sorts else (0, 0)
    bound: Bound = _embedding_kernel.bind(
        vocab_size, padding_idx, H, *strides, low, second, H % tiles.block_h == 0, known_align(H, strides[0]),
        *tiles, _BLOCK_T, num_warps=_WARPS,
    )  # fmt: skip
    return tiles.block_m, (1 << low) + second if sorts else 1, bound


# ---- calls ----


def look_up(ids: Tensor, weight: Tensor, options: EmbeddingOptions, ordered: bool) -> tuple[Tensor, Tensor | None]:
    """Return y, and where `ordered` the words [M] of all tokens in the order of their rows.

    A word has the row in its upper 32 bits and the token's number in its lower. The rows of tokens that have no gradient to give
    are weight's number of rows.
    """
    rows, H = weight.shape
    y = weight.new_empty(*ids.shape, H)
    ids = ids.reshape(-1)
    M, device = ids.shape[0], weight.device
    sorts = ordered and orders_in_kernel(M, rows)
    halfway = order = arrived = None
    if sorts:
        halfway, order = ids.new_empty(M, dtype=torch.int64), ids.new_empty(M, dtype=torch.int64)
        arrived = stream_scratch(0, 3, device)[1]
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
