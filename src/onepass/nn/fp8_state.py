"""What modules have to do with the state that a weight carries for products in eight bits."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from onepass.product.fp8.weight import FP8Weight
from onepass.runtime.fp8_recipe import Precision


def drop_fp8_state(module: nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
    """Let a weight that was loaded start anew: scales that come from another weight's history may saturate all of it."""
    weight = getattr(module, "weight", None)
    if weight is not None and f"{prefix}weight" in state_dict:
        vars(weight).pop("fp8", None)


class FP8Module(nn.Module):
    """A base class of modules whose weight may carry scales. A copy has them, and a weight that is loaded starts anew."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        made = self.__new__(type(self))
        memo[id(self)] = made
        made.__setstate__(copy.deepcopy(self.__dict__, memo))  # type: ignore[no-untyped-call]
        for name, parameter in self._parameters.items():
            state: FP8Weight | None = getattr(parameter, "fp8", None)
            if state is not None and parameter is not None:
                copied: Any = made._parameters[name]
                copied.fp8 = FP8Weight(copied, state.recipe)
                copied.fp8.load_state_dict(state.state_dict(parameter))
        return made

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *rest)
        drop_fp8_state(self, state_dict, prefix)


class GroupedLayer(nn.Module):
    """A base class of modules whose grouped products run in eight bits by `precision`, always with scales by row."""

    precision: Precision = None
    grouped_weights: tuple[str, ...]  # names of their weights, [experts, N, K]


def shown(module: nn.Module, **defaults: Any) -> list[str]:
    """Return what `extra_repr` shows of a module's attributes: ``name=value`` of those that are not the default."""
    return [f"{name}={value!r}" for name, default in defaults.items() if (value := getattr(module, name)) != default]
