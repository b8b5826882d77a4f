"""rope's kernel as its op calls it: q and k at once, or one of them, there or back.

A program owns some tokens and all their heads, of q and k alike, so it reads their angles once and holds them in registers.
Tensors are read where they lie: each has a stride for sequences (M of them), for their tokens (S) and for heads. Leading
dimensions merge where all tensors allow it. Where more than two are left, or a last dimension is not contiguous, there are
copies. Results may lie in the place of q and k: what a pair's two numbers become depends on those two, which are read first.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from onepass.kernels.rows import aligned, inside_row, known_align
from onepass.runtime.checks import check_device
from onepass.runtime.dispatch import needs_grad
from onepass.runtime.lang import device_function, tl
from onepass.runtime.launch import Bound, Grid, grid_of, kernel
from onepass.runtime.sizes import ceil_div, power_of_two

Maybe = Tensor | None


# ---- kernels: load, go to fp32 at once, store in the storage type ----


@device_function
def _angles(table_ptr, sequence, tokens, real, TABLE_M, TABLE_S, P: tl.constexpr, BLOCK_P: tl.constexpr):
    """A table's numbers of some tokens, in fp32, as they meet the tokens' heads."""
    pairs = tl.arange(0, BLOCK_P)
    at = (sequence * TABLE_M + tokens * TABLE_S)[:, None, None] + pairs[None, None, :]
    inside = real[:, None, None] & inside_row(pairs, P, P == BLOCK_P)[None, None, :]
    return tl.load(table_ptr + at, mask=inside, other=0.0).to(tl.float32)


@device_function
def _turn(x1, x2, cos, sin, BACK: tl.constexpr):
    """BACK: the transposed, which is what a gradient takes; where cos and sin have a common factor, no inverse.

    fma said outright: a compiler that may choose which product it keeps exact chooses another one for other strides.
    """
    if BACK:
        sin = -sin
    return tl.fma(x1, cos, -(x2 * sin)), tl.fma(x2, cos, x1 * sin)


@device_function
def _turn_heads(
    x_ptr, y_ptr, sequence, tokens, real, cos, sin, X_M, X_S, X_H, Y_M, Y_S, Y_H,
    HEADS: tl.constexpr, D: tl.constexpr, P: tl.constexpr, INTERLEAVED: tl.constexpr, BACK: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """All heads of some tokens, BLOCK_H at a time."""
    x_token = (x_ptr + sequence * X_M + tokens * X_S)[:, None, None]
    y_token = (y_ptr + sequence * Y_M + tokens * Y_S)[:, None, None]
    for first in range(0, HEADS, BLOCK_H):
        heads = first + tl.arange(0, BLOCK_H)
        there = real[:, None, None] & inside_row(heads, HEADS, HEADS % BLOCK_H == 0)[None, :, None]
        x_head = x_token + (heads.to(tl.int64) * X_H)[None, :, None]
        y_head = y_token + (heads.to(tl.int64) * Y_H)[None, :, None]
        if INTERLEAVED:
            columns = tl.arange(0, 2 * BLOCK_P)[None, None, :]
            inside = there & inside_row(columns, 2 * P, P == BLOCK_P)
            x = tl.load(x_head + columns, mask=inside, other=0.0).to(tl.float32)
            x1, x2 = tl.split(tl.reshape(x, [BLOCK_S, BLOCK_H, BLOCK_P, 2]))
            y1, y2 = _turn(x1, x2, cos, sin, BACK)
            y = tl.reshape(tl.join(y1, y2), [BLOCK_S, BLOCK_H, 2 * BLOCK_P])
            tl.store(y_head + columns, y, mask=inside)
        else:
            columns = tl.arange(0, BLOCK_P)[None, None, :]
            inside = there & inside_row(columns, P, P == BLOCK_P)
            x1 = tl.load(x_head + columns, mask=inside, other=0.0).to(tl.float32)
            x2 = tl.load(x_head + P + columns, mask=inside, other=0.0).to(tl.float32)
            y1, y2 = _turn(x1, x2, cos, sin, BACK)
            tl.store(y_head + columns, y1, mask=inside)
            tl.store(y_head + P + columns, y2, mask=inside)
        if BLOCK_R:
            columns = tl.arange(0, BLOCK_R)[None, None, :]
            inside = there & inside_row(columns, D - 2 * P, D - 2 * P == BLOCK_R)
            rest = tl.load(x_head + 2 * P + columns, mask=inside, other=0.0)
            tl.store(y_head + 2 * P + columns, rest, mask=inside)


@kernel
def _rope_kernel(
    cos_ptr, sin_ptr, q_ptr, k_ptr, q_out_ptr, k_out_ptr, M, S,
    COS_M, COS_S, SIN_M, SIN_S, Q_M, Q_S, Q_H, K_M, K_S, K_H, Q_OUT_M, Q_OUT_S, Q_OUT_H, K_OUT_M, K_OUT_S, K_OUT_H,
    HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, P: tl.constexpr, INTERLEAVED: tl.constexpr, BACK: tl.constexpr,
    ALIGN: tl.constexpr, TABLE_ALIGN: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_HQ: tl.constexpr, BLOCK_HK: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    COS_M, COS_S = aligned(COS_M, TABLE_ALIGN), aligned(COS_S, TABLE_ALIGN)
    SIN_M, SIN_S = aligned(SIN_M, TABLE_ALIGN), aligned(SIN_S, TABLE_ALIGN)
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_S + tl.arange(0, BLOCK_S)
    sequence = tl.program_id(1).to(tl.int64) + 65535 * tl.program_id(2)
    real = (tokens < S) & (sequence < M)
    cos = _angles(cos_ptr, sequence, tokens, real, COS_M, COS_S, P, BLOCK_P)
    sin = _angles(sin_ptr, sequence, tokens, real, SIN_M, SIN_S, P, BLOCK_P)
    if q_ptr is not None:
        Q_M, Q_S, Q_H = aligned(Q_M, ALIGN), aligned(Q_S, ALIGN), aligned(Q_H, ALIGN)
        Q_OUT_M, Q_OUT_S, Q_OUT_H = aligned(Q_OUT_M, ALIGN), aligned(Q_OUT_S, ALIGN), aligned(Q_OUT_H, ALIGN)
        _turn_heads(
            q_ptr, q_out_ptr, sequence, tokens, real, cos, sin, Q_M, Q_S, Q_H, Q_OUT_M, Q_OUT_S, Q_OUT_H,
            HQ, D, P, INTERLEAVED, BACK, BLOCK_S, BLOCK_HQ, BLOCK_P, BLOCK_R,
        )  # fmt: skip
    if k_ptr is not None:
        K_M, K_S, K_H = aligned(K_M, ALIGN), aligned(K_S, ALIGN), aligned(K_H, ALIGN)
        K_OUT_M, K_OUT_S, K_OUT_H = aligned(K_OUT_M, ALIGN), aligned(K_OUT_S, ALIGN), aligned(K_OUT_H, ALIGN)
        _turn_heads(
            k_ptr, k_out_ptr, sequence, tokens, real, cos, sin, K_M, K_S, K_H, K_OUT_M, K_OUT_S, K_OUT_H,
            HK, D, P, INTERLEAVED, BACK, BLOCK_S, BLOCK_HK, BLOCK_P, BLOCK_R,
        )  # fmt: skip


# ---- how tensors lie, and the tiles that follow ----


_Lies = tuple[tuple[int, ...], tuple[int, ...]]  # a tensor's shape and strides


def _token_strides(table: _Lies, tokens: tuple[int, ...]) -> tuple[int, ...]:
    """Of a table for all tokens: 0 along what it is broadcast over."""
    own = [0 if size == 1 else stride for size, stride in zip(table[0][:-1], table[1][:-1], strict=True)]
    return (0,) * (len(tokens) - len(own)) + tuple(own)


def _merged(tokens: tuple[int, ...], strides: list[tuple[int, ...]]) -> list[tuple[int, tuple[int, ...]]]:
    """The dimensions of tokens that are left where neighbours that lie evenly in every tensor are one: sizes, and all strides."""
    found: list[tuple[int, tuple[int, ...]]] = []
    for size, each in zip(tokens, zip(*strides, strict=True), strict=True):
        if size == 1:
            continue
        if found and all(outer == size * inner for outer, inner in zip(found[-1][1], each, strict=True)):
            found[-1] = found[-1][0] * size, each
        else:
            found.append((size, each))
    return found


class _Tiles(NamedTuple):
    block_s: int
    block_hq: int
    block_hk: int
    block_p: int
    block_r: int


_VALUES = 4096  # of a tile: 32 a thread


@lru_cache(1024)
def _tiles(HQ: int, HK: int, D: int, P: int) -> _Tiles:
    """Many heads at a time, unless a third of the lanes would then have none; and as many tokens as fill the tile."""
    block_p, rest = power_of_two(P), D - 2 * P
    block_r = power_of_two(rest) if rest else 0
    width = 2 * block_p + block_r
    heads = [H for H in (HQ, HK) if H]

    def lanes(block_h: int) -> int:
        return sum(ceil_div(H, block) * block for H in heads for block in [min(block_h, power_of_two(H))])

    most = max(1, min(power_of_two(max(heads)), _VALUES // width))
    choices = [1 << i for i in range(most.bit_length()) if 1 << i <= most]
    least = min(lanes(block_h) for block_h in choices)
    block_h = max(block_h for block_h in choices if 3 * lanes(block_h) <= 4 * least)
    block_hq, block_hk = (min(block_h, power_of_two(max(H, 1))) for H in (HQ, HK))
    tokens = max(1, _VALUES // (block_h * width))
    return _Tiles(1 << tokens.bit_length() - 1, block_hq, block_hk, block_p, block_r)


class _Plan(NamedTuple):
    grid: Grid
    launch: Bound
    M: int
    S: int


def _planned(
    q: Maybe, k: Maybe, cos: Tensor, sin: Tensor, interleaved: bool, back: bool, q_out: Maybe = None, k_out: Maybe = None
) -> _Plan | None:
    """The launch for tensors that lie as these do, or None where they can't be read in place. No q_out: it is contiguous."""
    outs = None if q_out is None and k_out is None else (_lies(q_out), _lies(k_out), q_out is q and k_out is k)
    return _plan(_lies(q), _lies(k), (cos.shape, cos.stride()), (sin.shape, sin.stride()), interleaved, back, outs)


