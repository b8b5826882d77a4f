"""Causal attention's forward kernel, and how it is called; and cuDNN's, which is faster for wide heads and for many tokens.

A program owns BLOCK_M queries of one head and goes over the keys up to its last query, BLOCK_N at a time, with the softmax's
running maximum and sum. Tensors are read where they lie: [B, S, heads, D], each with strides of its own but for the last.
cuDNN's forward, unlike its backward, adds nothing up with atomics: on H200s it gave the same bits every time, and in any batch.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onepass.runtime.lang import device_function, tl
from onepass.runtime.launch import Bound, grid_of, kernel
from onepass.runtime.sizes import ceil_div, shared_memory

LOG2E = math.log2(math.e)


@device_function
def load_tokens(head_ptr, first, TOKEN, S, D: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr):
    """[BLOCK, D] of a head, from token `first` on; zeros past the sequence's end, which WHOLE says is not within."""
    tokens, columns = tl.arange(0, BLOCK), tl.arange(0, D)
    at = head_ptr + tl.cast(first, tl.int64) * TOKEN + tokens[:, None] * TOKEN + columns[None, :]
    if WHOLE:
        return tl.load(at)
    return tl.load(at, mask=(first + tokens < S)[:, None], other=0.0)


@device_function
def row_size(S):
    """Of the rows of one number a token: Hopper's copy engine wants them to begin at multiples of 16 bytes."""
    return (S + 3) // 4 * 4


@device_function
def _mix(
    m, total, y, q, k_head, v_head, first, queries, qk_scale, S, K_S, V_S,
    D: tl.constexpr, BLOCK_N: tl.constexpr, DIAGONAL: tl.constexpr,
):  # fmt: skip
    """A block of keys and values into the running maximum m (in units of log 2), sum and result."""
    k = load_tokens(k_head, first, K_S, S, D, BLOCK_N, not DIAGONAL)
    scores = tl.dot(q, tl.trans(k))
    if DIAGONAL:
        keys = first + tl.arange(0, BLOCK_N)
        scores = tl.where(queries[:, None] >= keys[None, :], scores, float("-inf"))
    highest = tl.max(scores, 1) * qk_scale
    higher = tl.where(highest > m, highest, m)
    higher = tl.where(highest == highest, higher, highest)  # NaN stays
    base = tl.where(higher == float("-inf"), 0.0, higher)  # of a row that sees nothing yet
    p = tl.exp2(scores * qk_scale - base[:, None])
    shrink = tl.exp2(m - base)
    total = total * shrink + tl.sum(p, 1)
    v = load_tokens(v_head, first, V_S, S, D, BLOCK_N, not DIAGONAL)
    y = tl.dot(p.to(v.dtype), v, y * shrink[:, None])
    return higher, total, y


