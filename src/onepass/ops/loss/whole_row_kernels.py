"""Whole rows of logits: their statistics and their gradient in one kernel, which reads memory about once.

One program a row. It holds the last piece in registers and reads the others again, backwards: those read last come from the
multiprocessor's own cache, the rest from the L2.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from onepass.kernels.language import device_function, tl
from onepass.kernels.launch import Bound, kernel
from onepass.kernels.rows import aligned, known_align, still_packed
from onepass.ops.loss.formula import LossTerms
from onepass.ops.loss.row_functions import (
    APART,
    LOG2_E,
    PLANES,
    RowSums,
    exp_above,
    finished_logit,
    gradient_of,
    label_of,
    numbers_of,
    probability_under,
    rounded_lse,
    store_gradients,
    store_statistics,
    sums_of,
)
from onepass.runtime.sizes import power_of_two


@device_function
def _piece(x_ptr, columns, ROOM, MASKED: tl.constexpr, POLICY: tl.constexpr):
    """A piece of a row's logits, as stored."""
    if MASKED:
        return tl.load(x_ptr + columns, mask=columns < ROOM, other=0.0, eviction_policy=POLICY)
    else:
        return tl.load(x_ptr + columns, eviction_policy=POLICY)


@device_function
def _groups(x, columns, scale, cap, W: tl.constexpr, MASKED: tl.constexpr, GROUP: tl.constexpr):
    """A piece's finished logits in groups of neighbours, one thread's each; -inf past the row's end."""
    z = finished_logit(x, scale, cap)
    if MASKED:
        z = tl.where(columns < W, z, float("-inf"))
    return tl.reshape(z, [x.shape[0] // GROUP, GROUP])


@device_function
def _add_groups(
    z, columns, sums, MASKED: tl.constexpr, LOGITS: tl.constexpr, ENTROPY: tl.constexpr, FIRSTS: tl.constexpr,
    SQUARES: tl.constexpr, EXACT: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Add one more piece to the groups' statistics."""
    largest, total, logits, surprise, first, squares = sums
    most = tl.maximum(largest, tl.max(z, 1))
    base = tl.where(most == float("-inf"), 0.0, most)
    before = tl.exp2((largest - base) * LOG2_E)
    e = exp_above(z, base[:, None], EXACT)
    if ENTROPY:
        surprise = tl.where(before > 0, before * (surprise + (largest - base) * total), 0.0)
        surprise += tl.sum(tl.where(e > 0, e * (z - base[:, None]), 0.0), 1)
    if FIRSTS:
        at = tl.reshape(columns, [columns.shape[0] // GROUP, GROUP])
        first = tl.where(most > largest, tl.min(tl.where(z == most[:, None], at, 2147483647), 1), first)
    if SQUARES:
        squares = before * before * squares + tl.sum(e * e, 1)
    if LOGITS:
        logits += tl.sum(tl.where(z == float("-inf"), 0.0, z) if MASKED else z, 1)
    return RowSums(most, total * before + tl.sum(e, 1), logits, surprise, first, squares)


@device_function
def _gradients(x, lse, a, s, scale, cap, EXACT: tl.constexpr):
    """The gradient of logits as stored."""
    z = finished_logit(x, scale, cap)
    return gradient_of(x, z - lse, exp_above(z, lse, EXACT), a, None, s, scale, cap)


@kernel
def _both_kernel(
    x_ptr, out_ptr, labels_ptr, g_ptr, parts_ptr,
    M, X_ROW, OUT_ROW, scale, cap, smoothing, z_loss, ignore,
    W: tl.constexpr, ROOM: tl.constexpr, SMOOTHED: tl.constexpr,
    LOGITS: tl.constexpr, ENTROPY: tl.constexpr, FIRSTS: tl.constexpr, SQUARES: tl.constexpr, FULL: tl.constexpr,
    ALIGN: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    EXACT: tl.constexpr = x_ptr.dtype.element_ty.primitive_bitwidth > 16
    X_ROW, OUT_ROW = aligned(X_ROW, ALIGN), aligned(OUT_ROW, ALIGN)
    AGAIN: tl.constexpr = (W - 1) // BLOCK * BLOCK  # columns that are read again
    RAGGED: tl.constexpr = AGAIN + BLOCK > W
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * X_ROW
    out_ptr += row * OUT_ROW
    lanes = tl.arange(0, BLOCK)
    label, kept, counts = label_of(labels_ptr, row, True, ignore, 0, W)
    own = tl.load(x_ptr + label, mask=counts, other=0.0)
    target = finished_logit(own, scale, cap)
    g = tl.load(g_ptr + row, mask=counts, other=0.0)
    zeros = tl.zeros([BLOCK // GROUP], tl.float32)
    no_column = tl.full([BLOCK // GROUP], 2147483647, tl.int32)
    sums = RowSums(tl.full([BLOCK // GROUP], float("-inf"), tl.float32), zeros, zeros, zeros, no_column, zeros)
    # without statistics a row that doesn't count needs none, and one flag less is held in registers
    again = tl.where(kept if FULL else counts, AGAIN, 0)
    for begin in range(0, again, BLOCK):
        columns = begin + lanes
        z = _groups(_piece(x_ptr, columns, ROOM, False, "evict_last"), columns, scale, cap, W, False, GROUP)
        sums = _add_groups(z, columns, sums, False, LOGITS, ENTROPY, FIRSTS, SQUARES, EXACT, GROUP)
    last = AGAIN + lanes
    held = _piece(x_ptr, last, ROOM, RAGGED, "evict_first")
    z = _groups(held, last, scale, cap, W, RAGGED, GROUP)
    largest, total, logits, surprise, first, squares = _add_groups(
        z, last, sums, RAGGED, LOGITS, ENTROPY, FIRSTS, SQUARES, EXACT, GROUP
    )
    most = tl.max(largest, 0)
    worth = probability_under(largest, most)
    sum_of_all = tl.sum(worth * total, 0)
    all_surprise, first_of_all = 0.0, 0
    if ENTROPY:
        all_surprise = tl.sum(tl.where(worth > 0, worth * (surprise + (largest - most) * total), 0.0), 0)
    if FIRSTS:
        first_of_all = tl.min(tl.where(largest == most, first, 2147483647), 0)
    all_logits, all_squares = tl.sum(logits, 0), tl.sum(worth * worth * squares, 0)
    of_row = RowSums(most, sum_of_all, all_logits, all_surprise, first_of_all, all_squares)
    store_statistics(parts_ptr + row, M.to(tl.int64), True, of_row, target, LOGITS, ENTROPY, FIRSTS, SQUARES)
    lse, less = rounded_lse(most, tl.log(sum_of_all), EXACT)
    a, s, t = g * (1.0 + 2.0 * z_loss * lse) * less, -g * smoothing / W, g * (smoothing - 1.0)
    if counts:
        d = _gradients(still_packed(held), lse, a, s if SMOOTHED else None, scale, cap, EXACT)
        store_gradients(out_ptr, last, d, W, ROOM, RAGGED)
        for back in range(0, AGAIN, BLOCK):
            columns = AGAIN - BLOCK - back + lanes
            x = _piece(x_ptr, columns, ROOM, False, "evict_first")
            d = _gradients(x, lse, a, s if SMOOTHED else None, scale, cap, EXACT)
            store_gradients(out_ptr, columns, d, W, ROOM, False)
        of_label = _gradients(own, lse, a, s + t, scale, cap, EXACT)
        tl.debug_barrier()  # after another thread's store to the label's column
        tl.store(out_ptr + label, of_label)
    else:
        for begin in range(0, ROOM, BLOCK):
            tl.store(out_ptr + begin + lanes, tl.zeros([BLOCK], tl.float32), mask=begin + lanes < ROOM)


# ---- tiles ----


def tiles_of_rows(W: int, smoothed: bool, more: bool) -> tuple[int, int]:
    """Return the columns of a piece, and warps, as measured: long rows want many threads and many columns a thread.

    `more`: logits are capped or all statistics are needed, which takes registers.
    """
    if W <= 4096:
        return power_of_two(max(W, APART)), max(1, power_of_two(W) // 512)
    if more:
        return 4096, 8
    if W <= 36864 or (W <= 65536 and smoothed):
        return 4096, 16
    return (8192, 32) if W <= 65536 else (16384, 16)


@lru_cache(1024)
def _plan(W: int, room: int, x_row: int, out_row: int, terms: LossTerms, stats: tuple[str, ...], wide: bool) -> Bound:
    sums = sums_of(terms, stats)
    block, num_warps = tiles_of_rows(W, sums[0], any(sums[1:]) or bool(terms.softcap))
    bound: Bound = _both_kernel.bind(
        x_row, out_row, *numbers_of(terms), terms.smoothing, terms.z_loss, terms.ignore_index,
        W, room, bool(terms.smoothing), *sums, bool(stats), known_align(x_row, out_row), block,
        min(block, 4 if wide else 8), num_warps=num_warps,
    )  # fmt: skip
    return bound


# ---- the call ----


def row_statistics_and_gradients(
    x: Tensor, out: Tensor, labels: Tensor, terms: LossTerms, stats: tuple[str, ...], incoming: Tensor, room: int = 0
) -> Tensor:
    """Return whole rows' statistics [1, PLANES, rows], and write their gradient to out, which may be x."""
    M, W = x.shape
    launch = _plan(W, max(W, room), x.stride(0), out.stride(0), terms, stats, x.dtype is torch.float32)
    parts = x.new_empty(1, PLANES, M, dtype=torch.float32)
    launch((M, 1, 1), x, out, labels, incoming, parts, M)
    return parts
