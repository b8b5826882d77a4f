"""Attributes that `apply` sets on a model's instances, which can all be undone, and the rows that report them.

Nothing is set on a class or on a Python module. An instance's own forward is in the instance's __dict__, where
nn.Module.__call__ finds it before the class's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import nn

from onepass.integrations.huggingface.snapshot import hooked

_ABSENT = object()


@dataclass(frozen=True)
class AppliedRow:
    """A row of `apply`'s report: a part of the model, and what replaced it, or why nothing did."""

    name: str  # "model.layers.0.mlp"
    kind: str  # its class's name
    part: str  # which of apply's options it belongs to: "norm", "mlp", "rope", "loss", "qkv"
    by: str | None = None  # "rms_norm"
    why: str | None = None  # why not: one clause
    match: Any = field(default=None, compare=False, repr=False)  # has the `module`, and says its `change` since

    def now(self, model: nn.Module) -> AppliedRow:
        """Return the row as it is by now: what has changed since `apply` runs its own code."""
        if self.by is None or self.match is None:
            return self
        there = module_at(model, self.name)
        if there is self.match.module:
            changed = self.match.change()
        else:
            changed = "it is gone" if there is None else f"{type(there).__name__} has its place"
        return self if changed is None else replace(self, by=None, why=f"changed since: {changed}")


@dataclass(frozen=True)
class _Patch:
    owner: Any
    name: str
    before: Any  # the value in owner's __dict__, or _ABSENT
    now: Any


def module_at(model: nn.Module, name: str) -> nn.Module | None:
    """Return the submodule of this name, or None."""
    try:
        return model.get_submodule(name)
    except AttributeError:
        return None


class Patches:
    """Sets attributes of instances, and restores them."""

    def __init__(self) -> None:
        self._made: list[_Patch] = []
        self._last_of_all: list[Callable[[], object]] = []

    def __len__(self) -> int:
        return len(self._made)

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Write to owner's __dict__, bypassing properties and nn.Module's registration."""
        self._made.append(_Patch(owner, name, vars(owner).get(name, _ABSENT), value))
        vars(owner)[name] = value

    def set_forward(self, module: nn.Module, function: Callable[..., Any], part: Any) -> None:
        """Run function(module, ...) instead of the class's forward, on this instance only.

        It finds `part`, the match of the module, as module._onepass, so copies of the model use their own weights. Unlike a
        method, it can be pickled.
        """
        self.set(module, "_onepass", part)
        self.set(module, "forward", partial(function, module))

    def on_undo(self, function: Callable[[], object]) -> None:
        self._last_of_all.append(function)

    @staticmethod
    def own(module: nn.Module) -> bool:
        """Whether this module runs its class's forward or one set by onepass."""
        forward = vars(module).get("forward")
        return forward is None or getattr(forward, "args", None) == (module,)

    @staticmethod
    def has(module: nn.Module, part: Any) -> bool:
        """Whether this module still runs the forward that was set with `part`."""
        own = vars(module)
        return own.get("_onepass") is part and getattr(own.get("forward"), "args", None) == (module,)

    @staticmethod
    def untouched(module: nn.Module, part: Any) -> bool:
        """Whether `has` holds and the module has no hooks, so that its work may be done without calling it."""
        return Patches.has(module, part) and not hooked(module)

    def changed(self) -> Iterator[str]:
        """Yield the attributes that other code has replaced since."""
        for patch in self._last():
            now = vars(patch.owner).get(patch.name, _ABSENT)
            if now is not patch.now and now != patch.now:  # accelerate restores an equal object
                yield f"{type(patch.owner).__name__}.{patch.name}"

    def undo(self) -> None:
        for patch in reversed(self._made):
            if patch.before is _ABSENT:
                vars(patch.owner).pop(patch.name, None)
            else:
                vars(patch.owner)[patch.name] = patch.before
        self._made.clear()
        for function in self._last_of_all:
            function()
        self._last_of_all.clear()

    def _last(self) -> Iterator[_Patch]:
        """Yield the last patch of each attribute."""
        last = {(id(patch.owner), patch.name): patch for patch in self._made}
        yield from last.values()
