"""Steps in backward: a part of the parameters is stepped when its last gradient is whole, and its gradients are freed.

So gradients of one part are in memory at a time. The norm of all of them is known at the end only. `max_norm` clips by the norm
of the step before, which costs one more read of each gradient; the first step is not clipped.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from onepass.gradients.adamw_stepper import check_max_norm
from onepass.runtime.sharding import has_dtensor

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


class _Optimizer(Protocol):
    def step_some(self, parameters: list[Tensor], norm: Tensor | None, max_norm: float | None) -> None: ...


def parts_of(parameters: list[Tensor]) -> list[list[Tensor]]:
    """Divide parameters into neighbours of one device, whose gradients come at about the same time."""
    parts: list[list[Tensor]] = []
    size = 0
    for parameter in parameters:
        if not parts or size + parameter.numel() > _PART or parameter.device != parts[-1][0].device:
            parts.append([])
            size = 0
        parts[-1].append(parameter)
        size += parameter.numel()
    return parts


class BackwardSteps:
    """The hooks of an optimizer's parameters, and what has been stepped since its last `step`."""

    def __init__(self, optimizer: _Optimizer, parts: list[list[Tensor]], options: StepInBackward) -> None:
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            raise ValueError(
                f"in_backward is for one rank, but torch.distributed has {dist.get_world_size()}: gradients are reduced after "
                "they were stepped. Leave in_backward False"
            )
        if has_dtensor(*(parameter for part in parts for parameter in part)):
            raise TypeError("in_backward is for plain parameters, but some are DTensors, whose gradients come otherwise")
        self._optimizer = weakref.ref(optimizer)
        self._parts, self._options = parts, options
        self._whole: list[set[Tensor]] = [set() for _ in parts]  # parameters whose gradients are whole
        self._stepped: set[Tensor] = set()
        self._squares: list[Tensor] = []  # of this step's gradients' norms
        self._norm: Tensor | None = None  # of the step before
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
        most = self._options.max_norm
        if most is not None:
            grads: list[Any] = [each.grad for each in some]
            norms = torch._foreach_norm(grads, 2.0, torch.float32)
            self._squares.append(torch.stack(norms).square().sum())
        norm = self._norm
        optimizer.step_some(some, norm, None if norm is None else most)
        for each in some:
            each.grad = None
        self._stepped.update(some)
        self._whole[number].clear()

    def finish(self) -> Tensor | None:
        """Step what has a gradient left, and return the norm of all gradients since the last time where there is a max_norm."""
        for number in range(len(self._parts)):
            self._step(number)
        if self._squares:
            device = self._squares[0].device
            self._norm = torch.stack([each.to(device) for each in self._squares]).sum().sqrt()
        norm = self._norm if self._squares else None
        self.forget()
        return norm

    def forget(self) -> None:
        """Begin a step, in which the parameters that are trained now have gradients."""
        self._squares.clear()
        self._stepped.clear()
        for whole in self._whole:
            whole.clear()
        self._watch()
        self._expected = [sum(each.requires_grad for each in part) for part in self._parts]

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        before, self._holds = self._holds, True
        try:
            yield
        finally:
            self._holds = before


def _on_gradient(owner: weakref.ref[BackwardSteps], number: int, parameter: Tensor) -> None:
    steps = owner()
    if steps is not None:
        steps.on_gradient(number, parameter)


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
