"""Steps in backward: a part of the parameters is stepped when its last gradient is whole, and its gradients are freed.

So gradients of one part are in memory at a time. The norm of all of them is known at the end only. `max_norm` clips by the norm
of the step before, which costs one more read of each gradient; the first step is not clipped. Gradients come in `.grad`
(`BackwardSteps`, by hooks) or in buckets of MainGrads (`BucketSteps`).

FSDP2 calls the hooks of its sharded parameters when a group's gradients are reduced, on the stream that reduces. Steps are queued
there, beside backward. FSDP2 lets the next forward wait for that stream, and backward has gathered a group's weights before.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from onepass.gradients.adamw_stepper import check_max_norm
from onepass.gradients.buckets import Bucket
from onepass.gradients.dtensor_parts import layout_of, local_part, placed_as, sum_over_mesh
from onepass.gradients.main_grads import MainGrads
from onepass.gradients.releasable_storage import ensure_written
from onepass.runtime.sharding import has_dtensor

_NORM = "last_norm"
_PART = 1 << 26  # numbers: 128 MiB of gradients in bf16, and few launches


@dataclass(frozen=True)
class StepInBackward:
    """How an optimizer steps in backward.

    Args:
        max_norm: scale the gradient by min(1, max_norm / the norm of the step before). None clips nothing.
    """

    max_norm: float | None = None

    def __post_init__(self) -> None:
        check_max_norm(self.max_norm)


def how_in_backward(given: bool | StepInBackward) -> StepInBackward | None:
    """Return an optimizer's in_backward as a StepInBackward, or None."""
    if not isinstance(given, bool | StepInBackward):
        raise TypeError(f"in_backward must be a bool or a StepInBackward, but is {given!r}")
    return StepInBackward() if given is True else given or None


class LastNorm:
    """The norm of a step's gradients, which come in parts, and that of the step before, by which they are clipped."""

    def __init__(self, max_norm: float | None, parameters: Iterable[Tensor] = ()) -> None:
        """parameters: those whose layouts ranks sum over, all and in one order, whichever of them have gradients."""
        self._most = max_norm
        self._layouts = list(dict.fromkeys(map(layout_of, parameters)))
        self.norm: Tensor | None = None  # of the step before: a state that goes on bit for bit has it
        self._squares: dict[Any, list[Tensor]] = {}  # by the layout of the gradients

    def add(self, grads: list[Any]) -> None:
        if self._most is None:
            return
        alike: dict[Any, list[Tensor]] = {}
        for grad in grads:
            alike.setdefault(layout_of(grad), []).append(local_part(grad))
        for layout, some in alike.items():
            norms = torch._foreach_norm(some, 2.0, torch.float32)
            self._squares.setdefault(layout, []).append(torch.stack(norms).square().sum())

    def clipping(self) -> tuple[Tensor | None, float | None]:
        """Return the norm to clip by, and the largest that it may be; both None in the first step. After a norm that is not
        finite nothing is clipped: this step's gradients are others."""
        if self.norm is None:
            return None, None
        return self.norm.nan_to_num(0.0, posinf=0.0), self._most

    def finish(self) -> Tensor | None:
        """End a step. Return the norm of what was added over all ranks, or None where there is no max_norm. Collective where
        there are DTensors."""
        divided = any(layout is not None for layout in self._layouts)
        if self._most is None or not (self._squares or divided):
            return None
        known = [each for some in self._squares.values() for each in some]
        device = known[0].device if known else torch.device(self._device_type())
        sums = []
        for layout in dict.fromkeys([*self._layouts, *self._squares]):
            mine = [each.to(device) for each in self._squares.get(layout, [])]
            total = torch.stack(mine).sum() if mine else torch.zeros((), device=device)
            sums.append(sum_over_mesh(total, layout))
        self.norm = torch.stack(sums).sum().sqrt()
        self.forget()
        return self.norm

    def _device_type(self) -> str:
        return str(next(layout[0].device_type for layout in self._layouts if layout is not None))

    def forget(self) -> None:
        self._squares.clear()


