"""Attention's backward kernels for Hopper, in Gluon: causal, with documents or without, for heads of 64 and 128.

Triton's loop waits for each product before it goes on. Here products are queued, and exponentials are computed while the next
ones run. So one program of two groups of four warps fills a multiprocessor, has tiles twice as large, and reads half as much from
the L2. Sums are in the order of the tiles, as in `backward.py`, whose formulas these are. The copy engine feeds the loops.

A buffer is filled again once the products that read it are done. Gluon puts the barrier between all warps there.
"""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from onepass.kernels.language import INTERPRETED, triton
from onepass.kernels.launch import Bound, grid_of, kernel
from onepass.ops.attention.formula import AttentionOptions
from onepass.ops.attention.forward import AttentionTiles
from onepass.ops.attention.scores import ScoreScales

if TYPE_CHECKING:
    from onepass.ops.attention.backward import BackwardCall

class _Absent:
    """Has every attribute: a module that is not there."""

    def __getattr__(self, name: str) -> None:
        return None


HAS_GLUON = triton is not None and not INTERPRETED and triton.__version__.startswith("3.6.")  # an experimental language
if HAS_GLUON:
    gl: Any = import_module("triton.experimental.gluon.language")
    _hopper: Any = import_module("triton.experimental.gluon.language.nvidia.hopper")
else:  # the kernels are read, and never launched
    gl = _hopper = _Absent()
fence_async_shared, mbarrier, tma = _hopper.fence_async_shared, _hopper.mbarrier, _hopper.tma
warpgroup_mma, warpgroup_mma_init, warpgroup_mma_wait = (
    _hopper.warpgroup_mma, _hopper.warpgroup_mma_init, _hopper.warpgroup_mma_wait
)  # fmt: skip


# ---- dq: a program owns BLOCK_M queries of one head and loops over the keys up to its last query ----


