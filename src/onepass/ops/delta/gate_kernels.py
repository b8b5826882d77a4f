"""delta_gates' kernels: both gates of some rows at once, of all heads. Backward sums the vectors' gradients as it goes.

With x = a + dt_bias and A = exp(a_log), for each row:
    g = -A softplus(x),  beta = sigmoid(b)
    da = -dg A sigmoid(x),  db = dbeta beta (1 - beta),  da_log = sum over rows of dg g,  ddt_bias = sum over rows of da
The heads of a row lie in groups of R, evenly spaced, as transformers' projection of both lays them; a plain row is one group.
"""
# mypy: disable-error-code="assignment"

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from onepass.gradients.places import Place, empty_gradient
from onepass.kernels.column_reduce import helper_count, join_helpers, leave_helpers, share_strips
from onepass.kernels.language import device_function, tl
from onepass.kernels.launch import Bound, kernel
from onepass.kernels.layout import as_grouped_rows
from onepass.kernels.rows import inside_row
from onepass.kernels.scratch import new_scratch, stream_scratch
from onepass.kernels.sigmoid import LOG2_E, exp2_approx, reciprocal_approx, sigmoid
from onepass.runtime.sizes import ceil_div, power_of_two, processors

MOST_HEADS = 4096  # of a row, which a program holds
TILE, PROGRAMS = 1024, 2  # numbers of each tensor that a program takes at a time; programs of backward a multiprocessor


class GateOptions(NamedTuple):
    """How heads lie, as the kernels know it."""

    heads: int
    group: int  # heads that lie together: all of a plain row


class GatesKept(NamedTuple):
    """What backward has of a call."""

    dg: Tensor
    dbeta: Tensor
    a: Tensor
    b: Tensor
    a_log: Tensor
    dt_bias: Tensor


# ---- rows ----


@device_function
def softplus(x):
    """Return log(1 + exp(x)). With e = exp(-|x|), the logarithm is 2 artanh(s) of s = e / (2 + e), right to its last bits."""
    e = exp2_approx(-LOG2_E * tl.abs(x))
    s = e * reciprocal_approx(2.0 + e)
    t = s * s
    series = 1.0 / 13 + t * (1.0 / 15)
    for k in tl.static_range(5):
        series = series * t + 1.0 / (11 - 2 * k)
    return tl.where(x > 0, x, 0.0) + 2.0 * (s + s * t * series)  # x that is NaN is so by s


@device_function
def _load_gates(a_ptr, b_ptr, rows, heads, inside, lies, R: tl.constexpr):
    """Load rows of a and b in fp32. Return also where they lie."""
    A_ROW, A_GROUP, B_ROW, B_GROUP = lies
    group, within = heads // R, heads % R
    a_at = rows[:, None] * A_ROW + (group * A_GROUP + within)[None, :]
    b_at = rows[:, None] * B_ROW + (group * B_GROUP + within)[None, :]
    a = tl.load(a_ptr + a_at, mask=inside, other=0.0)
    b = tl.load(b_ptr + b_at, mask=inside, other=0.0)
    return a.to(tl.float32), b.to(tl.float32), a_at, b_at


@device_function
def _load_decay(a_log_ptr, dt_bias_ptr, heads, there):
    """Return exp(a_log) and dt_bias [1, BLOCK_H] in fp32."""
    a_log = tl.load(a_log_ptr + heads, mask=there, other=0.0).to(tl.float32)
    dt_bias = tl.load(dt_bias_ptr + heads, mask=there, other=0.0).to(tl.float32)
    return tl.exp(a_log)[None, :], dt_bias[None, :]


# ---- kernels ----


