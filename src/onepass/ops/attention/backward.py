"""Causal attention's two backward kernels and their launch: one writes dq, the other dk and dv, each once.

Both compute the softmax again, from q, k and the logarithm of each row's sum, and its gradient. That is 7 matrix products where
one kernel would need 5: the price of sums in a fixed order, without atomics.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from onepass.kernels.language import device_function, tl
from onepass.kernels.launch import Bound, grid_of, kernel
from onepass.ops.attention.forward import HOPPER_SMEM, LOG2E, AttentionTiles, load_tokens, row_size
from onepass.runtime.sizes import ceil_div, shared_memory

# ---- dq: a program owns BLOCK_M queries of one head and loops over the keys up to its last query ----


@device_function
def _into_dq(
    dq, q, dy, lse, delta, k_head, v_head, first, queries, qk_scale, S, K_S, V_S,
    D: tl.constexpr, BLOCK_N: tl.constexpr, DIAGONAL: tl.constexpr,
):  # fmt: skip
    k = load_tokens(k_head, first, K_S, S, D, BLOCK_N, not DIAGONAL)
    v = load_tokens(v_head, first, V_S, S, D, BLOCK_N, not DIAGONAL)
    p = tl.exp2(tl.dot(q, tl.trans(k)) * qk_scale - lse[:, None])
    dp = tl.dot(dy, tl.trans(v))
    if DIAGONAL:
        keys = first + tl.arange(0, BLOCK_N)
        p = tl.where(queries[:, None] >= keys[None, :], p, 0.0)
    ds = p * (dp - delta[:, None])
    return tl.dot(ds.to(k.dtype), k, dq)


@kernel
def _dq_kernel(
    dy_ptr, q_ptr, k_ptr, v_ptr, y_ptr, lse_ptr, delta_ptr, dq_ptr, S, qk_scale, scale,
    DY_B, DY_S, DY_H, Q_B, Q_S, Q_H, K_B, K_S, K_H, V_B, V_S, V_H, DQ_B, DQ_S, DQ_H,
    HEADS: tl.constexpr, SHARING: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    block = tl.num_programs(1) - 1 - tl.program_id(1)  # the longest rows first, for an even end
    sequence, head = (tl.program_id(0) // HEADS).to(tl.int64), tl.program_id(0) % HEADS
    group = head // SHARING
    k_head = k_ptr + sequence * K_B + group * K_H
    v_head = v_ptr + sequence * V_B + group * V_H
    first = block * BLOCK_M
    queries = first + tl.arange(0, BLOCK_M)
    there = queries < S
    q = load_tokens(q_ptr + sequence * Q_B + head * Q_H, first, Q_S, S, D, BLOCK_M, False)
    dy = load_tokens(dy_ptr + sequence * DY_B + head * DY_H, first, DY_S, S, D, BLOCK_M, False)
    y = load_tokens(y_ptr + (sequence * S * HEADS + head) * D, first, HEADS * D, S, D, BLOCK_M, False)
    delta = tl.sum(dy.to(tl.float32) * y.to(tl.float32), 1)
    row = (sequence * HEADS + head) * row_size(S) + queries
    tl.store(delta_ptr + row, delta, mask=there)  # for the other kernel
    lse = tl.load(lse_ptr + row, mask=there, other=float("inf"))
    dq = tl.zeros([BLOCK_M, D], tl.float32)
    for at in tl.range(0, first, BLOCK_N, num_stages=STAGES):
        dq = _into_dq(dq, q, dy, lse, delta, k_head, v_head, at, queries, qk_scale, S, K_S, V_S, D, BLOCK_N, False)
    for at in tl.range(first, tl.minimum(first + BLOCK_M, S), BLOCK_N, num_stages=1):
        dq = _into_dq(dq, q, dy, lse, delta, k_head, v_head, at, queries, qk_scale, S, K_S, V_S, D, BLOCK_N, True)
    out = dq_ptr + sequence * DQ_B + head * DQ_H + first.to(tl.int64) * DQ_S
    at = tl.arange(0, BLOCK_M)[:, None] * DQ_S + tl.arange(0, D)[None, :]
    tl.store(out + at, dq * scale, mask=there[:, None])


# ---- dk and dv: a program owns BLOCK_N keys of one group and loops over the queries of its heads, from its first key on ----


@device_function
def _into_dk_dv(
    dk, dv, k, v, q_tile, dy_tile, lse_tile, delta_tile, head, first, keys, qk_scale,
    D: tl.constexpr, BLOCK_M: tl.constexpr, DIAGONAL: tl.constexpr,
):  # fmt: skip
    q = q_tile.load([head, first, 0]).reshape([BLOCK_M, D])  # zeros past the sequence's end, here and below: they add nothing
    lse = lse_tile.load([head, first]).reshape([BLOCK_M])
    delta = delta_tile.load([head, first]).reshape([BLOCK_M])
    p = tl.exp2(tl.dot(k, tl.trans(q)) * qk_scale - lse[None, :])  # [keys, queries], as all tiles here
    if DIAGONAL:
        queries = first + tl.arange(0, BLOCK_M)
        p = tl.where(queries[None, :] >= keys[:, None], p, 0.0)
    dy = dy_tile.load([head, first, 0]).reshape([BLOCK_M, D])
    dv = tl.dot(p.to(dy.dtype), dy, dv)
    ds = p * (tl.dot(v, tl.trans(dy)) - delta[None, :])
    dk = tl.dot(ds.to(q.dtype), q, dk)
    return dk, dv


@kernel
def _dk_dv_kernel(
    dy_ptr, q_ptr, k_ptr, v_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, S, qk_scale, scale,
    DY_B, DY_S, DY_H, Q_B, Q_S, Q_H, K_B, K_S, K_H, V_B, V_S, V_H, DK_B, DK_S, DK_H, DV_B, DV_S, DV_H,
    GROUPS: tl.constexpr, SHARING: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    sequence, group = (tl.program_id(0) // GROUPS).to(tl.int64), tl.program_id(0) % GROUPS
    first = tl.program_id(1) * BLOCK_N  # the first keys have the most queries
    keys = first + tl.arange(0, BLOCK_N)
    k = load_tokens(k_ptr + sequence * K_B + group * K_H, first, K_S, S, D, BLOCK_N, False)
    v = load_tokens(v_ptr + sequence * V_B + group * V_H, first, V_S, S, D, BLOCK_N, False)
    # Hopper's copy engine fetches what the loop reads: computing addresses would take more registers than there are.
    heads = q_ptr + sequence * Q_B + group * SHARING * Q_H, dy_ptr + sequence * DY_B + group * SHARING * DY_H
    q_tile = tl.make_tensor_descriptor(heads[0], [SHARING, S, D], [Q_H, Q_S, 1], [1, BLOCK_M, D])
    dy_tile = tl.make_tensor_descriptor(heads[1], [SHARING, S, D], [DY_H, DY_S, 1], [1, BLOCK_M, D])
    row = (sequence * GROUPS + group) * SHARING * row_size(S)
    lse_tile = tl.make_tensor_descriptor(lse_ptr + row, [SHARING, S], [row_size(S), 1], [1, BLOCK_M])
    delta_tile = tl.make_tensor_descriptor(delta_ptr + row, [SHARING, S], [row_size(S), 1], [1, BLOCK_M])
    dk = tl.zeros([BLOCK_N, D], tl.float32)
    dv = tl.zeros([BLOCK_N, D], tl.float32)
    for head in range(SHARING):
        for at in tl.range(first, tl.minimum(first + BLOCK_N, S), BLOCK_M, num_stages=1):
            dk, dv = _into_dk_dv(
                dk, dv, k, v, q_tile, dy_tile, lse_tile, delta_tile, head, at, keys, qk_scale, D, BLOCK_M, True
            )  # fmt: skip
        for at in tl.range(first + BLOCK_N, S, BLOCK_M, num_stages=STAGES):
            dk, dv = _into_dk_dv(
                dk, dv, k, v, q_tile, dy_tile, lse_tile, delta_tile, head, at, keys, qk_scale, D, BLOCK_M, False
            )  # fmt: skip
    there = (keys < S)[:, None]
    tokens, columns = tl.arange(0, BLOCK_N)[:, None], tl.arange(0, D)[None, :]
    wide = first.to(tl.int64)
    tl.store(dk_ptr + sequence * DK_B + group * DK_H + wide * DK_S + tokens * DK_S + columns, dk * scale, mask=there)
    tl.store(dv_ptr + sequence * DV_B + group * DV_H + wide * DV_S + tokens * DV_S + columns, dv, mask=there)


# ---- tiles, and calls ----


@lru_cache(64)
def dq_tiles(D: int, smem: int) -> AttentionTiles:
    """Tiles for dq. More programs a multiprocessor hide each other's waits: worth a few spilled registers, here and below."""
    if smem <= HOPPER_SMEM:
        return AttentionTiles(64, 64, 4, 3 if D <= 64 else 2)
    return AttentionTiles(64, 64, 4, 2, 4) if D <= 64 else AttentionTiles(128, 64, 8, 3)


