"""Which modules and parameters a module has, remembered, so that a step can see at once that nothing has been replaced."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn


class ModuleTree:
    """How modules and some of their parameters hang together. Walking them anew takes .5 ms, of 150 parameters."""

    def __init__(self, module: nn.Module, parameters: set[int]) -> None:
        self._modules: list[tuple[Any, str, Any]] = []  # who has it, its name there, and itself; modules by weak references
        self._parameters: list[tuple[Any, str, Any]] = []
        for holder in module.modules():
            has = weakref.ref(holder)
            self._modules += [(has, name, weakref.ref(child)) for name, child in holder._modules.items() if child is not None]
            self._parameters += [(has, name, each) for name, each in holder._parameters.items() if id(each) in parameters]

    def is_as_it_was(self) -> bool:
        for has, name, parameter in self._parameters:
            holder = has()
            if holder is None or holder._parameters.get(name) is not parameter:
                return False
        for has, name, was in self._modules:
            holder, child = has(), was()
            if holder is None or child is None or holder._modules.get(name) is not child:
                return False
        return True
