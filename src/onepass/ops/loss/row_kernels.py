"""Rows of logits: their softmax statistics, and their gradient in their place.

Statistics  of a tile of columns: the largest logit, the sum of exponentials under it and the label's logit; where they are asked
            for, the sum of logits, the entropy's sum, the first column of the largest and the sum of squared exponentials. A tile
            is held in registers: each logit is read and raised once. The statistics of tiles, of blocks of the vocabulary and of
            ranks are merged row by row. The row of an ignored label is not read.
Gradient    p (a + b log p) + s, and t more in the label's column, with four numbers a row: every term of the loss and every
            statistic that can be differentiated has this form. p is the exponential above the row's logsumexp. Of fp32 logits
            that is kept in fp64: rounded to fp32 it would be further off than the logits.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from onepass.kernels.language import device_function, tl
from onepass.kernels.launch import Bound, grid_of, kernel
from onepass.kernels.rows import aligned, known_align
from onepass.ops.loss.formula import LossTerms, RowLosses, lse_type
from onepass.ops.loss.row_functions import (
    PLANES,
    RowSums,
    class_weight_at,
    exp_above,
    finished_logit,
    gradient_of,
    label_of,
    numbers_of,
    planes_of,
    probability_under,
    rounding_factor,
    store_statistics,
    sums_of,
    target_mass,
)
from onepass.ops.loss.targets import Targets, VocabColumns
from onepass.runtime.batch_invariance import invariant
from onepass.runtime.sizes import ceil_div, power_of_two

MERGED, MERGED_PARTS = 32, 32  # rows a program merges, and parts at a time
STATISTICS_TILE, STATISTICS_EACH = 2048, 64  # most columns of a tile, and columns of a thread: as measured
GRADIENT_TILE, GRADIENT_EACH = 2048, 16


# ---- pieces ----


@device_function
def _tile_columns(tile, W: tl.constexpr, ROOM: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """Return a tile's columns, a mask of those that may be read and written, and a mask of those there are. Under a mask that
    ends at an odd W all columns are read and written one by one."""
    lanes = tl.arange(0, BLOCK)
    columns = tile * TILE + lanes
    return columns, (lanes < TILE) & (columns < ROOM), (lanes < TILE) & (columns < W)


@device_function
def _load_tile(x_ptr, row, X_ROW, columns, room):
    return tl.load(x_ptr + row * X_ROW + columns, mask=room, other=0.0)


@device_function
def _place(place_ptr, FIRST, V):
    """Return the number of these logits' first column, and of all columns: both on the device if ranks share the vocabulary."""
    if place_ptr is not None:
        return FIRST + tl.load(place_ptr), tl.load(place_ptr + 1)
    else:
        return FIRST, V


