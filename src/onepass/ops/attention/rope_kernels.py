"""rope's kernel and its launch: it rotates q and k at once, or one of them, or rotates their gradients back; with weights it
normalises each head first.

A program owns some tokens and all their heads, of q and k alike, so it reads their angles once and holds them in registers.
Tensors are read in place: each has a stride for sequences (M of them), for their tokens (S) and for heads. Leading dimensions
merge where all tensors allow it. Tensors are copied where more than two dimensions are left, or the last is not contiguous.
Results may overwrite q and k: a pair's result depends on that pair alone, which is read first.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onepass.kernels.language import device_function, tl
from onepass.kernels.launch import Bound, Grid, grid_of, kernel
from onepass.kernels.rows import aligned, inside_row, known_align
from onepass.ops.attention.rope_formula import QKNorm
from onepass.runtime.checks import check_device, check_eps, check_floating
from onepass.runtime.dispatch import needs_grad
from onepass.runtime.sizes import ceil_div, power_of_two
from onepass.runtime.units import counted

# ---- kernels: load, go to fp32 at once, store in the storage type ----


@device_function
def load_angles(table_ptr, sequence, tokens, real, TABLE_M, TABLE_S, P: tl.constexpr, BLOCK_P: tl.constexpr):
    """Load a table's rows of some tokens as fp32 [tokens, 1, pairs], which broadcasts over heads."""
    pairs = tl.arange(0, BLOCK_P)
    at = (sequence * TABLE_M + tokens * TABLE_S)[:, None, None] + pairs[None, None, :]
    inside = real[:, None, None] & inside_row(pairs, P, P == BLOCK_P)[None, None, :]
    return tl.load(table_ptr + at, mask=inside, other=0.0).to(tl.float32)


@device_function
def rotate_pair(x1, x2, cos, sin, BACK: tl.constexpr):
    """Rotate a pair. BACK: by the transpose, as a gradient needs; it is no inverse where cos and sin have a common factor.

    The fma is explicit: a compiler that chooses which product stays exact chooses another one for other strides.
    """
    if BACK:
        sin = -sin
    return tl.fma(x1, cos, -(x2 * sin)), tl.fma(x2, cos, x1 * sin)


