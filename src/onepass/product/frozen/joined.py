"""Several frozen weights as one with all their rows: q, k and v, or gate and up. Each is decoded into its rows of one tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from torch import Tensor

from onepass.product.frozen.weight import FrozenWeight, define_frozen


class JoinedWeight(FrozenWeight):
    """The rows of several weights, one after another. `tensors` are the weights."""

    def describe(self) -> str:
        kinds = dict.fromkeys(cast(FrozenWeight, weight).describe() for weight in self.tensors.values())
        return f"{len(self.tensors)} weights of {' and '.join(kinds)}"

    def decode_into(self, out: Tensor) -> None:
        weights = cast(Sequence[FrozenWeight], list(self.tensors.values()))
        for weight, rows in zip(weights, out.split([weight.shape[0] for weight in weights]), strict=True):
            weight.decode_into(rows)


def join(weights: Sequence[Any]) -> FrozenWeight:
    """Return one weight with the rows of all. Raise where they don't go together."""
    first = weights[0]
    if len(weights) == 1:
        return first  # type: ignore[no-any-return]
    for index, weight in enumerate(weights):
        if weight.shape[1] != first.shape[1]:
            raise ValueError(
                f"weights must have one number of columns, but weight {index} has {weight.shape[1]}, the first {first.shape[1]}"
            )
        if weight.is_decoded is not first.is_decoded:
            raise TypeError(f"weights must all be in eight bits or none, but weight {index} is {weight!r}, the first {first!r}")
        if weight.dtype != first.dtype:
            raise TypeError(f"weights must have one type, but weight {index} is {weight.dtype}, the first {first.dtype}")
    if not first.is_decoded:
        return type(first).join(weights)  # type: ignore[no-any-return]
    shape = sum(weight.shape[0] for weight in weights), first.shape[1]
    return JoinedWeight(shape, first.dtype, {f"part{i}": weight for i, weight in enumerate(weights)})  # type: ignore[no-any-return]


define_frozen(JoinedWeight)
