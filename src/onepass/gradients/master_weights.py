"""An optimizer on fp32 weights, fed from `MainGrads`, for a model whose weights are bf16 or fp16.

    the weights             without shard                       with shard (ZeRO-1)
    bf16, fp16              an fp32 copy of each                an fp32 copy of this rank's part of each
    fp32                    the parameter itself                this rank's part of the parameter itself

The masters' gradients are views of the MainGrads buffers: nothing is copied. With shard a rank keeps masters and optimizer state
of its part only. The parameters become views of flat buffers, into which the ranks gather each other's new weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onepass.gradients.buckets import Bucket
from onepass.gradients.gathered_weights import (
    GatheredWeights,
    Groups,
    check_fp32,
    check_groups,
    check_shard,
    parameter_groups,
    shard_of,
)
from onepass.gradients.main_grads import MainGrads
from onepass.gradients.written_weights import follow_weight
from onepass.runtime.cuda_graph import current_step


@dataclass(eq=False)
class _Master:
    """A parameter's fp32 master, or this rank's part of it."""

    name: str
    parameter: Tensor
    start: int  # where weight begins in the flattened parameter
    weight: Tensor
    grad: Tensor
    rounded: Tensor | None  # what the weight is copied to after a step, if it is a copy


class MasterWeights:
    """A torch optimizer that steps fp32 masters by MainGrads' gradients and writes the rounded weights into the model.

        weights = MasterWeights(main_grads, lambda groups: torch.optim.AdamW(groups, lr=1e-3))
        ...
        main_grads.finish()
        weights.step()

    `weights.optimizer` is what make returned, for schedulers of the learning rate. With `MainGrads(shard=True)` the masters are
    one-dimensional pieces, so the optimizer must work element by element, as SGD and Adam do; `step`, `publish` and
    `load_state_dict` are collective.

    A frozen parameter stands still, and one that is unfrozen later trains. Weights may be written by others, in whichever way:
    where one is not its master rounded, `step` takes it as the master.

    Args:
        main_grads: of fp32, with the parameters to be trained.
        make: takes parameter groups, as torch.optim's optimizers do, and returns the optimizer.
        groups: the model's parameters in groups with options, as for torch.optim: `{"params": [...], "weight_decay": 0.0}`.
            Each parameter of main_grads is in one. None is one group of all.
    """

    def __init__(
        self,
        main_grads: MainGrads,
        make: Callable[[Groups], torch.optim.Optimizer],
        groups: Iterable[Mapping[str, Any]] | None = None,
    ) -> None:
        check_fp32(main_grads)
        main_grads.step_by(None)  # an AdamW with in_backward may have, before
        self._main_grads = main_grads
        self._groups = parameter_groups(main_grads, groups)
        self._gathered = GatheredWeights(main_grads) if main_grads.shard else None
        self._masters: Masters = {}
        self._copies: list[tuple[Tensor, Tensor]] = []  # fp32 masters, and where they are rounded to
        self._placed = 0  # buckets whose parameters have masters
        self._add_masters()
        self.optimizer = make([{**group, "params": self._in_group(group)} for group in self._groups])
        if self._gathered:
            self._gathered.lay()  # last: make may raise

    @torch.no_grad()
    def _add_masters(self) -> None:
        """Make masters of the parameters in buckets that are new."""
        buckets = self._main_grads.buckets[self._placed :]
        with self._main_grads.filled(buckets):
            if self._gathered:
                parts = self._gathered.mine[self._placed :]
                wide = [part if part.dtype is torch.float32 else part.float() for part in parts]
                masters = _pieces(buckets, wide)
                self._copies += [(mine, part) for mine, part in zip(wide, parts, strict=True) if mine is not part]
            else:
                masters = _whole(buckets)
                self._copies += [(each.weight, each.rounded) for each in masters.values() if each.rounded is not None]
        self._masters |= masters
        self._placed += len(buckets)

    def _in_group(self, group: Mapping[str, Any]) -> list[Tensor]:
        return [self._masters[id(each)].weight for each in group["params"] if id(each) in self._masters]

    @torch.no_grad()
    def _follow(self) -> None:
        """Give masters to parameters that were unfrozen, and take weights that were written by others."""
        if self._gathered:
            self._gathered.check()
        for wide, rounded in self._copies:
            follow_weight(rounded, wide)
        if self._placed == len(self._main_grads.buckets):
            return
        check_groups(self._main_grads, self._groups)
        if self._gathered:
            self._gathered.extend()
        self._add_masters()
        for group, of_optimizer in zip(self._groups, self.optimizer.param_groups, strict=True):
            of_optimizer["params"][:] = self._in_group(group)
        if self._gathered:
            self._gathered.lay()

    @torch.no_grad()
    def step(self) -> None:
        """Step the optimizer and the model's weights. `main_grads.finish()` comes before, `main_grads.zero_()` after."""
        self._main_grads.check_finished("step()")
        self._follow()
        for master in self._masters.values():
            master.weight.grad = master.grad if id(master.parameter) in self._main_grads.trained else None
        try:
            self.optimizer.step()
        finally:
            for master in self._masters.values():  # one may be the parameter itself, and backward would add to its .grad
                master.weight.grad = None
        self.publish()

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into the model's weights, as `step` does. Call it after writing masters by other means, before
        any other call: those take the masters from the weights again."""
        if self._copies:
            wide, rounded = map(list, zip(*self._copies, strict=True))
            torch._foreach_copy_(rounded, wide)
            if (step := current_step()) is not None:
                step.written += rounded
        if self._gathered:
            self._gathered.gather()

    @torch.no_grad()
    def reload(self) -> None:
        """Take the masters from the model's weights again."""
        for wide, rounded in self._copies:
            wide.copy_(rounded)

    def pieces(self) -> Iterator[tuple[Tensor, Tensor, int]]:
        """Yield each parameter that this rank steps, its master, and where in the flattened parameter the master begins.

        The master is fp32 and the key of its state in `optimizer.state`. It has the parameter's shape, or with shard is a
        one-dimensional stretch. After writing to it call `publish`. Until then any other call takes the weights again.
        """
        self._follow()
        for master in self._masters.values():
            yield master.parameter, master.weight, master.start

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state and copies of the masters; with shard, this rank's."""
        self._follow()
        return {
            "optimizer": self.optimizer.state_dict(),
            "masters": {master.name: master.weight.detach().clone() for master in self._masters.values()},
            "shard": shard_of(self._main_grads),
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state, and write the model's weights from its masters. It must be of the same rank and number of ranks."""
        self._main_grads.follow()
        self._follow()
        theirs = {name: tuple(master.shape) for name, master in state["masters"].items()}
        mine = {master.name: tuple(master.weight.shape) for master in self._masters.values()}
        check_shard(state, self._main_grads)
        for name in {**mine, **theirs}:
            if mine.get(name) != theirs.get(name):
                raise ValueError(f"state must have a master {name} of shape {mine.get(name)}, but has {theirs.get(name)}")
        self.optimizer.load_state_dict(state["optimizer"])
        for master in self._masters.values():
            master.weight.copy_(state["masters"][master.name])
        self.publish()


Masters = dict[int, _Master]  # by the parameter's id


def _whole(buckets: list[Bucket]) -> Masters:
    masters = {}
    for bucket in buckets:
        for place in bucket.places:
            parameter = place.parameter
            same = parameter.dtype is torch.float32
            weight = parameter if same else parameter.detach().float().requires_grad_()
            masters[id(parameter)] = _Master(place.name, parameter, 0, weight, parameter.main_grad, None if same else parameter)
    return masters


def _pieces(buckets: list[Bucket], wide: list[Tensor]) -> Masters:
    masters = {}
    for bucket, weights in zip(buckets, wide, strict=True):
        for place, start, stop in bucket.parts():
            weight = weights[start - bucket.first : stop - bucket.first].detach().requires_grad_()
            grad = bucket.flat[start:stop]
            masters[id(place.parameter)] = _Master(place.name, place.parameter, start - place.start, weight, grad, None)
    return masters
