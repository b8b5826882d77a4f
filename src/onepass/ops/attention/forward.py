"""Attention's forward kernel and its launch.

A program owns BLOCK_M queries of one head and loops over the keys that they see, BLOCK_N at a time, with the softmax's running
maximum and sum. Causal without a window: those up to its last query. Tensors are read in place: [B, S, heads, D], each with its
own strides except for the last, which is 1.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from onepass.kernels.language import device_function, tl
from onepass.kernels.launch import Bound, grid_of, kernel
from onepass.ops.attention.document_kernels import document_tiles
from onepass.ops.attention.formula import AttentionOptions, empty_tokens
from onepass.ops.attention.scores import (
    EDGE,
    INSIDE,
    LEFT_EDGE,
    ScoreScales,
    capped,
    document_tile,
    key_ranges,
    load_tokens,
    scales_of,
    sees,
    store_tokens,
)
from onepass.runtime.sizes import ceil_div, power_of_two, shared_memory


@device_function
def _mix(
    m, total, y, q, k_head, v_head, first, queries, end, qk_scale, cap_scale, K_S, V_S,
    D: tl.constexpr, W: tl.constexpr, DV: tl.constexpr, WV: tl.constexpr, BLOCK_N: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, CAPPED: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Add a block of keys and values to the running maximum m (in units of log 2), sum and result."""
    k = load_tokens(k_head, first, K_S, end, D, W, BLOCK_N, KIND != EDGE)
    scores = capped(tl.dot(q, tl.trans(k)), cap_scale, CAPPED)
    if KIND != INSIDE:
        keys = first + tl.arange(0, BLOCK_N)
        scores = tl.where(sees(queries[:, None], keys[None, :], end, LEFT, RIGHT, KIND), scores, float("-inf"))
    highest = tl.max(scores, 1) * qk_scale
    higher = tl.where(highest > m, highest, m)
    higher = tl.where(highest == highest, higher, highest)  # NaN stays
    base = tl.where(higher == float("-inf"), 0.0, higher)  # the row has seen no key yet
    p = tl.exp2(scores * qk_scale - base[:, None])
    shrink = tl.exp2(m - base)
    total = total * shrink + tl.sum(p, 1)
    v = load_tokens(v_head, first, V_S, end, DV, WV, BLOCK_N, KIND != EDGE)
    y = tl.dot(p.to(v.dtype), v, y * shrink[:, None])
    return higher, total, y


