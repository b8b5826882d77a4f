"""Tokens' rows for a mixture of experts: sorted by expert, spread, and summed by token. Nothing waits for the host; no atomics.

Shapes   chosen [T, k], integers: each token's experts. weights [T, k]: theirs. x [T k, H]: rows sorted by expert.
Order    places [T, k] int32: where each token's rows lie; tokens [T k] int32: whose row lies there; ends [E] int32: where each
         expert's rows end. Rows of one expert keep their tokens' order. A token's row of an expert that there isn't lies after
         all others, and has the place -1.
Sum      y[t] = start[t], where there is one, and x's rows of token t in the order of its experts, in fp32 or wider. NaN where
         a place is -1.
Spread   rows [T k, H]: each token's row at its places. What lies after the last end is not written.
Bytes    the order is two launches over T k numbers; the sum reads x once and writes y once, and so does what spreads.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from onepass.kernels.language import device_function, tl, triton_unsupported
from onepass.kernels.launch import Bound, grid_of, kernel
from onepass.kernels.layout import as_rows
from onepass.kernels.rows import aligned, known_align
from onepass.runtime.op import Registered
from onepass.runtime.sizes import ceil_div, power_of_two

MOST_EXPERTS = 1023  # a program counts all of them, and those that there aren't, at once
_PROGRAMS = 256  # that share the order

# ---- kernels ----


@kernel
def _count_kernel(chosen_ptr, counts_ptr, M, ROWS, E, BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr):
    """Count how often each expert is chosen among a program's items. Experts that there aren't, and items past the end, are E."""
    experts = tl.arange(0, BLOCK_E)
    total = tl.zeros([BLOCK_E], tl.int32)
    for first in range(0, ROWS, BLOCK_N):
        items = tl.program_id(0) * ROWS + first + tl.arange(0, BLOCK_N)
        expert = tl.load(chosen_ptr + items, mask=items < M, other=-1)
        expert = tl.where((expert < 0) | (expert > E), E, expert)
        total += tl.sum((expert[:, None] == experts[None, :]).to(tl.int32), 0)
    tl.store(counts_ptr + tl.program_id(0) * BLOCK_E + experts, total)


@kernel
def _place_kernel(
    chosen_ptr, weights_ptr, counts_ptr, by_row_ptr, tokens_ptr, places_ptr, ends_ptr, M, ROWS, E,
    K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    program, experts = tl.program_id(0), tl.arange(0, BLOCK_E)
    total, before = tl.zeros([BLOCK_E], tl.int32), tl.zeros([BLOCK_E], tl.int32)
    for first in range(0, tl.num_programs(0), BLOCK_N):
        others = first + tl.arange(0, BLOCK_N)
        at = counts_ptr + others[:, None] * BLOCK_E + experts[None, :]
        counts = tl.load(at, mask=(others < tl.num_programs(0))[:, None], other=0)
        total += tl.sum(counts, 0)
        before += tl.sum(tl.where((others < program)[:, None], counts, 0), 0)
    ends = tl.cumsum(total, 0)
    if program == 0:
        tl.store(ends_ptr + experts, ends, mask=experts < E)
    start = ends - total + before  # of this program's rows of each expert
    for first in range(0, ROWS, BLOCK_N):
        items = program * ROWS + first + tl.arange(0, BLOCK_N)
        real = items < M
        expert = tl.load(chosen_ptr + items, mask=real, other=-1)
        expert = tl.where((expert < 0) | (expert > E), E, expert)
        own = (expert[:, None] == experts[None, :]).to(tl.int32)
        place = tl.sum(own * (start[None, :] + tl.cumsum(own, 0) - 1), 1)
        start += tl.sum(own, 0)
        tl.store(places_ptr + items, tl.where(expert < E, place, -1), mask=real)
        tl.store(tokens_ptr + place, items // K, mask=real)
        tl.store(by_row_ptr + place, tl.load(weights_ptr + items, mask=real), mask=real)


@device_function
def row_tile(M, H, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr):
    """Return a program's tokens and columns, and which of these are there."""
    block = tl.program_id(1).to(tl.int64) + 65535 * tl.program_id(2)
    tokens, columns = block * BLOCK_T + tl.arange(0, BLOCK_T), tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    inside = (tokens < M)[:, None] & (columns < H)[None, :]
    return tokens, columns, inside


