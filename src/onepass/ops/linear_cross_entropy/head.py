"""What every pass of linear_cross_entropy is made of: operands, chunks of tokens, and products with the logits between them.

Logits are [tokens, columns] in a buffer whose rows are a multiple of 64 columns apart, and a vocabulary of an odd size has a copy
of its weight with zeros after its last row: products of odd sizes are several times slower.

Under sequence parallelism a chunk is some tokens of each rank's part, gathered under the product before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from onepass.kernels import softmax_formula_rows, softmax_rows, softmax_whole_rows
from onepass.kernels.cross_entropy_formula import Terms
from onepass.parallel.collectives import Pending, start_all_gather
from onepass.runtime.sizes import ceil_div

_APART = 64  # what the distance between rows of logits is a multiple of
_EVEN = 8  # sizes of products that are multiples of it run at full speed
_CPU_COLUMNS = 4096  # of the vocabulary that are widened at a time, where a CPU can't sum 16-bit products in fp32


def wide_type(t: Tensor) -> torch.dtype:
    """What its sums are made in."""
    return torch.promote_types(t.dtype, torch.float32)


class Spread(NamedTuple):
    """The ranks that share the vocabulary, of which there are several."""

    group: dist.ProcessGroup
    sequence: bool  # whether each has its part of the tokens
    place: Tensor  # [2] on the device: the first of this rank's columns, and how many there are of all


@dataclass
class Head:
    """What every pass is made of."""

    hidden: Tensor  # [tokens, D], of this rank's part of the sequence
    weight: Tensor  # [V, D] in the same type, V of this rank
    bias: Tensor | None
    labels: Tensor  # [N] of the whole sequence
    terms: Terms
    wide: bool  # logits in fp32
    native: bool  # by kernels
    spread: Spread | None = None

    def __post_init__(self) -> None:
        self.columns = self.weight.shape[0]
        self.rows: Any = softmax_rows if self.native else softmax_formula_rows
        whole: Any = softmax_whole_rows if self.native else softmax_formula_rows
        self.statistics_and_gradient = whole.statistics_and_gradient
        self.place = None if self.spread is None else self.spread.place
        self.logits = wide_type(self.hidden) if self.wide else self.hidden.dtype
        self.ranks = self.spread.group.size() if self.spread is not None and self.spread.sequence else 1
        if padded_rows(self.weight, self.native):
            self.weight, self.bias = _padded(self.weight), None if self.bias is None else _padded(self.bias)

    @property
    def tokens(self) -> int:
        return self.labels.shape[0]


def padded_rows(weight: Tensor, native: bool) -> int:
    """How many a copy of the weight has whose products are faster; 0 where there is no need of one."""
    V = weight.shape[0]
    return ceil_div(V, _APART) * _APART if native and V % _EVEN and weight.is_cuda else 0


def _padded(t: Tensor) -> Tensor:
    """With zeros after the last of its rows, to an even number."""
    V = t.shape[0]
    padded = t.new_empty(ceil_div(V, _APART) * _APART, *t.shape[1:])
    padded[:V] = t
    padded[V:] = 0
    return padded


# ---- which tokens a chunk has ----


class Chunks:
    """Of the tokens of a whole sequence. Each is as many tokens of every rank's part, one rank's after the other's."""

    def __init__(self, head: Head, rows: int) -> None:
        self.head, self.ranks = head, head.ranks
        own = head.hidden.shape[0]
        step = max(1, ceil_div(rows, self.ranks))
        self.slices = [slice(first, min(first + step, own)) for first in range(0, own, step)] or [slice(0, 0)]
        self.most = min(step, own) * self.ranks
        self._coming: tuple[slice, Pending] | None = None

    def __iter__(self) -> Iterator[slice]:
        return iter(self.slices)

    def __len__(self) -> int:
        return len(self.slices)

    def hidden(self, chunk: slice, following: slice | None = None) -> Tensor:
        """The chunk's hidden states, and the ones after it under way."""
        if self.ranks == 1:
            return self.head.hidden[chunk]
        coming = self._coming[1] if self._coming is not None and self._coming[0] is chunk else self.start(chunk)
        whole = coming.wait()
        self._coming = None if following is None else (following, self.start(following))
        return whole

    def start(self, chunk: slice) -> Pending:
        hidden = self.head.hidden[chunk]
        return Pending(hidden) if self.ranks == 1 else start_all_gather(hidden, self.head.spread.group)  # type: ignore[union-attr]

    def take(self, chunk: slice, values: Tensor) -> Tensor:
        """Of one value a token, the chunk's."""
        return values[chunk] if self.ranks == 1 else values.view(self.ranks, -1)[:, chunk].reshape(-1)

    def put(self, chunk: slice, values: Tensor, into: Tensor) -> None:
        if self.ranks == 1:
            into[chunk] = values
        else:
            into.view(self.ranks, -1)[:, chunk] = values.view(self.ranks, -1)

    def places(self, chunk: slice) -> slice:
        """Where a chunk's tokens are, one chunk after the other."""
        return slice(chunk.start * self.ranks, chunk.stop * self.ranks)

    def after(self, at: int) -> slice | None:
        return self.slices[at + 1] if at + 1 < len(self.slices) else None


