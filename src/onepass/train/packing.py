"""Packs documents of a text into rows of tokens, with nothing between them and nothing left free.

Each token of a document but the last is an input, and each but the first a label. So the end token is a label only, every input
has a loss, and no label is a token of another document.

An epoch has all documents, in an order that the seed decides. Epochs follow each other as one stream of inputs, which is cut into
rows. A document that a cut divides goes on in the next row as a document of its own, whose positions begin again.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

import torch

from onepass.runtime.errors import CommandError
from onepass.train.batches import Batches, TokenBatch

_BLOCK = 1 << 24  # tokens that are searched for ends at once


class Documents:
    """The documents of a text, as two numpy arrays.

    Args:
        text: a numpy array of token ids.
        end: the id of the token that ends each document. What follows the last one is a document too.

    Attributes:
        starts: where each begins in the text.
        inputs: how many inputs each has. A document without any is left out.
    """

    def __init__(self, text: Any, end: int) -> None:
        import numpy

        after = [numpy.flatnonzero(text[at : at + _BLOCK] == end) + at + 1 for at in range(0, len(text), _BLOCK)]
        ends = numpy.unique(numpy.concatenate([*after, [len(text)]])).astype(numpy.int64)
        starts = numpy.concatenate([[0], ends[:-1]])
        inputs = ends - starts - 1
        self.starts, self.inputs = starts[inputs > 0], inputs[inputs > 0]
        if not len(self.inputs):
            raise CommandError("the text has no document of two tokens, which pack needs; give more with --data")

    @property
    def total(self) -> int:
        """The inputs of an epoch."""
        return int(self.inputs.sum())

    def order(self, seed: int, epoch: int) -> Any:
        """Return the documents' numbers in an epoch's order."""
        generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % (1 << 64))
        return torch.randperm(len(self.inputs), generator=generator).numpy()


class _Epoch(NamedTuple):
    number: int
    order: Any  # the documents
    ends: Any  # of each one's inputs in the epoch


class PackedBatches(Batches):
    """Rows of packed documents in place of random sequences. The arguments are those of `Batches`, and the text's documents."""

    _last: _Epoch | None = None

    def __init__(self, documents: Documents, *args: Any) -> None:
        super().__init__(*args)
        self._documents = documents

    def of_step(self, step: int) -> TokenBatch:
        """Return this rank's rows of a step."""
        import numpy

        own = self.size // self.ranks
        first = step * self.size + self.rank * own
        rows = numpy.empty((2, own, self.seq_length), numpy.int64)
        ends = [self._fill(first + at, rows[:, at]) for at in range(own)]
        boundaries = numpy.full((own, 1 + max(map(len, ends))), self.seq_length, numpy.int32)
        boundaries[:, 0] = 0
        for row, of_row in zip(boundaries, ends, strict=True):
            row[1 : 1 + len(of_row)] = of_row
        both = self.on_device(torch.from_numpy(rows))
        return TokenBatch(both[0], both[1], self.on_device(torch.from_numpy(boundaries)))

    def _fill(self, number: int, row: Any) -> list[int]:
        """Write a row's inputs and labels into row [2, seq_length]. Return the ends of its documents."""
        documents, filled, ends = self._documents, 0, []
        epoch, at = divmod(number * self.seq_length, documents.total)
        while filled < self.seq_length:
            _, order, stops = self._epoch(epoch)
            place = int(stops.searchsorted(at, "right"))
            document = order[place]
            size = min(int(stops[place]) - at, self.seq_length - filled)
            start = int(documents.starts[document] + documents.inputs[document] - (stops[place] - at))
            row[0, filled : filled + size] = self.text[start : start + size]
            row[1, filled : filled + size] = self.text[start + 1 : start + size + 1]
            filled += size
            ends.append(filled)
            epoch, at = (epoch + 1, 0) if at + size == documents.total else (epoch, at + size)
        return ends

    def _epoch(self, number: int) -> _Epoch:
        if self._last is None or self._last.number != number:
            order = self._documents.order(self.seed, number)
            self._last = _Epoch(number, order, self._documents.inputs[order].cumsum())
        return self._last

    # ---- what packing saves ----

    @cached_property
    def mean_span(self) -> float:
        """The length of the document that a token is in, where rows are cut, averaged over the tokens of the first epoch."""
        import numpy

        stops = self._epoch(0).ends
        pieces = numpy.diff(numpy.union1d(numpy.arange(0, stops[-1], self.seq_length), stops)).astype(numpy.float64)
        return float((pieces**2).sum() / pieces.sum())

    def summary(self) -> str:
        """Say how many of the tokens would be padding if each row had one document."""
        inputs, length = self._documents.inputs, self.seq_length
        rows = int((-(-inputs // length)).sum())  # a longer document takes several
        packed = -(-self._documents.total // length)
        long = int((inputs > length).sum())
        return (
            f"packing: {len(inputs):,} documents of {inputs.min():,} to {inputs.max():,} tokens, {long:,} of them longer than a "
            f"row. With a document a row, {1 - self._documents.total / (rows * length):.0%} of the tokens computed would be "
            f"padding; packed rows have none: {packed:,} rows hold the text, not {rows:,}."
        )
