"""Boundaries of the documents in a batch, from what transformers' data collators give: positions, lengths or a padding mask."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass.ops.loss.kept_rows import can_count
from onepass.runtime.documents import are_right
from onepass.runtime.sizes import ceil_div


class Refused(Exception):
    """What a call has that onepass's attention does not take."""


def documents_of_lengths(cu_seqlens: object, of_keys: object, device: torch.device) -> Tensor:
    """Return the boundaries that a collator has counted, over all rows, as flash attention has them."""
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dim() != 1 or cu_seqlens.dtype != torch.int32:
        raise Refused("cu_seq_lens_q that is no int32 tensor of boundaries")
    if not isinstance(of_keys, Tensor | None) or (of_keys is not None and of_keys.shape != cu_seqlens.shape):
        raise Refused("cu_seq_lens_k of other documents")
    return cu_seqlens.to(device, non_blocking=True)


def documents_unread(positions: Tensor, rows: int, tokens: int) -> Tensor:
    """Return int32 boundaries where positions begin again, and as many empty documents at the end as there can be documents.

    Nothing is read by the host.
    """
    starts = starts_of(positions, False).expand(rows, tokens)
    numbers = torch.arange(1, rows * tokens + 2, device=positions.device)
    return torch.searchsorted(starts.flatten().cumsum(0), numbers, out_int32=True)


def as_one_row(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return tensors [rows, tokens, ...] as [1, rows * tokens, ...], over which boundaries count."""
    return tuple(x if x.shape[0] == 1 else x.flatten(0, 1)[None] for x in tensors)


def documents_of_rows(
    ids_or_mask: object, rows: int, tokens: int, device: torch.device, *, padding: bool, from_zero: bool = False
) -> Tensor | None:
    """Return int32 boundaries over all rows, one after the other, or None where each row is one document.

    A GPU's host waits once to read two numbers: how many documents there are, and whether a mask has holes. Transformers waits
    too, to see whether there is anything to mask. Tokens that a mask hides are documents of their own, which no other token sees.
    from_zero: refuse documents in a row whose positions begin elsewhere.
    """
    name = "attention_mask" if padding else "position_ids"
    shapes = (rows, tokens), (1, tokens)
    if not isinstance(ids_or_mask, Tensor) or ids_or_mask.shape not in shapes or not tokens:
        raise Refused(f"{name} of another shape than [rows, tokens]")
    if not can_count(ids_or_mask):
        raise Refused(f"{name} in a captured graph")
    ids_or_mask = ids_or_mask.to(device, non_blocking=True)
    starts = starts_of(ids_or_mask, padding).expand(rows, tokens)
    begins = starts & (ids_or_mask != 0) if from_zero else starts.new_zeros(1)
    wrong = has_holes(ids_or_mask) if padding else begins.any()
    count, is_wrong = torch.stack([starts.sum(), wrong.long()]).tolist()
    if is_wrong and padding:
        raise Refused("attention_mask with holes")
    if count == rows:
        return None
    if is_wrong:
        raise Refused("position_ids of documents that don't begin at 0, in layers with chunks")
    numbers = torch.arange(1, count + 2, device=device)
    return torch.searchsorted(starts.flatten().cumsum(0), numbers, out_int32=True)  # past the last document: all tokens


def documents_of_padding(mask: Tensor) -> Tensor:
    """Return int32 boundaries of three documents a row: hidden tokens, those that are kept, hidden ones. Each may be empty.

    Nothing is read by the host. A mask with holes makes boundaries that are wrong, of which attention makes NaN.
    """
    rows, tokens = mask.shape
    kept = mask.to(torch.int32)
    count, first, end = kept.sum(1), kept.argmax(1), tokens - kept.flip(1).argmax(1)  # of a row without any: 0 and all tokens
    begin = torch.arange(rows, device=mask.device) * tokens
    bounds = torch.stack([begin, begin + first, begin + end], 1).flatten()
    holes = ((count > 0) & (count != end - first)).any()
    return torch.where(holes, -1, F.pad(bounds, (0, 1), value=rows * tokens)).to(torch.int32)


def chunk_count(documents: Tensor | None, rows: int, tokens: int, chunk: int) -> int:
    """Return how many documents `chunks_of` makes."""
    return rows * ceil_div(tokens, chunk) if documents is None else documents.shape[0] - 1 + rows * tokens // chunk


def chunks_of(documents: Tensor | None, rows: int, tokens: int, chunk: int, device: torch.device) -> Tensor:
    """Return int32 boundaries of the documents' chunks, or those of whole rows: a chunk begins at each multiple of its length.

    Nothing is read by the host, so there are as many as there can be, the last ones empty. Boundaries that are wrong stay wrong.
    """
    total = rows * tokens
    if documents is None:
        begin = torch.arange(0, total, tokens, device=device)[:, None] + torch.arange(0, tokens, chunk, device=device)
        return F.pad(begin.flatten(), (0, 1), value=total).to(torch.int32)
    parts = (documents.diff() + chunk - 1) // chunk
    ends = parts.cumsum(0)
    number = torch.arange(chunk_count(documents, rows, tokens, chunk) + 1, device=device)
    document = torch.searchsorted(ends, number, right=True).clamp_(max=parts.shape[0] - 1)
    begin = documents[document] + (number - (ends - parts)[document]) * chunk
    bounds = torch.minimum(begin, documents[document + 1])
    return torch.where(are_right(documents, total), bounds, -1).to(torch.int32)


def starts_of(ids_or_mask: Tensor, padding: bool) -> Tensor:
    """Return [rows, tokens], true where a document begins: where positions don't go on, or a mask changes."""
    if padding:
        visible = ids_or_mask.bool()
        changes = visible[:, 1:] != visible[:, :-1]
    else:
        changes = ids_or_mask[:, 1:] - ids_or_mask[:, :-1] != 1
    return F.pad(changes, (1, 0), value=True)


def has_holes(mask: Tensor) -> Tensor:
    """Return whether a row keeps tokens on both sides of some that it hides: those see each other, and are one document."""
    visible = mask.bool()
    runs = (visible[:, 1:] & ~visible[:, :-1]).sum(1) + visible[:, 0]
    return (runs > 1).any()
