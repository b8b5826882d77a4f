"""Attention's two backward kernels and their launch: one writes dq, the other dk and dv, each once.

Both compute the softmax again, from q, k and the logarithm of each row's sum, and its gradient. That is 7 matrix products where
one kernel would need 5: the price of sums in a fixed order, without atomics. A third, small one sums the sinks' gradient.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from onepass.kernels.language import device_function, tl
from onepass.kernels.launch import Bound, grid_of, kernel
from onepass.ops.attention.document_kernels import document_tiles
from onepass.ops.attention.formula import AttentionOptions
from onepass.ops.attention.forward import HOPPER_SMEM, AttentionTiles, HeadSizes, head_block
from onepass.ops.attention.scores import (
    EDGE,
    INSIDE,
    LEFT_EDGE,
    ScoreScales,
    capped,
    document_tile,
    key_ranges,
    load_tokens,
    query_ranges,
    scales_of,
    sees,
    store_tokens,
)
from onepass.runtime.batch_invariance import invariant
from onepass.runtime.sizes import ceil_div, shared_memory

# ---- dq: a program owns BLOCK_M queries of one head and loops over the keys that they see ----


@device_function
def _into_dq(
    dq, q, dy, lse, delta, k_head, v_head, first, queries, end, qk_scale, cap_scale, K_S, V_S,
    D: tl.constexpr, W: tl.constexpr, DV: tl.constexpr, WV: tl.constexpr, BLOCK_N: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, CAPPED: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    k = load_tokens(k_head, first, K_S, end, D, W, BLOCK_N, KIND != EDGE)
    v = load_tokens(v_head, first, V_S, end, DV, WV, BLOCK_N, KIND != EDGE)
    scores = capped(tl.dot(q, tl.trans(k)), cap_scale, CAPPED)
    p = tl.exp2(scores * qk_scale - lse[:, None])
    dp = tl.dot(dy, tl.trans(v))
    if KIND != INSIDE:
        keys = first + tl.arange(0, BLOCK_N)
        p = tl.where(sees(queries[:, None], keys[None, :], end, LEFT, RIGHT, KIND), p, 0.0)
    ds = p * (dp - delta[:, None])
    if CAPPED:
        ds *= 1.0 - scores * scores
    return tl.dot(ds.to(k.dtype), k, dq)


@kernel
def _dq_kernel(
    dy_ptr, q_ptr, k_ptr, v_ptr, y_ptr, lse_ptr, delta_ptr, dq_ptr, tiles_ptr, S, ROWS, qk_scale, cap_scale, scale,
    DY_B, DY_S, DY_H, Q_B, Q_S, Q_H, K_B, K_S, K_H, V_B, V_S, V_H, Y_S, DQ_B, DQ_S, DQ_H,
    HEADS: tl.constexpr, SHARING: tl.constexpr, D: tl.constexpr, W: tl.constexpr, DV: tl.constexpr, WV: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, CAPPED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    sequence, head = (tl.program_id(0) // HEADS).to(tl.int64), tl.program_id(0) % HEADS
    group = head // SHARING
    k_head = k_ptr + sequence * K_B + group * K_H
    v_head = v_ptr + sequence * V_B + group * V_H
    if tiles_ptr is None:
        begin, end, shift = 0, S, 0
        first = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_M  # the longest rows first, for an even end
    else:
        begin, end, first, shift = document_tile(tiles_ptr, tl.program_id(1), BLOCK_M, False)
    queries = first + tl.arange(0, BLOCK_M)
    there = queries < end
    q = load_tokens(q_ptr + sequence * Q_B + head * Q_H, first, Q_S, end, D, W, BLOCK_M, False)
    dy = load_tokens(dy_ptr + sequence * DY_B + head * DY_H, first, DY_S, end, DV, WV, BLOCK_M, False)
    if Y_S is None:  # contiguous
        y = load_tokens(y_ptr + (sequence * S * HEADS + head) * DV, first, HEADS * DV, end, DV, WV, BLOCK_M, False)
    else:
        y = load_tokens(y_ptr + (sequence * HEADS + head) * DV, first, Y_S, end, DV, WV, BLOCK_M, False)
    delta = tl.sum(dy.to(tl.float32) * y.to(tl.float32), 1)
    row = (sequence * HEADS + head) * ROWS + shift + queries
    tl.store(delta_ptr + row, delta, mask=there)  # for the other kernels
    if dq_ptr is not None:
        lse = tl.load(lse_ptr + row, mask=there, other=float("inf"))
        dq = tl.zeros([BLOCK_M, W], tl.float32)
        inside, edge, stop = key_ranges(begin, end, first, LEFT, RIGHT, BLOCK_M, BLOCK_N)
        if LEFT >= 0:
            start = begin + tl.maximum(first - LEFT - begin, 0) // BLOCK_N * BLOCK_N
            for at in tl.range(start, inside, BLOCK_N, num_stages=1):
                dq = _into_dq(
                    dq, q, dy, lse, delta, k_head, v_head, at, queries, end, qk_scale, cap_scale, K_S, V_S,
                    D, W, DV, WV, BLOCK_N, LEFT, RIGHT, CAPPED, LEFT_EDGE,
                )  # fmt: skip
        if LEFT < 0 or RIGHT != 0 or LEFT >= BLOCK_M:  # else a block has no such keys, as in forward
            for at in tl.range(inside, edge, BLOCK_N, num_stages=STAGES):
                dq = _into_dq(
                    dq, q, dy, lse, delta, k_head, v_head, at, queries, end, qk_scale, cap_scale, K_S, V_S,
                    D, W, DV, WV, BLOCK_N, LEFT, RIGHT, CAPPED, INSIDE,
                )  # fmt: skip
        for at in tl.range(edge, stop, BLOCK_N, num_stages=1):
            dq = _into_dq(
                dq, q, dy, lse, delta, k_head, v_head, at, queries, end, qk_scale, cap_scale, K_S, V_S,
                D, W, DV, WV, BLOCK_N, LEFT, RIGHT, CAPPED, EDGE,
            )  # fmt: skip
        tile = dq_ptr + sequence * DQ_B + head * DQ_H + first.to(tl.int64) * DQ_S
        store_tokens(tile, dq * scale, DQ_S, there, D, W, BLOCK_M)


# ---- dk and dv: a program owns BLOCK_N keys of one group and loops over the queries of its heads that see them ----


@device_function
def _into_dk_dv(
    dk, dv, k, v, q_tile, dy_tile, lse_tile, delta_tile, head, first, shift, keys, end, qk_scale, cap_scale,
    W: tl.constexpr, WV: tl.constexpr, BLOCK_M: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, CAPPED: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    q = q_tile.load([head, first, 0]).reshape([BLOCK_M, W])  # zeros past the document's end, here and below: they add nothing
    lse = lse_tile.load([head, first + shift]).reshape([BLOCK_M])
    delta = delta_tile.load([head, first + shift]).reshape([BLOCK_M])
    scores = capped(tl.dot(k, tl.trans(q)), cap_scale, CAPPED)  # [keys, queries], as all tiles here
    p = tl.exp2(scores * qk_scale - lse[None, :])
    if KIND != INSIDE:
        queries = first + tl.arange(0, BLOCK_M)
        p = tl.where(sees(queries[None, :], keys[:, None], end, LEFT, RIGHT, KIND), p, 0.0)
    dy = dy_tile.load([head, first, 0]).reshape([BLOCK_M, WV])
    dv = tl.dot(p.to(dy.dtype), dy, dv)
    ds = p * (tl.dot(v, tl.trans(dy)) - delta[None, :])
    if CAPPED:
        ds *= 1.0 - scores * scores
    dk = tl.dot(ds.to(q.dtype), q, dk)
    return dk, dv


@kernel
def _dk_dv_kernel(
    dy_ptr, q_ptr, k_ptr, v_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, tiles_ptr, S, ROWS, qk_scale, cap_scale, scale,
    DY_B, DY_S, DY_H, Q_B, Q_S, Q_H, K_B, K_S, K_H, V_B, V_S, V_H, DK_B, DK_S, DK_H, DV_B, DV_S, DV_H,
    GROUPS: tl.constexpr, SHARING: tl.constexpr, D: tl.constexpr, W: tl.constexpr, DV: tl.constexpr, WV: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, CAPPED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    sequence, group = (tl.program_id(0) // GROUPS).to(tl.int64), tl.program_id(0) % GROUPS
    if tiles_ptr is None:
        begin, end, shift, rows = 0, S, 0, S
        first = tl.program_id(1) * BLOCK_N  # the first keys have the most queries
    else:
        begin, end, first, shift = document_tile(tiles_ptr, tl.program_id(1), BLOCK_N, RIGHT >= 0)
        rows = tl.maximum(end, 1)  # a descriptor has at least one
    keys = first + tl.arange(0, BLOCK_N)
    k = load_tokens(k_ptr + sequence * K_B + group * K_H, first, K_S, end, D, W, BLOCK_N, False)
    v = load_tokens(v_ptr + sequence * V_B + group * V_H, first, V_S, end, DV, WV, BLOCK_N, False)
    # Hopper's copy engine fetches what the loop reads: computing addresses would take more registers than there are.
    heads = q_ptr + sequence * Q_B + group * SHARING * Q_H, dy_ptr + sequence * DY_B + group * SHARING * DY_H
    q_tile = tl.make_tensor_descriptor(heads[0], [SHARING, rows, D], [Q_H, Q_S, 1], [1, BLOCK_M, W])
    dy_tile = tl.make_tensor_descriptor(heads[1], [SHARING, rows, DV], [DY_H, DY_S, 1], [1, BLOCK_M, WV])
    row = (sequence * GROUPS + group) * SHARING * ROWS
    lse_tile = tl.make_tensor_descriptor(lse_ptr + row, [SHARING, rows + shift], [ROWS, 1], [1, BLOCK_M])
    delta_tile = tl.make_tensor_descriptor(delta_ptr + row, [SHARING, rows + shift], [ROWS, 1], [1, BLOCK_M])
    dk = tl.zeros([BLOCK_N, W], tl.float32)
    dv = tl.zeros([BLOCK_N, WV], tl.float32)
    start, inside, left, stop = query_ranges(begin, end, first, LEFT, RIGHT, BLOCK_M, BLOCK_N)
    for head in range(SHARING):
        for at in tl.range(start, tl.minimum(inside, stop), BLOCK_M, num_stages=1):
            dk, dv = _into_dk_dv(
                dk, dv, k, v, q_tile, dy_tile, lse_tile, delta_tile, head, at, shift, keys, end, qk_scale, cap_scale,
                W, WV, BLOCK_M, LEFT, RIGHT, CAPPED, EDGE,
            )  # fmt: skip
        for at in tl.range(inside, left, BLOCK_M, num_stages=STAGES):
            dk, dv = _into_dk_dv(
                dk, dv, k, v, q_tile, dy_tile, lse_tile, delta_tile, head, at, shift, keys, end, qk_scale, cap_scale,
                W, WV, BLOCK_M, LEFT, RIGHT, CAPPED, INSIDE,
            )  # fmt: skip
        if LEFT >= 0:
            for at in tl.range(tl.maximum(inside, left), stop, BLOCK_M, num_stages=1):
                dk, dv = _into_dk_dv(
                    dk, dv, k, v, q_tile, dy_tile, lse_tile, delta_tile, head, at, shift, keys, end, qk_scale, cap_scale,
                    W, WV, BLOCK_M, LEFT, RIGHT, CAPPED, LEFT_EDGE,
                )  # fmt: skip
    wide = first.to(tl.int64)
    store_tokens(dk_ptr + sequence * DK_B + group * DK_H + wide * DK_S, dk * scale, DK_S, keys < end, D, W, BLOCK_N)
    store_tokens(dv_ptr + sequence * DV_B + group * DV_H + wide * DV_S, dv, DV_S, keys < end, DV, WV, BLOCK_N)


# ---- the sinks' gradient: a program has a head, and sums over its rows in their order ----


@kernel
def _dsinks_kernel(lse_ptr, delta_ptr, sinks_ptr, dsinks_ptr, M, ROWS, S, HEADS: tl.constexpr, BLOCK: tl.constexpr):
    head = tl.program_id(0)
    sink = tl.load(sinks_ptr + head).to(tl.float32) * 1.4426950408889634
    total = tl.zeros([BLOCK], tl.float32)
    for sequence in range(0, M):
        row = (tl.cast(sequence, tl.int64) * HEADS + head) * ROWS
        for at in range(0, S, BLOCK):
            places = at + tl.arange(0, BLOCK)
            lse = tl.load(lse_ptr + row + places, mask=places < S, other=float("inf"))
            delta = tl.load(delta_ptr + row + places, mask=places < S, other=0.0)
            total -= tl.where(lse == float("inf"), 0.0, tl.exp2(sink - lse) * delta)  # what lies between documents is nothing
    tl.store(dsinks_ptr + head, tl.sum(total, 0))


# ---- tiles, and calls ----


@lru_cache(64)
def dq_tiles(W: int, smem: int) -> AttentionTiles:
    """Tiles for dq. More programs a multiprocessor hide each other's waits: worth a few spilled registers, here and below."""
    if W > 256:
        return AttentionTiles(32, 16, 8, 1) if smem <= HOPPER_SMEM else AttentionTiles(32, 32, 8, 1)
    if W > 128:
        return AttentionTiles(64, 32, 8, 2) if smem <= HOPPER_SMEM else AttentionTiles(128, 32, 8, 2)
    if smem <= HOPPER_SMEM:
        return AttentionTiles(64, 64, 4, 3 if W <= 64 else 2)
    return AttentionTiles(64, 64, 4, 2, 4) if W <= 64 else AttentionTiles(128, 64, 8, 3)


