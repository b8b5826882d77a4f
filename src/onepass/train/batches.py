"""The tokens of each step. They depend on the seed and the step's number only, not on the layout of ranks or a resume."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class TokenBatch(NamedTuple):
    tokens: Tensor  # [sequences, seq_length]
    labels: Tensor  # of the same shape: the next tokens
    cu_seqlens: Tensor | None = None  # int32 [sequences, documents + 1]: the boundaries in each sequence, the last repeated

    def microbatches(self, size: int) -> list[TokenBatch]:
        """Return parts of `size` sequences."""
        tokens, labels = self.tokens.split(size), self.labels.split(size)
        documents = [None] * len(tokens) if self.cu_seqlens is None else self.cu_seqlens.split(size)
        return [TokenBatch(*part) for part in zip(tokens, labels, documents, strict=True)]

    @property
    def documents(self) -> dict[str, Tensor]:
        """The model's further arguments."""
        return {} if self.cu_seqlens is None else {"cu_seqlens": self.cu_seqlens}


class Batches:
    """Random sequences of a text. Each data-parallel rank gets its share of a step's sequences.

    Args:
        text: a numpy array of token ids, possibly memory-mapped.
        size: sequences of a step, on all ranks; a multiple of `ranks`.
        rank, ranks: the data-parallel rank, and the number of them.
    """

    def __init__(self, text: Any, size: int, seq_length: int, seed: int, rank: int, ranks: int, device: torch.device) -> None:
        self.text, self.size, self.seq_length, self.seed = text, size, seq_length, seed
        self.rank, self.ranks, self.device = rank, ranks, device

    def of_step(self, step: int) -> TokenBatch:
        """Return this rank's sequences of a step."""
        import numpy

        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + step) % (1 << 64))
        starts = torch.randint(len(self.text) - self.seq_length, (self.size,), generator=generator)
        own = starts.chunk(self.ranks)[self.rank].tolist()
        rows = numpy.stack([self.text[start : start + self.seq_length + 1] for start in own]).astype(numpy.int64)
        both = self.on_device(torch.from_numpy(rows))
        return TokenBatch(both[:, :-1], both[:, 1:])

    def on_device(self, x: Tensor) -> Tensor:
        """Return a tensor of the host on the device, without waiting for the copy."""
        return x.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else x
