"""Each token's position within its document, by one kernel: runtime/documents.py's `positions_within`, which is a dozen launches.

A program searches its tokens' documents in the boundaries, and looks at all of them: one that is wrong makes all positions -1.
"""

from __future__ import annotations

from functools import lru_cache

from torch import Tensor

from onepass.kernels.language import tl, triton_unsupported
from onepass.kernels.launch import Bound, kernel
from onepass.runtime.documents import positions_within
from onepass.runtime.op import Registered
from onepass.runtime.sizes import ceil_div

_BLOCK = 1024  # tokens of a program, and boundaries that it looks at together


@kernel
def _positions_kernel(cu_seqlens_ptr, positions_ptr, M, ROWS, HALVINGS, BLOCK: tl.constexpr):  # M tokens, ROWS boundaries
    tokens = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    wrong = ((tl.load(cu_seqlens_ptr) != 0) | (tl.load(cu_seqlens_ptr + ROWS - 1) != M)).to(tl.int32)
    for start in range(0, ROWS - 1, BLOCK):
        at = start + tl.arange(0, BLOCK)
        first = tl.load(cu_seqlens_ptr + at, mask=at < ROWS - 1, other=0)
        end = tl.load(cu_seqlens_ptr + at + 1, mask=at < ROWS - 1, other=0)
        wrong += tl.sum((end < first).to(tl.int32), 0)
    low, high = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32) + ROWS  # boundary `low` is at or before the token
    for _ in range(HALVINGS):
        middle = (low + high) // 2
        before = tl.load(cu_seqlens_ptr + middle) <= tokens
        low, high = tl.where(before, middle, low), tl.where(before, high, middle)
    positions = tl.where(wrong > 0, -1, tokens - tl.load(cu_seqlens_ptr + low))
    tl.store(positions_ptr + tokens, positions, mask=tokens < M)


def _positions(cu_seqlens: Tensor, T: int) -> Tensor:
    if T == 0 or triton_unsupported(cu_seqlens) is not None:
        return positions_within(cu_seqlens, T)
    positions = cu_seqlens.new_empty(T)
    count = cu_seqlens.shape[0]
    _plan(count.bit_length())((ceil_div(T, _BLOCK), 1, 1), cu_seqlens.contiguous(), positions, T, count)
    return positions


@lru_cache(32)
def _plan(halvings: int) -> Bound:
    bound: Bound = _positions_kernel.bind(halvings, _BLOCK)
    return bound


document_positions = Registered(
    "document_positions(Tensor cu_seqlens, int T) -> Tensor",
    _positions,
    lambda cu_seqlens, T: cu_seqlens.new_empty(T),
)
