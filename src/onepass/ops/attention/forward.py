"""Causal attention's forward kernel and its launch; and cuDNN's forward, which is faster for wide heads and for many tokens.

A program owns BLOCK_M queries of one head and loops over the keys up to its last query, BLOCK_N at a time, with the softmax's
running maximum and sum. Tensors are read in place: [B, S, heads, D], each with its own strides except for the last, which is 1.
cuDNN's forward, unlike its backward, sums without atomics: on H200s it gave the same bits every time, and in any batch.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onepass.kernels.language import device_function, tl
from onepass.kernels.launch import Bound, grid_of, kernel
from onepass.runtime.sizes import ceil_div, shared_memory

LOG2E = math.log2(math.e)


@device_function
def load_tokens(head_ptr, first, TOKEN, S, D: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr):
    """Load [BLOCK, D] of a head from token `first` on; zeros past the sequence's end. WHOLE: the end is not within."""
    tokens, columns = tl.arange(0, BLOCK), tl.arange(0, D)
    at = head_ptr + tl.cast(first, tl.int64) * TOKEN + tokens[:, None] * TOKEN + columns[None, :]
    if WHOLE:
        return tl.load(at)
    return tl.load(at, mask=(first + tokens < S)[:, None], other=0.0)


@device_function
def row_size(S):
    """Length of lse's and delta's rows: Hopper's copy engine needs rows to begin at multiples of 16 bytes."""
    return (S + 3) // 4 * 4


@device_function
def _mix(
    m, total, y, q, k_head, v_head, first, queries, qk_scale, S, K_S, V_S,
    D: tl.constexpr, BLOCK_N: tl.constexpr, DIAGONAL: tl.constexpr,
):  # fmt: skip
    """Add a block of keys and values to the running maximum m (in units of log 2), sum and result."""
    k = load_tokens(k_head, first, K_S, S, D, BLOCK_N, not DIAGONAL)
    scores = tl.dot(q, tl.trans(k))
    if DIAGONAL:
        keys = first + tl.arange(0, BLOCK_N)
        scores = tl.where(queries[:, None] >= keys[None, :], scores, float("-inf"))
    highest = tl.max(scores, 1) * qk_scale
    higher = tl.where(highest > m, highest, m)
    higher = tl.where(highest == highest, higher, highest)  # NaN stays
    base = tl.where(higher == float("-inf"), 0.0, higher)  # the row has seen no key yet
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
    # to the row's end: no memory is left uninitialised
    tl.store(lse_row + queries, m + tl.log2(total), mask=queries < row_size(S))
    y_row = y_ptr + ((sequence * S + first) * HEADS + head) * D + tl.arange(0, BLOCK_M)[:, None] * (HEADS * D)
    tl.store(y_row + tl.arange(0, D)[None, :], y / total[:, None], mask=there[:, None])


class AttentionTiles(NamedTuple):
    """Tiles of one kernel, and how it is compiled."""

    block_m: int  # queries
    block_n: int  # keys
    num_warps: int
    stages: int  # blocks in flight
    resident: int = 0  # programs on a multiprocessor; 0 leaves it to the compiler


HOPPER_SMEM = 200_000  # bytes: GPUs have more shared memory than this from Hopper on


@lru_cache(64)
def forward_tiles(D: int, smem: int) -> AttentionTiles:
    return AttentionTiles(64, 64, 4, 3 if D <= 64 or smem > HOPPER_SMEM else 2)


@lru_cache(1024)
def _bind(strides: tuple[int, ...], heads: int, groups: int, D: int, scale: float, tiles: AttentionTiles) -> Bound:
    sizes = heads, heads // groups, D, tiles.block_m, tiles.block_n, tiles.stages
    bound: Bound = _attend_kernel.bind(scale * LOG2E, *strides, *sizes, num_warps=tiles.num_warps)
    return bound


def lse_size(S: int) -> int:
    return ceil_div(S, 4) * 4


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return y [B, S, H, D], contiguous, and the logarithm to base 2 of each row's sum, fp32 [B, H, `lse_size(S)`].

    Backward computes the softmax again from that logarithm. q is [B, S, H, D], k and v are [B, S, G, D]; none is empty, their
    last strides are 1, and scale is above 0.
    """
    B, S, H, D = q.shape
    y = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(B, H, lse_size(S), dtype=torch.float32, device=q.device)
    tiles = forward_tiles(D, shared_memory(q.device))
    launch = _bind((*q.stride()[:3], *k.stride()[:3], *v.stride()[:3]), H, k.shape[2], D, scale, tiles)
    launch(grid_of(B * H, ceil_div(S, tiles.block_m)), q, k, v, y, lse, S)
    return y, lse


# ---- by cuDNN ----

# From how many tokens on it is faster than our kernels, by the size of heads (docs/notes/0014-attention.md).
_FORWARD_FROM = {64: 2048, 128: 512}  # its forward alone
_NARROW, _ALL_FROM = 64, 2048  # forward and backward, for heads of up to 64; wider heads: always
_STEP = 128  # of tokens: it plans 50 ms for each new shape, so it gets only shapes that are likely to come again
_INT32_MAX = 0x7FFFFFFF  # PyTorch keeps strides as int in the key of a plan
_WITHOUT_BUG = 91500  # cuDNN's version after which PyTorch prefers it; up to it some lengths went wrong


def _cudnn_version() -> int:
    """cuDNN's version, or 0. torch.backends.cudnn.version() would start a context on every GPU, which no fork may then use."""
    cudnn = getattr(torch._C, "_cudnn", None)
    return 0 if cudnn is None else int(cudnn.getVersionInt())


_CUDNN = _cudnn_version()  # a constant, which a compiler can fold


def has_cudnn(x: Tensor, newest: int) -> bool:
    """Whether PyTorch would take cuDNN's attention on x's GPU, of an architecture from Hopper's to `newest`.

    `torch.backends.cuda.enable_cudnn_sdp(False)` turns it off. A compiler can fold everything here; torch.backends.cuda and
    get_device_capability would break its graph.
    """
    if not x.is_cuda or not torch._C._get_cudnn_sdp_enabled() or _CUDNN <= _WITHOUT_BUG:
        return False
    properties: Any = torch.cuda.get_device_properties(x.device)
    return 9 <= int(properties.major) <= newest


def forward_by_cudnn(qkv: Tensor, D: int) -> bool:
    """Whether `attend_by_cudnn` takes the parts of this projection and was measured to be faster than `attend`."""
    S = qkv.shape[1]
    if S % _STEP or _FORWARD_FROM.get(D, S + 1) > S or not has_cudnn(qkv, newest=9):
        return False
    return sum((size - 1) * stride for size, stride in zip(qkv.shape, qkv.stride(), strict=True)) <= _INT32_MAX


def all_by_cudnn(qkv: Tensor, D: int) -> bool:
    """Whether PyTorch's attention is faster forward and backward. Its backward sums in no fixed order."""
    return has_cudnn(qkv, newest=10) and (D > _NARROW or qkv.shape[1] >= _ALL_FROM)


def attend_by_cudnn(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Like `attend`, for an S that is a multiple of 4."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    y, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention.default(q, k, v, None, True, 0.0, True, scale=scale)
    return y.transpose(1, 2).contiguous(), lse.view(q.shape[:3]).mul_(LOG2E)
