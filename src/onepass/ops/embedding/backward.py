"""embedding's kernel backward: sums of dy's rows by the row of weight that they belong to, each read and each written once.

Tokens are ordered by row (forward.py). A program begins at one of them and sums the run of tokens of one row that begins there;
programs inside of a run have nothing to do. A long run is cut where the order's fixed pieces end. Each of its parts stores its
sum, and the last of them to arrive adds the sums up in their order and writes the row: results don't depend on who is last.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from onepass.kernels.language import device_function, tl
from onepass.kernels.launch import Bound, grid_of, kernel
from onepass.kernels.layout import as_rows
from onepass.kernels.rows import aligned, inside_row, known_align
from onepass.kernels.scratch import new_scratch, stream_scratch
from onepass.runtime.sizes import ceil_div, power_of_two

_PIECE = 64  # tokens of the order in which a run is not cut
_BLOCK_H = 1024  # columns a program
_ROWS_AT_ONCE = 4
_BOUNDARIES = 512  # ends of pieces that are looked at together


# ---- kernels ----


@device_function
def _rows_of(order_ptr, at, inside):
    """Return the rows of these places in the order, -1 where outside."""
    return (tl.load(order_ptr + at, mask=inside, other=-1) >> 32).to(tl.int32)


@device_function
def _find_parts(order_ptr, row, M, PIECE: tl.constexpr, BOUNDARIES: tl.constexpr):
    """Return the first piece that has tokens of the row, and the number of pieces that have some: a boundary more than cut it."""
    cut = tl.zeros([BOUNDARIES], tl.int32)
    first = tl.full([BOUNDARIES], 0x7FFFFFFF, tl.int32)
    for start in range(1, tl.cdiv(M, PIECE), BOUNDARIES):
        pieces = start + tl.arange(0, BOUNDARIES)
        at = pieces * PIECE
        inside = at < M
        mine = (_rows_of(order_ptr, at - 1, inside) == row) & (_rows_of(order_ptr, at, inside) == row)
        cut += mine.to(tl.int32)
        first = tl.minimum(first, tl.where(mine, pieces, 0x7FFFFFFF))
    return tl.min(first, 0) - 1, tl.sum(cut, 0) + 1


@device_function
def _sum_parts(
    partial_ptr, order_ptr, row, first, parts, columns, inside, H, PIECE: tl.constexpr, BLOCK_R: tl.constexpr
):  # fmt: skip
    """Sum the parts of a row's run in their order."""
    begins_inside = tl.where(_rows_of(order_ptr, first * PIECE, True) == row, 0, 1)
    total = tl.zeros([BLOCK_R, columns.shape[0]], tl.float32)
    for start in range(0, parts, BLOCK_R):
        part = start + tl.arange(0, BLOCK_R)
        slots = ((first + part) * 2 + tl.where(part == 0, begins_inside, 0)).to(tl.int64)
        mask = (part < parts)[:, None] & inside[None, :]
        at = partial_ptr + slots[:, None] * H + columns[None, :]
        total += tl.load(at, mask=mask, other=0.0, cache_modifier=".cg")  # others wrote it: not from this multiprocessor's L1
    return tl.sum(total, 0)