@lru_cache(1024)
def dk_dv_tiles(W: int, S: int, smem: int) -> AttentionTiles:
    """Tiles for dk and dv. Small ones waste less on the diagonal, much of a short sequence. S is 0 for documents and softcaps."""
    if W > 256:
        return AttentionTiles(16, 16, 8, 1) if smem <= HOPPER_SMEM else AttentionTiles(32, 16, 8, 2)
    if W > 128:
        return AttentionTiles(32, 32, 8, 2) if smem <= HOPPER_SMEM else AttentionTiles(64, 64, 8, 2)
    if smem <= HOPPER_SMEM:
        return AttentionTiles(64, 64, 4, 3) if W <= 64 and S > 2048 else AttentionTiles(32, 64, 4, 3)
    if W > 64:
        return AttentionTiles(64, 64, 4, 2, 2)
    return AttentionTiles(64, 64, 4, 3, 3) if S else AttentionTiles(32, 64, 4, 3, 4)


def backward_tiles(
    D: int, S: int, options: AttentionOptions, documents: bool, smem: int
) -> tuple[AttentionTiles, AttentionTiles]:
    """Return dq's tiles, and dk's and dv's: those of documents where a sequence must have the bits that it has as one."""
    W = head_block(D)
    return dq_tiles(W, smem), dk_dv_tiles(W, 0 if documents or options.softcap or invariant() else S, smem)