def _lies(x: Maybe) -> _Lies | None:
    return None if x is None else (x.shape, x.stride())


@lru_cache(4096)
def _plan(
    q: _Lies | None, k: _Lies | None, cos: _Lies, sin: _Lies, interleaved: bool, back: bool,
    outs: tuple[_Lies | None, _Lies | None, bool] | None = None,
) -> _Plan | None:  # fmt: skip
    """outs: how the results lie, and whether that is q and k themselves, where what is not turned stays as it is."""
    given = [x for x in (q, k) if x is not None]
    shape = given[0][0]
    tokens, D, P = shape[:-2], shape[-1], cos[0][-1]
    if any(stride[-1] != 1 for _, stride in given) or (P > 1 and cos[1][-1] * sin[1][-1] != 1):
        return None
    of_outs = [_contiguous(size) for size, _ in given] if outs is None else [x[1] for x in outs[:2] if x is not None]
    all_heads = [*(stride for _, stride in given), *of_outs]
    strides = [_token_strides(table, tokens) for table in (cos, sin)] + [stride[:-2] for stride in all_heads]
    left = _merged(tokens, strides)
    if len(left) > 2:
        return None
    (M, by_sequence), (S, by_token) = [(1, (0,) * len(strides))] * (2 - len(left)) + left
    table_strides = by_sequence[0], by_token[0], by_sequence[1], by_token[1]
    of_heads = [(*each, stride[-2]) for *each, stride in zip(by_sequence[2:], by_token[2:], all_heads, strict=True)]
    head_strides = [of_heads.pop(0) if x is not None else (0, 0, 0) for x in (q, k) * 2]
    HQ, HK = (x[0][-2] if x is not None else 0 for x in (q, k))
    flat = tuple(stride for each in head_strides for stride in each)
    align = known_align(*flat), known_align(*table_strides)
    tiles = _tiles(HQ, HK, D, P)
    if outs is not None and outs[2]:
        tiles = tiles._replace(block_r=0)
    launch = _bind((*table_strides, *flat), HQ, HK, D, P, interleaved, back, align, tiles)
    return _Plan(grid_of(ceil_div(S, tiles.block_s), M), launch, M, S)


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    return tuple(prod(shape[i + 1 :]) for i in range(len(shape)))