@device_function
def load_pairs(
    x_head, there, P: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Load the first and the second elements of all pairs in fp32, [BLOCK_S, BLOCK_H, BLOCK_P] each, zeros outside."""
    if INTERLEAVED:
        columns = tl.arange(0, 2 * BLOCK_P)[None, None, :]
        inside = there & inside_row(columns, 2 * P, P == BLOCK_P)
        x = tl.load(x_head + columns, mask=inside, other=0.0).to(tl.float32)
        x1, x2 = tl.split(tl.reshape(x, [BLOCK_S, BLOCK_H, BLOCK_P, 2]))
    else:
        columns = tl.arange(0, BLOCK_P)[None, None, :]
        inside = there & inside_row(columns, P, P == BLOCK_P)
        x1 = tl.load(x_head + columns, mask=inside, other=0.0).to(tl.float32)
        x2 = tl.load(x_head + P + columns, mask=inside, other=0.0).to(tl.float32)
    return x1, x2


@device_function
def store_pairs(
    y_head, there, y1, y2, P: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    if INTERLEAVED:
        columns = tl.arange(0, 2 * BLOCK_P)[None, None, :]
        y = tl.reshape(tl.join(y1, y2), [BLOCK_S, BLOCK_H, 2 * BLOCK_P])
        tl.store(y_head + columns, y, mask=there & inside_row(columns, 2 * P, P == BLOCK_P))
    else:
        columns = tl.arange(0, BLOCK_P)[None, None, :]
        inside = there & inside_row(columns, P, P == BLOCK_P)
        tl.store(y_head + columns, y1, mask=inside)
        tl.store(y_head + P + columns, y2, mask=inside)


@device_function
def load_rest(x_head, there, D: tl.constexpr, P: tl.constexpr, BLOCK_R: tl.constexpr):
    """Load what lies past the pairs, as it is stored, zeros outside; one 0 where nothing does."""
    if BLOCK_R:
        columns = tl.arange(0, BLOCK_R)[None, None, :]
        inside = there & inside_row(columns, D - 2 * P, D - 2 * P == BLOCK_R)
        return tl.load(x_head + 2 * P + columns, mask=inside, other=0.0)
    else:
        return tl.zeros([1, 1, 1], tl.float32)


@device_function
def store_rest(y_head, there, rest, D: tl.constexpr, P: tl.constexpr, BLOCK_R: tl.constexpr):
    if BLOCK_R:
        columns = tl.arange(0, BLOCK_R)[None, None, :]
        tl.store(y_head + 2 * P + columns, rest, mask=there & inside_row(columns, D - 2 * P, D - 2 * P == BLOCK_R))


@device_function
def load_weight(
    weight_ptr, D: tl.constexpr, P: tl.constexpr, INTERLEAVED: tl.constexpr, CENTERED: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Load a norm's weight in fp32 as a head lies: its pairs, and what lies past them."""
    there = tl.full([1, 1, 1], True, tl.int1)
    weight1, weight2 = load_pairs(weight_ptr, there, P, INTERLEAVED, 1, 1, BLOCK_P)
    rest = load_rest(weight_ptr, there, D, P, BLOCK_R)
    if CENTERED:
        weight1, weight2 = weight1 + 1.0, weight2 + 1.0
    if BLOCK_R:
        rest = rest.to(tl.float32) + 1.0 if CENTERED else rest.to(tl.float32)
    return weight1, weight2, rest


@device_function
def rstd_of_heads(x1, x2, rest, eps, D: tl.constexpr, BLOCK_R: tl.constexpr):
    """Return 1 / sqrt(mean of squares + eps) of each head's row, [BLOCK_S, BLOCK_H, 1]."""
    squares = tl.sum(x1 * x1 + x2 * x2, 2)
    if BLOCK_R:
        squares += tl.sum(rest * rest, 2)
    return (1.0 / tl.sqrt(squares / D + eps))[:, :, None]


@device_function
def _rotate_heads(
    x_ptr, y_ptr, weight_ptr, sequence, tokens, real, cos, sin, eps, X_M, X_S, X_H, Y_M, Y_S, Y_H,
    HEADS: tl.constexpr, D: tl.constexpr, P: tl.constexpr, INTERLEAVED: tl.constexpr, BACK: tl.constexpr,
    CENTERED: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Rotate all heads of some tokens, BLOCK_H at a time; with a weight normalise them first."""
    x_token = (x_ptr + sequence * X_M + tokens * X_S)[:, None, None]
    y_token = (y_ptr + sequence * Y_M + tokens * Y_S)[:, None, None]
    if weight_ptr is not None:
        weight1, weight2, weight_rest = load_weight(weight_ptr, D, P, INTERLEAVED, CENTERED, BLOCK_P, BLOCK_R)
    for first in range(0, HEADS, BLOCK_H):
        heads = first + tl.arange(0, BLOCK_H)
        there = real[:, None, None] & inside_row(heads, HEADS, HEADS % BLOCK_H == 0)[None, :, None]
        x_head = x_token + (heads.to(tl.int64) * X_H)[None, :, None]
        y_head = y_token + (heads.to(tl.int64) * Y_H)[None, :, None]
        x1, x2 = load_pairs(x_head, there, P, INTERLEAVED, BLOCK_S, BLOCK_H, BLOCK_P)
        rest = load_rest(x_head, there, D, P, BLOCK_R)
        if weight_ptr is not None:
            if BLOCK_R:
                rest = rest.to(tl.float32)
            rstd = rstd_of_heads(x1, x2, rest, eps, D, BLOCK_R)
            x1, x2 = x1 * rstd * weight1, x2 * rstd * weight2
            if BLOCK_R:
                rest = rest * rstd * weight_rest
        y1, y2 = rotate_pair(x1, x2, cos, sin, BACK)
        store_pairs(y_head, there, y1, y2, P, INTERLEAVED, BLOCK_S, BLOCK_H, BLOCK_P)
        store_rest(y_head, there, rest, D, P, BLOCK_R)


@kernel
def _rope_kernel(
    cos_ptr, sin_ptr, q_ptr, k_ptr, q_out_ptr, k_out_ptr, q_weight_ptr, k_weight_ptr, M, S,
    COS_M, COS_S, SIN_M, SIN_S, Q_M, Q_S, Q_H, K_M, K_S, K_H, Q_OUT_M, Q_OUT_S, Q_OUT_H, K_OUT_M, K_OUT_S, K_OUT_H, eps,
    HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, P: tl.constexpr, INTERLEAVED: tl.constexpr, BACK: tl.constexpr,
    CENTERED: tl.constexpr, ALIGN: tl.constexpr, TABLE_ALIGN: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_HQ: tl.constexpr, BLOCK_HK: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    COS_M, COS_S = aligned(COS_M, TABLE_ALIGN), aligned(COS_S, TABLE_ALIGN)
    SIN_M, SIN_S = aligned(SIN_M, TABLE_ALIGN), aligned(SIN_S, TABLE_ALIGN)
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_S + tl.arange(0, BLOCK_S)
    sequence = tl.program_id(1).to(tl.int64) + 65535 * tl.program_id(2)
    real = (tokens < S) & (sequence < M)
    cos = load_angles(cos_ptr, sequence, tokens, real, COS_M, COS_S, P, BLOCK_P)
    sin = load_angles(sin_ptr, sequence, tokens, real, SIN_M, SIN_S, P, BLOCK_P)
    if q_ptr is not None:
        Q_M, Q_S, Q_H = aligned(Q_M, ALIGN), aligned(Q_S, ALIGN), aligned(Q_H, ALIGN)
        Q_OUT_M, Q_OUT_S, Q_OUT_H = aligned(Q_OUT_M, ALIGN), aligned(Q_OUT_S, ALIGN), aligned(Q_OUT_H, ALIGN)
        _rotate_heads(
            q_ptr, q_out_ptr, q_weight_ptr, sequence, tokens, real, cos, sin, eps, Q_M, Q_S, Q_H, Q_OUT_M, Q_OUT_S, Q_OUT_H,
            HQ, D, P, INTERLEAVED, BACK, CENTERED, BLOCK_S, BLOCK_HQ, BLOCK_P, BLOCK_R,
        )  # fmt: skip
    if k_ptr is not None:
        K_M, K_S, K_H = aligned(K_M, ALIGN), aligned(K_S, ALIGN), aligned(K_H, ALIGN)
        K_OUT_M, K_OUT_S, K_OUT_H = aligned(K_OUT_M, ALIGN), aligned(K_OUT_S, ALIGN), aligned(K_OUT_H, ALIGN)
        _rotate_heads(
            k_ptr, k_out_ptr, k_weight_ptr, sequence, tokens, real, cos, sin, eps, K_M, K_S, K_H, K_OUT_M, K_OUT_S, K_OUT_H,
            HK, D, P, INTERLEAVED, BACK, CENTERED, BLOCK_S, BLOCK_HK, BLOCK_P, BLOCK_R,
        )  # fmt: skip


# ---- layouts, and the tiles that follow from them ----


Layout = tuple[tuple[int, ...], tuple[int, ...]]  # a tensor's shape and strides


def _token_strides(table: Layout, tokens: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a table over all dimensions of tokens: 0 where it is broadcast."""
    own = [0 if size == 1 else stride for size, stride in zip(table[0][:-1], table[1][:-1], strict=True)]
    return (0,) * (len(tokens) - len(own)) + tuple(own)


def _merge_dims(tokens: tuple[int, ...], strides: list[tuple[int, ...]]) -> list[tuple[int, tuple[int, ...]]]:
    """Merge neighbouring dimensions of tokens that are contiguous in every tensor. Return sizes, and each one's strides."""
    merged: list[tuple[int, tuple[int, ...]]] = []
    for size, each in zip(tokens, zip(*strides, strict=True), strict=True):
        if size == 1:
            continue
        if merged and all(outer == size * inner for outer, inner in zip(merged[-1][1], each, strict=True)):
            merged[-1] = merged[-1][0] * size, each
        else:
            merged.append((size, each))
    return merged


class TokenLayout(NamedTuple):
    """Tokens as the two dimensions that all tensors of a call share, and each tensor's strides over them."""

    M: int  # sequences
    S: int  # tokens of each
    tables: tuple[int, int, int, int]  # cos's strides over M and S, and sin's
    heads: tuple[tuple[int, int, int], ...]  # strides over M, S and heads; zeros for what is None

    @property
    def aligns(self) -> tuple[int, int]:
        return known_align(*self.flat), known_align(*self.tables)

    @property
    def flat(self) -> tuple[int, ...]:
        return tuple(stride for each in self.heads for stride in each)


def token_layout(heads: tuple[Layout | None, ...], cos: Layout, sin: Layout) -> TokenLayout | None:
    """Return where tensors of heads and the tables lie, or None where they can't be read in place."""
    present = [x for x in heads if x is not None]
    tokens, P = present[0][0][:-2], cos[0][-1]
    if any(stride[-1] != 1 for _, stride in present) or (P > 1 and cos[1][-1] * sin[1][-1] != 1):
        return None
    strides = [_token_strides(table, tokens) for table in (cos, sin)] + [stride[:-2] for _, stride in present]
    left = _merge_dims(tokens, strides)
    if len(left) > 2:
        return None
    (M, by_sequence), (S, by_token) = [(1, (0,) * len(strides))] * (2 - len(left)) + left
    of_heads = [(*each, x[1][-2]) for *each, x in zip(by_sequence[2:], by_token[2:], present, strict=True)]
    each_head: Any = tuple(of_heads.pop(0) if x is not None else (0, 0, 0) for x in heads)
    return TokenLayout(M, S, (by_sequence[0], by_token[0], by_sequence[1], by_token[1]), each_head)


class RopeTiles(NamedTuple):
    block_s: int
    block_hq: int
    block_hk: int
    block_p: int
    block_r: int


_VALUES = 4096  # elements of a tile: 32 a thread


@lru_cache(1024)
def rope_tiles(HQ: int, HK: int, D: int, P: int, share: int = 1) -> RopeTiles:
    """Tiles of many heads, unless a third of the lanes would then be idle, and of as many tokens as fill them.

    share: so many are as large together.
    """
    block_p, rest = power_of_two(P), D - 2 * P
    block_r = power_of_two(rest) if rest else 0
    width = 2 * block_p + block_r
    heads = [H for H in (HQ, HK) if H]

    def lanes(block_h: int) -> int:
        return sum(ceil_div(H, block) * block for H in heads for block in [min(block_h, power_of_two(H))])

    most = max(1, min(power_of_two(max(heads)), _VALUES // share // width))
    choices = [1 << i for i in range(most.bit_length()) if 1 << i <= most]
    least = min(lanes(block_h) for block_h in choices)
    block_h = max(block_h for block_h in choices if 3 * lanes(block_h) <= 4 * least)
    block_hq, block_hk = (min(block_h, power_of_two(max(H, 1))) for H in (HQ, HK))
    tokens = max(1, _VALUES // share // (block_h * width))
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
    norm: QKNorm | None = None,
) -> _RopePlan | None:
    """Return the launch for these layouts, or None where tensors can't be read in place. No q_out, k_out: both are contiguous."""
    outs = None if q_out is None and k_out is None else (layout_of(q_out), layout_of(k_out), q_out is q and k_out is k)
    normed = None if norm is None else (norm.eps, norm.zero_centered_gamma)
    return _plan(
        layout_of(q), layout_of(k), (cos.shape, cos.stride()), (sin.shape, sin.stride()), interleaved, back, outs, normed
    )


def layout_of(x: Tensor | None) -> Layout | None:
    return None if x is None else (x.shape, x.stride())


@lru_cache(4096)
def _plan(
    q: Layout | None, k: Layout | None, cos: Layout, sin: Layout, interleaved: bool, back: bool,
    outs: tuple[Layout | None, Layout | None, bool] | None = None, normed: tuple[float, bool] | None = None,
) -> _RopePlan | None:  # fmt: skip
    """outs: the results' layouts, and whether they are q and k themselves, in which the rest of a head needs no copy.

    normed: a norm's eps, and whether its weights are zero-centred.
    """
    q_out, k_out = (_contiguous_like(q), _contiguous_like(k)) if outs is None else outs[:2]
    layout = token_layout((q, k, q_out, k_out), cos, sin)
    if layout is None:
        return None
    HQ, HK = (x[0][-2] if x is not None else 0 for x in (q, k))
    some = q or k
    assert some is not None
    D, P = some[0][-1], cos[0][-1]
    tiles = rope_tiles(HQ, HK, D, P)
    if outs is not None and outs[2] and normed is None:
        tiles = tiles._replace(block_r=0)
    eps, centered = normed or (0.0, False)
    fixed = HQ, HK, D, P, interleaved, back, centered, *layout.aligns, *tiles
    launch = _bind((*layout.tables, *layout.flat), eps, *fixed)
    return _RopePlan(grid_of(ceil_div(layout.S, tiles.block_s), layout.M), launch, layout.M, layout.S)


def _contiguous_like(x: Layout | None) -> Layout | None:
    return None if x is None else (x[0], tuple(prod(x[0][i + 1 :]) for i in range(len(x[0]))))


@lru_cache(1024)
def _bind(strides: tuple[int, ...], *fixed: Any) -> Bound:
    bound: Bound = _rope_kernel.bind(*strides, *fixed, num_warps=4)
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
    norm: QKNorm | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """Return q and k rotated, or rotated back, contiguous. A tensor that is None or empty costs nothing.

    out: where the results go instead, [B, S, heads, D] each, with last strides of 1; they may be q and k themselves.
    norm: normalises heads before they are rotated.
    """
    q_out, k_out = (empty_like(q), empty_like(k)) if out is None else out
    some_q = q if q is not None and q.numel() else None
    some_k = k if k is not None and k.numel() else None
    if some_q is None and some_k is None:
        return q_out, k_out
    outs = None if some_q is None else q_out, None if some_k is None else k_out
    placed = (None, None) if out is None else outs
    while (plan := _cached_plan(some_q, some_k, cos, sin, interleaved, back, *placed, norm)) is None:
        (some_q, some_k), cos, sin = readable((some_q, some_k), cos, sin)
    grid, launch, M, S = plan
    weights = (None, None) if norm is None else norm[:2]
    launch(grid, cos, sin, some_q, some_k, *outs, *weights, M, S)
    return q_out, k_out


def empty_like(x: Tensor | None) -> Tensor | None:
    return None if x is None else torch.empty_like(x, memory_format=torch.contiguous_format)


def readable(xs: tuple[Tensor | None, ...], cos: Tensor, sin: Tensor) -> tuple[tuple[Tensor | None, ...], Tensor, Tensor]:
    """Copy tensors whose last dimension is not contiguous; if there are none, copy all so that dimensions merge."""
    if not all(map(_has_contiguous_rows, (*xs, cos, sin))):
        xs = tuple(x if x is None or _has_contiguous_rows(x) else x.contiguous() for x in xs)
        cos, sin = (table if _has_contiguous_rows(table) else table.contiguous() for table in (cos, sin))
        return xs, cos, sin
    x = next(x for x in xs if x is not None)
    cos, sin = (table.expand(*x.shape[:-2], table.shape[-1]).contiguous() for table in (cos, sin))
    return tuple(x if x is None else x.contiguous() for x in xs), cos, sin


def _has_contiguous_rows(x: Tensor | None) -> bool:
    return x is None or x.stride(-1) == 1 or x.shape[-1] == 1


def rope_variant(q: Tensor | None, k: Tensor | None, cos: Tensor, sin: Tensor, interleaved: bool) -> str:
    """Which tiles a call has, and whether tensors are copied."""
    HQ, HK = (0 if x is None else x.shape[-2] for x in (q, k))
    x = q if q is not None else k
    assert x is not None
    tiles = rope_tiles(HQ, HK, x.shape[-1], cos.shape[-1])
    counts = [(tiles.block_hq, "q", q), (tiles.block_hk, "k", k)]
    heads = " and ".join(f"{min(count, x.shape[-2])} of {name}'s" for count, name, x in counts if x is not None)
    tokens = counted(tiles.block_s, "token")
    description = f"one kernel, {tokens} a program, {heads} heads at a time"
    in_place = _cached_plan(q, k, cos, sin, interleaved, False) is not None
    return description if in_place else f"{description}, after copies of what can't be read where it lies"


# ---- checks of the tables and the weights ----


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


def check_weights(
    q_weight: Tensor | None, k_weight: Tensor | None, eps: float, zero_centered_gamma: bool, x: Tensor, D: int, name: str
) -> None:
    """Raise unless the norm's weights fit x, called `name`, whose heads have D elements."""
    if q_weight is None or k_weight is None:
        if q_weight is not None or k_weight is not None:
            missing, other = ("q_weight", "k_weight") if q_weight is None else ("k_weight", "q_weight")
            raise ValueError(f"{missing} must be given where {other} is, but is None")
        if zero_centered_gamma:
            raise ValueError("zero_centered_gamma says how q_weight and k_weight are kept, but they are None")
        return
    check_eps(eps)
    for of, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        check_floating(of, weight)
        if weight.shape != (D,):
            raise ValueError(f"{of} must have shape ({D},), as a head of {name}, but has {tuple(weight.shape)}")
        check_device(of, weight, x, name)
