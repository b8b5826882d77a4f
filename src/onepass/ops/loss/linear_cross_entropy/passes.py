"""The passes of linear_cross_entropy: products, and what is done to the logits between them, chunk by chunk.

The results do not depend on how a call is divided, with two exceptions: the last bits of fp32 sums, and the scale at which the
gradient of 16-bit logits is rounded (it includes the incoming gradient only where that is known by then). Ranks that share the
vocabulary exchange their statistics in one message a chunk, under the next chunk's product.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onepass.gradients.main_grad import add_gradient
from onepass.ops.loss.formula import RowLosses, lse_type
from onepass.ops.loss.linear_cross_entropy.adapter import AdapterSum
from onepass.ops.loss.linear_cross_entropy.head import (
    Chunks,
    Head,
    LogitsBlock,
    hidden_gradient,
    make_logits,
    multiply,
    new_buffer,
    new_logits,
    wide_type,
)
from onepass.ops.loss.linear_cross_entropy.plan import HeadPlan
from onepass.ops.loss.row_kernels import RowGradients
from onepass.ops.loss.targets import Targets
from onepass.parallel.collectives import Pending, start_all_reduce, start_reduce_scatter
from onepass.parallel.vocab_shards import start_gather_parts
from onepass.runtime.sizes import ceil_div

# ---- losses ----


def empty_rows(like: Tensor, rows: int, stats: tuple[str, ...], logits: torch.dtype, masses: bool) -> RowLosses:
    """Allocate losses, the logsumexp, the named statistics and masses; `logits` is the logits' type."""
    kinds = {"loss": wide_type(like), "logsumexp": lse_type(logits)}
    more = (name for name in (*stats, *["mass"] * masses) if name not in ("logsumexp", "z_loss"))
    kinds |= {name: torch.bool if name == "correct" else wide_type(like) for name in more}
    return RowLosses(**{name: like.new_empty(rows, dtype=kind) for name, kind in kinds.items()})


class RowStatistics:
    """Losses and statistics of all rows."""

    def __init__(self, head: Head) -> None:
        self.rows = empty_rows(head.hidden, head.tokens, head.stats, head.logits, head.targets is not None)

    def put(self, chunks: Chunks, chunk: slice, found: RowLosses) -> None:
        for into, values in zip(self.rows, found, strict=True):
            if into is not None and values is not None:
                chunks.put(chunk, values, into)


def losses(head: Head, rows: int, columns: int, keep: bool) -> tuple[RowLosses, LogitsBlock | None]:
    """Return all rows' losses, and where `keep` asks for them all logits. Products are of `rows` tokens each, either way."""
    if keep and head.shard is None and columns >= head.columns:
        return _losses_of_all_logits(head, rows)
    chunks, found = Chunks(head, rows), RowStatistics(head)
    buffer = new_logits(head, head.tokens if keep else chunks.most, head.columns if keep else columns)
    before = None
    for at, chunk in enumerate(chunks):
        hidden, labels, parts = chunks.hidden(chunk, chunks.after(at)), chunks.take(chunk, head.labels), []
        for first in range(0, max(head.columns, 1), columns or 1):
            some = buffer[chunks.places(chunk), first:] if keep else buffer
            logits = make_logits(head, hidden, first, columns, (some, None))
            parts.append(_statistics(head, logits, labels, chunks.bits(chunk), chunks.targets(chunk)))
        exchange = _start_exchange(head, parts[0] if len(parts) == 1 else torch.cat(parts))
        if before is not None:
            _finish(head, chunks, found, *before)
        before = chunk, labels, exchange
    assert before is not None
    _finish(head, chunks, found, *before)
    return found.rows, _block_of(head, buffer) if keep else None


def _losses_of_all_logits(head: Head, rows: int) -> tuple[RowLosses, LogitsBlock]:
    """One launch for all rows' statistics: those of a row are the same as in a chunk's launch."""
    logits = new_logits(head, head.tokens, head.columns)
    make_all_logits(head, rows, head.columns, logits)
    block = _block_of(head, logits)
    return _finished(head, _statistics(head, block, head.labels, head.bits, head.targets), head.labels), block


