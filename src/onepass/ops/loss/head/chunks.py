"""Chunks of tokens. Under sequence parallelism a chunk has as many tokens of every rank's part, one rank's after the other's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from onepass.distributed.collectives import Pending, start_all_gather
from onepass.ops.loss.head.operands import Head
from onepass.runtime.sizes import ceil_div


class TokenChunk(NamedTuple):
    """Some tokens of a call."""

    part: slice  # of each rank's tokens
    ranks: int
    whole: bool  # they are all tokens: there a view, which takes microseconds, is not made

    @property
    def places(self) -> slice:
        """Where the tokens are when chunks lie one after the other."""
        return slice(self.part.start * self.ranks, self.part.stop * self.ranks)

    def own(self, values: Tensor) -> Tensor:
        """Return the part of `values`, one a token of this rank."""
        return values if self.whole else values[self.part]

    def take(self, values: Tensor) -> Tensor:
        """Return the part of `values`, one a token of all ranks."""
        if self.whole or self.ranks == 1:
            return self.own(values)
        own, rest = values.shape[0] // self.ranks, values.shape[1:]
        return values.view(self.ranks, own, *rest)[:, self.part].flatten(0, 1)

    def put(self, values: Tensor, into: Tensor) -> None:
        """Write what `take` would return."""
        if self.ranks == 1:
            into[self.part] = values
        else:
            into.view(self.ranks, -1)[:, self.part] = values.view(self.ranks, -1)


class Chunks:
    """The chunks of a call."""

    def __init__(self, head: Head, rows: int) -> None:
        """rows: most tokens of a chunk."""
        own, step = head.own_tokens, max(1, ceil_div(rows, head.ranks))
        self.head, self.most = head, min(step, own) * head.ranks
        parts = [slice(first, min(first + step, own)) for first in range(0, own, step)] or [slice(0, 0)]
        self.all = [TokenChunk(part, head.ranks, len(parts) == 1) for part in parts]

    def __iter__(self) -> Iterator[TokenChunk]:
        return iter(self.all)

    def __len__(self) -> int:
        return len(self.all)

    def take(self, values: Tensor) -> Tensor:
        """Return `values`, one a token of all ranks, as chunks lie one after the other."""
        return values if len(self) == 1 else torch.cat([chunk.take(values) for chunk in self])

    def with_hidden(self) -> Iterator[tuple[TokenChunk, Tensor]]:
        """Yield chunks and their hidden states. Other ranks' part of the next one is gathered meanwhile."""
        coming, ahead = None, self.head.ranks > 1
        for at, chunk in enumerate(self):
            hidden = (coming or self.start(chunk)).wait()
            coming = self.start(self.all[at + 1]) if ahead and at + 1 < len(self) else None
            yield chunk, hidden

    def start(self, chunk: TokenChunk) -> Pending:
        """Start gathering a chunk's hidden states."""
        head = self.head
        hidden = chunk.own(head.hidden) if head.own is None else head.hidden.index_select(0, chunk.own(head.own))
        return Pending(hidden) if head.ranks == 1 else start_all_gather(hidden, head.shard.group)  # type: ignore[union-attr]