@lru_cache(1024)
def dk_dv_tiles(D: int, S: int, smem: int) -> AttentionTiles:
    """Tiles for dk and dv. With one program a multiprocessor, small ones waste less on the diagonal, much of a short sequence."""
    if smem <= HOPPER_SMEM:
        return AttentionTiles(64, 64, 4, 3) if D <= 64 and S > 2048 else AttentionTiles(32, 64, 4, 3)
    return AttentionTiles(64, 64, 4, 3, 3) if D <= 64 else AttentionTiles(64, 64, 4, 2, 2)


@lru_cache(1024)
def _bind_dq(strides: tuple[int, ...], heads: int, groups: int, D: int, scale: float, tiles: AttentionTiles) -> Bound:
    sizes = heads, heads // groups, D, tiles.block_m, tiles.block_n, tiles.stages
    bound: Bound = _dq_kernel.bind(scale * LOG2E, scale, *strides, *sizes, num_warps=tiles.num_warps, resident=tiles.resident)
    return bound


@lru_cache(1024)
def _bind_dk_dv(strides: tuple[int, ...], heads: int, groups: int, D: int, scale: float, tiles: AttentionTiles) -> Bound:
    sizes = groups, heads // groups, D, tiles.block_m, tiles.block_n, tiles.stages
    bound: Bound = _dk_dv_kernel.bind(scale * LOG2E, scale, *strides, *sizes, num_warps=tiles.num_warps, resident=tiles.resident)
    return bound


def attend_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, scale: float, dq: Tensor, dk: Tensor, dv: Tensor
) -> None:
    """Write the gradients into dq, dk and dv, whose last strides are 1. y and lse are `attend`'s.

    The addresses and strides of dy and q are multiples of 16 bytes.
    """
    B, S, H, D = q.shape
    G = k.shape[2]
    delta = torch.empty_like(lse)
    read = (*dy.stride()[:3], *q.stride()[:3], *k.stride()[:3], *v.stride()[:3])
    tiles = dq_tiles(D, shared_memory(q.device))
    launch = _bind_dq((*read, *dq.stride()[:3]), H, G, D, scale, tiles)
    launch(grid_of(B * H, ceil_div(S, tiles.block_m)), dy, q, k, v, y, lse, delta, dq, S)
    tiles = dk_dv_tiles(D, S, shared_memory(q.device))
    launch = _bind_dk_dv((*read, *dk.stride()[:3], *dv.stride()[:3]), H, G, D, scale, tiles)
    launch(grid_of(B * G, ceil_div(S, tiles.block_n)), dy, q, k, v, lse, delta, dk, dv, S)
