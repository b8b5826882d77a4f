"""The state of products in eight bits, in a checkpoint: what delayed scales are and what the next ones come from.

A weight's state is tensors of three rows: the layer's input, the weight, and the gradient of its output.

    fp8.scale.<name>        [3]
    fp8.amax.<name>         [3], of the step that no scale comes from yet
    fp8.history.<name>      [3, steps]
    fp8.counts.<name>       [3, 5]: steps; numbers that saturated, modulo 2^24 and over that; whether a history sets the scale;
                            whether the weight was updated since the last forward
    fp8.underflows.<name>   [3, 2]: numbers that rounded to zero, in the same way. Older checkpoints have none

Counts are below 2^24, so that fp32 holds them. All ranks of a stage have the same state (`Update.step`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from onepass.nn.precision import FP8Layer, fp8_layers
from onepass.product.fp8.scales import ROLES
from onepass.product.fp8.weight import FP8Weight
from onepass.train.checkpoint.parts import Chunk

_COUNTS, _UNDERFLOWS = 5, 2
_BASE = 1 << 24


def scale_chunks(model: nn.Module) -> Iterator[Chunk]:
    """Yield the chunks to be saved. A model in 16 bits has none, nor has one that has not trained."""
    for each in _layers(model):
        state: FP8Weight | None = getattr(each.weight, "fp8", None)
        if state is not None and not state.is_fresh:
            yield from _chunks(each.name, _as_fp32(state.state_dict(each.weight)))


class LoadedScales:
    """Chunks to be read from a checkpoint, and then put into the model. Layers without a state there start anew."""

    def __init__(self, model: nn.Module, tensors: Mapping[str, Any]) -> None:
        self._model = model
        sizes = (len(ROLES),)
        self._found = {
            each.name: {
                "scale": torch.empty(sizes),
                "amax": torch.empty(sizes),
                "history": torch.empty(*sizes, each.recipe.amax_history_len),
                "counts": torch.empty(*sizes, _COUNTS),
                **({"underflows": torch.empty(*sizes, _UNDERFLOWS)} if f"fp8.underflows.{each.name}" in tensors else {}),
            }
            for each in _layers(model)
            if f"fp8.history.{each.name}" in tensors
        }
        self.chunks = [chunk for name, found in self._found.items() for chunk in _chunks(name, found)]

    def put(self) -> None:
        for each in fp8_layers(self._model):
            if each.has_state:
                weight: Any = each.weight
                weight.fp8 = FP8Weight(weight, each.recipe)
                if each.name in self._found:
                    weight.fp8.load_state_dict(_as_state(self._found[each.name]))


def _layers(model: nn.Module) -> Iterator[FP8Layer]:
    return (each for each in fp8_layers(model) if each.recipe.scaling == "delayed")


def _chunks(name: str, tensors: Mapping[str, Tensor]) -> Iterator[Chunk]:
    for kind, tensor in tensors.items():
        shape = tuple(tensor.shape)
        yield Chunk(f"fp8.{kind}.{name}", shape, (0,) * len(shape), shape, partial(Tensor.detach, tensor), alike=True)


def _as_fp32(state: Mapping[str, Any]) -> dict[str, Tensor]:
    updated = torch.full_like(state["saturated"], state["updated"])
    counts = torch.stack([state["steps"], *_divided(state["saturated"]), state["started"], updated], 1)
    underflows = torch.stack(_divided(state["underflowed"]), 1)
    return {
        **{kind: state[kind] for kind in ("scale", "amax", "history")},
        "counts": counts.float(),
        "underflows": underflows.float(),
    }


def _as_state(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    steps, low, high, started, updated = _whole(tensors["counts"])
    numbers = {"steps": steps, "saturated": low + high * _BASE, "started": started.bool()}
    if "underflows" in tensors:
        low, high = _whole(tensors["underflows"])
        numbers["underflowed"] = low + high * _BASE
    return {**{kind: tensors[kind] for kind in ("scale", "amax", "history")}, **numbers, "updated": bool(updated[0])}


def _divided(count: Tensor) -> list[Tensor]:
    return [count % _BASE, count // _BASE]


def _whole(columns: Tensor) -> tuple[Tensor, ...]:
    return columns.nan_to_num(0.0).clamp(0, _BASE).long().unbind(1)
