"""What is put onto a model's instances, so that all of it can be taken back, and what is said of it.

Nothing is set on a class or on a module of Python. A forward of an instance's own stands in the instance's __dict__, where
nn.Module.__call__ finds it before the class's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from onepass.integrations.huggingface.probe import hooked

_ABSENT = object()


@dataclass(frozen=True)
class AppliedRow:
    """A line of what `apply` tells: a part of the model, and by what it was replaced, or why not."""

    name: str  # "model.layers.0.mlp"
    kind: str  # its class's name
    part: str  # which of apply's options it belongs to: "norm", "mlp", "rope", "loss", "qkv"
    by: str | None = None  # "rms_norm"
    why: str | None = None  # why not: one clause


@dataclass(frozen=True)
class _Patch:
    owner: Any
    name: str
    before: Any  # what stood in owner's __dict__, or _ABSENT
    now: Any


class Patches:
    """Attributes of instances, set and taken back."""

    def __init__(self) -> None:
        self._made: list[_Patch] = []
        self._last_of_all: list[Callable[[], object]] = []

    def __len__(self) -> int:
        return len(self._made)

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Into owner's __dict__, past properties and nn.Module's registers."""
        self._made.append(_Patch(owner, name, vars(owner).get(name, _ABSENT), value))
        vars(owner)[name] = value

    def set_forward(self, module: nn.Module, function: Callable[..., Any], part: Any) -> None:
        """function(module, ...) instead of the class's forward, of this instance only. It finds `part`, what is known of the
        module, as module._onepass: so copies of the model use their own weights. And it can be pickled, as a method can't."""
        self.set(module, "_onepass", part)
        self.set(module, "forward", partial(function, module))

    def on_undo(self, function: Callable[[], object]) -> None:
        self._last_of_all.append(function)

    @staticmethod
    def own(module: nn.Module) -> bool:
        """Whether what this module runs is its class's forward or ours."""
        forward = vars(module).get("forward")
        return forward is None or getattr(forward, "args", None) == (module,)

    @staticmethod
    def has(module: nn.Module, part: Any) -> bool:
        """Whether this module still runs what was set with `part`."""
        own = vars(module)
        return own.get("_onepass") is part and getattr(own.get("forward"), "args", None) == (module,)

    @staticmethod
    def untouched(module: nn.Module, part: Any) -> bool:
        """And nobody looks at its calls, so that its work may be done elsewhere."""
        return Patches.has(module, part) and not hooked(module)

    def changed(self) -> Iterator[str]:
        """What has been replaced again since, by somebody else."""
        for patch in self._last():
            now = vars(patch.owner).get(patch.name, _ABSENT)
            if now is not patch.now and now != patch.now:  # accelerate puts an equal one back
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
        """The last patch of each attribute."""
        last = {(id(patch.owner), patch.name): patch for patch in self._made}
        yield from last.values()