@kernel
def _gates_forward_kernel(
    a_ptr, b_ptr, a_log_ptr, dt_bias_ptr, g_ptr, beta_ptr,  # a and b: M rows of H heads; a_log, dt_bias [H]; g, beta [M, H]
    M, A_ROW, A_GROUP, B_ROW, B_GROUP,  # from row to row, and from group to group of R heads
    R: tl.constexpr, H: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    heads = tl.arange(0, BLOCK_H)
    there = inside_row(heads, H, H == BLOCK_H)
    decay, dt_bias = _load_decay(a_log_ptr, dt_bias_ptr, heads, there)
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = (rows < M)[:, None] & there[None, :]
    a, b, _, _ = _load_gates(a_ptr, b_ptr, rows, heads, inside, (A_ROW, A_GROUP, B_ROW, B_GROUP), R)
    beta, _ = sigmoid(-LOG2_E * b)
    at = rows[:, None] * H + heads[None, :]
    g = decay * softplus(a + dt_bias) * -1.0  # Triton's -x is 0 - x, of which a zero has another sign
    tl.store(g_ptr + at, g, mask=inside)
    tl.store(beta_ptr + at, beta, mask=inside)


@kernel
def _gates_backward_kernel(
    dg_ptr, dbeta_ptr, a_ptr, b_ptr, a_log_ptr, dt_bias_ptr,  # as in forward; dg and dbeta [M, H]
    da_ptr, db_ptr, da_log_ptr, ddt_bias_ptr, partial_ptr, arrived_ptr,  # gradients; a row of sums a program, two counters
    M, ROWS, A_ROW, A_GROUP, B_ROW, B_GROUP,  # ROWS: of all M rows, those of a program
    DA_AS_A: tl.constexpr, DB_AS_B: tl.constexpr,  # a gradient lies as its input does; else [M, H]
    R: tl.constexpr, H: tl.constexpr, ADD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr,
    SHARE_S: tl.constexpr, SHARE_H: tl.constexpr,
):  # fmt: skip
    SUMS: tl.constexpr = da_log_ptr is not None or ddt_bias_ptr is not None
    BOTH: tl.constexpr = da_log_ptr is not None and ddt_bias_ptr is not None
    heads = tl.arange(0, BLOCK_H)
    there = inside_row(heads, H, H == BLOCK_H)
    decay, dt_bias = _load_decay(a_log_ptr, dt_bias_ptr, heads, there)
    da_log = tl.zeros([BLOCK_M, BLOCK_H], tl.float32)
    ddt_bias = tl.zeros([BLOCK_M, BLOCK_H], tl.float32)
    first = tl.program_id(0).to(tl.int64) * ROWS
    for start in tl.range(first, tl.minimum(first + ROWS, M), BLOCK_M):
        rows = start + tl.arange(0, BLOCK_M)
        inside = (rows < M)[:, None] & there[None, :]
        at = rows[:, None] * H + heads[None, :]
        a, b, a_at, b_at = _load_gates(a_ptr, b_ptr, rows, heads, inside, (A_ROW, A_GROUP, B_ROW, B_GROUP), R)
        if db_ptr is not None:
            beta, rest = sigmoid(-LOG2_E * b)
            dbeta = tl.load(dbeta_ptr + at, mask=inside, other=0.0).to(tl.float32)
            tl.store(db_ptr + (b_at if DB_AS_B else at), dbeta * beta * rest, mask=inside)
        if da_ptr is not None or SUMS:
            x = a + dt_bias
            slope, _ = sigmoid(-LOG2_E * x)
            scaled = -decay * tl.load(dg_ptr + at, mask=inside, other=0.0)
            da = scaled * slope
            if da_ptr is not None:
                tl.store(da_ptr + (a_at if DA_AS_A else at), da, mask=inside)
            # rows past the end add zeros, whatever dt_bias is
            da_log += tl.where(inside, scaled * softplus(x), 0.0)
            ddt_bias += tl.where(inside, da, 0.0)
    if SUMS:
        sums = partial_ptr + tl.program_id(0).to(tl.int64) * (2 * H if BOTH else H) + heads
        if da_log_ptr is not None:
            tl.store(sums, tl.sum(da_log, 0), mask=there)
        if ddt_bias_ptr is not None:
            tl.store(sums + (H if BOTH else 0), tl.sum(ddt_bias, 0), mask=there)
        programs, helpers = tl.num_programs(0), helper_count()
        helper = join_helpers(arrived_ptr, programs, helpers)
        if helper >= 0:
            share_strips(partial_ptr, da_log_ptr, ddt_bias_ptr, helper, helpers, programs, H, ADD, SHARE_S, SHARE_H)
            leave_helpers(arrived_ptr, helpers)


# ---- tiles: from the shape, never by trial ----


class GateTiles(NamedTuple):
    block_m: int
    block_h: int
    num_warps: int


def gate_tiles(heads: int) -> GateTiles:
    block_h = power_of_two(heads)
    return GateTiles(max(1, TILE // block_h), block_h, max(4, block_h // 256))


def strip_rows(M: int, tiles: GateTiles, device: torch.device) -> int:
    """Return the rows that a program of backward goes down."""
    return ceil_div(ceil_div(M, PROGRAMS * processors(device)), tiles.block_m) * tiles.block_m


@lru_cache(4096)
def _forward_plan(lies: tuple[int, ...], options: GateOptions) -> tuple[GateTiles, Bound]:
    """`lies`: the four distances of a and b."""
    heads, group = options
    tiles = gate_tiles(heads)
    bound: Bound = _gates_forward_kernel.bind(*lies, group, heads, tiles.block_m, tiles.block_h, num_warps=tiles.num_warps)
    return tiles, bound


@lru_cache(4096)
def _backward_plan(
    lies: tuple[int, ...], as_inputs: tuple[bool, ...], options: GateOptions, add: bool
) -> tuple[GateTiles, Bound]:
    """`as_inputs`: whether da lies as a does, and db as b."""
    heads, group = options
    tiles = gate_tiles(heads)
    bound: Bound = _gates_backward_kernel.bind(
        *lies, *as_inputs, group, heads, add, tiles.block_m, tiles.block_h, 64, 32, num_warps=tiles.num_warps
    )  # fmt: skip
    return tiles, bound


# ---- calls ----


def gates_forward(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, options: GateOptions) -> tuple[Tensor, Tensor]:
    g, beta = torch.empty(a.shape, dtype=torch.float32, device=a.device), b.new_empty(b.shape)
    M = a.numel() // options.heads
    a, *lies = as_grouped_rows(a, *options)
    b, *others = as_grouped_rows(b, *options)
    tiles, launch = _forward_plan((*lies, *others), options)
    launch((ceil_div(M, tiles.block_m), 1, 1), a, b, a_log, dt_bias, g, beta, M)
    return g, beta


def gates_backward(
    kept: GatesKept, options: GateOptions, need_da: bool, need_db: bool, need_da_log: bool, need_ddt_bias: bool,
    into: Sequence[Tensor | None] | None = None, places: Sequence[Place | None] = (None, None), keep_scratch: bool = True,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Return da, db, da_log and ddt_bias: each where it is needed. `into`: what the last two are added to."""
    dg, dbeta, a, b, a_log, dt_bias = kept
    M = a.numel() // options.heads
    given = a_log if need_da_log else None, dt_bias if need_ddt_bias else None
    da_log, ddt_bias = [None if t is None else torch.empty_like(t) for t in given] if into is None else into
    grads, lies = [], []
    inputs = [as_grouped_rows(t, *options) for t in (a, b)]
    for t, (read, *distances), place, need in zip((a, b), inputs, places, (need_da, need_db), strict=True):
        grads.append(empty_gradient(t, place if read is t else None) if need else None)
        lies += distances
    (da, db), (a, b) = grads, [read for read, *_ in inputs]
    as_inputs = [grad is not None and not grad.is_contiguous() for grad in grads]
    tiles, launch = _backward_plan(tuple(lies), tuple(as_inputs), options, into is not None)
    rows = strip_rows(M, tiles, a.device)
    strips = ceil_div(M, rows)
    partial = arrived = None
    if need_da_log or need_ddt_bias:
        floats = strips * options.heads * (need_da_log + need_ddt_bias)
        partial, arrived = (stream_scratch if keep_scratch else new_scratch)(floats, 2, a.device)
    vectors = a_log, dt_bias, da, db, da_log, ddt_bias
    launch((strips, 1, 1), dg.contiguous(), dbeta.contiguous(), a, b, *vectors, partial, arrived, M, rows)
    return da, db, da_log, ddt_bias