@kernel(gluon=True)
def _dq_hopper_kernel(
    dy_ptr, q_ptr, k_ptr, v_ptr, y_ptr, lse_ptr, delta_ptr, dq_ptr, tiles_ptr, S, ROWS, qk_scale, scale,
    DY_B, DY_S, DY_H, Q_B, Q_S, Q_H, K_B, K_S, K_H, V_B, V_S, V_H, DQ_B, DQ_S, DQ_H,
    HEADS: gl.constexpr, SHARING: gl.constexpr, D: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    sequence, head = (gl.program_id(0) // HEADS).to(gl.int64), gl.program_id(0) % HEADS
    group = head // SHARING
    if tiles_ptr is None:
        begin, end, shift = 0, S, 0
        first = (gl.num_programs(1) - 1 - gl.program_id(1)) * BLOCK_M  # the longest rows first, for an even end
    else:
        tile = tiles_ptr + 4 * gl.program_id(1)
        begin, end = gl.load(tile), gl.load(tile + 1)
        first = begin + gl.load(tile + 2) * BLOCK_M
        shift = 4 * gl.maximum(gl.load(tile + 3), 0) - begin % 4
    rows = gl.maximum(end, 1)  # a descriptor has at least one
    stop = gl.minimum(first + BLOCK_M, end)
    blocks = (stop - begin + BLOCK_N - 1) // BLOCK_N

    kind: gl.constexpr = q_ptr.dtype.element_ty
    across: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [WARPS, 1], [1, 0])
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_N, 16])
    result_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, D, 16])
    operand_layout: gl.constexpr = gl.DotOperandLayout(0, result_layout, 2)
    owned: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, D], kind)
    fetched: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, D], kind)
    k_buffers = gl.allocate_shared_memory(kind, [STAGES, BLOCK_N, D], fetched)
    v_buffers = gl.allocate_shared_memory(kind, [STAGES, BLOCK_N, D], fetched)
    k_head, v_head = k_ptr + sequence * K_B + group * K_H, v_ptr + sequence * V_B + group * V_H
    k_tile = tma.make_tensor_descriptor(k_head, [rows, D], [K_S, 1], [BLOCK_N, D], fetched)
    v_tile = tma.make_tensor_descriptor(v_head, [rows, D], [V_S, 1], [BLOCK_N, D], fetched)
    here = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(here.index(slot), count=1)
    for slot in gl.static_range(STAGES - 1):
        there, at = slot < blocks, begin + slot * BLOCK_N
        mbarrier.expect(here.index(slot), 2 * BLOCK_N * D * 2, pred=there)
        tma.async_copy_global_to_shared(k_tile, [at, 0], here.index(slot), k_buffers.index(slot), pred=there)
        tma.async_copy_global_to_shared(v_tile, [at, 0], here.index(slot), v_buffers.index(slot), pred=there)

    tokens = first + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, across))
    columns = gl.arange(0, D, layout=gl.SliceLayout(0, across))
    there = (tokens < end)[:, None]
    wide = tokens.to(gl.int64)[:, None]
    q = gl.load(q_ptr + sequence * Q_B + head * Q_H + wide * Q_S + columns[None, :], mask=there, other=0.0)
    dy = gl.load(dy_ptr + sequence * DY_B + head * DY_H + wide * DY_S + columns[None, :], mask=there, other=0.0)
    y_head = y_ptr + (sequence * S * HEADS + head) * D
    y = gl.load(y_head + wide * (HEADS * D) + columns[None, :], mask=there, other=0.0)
    delta = gl.sum(dy.to(gl.float32) * y.to(gl.float32), 1)
    row = (sequence * HEADS + head) * ROWS + shift
    gl.store(delta_ptr + row + tokens, delta, mask=tokens < end)  # for the other kernels
    delta = gl.convert_layout(delta, gl.SliceLayout(1, scores_layout))
    queries = first + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, scores_layout))
    lse = gl.load(lse_ptr + row + queries, mask=queries < end, other=float("inf"))
    q_tile = gl.allocate_shared_memory(kind, [BLOCK_M, D], owned, q)
    dy_tile = gl.allocate_shared_memory(kind, [BLOCK_M, D], owned, dy)
    fence_async_shared()

    nothing = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, scores_layout)
    dq = warpgroup_mma_init(gl.zeros([BLOCK_M, D], gl.float32, result_layout))
    for i in range(blocks):
        stage = i % STAGES
        mbarrier.wait(here.index(stage), i // STAGES & 1)
        k, v = k_buffers.index(stage), v_buffers.index(stage)
        scores = warpgroup_mma(q_tile, k.permute((1, 0)), nothing, use_acc=False, is_async=True)
        dp = warpgroup_mma(dy_tile, v.permute((1, 0)), nothing, use_acc=False, is_async=True)
        p = warpgroup_mma_wait(1, [scores])  # and what read the buffers of the block before
        free, more, at = (i + STAGES - 1) % STAGES, i + STAGES - 1 < blocks, begin + (i + STAGES - 1) * BLOCK_N
        mbarrier.expect(here.index(free), 2 * BLOCK_N * D * 2, pred=more)
        tma.async_copy_global_to_shared(k_tile, [at, 0], here.index(free), k_buffers.index(free), pred=more)
        tma.async_copy_global_to_shared(v_tile, [at, 0], here.index(free), v_buffers.index(free), pred=more)
        p = gl.exp2(p * qk_scale - lse[:, None])
        at = begin + i * BLOCK_N
        if at + BLOCK_N > first:
            keys = at + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, scores_layout))
            p = gl.where(queries[:, None] >= keys[None, :], p, 0.0)
        ds = p * (warpgroup_mma_wait(0, [dp]) - delta[:, None])
        dq = warpgroup_mma(gl.convert_layout(ds.to(kind), operand_layout), k, dq, is_async=True)
    dq = warpgroup_mma_wait(0, [dq])
    out = gl.convert_layout((dq * scale).to(kind), across)
    gl.store(dq_ptr + sequence * DQ_B + head * DQ_H + wide * DQ_S + columns[None, :], out, mask=there)


# ---- dk and dv: a program owns BLOCK_N keys of one group and loops over the queries of its heads, from its first key on ----