def make_all_logits(head: Head, rows: int, columns: int, into: Tensor) -> None:
    """Write the logits that wait, chunk after chunk of `rows` tokens."""
    chunks = Chunks(head, rows)
    for at, chunk in enumerate(chunks):
        hidden, part = chunks.hidden(chunk, chunks.after(at)), into[chunks.places(chunk)]
        for first in range(0, max(head.columns, 1), columns or 1):
            make_logits(head, hidden, first, columns, (part[:, first:], None))


def _block_of(head: Head, buffer: Tensor) -> LogitsBlock:
    """All logits."""
    x = buffer[:, : head.columns]
    return LogitsBlock(x, x, head.weight.shape[0], 0)


def _room(head: Head, logits: LogitsBlock) -> tuple[int, ...]:
    """The kernels' last argument, which the formula has not."""
    return (logits.room,) if head.use_triton else ()


def _statistics(
    head: Head, logits: LogitsBlock, labels: Tensor, bits: Tensor | None, targets: Targets | None
) -> Tensor:  # fmt: skip
    found: Tensor = head.rows.row_statistics(
        logits.x, labels, head.terms, head.stats, logits.first, head.columns, head.place, bits, targets, *_room(head, logits)
    )
    return found


def _gradient(
    head: Head, logits: LogitsBlock, labels: Tensor, lse: Tensor, entropy: Tensor | None, incoming: RowGradients,
    bits: Tensor | None, targets: Targets | None,
) -> None:  # fmt: skip
    head.rows.row_gradients(
        logits.x, logits.out, labels, head.terms, lse, entropy, incoming, logits.first, head.columns, head.place,
        bits, targets, *_room(head, logits),
    )  # fmt: skip


def _start_exchange(head: Head, parts: Tensor) -> Pending:
    """Gather all ranks' statistics of each row."""
    if head.shard is None:
        return Pending(parts)
    return start_gather_parts(head.rows.merge_statistics(parts, head.terms, head.stats), head.shard.group)


def _finish(head: Head, chunks: Chunks, found: RowStatistics, chunk: slice, labels: Tensor, exchange: Pending) -> RowLosses:
    """Compute a chunk's losses from all parts' statistics."""
    done = _finished(head, exchange.wait(), labels)
    found.put(chunks, chunk, done)
    return done


def _finished(head: Head, parts: Tensor, labels: Tensor) -> RowLosses:
    done: RowLosses = head.rows.finish_losses(
        parts, labels, head.terms, head.stats, head.columns, head.logits, head.place, head.targets
    )
    return done


# ---- sums of products ----


class Gradients(NamedTuple):
    """The gradients of hidden (this rank's part), weight (which may be main_grad), bias, and LoRA's a and b.

    They are None where they are not needed. A tensor narrower than fp32 gets whole sums only.
    """

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    lora_a: Tensor | None = None
    lora_b: Tensor | None = None