# ---- products ----


class Logits(NamedTuple):
    """Some rows' logits, where their gradient is to be, which may be the same place, and which columns they are of."""

    x: Tensor
    out: Tensor
    room: int  # columns that may be written: those after the last are zeros in the gradient
    first: int


def whole_rows(logits: Logits) -> Tensor:
    """The logits with the columns after the last: to be kept."""
    return logits.x if logits.room == logits.x.shape[1] else logits.x.as_strided((len(logits.x), logits.room), logits.x.stride())


def of_whole_rows(x: Tensor, columns: int) -> Logits:
    """What was kept."""
    return Logits(x[:, :columns], x[:, :columns], x.shape[1], 0)


def new_buffer(head: Head, rows: int, columns: int) -> tuple[Tensor, Tensor | None]:
    """Room for logits, and for their gradient where it has another type."""
    apart = ceil_div(columns, _APART) * _APART
    x = head.hidden.new_empty(rows, apart, dtype=head.logits)
    return x, None if head.logits == head.hidden.dtype else head.hidden.new_empty(rows, apart)


def make_logits(head: Head, hidden: Tensor, first: int, columns: int, buffer: tuple[Tensor, Tensor | None]) -> Logits:
    """The products of some rows with some columns, into the buffer."""
    n = hidden.shape[0]
    last = min(first + columns, head.columns)
    whole = last == head.columns and head.weight.shape[0] > head.columns  # the rows of zeros too
    weight = head.weight[first:] if whole else head.weight[first:last]
    bias = None if head.bias is None else head.bias[first : first + weight.shape[0]]
    room = weight.shape[0]
    _product(hidden, weight, bias, buffer[0][:n, :room])
    x = buffer[0][:n, : last - first]
    return Logits(x, x if buffer[1] is None else buffer[1][:n, : last - first], room, first)


def _product(hidden: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    if out.dtype == hidden.dtype:
        torch.mm(hidden, weight.t(), out=out) if bias is None else torch.addmm(bias, hidden, weight.t(), out=out)
    elif hidden.is_cuda:
        torch.mm(hidden, weight.t(), out_dtype=out.dtype, out=out)
        if bias is not None:
            out += bias
    else:
        rows = hidden.to(out.dtype)
        for at in range(0, weight.shape[0], _CPU_COLUMNS):
            part = slice(at, at + _CPU_COLUMNS)
            torch.mm(rows, weight[part].to(out.dtype).t(), out=out[:, part])
        if bias is not None:
            out += bias


def hidden_gradient(head: Head, logits: Logits, into: Tensor, add: bool = False) -> None:
    """What the gradient of logits is worth to hidden states; sums in fp32 where `into` is."""
    d = _with_room(logits)
    weight = head.weight[logits.first : logits.first + d.shape[1]]
    if into.dtype == d.dtype:
        torch.addmm(into, d, weight, beta=float(add), out=into) if add else torch.mm(d, weight, out=into)
    elif d.is_cuda:
        if add:
            torch.addmm(into, d, weight, out_dtype=into.dtype, out=into)
        else:
            torch.mm(d, weight, out_dtype=into.dtype, out=into)
    else:
        for at in range(0, d.shape[1], _CPU_COLUMNS):
            part = slice(at, at + _CPU_COLUMNS)
            # in place, as autocast would round what is not
            into.addmm_(d[:, part].to(into.dtype), weight[part].to(into.dtype), beta=float(add or at > 0))


def _with_room(logits: Logits) -> Tensor:
    """Of the gradient, the columns of zeros after the last one too."""
    n, columns = logits.out.shape
    return logits.out if logits.room == columns else logits.out.as_strided((n, logits.room), logits.out.stride())