@kernel(gluon=True)
def _dk_dv_hopper_kernel(
    dy_ptr, q_ptr, k_ptr, v_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, tiles_ptr, S, ROWS, qk_scale, scale,
    DY_B, DY_S, DY_H, Q_B, Q_S, Q_H, K_B, K_S, K_H, V_B, V_S, V_H, DK_B, DK_S, DK_H, DV_B, DV_S, DV_H,
    GROUPS: gl.constexpr, SHARING: gl.constexpr, D: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    sequence, group = (gl.program_id(0) // GROUPS).to(gl.int64), gl.program_id(0) % GROUPS
    if tiles_ptr is None:
        end, shift = S, 0
        first = gl.program_id(1) * BLOCK_N  # the first keys have the most queries
    else:
        tile = tiles_ptr + 4 * gl.program_id(1)
        begin, end = gl.load(tile), gl.load(tile + 1)
        last = (end - begin + BLOCK_N - 1) // BLOCK_N - 1
        first = begin + gl.maximum(last - gl.load(tile + 2), 0) * BLOCK_N
        shift = 4 * gl.maximum(gl.load(tile + 3), 0) - begin % 4
    rows = gl.maximum(end, 1)
    blocks = SHARING * ((end - first + BLOCK_M - 1) // BLOCK_M)

    kind: gl.constexpr = q_ptr.dtype.element_ty
    across: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [WARPS, 1], [1, 0])
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_M, 16])
    result_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, D, 16])
    operand_layout: gl.constexpr = gl.DotOperandLayout(0, result_layout, 2)
    owned: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, D], kind)
    fetched: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, D], kind)
    k_tile = gl.allocate_shared_memory(kind, [BLOCK_N, D], owned)
    v_tile = gl.allocate_shared_memory(kind, [BLOCK_N, D], owned)
    q_buffers = gl.allocate_shared_memory(kind, [STAGES, BLOCK_M, D], fetched)
    dy_buffers = gl.allocate_shared_memory(kind, [STAGES, BLOCK_M, D], fetched)
    q_heads, dy_heads = q_ptr + sequence * Q_B + group * SHARING * Q_H, dy_ptr + sequence * DY_B + group * SHARING * DY_H
    q_from = tma.make_tensor_descriptor(q_heads, [rows, (SHARING - 1) * Q_H + D], [Q_S, 1], [BLOCK_M, D], fetched)
    dy_from = tma.make_tensor_descriptor(dy_heads, [rows, (SHARING - 1) * DY_H + D], [DY_S, 1], [BLOCK_M, D], fetched)
    k_head, v_head = k_ptr + sequence * K_B + group * K_H, v_ptr + sequence * V_B + group * V_H
    k_from = tma.make_tensor_descriptor(k_head, [rows, D], [K_S, 1], [BLOCK_N, D], owned)
    v_from = tma.make_tensor_descriptor(v_head, [rows, D], [V_S, 1], [BLOCK_N, D], owned)
    here = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    owned_here = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(here.index(slot), count=1)
    mbarrier.init(owned_here, count=1)
    mbarrier.expect(owned_here, 2 * BLOCK_N * D * 2)
    tma.async_copy_global_to_shared(k_from, [first, 0], owned_here, k_tile)
    tma.async_copy_global_to_shared(v_from, [first, 0], owned_here, v_tile)
    load_at, load_head = first, 0 * first  # the next block of queries to fetch, and of which head
    for slot in gl.static_range(STAGES - 1):
        there = slot < blocks
        mbarrier.expect(here.index(slot), 2 * BLOCK_M * D * 2, pred=there)
        q_at, dy_at = [load_at, load_head * Q_H], [load_at, load_head * DY_H]
        tma.async_copy_global_to_shared(q_from, q_at, here.index(slot), q_buffers.index(slot), pred=there)
        tma.async_copy_global_to_shared(dy_from, dy_at, here.index(slot), dy_buffers.index(slot), pred=there)
        load_head += (load_at + BLOCK_M >= end).to(gl.int32)
        load_at = gl.where(load_at + BLOCK_M >= end, first, load_at + BLOCK_M)
    mbarrier.wait(owned_here, 0)

    nothing = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, scores_layout)
    dk = warpgroup_mma_init(gl.zeros([BLOCK_N, D], gl.float32, result_layout))
    dv = warpgroup_mma_init(gl.zeros([BLOCK_N, D], gl.float32, result_layout))
    keys = first + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, scores_layout))
    at, row = first, (sequence * GROUPS + group) * SHARING * ROWS + shift
    for i in range(blocks):
        stage = i % STAGES
        mbarrier.wait(here.index(stage), i // STAGES & 1)
        q, dy = q_buffers.index(stage), dy_buffers.index(stage)
        scores = warpgroup_mma(k_tile, q.permute((1, 0)), nothing, use_acc=False, is_async=True)
        dp = warpgroup_mma(v_tile, dy.permute((1, 0)), nothing, use_acc=False, is_async=True)
        queries = at + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, scores_layout))
        lse = gl.load(lse_ptr + row + queries, mask=queries < end, other=float("inf"))
        delta = gl.load(delta_ptr + row + queries, mask=queries < end, other=0.0)
        p = warpgroup_mma_wait(1, [scores])  # and what read the buffers of the block before
        free, more = (i + STAGES - 1) % STAGES, i + STAGES - 1 < blocks
        mbarrier.expect(here.index(free), 2 * BLOCK_M * D * 2, pred=more)
        q_at, dy_at = [load_at, load_head * Q_H], [load_at, load_head * DY_H]
        tma.async_copy_global_to_shared(q_from, q_at, here.index(free), q_buffers.index(free), pred=more)
        tma.async_copy_global_to_shared(dy_from, dy_at, here.index(free), dy_buffers.index(free), pred=more)
        load_head += (load_at + BLOCK_M >= end).to(gl.int32)
        load_at = gl.where(load_at + BLOCK_M >= end, first, load_at + BLOCK_M)
        p = gl.exp2(p * qk_scale - lse[None, :])
        if at < first + BLOCK_N:
            p = gl.where(queries[None, :] >= keys[:, None], p, 0.0)
        dv = warpgroup_mma(gl.convert_layout(p.to(kind), operand_layout), dy, dv, is_async=True)
        ds = p * (warpgroup_mma_wait(1, [dp]) - delta[None, :])
        dk = warpgroup_mma(gl.convert_layout(ds.to(kind), operand_layout), q, dk, is_async=True)
        row += gl.where(at + BLOCK_M >= end, ROWS, 0)
        at = gl.where(at + BLOCK_M >= end, first, at + BLOCK_M)
    dk, dv = warpgroup_mma_wait(0, [dk, dv])
    tokens = first + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, across))
    columns = gl.arange(0, D, layout=gl.SliceLayout(0, across))
    there, wide = (tokens < end)[:, None], tokens.to(gl.int64)[:, None]
    out = gl.convert_layout((dk * scale).to(kind), across)
    gl.store(dk_ptr + sequence * DK_B + group * DK_H + wide * DK_S + columns[None, :], out, mask=there)
    out = gl.convert_layout(dv.to(kind), across)
    gl.store(dv_ptr + sequence * DV_B + group * DV_H + wide * DV_S + columns[None, :], out, mask=there)


