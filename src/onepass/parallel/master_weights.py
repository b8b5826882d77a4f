"""An optimizer on fp32 weights, fed from `MainGrads`, for a model whose weights are bf16 or fp16.

    the weights             without shard                       with shard (ZeRO-1)
    bf16, fp16              an fp32 copy of each                an fp32 copy of this rank's part of each
    fp32                    the parameter itself                this rank's part of the parameter itself

The masters' gradients are views of the MainGrads buffers: nothing is copied. With shard a rank keeps masters and optimizer state
of its part only, and the parameters become views of flat buffers, in which the ranks gather each other's new weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from onepass.parallel.main_grads import MainGrads

Groups = list[dict[str, Any]]


@dataclass(eq=False)
class _Master:
    """What the optimizer has of a parameter."""

    name: str
    weight: Tensor
    grad: Tensor
    rounded: Tensor | None  # where the weight goes after a step, if it is a copy


class _Gathered:
    """A bucket's weights in their own type, of which this rank makes its part."""

    def __init__(self, weights: Tensor, mine: Tensor) -> None:
        self.weights, self.mine = weights, mine
        self.wide = mine if mine.dtype is torch.float32 else mine.float()


class MasterWeights:
    """A torch optimizer that steps fp32 masters by MainGrads' gradients and writes the rounded weights into the model.

        weights = MasterWeights(main_grads, lambda groups: torch.optim.AdamW(groups, lr=1e-3))
        ...
        main_grads.finish()
        weights.step()

    `weights.optimizer` is what make returned, for schedulers of the learning rate. With `MainGrads(shard=True)` the masters are
    one-dimensional pieces, so it must be an optimizer that works element by element, as SGD and Adam do; in `step` and
    `load_state_dict` all ranks take part. Where the weights are changed by other means, as by loading a checkpoint into
    the model, call `reload`.

    Args:
        main_grads: of fp32, with the parameters to be trained.
        make: takes parameter groups, as torch.optim's optimizers do, and returns the optimizer.
        groups: the model's parameters in groups with options, as for torch.optim: `{"params": [...], "weight_decay": 0.0}`.
            Each parameter of main_grads is in one; frozen ones are left out. None is one group of all.
    """

    def __init__(
        self,
        main_grads: MainGrads,
        make: Callable[[Groups], torch.optim.Optimizer],
        groups: Iterable[Mapping[str, Any]] | None = None,
    ) -> None:
        if main_grads.dtype is not torch.float32:
            raise TypeError(f"main_grads must have dtype torch.float32, but has {main_grads.dtype}")
        self._main_grads = main_grads
        grouped = _grouped(main_grads, groups)
        with torch.no_grad():
            self._gathered = _gathered(main_grads) if main_grads.shard else []
            masters = _pieces(main_grads, self._gathered) if main_grads.shard else _whole(main_grads)
        for group in grouped:
            group["params"] = [masters[key].weight for key in group["params"] if key in masters]
        self.optimizer = make(grouped)
        self._masters = list(masters.values())
        copies = [(master.weight, master.rounded) for master in self._masters if master.rounded is not None]
        self._wide, self._rounded = [wide for wide, _ in copies], [rounded for _, rounded in copies]
        for bucket, gathered in zip(main_grads.buckets, self._gathered, strict=False):  # last, as make may have raised
            for place in bucket.places:
                place.parameter.data = gathered.weights[place.start : place.stop].view(place.parameter.shape)

    @torch.no_grad()
    def step(self) -> None:
        """Step the optimizer and the model's weights. `main_grads.finish()` comes before, `main_grads.zero_()` after."""
        self._main_grads.check_finished("step()")
        for master in self._masters:
            master.weight.grad = master.grad
        try:
            self.optimizer.step()
        finally:
            for master in self._masters:  # one of them may be the parameter itself, to which backward would add
                master.weight.grad = None
        self._publish()

    def _publish(self) -> None:
        """Round the masters into the model's weights."""
        if self._wide:
            torch._foreach_copy_(self._rounded, self._wide)
        works = []
        for gathered in reversed(self._gathered):  # the model's first weights first
            if gathered.wide is not gathered.mine:
                gathered.mine.copy_(gathered.wide)
            # PyTorch 2.13 has another name for it, and warns at the one before
            all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
            works.append(all_gather(gathered.weights, gathered.mine, self._main_grads.group, async_op=True))
        for work in works:
            work.wait()
        if works:  # autograd is to see that they were written
            torch.autograd.graph.increment_version([parameter for _, parameter in self._main_grads.named])

    @torch.no_grad()
    def reload(self) -> None:
        """Take the masters from the model's weights again."""
        for gathered in self._gathered:
            gathered.wide.copy_(gathered.mine)
        if self._wide:
            torch._foreach_copy_(self._wide, self._rounded)

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state and copies of the masters: with shard, this rank's."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "masters": {master.name: master.weight.detach().clone() for master in self._masters},
            "shard": self._shard(),
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take a state back, and write the model's weights from its masters. It must come from the same rank of as many."""
        theirs = {name: tuple(master.shape) for name, master in state["masters"].items()}
        mine = {master.name: tuple(master.weight.shape) for master in self._masters}
        if list(state["shard"]) != self._shard():
            raise ValueError(f"state must be of [rank, ranks] {self._shard()}, but is of {list(state['shard'])}")
        for name in {**mine, **theirs}:
            if mine.get(name) != theirs.get(name):
                raise ValueError(f"state must have a master {name} of shape {mine.get(name)}, but has {theirs.get(name)}")
        self.optimizer.load_state_dict(state["optimizer"])
        for master in self._masters:
            master.weight.copy_(state["masters"][master.name])
        self._publish()

    def _shard(self) -> list[int]:
        group = self._main_grads.group
        return [group.rank(), group.size()] if self._main_grads.shard and group is not None else [0, 1]


Masters = dict[int, _Master]  # by the parameter's id


def _whole(main_grads: MainGrads) -> Masters:
    masters = {}
    for bucket in main_grads.buckets:
        for place in bucket.places:
            parameter = place.parameter
            same = parameter.dtype is torch.float32
            weight = parameter if same else parameter.detach().float().requires_grad_()
            masters[id(parameter)] = _Master(place.name, weight, parameter.main_grad, None if same else parameter)
    return masters


def _gathered(main_grads: MainGrads) -> list[_Gathered]:
    found = []
    for bucket in main_grads.buckets:
        weights = torch.zeros_like(bucket.flat, dtype=bucket.places[0].parameter.dtype)
        for place in bucket.places:
            weights[place.start : place.stop].view(place.parameter.shape).copy_(place.parameter)
        found.append(_Gathered(weights, weights[bucket.first : bucket.first + bucket.mine.numel()]))
    return found


def _pieces(main_grads: MainGrads, gathered: list[_Gathered]) -> Masters:
    masters = {}
    for bucket, weights in zip(main_grads.buckets, gathered, strict=True):
        for place, start, stop in bucket.parts():
            weight = weights.wide[start - bucket.first : stop - bucket.first].detach().requires_grad_()
            masters[id(place.parameter)] = _Master(place.name, weight, bucket.flat[start:stop], None)
    return masters


def _grouped(main_grads: MainGrads, groups: Iterable[Mapping[str, Any]] | None) -> Groups:
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