class _HiddenSum:
    """hidden's gradient, summed over blocks and ranks. Ranks communicate under the product for the weight's gradient.

    With LoRA also what goes through a, and a's own gradient.
    """

    def __init__(self, head: Head, chunks: Chunks, into: Gradients, blocks: int) -> None:
        self.head, self.chunks, self.into, self.blocks = head, chunks, into.hidden, blocks
        self.sums = self.adapter = None
        self.under_way: list[tuple[slice, Pending]] = []
        if head.lora is not None and (into.hidden is not None or into.lora_a is not None):
            self.adapter = AdapterSum(head, into.lora_a, head.tokens, blocks)
        several = blocks > 1 or head.lora is not None
        if self.into is not None and several and (head.shard is not None or self.into.dtype != wide_type(self.into)):
            self.sums = self.into.new_empty(head.tokens, self.into.shape[1], dtype=wide_type(self.into))

    def add(self, chunk: slice, logits: LogitsBlock, block: int, hidden: Tensor | None) -> None:
        """Add one block's part. hidden: the chunk's, for a's gradient; None leaves that to `add_a`."""
        places = self.chunks.places(chunk)
        low = None if self.adapter is None else self.adapter.add(logits, places, block)
        if self.into is not None:
            self._add(chunk, places, logits, block, low)
        if self.adapter is not None and low is not None and hidden is not None:
            self.adapter.add_a(low, hidden)

    def _add(self, chunk: slice, places: slice, logits: LogitsBlock, block: int, low: Tensor | None) -> None:
        assert self.into is not None
        if self.sums is None and self.head.shard is not None:
            product = self.into.new_empty(logits.out.shape[0], self.into.shape[1])
            hidden_gradient(self.head, logits, product)
            self._put(chunk, product)
            return
        sums = self.into[chunk] if self.sums is None else self.sums[places]
        hidden_gradient(self.head, logits, sums, block > 0)
        if low is not None:
            assert self.head.lora is not None
            multiply(low, self.head.lora.a, sums, True)
        if self.sums is not None and block == self.blocks - 1:
            self._put(chunk, sums.to(self.into.dtype))

    def _put(self, chunk: slice, product: Tensor) -> None:
        shard = self.head.shard
        if shard is None:
            assert self.into is not None
            self.into[chunk] = product
        else:
            start = start_reduce_scatter if shard.sequence else start_all_reduce
            self.under_way.append((chunk, start(product, shard.group)))

    def finish(self) -> None:
        for chunk, pending in self.under_way:
            assert self.into is not None
            self.into[chunk] = pending.wait()
        if self.adapter is not None:
            self.adapter.finish()


class _WeightSum:
    """The gradients of weight, bias and LoRA's b, of one block or all, summed over chunks."""

    def __init__(self, into: Gradients, chunks: Chunks, keep: bool, first: int, columns: int) -> None:
        """keep: add to the weight's gradient that is there already."""
        self.head, self.part = chunks.head, slice(first, first + columns)
        self.weight = None if into.weight is None else into.weight[self.part]
        self.bias = None if into.bias is None else into.bias[self.part]
        self.lora_b = None if into.lora_b is None else into.lora_b[self.part]
        self.keep, self.begun = keep, False
        self.sums = self.weight
        if self.weight is not None and len(chunks) > 1 and self.weight.dtype != wide_type(self.weight):
            self.sums, self.keep = torch.empty_like(self.weight, dtype=wide_type(self.weight)), False  # 16 bits are rounded once
        self.add_at_end = keep

    def add(self, d: Tensor, hidden: Tensor) -> None:
        if self.bias is not None:  # before the weight's gradient, which may be main_grad: this one takes memory
            sums = d.sum(0, dtype=self.bias.dtype)
            self.bias.add_(sums) if self.begun else self.bias.copy_(sums)
        if self.lora_b is not None:
            add_gradient(self.lora_b, d, self.head.low(hidden), self.begun)
        if self.sums is not None:
            keep = self.begun or self.keep
            if self.sums.dtype == d.dtype and not keep:
                torch.mm(d.t(), hidden, out=self.sums)
            else:
                add_gradient(self.sums, d, hidden, keep)
        self.begun = True

    def finish(self) -> None:
        if self.sums is not self.weight:
            assert self.sums is not None and self.weight is not None
            add_gradient(self.weight, self.sums, None, self.add_at_end)


@contextmanager
def _describe_partial(keep: bool) -> Iterator[None]:
    """Say so where memory runs out between two additions to main_grad: it has part of a gradient then, which can't be undone."""
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


