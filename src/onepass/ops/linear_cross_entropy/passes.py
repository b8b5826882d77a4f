"""The passes of linear_cross_entropy: products, and what is done to the logits between them, chunk by chunk.

What comes out does not depend on how it was divided, but for the last bits of fp32 sums, and for the scale at which gradients of
16-bit logits are rounded: times what comes back, or before it, where that is not known in forward. Over ranks each has some of
the vocabulary: what they find of the rows goes to all in one message a chunk, under the next chunk's product.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onepass.kernels.cross_entropy_formula import RowLosses, lse_type
from onepass.kernels.softmax_rows import Incoming
from onepass.ops.linear_cross_entropy.head import Chunks, Head, Logits, hidden_gradient, make_logits, new_buffer, wide_type
from onepass.ops.linear_cross_entropy.plan import Plan
from onepass.parallel.collectives import Pending, start_all_reduce, start_reduce_scatter
from onepass.parallel.vocabulary import gathered_parts
from onepass.runtime.main_grad import add_gradient
from onepass.runtime.sizes import ceil_div

# ---- what the pass finds ----


class Found:
    """Room for what is known of all rows."""

    def __init__(self, head: Head, full: bool) -> None:
        kind = wide_type(head.hidden)
        kinds = (kind, lse_type(head.logits), kind, kind, torch.bool)[: 5 if full else 2]
        self.rows = RowLosses(*(head.hidden.new_empty(head.tokens, dtype=each) for each in kinds))

    def put(self, chunks: Chunks, chunk: slice, found: RowLosses) -> None:
        for into, values in zip(self.rows, found, strict=True):
            if into is not None and values is not None:
                chunks.put(chunk, values, into)


def losses(head: Head, plan: Plan, full: bool) -> tuple[RowLosses, Logits | None]:
    """What is known of all rows, and where they are to be kept, their logits."""
    chunks, found = Chunks(head, plan.rows), Found(head, full)
    buffer = new_buffer(head, chunks.most, plan.columns)
    logits, before = None, None
    for at, chunk in enumerate(chunks):
        hidden, labels, parts = chunks.hidden(chunk, chunks.after(at)), chunks.take(chunk, head.labels), []
        for first in range(0, max(head.columns, 1), plan.columns or 1):
            logits = make_logits(head, hidden, first, plan.columns, buffer)
            parts.append(_statistics(head, logits, labels, full))
        telling = _tell(head, parts[0] if len(parts) == 1 else torch.cat(parts), full)
        if before is not None:
            _finish(head, chunks, found, full, *before)
        before = chunk, labels, telling
    assert before is not None
    _finish(head, chunks, found, full, *before)
    return found.rows, logits


def _room(head: Head, logits: Logits) -> tuple[int, ...]:
    return (logits.room,) if head.native else ()


def _statistics(head: Head, logits: Logits, labels: Tensor, full: bool) -> Tensor:
    found: Tensor = head.rows.statistics(
        logits.x, labels, head.terms, full, logits.first, head.columns, head.place, *_room(head, logits)
    )
    return found


def _gradient(
    head: Head, logits: Logits, labels: Tensor, lse: Tensor, entropy: Tensor | None, incoming: Incoming
) -> None:  # fmt: skip
    head.rows.gradient(
        logits.x, logits.out, labels, head.terms, lse, entropy, incoming, logits.first, head.columns, head.place,
        *_room(head, logits),
    )  # fmt: skip


def _tell(head: Head, parts: Tensor, full: bool) -> Pending:
    """What all ranks have found, of each row."""
    if head.spread is None:
        return Pending(parts)
    return gathered_parts(head.rows.merged(parts, head.terms, full), head.spread.group)


def _finish(head: Head, chunks: Chunks, found: Found, full: bool, chunk: slice, labels: Tensor, telling: Pending) -> RowLosses:
    done: RowLosses = head.rows.finished(telling.wait(), labels, head.terms, full, head.columns, head.logits, head.place)
    found.put(chunks, chunk, done)
    return done


# ---- where products are added up ----


class Gradients(NamedTuple):
    """Where gradients go, or None where nobody asks: hidden's, of this rank's part; the weight's and the bias's, which may be
    a main_grad. In what is narrower than fp32 only whole sums are put."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


