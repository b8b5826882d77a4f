"""rope's kernel and its launch: it turns q and k at once, or one of them, or turns their gradients back.

A program owns some tokens and all their heads, of q and k alike, so it reads their angles once and holds them in registers.
Tensors are read in place: each has a stride for sequences (M of them), for their tokens (S) and for heads. Leading dimensions
merge where all tensors allow it. Tensors are copied where more than two dimensions are left, or the last is not contiguous.
Results may overwrite q and k: a pair's result depends on that pair alone, which is read first.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from onepass.kernels.language import device_function, tl
from onepass.kernels.launch import Bound, Grid, grid_of, kernel
from onepass.kernels.rows import aligned, inside_row, known_align
from onepass.runtime.checks import check_device
from onepass.runtime.dispatch import needs_grad
from onepass.runtime.sizes import ceil_div, power_of_two

# ---- kernels: load, go to fp32 at once, store in the storage type ----


@device_function
def _angles(table_ptr, sequence, tokens, real, TABLE_M, TABLE_S, P: tl.constexpr, BLOCK_P: tl.constexpr):
    """Load a table's rows of some tokens as fp32 [tokens, 1, pairs], which broadcasts over heads."""
    pairs = tl.arange(0, BLOCK_P)
    at = (sequence * TABLE_M + tokens * TABLE_S)[:, None, None] + pairs[None, None, :]
    inside = real[:, None, None] & inside_row(pairs, P, P == BLOCK_P)[None, None, :]
    return tl.load(table_ptr + at, mask=inside, other=0.0).to(tl.float32)


@device_function
def _turn(x1, x2, cos, sin, BACK: tl.constexpr):
    """Turn a pair. BACK: by the transpose, as a gradient needs; it is no inverse where cos and sin have a common factor.

    The fma is explicit: a compiler that chooses which product stays exact chooses another one for other strides.
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
    """Turn all heads of some tokens, BLOCK_H at a time."""
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


# ---- layouts, and the tiles that follow from them ----


_Layout = tuple[tuple[int, ...], tuple[int, ...]]  # a tensor's shape and strides


def _token_strides(table: _Layout, tokens: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a table over all dimensions of tokens: 0 where it is broadcast."""
    own = [0 if size == 1 else stride for size, stride in zip(table[0][:-1], table[1][:-1], strict=True)]
    return (0,) * (len(tokens) - len(own)) + tuple(own)


def _merge_dims(tokens: tuple[int, ...], strides: list[tuple[int, ...]]) -> list[tuple[int, tuple[int, ...]]]:
    """Merge neighbouring dimensions of tokens that are contiguous in every tensor. Return sizes, and each one's strides."""
    found: list[tuple[int, tuple[int, ...]]] = []
    for size, each in zip(tokens, zip(*strides, strict=True), strict=True):
        if size == 1:
            continue
        if found and all(outer == size * inner for outer, inner in zip(found[-1][1], each, strict=True)):
            found[-1] = found[-1][0] * size, each
        else:
            found.append((size, each))
    return found


class RopeTiles(NamedTuple):
    block_s: int
    block_hq: int
    block_hk: int
    block_p: int
    block_r: int


_VALUES = 4096  # elements of a tile: 32 a thread


@lru_cache(1024)
def _tiles(HQ: int, HK: int, D: int, P: int) -> RopeTiles:
    """Tiles of many heads, unless a third of the lanes would then be idle, and of as many tokens as fill them."""
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
    return RopeTiles(1 << tokens.bit_length() - 1, block_hq, block_hk, block_p, block_r)


class _RopePlan(NamedTuple):
    grid: Grid
    launch: Bound
    M: int
    S: int


def _cached_plan(
    q: Tensor | None,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    back: bool,
    q_out: Tensor | None = None,
    k_out: Tensor | None = None,
) -> _RopePlan | None:
    """Return the launch for these layouts, or None where tensors can't be read in place. No q_out, k_out: both are contiguous."""
    outs = None if q_out is None and k_out is None else (_layout(q_out), _layout(k_out), q_out is q and k_out is k)
    return _plan(_layout(q), _layout(k), (cos.shape, cos.stride()), (sin.shape, sin.stride()), interleaved, back, outs)


def _layout(x: Tensor | None) -> _Layout | None:
    return None if x is None else (x.shape, x.stride())


