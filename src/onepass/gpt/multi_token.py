"""Multi-token prediction: after the blocks, each depth foretells one token more, as in DeepSeek-V3 and Megatron-LM.

Depth k has what the depth before it (the blocks, for the first) made of token i, and the embedding of token i + k. It foretells
token i + k + 1, with the model's own embedding and head. What a depth makes of the last tokens of a row or document, which have
no such token, has no loss, and no other token sees it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from onepass.gpt.block import Block
from onepass.gpt.config import Config
from onepass.gpt.packing import positions_in_rows
from onepass.gpt.parts import Initializer, WholeWeight, make_norm, settled
from onepass.gpt.positions import Tables
from onepass.ops.linear.linear import linear
from onepass.ops.loss.kept_rows import KeptRows

_IGNORED = -100  # labels of these tokens have no loss


class DepthTargets(NamedTuple):
    labels: Tensor  # [B, S]
    loss_mask: Tensor | None
    rows: KeptRows | None  # those that have a loss, where that is asked


class Projection(WholeWeight):
    """A linear layer that each rank has whole."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.given(self.weight))


class MultiTokenLayer(nn.Module):
    """A depth. forward takes (h, embedded) and returns (h, the block's auxiliary loss), h normalised as the head reads it.

    Names of parameters are Megatron's.
    """

    def __init__(self, config: Config, tp_group: dist.ProcessGroup | None, start: Initializer, device: Any) -> None:
        super().__init__()
        norm = config, config.hidden_size, config.sequence_parallel, device
        self.enorm, self.hnorm = make_norm(*norm), make_norm(*norm)
        self.eh_proj = Projection(config, (config.hidden_size, 2 * config.hidden_size), start.of("eh_proj"), device)
        precision = config.precision(config.num_layers - 1)  # as the last block
        self.transformer_layer = Block(config, tp_group, start.of("transformer_layer"), device, precision)
        self.final_layernorm = make_norm(*norm)

    def forward(
        self, h: Tensor, embedded: Tensor, tables: Tables | None = None, boundaries: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        x = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(h)), -1))
        h, pending, aux_loss = self.transformer_layer(x, None, tables, boundaries)
        return self.final_layernorm(settled(h, pending)), aux_loss


def tokens_after(values: Tensor, depth: int, end: int | float = 0) -> Tensor:
    """Return for each token [B, S] the value of the one `depth` after it, or `end` where its row has none."""
    return F.pad(values[:, depth:], (0, min(depth, values.shape[1])), value=end)


def labels_after(labels: Tensor, depth: int, boundaries: Tensor | None) -> Tensor:
    """Return the labels of a depth. boundaries: as gpt/packing.py joins them; a label of another document is ignored."""
    later = tokens_after(labels, depth, _IGNORED)
    if boundaries is None:
        return later
    place = positions_in_rows(boundaries, *labels.shape)
    return torch.where(tokens_after(place, depth, -1) == place + depth, later, _IGNORED)
