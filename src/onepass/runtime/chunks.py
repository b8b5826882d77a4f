"""Tokens in chunks, for formulas that are products within chunks and pass a state from one to the next.

A document begins a chunk, so that it has the bits that it has alone. No host reads the boundaries: there are as many chunks as so
many documents can have at most, and a token's slot is computed on the device. The slots that are left hold zeros, which change
no state.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass.runtime.documents import document_of
from onepass.runtime.sizes import ceil_div

CHUNK = 64  # tokens


class Slots(NamedTuple):
    """Where documents' tokens lie in chunks."""

    tokens: Tensor  # of each slot, or S where there is none
    slots: Tensor  # of each token
    document: Tensor  # of each chunk
    first: Tensor  # bool: the chunk is its document's first
    last: Tensor  # of each document: its last chunk, or any where it is empty
    empty: Tensor  # bool, of each document


def slots_of(cu_seqlens: Tensor, S: int) -> Slots:
    """Return the slots of S tokens. Where the boundaries are wrong the slots are any, within memory."""
    N, device = cu_seqlens.shape[0] - 1, cu_seqlens.device
    begins, ends = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
    counts = (ends - begins + CHUNK - 1).div(CHUNK, rounding_mode="floor").clamp(0, ceil_div(S, CHUNK))
    after = counts.cumsum(0)
    chunks = torch.arange(S // CHUNK + N, device=device)
    document = torch.searchsorted(after, chunks, right=True).clamp_(max=N - 1)
    within = chunks - (after - counts)[document]
    places = (within * CHUNK + begins[document])[:, None] + torch.arange(CHUNK, device=device)
    there = (chunks < after[-1])[:, None] & (places >= 0) & (places < ends[document].clamp(max=S)[:, None])
    tokens = torch.where(there, places, S).flatten()
    own = document_of(cu_seqlens, S).long().clamp_(0, N - 1)
    slots = (after - counts)[own] * CHUNK + torch.arange(S, device=device) - begins[own]
    last = (after - 1).clamp_(0, chunks.shape[0] - 1)
    return Slots(tokens, slots.clamp_(0, tokens.shape[0] - 1), document, within == 0, last, counts == 0)


def in_chunks(t: Tensor, heads: int, slots: Slots | None) -> Tensor:
    """Return rows [B, S, some heads, width] as [B, heads, chunks, CHUNK, width]. Heads of keys serve several of values."""
    if slots is None:
        missing = max(CHUNK, ceil_div(t.shape[1], CHUNK) * CHUNK) - t.shape[1]
        t = F.pad(t, (0, 0, 0, 0, 0, missing))
    else:
        t = F.pad(t, (0, 0, 0, 0, 0, 1)).index_select(1, slots.tokens)
    t = t.unflatten(1, (-1, CHUNK)).permute(0, 3, 1, 2, 4)
    return t if t.shape[1] == heads else t.repeat_interleave(heads // t.shape[1], 1)