@kernel
def _attend_kernel(
    q_ptr, k_ptr, v_ptr, y_ptr, lse_ptr, sinks_ptr, tiles_ptr, S, ROWS, qk_scale, cap_scale,
    Q_B, Q_S, Q_H, K_B, K_S, K_H, V_B, V_S, V_H, Y_S,
    HEADS: tl.constexpr, SHARING: tl.constexpr, D: tl.constexpr, W: tl.constexpr, DV: tl.constexpr, WV: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, CAPPED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """LAST: each document has a tile and a query, its last token; q and y have a row a document, and there are no statistics."""
    sequence, head = (tl.program_id(0) // HEADS).to(tl.int64), tl.program_id(0) % HEADS
    group = head // SHARING
    row = tl.program_id(1).to(tl.int64) if LAST else sequence  # of q, whose Q_S is 0 where it is a document's
    q_head = q_ptr + row * Q_B + head * Q_H
    k_head = k_ptr + sequence * K_B + group * K_H
    v_head = v_ptr + sequence * V_B + group * V_H
    if tiles_ptr is None:
        begin, end, shift = 0, S, 0
        first = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_M  # the longest rows first, for an even end
    else:
        begin, end, first, shift = document_tile(tiles_ptr, tl.program_id(1), BLOCK_M, False)
    queries = first + tl.arange(0, BLOCK_M)
    q = load_tokens(q_head, first, Q_S, end, D, W, BLOCK_M, False)
    if sinks_ptr is None:
        m = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
    else:  # a key that all see, and whose value is 0
        m = tl.zeros([BLOCK_M], tl.float32) + tl.load(sinks_ptr + head).to(tl.float32) * 1.4426950408889634
        total = tl.full([BLOCK_M], 1.0, tl.float32)
    y = tl.zeros([BLOCK_M, WV], tl.float32)
    inside, edge, stop = key_ranges(begin, end, first, LEFT, RIGHT, BLOCK_M, BLOCK_N)
    if LEFT >= 0:
        start = begin + tl.maximum(first - LEFT - begin, 0) // BLOCK_N * BLOCK_N
        for at in tl.range(start, inside, BLOCK_N, num_stages=1):
            m, total, y = _mix(
                m, total, y, q, k_head, v_head, at, queries, end, qk_scale, cap_scale, K_S, V_S,
                D, W, DV, WV, BLOCK_N, LEFT, RIGHT, CAPPED, LEFT_EDGE,
            )  # fmt: skip
    if LEFT < 0 or RIGHT != 0 or LEFT >= BLOCK_M:  # else a block has no such keys, and ptxas 12.8 crashes on the empty loop
        for at in tl.range(inside, edge, BLOCK_N, num_stages=STAGES):
            m, total, y = _mix(
                m, total, y, q, k_head, v_head, at, queries, end, qk_scale, cap_scale, K_S, V_S,
                D, W, DV, WV, BLOCK_N, LEFT, RIGHT, CAPPED, INSIDE,
            )  # fmt: skip
    for at in tl.range(edge, stop, BLOCK_N, num_stages=1):
        m, total, y = _mix(
            m, total, y, q, k_head, v_head, at, queries, end, qk_scale, cap_scale, K_S, V_S,
            D, W, DV, WV, BLOCK_N, LEFT, RIGHT, CAPPED, EDGE,
        )  # fmt: skip
    y, lse = y / total[:, None], m + tl.log2(total)
    there = queries < (ROWS if tiles_ptr is None else end)  # to the row's end: no memory is left uninitialised
    if tiles_ptr is not None:
        wrong = tl.load(tiles_ptr + 4 * tl.program_id(1) + 3) < 0  # the documents' boundaries
        y, lse = tl.where(wrong, float("nan"), y), tl.where(wrong, float("nan"), lse)
    if lse_ptr is not None:
        tl.store(lse_ptr + (sequence * HEADS + head) * ROWS + shift + queries, lse, mask=there)
    if LAST:
        store_tokens(y_ptr + (row * HEADS + head) * DV, y, 0, queries == end - 1, DV, WV, BLOCK_M)
    elif Y_S is None:  # contiguous
        store_tokens(y_ptr + ((sequence * S + first) * HEADS + head) * DV, y, HEADS * DV, queries < end, DV, WV, BLOCK_M)
    else:
        tile = y_ptr + (sequence * HEADS + head) * DV + tl.cast(first, tl.int64) * Y_S
        store_tokens(tile, y, Y_S, queries < end, DV, WV, BLOCK_M)


class AttentionTiles(NamedTuple):
    """Tiles of one kernel, and how it is compiled."""

    block_m: int  # queries
    block_n: int  # keys
    num_warps: int
    stages: int  # blocks in flight
    resident: int = 0  # programs on a multiprocessor; 0 leaves it to the compiler


HOPPER_SMEM = 200_000  # bytes: GPUs have more shared memory than this from Hopper on


@lru_cache(64)
def forward_tiles(W: int, smem: int) -> AttentionTiles:
    if W > 256:
        return AttentionTiles(32, 16, 8, 1) if smem <= HOPPER_SMEM else AttentionTiles(64, 16, 8, 2)
    if W > 128:
        return AttentionTiles(64, 32, 8, 2) if smem <= HOPPER_SMEM else AttentionTiles(128, 64, 8, 2)
    return AttentionTiles(64, 64, 4, 3 if W <= 64 or smem > HOPPER_SMEM else 2)


class HeadSizes(NamedTuple):
    """What heads a kernel is compiled for."""

    heads: int  # of queries
    groups: int  # of keys and values
    width: int  # of queries and keys
    values: int  # of values, and of what attention returns

    def widths(self) -> tuple[int, int, int, int]:
        """Return both widths, each with its tiles'.

        Values' tiles have 128 bytes a row, or as many as queries': of narrower ones ptxas 12.8 gets addresses wrong.
        """
        queries = head_block(self.width)
        return self.width, queries, self.values, max(head_block(self.values), min(64, queries))


@lru_cache(1024)
def bind_attend(
    strides: tuple[int | None, ...], sizes: HeadSizes, scales: ScoreScales, tiles: AttentionTiles, last: bool = False
) -> Bound:
    kind = sizes.heads, sizes.heads // sizes.groups, *sizes.widths(), scales.left, scales.right, scales.capped
    blocks = tiles.block_m, tiles.block_n, tiles.stages, last
    bound: Bound = _attend_kernel.bind(scales.score, scales.cap, *strides, *kind, *blocks, num_warps=tiles.num_warps)
    return bound


def head_block(D: int) -> int:
    """Width of the tiles of a head: a power of two, and at least what a product takes."""
    return max(16, power_of_two(D))


def lse_size(S: int, cu_seqlens: Tensor | None = None) -> int:
    """How many statistics a head has: multiples of 4, as Hopper's copy engine needs rows at multiples of 16 bytes.

    Those of each document begin at one (`document_tile`).
    """
    return ceil_div(S if cu_seqlens is None else S + 4 * (cu_seqlens.shape[0] - 2), 4) * 4


def attend(
    q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, cu_seqlens: Tensor | None = None, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return y [B, S, H, D], contiguous, and the logarithm to base 2 of each row's sum, fp32 [B, H, `lse_size`].

    y's memory is [S, B, H, D] where options say so. Backward computes the softmax again from the logarithm. q is [B, S, H, D],
    k and v are [B, S, G, D]; none is empty, their last strides are 1. v, and y with it, may have another D.
    """
    B, S, H, D = q.shape
    y = empty_tokens(q, options, H, v.shape[3])
    shape = B, H, lse_size(S, cu_seqlens)
    if cu_seqlens is None:
        lse = torch.empty(shape, dtype=torch.float32, device=q.device)
    else:  # of what lies between documents, a sink has no part
        lse = torch.full(shape, torch.inf, dtype=torch.float32, device=q.device)
    tiles = forward_tiles(head_block(D), shared_memory(q.device))
    strides = *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], y.stride(1) if options.sequence_first else None
    launch = bind_attend(strides, HeadSizes(H, k.shape[2], D, v.shape[3]), scales_of(options), tiles)
    if cu_seqlens is None:
        blocks, places = ceil_div(S, tiles.block_m), None
    else:
        places = document_tiles(cu_seqlens, S, tiles.block_m, options.right >= 0)
        blocks = places.shape[0]
    launch(grid_of(B * H, blocks), q, k, v, y, lse, sinks, places, S, shape[-1])
    return y, lse
