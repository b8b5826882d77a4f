"""The passes of a head: products, and what a row loss does to the logits between them, chunk by chunk.

The results do not depend on how a call is divided, with two exceptions: the last bits of fp32 sums, and the scale at which the
gradient of 16-bit logits is rounded (it includes the incoming gradient only where that is known by then). Ranks that share the
vocabulary exchange their statistics in one message a chunk.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onepass.ops.loss.head.chunks import Chunks, TokenChunk
from onepass.ops.loss.head.operands import Head, LogitsBlock, block_of_all, make_logits, new_buffer, new_logits
from onepass.ops.loss.head.row_loss import RowLoss
from onepass.ops.loss.head.sums import Gradients, HiddenSum, WeightSum, describe_partial


def _blocks(head: Head, columns: int) -> range:
    """First columns of the blocks."""
    return range(0, max(head.columns, 1), max(1, columns))


# ---- forward ----


def find_losses(
    head: Head, loss: RowLoss, rows: int, columns: int, into: Gradients | None = None, keep: bool = False,
    waiting: Tensor | None = None,
) -> None:  # fmt: skip
    """Let the row loss see all logits, `rows` tokens and `columns` at a time, and with `into` write their gradients.

    keep: add to the weight's gradient that is there already. waiting: where logits are written that backward reads.
    """
    with describe_partial(keep):
        chunks, sums = Chunks(head, rows), None
        overlapped = loss.overlaps and (into is None or head.shard is not None)
        buffers: list[tuple[Tensor, Tensor | None]]
        if into is None:
            buffers = [(new_logits(head, chunks.most, columns), None)] if waiting is None else []
        else:
            sums = HiddenSum(head, into, 1), WeightSum(head, into, len(chunks), keep, 0, head.columns)
            buffers = [new_buffer(head, chunks.most, columns) for _ in range(min(2, len(chunks)) if overlapped else 1)]

        def finish(chunk: TokenChunk, hidden: Tensor, logits: LogitsBlock, sent: Any) -> None:
            loss.finish(chunk, logits, sent)
            if sums is not None:
                sums[0].add(chunk, logits, 0, hidden)
                sums[1].add(logits.out, hidden)

        before = None
        for at, (chunk, hidden) in enumerate(chunks.with_hidden()):
            parts = []
            for first in _blocks(head, columns):
                place = buffers[at % len(buffers)] if waiting is None else (waiting[chunk.places, first:], None)
                logits = make_logits(head, hidden, first, columns, place)
                parts.append(loss.read(chunk, logits))
            now = chunk, hidden, logits, loss.exchange(parts)
            if overlapped:
                now, before = before, now  # type: ignore[assignment]
            if now is not None:
                finish(*now)
        if before is not None:
            finish(*before)
        if sums is not None:
            sums[1].finish()
            sums[0].finish()


def keep_logits(head: Head, loss: RowLoss, rows: int, columns: int) -> Tensor:
    """Let the row loss see all logits, and return them, as chunks of `rows` tokens lie one after the other.

    Products are those of a call without gradients, so a row's numbers have the same bits.
    """
    logits = new_logits(head, head.tokens, head.columns)[:, : head.weight.shape[0]]
    if head.shard is not None or columns < head.columns:
        find_losses(head, loss, rows, columns, waiting=logits)
    else:  # one launch for all rows' statistics
        make_all_logits(head, rows, columns, logits)
        block, (everything,) = block_of_all(head, logits), Chunks(head, head.tokens)
        loss.finish(everything, block, loss.exchange([loss.read(everything, block)]))
    return logits


def make_all_logits(head: Head, rows: int, columns: int, into: Tensor) -> None:
    """Write the logits that wait, chunk after chunk of `rows` tokens."""
    for chunk, hidden in Chunks(head, rows).with_hidden():
        for first in _blocks(head, columns):
            make_logits(head, hidden, first, columns, (into[chunk.places, first:], None))


# ---- backward ----


def gradients_of_kept_logits(head: Head, loss: RowLoss, rows: int, kept: Tensor, into: Gradients, keep: bool) -> None:
    """Write the gradients from logits that waited. These become their own gradient, unless they are wider.

    They lie chunk after chunk of `rows` tokens. Where ranks have parts of the sequence, a chunk has some of every part.
    """
    chunks, logits = Chunks(head, rows if head.ranks > 1 else head.tokens), block_of_all(head, kept)
    if head.narrow_gradient is not None:
        logits = logits._replace(out=new_logits(head, head.tokens, head.columns, head.narrow_gradient)[:, : head.columns])
    loss.gradient(chunks, logits)
    hidden, weight = HiddenSum(head, into, 1), WeightSum(head, into, 1, keep, 0, head.columns)
    products = any(t is not None for t in (into.weight, into.lora_a, into.lora_b))
    gathered = [chunks.start(chunk) for chunk in chunks] if products else []
    for chunk in chunks:
        x, out = (t if chunk.whole else t[chunk.places] for t in logits[:2])
        hidden.add(chunk, logits._replace(x=x, out=out), 0, None)
    parts = [pending.wait() for pending in gathered]
    tokens = head.hidden if not parts else parts[0] if len(parts) == 1 else torch.cat(parts)
    if hidden.adapter is not None:
        hidden.adapter.add_a(hidden.adapter.rounded(slice(None)), tokens)
    weight.add(logits.out, tokens)
    weight.finish()
    hidden.finish()


def recompute_gradients(
    head: Head, loss: RowLoss, rows: int, columns: int, into: Gradients, keep: bool
) -> None:
    """Write the gradients from recomputed logits. keep: add to the weight's gradient that is there already."""
    with describe_partial(keep):
        chunks, blocks = Chunks(head, rows), _blocks(head, columns)
        buffer, hidden_sum = new_buffer(head, chunks.most, columns), HiddenSum(head, into, len(blocks))

        def add(chunk: TokenChunk, hidden: Tensor, block: int, sums: WeightSum) -> None:
            logits = make_logits(head, hidden, blocks[block], columns, buffer)
            loss.gradient(chunk, logits)
            hidden_sum.add(chunk, logits, block, hidden)
            sums.add(logits.out, hidden)

        def sums_of(first: int) -> WeightSum:
            return WeightSum(head, into, len(chunks), keep, first, min(columns, head.columns - first))

        def add_block(block: int, first: int) -> None:
            """Add one block of all chunks: its sum is freed before the next block's is allocated."""
            sums = sums_of(first)
            for chunk, hidden in chunks.with_hidden():
                add(chunk, hidden, block, sums)
            sums.finish()

        if head.shard is None:  # block by block: each block's gradient is written once
            for block, first in enumerate(blocks):
                add_block(block, first)
        else:  # chunk by chunk: all ranks have as many chunks, but not as many blocks
            all_sums = [sums_of(first) for first in blocks]
            for chunk, hidden in chunks.with_hidden():
                for block, sums in enumerate(all_sums):
                    add(chunk, hidden, block, sums)
            for sums in all_sums:
                sums.finish()
        hidden_sum.finish()
