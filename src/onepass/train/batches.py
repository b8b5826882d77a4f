"""Which tokens a step sees: it follows from the seed and the step's number, on any layout and after a resume alike."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class TokenBatch(NamedTuple):
    tokens: Tensor  # [sequences, seq_length]
    labels: Tensor  # the tokens after them


class Batches:
    """Random stretches of a text. rank and ranks are the data-parallel ones: each has its sequences of a step's.

    Args:
        text: a numpy array of token numbers, which may be a file's.
        size: sequences of a step, on all ranks; a multiple of `ranks`.
    """

    def __init__(self, text: Any, size: int, seq_length: int, seed: int, rank: int, ranks: int, device: torch.device) -> None:
        self.text, self.size, self.seq_length, self.seed = text, size, seq_length, seed
        self.rank, self.ranks, self.device = rank, ranks, device

    def of_step(self, step: int) -> TokenBatch:
        """This rank's part of a step's sequences."""
        import numpy

        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        starts = torch.randint(len(self.text) - self.seq_length, (self.size,), generator=generator)
        own = starts.chunk(self.ranks)[self.rank].tolist()
        rows = numpy.stack([self.text[start : start + self.seq_length + 1] for start in own]).astype(numpy.int64)
        both = torch.from_numpy(rows)
        if self.device.type == "cuda":
            both = both.pin_memory().to(self.device, non_blocking=True)
        return TokenBatch(both[:, :-1], both[:, 1:])
