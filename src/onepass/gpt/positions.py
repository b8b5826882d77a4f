"""Positions: rotary embedding of queries and keys, and learned position embeddings."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from onepass.gpt.config import Config
from onepass.nn.embedding import VocabParallelEmbedding
from onepass.ops.attention.rope import rope
from onepass.runtime.documents import tables_at

Tables = tuple[Tensor, Tensor]


class Rotary(nn.Module):
    """Tables of cos and sin of all positions' angles, [positions, rotary_size / 2], in fp32 whatever the model's dtype."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: Config, device: torch.device | str | None) -> None:
        super().__init__()
        self.config = config
        self._make(device)

    def _make(self, device: torch.device | str | None) -> None:
        positions = torch.arange(self.config.max_position_embeddings, dtype=torch.float64)
        angles = torch.outer(positions, frequencies(self.config))
        for name, table in (("cos", angles.cos()), ("sin", angles.sin())):
            self.register_buffer(name, table.to(device or torch.get_default_device(), torch.float32), persistent=False)

    def forward(self, length: int, positions: Tensor | None = None) -> Tables:
        """Return the tables of the first positions, [length, R/2], or of `positions`, [B, S, R/2]."""
        return (self.cos[:length], self.sin[:length]) if positions is None else tables_at(self.cos, self.sin, positions)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Recompute the tables after a move. A cast would round them, and the meta device has no values to copy."""
        applied = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._make(self.cos.device)
        return applied


def frequencies(config: Config) -> Tensor:
    """Return [rotary_size / 2] in fp64: the angle in radians by which each pair turns from one position to the next.

    use_rope_scaling scales as Llama 3 does. Pairs of few turns within the original length turn slower by rope_scaling_factor.
    Pairs of many turns are unchanged. Those in between are interpolated linearly.
    """
    size, c = config.rotary_size, config
    turning = config.rotary_base ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    if not c.use_rope_scaling:
        return turning
    waves = c.rope_scaling_original_max_position_embeddings * turning / (2 * math.pi)
    low, high = c.rope_scaling_low_freq_factor, c.rope_scaling_high_freq_factor
    unstretched = ((waves - low) / (high - low)).clamp(0, 1)
    return turning * (unstretched + (1 - unstretched) / c.rope_scaling_factor)


def rotated(q: Tensor, k: Tensor, tables: Tables, config: Config) -> Tables:
    """Rotate q and k, [..., positions, heads, size], by the op or by PyTorch operators."""
    if config.apply_rope_fusion:
        return rope(q, k, *tables, interleaved=config.rotary_interleaved)
    return _rotated_by_pytorch(q, *tables, config.rotary_interleaved), _rotated_by_pytorch(k, *tables, config.rotary_interleaved)


def _rotated_by_pytorch(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    turning, rest = x.split([2 * cos.shape[-1], x.shape[-1] - 2 * cos.shape[-1]], -1)
    x1, x2 = (turning[..., ::2], turning[..., 1::2]) if interleaved else turning.chunk(2, -1)
    y1, y2 = x1 * cos - x2 * sin, x2 * cos + x1 * sin
    y = torch.stack((y1, y2), -1).flatten(-2) if interleaved else torch.cat((y1, y2), -1)
    return torch.cat((y.to(x.dtype), rest), -1)


class PositionEmbedding(VocabParallelEmbedding):
    """A position embedding, whole on every rank. Under sequence parallelism its gradient is a partial sum, as a norm's is."""

    _marked = ("weight",)

    def __init__(self, *sizes: int, sequence_parallel: bool, **options: Any) -> None:
        super().__init__(*sizes, **options)
        self.sequence_parallel = sequence_parallel
        self.mark_parameters()

    def mark_parameters(self) -> None:
        self._divisions.clear()  # the norm of all gradients must count it once, not once per rank
        super().mark_parameters()