class _GradInForward:
    """Each chunk's gradients, as soon as all ranks' statistics of it are there."""

    def __init__(self, head: Head, chunks: Chunks, into: Gradients, keep: bool) -> None:
        self.head, self.chunks, self.found = head, chunks, RowStatistics(head)
        self.hidden, self.weight = _HiddenSum(head, chunks, into, 1), _WeightSum(into, chunks, keep, 0, head.columns)

    def add_whole_rows(self, chunk: slice, labels: Tensor, hidden: Tensor, logits: LogitsBlock, g: Tensor) -> None:
        """One rank has whole rows: one kernel computes statistics and gradients."""
        head = self.head
        parts = head.row_statistics_and_gradients(logits.x, logits.out, labels, head.terms, head.stats, g, *_room(head, logits))
        _finish(head, self.chunks, self.found, chunk, labels, Pending(parts))
        self._add(chunk, hidden, logits)

    def add_partial_rows(
        self, chunk: slice, labels: Tensor, hidden: Tensor, logits: LogitsBlock, g: Tensor, exchange: Pending
    ) -> None:
        head = self.head
        done = _finish(head, self.chunks, self.found, chunk, labels, exchange)
        bits, targets = self.chunks.bits(chunk), self.chunks.targets(chunk)
        _gradient(head, logits, labels, done.logsumexp, None, RowGradients(g, mass=done.mass), bits, targets)
        self._add(chunk, hidden, logits)

    def _add(self, chunk: slice, hidden: Tensor, logits: LogitsBlock) -> None:
        self.hidden.add(chunk, logits, 0, hidden)
        self.weight.add(logits.out, hidden)

    def finish(self) -> RowLosses:
        self.weight.finish()
        self.hidden.finish()
        return self.found.rows


def losses_and_gradients(head: Head, plan: HeadPlan, incoming: Tensor, into: Gradients, keep: bool) -> RowLosses:
    """Return all rows' losses, and write their gradients, given the incoming gradient of each row's loss.

    keep: add to the weight's gradient that is there already.
    """
    with _describe_partial(keep):
        chunks = Chunks(head, plan.rows)
        grads = _GradInForward(head, chunks, into, keep)
        buffers = [new_buffer(head, chunks.most, head.columns) for _ in range(1 if head.shard is None else min(2, len(chunks)))]
        before: tuple[Any, ...] | None = None
        for at, chunk in enumerate(chunks):
            hidden, labels = chunks.hidden(chunk, chunks.after(at)), chunks.take(chunk, head.labels)
            g = chunks.take(chunk, incoming)
            logits = make_logits(head, hidden, 0, head.columns, buffers[at % len(buffers)])
            if head.shard is None and head.bits is None and head.targets is None:
                grads.add_whole_rows(chunk, labels, hidden, logits, g)
                continue
            parts = _statistics(head, logits, labels, chunks.bits(chunk), chunks.targets(chunk))
            exchange = _start_exchange(head, parts)
            if head.shard is None:
                grads.add_partial_rows(chunk, labels, hidden, logits, g, exchange)
                continue
            if before is not None:
                grads.add_partial_rows(*before)
            before = chunk, labels, hidden, logits, g, exchange
        if before is not None:
            grads.add_partial_rows(*before)
        return grads.finish()


# ---- gradients in backward ----


def gradients_of_kept_logits(
    head: Head, rows: int, logits: LogitsBlock, found: RowLosses, incoming: RowGradients, into: Gradients, keep: bool
) -> None:
    """Write the gradients from logits that waited. These become their own gradient, unless they are wider.

    They lie chunk after chunk of `rows` tokens. Where ranks have parts of the sequence, a chunk has some of every part.
    """
    chunks = Chunks(head, rows if head.ranks > 1 else head.tokens)
    known = head.labels, found.logsumexp, found.entropy, *incoming
    labels, lse, entropy, *each = (None if t is None else chunks.in_order(t) for t in known)
    assert labels is not None and lse is not None
    bits = head.bits if head.bits is None or head.bits.shape[0] == 1 else chunks.in_order(head.bits)
    if head.narrow_gradient is not None:
        logits = logits._replace(out=new_logits(head, head.tokens, head.columns, head.narrow_gradient)[:, : head.columns])
    targets = head.targets
    if targets is not None and targets.probabilities is not None:
        targets = targets._replace(probabilities=chunks.in_order(targets.probabilities))
    _gradient(head, logits, labels, lse, entropy, RowGradients(*each), bits, targets)  # type: ignore[arg-type]
    hidden = _HiddenSum(head, chunks, into, 1)
    weight = _WeightSum(into, Chunks(head, head.tokens), keep, 0, head.columns)
    products = any(t is not None for t in (into.weight, into.lora_a, into.lora_b))
    gathered = [chunks.start(chunk) for chunk in chunks] if products else []
    for chunk in chunks:
        part = chunks.places(chunk)
        hidden.add(chunk, logits._replace(x=logits.x[part], out=logits.out[part]), 0, None)
    parts = [pending.wait() for pending in gathered]
    tokens = head.hidden if not parts else parts[0] if len(parts) == 1 else torch.cat(parts)
    if hidden.adapter is not None:
        hidden.adapter.add_a(hidden.adapter.rounded(slice(None)), tokens)
    weight.add(logits.out, tokens)
    weight.finish()
    hidden.finish()