@kernel
def _embedding_backward_kernel(
    dy_ptr, order_ptr, out_ptr,  # [M, H], [M], [ROWS, H]
    partial_ptr, arrived_ptr,  # [2 pieces, H], of parts that begin with a piece and inside of it; [pieces, tiles of columns]
    M, ROWS,
    H, DY_ROW, OUT_ROW, OUT_COLUMN,
    ADD: tl.constexpr, WHOLE: tl.constexpr, ALIGN: tl.constexpr,
    PIECE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_H: tl.constexpr, BOUNDARIES: tl.constexpr,
):  # fmt: skip
    H, DY_ROW, OUT_ROW = aligned(H, ALIGN), aligned(DY_ROW, ALIGN), aligned(OUT_ROW, ALIGN)
    TOKEN: tl.constexpr = 0xFFFFFFFF  # a word's lower half
    tile = tl.program_id(0)
    at = tl.program_id(1) + 65535 * tl.program_id(2)
    word = tl.load(order_ptr + at, mask=at < M, other=-1)
    row = (word >> 32).to(tl.int32)
    before = _rows_of(order_ptr, at - 1, at > 0)
    begins = (row != before) | (at % PIECE == 0)
    if (row >= 0) & (row < ROWS) & begins:
        columns = tile * BLOCK_H + tl.arange(0, BLOCK_H)
        inside = inside_row(columns, H, WHOLE)
        total = tl.load(dy_ptr + (word & TOKEN) * DY_ROW + columns, mask=inside, other=0.0).to(tl.float32)
        outs = out_ptr + row.to(tl.int64) * OUT_ROW + columns.to(tl.int64) * OUT_COLUMN
        if ADD:  # read now, with dy
            kept = tl.load(outs, mask=inside, other=0.0).to(tl.float32)
        end = tl.minimum((at // PIECE + 1) * PIECE, M)
        places = at + tl.arange(0, PIECE)
        count = tl.sum((_rows_of(order_ptr, places, places < end) == row).to(tl.int32), 0)
        after = _rows_of(order_ptr, end, end < M)
        if count > 1:
            rest = tl.zeros([BLOCK_R, BLOCK_H], tl.float32)
            for start in range(1, count, BLOCK_R):
                ahead = start + tl.arange(0, BLOCK_R)
                tokens = tl.load(order_ptr + at + ahead, mask=ahead < count, other=0) & TOKEN
                mask = (ahead < count)[:, None] & inside[None, :]
                rest += tl.load(dy_ptr + tokens[:, None] * DY_ROW + columns[None, :], mask=mask, other=0.0).to(tl.float32)
            total += tl.sum(rest, 0)
        writes = count > 0
        if (row == before) | ((at + count == end) & (row == after)):
            slot = (at // PIECE * 2 + tl.where(at % PIECE == 0, 0, 1)).to(tl.int64)
            tl.store(partial_ptr + slot * H + columns, total, mask=inside)
            first, parts = _find_parts(order_ptr, row, M, PIECE, BOUNDARIES)
            counter = arrived_ptr + first * tl.num_programs(0) + tile
            tl.debug_barrier()  # all of this program's sums are written before it counts itself in
            writes = tl.atomic_add(counter, 1, sem="acq_rel") == parts - 1
            if writes:
                tl.store(counter, 0)
                total = _sum_parts(partial_ptr, order_ptr, row, first, parts, columns, inside, H, PIECE, BLOCK_R)
        if writes:
            if ADD:
                total += kept
            tl.store(outs, total, mask=inside)


# ---- plans ----


@lru_cache(4096)
def _plan(H: int, dy_row: int, strides: tuple[int, int], add: bool) -> tuple[int, Bound]:
    """Tiles of columns, and the kernel."""
    block_h, align = min(_BLOCK_H, power_of_two(H)), known_align(H, dy_row, strides[0])
    num_warps = max(1, block_h // 256)
    bound: Bound = _embedding_backward_kernel.bind(
        H, dy_row, *strides, add, H % block_h == 0, align,
        _PIECE, _ROWS_AT_ONCE, block_h, _BOUNDARIES, num_warps=num_warps, resident=(24 if align > 1 else 16) // num_warps,
    )  # fmt: skip
    return ceil_div(H, block_h), bound


# ---- the call ----


def sum_rows(dy: Tensor, order: Tensor, out: Tensor, add: bool, keep_scratch: bool = True) -> None:
    """Add to out [ROWS, H], or write over, the rows that dy [M, H] has gradients of, in the order that `look_up` returned."""
    M, H = dy.shape
    if not M:
        return
    dy, dy_row = as_rows(dy)
    pieces = ceil_div(M, _PIECE)
    tiles, launch = _plan(H, dy_row, out.stride(), add)
    partial = dy.new_empty(2 * pieces * H, dtype=torch.float32)
    arrived = (stream_scratch if keep_scratch else new_scratch)(0, pieces * tiles, dy.device)[1]
    launch(grid_of(tiles, M), dy, order, out, partial, arrived, M, out.shape[0])