@lru_cache(1024)
def _bind(
    strides: tuple[int, ...], HQ: int, HK: int, D: int, P: int, interleaved: bool, back: bool, align: tuple[int, int],
    tiles: _Tiles,
) -> Bound:  # fmt: skip
    bound: Bound = _rope_kernel.bind(*strides, HQ, HK, D, P, interleaved, back, *align, *tiles, num_warps=4)
    return bound


# ---- calls ----


def rotate(
    q: Maybe, k: Maybe, cos: Tensor, sin: Tensor, interleaved: bool, back: bool, out: tuple[Maybe, Maybe] | None = None
) -> tuple[Maybe, Maybe]:
    """q and k turned, or back; contiguous. What is None or has no numbers costs nothing.

    out: where they go instead, [B, S, heads, D] each, of any strides but the last, which is 1; q and k themselves will do.
    """
    q_out, k_out = (_new(q), _new(k)) if out is None else out
    some_q = q if q is not None and q.numel() else None
    some_k = k if k is not None and k.numel() else None
    if some_q is None and some_k is None:
        return q_out, k_out
    outs = None if some_q is None else q_out, None if some_k is None else k_out
    lie = () if out is None else outs
    while (plan := _planned(some_q, some_k, cos, sin, interleaved, back, *lie)) is None:
        some_q, some_k, cos, sin = _in_line(some_q, some_k, cos, sin)
    grid, launch, M, S = plan
    launch(grid, cos, sin, some_q, some_k, *outs, M, S)
    return q_out, k_out


