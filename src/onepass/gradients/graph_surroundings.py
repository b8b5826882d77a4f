"""What CUDA graphs of a module's calls take for given: its parts, where its weights are, and what Python decides in it."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from itertools import chain
from operator import is_
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

CONSTANTS = bool, int, float, str, type(None)
_COMPARED = frozenset({*CONSTANTS, FunctionType, BuiltinFunctionType, MethodType, partial, torch.dtype, torch.device})
_REGISTRIES = "_modules", "_parameters", "_buffers"
_HOOKS = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
_HARMLESS = "transformers.", "peft."  # packages whose hooks change nothing but tensors
_PEFTS = "_disable_adapters", "_active_adapter", "merged_adapters", "scaling"  # what Python decides in a layer with adapters


class Surroundings:
    """What graphs take for given of a module: its parts, where its weights are, which are trained, and what Python decides."""

    def __init__(self, module: nn.Module) -> None:
        self._modules = list(module.modules())
        self._parameters = list(module.parameters())
        self._tensors = [*self._parameters, *module.buffers()]
        self._configs = configs_of(self._modules)
        self.trained: list[Tensor] = [parameter for parameter in self._parameters if parameter.requires_grad]
        self.device = self._parameters[0].device if self._parameters else torch.device("cpu")
        self.unsupported = self._unsupported()
        self._note_objects()
        self._decided, self._placed, self._listed = self._decisions(), self._places(), [*map(repr, self._lists)]

    def hold(self) -> bool:
        """Whether all is as it was. It comes before each replay, so most calls compare objects alone, in half the time."""
        if self._places() != self._placed or [*map(repr, self._lists)] != self._listed:
            return False
        if not self._has_same_objects():
            if self._decisions() != self._decided:  # other objects may say the same
                return False
            self._note_objects()
        return True

    def _note_objects(self) -> None:
        owners = [getattr(owner, "__dict__", {}) for owner in (*self._modules, *self._configs)]
        self._owners = [*owners, *(own[name] for own in owners[: len(self._modules)] for name in (*_REGISTRIES, *_HOOKS))]
        self._filled = list(filter(None, self._owners))
        self._lengths, self._objects = [*map(len, self._owners)], [*self._values()]
        self._lists = [own[name] for own in owners for name in _PEFTS if name in own]  # which change in place

    def _has_same_objects(self) -> bool:
        """Whether attributes of modules and configs, and what is registered with modules, are the same objects."""
        return [*map(len, self._owners)] == self._lengths and all(map(is_, self._values(), self._objects))

    def _values(self) -> Iterable[Any]:
        return chain.from_iterable(map(dict.values, self._filled))

    def _decisions(self) -> list[Any]:
        return [*map(_state_of_module, self._modules), *map(_plain, self._configs)]

    def _places(self) -> list[Any]:
        return [*map(_place_of, self._tensors), *map(_state_of_parameter, self._parameters)]

    def _unsupported(self) -> str | None:
        if not self.trained:
            return "a model without a trained weight"
        kinds = {type(parameter).__name__ for parameter in self._parameters if type(parameter) not in (Tensor, nn.Parameter)}
        if kinds:
            return f"weights that are {' or '.join(sorted(kinds))}s"
        devices = sorted({str(tensor.device) for tensor in self._tensors})
        if len(devices) > 1 or not has_graphs(self.device):
            return f"weights on {' and '.join(devices)}"
        if any(hook for module in self._modules for hook in _hooks_of(module)):
            return "hooks on modules, which a replay would not call"
        if any(parameter._backward_hooks for parameter in self._parameters):  # a capture would call them too
            return "hooks on weights' gradients"
        owners = [each.main_grads() for each in self.trained if hasattr(each, "main_grads")]
        if any(owner is not None and owner.releases for owner in owners):
            return "gradients whose memory is released"
        return None


def configs_of(modules: Iterable[nn.Module]) -> list[Any]:
    """Return the configs of transformers' modules, each once."""
    return list({id(config): config for part in modules if (config := vars(part).get("config")) is not None}.values())


def has_graphs(device: torch.device) -> bool:
    return device.type == "cuda"


def _hooks_of(module: nn.Module) -> list[Any]:
    """Return hooks that may do more than what a graph keeps of them."""
    hooks = [hook for name in _HOOKS for hook in vars(module)[name].values()]
    return [hook for hook in hooks if not (_package_of(hook) or "").startswith(_HARMLESS)]


def _package_of(hook: Any) -> str | None:
    return getattr(hook, "__module__", None)


def _state_of_module(module: nn.Module) -> list[Any]:
    own = module.__dict__
    state = _plain(module)
    state += own.get("forward"), id(own.get("config"))
    for name in _REGISTRIES:
        if registry := own[name]:
            state += map(id, registry.values())
    for name in _HOOKS:
        if hooks := own[name]:
            state += hooks  # their numbers, which no other hook has ever
    for name in _PEFTS:
        if name in own:
            state.append(repr(own[name]))
    return state


def _plain(owner: Any) -> list[Any]:
    """Return an object's numbers, switches, names and functions: Python may compute with them, and decide by them."""
    return [value for value in getattr(owner, "__dict__", {}).values() if type(value) in _COMPARED]


def _place_of(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _state_of_parameter(parameter: Any) -> tuple[Any, ...]:
    main_grad = getattr(parameter, "main_grad", None)
    return parameter.requires_grad, bool(parameter._backward_hooks), None if main_grad is None else _place_of(main_grad)
