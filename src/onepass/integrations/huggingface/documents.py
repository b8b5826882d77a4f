"""Boundaries of the documents in a batch, from what transformers' data collators give: positions, lengths or a padding mask."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass.ops.loss.kept_rows import can_count


class Refused(Exception):
    """What a call has that onepass's attention does not take."""


def documents_of_lengths(cu_seqlens: object, of_keys: object, device: torch.device, rows: int) -> Tensor:
    """Return the boundaries that a collator has counted."""
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dim() != 1 or cu_seqlens.dtype != torch.int32 or rows != 1:
        raise Refused("cu_seq_lens_q that is no int32 tensor of one row's boundaries")
    if not isinstance(of_keys, Tensor | None) or (of_keys is not None and of_keys.shape != cu_seqlens.shape):
        raise Refused("cu_seq_lens_k of other documents")
    return cu_seqlens.to(device, non_blocking=True)


def documents_of_rows(given: object, rows: int, tokens: int, device: torch.device, *, padding: bool) -> Tensor | None:
    """Return int32 boundaries over all rows, one after the other, or None where each row is one document.

    A GPU's host waits once to read two numbers: how many documents there are, and whether a mask has holes. Transformers waits
    too, to see whether there is anything to mask. Tokens that a mask hides are documents of their own, which no other token sees.
    """
    name = "attention_mask" if padding else "position_ids"
    if not isinstance(given, Tensor) or given.dim() != 2 or given.shape not in ((rows, tokens), (1, tokens)) or not tokens:
        raise Refused(f"{name} of another shape than [rows, tokens]")
    if not can_count(given):
        raise Refused(f"{name} in a captured graph")
    given = given.to(device, non_blocking=True)
    starts = starts_of(given, padding).expand(rows, tokens)
    holes = has_holes(given) if padding else starts.new_zeros(())
    count, wrong = torch.stack([starts.sum(), holes.long()]).tolist()
    if wrong:
        raise Refused("attention_mask with holes")
    if count == rows:
        return None
    numbers = torch.arange(1, count + 2, device=device)
    return torch.searchsorted(starts.flatten().cumsum(0), numbers, out_int32=True)  # past the last document: all tokens


def starts_of(given: Tensor, padding: bool) -> Tensor:
    """Return [rows, tokens], true where a document begins: where positions don't go on, or a mask changes."""
    if padding:
        kept = given.bool()
        changes = kept[:, 1:] != kept[:, :-1]
    else:
        changes = given[:, 1:] - given[:, :-1] != 1
    return F.pad(changes, (1, 0), value=True)


def has_holes(mask: Tensor) -> Tensor:
    """Return whether a row keeps tokens on both sides of some that it hides: those see each other, and are one document."""
    kept = mask.bool()
    runs = (kept[:, 1:] & ~kept[:, :-1]).sum(1) + kept[:, 0]
    return (runs > 1).any()
