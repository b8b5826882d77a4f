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

from onepass.gradients.gathered_weights import GatheredWeights, Groups, check_fp32, check_shard, parameter_groups, shard_of
from onepass.gradients.main_grads import MainGrads
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
    `load_state_dict` are collective. After changing the weights by other means, such as loading a checkpoint into the model, call
    `reload`.

    Args:
        main_grads: of fp32, with the parameters to be trained.
        make: takes parameter groups, as torch.optim's optimizers do, and returns the optimizer.
        groups: the model's parameters in groups with options, as for torch.optim: `{"params": [...], "weight_decay": 0.0}`.
            Each parameter of main_grads is in one; frozen ones are skipped. None is one group of all.
    """

    def __init__(
        self,
        main_grads: MainGrads,
        make: Callable[[Groups], torch.optim.Optimizer],
        groups: Iterable[Mapping[str, Any]] | None = None,
    ) -> None:
        check_fp32(main_grads)
        self._main_grads = main_grads
        in_groups = parameter_groups(main_grads, groups)
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
            self._gathered.lay()  # last: make may raise

    @torch.no_grad()
    def step(self) -> None:
        """Step the optimizer and the model's weights. `main_grads.finish()` comes before, `main_grads.zero_()` after."""
        self._main_grads.check_finished("step()")
        for master in self._masters:
            master.weight.grad = master.grad
        try:
            self.optimizer.step()
        finally:
            for master in self._masters:  # one may be the parameter itself, and backward would add to its .grad
                master.weight.grad = None
        self.publish()

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into the model's weights, as `step` does. Call it after writing masters by other means."""
        if self._wide:
            torch._foreach_copy_(self._rounded, self._wide)
            if (step := current_step()) is not None:
                step.written += self._rounded
        if self._gathered:
            self._gathered.gather()

    @torch.no_grad()
    def reload(self) -> None:
        """Take the masters from the model's weights again."""
        if self._wide:
            torch._foreach_copy_(self._wide, self._rounded)

    def pieces(self) -> Iterator[tuple[Tensor, Tensor, int]]:
        """Yield each parameter that this rank steps, its master, and where in the flattened parameter the master begins.

        The master is fp32 and the key of its state in `optimizer.state`. It has the parameter's shape, or with shard is a
        one-dimensional stretch. After writing to it call `publish`.
        """
        for master in self._masters:
            yield master.parameter, master.weight, master.start

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state and copies of the masters; with shard, this rank's."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "masters": {master.name: master.weight.detach().clone() for master in self._masters},
            "shard": shard_of(self._main_grads),
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state, and write the model's weights from its masters. It must be of the same rank and number of ranks."""
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
