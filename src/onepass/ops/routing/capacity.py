"""Capacity: how many tokens an expert takes, and which are dropped where more are sent to it."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from onepass.runtime.checks import check_number

_DROPS = ("probs", "position")


class Capacity(NamedTuple):
    """The most tokens that an expert takes: ``ceil(factor * tokens * k / experts)``.

    Args:
        factor: 1 is as many as an expert gets if all get equally many.
        drop: ``"probs"`` drops an expert's tokens of the least weights, ``"position"`` its last ones.
    """

    factor: float
    drop: str = "probs"


def check_capacity(capacity: object) -> None:
    if not isinstance(capacity, Capacity):
        raise TypeError(f"capacity must be a onepass.Capacity or None, but is {capacity!r}")
    check_number("capacity.factor", capacity.factor)
    if not 0 < capacity.factor < math.inf:
        raise ValueError(f"capacity.factor must be above 0 and finite, but is {capacity.factor!r}")
    if capacity.drop not in _DROPS:
        raise ValueError(f"capacity.drop must be one of {', '.join(map(repr, _DROPS))}, but is {capacity.drop!r}")


def find_kept(weights: Tensor, chosen: Tensor, counts: Tensor, capacity: Capacity) -> Tensor:
    """Return, of chosen's shape, whether each choice is kept. Of equal weights those of earlier tokens are.

    Rows are sorted by expert. It waits for no GPU, and shapes depend on nothing that is in the tensors.
    """
    experts, flat = counts.shape[0], chosen.flatten()
    most = math.ceil(flat.shape[0] / experts * capacity.factor)
    if capacity.drop == "probs":
        first = weights.flatten().argsort(descending=True, stable=True)
        order = first[flat[first].argsort(stable=True)]
    else:
        order = flat.argsort(stable=True)
    begins = counts.cumsum(0) - counts
    place = torch.arange(flat.shape[0], device=flat.device) - begins[flat[order]]
    return torch.zeros_like(flat, dtype=torch.bool).scatter(0, order, place < most).view(chosen.shape)
