"""route's kernels: whole rows of logits in registers, one launch each way.

Forward, programs go over blocks of rows, and keep what is summed over tokens in registers: counts, scores and squares of
logsumexp. Each stores its sums once. The last to arrive adds them up in their order, and so writes counts and losses.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from onepass.kernels.column_reduce import add_strips
from onepass.kernels.language import device_function, tl
from onepass.kernels.launch import Bound, kernel
from onepass.kernels.layout import as_rows
from onepass.kernels.rows import aligned, inside_row, known_align
from onepass.kernels.scratch import new_scratch, stream_scratch
from onepass.runtime.sizes import ceil_div, power_of_two, processors

WIDEST = 1024  # experts: more of them are more than a program's registers
TINY = tl.constexpr(1e-20)  # added to a sum of sigmoids, which may be 0
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-2147483648)


class RouteOptions(NamedTuple):
    k: int
    sigmoid: bool  # and not softmax
    normalise: bool
    groups: int  # 1: none
    top_groups: int
    scale: float
    aux: float | None
    z: float | None


# ---- order: scores as integers that compare as torch.sort does ----


@device_function
def _as_key(x):
    """Return integers in the order of x: NaN above all, -0.0 equal to 0.0, and nothing as low as LOWEST."""
    x = x + 0.0
    bits = x.to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(x != x, 0x7FFFFFFF, key)


@device_function
def _take_best(key, numbers, END: tl.constexpr):
    """Return each row's best key, and the lowest number that has it; END is above all numbers."""
    best = tl.max(key, 1)
    return best, tl.min(tl.where(key == best[:, None], numbers[None, :], END), 1)


# ---- scores ----


@device_function
def _reciprocal(x):
    """Return 1 / x, rounded as well as a division: `/` alone may be two units off."""
    y = 1.0 / x
    return tl.where((y > 0) & (y < float("inf")), tl.fma(y, tl.fma(-x, y, 1.0), y), y)


@device_function
def _softmax_terms(x):
    """Return exp(x - max), its sum and the max of each row. A row with NaN has a sum of NaN."""
    most = tl.max(x, 1)
    e = tl.exp2((x - most[:, None]) * LOG2_E)
    return e, tl.sum(e, 1), most


@device_function
def _sigmoid(x):
    """Return the sigmoids of x and of -x: one is no difference from the other, and loses nothing to it."""
    e = tl.exp2(-tl.abs(x) * LOG2_E)
    large = _reciprocal(1.0 + e)
    small = e * large
    return tl.where(x >= 0, large, small), tl.where(x >= 0, small, large)


# ---- forward ----


@device_function
def _chosen_groups(key, terms, columns, SIZE, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, BLOCK_G: tl.constexpr):
    """Return where the groups lie whose two best scores have the largest sums. `terms` are the scores of these keys."""
    groups = tl.arange(0, BLOCK_G)
    of_column = columns // SIZE
    sums = tl.full([key.shape[0], BLOCK_G], LOWEST, tl.int32)
    END: tl.constexpr = key.shape[1]
    for group in range(GROUPS):
        here = tl.where((of_column == group)[None, :], key, LOWEST)
        _, first = _take_best(here, columns, END)
        is_first = columns[None, :] == first[:, None]
        _, second = _take_best(tl.where(is_first, LOWEST, here), columns, END)
        two = is_first | (columns[None, :] == second[:, None])
        total = _as_key(tl.sum(tl.where(two, terms, 0.0), 1))
        sums = tl.where((groups == group)[None, :], total[:, None], sums)
    kept = tl.zeros([key.shape[0], key.shape[1]], tl.int1)
    for _turn in range(TOP_GROUPS):
        _, best = _take_best(sums, groups, BLOCK_G)
        sums = tl.where(groups[None, :] == best[:, None], LOWEST, sums)
        kept = kept | (of_column[None, :] == best[:, None])
    return kept


@device_function
def _places(key, columns, K: tl.constexpr):
    """Return each column's place among the K best of its row, the lowest column first of equal ones; K for all others."""
    place = tl.full([key.shape[0], key.shape[1]], K, tl.int32)
    for j in range(K):
        _, column = _take_best(key, columns, key.shape[1])
        taken = columns[None, :] == column[:, None]
        place = tl.where(taken, j, place)
        key = tl.where(taken, LOWEST, key)
    return place


