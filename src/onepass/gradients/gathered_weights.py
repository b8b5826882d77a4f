"""What optimizers over `MainGrads` share: parameter groups, and weights of which each rank steps a part."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from onepass.gradients.main_grads import MainGrads

Groups = list[dict[str, Any]]


class GatheredWeights:
    """With shard: a flat buffer of each bucket's weights, into which the ranks gather each other's parts."""

    def __init__(self, main_grads: MainGrads) -> None:
        self._main_grads = main_grads
        self.flat: list[Tensor] = []
        self.mine: list[Tensor] = []  # the part of each that this rank steps
        self._laid = 0  # buckets whose parameters are views
        self.extend()

    def extend(self) -> None:
        """Copy the weights of buckets that are new."""
        for bucket in self._main_grads.buckets[len(self.flat) :]:
            flat = torch.zeros_like(bucket.flat, dtype=bucket.places[0].parameter.dtype)
            for place in bucket.places:
                flat[place.start : place.stop].view(place.parameter.shape).copy_(place.parameter)
            self.flat.append(flat)
            self.mine.append(flat[bucket.first : bucket.first + bucket.mine.numel()])

    def lay(self) -> None:
        """Make the parameters of buckets that are new views of the buffers."""
        for bucket, flat in zip(self._main_grads.buckets[self._laid :], self.flat[self._laid :], strict=True):
            for place in bucket.places:
                place.parameter.data = flat[place.start : place.stop].view(place.parameter.shape)
        self._laid = len(self.flat)

    def check(self) -> None:
        """Raise where a parameter was given other memory: its weights would be stepped in the old."""
        for bucket, flat in zip(self._main_grads.buckets[: self._laid], self.flat, strict=True):
            first = flat.data_ptr()
            for place in bucket.places:
                if place.parameter.numel() and place.parameter.data_ptr() != first + place.start * flat.element_size():
                    raise RuntimeError(
                        f"parameters must stay where they were put with shard=True, but {place.name} has other memory by now"
                    )

    def gather(self) -> None:
        works = []
        for flat, mine in reversed([*zip(self.flat, self.mine, strict=True)]):  # the model's first weights first
            # PyTorch 2.13 renames it, and warns at the old name
            all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
            works.append(all_gather(flat, mine, self._main_grads.group, async_op=True))
        for work in works:
            work.wait()
        bump_version(self._main_grads)


def bump_version(main_grads: MainGrads) -> None:
    """Tell autograd that the trained weights were written."""
    torch.autograd.graph.increment_version([each for _, each in main_grads.named if id(each) in main_grads.trained])


def check_fp32(main_grads: MainGrads) -> None:
    if main_grads.dtype is not torch.float32:
        raise TypeError(f"main_grads must have dtype torch.float32, but has {main_grads.dtype}")


def shard_of(main_grads: MainGrads) -> list[int]:
    """Return [rank, ranks], as a state dict has it."""
    group = main_grads.group
    return [group.rank(), group.size()] if main_grads.shard and group is not None else [0, 1]


def check_shard(state: Mapping[str, Any], main_grads: MainGrads) -> None:
    mine, theirs = shard_of(main_grads), list(state.get("shard", [0, 1]))
    if theirs != mine:
        raise ValueError(f"state must be of [rank, ranks] {mine}, but is of {theirs}")


def parameter_groups(main_grads: MainGrads, groups: Iterable[Mapping[str, Any]] | None) -> Groups:
    """Return the groups with lists of parameters, frozen ones too: they may be unfrozen."""
    if groups is None:
        return [{"params": [parameter for _, parameter in main_grads.given]}]
    listed = [{**group, "params": [*group["params"]]} for group in groups]
    check_groups(main_grads, listed)
    return listed


def check_groups(main_grads: MainGrads, groups: Groups) -> None:
    """Raise unless each trainable parameter of main_grads is in one group, and no other trainable one is."""
    names = {id(parameter): name for name, parameter in main_grads.given}
    seen: set[int] = set()
    for group in groups:
        for parameter in group["params"]:
            key = id(parameter)
            if key in seen or (parameter.requires_grad and key not in names):
                which = f"{names.get(key, 'one')} is in two" if key in seen else "one has another"
                raise ValueError(f"groups must have each parameter of main_grads once, but {which}")
            seen.add(key)
    left = [name for name, parameter in main_grads.given if parameter.requires_grad and id(parameter) not in seen]
    if left:
        raise ValueError(f"groups must have each parameter of main_grads once, but {left[0]} is in none")