class _HiddenSum:
    """Over blocks of the vocabulary, and over ranks. The sum over ranks is under way while the weight's product is made."""

    def __init__(self, head: Head, chunks: Chunks, into: Tensor | None, blocks: int) -> None:
        self.head, self.chunks, self.into, self.blocks = head, chunks, into, blocks
        self.sums = None
        self.under_way: list[tuple[slice, Pending]] = []
        if into is not None and blocks > 1 and (head.spread is not None or into.dtype != wide_type(into)):
            self.sums = into.new_empty(head.tokens, into.shape[1], dtype=wide_type(into))

    def add(self, chunk: slice, logits: Logits, block: int) -> None:
        if self.into is None:
            return
        if self.sums is not None:
            hidden_gradient(self.head, logits, self.sums[self.chunks.places(chunk)], block > 0)
            if block == self.blocks - 1:
                self._put(chunk, self.sums[self.chunks.places(chunk)].to(self.into.dtype))
        elif self.head.spread is None:
            hidden_gradient(self.head, logits, self.into[chunk], block > 0)
        else:
            product = self.into.new_empty(logits.out.shape[0], self.into.shape[1])
            hidden_gradient(self.head, logits, product)
            self._put(chunk, product)

    def _put(self, chunk: slice, product: Tensor) -> None:
        spread = self.head.spread
        if spread is None:
            assert self.into is not None
            self.into[chunk] = product
        else:
            start = start_reduce_scatter if spread.sequence else start_all_reduce
            self.under_way.append((chunk, start(product, spread.group)))

    def finish(self) -> None:
        for chunk, pending in self.under_way:
            assert self.into is not None
            self.into[chunk] = pending.wait()


class _WeightSum:
    """Over chunks, for one block of the vocabulary or several. The bias's beside it."""

    def __init__(self, into: Gradients, chunks: Chunks, keep: bool, first: int, columns: int) -> None:
        """Of these columns. keep: to what is there already of the weight's."""
        self.part = slice(first, first + columns)
        self.weight = None if into.weight is None else into.weight[self.part]
        self.bias = None if into.bias is None else into.bias[self.part]
        self.keep, self.begun = keep, False
        self.sums = self.weight
        if self.weight is not None and len(chunks) > 1 and self.weight.dtype != wide_type(self.weight):
            self.sums, self.keep = torch.empty_like(self.weight, dtype=wide_type(self.weight)), False  # 16 bits are rounded once
        self.add_at_end = keep

    def add(self, d: Tensor, hidden: Tensor) -> None:
        if self.sums is not None:
            keep = self.begun or self.keep
            if self.sums.dtype == d.dtype and not keep:
                torch.mm(d.t(), hidden, out=self.sums)
            else:
                add_gradient(self.sums, d, hidden, keep)
        if self.bias is not None:
            sums = d.sum(0, dtype=self.bias.dtype)
            self.bias.add_(sums) if self.begun else self.bias.copy_(sums)
        self.begun = True

    def finish(self) -> None:
        if self.sums is not self.weight:
            assert self.sums is not None and self.weight is not None
            add_gradient(self.weight, self.sums, None, self.add_at_end)