def recompute_gradients(
    head: Head, plan: HeadPlan, found: RowLosses, incoming: RowGradients, into: Gradients, keep: bool
) -> None:
    """Write the gradients from recomputed logits. keep: add to the weight's gradient that is there already."""
    with _describe_partial(keep):
        chunks = Chunks(head, plan.rows)
        recompute = _Recompute(head, plan, chunks, found, incoming, into)
        parts = [(block, first) for block, first in enumerate(range(0, max(head.columns, 1), max(1, plan.columns)))]
        if head.shard is None:  # block by block: each block's gradient is written once
            for block, first in parts:
                recompute.add_block(block, first, keep)
        else:  # chunk by chunk: all ranks have as many chunks, but not as many blocks
            all_sums = [recompute.sums_of(first, keep) for _, first in parts]
            for at, chunk in enumerate(chunks):
                hidden = chunks.hidden(chunk, chunks.after(at))
                for (block, first), sums in zip(parts, all_sums, strict=True):
                    recompute.add(chunk, hidden, block, first, sums)
            for sums in all_sums:
                sums.finish()
        recompute.hidden_sum.finish()


class _Recompute:
    """One block of one chunk at a time."""

    def __init__(
        self, head: Head, plan: HeadPlan, chunks: Chunks, found: RowLosses, incoming: RowGradients, into: Gradients
    ) -> None:  # fmt: skip
        self.head, self.plan, self.chunks, self.into = head, plan, chunks, into
        self.rows = (head.labels, found.logsumexp, found.entropy, *incoming)
        blocks = max(1, ceil_div(head.columns, max(1, plan.columns)))
        self.buffer, self.hidden_sum = new_buffer(head, chunks.most, plan.columns), _HiddenSum(head, chunks, into, blocks)

    def sums_of(self, first: int, keep: bool) -> _WeightSum:
        return _WeightSum(self.into, self.chunks, keep, first, min(self.plan.columns, self.head.columns - first))

    def add_block(self, block: int, first: int, keep: bool) -> None:
        """Add one block of all chunks: its sum is freed before the next block's is allocated."""
        sums = self.sums_of(first, keep)
        for at, chunk in enumerate(self.chunks):
            self.add(chunk, self.chunks.hidden(chunk, self.chunks.after(at)), block, first, sums)
        sums.finish()

    def add(self, chunk: slice, hidden: Tensor, block: int, first: int, sums: _WeightSum) -> None:
        logits = make_logits(self.head, hidden, first, self.plan.columns, self.buffer)
        labels, lse, entropy, *each = (None if t is None else self.chunks.take(chunk, t) for t in self.rows)
        assert labels is not None and lse is not None
        bits, targets = self.chunks.bits(chunk), self.chunks.targets(chunk)
        _gradient(self.head, logits, labels, lse, entropy, RowGradients(*each), bits, targets)  # type: ignore[arg-type]
        self.hidden_sum.add(chunk, logits, block, hidden)
        sums.add(logits.out, hidden)
