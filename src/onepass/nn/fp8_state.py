"""What modules have to do with the state that a weight carries for products in eight bits."""

from __future__ import annotations

from typing import Any

from torch import nn

from onepass.runtime.fp8_recipe import Precision


def drop_fp8_state(module: nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
    """Let a weight that was loaded start anew: scales that come from another weight's history may saturate all of it."""
    weight = getattr(module, "weight", None)
    if weight is not None and f"{prefix}weight" in state_dict:
        vars(weight).pop("fp8", None)


class GroupedLayer(nn.Module):
    """A base class of modules whose grouped products run in eight bits by `precision`, always with scales by row."""

    precision: Precision = None
    grouped_weights: tuple[str, ...]  # names of their weights, [experts, N, K]


def shown_precision(precision: Precision) -> list[str]:
    """Return what `extra_repr` shows of a precision: nothing of the default."""
    return [] if precision is None else [f"precision={precision!r}"]