@contextmanager
def _said_if_partly(keep: bool) -> Iterator[None]:
    """Memory that runs out between two additions to a main_grad leaves a part of a gradient there, which nobody can take away."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        if keep:
            raise torch.OutOfMemoryError(
                f"{error}\nweight.main_grad may have a part of this call's gradient: clear it before the next step. A smaller "
                "chunk_bytes needs less memory"
            ) from error
        raise


# ---- gradients in forward ----


class _InForward:
    """Of each chunk, as soon as what all ranks found of it is there."""

    def __init__(self, head: Head, chunks: Chunks, full: bool, into: Gradients, keep: bool) -> None:
        self.head, self.chunks, self.full, self.found = head, chunks, full, Found(head, full)
        self.hidden, self.weight = _HiddenSum(head, chunks, into.hidden, 1), _WeightSum(into, chunks, keep, 0, head.columns)

    def at_once(self, chunk: slice, labels: Tensor, hidden: Tensor, logits: Logits, g: Tensor) -> None:
        """One rank has whole rows."""
        head = self.head
        parts = head.statistics_and_gradient(logits.x, logits.out, labels, head.terms, self.full, g, *_room(head, logits))
        _finish(head, self.chunks, self.found, self.full, chunk, labels, Pending(parts))
        self._add(chunk, hidden, logits)

    def told(self, chunk: slice, labels: Tensor, hidden: Tensor, logits: Logits, g: Tensor, telling: Pending) -> None:
        head = self.head
        done = _finish(head, self.chunks, self.found, self.full, chunk, labels, telling)
        _gradient(head, logits, labels, done.logsumexp, None, Incoming(g))
        self._add(chunk, hidden, logits)

    def _add(self, chunk: slice, hidden: Tensor, logits: Logits) -> None:
        self.hidden.add(chunk, logits, 0)
        self.weight.add(logits.out, hidden)

    def finish(self) -> RowLosses:
        self.weight.finish()
        self.hidden.finish()
        return self.found.rows


def losses_and_gradients(head: Head, plan: Plan, full: bool, incoming: Tensor, into: Gradients, keep: bool) -> RowLosses:
    """What is known of all rows, and the gradients where so much comes back for each row's loss. keep: added to the weight's."""
    with _said_if_partly(keep):
        chunks = Chunks(head, plan.rows)
        doing = _InForward(head, chunks, full, into, keep)
        buffers = [new_buffer(head, chunks.most, head.columns) for _ in range(1 if head.spread is None else min(2, len(chunks)))]
        before: tuple[Any, ...] | None = None
        for at, chunk in enumerate(chunks):
            hidden, labels = chunks.hidden(chunk, chunks.after(at)), chunks.take(chunk, head.labels)
            g = chunks.take(chunk, incoming)
            logits = make_logits(head, hidden, 0, head.columns, buffers[at % len(buffers)])
            if head.spread is None:
                doing.at_once(chunk, labels, hidden, logits, g)
                continue
            telling = _tell(head, _statistics(head, logits, labels, full), full)
            if before is not None:
                doing.told(*before)
            before = chunk, labels, hidden, logits, g, telling
        if before is not None:
            doing.told(*before)
        return doing.finish()


# ---- gradients in backward ----


def gradients_of_kept(head: Head, logits: Logits, found: RowLosses, incoming: Incoming, into: Gradients, keep: bool) -> None:
    """Of logits that waited, in their place."""
    chunks = Chunks(head, head.tokens)
    (chunk,) = chunks
    _gradient(head, logits, head.labels, found.logsumexp, found.entropy, incoming)
    hidden, weight = _HiddenSum(head, chunks, into.hidden, 1), _WeightSum(into, chunks, keep, 0, head.columns)
    rows = chunks.start(chunk) if into.weight is not None else None
    hidden.add(chunk, logits, 0)
    weight.add(logits.out, head.hidden if rows is None else rows.wait())
    weight.finish()
    hidden.finish()


def gradients_again(head: Head, plan: Plan, found: RowLosses, incoming: Incoming, into: Gradients, keep: bool) -> None:
    """Of logits that are made again. keep: to what is in the weight's gradient already."""
    with _said_if_partly(keep):
        chunks = Chunks(head, plan.rows)
        again = _Again(head, plan, chunks, found, incoming, into)
        parts = [(block, first) for block, first in enumerate(range(0, max(head.columns, 1), max(1, plan.columns)))]
        if head.spread is None:  # block by block: each is written once
            for block, first in parts:
                again.add_block(block, first, keep)
        else:  # chunk by chunk, as of these all ranks have as many
            all_sums = [again.sums_of(first, keep) for _, first in parts]
            for at, chunk in enumerate(chunks):
                hidden = chunks.hidden(chunk, chunks.after(at))
                for (block, first), sums in zip(parts, all_sums, strict=True):
                    again.add(chunk, hidden, block, first, sums)
            for sums in all_sums:
                sums.finish()
        again.hidden_sum.finish()


class _Again:
    """One block of one chunk at a time."""

    def __init__(
        self, head: Head, plan: Plan, chunks: Chunks, found: RowLosses, incoming: Incoming, into: Gradients
    ) -> None:  # fmt: skip
        self.head, self.plan, self.chunks, self.into = head, plan, chunks, into
        self.rows = (head.labels, found.logsumexp, found.entropy, *incoming)
        blocks = max(1, ceil_div(head.columns, max(1, plan.columns)))
        self.buffer, self.hidden_sum = new_buffer(head, chunks.most, plan.columns), _HiddenSum(head, chunks, into.hidden, blocks)

    def sums_of(self, first: int, keep: bool) -> _WeightSum:
        return _WeightSum(self.into, self.chunks, keep, first, min(self.plan.columns, self.head.columns - first))

    def add_block(self, block: int, first: int, keep: bool) -> None:
        """Of all chunks: its sum is gone when the next one's is made."""
        sums = self.sums_of(first, keep)
        for at, chunk in enumerate(self.chunks):
            self.add(chunk, self.chunks.hidden(chunk, self.chunks.after(at)), block, first, sums)
        sums.finish()

    def add(self, chunk: slice, hidden: Tensor, block: int, first: int, sums: _WeightSum) -> None:
        logits = make_logits(self.head, hidden, first, self.plan.columns, self.buffer)
        labels, lse, entropy, *each = (None if t is None else self.chunks.take(chunk, t) for t in self.rows)
        assert labels is not None and lse is not None
        _gradient(self.head, logits, labels, lse, entropy, Incoming(*each))  # type: ignore[arg-type]
        self.hidden_sum.add(chunk, logits, block)
        sums.add(logits.out, hidden)