@device_function
def _statistics(
    z, columns, begin, inside,
    LOGITS: tl.constexpr, ENTROPY: tl.constexpr, FIRST: tl.constexpr, SQUARES: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Statistics of one row's tile of finished logits. `begin`: the number of the column 0."""
    z = tl.where(inside, z, float("-inf"))
    largest = tl.max(z, 0)
    base = tl.where(largest == float("-inf"), 0.0, largest)  # a NaN, which the maximum drops, comes through in the sum
    e = exp_above(z, base, EXACT)
    total, logits, surprise, first, squares = tl.sum(e, 0), 0.0, 0.0, 0, 0.0
    if LOGITS:
        logits = tl.sum(tl.where(inside, z, 0.0), 0)
    if ENTROPY:
        surprise = tl.sum(tl.where(e > 0, e * (z - base), 0.0), 0)
    if FIRST:
        first = tl.min(tl.where(inside & (z == largest), columns, 2147483647), 0) + begin
    if SQUARES:
        squares = tl.sum(e * e, 0)
    return RowSums(largest, total, logits, surprise, first, squares)


@device_function
def _allowed(bits_ptr, row, BITS_ROW: tl.constexpr, columns, there):
    """Whether a row's distribution has these columns, counted from this rank's first; BITS_ROW: bytes between rows, 0 for one."""
    if bits_ptr is not None:
        return (tl.load(bits_ptr + row * BITS_ROW + (columns >> 3), mask=there, other=0) >> (columns & 7)) & 1 != 0
    else:
        return there


@device_function
def _label_logit(x_ptr, bits_ptr, row, X_ROW, label, mine, FIRST, scale, cap, BITS_ROW: tl.constexpr):
    """The label's finished logit if it is `mine`, else 0; -inf for a column that the distribution has not."""
    z = finished_logit(tl.load(x_ptr + row * X_ROW + label, mask=mine, other=0.0), scale, cap)
    if bits_ptr is not None:
        z = tl.where(mine & (_allowed(bits_ptr, row, BITS_ROW, FIRST + label, mine) == 0), float("-inf"), z)
    return z


# ---- statistics ----


@kernel
def _statistics_kernel(
    x_ptr, labels_ptr, place_ptr, bits_ptr, targets_ptr, weights_ptr, parts_ptr,
    M, FIRST, X_ROW, V, scale, cap, smoothing, ignore,
    W: tl.constexpr, ROOM: tl.constexpr, PLANES: tl.constexpr,
    LOGITS: tl.constexpr, ENTROPY: tl.constexpr, FIRSTS: tl.constexpr, SQUARES: tl.constexpr,
    BITS_ROW: tl.constexpr, TARGETS_ROW: tl.constexpr, CLASSES: tl.constexpr,
    ALIGN: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    EXACT: tl.constexpr = x_ptr.dtype.element_ty.primitive_bitwidth > 16
    X_ROW = aligned(X_ROW, ALIGN)
    tile = tl.program_id(0)
    row = tl.program_id(1) + 65535 * tl.program_id(2).to(tl.int64)
    there = row < M
    begin, V = _place(place_ptr, FIRST, V)
    label, kept, counts = label_of(labels_ptr, row, there, ignore, begin, V)
    columns, room, within = _tile_columns(tile, W, ROOM, TILE, BLOCK)
    within &= kept & _allowed(bits_ptr, row, BITS_ROW, FIRST + columns, within & kept)
    z = finished_logit(_load_tile(x_ptr, row, X_ROW, columns, room & kept), scale, cap)
    sums = _statistics(z, columns, begin, within, LOGITS, ENTROPY, FIRSTS, SQUARES, EXACT)
    mine = counts & (label >= tile * TILE) & (label < tl.minimum(W, (tile + 1) * TILE))
    target = _label_logit(x_ptr, bits_ptr, row, X_ROW, label, mine, FIRST, scale, cap, BITS_ROW)
    far = M.to(tl.int64)
    part_ptr = parts_ptr + tile * PLANES * far + row
    store_statistics(part_ptr, far, there, sums, target, LOGITS, ENTROPY, FIRSTS, SQUARES)
    if PLANES > 7:
        mass = target_mass(
            targets_ptr, weights_ptr, row * TARGETS_ROW + FIRST, columns, begin, label, within, smoothing, V, CLASSES
        )
        tl.store(part_ptr + 7 * far, tl.sum(tl.where(within, mass * z, 0.0), 0), mask=there)
        tl.store(part_ptr + 8 * far, tl.sum(mass, 0), mask=there)


@kernel
def _merge_kernel(
    parts_ptr, labels_ptr, place_ptr, weights_ptr, merged_ptr, loss_ptr, lse_ptr, log_prob_ptr, entropy_ptr, correct_ptr,
    squares_ptr, mean_ptr, mass_ptr,
    M, S, V, smoothing, z_loss, ignore,
    PLANES: tl.constexpr, CLASSES: tl.constexpr, SMOOTHED: tl.constexpr,
    LOGITS: tl.constexpr, ENTROPY: tl.constexpr, FIRSTS: tl.constexpr, SQUARES: tl.constexpr,
    PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Merge the S parts of each row, for `merge_statistics` or for `finish_losses`."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = rows < M
    far = M.to(tl.int64)
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    target = tl.zeros([BLOCK], tl.float32)
    logits = tl.zeros([BLOCK], tl.float32)
    surprise = tl.zeros([BLOCK], tl.float32)
    first = tl.zeros([BLOCK], tl.float32)
    squares = tl.zeros([BLOCK], tl.float32)
    weighted = tl.zeros([BLOCK], tl.float32)
    mass = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, S, PARTS):
        parts = begin + tl.arange(0, PARTS)
        inside = (parts < S)[:, None] & there[None, :]
        at = parts_ptr + parts[:, None] * (PLANES * far) + rows[None, :]
        m = tl.load(at, mask=inside, other=float("-inf"))
        sums = tl.load(at + far, mask=inside, other=0.0)
        most = tl.maximum(largest, tl.max(m, 0))
        before, now = probability_under(largest, most), probability_under(m, most[None, :])
        if ENTROPY:
            more = tl.load(at + 4 * far, mask=inside, other=0.0)
            surprise = tl.where(before > 0, before * (surprise + (largest - most) * total), 0.0)
            surprise += tl.sum(tl.where(now > 0, now * (more + (m - most[None, :]) * sums), 0.0), 0)
        if FIRSTS:
            column = tl.min(tl.where(m == most[None, :], tl.load(at + 5 * far, mask=inside, other=float("inf")), float("inf")), 0)
            first = tl.where(most > largest, column, first)
        if SQUARES:
            squares = before * before * squares + tl.sum(now * now * tl.load(at + 6 * far, mask=inside, other=0.0), 0)
        total = before * total + tl.sum(now * sums, 0)
        largest = most
        target += tl.sum(tl.load(at + 2 * far, mask=inside, other=0.0), 0)
        if LOGITS:
            logits += tl.sum(tl.load(at + 3 * far, mask=inside, other=0.0), 0)
        if PLANES > 7:
            weighted += tl.sum(tl.load(at + 7 * far, mask=inside, other=0.0), 0)
            mass += tl.sum(tl.load(at + 8 * far, mask=inside, other=0.0), 0)
    if merged_ptr is not None:
        at = merged_ptr + rows
        tl.store(at, largest, mask=there)
        tl.store(at + far, total, mask=there)
        tl.store(at + 2 * far, target, mask=there)
        tl.store(at + 3 * far, logits, mask=there)
        tl.store(at + 4 * far, surprise, mask=there)
        tl.store(at + 5 * far, first, mask=there)
        tl.store(at + 6 * far, squares, mask=there)
        if PLANES > 7:
            tl.store(at + 7 * far, weighted, mask=there)
            tl.store(at + 8 * far, mass, mask=there)
    else:
        _, V = _place(place_ptr, 0, V)
        label, kept, counts = label_of(labels_ptr, rows, there, ignore, 0, V)
        log_total = tl.log(total)
        lse = largest + log_total
        log_prob = (target - largest) - log_total  # no bit lost to the size of logits
        if PLANES > 7:
            loss = z_loss * lse * lse
            if weights_ptr is not None:
                loss *= class_weight_at(weights_ptr, label, counts, CLASSES)
            loss += mass * log_total + (mass * largest - weighted)
            tl.store(mass_ptr + rows, tl.where(counts, mass, 0.0), mask=there)
        else:
            loss = z_loss * lse * lse - (1.0 - smoothing) * log_prob
        if SMOOTHED:
            loss += smoothing * ((largest - logits / V) + log_total)
        wrong = tl.where(kept, float("nan"), 0.0)  # never a plausible number
        tl.store(loss_ptr + rows, tl.where(counts, loss, wrong), mask=there)
        lse = largest.to(lse_ptr.dtype.element_ty) + log_total.to(lse_ptr.dtype.element_ty)
        tl.store(lse_ptr + rows, tl.where(kept, lse, 0.0), mask=there)
        if log_prob_ptr is not None:
            tl.store(log_prob_ptr + rows, tl.where(counts, log_prob, wrong), mask=there)
        if entropy_ptr is not None:
            tl.store(entropy_ptr + rows, tl.where(kept, log_total - surprise / total, 0.0), mask=there)
        if correct_ptr is not None:
            tl.store(correct_ptr + rows, counts & (first == label.to(tl.float32)), mask=there)
        if squares_ptr is not None:
            tl.store(squares_ptr + rows, tl.where(kept, tl.log(squares) - 2.0 * log_total, 0.0), mask=there)
        if mean_ptr is not None:
            tl.store(mean_ptr + rows, tl.where(kept, logits / V, 0.0), mask=there)


# ---- gradient ----


@kernel
def _gradient_kernel(
    x_ptr, out_ptr, labels_ptr, place_ptr, bits_ptr, targets_ptr, weights_ptr, lse_ptr, g_ptr, entropy_ptr, dlse_ptr,
    dlog_prob_ptr, dentropy_ptr, mass_ptr,
    M, FIRST, X_ROW, OUT_ROW, V, scale, cap, smoothing, z_loss, ignore,
    W: tl.constexpr, ROOM: tl.constexpr, BITS_ROW: tl.constexpr, TARGETS_ROW: tl.constexpr, CLASSES: tl.constexpr,
    ALIGN: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the gradient over the logits, or beside them. A row without any incoming gradient is not read, and gets zeros."""
    EXACT: tl.constexpr = x_ptr.dtype.element_ty.primitive_bitwidth > 16
    X_ROW, OUT_ROW = aligned(X_ROW, ALIGN), aligned(OUT_ROW, ALIGN)
    tile = tl.program_id(0)
    row = tl.program_id(1) + 65535 * tl.program_id(2).to(tl.int64)
    there = row < M
    begin, V = _place(place_ptr, FIRST, V)
    label, kept, counts = label_of(labels_ptr, row, there, ignore, begin, V)
    columns, room, within = _tile_columns(tile, W, ROOM, TILE, BLOCK)
    exact = tl.load(lse_ptr + row, mask=there, other=0.0)
    lse = exact.to(tl.float32)
    g = tl.load(g_ptr + row, mask=counts, other=0.0)
    if mass_ptr is not None:
        penalty = 2.0 * z_loss * lse
        if targets_ptr is None:
            penalty *= class_weight_at(weights_ptr, begin + label, counts, CLASSES)
        a, b, t = g * (tl.load(mass_ptr + row, mask=counts, other=0.0) + penalty), 0.0, 0.0
    else:
        a, b, t = g * (1.0 + 2.0 * z_loss * lse), 0.0, g * (smoothing - 1.0)
    needed = counts
    if dlog_prob_ptr is not None:
        more = tl.load(dlog_prob_ptr + row, mask=counts, other=0.0)
        a -= more
        t += more
    if dlse_ptr is not None:
        a += tl.load(dlse_ptr + row, mask=kept, other=0.0)
        needed = kept
    if dentropy_ptr is not None:
        b = -tl.load(dentropy_ptr + row, mask=kept, other=0.0)
        a += b * tl.load(entropy_ptr + row, mask=kept, other=0.0)
        needed = kept
    if EXACT:
        less = rounding_factor(exact, lse)
        a, b = a * less, b * less
    within &= needed & _allowed(bits_ptr, row, BITS_ROW, FIRST + columns, within & needed)
    x = _load_tile(x_ptr, row, X_ROW, columns, room & needed)
    z = finished_logit(x, scale, cap)
    if mass_ptr is not None:
        s = -g * target_mass(
            targets_ptr, weights_ptr, row * TARGETS_ROW + FIRST, columns, begin, label, within, smoothing, V, CLASSES
        )
    else:
        s = -g * smoothing / V
    s = tl.where(columns == label, s + t, s)
    p = exp_above(z, lse, EXACT)
    d = gradient_of(x, z - lse, p, a, None if dentropy_ptr is None else b, s, scale, cap)
    tl.store(out_ptr + row * OUT_ROW + columns, tl.where(within, d, 0.0), mask=room & there)


# ---- tiles ----


class RowTiles(NamedTuple):
    """A row's division into `used` tiles of `tile` columns, in blocks of a power of two."""

    tile: int
    block: int
    used: int
    num_warps: int


def row_tiles(W: int, most: int, each: int) -> RowTiles:
    """Divide a row into equal tiles of at most `most` columns; a thread has `each`."""
    used = max(1, ceil_div(W, most))
    tile = ceil_div(ceil_div(max(W, 1), used), 64) * 64
    block = power_of_two(tile)
    return RowTiles(tile, block, max(1, ceil_div(W, tile)), min(16, max(1, block // (32 * each))))


_Masses = tuple[int, int]  # TARGETS_ROW and CLASSES


@lru_cache(1024)
def _statistics_plan(
    W: int, room: int, x_row: int, V: int, terms: LossTerms, stats: tuple[str, ...], bits_row: int, planes: int, masses: _Masses,
    as_of_stats: bool,
) -> tuple[RowTiles, Bound]:  # fmt: skip
    """as_of_stats: a loss has the bits that it has beside statistics."""
    sums = sums_of(terms, stats, planes)
    # the same tiles for all statistics: log_prob has the same bits whatever else is asked for. More would spill registers
    each = STATISTICS_EACH // (4 if planes != PLANES else 2 if stats or as_of_stats else 1)
    tiles = row_tiles(W, STATISTICS_TILE, each)
    bound: Bound = _statistics_kernel.bind(
        x_row, V, *numbers_of(terms), terms.smoothing, terms.ignore_index, W, room, planes, *sums, bits_row, *masses,
        known_align(x_row), tiles.tile, tiles.block, num_warps=tiles.num_warps,
    )  # fmt: skip
    return tiles, bound


@lru_cache(1024)
def _merge_plan(V: int, terms: LossTerms, stats: tuple[str, ...], planes: int, classes: int) -> Bound:
    smoothed = bool(terms.smoothing) and planes == PLANES
    bound: Bound = _merge_kernel.bind(
        V, terms.smoothing, terms.z_loss, terms.ignore_index, planes, classes, smoothed, *sums_of(terms, stats, planes),
        MERGED_PARTS, MERGED, num_warps=8,
    )  # fmt: skip
    return bound


@lru_cache(1024)
def _gradient_plan(
    W: int, room: int, x_row: int, out_row: int, V: int, terms: LossTerms, bits_row: int, masses: _Masses
) -> tuple[RowTiles, Bound]:  # fmt: skip
    tiles = row_tiles(W, GRADIENT_TILE, GRADIENT_EACH)
    bound: Bound = _gradient_kernel.bind(
        x_row, out_row, V, *numbers_of(terms), terms.smoothing, terms.z_loss, terms.ignore_index,
        W, room, bits_row, *masses, known_align(x_row, out_row), tiles.tile, tiles.block,
        num_warps=tiles.num_warps,
    )  # fmt: skip
    return tiles, bound


# ---- calls ----
# Logits are [rows, columns] with evenly spaced rows and contiguous columns. `first` is the number of their first column, V of all
# columns. `place` has both on the device if ranks share the vocabulary; `first` then counts from this rank's first column.
# `bits` is a packed mask of this rank's columns, [rows or 1, bytes]. `targets` are what masses are made of, None for labels.


def _bits_row(bits: Tensor | None) -> int:
    return 0 if bits is None or bits.shape[0] == 1 else bits.stride(0)


def _masses(targets: Targets | None) -> tuple[Targets, _Masses]:
    """Return the tensors, which may be None, and what the kernels compile in of them."""
    if targets is None:
        return _LABELS, (0, 0)
    probabilities, weight = targets
    return targets, (0 if probabilities is None else probabilities.stride(0), 0 if weight is None else weight.shape[0])


_LABELS = Targets()


class RowGradients(NamedTuple):
    """Incoming gradients of each row's loss and statistics, in fp32, and the rows' `mass`; None for those that there are not."""

    loss: Tensor
    logsumexp: Tensor | None = None
    log_prob: Tensor | None = None
    entropy: Tensor | None = None
    mass: Tensor | None = None


def row_statistics(x: Tensor, labels: Tensor, terms: LossTerms, stats: tuple[str, ...], columns: VocabColumns) -> Tensor:
    """Return [parts, planes, rows], a part for each tile of columns."""
    (M, W), (first, V, place, bits, targets, room) = x.shape, columns
    planes, (operands, masses) = planes_of(targets), _masses(targets)
    plan = W, max(W, room), x.stride(0), V, terms, stats, _bits_row(bits), planes, masses, invariant()
    tiles, launch = _statistics_plan(*plan)
    parts = x.new_empty(tiles.used, planes, M, dtype=torch.float32)
    launch(grid_of(tiles.used, M), x, labels, place, bits, *operands, parts, M, first)
    return parts


def merge_statistics(parts: Tensor, terms: LossTerms, stats: tuple[str, ...]) -> Tensor:
    """[1, planes, rows]."""
    count, planes, M = parts.shape
    if count == 1:
        return parts
    one = parts.new_empty(1, planes, M)
    launch = _merge_plan(0, terms, stats, planes, 0)
    launch((ceil_div(M, MERGED), 1, 1), parts, None, None, None, one, *[None] * len(RowLosses._fields), M, count)
    return one


def finish_losses(
    parts: Tensor, labels: Tensor, terms: LossTerms, stats: tuple[str, ...], logits: torch.dtype, columns: VocabColumns
) -> RowLosses:
    """Compute rows' losses and statistics from all their parts; `logits` is the logits' type."""
    _, V, place, _, targets, _ = columns
    count, planes, M = parts.shape
    lse = parts.new_empty(M, dtype=lse_type(logits))
    rest = *stats, *([] if targets is None else ["mass"])
    names = [name for name in ("log_prob", "entropy", "log_sum_sq_probs", "mean_logit", "mass") if name in rest]
    weight = None if targets is None else targets.label_weight
    loss, *rows = parts.new_empty(1 + len(names), M).unbind(0)
    correct = parts.new_empty(M, dtype=torch.bool) if "correct" in stats else None
    losses = RowLosses(loss, lse, correct=correct)._replace(**dict(zip(names, rows, strict=True)))
    launch = _merge_plan(V, terms, stats, planes, 0 if weight is None else weight.shape[0])
    launch((ceil_div(M, MERGED), 1, 1), parts, labels, place, weight, None, *losses, M, count)
    return losses


def row_gradients(
    x: Tensor, out: Tensor, labels: Tensor, terms: LossTerms, lse: Tensor, entropy: Tensor | None, incoming: RowGradients,
    columns: VocabColumns,
) -> None:  # fmt: skip
    """Write the gradient of the logits x to out, which may be x."""
    (M, W), (first, V, place, bits, targets, room) = x.shape, columns
    operands, masses = _masses(targets)
    tiles, launch = _gradient_plan(W, max(W, room), x.stride(0), out.stride(0), V, terms, _bits_row(bits), masses)
    launch(
        grid_of(tiles.used, M), x, out, labels, place, bits, *operands, lse, incoming.loss,
        None if incoming.entropy is None else entropy, incoming.logsumexp, incoming.log_prob, incoming.entropy, incoming.mass,
        M, first,
    )  # fmt: skip
