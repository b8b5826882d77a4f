"""Tokens in chunks, for formulas that are products within chunks and pass a state from one to the next.

A document begins a chunk, so that it has the bits that it has alone. No host reads the boundaries: there are as many chunks as so
many documents can have at most, and a token's slot is computed on the device. The slots that are left hold zeros, which change
no state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass.runtime.batch_invariance import invariant
from onepass.runtime.documents import document_of, documents_in_turn
from onepass.runtime.formula import run_formula
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


class SequenceShapes(NamedTuple):
    """What a rule that passes states through sequences returns."""

    y: torch.Size
    state: tuple[int, ...]  # of one sequence or document


def run_sequences(
    formula: Callable[..., tuple[Tensor, Tensor]], tokens: Sequence[Tensor], states: Tensor | None, shapes: SequenceShapes,
    cu_seqlens: Tensor | None, final: bool, shared: Sequence[Tensor | None] = (),
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """`run_formula` of whole sequences, which are its rows: return y, and with `final` the states after the last tokens.

    Args:
        formula: gives y and the last states of the tokens' tensors, the first states or None, and the shared tensors.
        tokens: ``[B, S, ...]`` each.
        states: of each sequence, or of each document of the one sequence; None: zeros.
    """

    def of_rows(x: Tensor, *rest: Tensor | None) -> Tensor | tuple[Tensor, Tensor]:
        per_row = (x, *rest[len(shared) :])
        *rows, first = (t if t is None else t.unflatten(-1, shape) for t, shape in zip(per_row, of_row, strict=True))
        if cu_seqlens is not None and first is not None:
            first = first.squeeze(0)
        y, last = formula(*rows, first, *rest[: len(shared)])
        return (y.flatten(1), states_as_rows(last)) if final else y.flatten(1)

    def states_as_rows(states: Tensor) -> Tensor:
        return states.flatten(1) if cu_seqlens is None else states.flatten()[None]

    documents = () if cu_seqlens is None else (cu_seqlens.shape[0] - 1,)
    of_row = (*(t.shape[1:] for t in tokens), (*documents, *shapes.state))
    first, *others = (t.flatten(1) for t in tokens)
    rows = run_formula(
        of_rows, "input", first, shared=(*shared,), per_row=(*others, None if states is None else states_as_rows(states)),
        alone=True,
    )  # fmt: skip
    if not final:
        return rows.view(shapes.y)  # type: ignore[no-any-return]
    return rows[0].view(shapes.y), rows[1].view(*(documents or shapes.y[:1]), *shapes.state)


def chunk_by_chunk(
    rule: Callable[..., tuple[Tensor, Tensor]], tokens: Sequence[Tensor], states: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return what `rule` makes of tokens [B, S, ...], first states and boundaries: y and the last states.

    Under `batch_invariant()` each chunk is a call of its own, as products of other shapes have other bits.
    """
    if not invariant() or not tokens[0].numel():
        return rule(tokens, states, cu_seqlens)
    B, S = tokens[0].shape[:2]
    ys: list[Tensor] = []
    last: list[Tensor] = []
    for row in range(B):
        for first, end in documents_in_turn(cu_seqlens, S, "a rule of states by PyTorch's operators"):
            state = None if states is None else states[len(last) : len(last) + 1]
            for at in range(first, max(end, first + 1), CHUNK):  # one chunk of a document without tokens
                y, state = rule([t[row : row + 1, at : min(at + CHUNK, end)] for t in tokens], state, None)
                ys.append(y[0])
            assert state is not None
            last.append(state)
    return torch.cat(ys).unflatten(0, (B, S)), torch.cat(last)


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
