"""Packed rows: several documents in a row of tokens, each of which sees itself only.

`Model` takes boundaries by row. Blocks take them joined: those of all rows, counted from the first row's first token. Rows end
where documents do, so a document that fills up a row's boundaries is an empty one between two rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from onepass.runtime.documents import are_readable, are_right, check_documents, document_of, positions_within


def joined_boundaries(cu_seqlens: Tensor, x: Tensor, batch: int, length: int, longest: int) -> Tensor:
    """Return int32 [any]: the boundaries of x's rows after one another. Where a row's are wrong, so are all.

    Args:
        cu_seqlens: [documents + 1] of a single row, or [batch, documents + 1].
        longest: the most tokens of a document.
    """
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dim() != 2:
        check_documents(cu_seqlens, x, (batch, length), "x")
        cu_seqlens = cu_seqlens[None]
    if cu_seqlens.shape[0] != batch:
        raise ValueError(
            f"cu_seqlens must have a row of boundaries for each of x's {batch} rows, but has shape {tuple(cu_seqlens.shape)}"
        )
    for row in cu_seqlens.unbind():
        check_documents(row, x, (1, length), "a row of x")
    if are_readable(cu_seqlens) and (most := int(cu_seqlens.diff(dim=1).max())) > longest:
        raise ValueError(f"cu_seqlens must have documents of at most max_position_embeddings, {longest}, but has one of {most}")
    first = torch.arange(0, batch * length, length, device=cu_seqlens.device, dtype=torch.int32)[:, None]
    right = (cu_seqlens[:, :1] == 0) & (cu_seqlens[:, -1:] == length)
    return torch.where(right, cu_seqlens + first, -1).flatten()


def positions_in_rows(boundaries: Tensor, batch: int, length: int) -> Tensor:
    """Return [batch, length]: each token's position within its document, or -1 where boundaries are wrong."""
    return positions_within(boundaries, batch * length).view(batch, length)


def visible_keys(boundaries: Tensor, batch: int, length: int) -> Tensor:
    """Return a mask [batch, 1, length, length] of causal attention within documents."""
    documents = document_of(boundaries, batch * length).view(batch, length)
    same = documents[:, :, None] == documents[:, None, :]
    return same.tril()[:, None]


def nan_if_wrong(y: Tensor, boundaries: Tensor, tokens: int) -> Tensor:
    return y.masked_fill(~are_right(boundaries, tokens), torch.nan)
