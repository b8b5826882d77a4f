"""Inputs of CUDA graphs, read in place as long as few sets of addresses occur.

A CUDA graph reads and writes fixed addresses. PyTorch therefore copies a graph's inputs to static memory before each replay,
which costs more than small graphs gain. Here a graph is recorded over the inputs themselves, once for each set of addresses.
PyTorch's allocator gives the steps of a training loop the same addresses. After _MOST sets, inputs at new addresses are copied.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import compress
from typing import Any

import torch

from onepass.fusion.side_by_side import boxed

_MOST = 8  # sets of addresses. Each takes a recording


def with_stable_addresses(
    compiled: Callable[[list[Any]], Any], places: Sequence[int], written: Collection[int] = ()
) -> Callable[[list[Any]], Any]:
    """Return `compiled` for inputs at any address. `compiled` itself assumes that the inputs at `places` never move.

    written: places that it writes to.
    """
    if not places:
        return compiled
    seen: set[tuple[int, ...]] = set()
    own: list[torch.Tensor] = []

    def call(inputs: list[Any]) -> Any:
        addresses = tuple([inputs[place].data_ptr() for place in places])
        if addresses not in seen:
            if len(seen) == _MOST:
                moved = _copy(inputs, places, own)
                results = compiled(inputs)
                _copy_back(moved, own, [place in written for place in places])
                return results
            seen.add(addresses)
        return compiled(inputs)

    return boxed(call)


def _copy(inputs: list[Any], places: Sequence[int], own: list[torch.Tensor]) -> list[torch.Tensor]:
    """Replace the inputs at `places` by copies at fixed addresses, and return them."""
    moved = [inputs[place] for place in places]
    if not own:
        own.extend(torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in moved)
    with torch.no_grad():
        torch._foreach_copy_(list(map(_stored, own)), list(map(_stored, moved)))
    for place, copy in zip(places, own, strict=True):
        inputs[place] = copy
    return moved


def _stored(x: torch.Tensor) -> torch.Tensor:
    """Return one of the equal parts of an expanded tensor. A copy into all of them would write to one place several times."""
    for dim, stride in enumerate(x.stride()):
        x = x.narrow(dim, 0, 1) if stride == 0 and x.shape[dim] > 1 else x
    return x


def _copy_back(moved: list[torch.Tensor], own: list[torch.Tensor], written: list[bool]) -> None:
    if any(written):
        with torch.no_grad():
            torch._foreach_copy_(list(compress(moved, written)), list(compress(own, written)))