@lru_cache(1024)
def _bind_dq(strides: tuple[int | None, ...], sizes: HeadSizes, scales: ScoreScales, tiles: AttentionTiles) -> Bound:
    kind = sizes.heads, sizes.heads // sizes.groups, *sizes.widths(), *scales[3:], tiles.block_m, tiles.block_n, tiles.stages
    bound: Bound = _dq_kernel.bind(*scales[:3], *strides, *kind, num_warps=tiles.num_warps, resident=tiles.resident)
    return bound


@lru_cache(1024)
def _bind_dk_dv(strides: tuple[int, ...], sizes: HeadSizes, scales: ScoreScales, tiles: AttentionTiles) -> Bound:
    kind = sizes.groups, sizes.heads // sizes.groups, *sizes.widths(), *scales[3:], tiles.block_m, tiles.block_n, tiles.stages
    bound: Bound = _dk_dv_kernel.bind(*scales[:3], *strides, *kind, num_warps=tiles.num_warps, resident=tiles.resident)
    return bound


@lru_cache(64)
def _bind_dsinks(heads: int) -> Bound:
    bound: Bound = _dsinks_kernel.bind(heads, 1024)
    return bound


class BackwardCall:
    """What both kernels of a backward read, and what the first leaves for the second. y and lse are `attend`'s.

    The addresses and strides of dy, q, k and v are multiples of 16 bytes, their last strides 1.
    """

    def __init__(
        self, dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor,
        options: AttentionOptions, cu_seqlens: Tensor | None,
    ) -> None:  # fmt: skip
        self.dy, self.q, self.k, self.v, self.y, self.lse = dy, q, k, v, y, lse
        self.options, self.scales, self.cu_seqlens = options, scales_of(options), cu_seqlens
        self.delta = torch.empty_like(lse)  # the sum of dy y of each row
        self._places: dict[int, Tensor] = {}

    @property
    def strides(self) -> tuple[int, ...]:
        return (*self.dy.stride()[:3], *self.q.stride()[:3], *self.k.stride()[:3], *self.v.stride()[:3])

    @property
    def sizes(self) -> HeadSizes:
        (heads, width), (groups, values) = self.q.shape[2:], (self.k.shape[2], self.v.shape[3])
        return HeadSizes(heads, groups, width, values)

    def blocks(self, block: int) -> tuple[int, Tensor | None]:
        """Return how many blocks of tokens there are at most, and the list of them where there are documents."""
        S = self.q.shape[1]
        if self.cu_seqlens is None:
            return ceil_div(S, block), None
        if block not in self._places:
            self._places[block] = document_tiles(self.cu_seqlens, S, block, self.options.right >= 0)
        return self._places[block].shape[0], self._places[block]