def _new(x: Maybe) -> Maybe:
    return None if x is None else torch.empty_like(x, memory_format=torch.contiguous_format)


def _in_line(q: Maybe, k: Maybe, cos: Tensor, sin: Tensor) -> tuple[Maybe, Maybe, Tensor, Tensor]:
    """Copies of those whose last dimension is not contiguous; where all are, of all that keeps dimensions from merging."""
    if not (_in_rows(q) and _in_rows(k) and _in_rows(cos) and _in_rows(sin)):
        q, k = (x if x is None or _in_rows(x) else x.contiguous() for x in (q, k))
        cos, sin = (table if _in_rows(table) else table.contiguous() for table in (cos, sin))
        return q, k, cos, sin
    x = q if q is not None else k
    assert x is not None
    q, k = (x if x is None else x.contiguous() for x in (q, k))
    cos, sin = (table.expand(*x.shape[:-2], table.shape[-1]).contiguous() for table in (cos, sin))
    return q, k, cos, sin


def _in_rows(x: Maybe) -> bool:
    return x is None or x.stride(-1) == 1 or x.shape[-1] == 1


def rope_variant(q: Maybe, k: Maybe, cos: Tensor, sin: Tensor, interleaved: bool) -> str:
    """Which tiles a call has, and whether there are copies."""
    HQ, HK = (0 if x is None else x.shape[-2] for x in (q, k))
    x = q if q is not None else k
    assert x is not None
    tiles = _tiles(HQ, HK, x.shape[-1], cos.shape[-1])
    counts = [(tiles.block_hq, "q", q), (tiles.block_hk, "k", k)]
    heads = " and ".join(f"{min(count, x.shape[-2])} of {name}'s" for count, name, x in counts if x is not None)
    tokens = f"{tiles.block_s} token{'s' if tiles.block_s > 1 else ''}"
    said = f"one kernel, {tokens} a program, {heads} heads at a time"
    in_place = _planned(q, k, cos, sin, interleaved, False) is not None
    return said if in_place else f"{said}, after copies of what can't be read where it lies"


# ---- what tables must be ----


def check_tables(cos: Tensor, sin: Tensor, x: Tensor, tokens: tuple[int, ...], D: int, name: str) -> None:
    """Tables for x, named so: tokens are its dimensions down to its tokens, D is the width of a head."""
    _check_shape(tuple(cos.shape), tokens, D, name)
    if sin.shape != cos.shape:
        raise ValueError(f"sin must have cos's shape {tuple(cos.shape)}, but has {tuple(sin.shape)}")
    check_device("cos", cos, x, name)
    check_device("sin", sin, x, name)
    if needs_grad(cos, sin):
        table = "cos" if cos.requires_grad else "sin"
        raise ValueError(f"{table} must not require grad, as it gets none, but does: detach it")


def _check_shape(shape: tuple[int, ...], tokens: tuple[int, ...], D: int, name: str) -> None:
    if len(shape) < 2 or shape[-2] != tokens[-1]:
        raise ValueError(f"cos must have shape [..., {tokens[-1]}, R/2], a row for each of {name}'s tokens, but has {shape}")
    if not 1 <= shape[-1] <= D // 2:
        what = f"from 1 to {D // 2} numbers a token, one for each pair of a head's {D}"
        raise ValueError(f"cos must have {what} (a table with each number twice: one half of it), but has shape {shape}")
    lead = shape[:-2]
    if not lead:
        return
    against = tokens[len(tokens) - 1 - len(lead) : -1]
    if len(lead) >= len(tokens) or any(size not in (1, whole) for size, whole in zip(lead, against, strict=True)):
        what = f"leading dimensions that broadcast against {name}'s {tuple(tokens[:-1])}"
        raise ValueError(f"cos must have {what}, but has shape {shape}")
