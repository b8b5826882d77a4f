"""What optimizers over `MainGrads` share: their parameter groups, and weights of which each rank makes a part."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from onepass.parallel.main_grads import MainGrads

Groups = list[dict[str, Any]]


class GatheredWeights:
    """With shard: the weights of each bucket in a flat buffer, in which the ranks gather each other's parts."""

    def __init__(self, main_grads: MainGrads) -> None:
        self._main_grads = main_grads
        self.flat: list[Tensor] = []
        self.mine: list[Tensor] = []  # what of it this rank makes
        for bucket in main_grads.buckets:
            flat = torch.zeros_like(bucket.flat, dtype=bucket.places[0].parameter.dtype)
            for place in bucket.places:
                flat[place.start : place.stop].view(place.parameter.shape).copy_(place.parameter)
            self.flat.append(flat)
            self.mine.append(flat[bucket.first : bucket.first + bucket.mine.numel()])

    def lay(self) -> None:
        """From here on the parameters are views of it."""
        for bucket, flat in zip(self._main_grads.buckets, self.flat, strict=True):
            for place in bucket.places:
                place.parameter.data = flat[place.start : place.stop].view(place.parameter.shape)

    def gather(self) -> None:
        works = []
        for flat, mine in reversed([*zip(self.flat, self.mine, strict=True)]):  # the model's first weights first
            # PyTorch 2.13 has another name for it, and warns at the one before
            all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
            works.append(all_gather(flat, mine, self._main_grads.group, async_op=True))
        for work in works:
            work.wait()
        written(self._main_grads)


def written(main_grads: MainGrads) -> None:
    """Autograd is to see that all weights were."""
    torch.autograd.graph.increment_version([parameter for _, parameter in main_grads.named])


def check_fp32(main_grads: MainGrads) -> None:
    if main_grads.dtype is not torch.float32:
        raise TypeError(f"main_grads must have dtype torch.float32, but has {main_grads.dtype}")


def shard_of(main_grads: MainGrads) -> list[int]:
    """This rank's part of how many, as a state says it."""
    group = main_grads.group
    return [group.rank(), group.size()] if main_grads.shard and group is not None else [0, 1]


def check_shard(state: Mapping[str, Any], main_grads: MainGrads) -> None:
    mine, theirs = shard_of(main_grads), list(state.get("shard", [0, 1]))
    if theirs != mine:
        raise ValueError(f"state must be of [rank, ranks] {mine}, but is of {theirs}")


def grouped(main_grads: MainGrads, groups: Iterable[Mapping[str, Any]] | None) -> Groups:
    """The groups, with ids in the place of the parameters."""
    names = {id(parameter): name for name, parameter in main_grads.named}
    if groups is None:
        return [{"params": list(names)}]
    found: Groups = []
    seen: set[int] = set()
    for group in groups:
        keys = [id(parameter) for parameter in group["params"] if parameter.requires_grad]
        for key in keys:
            if key not in names or key in seen:
                which = f"{names[key]} is in two" if key in seen else "one has another"
                raise ValueError(f"groups must have each parameter of main_grads once, but {which}")
            seen.add(key)
        found.append({**group, "params": keys})
    left = [name for key, name in names.items() if key not in seen]
    if left:
        raise ValueError(f"groups must have each parameter of main_grads once, but {left[0]} is in none")
    return found