@kernel
def _route_kernel(
    logits_ptr, bias_ptr, weights_ptr, chosen_ptr,  # [M, C], [C], [M, K], [M, K]
    counts_ptr, aux_loss_ptr, z_loss_ptr,  # [C], [], []
    partial_ptr, counters_ptr,  # [programs, C] sums of scores, [programs] of squares; C counts, and one of arrived programs
    M,
    C, ROW, SIZE, scale, aux, z,  # SIZE: experts of a group. aux and z: coefficients of the losses' sums
    SIGMOID: tl.constexpr, NORMALISE: tl.constexpr, K: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr,
    WHOLE: tl.constexpr, ALIGN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    C, ROW = aligned(C, ALIGN), aligned(ROW, ALIGN)
    AUX: tl.constexpr = aux_loss_ptr is not None
    Z: tl.constexpr = z_loss_ptr is not None
    FREE: tl.constexpr = bias_ptr is not None or GROUPS > 1  # the best logits may not be among those chosen
    SHARES: tl.constexpr = AUX or (bias_ptr is not None) or not NORMALISE or GROUPS > 1
    program, programs = tl.program_id(0), tl.num_programs(0)
    columns = tl.arange(0, BLOCK_C)
    within = inside_row(columns, C, WHOLE)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + columns, mask=within, other=0.0).to(tl.float32)
    count_sums = tl.zeros([BLOCK_M, BLOCK_C], tl.int32)
    share_sums = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    square_sums = tl.zeros([BLOCK_M], tl.float32)
    for block in range(program, tl.cdiv(M, BLOCK_M), programs):
        rows = (block * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
        real = rows < M
        inside = real[:, None] & within[None, :]
        x = tl.load(logits_ptr + rows[:, None] * ROW + columns[None, :], mask=inside, other=float("-inf")).to(tl.float32)
        x = tl.where(real[:, None], x, 0.0)  # rows past the end compute no NaN
        if Z or (SHARES and not SIGMOID):
            e, total, most = _softmax_terms(x)
        if SIGMOID:
            scores, _ = _sigmoid(x)
            scores = tl.where(within[None, :], scores, 0.0)
        elif SHARES:
            scores = e * _reciprocal(total)[:, None]
        if bias_ptr is not None:
            terms = scores + bias[None, :]
            key = _as_key(terms)
        else:  # in the order of the logits, which have not been rounded
            key = _as_key(x)
            if GROUPS > 1:
                terms = scores
        key = tl.where(within[None, :], key, LOWEST)
        if GROUPS > 1:
            key = tl.where(_chosen_groups(key, terms, columns, SIZE, GROUPS, TOP_GROUPS, BLOCK_G), key, LOWEST)
        place = _places(key, columns, K)
        taken = place < K
        if SIGMOID:
            w = scores
            if NORMALISE:
                w = w * _reciprocal(tl.sum(tl.where(taken, w, 0.0), 1) + TINY)[:, None]
        elif NORMALISE:
            w, sum_w, _ = _softmax_terms(tl.where(taken, x, float("-inf")))
            if FREE:
                sum_w += total - total  # NaN of the whole row
            w = w * _reciprocal(sum_w)[:, None]
        else:
            w = scores
        stored = taken & real[:, None]
        at = rows[:, None] * K + place
        tl.store(weights_ptr + at, w * scale, mask=stored)
        tl.store(chosen_ptr + at, columns[None, :].to(tl.int64), mask=stored)
        count_sums += stored.to(tl.int32)
        if AUX:
            shares = scores * _reciprocal(tl.sum(scores, 1) + TINY)[:, None] if SIGMOID else scores
            share_sums += tl.where(inside, shares, 0.0)
        if Z:
            lse = most + tl.log2(total) * LN_2
            infinite = (tl.abs(most) == float("inf")) & (tl.max((x != x).to(tl.int32), 1) == 0)
            lse = tl.where(infinite, most, lse)  # as torch.logsumexp, and not the softmax's NaN
            square_sums += tl.where(real, lse * lse, 0.0)
    tl.atomic_add(counters_ptr + columns, tl.sum(count_sums, 0), mask=within, sem="relaxed")
    if AUX:
        tl.store(partial_ptr + program * C + columns, tl.sum(share_sums, 0), mask=within)
    if Z:
        tl.store(partial_ptr + programs * C + program, tl.sum(square_sums, 0))
    tl.debug_barrier()  # all of this program's sums are written before it counts itself in
    if tl.atomic_add(counters_ptr + C, 1, sem="acq_rel") == programs - 1:
        tl.store(counters_ptr + C, 0)
        counts = tl.load(counters_ptr + columns, mask=within, other=0, cache_modifier=".cg")
        tl.debug_barrier()  # several warps hold each count, and one of them sets it back
        tl.store(counters_ptr + columns, 0, mask=within)
        tl.store(counts_ptr + columns, counts, mask=within)
        tokens = M.to(tl.float32)
        if AUX:
            shares = add_strips(partial_ptr, columns, programs, C, within, BLOCK_P, BLOCK_C)
            even = tl.sum(tl.where(within, counts.to(tl.float32) * (shares / tokens), 0.0), 0)
            tl.store(aux_loss_ptr, even * (aux / tokens))
        if Z:
            squares = tl.zeros([BLOCK_C], tl.float32)
            for first in range(0, programs, BLOCK_C):
                at = first + columns
                squares += tl.load(partial_ptr + programs * C + at, mask=at < programs, other=0.0, cache_modifier=".cg")
            tl.store(z_loss_ptr, tl.sum(squares, 0) * (z / tokens))


# ---- backward ----


@kernel
def _route_backward_kernel(
    logits_ptr, chosen_ptr, counts_ptr,  # [M, C], [M, K], [C]
    dweights_ptr, daux_ptr, dz_ptr, dlogits_ptr,  # [M, K], [], [], [M, C]
    M,
    C, ROW, DW_ROW, scale, aux, z,
    SIGMOID: tl.constexpr, NORMALISE: tl.constexpr, K: tl.constexpr, WHOLE: tl.constexpr, ALIGN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Of gradients that are None nothing is computed.

    A softmax's gradient q (dw - sum q dw) is that of dw less any constant. Less the likeliest expert's, whose q may be nearly
    1, it doesn't cancel.
    """
    C, ROW = aligned(C, ALIGN), aligned(ROW, ALIGN)
    AUX: tl.constexpr = daux_ptr is not None
    Z: tl.constexpr = dz_ptr is not None
    WEIGHTS: tl.constexpr = dweights_ptr is not None
    columns = tl.arange(0, BLOCK_C)
    within = inside_row(columns, C, WHOLE)
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    real = rows < M
    inside = real[:, None] & within[None, :]
    x = tl.load(logits_ptr + rows[:, None] * ROW + columns[None, :], mask=inside, other=float("-inf")).to(tl.float32)
    x = tl.where(real[:, None], x, 0.0)
    tokens = M.to(tl.float32)
    dx = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    is_best = columns[None, :] == tl.load(chosen_ptr + rows * K, mask=real, other=-1).to(tl.int32)[:, None]
    if WEIGHTS:
        best = 0.0
        if NORMALISE and SIGMOID:
            best = tl.load(dweights_ptr + rows * DW_ROW, mask=real, other=0.0).to(tl.float32) * scale
        taken = tl.zeros([BLOCK_M, BLOCK_C], tl.int1)
        dw = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
        for j in range(K):
            column = tl.load(chosen_ptr + rows * K + j, mask=real, other=-1).to(tl.int32)
            here = columns[None, :] == column[:, None]
            taken = taken | here
            incoming = tl.load(dweights_ptr + rows * DW_ROW + j, mask=real, other=0.0).to(tl.float32)
            dw = tl.where(here, (incoming * scale - best)[:, None], dw)
    if AUX:
        load = tl.load(counts_ptr + columns, mask=within, other=0).to(tl.float32) / tokens
        dshare = (load * (tl.load(daux_ptr).to(tl.float32) * (aux / tokens)))[None, :]
    if Z or ((AUX or not NORMALISE) and not SIGMOID):
        e, total, most = _softmax_terms(x)
        p = e * _reciprocal(total)[:, None]
    if SIGMOID:
        s, rest = _sigmoid(x)
        s = tl.where(within[None, :], s, 0.0)
        ds = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
        if WEIGHTS:
            ds = dw
            if NORMALISE:
                inverse = _reciprocal(tl.sum(tl.where(taken, s, 0.0), 1) + TINY)
                mean = tl.sum(tl.where(taken, s * dw, 0.0), 1) * inverse
                mean -= best * (TINY * inverse)  # sigmoids over their sum are less than 1 by this
                ds = tl.where(taken, (dw - mean[:, None]) * inverse[:, None], 0.0)
        if AUX:
            inverse = _reciprocal(tl.sum(s, 1) + TINY)
            mean = tl.sum(s * dshare, 1) * inverse
            ds += (dshare - mean[:, None]) * inverse[:, None]
        if WEIGHTS or AUX:
            dx = ds * (s * rest)
    else:
        if WEIGHTS and NORMALISE:
            e_taken, sum_taken, _ = _softmax_terms(tl.where(taken, x, float("-inf")))
            q = e_taken * _reciprocal(sum_taken)[:, None]
            likeliest = taken & (q == tl.max(q, 1)[:, None])
            dw = tl.where(taken, dw - tl.max(tl.where(likeliest, dw, float("-inf")), 1)[:, None], 0.0)
            dx = q * (dw - tl.sum(q * dw, 1)[:, None])
        if AUX or (WEIGHTS and not NORMALISE):
            dp = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
            if WEIGHTS and not NORMALISE:
                dp = dw
            if AUX:
                dp += dshare
            dp -= tl.sum(tl.where(is_best, dp, 0.0), 1)[:, None]
            dx += p * (dp - tl.sum(p * dp, 1)[:, None])
    if Z:
        lse = most + tl.log2(total) * LN_2
        dx += p * (lse * (tl.load(dz_ptr).to(tl.float32) * (2.0 * z / tokens)))[:, None]
    tl.store(dlogits_ptr + rows[:, None] * C + columns[None, :], dx, mask=inside)


# ---- tiles: from the shape, never by trial ----


class RouteTiles(NamedTuple):
    block_m: int  # rows a program has at a time
    block_c: int
    num_warps: int
    resident: int  # programs a multiprocessor


def forward_tiles(C: int) -> RouteTiles:
    """One program a multiprocessor, as the last one reads a row of sums from each. A row of up to 128 experts is one warp's."""
    return _tiles(C, 2048, 16, 1)


def _tiles(C: int, values: int, num_warps: int, resident: int) -> RouteTiles:
    block_c = power_of_two(C)
    return RouteTiles(max(1, values // block_c), block_c, num_warps, resident)


_PARTIALS = 8192  # sums that the last program loads at a time


@lru_cache(4096)
def _forward_plan(C: int, row: int, options: RouteOptions) -> tuple[RouteTiles, Bound]:
    tiles, align = forward_tiles(C), known_align(C, row)
    bound: Bound = _route_kernel.bind(
        C, row, C // options.groups, options.scale, (options.aux or 0.0) * C / options.k, options.z or 0.0,
        options.sigmoid, options.normalise, options.k, options.groups, options.top_groups, tiles.block_c == C, align,
        tiles.block_m, tiles.block_c, power_of_two(options.groups), max(1, _PARTIALS // tiles.block_c),
        num_warps=tiles.num_warps, resident=tiles.resident,
    )  # fmt: skip
    return tiles, bound


@lru_cache(4096)
def _backward_plan(C: int, row: int, dw_row: int, options: RouteOptions) -> tuple[int, Bound]:
    """Rows a program, and the kernel."""
    tiles, align = _tiles(C, 1024, 8, 3), known_align(C, row)
    bound: Bound = _route_backward_kernel.bind(
        C, row, dw_row, options.scale, (options.aux or 0.0) * C / options.k, options.z or 0.0,
        options.sigmoid, options.normalise, options.k, tiles.block_c == C, align, tiles.block_m, tiles.block_c,
        num_warps=tiles.num_warps, resident=tiles.resident,
    )  # fmt: skip
    return tiles.block_m, bound


# ---- calls ----


def route_forward(
    logits: Tensor, bias: Tensor | None, options: RouteOptions, *, keep_scratch: bool = True
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return weights, chosen, counts, and the losses that are asked for."""
    C = logits.shape[-1]
    M = logits.numel() // C
    shape = (*logits.shape[:-1], options.k)
    weights, chosen = logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.int64)
    counts = logits.new_empty(C, dtype=torch.int32)
    aux_loss = None if options.aux is None else logits.new_empty((), dtype=torch.float32)
    z_loss = None if options.z is None else logits.new_empty((), dtype=torch.float32)
    logits, row = as_rows(logits)
    tiles, launch = _forward_plan(C, row, options)
    programs = min(ceil_div(M, tiles.block_m), tiles.resident * processors(logits.device))
    partial, counters = (stream_scratch if keep_scratch else new_scratch)(programs * (C + 1), C + 1, logits.device)
    bias = None if bias is None else bias.contiguous()
    launch((programs, 1, 1), logits, bias, weights, chosen, counts, aux_loss, z_loss, partial, counters, M)
    return weights, chosen, counts, aux_loss, z_loss


def route_backward(
    logits: Tensor, chosen: Tensor, counts: Tensor, dweights: Tensor | None, daux: Tensor | None, dz: Tensor | None,
    options: RouteOptions,
) -> Tensor:  # fmt: skip
    C = logits.shape[-1]
    M = logits.numel() // C
    dlogits = torch.empty_like(logits, memory_format=torch.contiguous_format)
    logits, row = as_rows(logits)
    dw_row = options.k
    if dweights is not None:
        dweights, dw_row = as_rows(dweights)
    block_m, launch = _backward_plan(C, row, dw_row, options)
    launch((ceil_div(M, block_m), 1, 1), logits, chosen, counts, dweights, daux, dz, dlogits, M)
    return dlogits