@lru_cache(4096)
def _plan(
    q: _Layout | None, k: _Layout | None, cos: _Layout, sin: _Layout, interleaved: bool, back: bool,
    outs: tuple[_Layout | None, _Layout | None, bool] | None = None,
) -> _RopePlan | None:  # fmt: skip
    """outs: the results' layouts, and whether they are q and k themselves, in which the rest of a head needs no copy."""
    given = [x for x in (q, k) if x is not None]
    shape = given[0][0]
    tokens, D, P = shape[:-2], shape[-1], cos[0][-1]
    if any(stride[-1] != 1 for _, stride in given) or (P > 1 and cos[1][-1] * sin[1][-1] != 1):
        return None
    of_outs = [_contiguous_strides(size) for size, _ in given] if outs is None else [x[1] for x in outs[:2] if x is not None]
    all_heads = [*(stride for _, stride in given), *of_outs]
    strides = [_token_strides(table, tokens) for table in (cos, sin)] + [stride[:-2] for stride in all_heads]
    left = _merge_dims(tokens, strides)
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
    return _RopePlan(grid_of(ceil_div(S, tiles.block_s), M), launch, M, S)


def _contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(prod(shape[i + 1 :]) for i in range(len(shape)))


@lru_cache(1024)
def _bind(
    strides: tuple[int, ...], HQ: int, HK: int, D: int, P: int, interleaved: bool, back: bool, align: tuple[int, int],
    tiles: RopeTiles,
) -> Bound:  # fmt: skip
    bound: Bound = _rope_kernel.bind(*strides, HQ, HK, D, P, interleaved, back, *align, *tiles, num_warps=4)
    return bound


# ---- calls ----


def rotate(
    cos: Tensor,
    sin: Tensor,
    q: Tensor | None,
    k: Tensor | None,
    interleaved: bool,
    back: bool,
    out: tuple[Tensor | None, Tensor | None] | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """Return q and k turned, or turned back, contiguous. A tensor that is None or empty costs nothing.

    out: where the results go instead, [B, S, heads, D] each, with last strides of 1; they may be q and k themselves.
    """
    q_out, k_out = (_empty(q), _empty(k)) if out is None else out
    some_q = q if q is not None and q.numel() else None
    some_k = k if k is not None and k.numel() else None
    if some_q is None and some_k is None:
        return q_out, k_out
    outs = None if some_q is None else q_out, None if some_k is None else k_out
    placed = () if out is None else outs
    while (plan := _cached_plan(some_q, some_k, cos, sin, interleaved, back, *placed)) is None:
        some_q, some_k, cos, sin = _copies(some_q, some_k, cos, sin)
    grid, launch, M, S = plan
    launch(grid, cos, sin, some_q, some_k, *outs, M, S)
    return q_out, k_out


def _empty(x: Tensor | None) -> Tensor | None:
    return None if x is None else torch.empty_like(x, memory_format=torch.contiguous_format)


def _copies(q: Tensor | None, k: Tensor | None, cos: Tensor, sin: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor]:
    """Copy tensors whose last dimension is not contiguous; if there are none, copy all so that dimensions merge."""
    if not (_has_contiguous_rows(q) and _has_contiguous_rows(k) and _has_contiguous_rows(cos) and _has_contiguous_rows(sin)):
        q, k = (x if x is None or _has_contiguous_rows(x) else x.contiguous() for x in (q, k))
        cos, sin = (table if _has_contiguous_rows(table) else table.contiguous() for table in (cos, sin))
        return q, k, cos, sin
    x = q if q is not None else k
    assert x is not None
    q, k = (x if x is None else x.contiguous() for x in (q, k))
    cos, sin = (table.expand(*x.shape[:-2], table.shape[-1]).contiguous() for table in (cos, sin))
    return q, k, cos, sin


def _has_contiguous_rows(x: Tensor | None) -> bool:
    return x is None or x.stride(-1) == 1 or x.shape[-1] == 1


def rope_variant(q: Tensor | None, k: Tensor | None, cos: Tensor, sin: Tensor, interleaved: bool) -> str:
    """Which tiles a call has, and whether tensors are copied."""
    HQ, HK = (0 if x is None else x.shape[-2] for x in (q, k))
    x = q if q is not None else k
    assert x is not None
    tiles = _tiles(HQ, HK, x.shape[-1], cos.shape[-1])
    counts = [(tiles.block_hq, "q", q), (tiles.block_hk, "k", k)]
    heads = " and ".join(f"{min(count, x.shape[-2])} of {name}'s" for count, name, x in counts if x is not None)
    tokens = f"{tiles.block_s} token{'s' if tiles.block_s > 1 else ''}"
    said = f"one kernel, {tokens} a program, {heads} heads at a time"
    in_place = _cached_plan(q, k, cos, sin, interleaved, False) is not None
    return said if in_place else f"{said}, after copies of what can't be read where it lies"


# ---- checks of the tables ----


def check_tables(cos: Tensor, sin: Tensor, x: Tensor, tokens: tuple[int, ...], D: int, name: str) -> None:
    """Raise unless cos and sin fit x, called `name`. `tokens`: its dimensions up to its tokens. D: a head's width."""
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