def with_norm(state: dict[str, Any], steps: BackwardSteps | BucketSteps | None) -> dict[str, Any]:
    """Return an optimizer's state with the norm of its last step, as an option of its first group, where torch's formats have
    it too."""
    if steps is None or steps.last.norm is None:
        return state
    first, *rest = state["param_groups"]
    return {**state, "param_groups": [{**first, _NORM: steps.last.norm}, *rest]}


def take_norm(groups: list[dict[str, Any]], steps: BackwardSteps | BucketSteps | None) -> None:
    """Set the norm of the last step by groups that a state was loaded to. They lose it."""
    norm = groups[0].pop(_NORM, None)
    if steps is not None:
        steps.last.norm = None if norm is None else torch.as_tensor(norm)


class _Optimizer(Protocol):
    def step_some(self, parameters: list[Tensor], norm: Tensor | None, max_norm: float | None) -> None: ...


class _BucketOptimizer(Protocol):
    def follow(self) -> None: ...
    def buckets_with(self, bucket: Bucket) -> list[Bucket]: ...
    def step_buckets(self, buckets: list[Bucket], norm: Tensor | None, max_norm: float | None) -> None: ...


def parts_of(parameters: list[Tensor]) -> list[list[Tensor]]:
    """Divide parameters into neighbours of one device, whose gradients come at about the same time. A part's size is this
    rank's."""
    parts: list[list[Tensor]] = []
    size = 0
    for parameter in parameters:
        numbers = local_part(parameter).numel()
        if not parts or size + numbers > _PART or parameter.device != parts[-1][0].device:
            parts.append([])
            size = 0
        parts[-1].append(parameter)
        size += numbers
    return parts


_steps_of: weakref.WeakValueDictionary[int, BackwardSteps] = weakref.WeakValueDictionary()  # by parameters' ids


def close_others(parameters: list[Tensor]) -> None:
    """Let optimizers that were made before over some of these step no more in backward."""
    for parameter in parameters:
        if (steps := _steps_of.pop(id(parameter), None)) is not None:
            steps.close()


class BackwardSteps:
    """The hooks of an optimizer's parameters, and what has been stepped since its last `step`."""

    def __init__(self, optimizer: _Optimizer, parts: list[list[Tensor]], options: StepInBackward) -> None:
        _check_ranks([parameter for part in parts for parameter in part])
        self._optimizer = weakref.ref(optimizer)
        _steps_of.update((id(parameter), self) for part in parts for parameter in part)
        self._parts, self.last = parts, LastNorm(options.max_norm, (each for part in parts for each in part))
        self._whole: list[set[Tensor]] = [set() for _ in parts]  # parameters whose gradients are whole
        self._stepped: set[Tensor] = set()
        self._holds = False  # in `accumulate`
        self._expected: list[int] = []
        self._watched: set[Tensor] = set()
        self._handles: list[Any] = []
        weakref.finalize(self, _remove, self._handles).atexit = False
        self.forget()

    def _watch(self) -> None:
        """Put hooks on parameters that are trained by now."""
        for number, part in enumerate(self._parts):
            for parameter in part:
                if parameter.requires_grad and parameter not in self._watched:
                    self._watched.add(parameter)
                    hook = partial(_on_gradient, weakref.ref(self), number)
                    self._handles.append(parameter.register_post_accumulate_grad_hook(hook))

    def on_gradient(self, number: int, parameter: Tensor) -> None:
        if self._holds:
            return
        whole = self._whole[number]
        if parameter in whole or parameter in self._stepped:
            count = len(self._stepped)
            raise RuntimeError(
                f"a parameter of shape {tuple(parameter.shape)} has a gradient for the second time since the last step(), and "
                f"{count} of {sum(map(len, self._parts))} parameters were stepped already: put the microbatches before the last "
                "into `with optimizer.accumulate():`, and call step() after each last one. After a backward that broke off load "
                "a checkpoint, or call zero_grad() to go on with the weights as they are"
            )
        whole.add(parameter)
        if len(whole) == self._expected[number]:
            self._step(number)

    def _step(self, number: int) -> None:
        optimizer, some = self._optimizer(), [each for each in self._parts[number] if each.grad is not None]
        if optimizer is None or not some:
            return
        self.last.add([placed_as(each.grad, each) for each in some])
        optimizer.step_some(some, *self.last.clipping())
        for each in some:
            each.grad = None
        self._stepped.update(some)
        self._whole[number].clear()

    def finish(self) -> Tensor | None:
        """Step what has a gradient left, and return the norm of all gradients since the last time where there is a max_norm."""
        for number in range(len(self._parts)):
            self._step(number)
        norm = self.last.finish()
        self.forget()
        return norm

    def forget(self) -> None:
        """Begin a step, in which the parameters that are trained now have gradients."""
        self.last.forget()
        self._stepped.clear()
        for whole in self._whole:
            whole.clear()
        self._watch()
        self._expected = [sum(each.requires_grad for each in part) for part in self._parts]

    def close(self) -> None:
        """Step no more in backward."""
        _remove(self._handles)

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        before, self._holds = self._holds, True
        try:
            yield
        finally:
            self._holds = before


