"""Tokens' rows by a map of experts, as Megatron has it: each token has a number of rows of its own. Nothing waits; no atomics.

Shapes   taken [T, E] bool: whether a token has a row of an expert; S of them, which the caller knows. x [T, H]; rows [S, H].
Order    one tensor int32. Items [S]: t E + e of each row, sorted by expert, rows of one expert by token. Then places [S]: where
         rows lie, of one token after another and in the order of experts. Then ends [T]: where each token's places end.
Spread   rows: each token's row at its places.
Sum      y[t]: t's rows in the order of its experts, in fp32 or wider; 0 where it has none.
Fewer or more than S entries: rows that nobody has are not written, and entries past S are left out.
Bytes    the order reads the map twice; the sum reads rows once and writes y once, and so does what spreads.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from onepass.kernels.language import device_function, tl, triton_unsupported
from onepass.kernels.launch import Bound, Kernel, grid_of, kernel
from onepass.kernels.layout import as_rows
from onepass.kernels.rows import aligned, known_align
from onepass.kernels.token_rows import MOST_EXPERTS, row_blocks, row_tile
from onepass.runtime.op import Registered
from onepass.runtime.sizes import ceil_div, power_of_two

_PROGRAMS = 256  # that share the order
_TILE = 2048  # entries of the map that a program looks at

# ---- kernels ----


@device_function
def _entries(taken_ptr, tokens, experts, M, E):
    """Load a tile of the map as 0 and 1."""
    inside = (tokens < M)[:, None] & (experts < E)[None, :]
    at = taken_ptr + tokens.to(tl.int64)[:, None] * E + experts[None, :]
    return (tl.load(at, mask=inside, other=0) != 0).to(tl.int32)


@kernel
def _count_kernel(taken_ptr, counts_ptr, M, ROWS, E, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr):
    """Count the rows of each expert among a program's tokens."""
    program, experts = tl.program_id(0), tl.arange(0, BLOCK_E)
    total = tl.zeros([BLOCK_E], tl.int32)
    for first in range(0, ROWS, BLOCK_T):
        total += tl.sum(_entries(taken_ptr, program * ROWS + first + tl.arange(0, BLOCK_T), experts, M, E), 0)
    tl.store(counts_ptr + program * BLOCK_E + experts, total)


@kernel
def _place_kernel(
    taken_ptr, counts_ptr, order_ptr, M, ROWS, S, E, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr
):  # fmt: skip
    program, experts = tl.program_id(0), tl.arange(0, BLOCK_E)
    total, before = tl.zeros([BLOCK_E], tl.int32), tl.zeros([BLOCK_E], tl.int32)
    for first in range(0, tl.num_programs(0), BLOCK_T):
        others = first + tl.arange(0, BLOCK_T)
        at = counts_ptr + others[:, None] * BLOCK_E + experts[None, :]
        counts = tl.load(at, mask=(others < tl.num_programs(0))[:, None], other=0)
        total += tl.sum(counts, 0)
        before += tl.sum(tl.where((others < program)[:, None], counts, 0), 0)
    start = tl.cumsum(total, 0) - total + before  # of this program's rows of each expert
    held = tl.sum(before, 0)  # the rows of all tokens before
    for first in range(0, ROWS, BLOCK_T):
        tokens = program * ROWS + first + tl.arange(0, BLOCK_T)
        own = _entries(taken_ptr, tokens, experts, M, E)
        place = start[None, :] + tl.cumsum(own, 0) - own
        of_tokens = tl.sum(own, 1)
        ends = held + tl.cumsum(of_tokens, 0)
        at = (ends - of_tokens)[:, None] + tl.cumsum(own, 1) - own
        tl.store(order_ptr + place, tokens[:, None] * E + experts[None, :], mask=(own > 0) & (place < S))
        tl.store(order_ptr + S + at, tl.where(place < S, place, -1), mask=(own > 0) & (at < S))
        tl.store(order_ptr + 2 * S + tokens, tl.minimum(ends, S), mask=tokens < M)
        start += tl.sum(own, 0)
        held += tl.sum(of_tokens, 0)


@device_function
def _places_of(order_ptr, tokens, M, S):
    """Return where each token's places lie, and how many it has."""
    ends_ptr = order_ptr + 2 * S
    start = tl.load(ends_ptr + tokens - 1, mask=(tokens > 0) & (tokens < M), other=0)
    count = tl.load(ends_ptr + tokens, mask=tokens < M, other=0) - start
    return order_ptr + S + start, count


@kernel
def _spread_kernel(
    x_ptr, order_ptr, y_ptr, M, S, H, X_ROW, ALIGN: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr
):  # fmt: skip
    H, X_ROW = aligned(H, ALIGN), aligned(X_ROW, ALIGN)
    tokens, columns, inside = row_tile(M, H, BLOCK_T, BLOCK_H)
    places_ptr, count = _places_of(order_ptr, tokens, M, S)
    x = tl.load(x_ptr + tokens[:, None] * X_ROW + columns[None, :], mask=inside)
    for j in range(0, tl.max(count, 0)):
        place = tl.load(places_ptr + j, mask=j < count, other=-1).to(tl.int64)[:, None]
        tl.store(y_ptr + place * H + columns[None, :], x, mask=inside & (place >= 0))


