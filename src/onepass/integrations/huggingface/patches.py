"""Attributes that `apply` sets on a model's instances, which can all be undone, and the rows that report them.

Nothing is set on a class or on a Python module. An instance's own forward is in the instance's __dict__, where
nn.Module.__call__ finds it before the class's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import nn

from onepass.integrations.huggingface.snapshot import hooked

_ABSENT = object()
_ORIGINAL = "_original_forward"  # where accelerate keeps a forward that it runs under autocast


@dataclass(frozen=True)
class AppliedRow:
    """A row of `apply`'s report: a part of the model, and what replaced it, or why nothing did."""

    name: str  # "model.layers.0.mlp"
    kind: str  # its class's name
    part: str  # of apply's options: "norm", "mlp", "rope", "loss", "qkv", "lora", "precision", "bits", "graph"
    by: str | None = None  # "rms_norm"
    why: str | None = None  # why not: one clause
    match: Any = field(default=None, compare=False, repr=False)  # has `module`, says `change` and maybe `made_by`, and `left`

    def now(self, model: nn.Module) -> AppliedRow:
        """Return the row as it is by now: what has changed since `apply` runs its own code."""
        if self.match is None:
            return self
        if self.by is None:
            return replace(self, why=self.match.left())
        there = module_at(model, self.name)
        if there is self.match.module or (hasattr(self.match, "stands_in") and self.match.stands_in(there)):
            changed = self.match.change() or _forward_change(self.match)
        else:
            changed = "it is gone" if there is None else f"{type(there).__name__} has its place"
        if changed is not None:
            return replace(self, by=None, why=f"changed since: {changed}")
        made = replace(self, by=self.match.made_by) if hasattr(self.match, "made_by") else self
        return replace(made, why=self.match.left()) if hasattr(self.match, "left") else made


@dataclass(frozen=True)
class Patch:
    """An attribute that `apply` has set."""

    owner: Any
    name: str
    before: Any  # the value in owner's __dict__, or _ABSENT
    now: Any
    inert: bool = False  # after undo it does what was there before, so other code's wrappers may go on calling it

    def foreign(self) -> Any:
        """Return the value that other code has set since, or None. A deleted attribute has none."""
        value = vars(self.owner).get(self.name, _ABSENT)
        equal = value is self.now or value == self.now  # accelerate restores an equal object
        return None if value is _ABSENT or equal else value

    def is_wrapped(self) -> bool:
        """Whether what other code has set since may stay, because all it does with this value is to call it."""
        ours = any(each == self.now for each in wrapped_by(self.foreign()))
        return self.inert and "_hf_hook" not in vars(self.owner) and ours

    def in_autocast(self) -> bool:
        """Whether accelerate runs this forward under autocast, as for `Trainer(bf16=True)`."""
        return self.name == "forward" and vars(self.owner).get(_ORIGINAL, _ABSENT) == self.now

    def advice(self, model: nn.Module) -> str:
        """Say whose value is there now, and which line takes it back."""
        place = next((name for name, module in model.named_modules() if module is self.owner), None)
        owner = "module" if place is None else f"applied.model.get_submodule({place!r})" if place else "applied.model"
        line = f"del {owner}.{self.name}"
        if "_hf_hook" in vars(self.owner):
            line = f"accelerate.hooks.remove_hook_from_module({owner})"
        return (
            f"{type(self.owner).__name__}.{self.name}{f' of {place}' if place else ''} is {_origin_of(self.foreign())} by now. "
            f"Take that back first, as by `{line}`"
        )


def _forward_change(match: Any) -> str | None:
    """Return that other code has replaced the forward that `set_forward` has set with this match; wrappers call it still."""
    match, own = getattr(match, "called_by", match), vars(match.module)
    ours = any(getattr(each, "args", None) == (match.module,) for each in wrapped_by(own.get("forward")))
    if ours or own.get("_onepass") is not match:
        return None
    return f"its forward is {_origin_of(own['forward'])}" if "forward" in own else "its forward is its class's"


def _origin_of(value: Any) -> str:
    """Return the module and the name of a function in its source: wrappers carry the name of what they wrap."""
    while isinstance(value, partial | MethodType):
        value = value.func if isinstance(value, partial) else value.__func__
    if not isinstance(value, FunctionType):
        return f"a {type(value).__module__}.{type(value).__qualname__}"
    return f"{value.__globals__.get('__name__')}.{getattr(value.__code__, 'co_qualname', value.__code__.co_name)}"


def wrapped_by(value: Any, depth: int = 8) -> Iterator[Any]:
    """Yield this function and those that it wraps: wrappers keep what they call in a closure or as __wrapped__."""
    yield value
    cells = getattr(value, "__closure__", None) or ()
    inner = [cell.cell_contents for cell in cells if cell != CellType()]
    inner += [getattr(value, name, None) for name in ("__wrapped__", "__func__", "func")]
    for each in inner if depth > 0 else ():
        if callable(each):
            yield from wrapped_by(each, depth - 1)


def module_at(model: nn.Module, name: str) -> nn.Module | None:
    """Return the submodule of this name, or None."""
    try:
        return model.get_submodule(name)
    except AttributeError:
        return None


class Patches:
    """Sets attributes of instances, and restores them."""

    def __init__(self) -> None:
        self._made: list[Patch] = []
        self._last_of_all: list[Callable[[], object]] = []

    def __len__(self) -> int:
        return len(self._made)

    def set(self, owner: Any, name: str, value: Any, *, inert: bool = False) -> None:
        """Write to owner's __dict__, bypassing properties and nn.Module's registration."""
        self._made.append(Patch(owner, name, vars(owner).get(name, _ABSENT), value, inert))
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

    def changed(self) -> list[Patch]:
        """Return the attributes that other code has replaced since, where `undo` can't go round that.

        It takes accelerate's autocast off, and leaves wrappers (TRL's fused head) around what it makes inert.
        """
        foreign = (patch for patch in self._last() if patch.foreign() is not None)
        return [patch for patch in foreign if not patch.in_autocast() and not patch.is_wrapped()]

    def undo(self) -> None:
        for patch in reversed(self._made):
            if patch.is_wrapped() and not patch.in_autocast():
                continue
            if patch.in_autocast():
                del vars(patch.owner)[_ORIGINAL]
            if patch.before is _ABSENT:
                vars(patch.owner).pop(patch.name, None)
            else:
                vars(patch.owner)[patch.name] = patch.before
        self._made.clear()
        for function in self._last_of_all:
            function()
        self._last_of_all.clear()

    def _last(self) -> Iterator[Patch]:
        """Yield the last patch of each attribute."""
        last = {(id(patch.owner), patch.name): patch for patch in self._made}
        yield from last.values()
