"""Backward of rope with a norm of each head: gradients rotated back, dx, and both weights' gradients, in one kernel.

With z a normalised head, g the gradient rotated back, and means over the head:
    dx = (g weight - z mean(g weight z)) / deviation,  dweight = sum over tokens and heads of g z
x is read anyway, so its deviation is computed again rather than kept.

A program has q or k alone, as many of each as they have elements; it takes tile after tile, all programs at the same pace, while
its next tiles are on their way, and sums dweight in registers. The last programs to arrive add up the programs' sums. dx may
overwrite dy or x: each head's result depends on that head alone, which is read first.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onepass.kernels.column_reduce import helper_count, join_helpers, leave_helpers, share_tiles
from onepass.kernels.language import device_function, tl
from onepass.kernels.launch import Bound, kernel
from onepass.kernels.rows import aligned, inside_row
from onepass.kernels.scratch import new_scratch, stream_scratch
from onepass.ops.attention.rope_formula import QKNorm
from onepass.ops.attention.rope_kernels import (
    Layout,
    RopeTiles,
    empty_like,
    layout_of,
    load_angles,
    load_pairs,
    load_rest,
    load_weight,
    readable,
    rope_tiles,
    rotate_pair,
    rstd_of_heads,
    store_pairs,
    store_rest,
    token_layout,
)
from onepass.runtime.sizes import ceil_div, power_of_two, processors, shared_memory

_WARPS = 8  # 16 elements of a tile a thread
_NARROW = 128  # columns of a head

# ---- the kernel ----


@device_function
def _back_through_heads(
    dy_ptr, x_ptr, dx_ptr, weight_ptr, cos_ptr, sin_ptr, sums_ptr, program, programs, M, S, eps,
    DY_M, DY_S, DY_H, X_M, X_S, X_H, DX_M, DX_S, DX_H, COS_M, COS_S, SIN_M, SIN_S,
    HEADS: tl.constexpr, D: tl.constexpr, P: tl.constexpr, INTERLEAVED: tl.constexpr, CENTERED: tl.constexpr,
    ALIGN: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_R: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Do this program's tiles of q, or of k. sums_ptr: where its sums for dweight go, or None."""
    DY_M, DY_S, DY_H = aligned(DY_M, ALIGN), aligned(DY_S, ALIGN), aligned(DY_H, ALIGN)
    X_M, X_S, X_H = aligned(X_M, ALIGN), aligned(X_S, ALIGN), aligned(X_H, ALIGN)
    DX_M, DX_S, DX_H = aligned(DX_M, ALIGN), aligned(DX_S, ALIGN), aligned(DX_H, ALIGN)
    ACROSS: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    weight1, weight2, weight_rest = load_weight(weight_ptr, D, P, INTERLEAVED, CENTERED, BLOCK_P, BLOCK_R)
    sum1 = tl.zeros([BLOCK_S, BLOCK_H, BLOCK_P], tl.float32)
    sum2 = tl.zeros([BLOCK_S, BLOCK_H, BLOCK_P], tl.float32)
    sum_rest = tl.zeros([BLOCK_S, BLOCK_H, BLOCK_R if BLOCK_R else 1], tl.float32)
    down = tl.cdiv(S, BLOCK_S)
    for tile in tl.range(program, M * down * ACROSS, programs, num_stages=STAGES):  # their number fits into 32 bits
        sequence = (tile // ACROSS // down).to(tl.int64)
        tokens = (tile // ACROSS % down).to(tl.int64) * BLOCK_S + tl.arange(0, BLOCK_S)
        heads = tile % ACROSS * BLOCK_H + tl.arange(0, BLOCK_H)
        real = tokens < S
        there = real[:, None, None] & inside_row(heads, HEADS, HEADS % BLOCK_H == 0)[None, :, None]
        head = heads.to(tl.int64)[None, :, None]
        dy_head = (dy_ptr + sequence * DY_M + tokens * DY_S)[:, None, None] + head * DY_H
        x_head = (x_ptr + sequence * X_M + tokens * X_S)[:, None, None] + head * X_H
        cos = load_angles(cos_ptr, sequence, tokens, real, COS_M, COS_S, P, BLOCK_P)
        sin = load_angles(sin_ptr, sequence, tokens, real, SIN_M, SIN_S, P, BLOCK_P)
        g1, g2 = load_pairs(dy_head, there, P, INTERLEAVED, BLOCK_S, BLOCK_H, BLOCK_P)
        x1, x2 = load_pairs(x_head, there, P, INTERLEAVED, BLOCK_S, BLOCK_H, BLOCK_P)
        g1, g2 = rotate_pair(g1, g2, cos, sin, True)
        g_rest = load_rest(dy_head, there, D, P, BLOCK_R)
        x_rest = load_rest(x_head, there, D, P, BLOCK_R)
        if BLOCK_R:
            g_rest, x_rest = g_rest.to(tl.float32), x_rest.to(tl.float32)
        rstd = rstd_of_heads(x1, x2, x_rest, eps, D, BLOCK_R)
        z1, z2 = x1 * rstd, x2 * rstd
        if BLOCK_R:
            z_rest = x_rest * rstd
        if sums_ptr is not None:
            sum1 += g1 * z1
            sum2 += g2 * z2
            if BLOCK_R:
                sum_rest += g_rest * z_rest
        if dx_ptr is not None:
            dx_head = (dx_ptr + sequence * DX_M + tokens * DX_S)[:, None, None] + head * DX_H
            g1, g2 = g1 * weight1, g2 * weight2
            products = tl.sum(g1 * z1 + g2 * z2, 2)
            if BLOCK_R:
                g_rest *= weight_rest
                products += tl.sum(g_rest * z_rest, 2)
            mean = (products / D)[:, :, None]
            dx1, dx2 = (g1 - z1 * mean) * rstd, (g2 - z2 * mean) * rstd
            store_pairs(dx_head, there, dx1, dx2, P, INTERLEAVED, BLOCK_S, BLOCK_H, BLOCK_P)
            if BLOCK_R:
                store_rest(dx_head, there, (g_rest - z_rest * mean) * rstd, D, P, BLOCK_R)
    if sums_ptr is not None:
        there = tl.full([1, 1, 1], True, tl.int1)
        store_pairs(sums_ptr, there, _over_rows(sum1), _over_rows(sum2), P, INTERLEAVED, 1, 1, BLOCK_P)
        if BLOCK_R:
            store_rest(sums_ptr, there, _over_rows(sum_rest), D, P, BLOCK_R)


@device_function
def _over_rows(x):
    """Sum over tokens and heads, [1, 1, columns]."""
    return tl.sum(tl.sum(x, 0), 0)[None, None, :]


@kernel
def _rope_norm_backward_kernel(
    cos_ptr, sin_ptr, dq_ptr, q_ptr, dq_out_ptr, q_weight_ptr, dq_weight_ptr,
    dk_ptr, k_ptr, dk_out_ptr, k_weight_ptr, dk_weight_ptr, partial_ptr, arrived_ptr,
    M, S, FIRST,  # FIRST: how many programs have q; the others have k
    COS_M, COS_S, SIN_M, SIN_S, DQ_M, DQ_S, DQ_H, Q_M, Q_S, Q_H, DQ_OUT_M, DQ_OUT_S, DQ_OUT_H,
    DK_M, DK_S, DK_H, K_M, K_S, K_H, DK_OUT_M, DK_OUT_S, DK_OUT_H, eps,
    HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, P: tl.constexpr, INTERLEAVED: tl.constexpr,
    CENTERED: tl.constexpr, ADD: tl.constexpr, ALIGN: tl.constexpr, TABLE_ALIGN: tl.constexpr,
    BLOCK_SQ: tl.constexpr, BLOCK_HQ: tl.constexpr, BLOCK_SK: tl.constexpr, BLOCK_HK: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_R: tl.constexpr, STAGES: tl.constexpr, SHARE_S: tl.constexpr, SHARE_H: tl.constexpr,
):  # fmt: skip
    COS_M, COS_S = aligned(COS_M, TABLE_ALIGN), aligned(COS_S, TABLE_ALIGN)
    SIN_M, SIN_S = aligned(SIN_M, TABLE_ALIGN), aligned(SIN_S, TABLE_ALIGN)
    program, programs = tl.program_id(0), tl.num_programs(0)
    sums_ptr = partial_ptr
    if partial_ptr is not None:
        sums_ptr = partial_ptr + program.to(tl.int64) * D
    if q_ptr is not None:  # noqa: SIM102 (known when it is compiled)
        if program < FIRST:
            _back_through_heads(
                dq_ptr, q_ptr, dq_out_ptr, q_weight_ptr, cos_ptr, sin_ptr, sums_ptr if dq_weight_ptr is not None else None,
                program, FIRST, M, S, eps,
                DQ_M, DQ_S, DQ_H, Q_M, Q_S, Q_H, DQ_OUT_M, DQ_OUT_S, DQ_OUT_H, COS_M, COS_S, SIN_M, SIN_S,
                HQ, D, P, INTERLEAVED, CENTERED, ALIGN, BLOCK_SQ, BLOCK_HQ, BLOCK_P, BLOCK_R, STAGES,
            )  # fmt: skip
    if k_ptr is not None:  # noqa: SIM102
        if program >= FIRST:
            _back_through_heads(
                dk_ptr, k_ptr, dk_out_ptr, k_weight_ptr, cos_ptr, sin_ptr, sums_ptr if dk_weight_ptr is not None else None,
                program - FIRST, programs - FIRST, M, S, eps,
                DK_M, DK_S, DK_H, K_M, K_S, K_H, DK_OUT_M, DK_OUT_S, DK_OUT_H, COS_M, COS_S, SIN_M, SIN_S,
                HK, D, P, INTERLEAVED, CENTERED, ALIGN, BLOCK_SK, BLOCK_HK, BLOCK_P, BLOCK_R, STAGES,
            )  # fmt: skip
    if partial_ptr is not None:
        helpers = helper_count()
        helper = join_helpers(arrived_ptr, programs, helpers)
        if helper >= 0:
            if dq_weight_ptr is not None:
                share_tiles(partial_ptr, dq_weight_ptr, None, helper, helpers, FIRST, D, ADD, SHARE_S, SHARE_H)
            if dk_weight_ptr is not None:
                of_k_ptr = partial_ptr + FIRST.to(tl.int64) * D
                share_tiles(of_k_ptr, dk_weight_ptr, None, helper, helpers, programs - FIRST, D, ADD, SHARE_S, SHARE_H)
            leave_helpers(arrived_ptr, helpers)


# ---- tiles ----


class _Shares(NamedTuple):
    """How many tiles there are to a tile of forward's, and how many programs a multiprocessor has."""

    share: int
    resident: int


def _shares(D: int, P: int, interleaved: bool) -> _Shares:
    """Lanes without an element, and what lies past the pairs, take registers."""
    if D != 2 * P:
        return _Shares(1, 3) if D > _NARROW and not interleaved else _Shares(4, 2)
    return _Shares(1 if power_of_two(P) == P else 2, 2)


def _tiles(H: int, D: int, P: int, interleaved: bool) -> RopeTiles:
    return rope_tiles(H, 0, D, P, _shares(D, P, interleaved).share)


class _BackwardPlan(NamedTuple):
    launch: Bound
    M: int
    S: int
    q_tiles: int
    k_tiles: int
    resident: int  # programs a multiprocessor


@lru_cache(4096)
def _backward_plan(
    heads: tuple[Layout | None, ...], cos: Layout, sin: Layout, interleaved: bool, eps: float, centered: bool, add: bool,
    size: int, device: torch.device,
) -> _BackwardPlan | None:  # fmt: skip
    """heads: the layouts of dq, q, dq_out, dk, k and dk_out. size: bytes of an element, and one of the tables.

    Return None where tensors can't be read in place.
    """
    layout = token_layout(heads, cos, sin)
    if layout is None:
        return None
    HQ, HK = (0 if x is None else x[0][-2] for x in (heads[1], heads[4]))
    D, P = next(x[0][-1] for x in heads if x is not None), cos[0][-1]
    of_q, of_k = (_tiles(H or 1, D, P, interleaved) for H in (HQ, HK))
    share, resident = _shares(D, P, interleaved)
    values = (2 * of_q.block_p + of_q.block_r) * max(of_q.block_s * of_q.block_hq, of_k.block_s * of_k.block_hq)
    stage = 2 * values * size + 8 * of_q.block_p * max(of_q.block_s, of_k.block_s)
    stages = max(1, min(2 + share, 1 + (shared_memory(device) - 16384) // resident // stage))
    fixed = HQ, HK, D, P, interleaved, centered, add, *layout.aligns
    blocks = of_q.block_s, of_q.block_hq, of_k.block_s, of_k.block_hq, of_q.block_p, of_q.block_r
    launch = _bind_backward((*layout.tables, *layout.flat), resident, eps, *fixed, *blocks, stages)
    q_tiles, k_tiles = (layout.M * ceil_div(layout.S, t.block_s) * ceil_div(H, t.block_hq) for t, H in ((of_q, HQ), (of_k, HK)))
    return _BackwardPlan(launch, layout.M, layout.S, q_tiles, k_tiles, resident)


@lru_cache(1024)
def _bind_backward(strides: tuple[int, ...], resident: int, *fixed: Any) -> Bound:
    share = 512 * _WARPS // 32, 32  # of the last sums: 16 values a thread
    bound: Bound = _rope_norm_backward_kernel.bind(*strides, *fixed, *share, num_warps=_WARPS, resident=resident)
    return bound


def _programs(q_tiles: int, k_tiles: int, most: int) -> tuple[int, int]:
    """Return how many programs there are, and how many of them have q."""
    if q_tiles + k_tiles <= most:
        return q_tiles + k_tiles, q_tiles
    most = max(most, bool(q_tiles) + bool(k_tiles))
    with_q = round(most * q_tiles / (q_tiles + k_tiles))
    return most, min(max(with_q, bool(q_tiles)), most - bool(k_tiles))


def backward_variant(q: Tensor | None, k: Tensor | None, cos: Tensor, interleaved: bool) -> str:
    """Which tiles backward has."""
    named, P = [(name, x.shape[-2:]) for name, x in (("q", q), ("k", k)) if x is not None], cos.shape[-1]
    tiles = [(name, _tiles(H, D, P, interleaved)) for name, (H, D) in named]
    each = " or ".join(f"{t.block_s} x {t.block_hq} of {name}'s" for name, t in tiles)
    resident = _shares(named[0][1][-1], P, interleaved).resident
    return f"backward in one kernel, {each} tokens x heads at a time, {resident} programs a multiprocessor"


# ---- calls ----


class HeadGradients(NamedTuple):
    """What a backward is to compute."""

    of_q: bool
    of_k: bool
    of_q_weight: bool
    of_k_weight: bool


def rotate_back(
    cos: Tensor, sin: Tensor, gradients: tuple[Tensor | None, Tensor | None], heads: tuple[Tensor, Tensor], norm: QKNorm,
    interleaved: bool, needs: HeadGradients, out: tuple[Tensor, Tensor] | None = None,
    *, into: tuple[Tensor | None, ...] | None = None, keep_scratch: bool = True,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Return the gradients of q, k and both weights, of those of `rotate`'s results with this norm; None for what isn't needed.

    Args:
        gradients: dq and dk. None where a result has no gradient: then q and its weight, or k and its weight, get none.
        heads: q and k.
        out: where q's and k's go instead, with last strides of 1; they may be dq and dk themselves.
        into: contiguous tensors that the weights' gradients are added to, as many as are needed of them.
    """
    (dq, dk), (q, k) = gradients, heads
    has_q, has_k = dq is not None, dk is not None
    q_out = (empty_like(q) if out is None else out[0]) if needs.of_q and has_q else None
    k_out = (empty_like(k) if out is None else out[1]) if needs.of_k and has_k else None
    dq_weight, dk_weight = into or (None, None)
    if into is None:
        dq_weight = torch.empty_like(norm.q_weight) if needs.of_q_weight and has_q else None
        dk_weight = torch.empty_like(norm.k_weight) if needs.of_k_weight and has_k else None
    else:
        dq_weight, dk_weight = dq_weight if has_q else None, dk_weight if has_k else None
    results = q_out, k_out, dq_weight, dk_weight
    some_q = has_q and q.numel() > 0 and (q_out is not None or dq_weight is not None)
    some_k = has_k and k.numel() > 0 and (k_out is not None or dk_weight is not None)
    for dweight, some in ((dq_weight, some_q), (dk_weight, some_k)):
        if dweight is not None and into is None and not some:
            dweight.zero_()
    if not (some_q or some_k):
        return results
    nothing = None, None, None
    operands: list[tuple[Tensor | None, ...]] = [(dq, q, q_out) if some_q else nothing, (dk, k, k_out) if some_k else nothing]
    q_weight, k_weight, eps, centered = norm
    dq_weight, dk_weight = dq_weight if some_q else None, dk_weight if some_k else None
    size = max(q.element_size() if some_q else 0, k.element_size() if some_k else 0)
    while True:
        layouts = tuple(map(layout_of, (*operands[0], *operands[1])))
        tables = (cos.shape, cos.stride()), (sin.shape, sin.stride())
        plan = _backward_plan(layouts, *tables, interleaved, eps, centered, into is not None, size, cos.device)
        if plan is not None:
            break
        copies, cos, sin = readable((*operands[0][:2], *operands[1][:2]), cos, sin)
        operands = [(*copies[:2], operands[0][2]), (*copies[2:], operands[1][2])]
    programs, first = _programs(plan.q_tiles, plan.k_tiles, plan.resident * processors(cos.device))
    partial = arrived = None
    if dq_weight is not None or dk_weight is not None:
        partial, arrived = (stream_scratch if keep_scratch else new_scratch)(programs * norm.q_weight.numel(), 2, cos.device)
    tensors = (*operands[0], q_weight, dq_weight, *operands[1], k_weight, dk_weight)
    plan.launch((programs, 1, 1), cos, sin, *tensors, partial, arrived, plan.M, plan.S, first)
    return results
