"""A cache of keys and values, with which a model's blocks run on the tokens that follow those it has."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from onepass.ops.attention.attention import attention, unsupported
from onepass.ops.attention.formula import AttentionOptions
from onepass.ops.attention.next_token import attend_last, last_tiles


class KeyValueCache:
    """Keys, rotated, and values of some sequences, for each block.

    The first tokens are the prompts, all in one row after one another. Each step has one more token of every sequence.

    Args:
        options: attention's, of which the heads and the scale are read.
        layers: how many blocks there are.
        lengths: of the prompts.
        longest: how many tokens of a sequence have room.
    """

    def __init__(
        self, options: AttentionOptions, layers: int, lengths: Sequence[int], longest: int, device: torch.device
    ) -> None:  # fmt: skip
        self.options, self.longest, self.lengths = options, longest, list(lengths)
        self.boundaries: Tensor | None = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
        self.ends = self.boundaries.diff()
        self.first = torch.arange(len(lengths), device=device) * longest  # places of the sequences' first tokens
        within = torch.cat([torch.arange(length) for length in lengths]).to(device)
        self.positions = within[None]  # of the tokens that a step has, [1, all prompts' tokens], then [B, 1]
        self.places = within + self.first.repeat_interleave(self.ends)
        self.tiles: Tensor | None = None
        self.layers = [LayerCache(self) for _ in range(layers)]

    def advance(self) -> None:
        """Make room for a token more of each sequence."""
        self.lengths = [length + 1 for length in self.lengths]
        self.ends = self.ends + 1
        self.positions = (self.ends - 1).long()[:, None]
        self.places = self.first + self.positions[:, 0]
        self.boundaries = self.tiles = None


class LayerCache:
    """One block's keys and values, [sequences, longest, groups, D]. They get their memory, type and D from the first tokens."""

    def __init__(self, cache: KeyValueCache) -> None:
        self.cache = cache
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Put a step's keys and values beside those that are there. Return y of its queries. q and k are rotated."""
        cache, options = self.cache, self.cache.options
        if self.keys is None or self.values is None:
            shape = len(cache.lengths), cache.longest, *k.shape[2:]
            self.keys, self.values = k.new_empty(shape), v.new_empty(shape)
        for kept, new in ((self.keys, k), (self.values, v)):
            kept.flatten(0, 1).index_copy_(0, cache.places, new.flatten(0, 1))
        if cache.boundaries is not None:
            rows = torch.cat([q, k, v], 2).flatten(2)
            reason = unsupported(rows, options.heads, options.groups, cache.boundaries)
            return attention(
                rows, options.heads, options.groups, cu_seqlens=cache.boundaries, backend=None if reason is None else "torch"
            )
        if cache.tiles is None:
            row = q.new_empty(1, 1, options.every * q.shape[-1])
            cache.tiles = last_tiles(row, cache.ends, cache.longest, options)
        return attend_last(q[:, 0], self.keys, self.values, cache.lengths, cache.tiles, options)[:, None].flatten(2)