# ---- tiles, and calls ----

# By the width of heads: tiles of dq and of dk and dv, where these kernels were measured to be faster than Triton's.
TILES: dict[int, tuple[AttentionTiles, AttentionTiles]] = {}


def backward_tiles(D: int, options: AttentionOptions, device: torch.device) -> tuple[AttentionTiles, AttentionTiles] | None:
    """Return the tiles of these kernels where they take a call and are faster, or None."""
    causal = options.left < 0 and options.right == 0 and not options.softcap
    return TILES[D] if D in TILES and causal and is_hopper(device) else None


@lru_cache(64)
def is_hopper(device: torch.device) -> bool:
    """Whether the products and copies of these kernels are there."""
    if not HAS_GLUON or device.type != "cuda":
        return False
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.major) == 9


@lru_cache(1024)
def _bind_dq(strides: tuple[int, ...], heads: int, groups: int, D: int, scales: ScoreScales, tiles: AttentionTiles) -> Bound:
    sizes = heads, heads // groups, D, tiles.block_m, tiles.block_n, tiles.stages, tiles.num_warps
    bound: Bound = _dq_hopper_kernel.bind(scales.score, scales.scale, *strides, *sizes, num_warps=tiles.num_warps)
    return bound


@lru_cache(1024)
def _bind_dk_dv(strides: tuple[int, ...], heads: int, groups: int, D: int, scales: ScoreScales, tiles: AttentionTiles) -> Bound:
    sizes = groups, heads // groups, D, tiles.block_m, tiles.block_n, tiles.stages, tiles.num_warps
    bound: Bound = _dk_dv_hopper_kernel.bind(scales.score, scales.scale, *strides, *sizes, num_warps=tiles.num_warps)
    return bound


def write_dq(call: BackwardCall, dq: Tensor, tiles: AttentionTiles) -> None:
    """Write delta and dq."""
    B, S, H, _ = call.q.shape
    launch = _bind_dq((*call.strides, *dq.stride()[:3]), *call.sizes, call.scales, tiles)
    blocks, places = call.blocks(tiles.block_m)
    given = call.dy, call.q, call.k, call.v, call.y, call.lse, call.delta
    launch(grid_of(B * H, blocks), *given, dq, places, S, call.lse.shape[-1])


def write_dk_dv(call: BackwardCall, dk: Tensor, dv: Tensor, tiles: AttentionTiles) -> None:
    """Write dk and dv. Delta is there."""
    B, S, G, _ = call.k.shape
    launch = _bind_dk_dv((*call.strides, *dk.stride()[:3], *dv.stride()[:3]), *call.sizes, call.scales, tiles)
    blocks, places = call.blocks(tiles.block_n)
    given = call.dy, call.q, call.k, call.v, call.lse, call.delta
    launch(grid_of(B * G, blocks), *given, dk, dv, places, S, call.lse.shape[-1])
