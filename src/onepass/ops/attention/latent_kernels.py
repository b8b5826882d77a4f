"""latent_attention's kernel beside attention's: it arranges projections as heads, and heads' gradients as the projections'.

A program owns some tokens and all their heads. Forward rotates each head's part of q and the part of k that all heads share,
which it reads once, and writes q, k and v as attention's kernels take them. Backward sums the gradients of the shared part over
heads in a fixed order, in fp32, and rotates the sum back once.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from torch import Tensor

from onepass.kernels.language import device_function, tl
from onepass.kernels.launch import Bound, kernel
from onepass.kernels.layout import as_rows
from onepass.kernels.rows import inside_row
from onepass.ops.attention.formula import Parts
from onepass.ops.attention.rope_kernels import load_angles, load_pairs, rotate, rotate_pair, store_pairs
from onepass.runtime.sizes import ceil_div, power_of_two


@device_function
def _copy(x_head, y_head, there, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)[None, None, :]
    inside = there & inside_row(columns, SIZE, SIZE == BLOCK)
    tl.store(y_head + columns, tl.load(x_head + columns, mask=inside), mask=inside)


@kernel
def _arrange_kernel(
    keys_ptr, values_ptr, queries_ptr, q_ptr, kv_ptr, k_rope_ptr, cos_ptr, sin_ptr, M, ROWS, Q_ROW, ROPE_ROW,
    HEADS: tl.constexpr, NOPE: tl.constexpr, P: tl.constexpr, V: tl.constexpr, INTERLEAVED: tl.constexpr, BACK: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Arrange M tokens, whose tables begin again every ROWS. BACK: gradients of queries are rotated in place, those of keys and
    values go to kv and k_rope. What is None is left out."""
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_S + tl.arange(0, BLOCK_S)
    real = tokens < M
    token = real[:, None, None]
    if cos_ptr is not None:
        cos = load_angles(cos_ptr, 0, tokens % ROWS, real, 0, P, P, BLOCK_P)
        sin = load_angles(sin_ptr, 0, tokens % ROWS, real, 0, P, P, BLOCK_P)
    if BACK:
        k1, k2 = tl.zeros([BLOCK_S, 1, BLOCK_P], tl.float32), tl.zeros([BLOCK_S, 1, BLOCK_P], tl.float32)
    else:
        k1, k2 = load_pairs(k_rope_ptr + (tokens * ROPE_ROW)[:, None, None], token, P, INTERLEAVED, BLOCK_S, 1, BLOCK_P)
        if cos_ptr is not None:
            k1, k2 = rotate_pair(k1, k2, cos, sin, False)
    for first in range(0, HEADS, BLOCK_H):
        heads = first + tl.arange(0, BLOCK_H)
        there = token & inside_row(heads, HEADS, HEADS % BLOCK_H == 0)[None, :, None]
        head = tokens[:, None, None] * HEADS + heads[None, :, None]
        at, at_kv, at_v = head * (NOPE + 2 * P), head * (NOPE + V), head * V
        at_q = tokens[:, None, None] * Q_ROW + heads[None, :, None] * (NOPE + 2 * P)
        if q_ptr is not None:
            x1, x2 = load_pairs(q_ptr + at_q + NOPE, there, P, INTERLEAVED, BLOCK_S, BLOCK_H, BLOCK_P)
            if cos_ptr is not None:
                x1, x2 = rotate_pair(x1, x2, cos, sin, BACK)
            store_pairs(queries_ptr + at + NOPE, there, x1, x2, P, INTERLEAVED, BLOCK_S, BLOCK_H, BLOCK_P)
            if not BACK:
                _copy(q_ptr + at_q, queries_ptr + at, there, NOPE, BLOCK_N)
        if BACK:
            x1, x2 = load_pairs(keys_ptr + at + NOPE, there, P, INTERLEAVED, BLOCK_S, BLOCK_H, BLOCK_P)
            k1 += tl.sum(x1, 1)[:, None, :]
            k2 += tl.sum(x2, 1)[:, None, :]
            if kv_ptr is not None:
                _copy(keys_ptr + at, kv_ptr + at_kv, there, NOPE, BLOCK_N)
                if values_ptr is not None:
                    _copy(values_ptr + at_v, kv_ptr + at_kv + NOPE, there, V, BLOCK_V)
        else:
            x1 = tl.broadcast_to(k1, [BLOCK_S, BLOCK_H, BLOCK_P])
            x2 = tl.broadcast_to(k2, [BLOCK_S, BLOCK_H, BLOCK_P])
            store_pairs(keys_ptr + at + NOPE, there, x1, x2, P, INTERLEAVED, BLOCK_S, BLOCK_H, BLOCK_P)
            _copy(kv_ptr + at_kv, keys_ptr + at, there, NOPE, BLOCK_N)
            _copy(kv_ptr + at_kv + NOPE, values_ptr + at_v, there, V, BLOCK_V)
    if BACK and k_rope_ptr is not None:
        if cos_ptr is not None:
            k1, k2 = rotate_pair(k1, k2, cos, sin, True)
        store_pairs(k_rope_ptr + (tokens * ROPE_ROW)[:, None, None], token, k1, k2, P, INTERLEAVED, BLOCK_S, 1, BLOCK_P)