@kernel
def _attend_kernel(
    q_ptr, k_ptr, v_ptr, y_ptr, lse_ptr, S, qk_scale, Q_B, Q_S, Q_H, K_B, K_S, K_H, V_B, V_S, V_H,
    HEADS: tl.constexpr, SHARING: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    block = tl.num_programs(1) - 1 - tl.program_id(1)  # the longest rows first, for an even end
    sequence, head = (tl.program_id(0) // HEADS).to(tl.int64), tl.program_id(0) % HEADS
    group = head // SHARING
    q_head = q_ptr + sequence * Q_B + head * Q_H
    k_head = k_ptr + sequence * K_B + group * K_H
    v_head = v_ptr + sequence * V_B + group * V_H
    first = block * BLOCK_M
    queries = first + tl.arange(0, BLOCK_M)
    q = load_tokens(q_head, first, Q_S, S, D, BLOCK_M, False)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    y = tl.zeros([BLOCK_M, D], tl.float32)
    for at in tl.range(0, first, BLOCK_N, num_stages=STAGES):
        m, total, y = _mix(m, total, y, q, k_head, v_head, at, queries, qk_scale, S, K_S, V_S, D, BLOCK_N, False)
    for at in tl.range(first, tl.minimum(first + BLOCK_M, S), BLOCK_N, num_stages=1):
        m, total, y = _mix(m, total, y, q, k_head, v_head, at, queries, qk_scale, S, K_S, V_S, D, BLOCK_N, True)
    there = queries < S
    lse_row = lse_ptr + (sequence * HEADS + head) * row_size(S)
    tl.store(lse_row + queries, m + tl.log2(total), mask=queries < row_size(S))  # to the row's end: nothing is left as it was
    y_row = y_ptr + ((sequence * S + first) * HEADS + head) * D + tl.arange(0, BLOCK_M)[:, None] * (HEADS * D)
    tl.store(y_row + tl.arange(0, D)[None, :], y / total[:, None], mask=there[:, None])


class Tiles(NamedTuple):
    """Queries and keys of a tile, warps, and blocks in flight; and how many programs a multiprocessor is to have, if told."""

    block_m: int
    block_n: int
    num_warps: int
    stages: int
    resident: int = 0


WIDE = 200_000  # bytes of shared memory, which GPUs have from Hopper on


@lru_cache(64)
def forward_tiles(D: int, room: int) -> Tiles:
    return Tiles(64, 64, 4, 3 if D <= 64 or room > WIDE else 2)


@lru_cache(1024)
def _bind(strides: tuple[int, ...], heads: int, groups: int, D: int, scale: float, tiles: Tiles) -> Bound:
    sizes = heads, heads // groups, D, tiles.block_m, tiles.block_n, tiles.stages
    bound: Bound = _attend_kernel.bind(scale * LOG2E, *strides, *sizes, num_warps=tiles.num_warps)
    return bound


def lse_size(S: int) -> int:
    return ceil_div(S, 4) * 4


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """y [B, S, H, D], contiguous, and the logarithm to base 2 of each row's sum, fp32 [B, H, `lse_size(S)`], of which
    backward makes the softmax again. q [B, S, H, D], k and v [B, S, G, D], with numbers, their last stride 1; scale above 0."""
    B, S, H, D = q.shape
    y = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(B, H, lse_size(S), dtype=torch.float32, device=q.device)
    tiles = forward_tiles(D, shared_memory(q.device))
    launch = _bind((*q.stride()[:3], *k.stride()[:3], *v.stride()[:3]), H, k.shape[2], D, scale, tiles)
    launch(grid_of(B * H, ceil_div(S, tiles.block_m)), q, k, v, y, lse, S)
    return y, lse


# ---- by cuDNN ----

# Tokens from which on it is faster than our kernels, by the size of heads (docs/notes/0014-attention.md): its forward, all of it.
_FORWARD_FROM = {64: 2048, 128: 512}
_NARROW, _ALL_FROM = 64, 2048  # wider heads: always
_STEP = 128  # of tokens: a plan for each new shape takes it 50 ms, so only for shapes that may come again
_INT32_MAX = 0x7FFFFFFF  # PyTorch keeps strides as int in what it knows a plan by
_WITHOUT_BUG = 91500  # cuDNN's version after which PyTorch prefers it; up to it some lengths went wrong


def _cudnn_version() -> int:
    """0 where there is none. torch.backends.cudnn.version() begins a context on every GPU, which then no fork may use."""
    cudnn = getattr(torch._C, "_cudnn", None)
    return 0 if cudnn is None else int(cudnn.getVersionInt())


_CUDNN = _cudnn_version()  # known when a compiler asks


def cudnn_is_there(x: Tensor, newest: int) -> bool:
    """Whether PyTorch would take cuDNN's attention on x's GPU, of an architecture from Hopper's to `newest`.

    `torch.backends.cuda.enable_cudnn_sdp(False)` makes it no. A compiler folds all of this: torch.backends.cuda and
    get_device_capability would break its graph.
    """
    if not x.is_cuda or not torch._C._get_cudnn_sdp_enabled() or _CUDNN <= _WITHOUT_BUG:
        return False
    properties: Any = torch.cuda.get_device_properties(x.device)
    return 9 <= int(properties.major) <= newest


def forward_by_cudnn(qkv: Tensor, D: int) -> bool:
    """Whether `attend_by_cudnn` takes the parts of this projection, and is faster than `attend`; where it was measured."""
    S = qkv.shape[1]
    if S % _STEP or _FORWARD_FROM.get(D, S + 1) > S or not cudnn_is_there(qkv, newest=9):
        return False
    return sum((size - 1) * stride for size, stride in zip(qkv.shape, qkv.stride(), strict=True)) <= _INT32_MAX


def all_by_cudnn(qkv: Tensor, D: int) -> bool:
    """Whether PyTorch's attention is faster than our kernels forward and backward, which then has no fixed order."""
    return cudnn_is_there(qkv, newest=10) and (D > _NARROW or qkv.shape[1] >= _ALL_FROM)


def attend_by_cudnn(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """What `attend` returns, of S that are multiples of 4."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    y, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention.default(q, k, v, None, True, 0.0, True, scale=scale)
    return y.transpose(1, 2).contiguous(), lse.view(q.shape[:3]).mul_(LOG2E)