@kernel
def _sum_kernel(
    rows_ptr, order_ptr, y_ptr, M, S, H, ROW, ALIGN: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr
):  # fmt: skip
    H, ROW = aligned(H, ALIGN), aligned(ROW, ALIGN)
    tokens, columns, inside = row_tile(M, H, BLOCK_T, BLOCK_H)
    places_ptr, count = _places_of(order_ptr, tokens, M, S)
    y = tl.zeros([BLOCK_T, BLOCK_H], tl.float32)
    for j in range(0, tl.max(count, 0)):
        place = tl.load(places_ptr + j, mask=j < count, other=-1).to(tl.int64)[:, None]
        rows = tl.load(rows_ptr + place * ROW + columns[None, :], mask=inside & (place >= 0), other=0.0)
        y += rows.to(tl.float32)
    tl.store(y_ptr + tokens[:, None] * H + columns[None, :], y, mask=inside)


# ---- launches, and formulas where no kernel can run ----


def _order(taken: Tensor, S: int) -> Tensor:
    (T, E), taken = taken.shape, taken.contiguous()
    if not taken.numel() or E > MOST_EXPERTS or triton_unsupported(taken) is not None:
        return _order_formula(taken, S)
    block_e = power_of_two(E)
    block_t = max(1, _TILE // block_e)
    own = ceil_div(ceil_div(T, _PROGRAMS), block_t) * block_t
    programs = ceil_div(T, own)
    counts, order = (taken.new_empty(n, dtype=torch.int32) for n in (programs * block_e, 2 * S + T))
    count, place = _order_plan(E, block_t, block_e)
    count((programs, 1, 1), taken, counts, T, own)
    place((programs, 1, 1), taken, counts, order, T, own, S)
    return order


@lru_cache(256)
def _order_plan(E: int, block_t: int, block_e: int) -> tuple[Bound, Bound]:
    return _count_kernel.bind(E, block_t, block_e), _place_kernel.bind(E, block_t, block_e)


def _order_formula(taken: Tensor, S: int) -> Tensor:
    T, E = taken.shape
    by_expert = (~taken.t()).reshape(-1).argsort(stable=True)[:S]  # e T + t
    items = by_expert % max(T, 1) * E + by_expert // max(T, 1)
    ends = taken.sum(1).cumsum(0).clamp(max=S)
    return torch.cat((items, items.argsort(), ends)).int()


def _spread(x: Tensor, order: Tensor) -> Tensor:
    y = _spread_fake(x, order)
    if _by_formula(x, order):
        places, counts = _parts(order, y.shape[0], x.shape[0])
        return y.index_copy_(0, places, x.repeat_interleave(counts, 0, output_size=y.shape[0]))
    return _move(_spread_kernel, x, order, y, y.shape[0], x.shape[0])


def _sum(rows: Tensor, order: Tensor) -> Tensor:
    y = _sum_fake(rows, order)
    if _by_formula(rows, order):
        places, counts = _parts(order, rows.shape[0], y.shape[0])
        wide = rows[places].to(torch.promote_types(rows.dtype, torch.float32))
        return y.copy_(torch.segment_reduce(wide, "sum", lengths=counts, axis=0, unsafe=True))
    return _move(_sum_kernel, rows, order, y, rows.shape[0], y.shape[0])


def _by_formula(x: Tensor, order: Tensor) -> bool:
    return not order.shape[0] * x.shape[1] or x.dtype.itemsize > 4 or triton_unsupported(x) is not None


def _parts(order: Tensor, S: int, T: int) -> tuple[Tensor, Tensor]:
    """Return places, and how many each token has."""
    _, places, ends = order.long().split([S, S, T])
    return places, ends.diff(prepend=ends.new_zeros(1))


def _move(moves: Kernel, x: Tensor, order: Tensor, y: Tensor, S: int, T: int) -> Tensor:
    H, (x, x_row) = x.shape[1], as_rows(x)
    block_t, block_h = row_blocks(H, x.dtype.itemsize)
    launch = _bind(moves, H, x_row, block_t, block_h)
    launch(grid_of(ceil_div(H, block_h), ceil_div(T, block_t)), x, order, y, T, S)
    return y


@lru_cache(256)
def _bind(moves: Kernel, H: int, x_row: int, block_t: int, block_h: int) -> Bound:
    return moves.bind(H, x_row, known_align(H, x_row), block_t, block_h)


def _spread_fake(x: Tensor, order: Tensor) -> Tensor:
    return x.new_empty((order.shape[0] - x.shape[0]) // 2, x.shape[1])


def _sum_fake(rows: Tensor, order: Tensor) -> Tensor:
    return rows.new_empty(order.shape[0] - 2 * rows.shape[0], rows.shape[1])


# ---- registered ops ----

order_by_map = Registered(
    "order_by_map(Tensor taken, int S) -> Tensor",
    _order,
    lambda taken, S: taken.new_empty(2 * S + taken.shape[0], dtype=torch.int32),
)
spread_by_map = Registered("spread_by_map(Tensor x, Tensor order) -> Tensor", _spread, _spread_fake)
sum_by_map = Registered("sum_by_map(Tensor rows, Tensor order) -> Tensor", _sum, _sum_fake)
