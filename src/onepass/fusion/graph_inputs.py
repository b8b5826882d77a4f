"""Inputs of CUDA graphs: read where they are, as long as they are in few places.

A CUDA graph reads and writes fixed addresses. PyTorch therefore copies a graph's inputs to memory of its own before each
replay, which costs more than small graphs gain. Here a graph is recorded over its inputs themselves, and again for each new
set of addresses: PyTorch's allocator gives the steps of a training loop the same ones. Who comes with ever new ones is copied
for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from onepass.fusion.side_by_side import boxed

_MOST = 8  # sets of addresses; each is a recording


def with_stable_addresses(compiled: Callable[[list[Any]], Any], places: Sequence[int]) -> Callable[[list[Any]], Any]:
    """`compiled`, which takes the inputs at these places to lie still, for inputs that may come from anywhere."""
    if not places:
        return compiled
    seen: set[tuple[int, ...]] = set()
    own: list[torch.Tensor] = []

    def call(inputs: list[Any]) -> Any:
        addresses = tuple([inputs[place].data_ptr() for place in places])
        if addresses not in seen:
            if len(seen) == _MOST:
                _copy(inputs, places, own)
            else:
                seen.add(addresses)
        return compiled(inputs)

    return boxed(call)


def _copy(inputs: list[Any], places: Sequence[int], own: list[torch.Tensor]) -> None:
    """Put copies, at addresses that stay, in the inputs' places."""
    given = [inputs[place] for place in places]
    if not own:
        own.extend(torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in given)
    with torch.no_grad():
        torch._foreach_copy_(own, given)
    for place, copy in zip(places, own, strict=True):
        inputs[place] = copy
