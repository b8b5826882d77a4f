"""An optimizer on fp32 weights, fed from `MainGrads`, for a model whose weights are bf16 or fp16.

    the weights             without shard                       with shard (ZeRO-1)
    bf16, fp16              an fp32 copy of each                an fp32 copy of this rank's part of each
    fp32                    the parameter itself                this rank's part of the parameter itself

The masters' gradients are views of the MainGrads buffers: nothing is copied. With shard a rank keeps masters and optimizer state
of its part only, and the parameters become views of flat buffers, in which the ranks gather each other's new weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onepass.parallel.main_grads import MainGrads
from onepass.parallel.weights import GatheredWeights, Groups, check_fp32, check_shard, grouped, shard_of


@dataclass(eq=False)
class _Master:
    """What the optimizer has of a parameter."""

    name: str
    parameter: Tensor
    start: int  # where weight begins in the flattened parameter
    weight: Tensor
    grad: Tensor
    rounded: Tensor | None  # where the weight goes after a step, if it is a copy


class MasterWeights:
    """A torch optimizer that steps fp32 masters by MainGrads' gradients and writes the rounded weights into the model.

        weights = MasterWeights(main_grads, lambda groups: torch.optim.AdamW(groups, lr=1e-3))
        ...
        main_grads.finish()
        weights.step()

    `weights.optimizer` is what make returned, for schedulers of the learning rate. With `MainGrads(shard=True)` the masters are
    one-dimensional pieces, so it must be an optimizer that works element by element, as SGD and Adam do; in `step`, `publish` and
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
        check_fp32(main_grads)
        self._main_grads = main_grads
        in_groups = grouped(main_grads, groups)
        with torch.no_grad():
            self._gathered = GatheredWeights(main_grads) if main_grads.shard else None
            parts = self._gathered.mine if self._gathered else []
            wide = [part if part.dtype is torch.float32 else part.float() for part in parts]
            with main_grads.filled():
                masters = _pieces(main_grads, wide) if self._gathered else _whole(main_grads)
        for group in in_groups:
            group["params"] = [masters[key].weight for key in group["params"] if key in masters]
        self.optimizer = make(in_groups)
        self._masters = list(masters.values())
        copies = [(master.weight, master.rounded) for master in self._masters if master.rounded is not None]
        copies += [(mine, part) for mine, part in zip(wide, parts, strict=True) if mine is not part]
        self._wide, self._rounded = [wide for wide, _ in copies], [rounded for _, rounded in copies]
        if self._gathered:
            self._gathered.lay()  # last, as make may have raised

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
        self.publish()

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into the model's weights, as `step` does at its end: for masters that were written by other means."""
        if self._wide:
            torch._foreach_copy_(self._rounded, self._wide)
        if self._gathered:
            self._gathered.gather()

    @torch.no_grad()
    def reload(self) -> None:
        """Take the masters from the model's weights again."""
        if self._wide:
            torch._foreach_copy_(self._wide, self._rounded)

    def pieces(self) -> Iterator[tuple[Tensor, Tensor, int]]:
        """Each parameter of which this rank steps something, what it steps, and where in the flattened parameter that begins.

        What it steps is fp32 and the key of its state in `optimizer.state`: a master of the parameter's shape, or with shard a
        one-dimensional stretch. After writing to it call `publish`.
        """
        for master in self._masters:
            yield master.parameter, master.weight, master.start

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state and copies of the masters: with shard, this rank's."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "masters": {master.name: master.weight.detach().clone() for master in self._masters},
            "shard": shard_of(self._main_grads),
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take a state back, and write the model's weights from its masters. It must come from the same rank of as many."""
        theirs = {name: tuple(master.shape) for name, master in state["masters"].items()}
        mine = {master.name: tuple(master.weight.shape) for master in self._masters}
        check_shard(state, self._main_grads)
        for name in {**mine, **theirs}:
            if mine.get(name) != theirs.get(name):
                raise ValueError(f"state must have a master {name} of shape {mine.get(name)}, but has {theirs.get(name)}")
        self.optimizer.load_state_dict(state["optimizer"])
        for master in self._masters:
            master.weight.copy_(state["masters"][master.name])
        self.publish()


Masters = dict[int, _Master]  # by the parameter's id


def _whole(main_grads: MainGrads) -> Masters:
    masters = {}
    for bucket in main_grads.buckets:
        for place in bucket.places:
            parameter = place.parameter
            same = parameter.dtype is torch.float32
            weight = parameter if same else parameter.detach().float().requires_grad_()
            masters[id(parameter)] = _Master(place.name, parameter, 0, weight, parameter.main_grad, None if same else parameter)
    return masters


def _pieces(main_grads: MainGrads, wide: list[Tensor]) -> Masters:
    masters = {}
    for bucket, weights in zip(main_grads.buckets, wide, strict=True):
        for place, start, stop in bucket.parts():
            weight = weights[start - bucket.first : stop - bucket.first].detach().requires_grad_()
            grad = bucket.flat[start:stop]
            masters[id(place.parameter)] = _Master(place.name, place.parameter, start - place.start, weight, grad, None)
    return masters
