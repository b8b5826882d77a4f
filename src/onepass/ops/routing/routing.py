"""Routing: what a router sends where, and the tokens that experts drop beyond their capacity."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from onepass.runtime.checks import check_number
from onepass.runtime.sharding import has_dtensor

_DROPS = ("probs", "position")


class Routing(NamedTuple):
    """What a router sends where. Weights and losses have gradients."""

    weights: Tensor  # [..., k] fp32 (fp64 of fp64 logits), of the best expert first; 0 of what is dropped
    chosen: Tensor  # [..., k] int64, the experts
    counts: Tensor  # [E] int32: how often each expert was chosen, dropped or not
    aux_loss: Tensor | None = None
    z_loss: Tensor | None = None
    kept: Tensor | None = None  # [..., k] bool, within a capacity: what is not dropped

    def with_capacity(self, factor: float, drop: str = "probs") -> Routing:
        """Return the routing in which an expert keeps ``ceil(factor * tokens * k / experts)`` tokens, as Megatron drops them.

        Weights of others become 0, and ``.kept`` is False there. Weights that are kept are not normalised again. PyTorch sorts
        the choices by expert; it waits for no GPU.

        Args:
            factor: 1 is as many tokens as an expert gets where all get equally many.
            drop: ``"probs"`` keeps an expert's tokens of the largest weights, ``"position"`` its first. Of equal weights, earlier
                tokens are kept.
        """
        if has_dtensor(self.weights):
            raise TypeError("with_capacity must have plain tensors, but these are DTensors")
        check_number("factor", factor)
        if not 0 < factor < math.inf:
            raise ValueError(f"factor must be above 0 and finite, but is {factor!r}")
        if drop not in _DROPS:
            raise ValueError(f"drop must be one of {', '.join(map(repr, _DROPS))}, but is {drop!r}")
        experts, flat = self.counts.shape[0], self.chosen.flatten()
        most = math.ceil(flat.shape[0] / experts * factor)
        if drop == "probs":
            first = self.weights.detach().flatten().argsort(descending=True, stable=True)
            order = first[flat[first].argsort(stable=True)]
        else:
            order = flat.argsort(stable=True)
        begins = self.counts.cumsum(0) - self.counts
        place = torch.arange(flat.shape[0], device=flat.device) - begins[flat[order]]
        kept = torch.zeros_like(flat, dtype=torch.bool).scatter(0, order, place < most).view(self.chosen.shape)
        return self._replace(weights=torch.where(kept, self.weights, 0.0), kept=kept)
