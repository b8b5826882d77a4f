"""What `MainGrads` puts on parameters and takes off again: main_grad, a reference to itself, and hooks. One is on optimizers."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from onepass.gradients.releasable_storage import ReleasableBuffer


class GradientOwner(Protocol):
    """What the hooks call: a `MainGrads`."""

    advice: str

    def added_here(self, parameter: Tensor) -> None: ...
    def _on_gradient(self, parameter: Tensor) -> None: ...


class ParameterHooks:
    """The attributes and hooks of one `MainGrads`. They go with `remove`, or when it is collected."""

    def __init__(self, owner: GradientOwner, released: list[ReleasableBuffer]) -> None:
        self._owner = _Owner(owner)  # weak: without a cycle buffers are freed at once
        self._parameters: list[Any] = []
        self._handles: list[Any] = [register_optimizer_step_post_hook(partial(_check_optimizer, self._owner))]
        self.remove = weakref.finalize(owner, _remove, self._parameters, self._handles, released)
        self.remove.atexit = False

    def attach(self, parameter: Any, main_grad: Tensor) -> None:
        parameter.main_grad, parameter.main_grads = main_grad, self._owner
        self._handles.append(parameter.register_post_accumulate_grad_hook(partial(_on_gradient, self._owner)))
        self._parameters.append(parameter)


class _Owner(weakref.ref[GradientOwner]):
    """A parameter's reference to its `MainGrads`. It refuses to be pickled with the parameter: the buffer belongs to a step."""

    __slots__ = ()

    def added_here(self, parameter: Tensor) -> None:
        main_grads = self()
        if main_grads is not None:
            main_grads.added_here(parameter)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a module can't be saved or sent whole while MainGrads has its parameters: save its state_dict(), or close() before"
        )


def _on_gradient(owner: weakref.ref[GradientOwner], parameter: Tensor) -> None:
    main_grads = owner()
    if main_grads is not None:
        main_grads._on_gradient(parameter)


def _check_optimizer(owner: weakref.ref[GradientOwner], optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Raise where an optimizer has stepped by parameters of which none has a gradient that it can read.

    A closure makes the gradients within the step, so this looks after it.
    """
    main_grads = owner()
    if main_grads is None or getattr(optimizer, "reads_main_grad", False):
        return
    mine = [p for group in optimizer.param_groups for p in group["params"] if getattr(p, "main_grads", None) is owner]
    mine = [parameter for parameter in mine if parameter.requires_grad]
    if mine and all(parameter.grad is None for parameter in mine):
        raise RuntimeError(
            f"the optimizer must read main_grad, but is {type(optimizer).__name__}, which reads .grad: MainGrads leaves that "
            f"None, so it trains nothing. Instead {main_grads.advice}. One of your own that reads main_grad has an attribute "
            "reads_main_grad = True"
        )


def _remove(parameters: list[Any], handles: list[Any], released: list[ReleasableBuffer]) -> None:
    for handle in handles:
        handle.remove()
    for buffer in released:
        buffer.detach_views()
    for parameter in parameters:
        for name in ("main_grad", "main_grads", "grad_added_to_main_grad"):
            parameter.__dict__.pop(name, None)