def write_dq(call: BackwardCall, dq: Tensor | None, tiles: AttentionTiles) -> None:
    """Write delta, and dq unless it is None."""
    B, S, H, _ = call.q.shape
    of_dq = (0, 0, 0) if dq is None else dq.stride()[:3]
    of_y = call.y.stride(1) if call.options.sequence_first else None
    launch = _bind_dq((*call.strides, of_y, *of_dq), call.sizes, call.scales, tiles)
    blocks, places = call.blocks(tiles.block_m)
    given = call.dy, call.q, call.k, call.v, call.y, call.lse, call.delta
    launch(grid_of(B * H, blocks), *given, dq, places, S, call.lse.shape[-1])


def write_dk_dv(call: BackwardCall, dk: Tensor, dv: Tensor, tiles: AttentionTiles) -> None:
    """Write dk and dv. Delta is there."""
    B, S, G, _ = call.k.shape
    launch = _bind_dk_dv((*call.strides, *dk.stride()[:3], *dv.stride()[:3]), call.sizes, call.scales, tiles)
    blocks, places = call.blocks(tiles.block_n)
    given = call.dy, call.q, call.k, call.v, call.lse, call.delta
    launch(grid_of(B * G, blocks), *given, dk, dv, places, S, call.lse.shape[-1])


def attend_backward(call: BackwardCall, gradients: tuple[Tensor | None, Tensor | None, Tensor | None] | None) -> None:
    """Write the gradients dq, dk and dv, whose last strides are 1, and delta; without gradients delta alone.

    dq may be None, and so may dk and dv together.
    """
    _, S, _, D = call.q.shape
    smem = shared_memory(call.q.device)
    dq, dk, dv = gradients or (None, None, None)
    of_dq, of_dk_dv = backward_tiles(D, S, call.options, call.cu_seqlens is not None, smem)
    write_dq(call, dq, of_dq)
    if dk is not None and dv is not None:
        write_dk_dv(call, dk, dv, of_dk_dv)


def sinks_gradient(call: BackwardCall, sinks: Tensor) -> Tensor:
    """Return the gradient of the sinks' logits, of their type. Delta is there."""
    B, H, ROWS = call.lse.shape
    dsinks = torch.empty(H, dtype=torch.float32, device=sinks.device)
    rows = call.q.shape[1] if call.cu_seqlens is None else ROWS
    _bind_dsinks(H)((H, 1, 1), call.lse, call.delta, sinks, dsinks, B, ROWS, rows)
    return dsinks.to(sinks.dtype)