@kernel
def _sum_kernel(
    x_ptr, places_ptr, start_ptr, y_ptr, M, H, X_ROW, K: tl.constexpr, ALIGN: tl.constexpr, BLOCK_H: tl.constexpr
):  # fmt: skip
    BLOCK_T: tl.constexpr = 2048 * 8 // x_ptr.dtype.element_ty.primitive_bitwidth // BLOCK_H  # as `row_blocks` says
    H, X_ROW = aligned(H, ALIGN), aligned(X_ROW, ALIGN)
    tokens, columns, inside = row_tile(M, H, BLOCK_T, BLOCK_H)
    y = tl.zeros([BLOCK_T, BLOCK_H], tl.float32)
    if start_ptr is not None:
        y += tl.load(start_ptr + tokens[:, None] * H + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    for j in tl.static_range(K):
        place = tl.load(places_ptr + tokens * K + j, mask=tokens < M, other=-1).to(tl.int64)[:, None]
        x = tl.load(x_ptr + place * X_ROW + columns[None, :], mask=inside & (place >= 0), other=float("nan"))
        y += x.to(tl.float32)
    tl.store(y_ptr + tokens[:, None] * H + columns[None, :], y, mask=inside)


@kernel
def _spread_kernel(
    x_ptr, places_ptr, y_ptr, M, H, X_ROW, K: tl.constexpr, ALIGN: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr
):  # fmt: skip
    H, X_ROW = aligned(H, ALIGN), aligned(X_ROW, ALIGN)
    tokens, columns, inside = row_tile(M, H, BLOCK_T, BLOCK_H)
    x = tl.load(x_ptr + tokens[:, None] * X_ROW + columns[None, :], mask=inside)
    for j in tl.static_range(K):
        place = tl.load(places_ptr + tokens * K + j, mask=tokens < M, other=-1).to(tl.int64)[:, None]
        tl.store(y_ptr + place * H + columns[None, :], x, mask=inside & (place >= 0))


# ---- launches, and formulas where no kernel can run ----


def _order(chosen: Tensor, weights: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the sorted rows' weights and tokens, each token's places, and the ends."""
    flat, weights = chosen.reshape(-1).contiguous(), weights.reshape(-1).contiguous()
    N, k = flat.numel(), chosen.shape[-1]
    if not N or experts > MOST_EXPERTS or triton_unsupported(flat) is not None:
        return _order_formula(flat, weights, experts, chosen.shape)
    block_e = power_of_two(experts + 1)
    block_n = max(1, 8192 // block_e)
    own = ceil_div(ceil_div(N, _PROGRAMS), block_n) * block_n
    programs = ceil_div(N, own)
    counts, tokens, places, ends = (
        flat.new_empty(shape, dtype=torch.int32) for shape in ((programs, block_e), (N,), chosen.shape, (experts,))
    )
    by_row = torch.empty_like(weights)
    count, place = _order_plan(experts, k, block_n, block_e)
    count((programs, 1, 1), flat, counts, N, own)
    place((programs, 1, 1), flat, weights, counts, by_row, tokens, places, ends, N, own)
    return by_row, tokens, places, ends


@lru_cache(256)
def _order_plan(experts: int, k: int, block_n: int, block_e: int) -> tuple[Bound, Bound]:
    return _count_kernel.bind(experts, block_n, block_e), _place_kernel.bind(experts, k, block_n, block_e)


def _order_formula(flat: Tensor, weights: Tensor, experts: int, shape: torch.Size) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    known = torch.where((flat < 0) | (flat > experts), experts, flat)
    order = known.argsort(stable=True)
    places = torch.empty_like(order, dtype=torch.int32)
    places[order] = torch.arange(order.shape[0], device=order.device, dtype=torch.int32)
    counts = (known.unsqueeze(-1) == torch.arange(experts, device=flat.device)).sum(0)  # bincount would wait for the GPU
    tokens = order.div(shape[-1], rounding_mode="floor").int()
    return weights[order], tokens, torch.where(known == experts, -1, places).view(shape), counts.cumsum(0).int()


def _sum(x: Tensor, places: Tensor, start: Tensor | None) -> Tensor:
    T, k = places.shape
    x, x_row = as_rows(x)
    H = x.shape[-1]
    if not T * H or x.dtype.itemsize > 4 or triton_unsupported(x) is not None:
        return _sum_formula(x, places, start)
    start, y = None if start is None else start.contiguous(), x.new_empty(T, H)
    block_t, block_h = row_blocks(H, x.dtype.itemsize)
    launch = _bind_sum(H, x_row, k, block_h)
    launch(grid_of(ceil_div(H, block_h), ceil_div(T, block_t)), x, places, start, y, T)
    return y


def row_blocks(H: int, size: int) -> tuple[int, int]:
    """Return blocks of tokens and columns of 2 KiB, of whole rows where they are short."""
    block_h = min(power_of_two(H), 2048 // size)
    return max(1, 2048 // size // block_h), block_h


@lru_cache(256)
def _bind_sum(H: int, x_row: int, k: int, block_h: int) -> Bound:
    bound: Bound = _sum_kernel.bind(H, x_row, k, known_align(H, x_row), block_h)
    return bound


def _spread(x: Tensor, tokens: Tensor, places: Tensor) -> Tensor:
    T, k = places.shape
    H = x.shape[-1]
    if not T * H or x.dtype.itemsize > 4 or triton_unsupported(x) is not None:
        return x.index_select(0, tokens)
    x, x_row = as_rows(x)
    y, (block_t, block_h) = x.new_empty(T * k, H), row_blocks(H, x.dtype.itemsize)
    launch = _bind_spread(H, x_row, k, block_t, block_h)
    launch(grid_of(ceil_div(H, block_h), ceil_div(T, block_t)), x, places, y, T)
    return y


@lru_cache(256)
def _bind_spread(H: int, x_row: int, k: int, block_t: int, block_h: int) -> Bound:
    bound: Bound = _spread_kernel.bind(H, x_row, k, known_align(H, x_row), block_t, block_h)
    return bound


def _sum_formula(x: Tensor, places: Tensor, start: Tensor | None) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    y = x.new_zeros((places.shape[0], x.shape[-1]), dtype=wide) if start is None else start.to(wide)
    for column in places.unbind(1):  # in the order of a token's experts, one after the other
        y = y + torch.where((column < 0).unsqueeze(-1), torch.nan, x[column.clamp(min=0)].to(wide))
    return y.to(x.dtype)


# ---- registered ops ----


def _order_fake(chosen: Tensor, weights: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    N = chosen.numel()
    tokens, places, ends = (chosen.new_empty(shape, dtype=torch.int32) for shape in ((N,), chosen.shape, (experts,)))
    return weights.new_empty(N), tokens, places, ends


order_rows = Registered(
    "order_rows(Tensor chosen, Tensor weights, int experts) -> (Tensor, Tensor, Tensor, Tensor)", _order, _order_fake
)
spread_rows = Registered(
    "spread_rows(Tensor x, Tensor tokens, Tensor places) -> Tensor",
    _spread,
    lambda x, tokens, places: x.new_empty(tokens.shape[0], x.shape[-1]),
)
sum_rows = Registered(
    "sum_rows(Tensor x, Tensor places, Tensor? start) -> Tensor",
    _sum,
    lambda x, places, start: x.new_empty(places.shape[0], x.shape[-1]),
)