class BucketSteps:
    """Steps of parts of a MainGrads, each when its buckets are whole."""

    def __init__(self, main_grads: MainGrads, optimizer: _BucketOptimizer, options: StepInBackward) -> None:
        main_grads.step_by(self.on_bucket)
        self._main_grads, self._optimizer = main_grads, weakref.ref(optimizer)
        self.last = LastNorm(options.max_norm)
        self._step: int | None = None  # of main_grads, since whose begin `whole` counts
        self._whole: set[int] = set()  # indices of buckets
        self.stepped: list[str] = []  # names of parameters, since the last step()

    def on_bucket(self, bucket: Bucket) -> None:
        """Step what this bucket was the last one of. A second call for it changes nothing."""
        optimizer = self._optimizer()
        if optimizer is None:
            return
        if self._step != self._main_grads.begun:
            self._step = self._main_grads.begun
            self._main_grads.note_trained()
            optimizer.follow()
            self._forget()
        if bucket.index in self._whole:
            return
        self._whole.add(bucket.index)
        together = optimizer.buckets_with(bucket)
        if self._whole.issuperset(each.index for each in together):
            grads = [ensure_written(each.flat) for each in together]
            trained, places = self._main_grads.trained, [place for each in together for place in each.places]
            frozen = [place.parameter.main_grad for place in places if id(place.parameter) not in trained]
            if frozen:  # as of microbatches before it was frozen
                torch._foreach_zero_(frozen)
            self.last.add(grads)
            optimizer.step_buckets(together, *self.last.clipping())
            self._main_grads.give_back(together)
            self.stepped += [place.name for place in places if id(place.parameter) in trained]

    def finish(self) -> Tensor | None:
        """End a step. Return the norm of its gradients, or None where there is no max_norm."""
        norm = self.last.finish()
        self._forget()
        return norm

    def _forget(self) -> None:
        self.last.forget()
        self._whole.clear()
        self.stepped.clear()


def _check_ranks(parameters: list[Tensor]) -> None:
    """Raise where other code reduces a gradient after its hooks have run, or copies it when they have."""
    plain = [each for each in parameters if not has_dtensor(each)]
    if plain and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise ValueError(
            f"in_backward must be False for plain parameters on {dist.get_world_size()} ranks, whose gradients are reduced after "
            f"they were stepped, but {len(plain)} of {len(parameters)} parameters are no DTensors: shard them by fully_shard"
        )
    if any(has_dtensor(each) and local_part(each).device.type != each.device_mesh.device_type for each in parameters):  # type: ignore[attr-defined]
        raise ValueError("in_backward must be False where FSDP2 offloads parameters: their gradients may still be on their way")


def _on_gradient(owner: weakref.ref[BackwardSteps], number: int, parameter: Tensor) -> None:
    steps = owner()
    if steps is not None:
        steps.on_gradient(number, parameter)


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
