"""Lists of tiles over documents that follow each other, made on the GPU, where the boundaries are.

A tile is a document and a block of its tokens, which begins at a multiple of the block's size from the document's start. So a
document's tiles are those it has alone. A grid must be launched without knowing how many there are: ceil(T / BLOCK) + documents
are enough. Tiles of most work come first, for an even end; places that are left have an empty tile.

A program has a document. The place of each of its tiles is how many tiles of all documents come before it: documents x tiles
comparisons in all, 8,000 for 16 documents of 2048, 4 million for 1000 of 128.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from onepass.kernels.language import device_function, tl
from onepass.kernels.launch import Bound, kernel
from onepass.runtime.sizes import ceil_div

FIELDS = 4  # of a tile: its document's first token and end, its block there, and the document, or -1 where boundaries are wrong


@device_function
def _are_wrong(boundaries_ptr, S, M, CHUNK: tl.constexpr):
    """Whether the boundaries don't begin with 0, don't end with S, or fall."""
    falls = tl.zeros([CHUNK], tl.int32)
    for at in range(0, M, CHUNK):
        documents = at + tl.arange(0, CHUNK)
        first = tl.load(boundaries_ptr + documents, mask=documents < M, other=0)
        end = tl.load(boundaries_ptr + documents + 1, mask=documents < M, other=0)
        falls = falls | (end < first).to(tl.int32)
    return (tl.max(falls, 0) > 0) | (tl.load(boundaries_ptr) != 0) | (tl.load(boundaries_ptr + M) != S)


@device_function
def _ranges(boundaries_ptr, documents, wrong, S, M):
    """Return documents' first tokens and ends. Where the boundaries are wrong the first document has all tokens."""
    first = tl.load(boundaries_ptr + documents, mask=documents < M, other=0)
    end = tl.load(boundaries_ptr + documents + 1, mask=documents < M, other=0)
    return tl.where(wrong, 0, first), tl.where(wrong, tl.where(documents == 0, S, 0), end)


@kernel
def _document_tiles_kernel(boundaries_ptr, tiles_ptr, M, S, BLOCK: tl.constexpr, CAUSAL: tl.constexpr, CHUNK: tl.constexpr):
    document = tl.program_id(0)
    wrong = _are_wrong(boundaries_ptr, S, M, CHUNK)
    first, end = _ranges(boundaries_ptr, document, wrong, S, M)
    count = tl.cdiv(end - first, BLOCK)
    total = tl.zeros([CHUNK], tl.int32)
    for at in range(0, M, CHUNK):
        others = at + tl.arange(0, CHUNK)
        from_there, to_there = _ranges(boundaries_ptr, others, wrong, S, M)
        total += tl.cdiv(to_there - from_there, BLOCK)
    for of_mine in range(0, count, CHUNK):
        blocks = of_mine + tl.arange(0, CHUNK)
        place = tl.zeros([CHUNK], tl.int32)
        for at in range(0, M, CHUNK):
            others = at + tl.arange(0, CHUNK)
            from_there, to_there = _ranges(boundaries_ptr, others, wrong, S, M)
            counts, sooner = tl.cdiv(to_there - from_there, BLOCK)[None, :], (others < document)[None, :]
            if CAUSAL:  # the work of a block grows with its number
                more = tl.maximum(counts - 1 - blocks[:, None], 0) + (sooner & (counts > blocks[:, None])).to(tl.int32)
            else:  # with its document's
                more = tl.where((counts > count) | (sooner & (counts == count)), counts, 0)
            place += tl.sum(tl.broadcast_to(more, [CHUNK, CHUNK]), 1)
        if not CAUSAL:
            place += blocks
        tile = tiles_ptr + 4 * place
        there = blocks < count
        tl.store(tile, first + tl.zeros_like(blocks), mask=there)
        tl.store(tile + 1, end + tl.zeros_like(blocks), mask=there)
        tl.store(tile + 2, blocks, mask=there)
        tl.store(tile + 3, tl.where(wrong, -1, document) + tl.zeros_like(blocks), mask=there)
    left = tl.sum(total, 0) + document  # as many documents as places that may be left
    fields = tl.arange(0, 4)
    tl.store(tiles_ptr + 4 * left + fields, tl.zeros([4], tl.int32), mask=(fields < 4) & (left < tl.cdiv(S, BLOCK) + M))


@lru_cache(64)
def _bind_tiles(block: int, causal: bool) -> Bound:
    bound: Bound = _document_tiles_kernel.bind(block, causal, 64)
    return bound


def document_tiles(cu_seqlens: Tensor, T: int, block: int, causal: bool) -> Tensor:
    """Return int32 [ceil(T / block) + documents, `FIELDS`]: all documents' tiles, then empty ones."""
    documents = cu_seqlens.shape[0] - 1
    tiles = torch.empty(ceil_div(T, block) + documents, FIELDS, dtype=torch.int32, device=cu_seqlens.device)
    _bind_tiles(block, causal)((documents, 1, 1), cu_seqlens, tiles, documents, T)
    return tiles


# ---- for other packages' kernels, which believe boundaries ----


@kernel
def _checked_kernel(boundaries_ptr, checked_ptr, M, S, CHUNK: tl.constexpr):
    wrong = _are_wrong(boundaries_ptr, S, M, CHUNK)
    for at in range(0, M + 1, CHUNK):
        places = at + tl.arange(0, CHUNK)
        boundaries = tl.load(boundaries_ptr + places, mask=places <= M, other=0)
        tl.store(checked_ptr + places, tl.where(wrong, tl.where(places == 0, 0, S), boundaries), mask=places <= M)
    tl.store(checked_ptr + M + 1, wrong.to(tl.int32))


@kernel
def _nan_kernel(wrong_ptr, x_ptr, M, BLOCK: tl.constexpr):
    if tl.load(wrong_ptr) != 0:
        places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        tl.store(x_ptr + places, float("nan"), mask=places < M)


@lru_cache(1)
def _bind_checked() -> tuple[Bound, Bound]:
    return _checked_kernel.bind(64), _nan_kernel.bind(1024)


def checked_boundaries(cu_seqlens: Tensor, T: int) -> tuple[Tensor, Tensor]:
    """Return the boundaries, or one document's where they are wrong, and int32 [1], whether they are."""
    documents = cu_seqlens.shape[0] - 1
    checked = torch.empty(documents + 2, dtype=torch.int32, device=cu_seqlens.device)
    _bind_checked()[0]((1, 1, 1), cu_seqlens, checked, documents, T)
    return checked[:-1], checked[-1:]


def make_nan(x: Tensor, wrong: Tensor) -> None:
    """Fill a contiguous x with NaN where boundaries are `wrong`. It isn't touched elsewhere."""
    _bind_checked()[1]((ceil_div(x.numel(), 1024), 1, 1), wrong, x, x.numel())