# ---- tiles, and calls ----


class ArrangeTiles(NamedTuple):
    block_s: int  # tokens
    block_h: int  # heads at a time
    block_n: int
    block_p: int
    block_v: int


_VALUES = 4096  # elements of the widest part of a tile: 32 a thread


@lru_cache(256)
def arrange_tiles(heads: int, nope: int, pairs: int, values: int) -> ArrangeTiles:
    widths = power_of_two(nope), power_of_two(pairs), power_of_two(values)
    most = max(1, _VALUES // max(widths[0], 2 * widths[1], widths[2]))
    block_h = min(power_of_two(heads), most)
    return ArrangeTiles(max(1, most // block_h), block_h, *widths)


class LatentSizes(NamedTuple):
    """Sizes of a call's heads, and which elements are a pair."""

    heads: int
    nope: int
    pairs: int
    values: int
    interleaved: bool

    @property
    def width(self) -> int:
        """Of queries and keys."""
        return self.nope + 2 * self.pairs


@lru_cache(1024)
def _bind(sizes: LatentSizes, rows: tuple[int, int], back: bool) -> tuple[Bound, int]:
    """rows: distances from token to token of q and of k_rope."""
    tiles = arrange_tiles(*sizes[:4])
    bound: Bound = _arrange_kernel.bind(*rows, *sizes, back, *tiles)
    return bound, tiles.block_s


def arrange(q: Tensor, kv: Tensor, k_rope: Tensor, cos: Tensor | None, sin: Tensor | None, sizes: LatentSizes) -> Parts:
    """Return q and k [B, S, heads, nope + rope] with the last elements rotated, and v [B, S, heads, values]; contiguous."""
    B, S, H, _ = q.shape
    queries, keys = (q.new_empty(B, S, H, sizes.width) for _ in range(2))
    values = q.new_empty(B, S, H, sizes.values)
    (q, q_row), (k_rope, rope_row) = as_rows(q.flatten(2)), as_rows(k_rope)  # slices of a product are read where they lie
    launch, block = _bind(sizes, (q_row, rope_row), False)
    given = keys, values, queries, q, kv.contiguous(), k_rope
    launch((ceil_div(B * S, block), 1, 1), *given, *_tables(cos, sin), B * S, _rows(cos, S))
    return queries, keys, values


class LatentGradients(NamedTuple):
    """Gradients of heads, which are contiguous. None: nobody asks for it; without dv it lies in dkv already."""

    dq: Tensor | None
    dk: Tensor | None
    dv: Tensor | None


def arrange_back(
    of_heads: LatentGradients,
    cos: Tensor | None,
    sin: Tensor | None,
    sizes: LatentSizes,
    dkv: Tensor | None,
    dk_rope: Tensor | None,
) -> None:
    """Rotate dq back in place. Write dkv, contiguous heads of both parts, and dk_rope."""
    dq, dk, dv = of_heads
    if dk is None:
        if dq is not None and cos is not None and sin is not None:
            rotating = dq[..., sizes.nope :]
            rotate(cos, sin, rotating, None, sizes.interleaved, True, (rotating, None))
        return
    B, S = dk.shape[:2]
    launch, block = _bind(sizes, (sizes.heads * sizes.width, 2 * sizes.pairs), True)
    given = dk, dv, dq, dq, dkv, dk_rope
    launch((ceil_div(B * S, block), 1, 1), *given, *_tables(cos, sin), B * S, _rows(cos, S))


def _tables(cos: Tensor | None, sin: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if cos is None or sin is None else (cos.contiguous(), sin.contiguous())


def _rows(cos: Tensor | None, S: int) -> int:
    """Return after how many tokens the tables begin again."""
    return S if cos is None else cos.numel() // cos.shape[-1]
