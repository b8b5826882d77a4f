"""What recognition read of a module, compared in each call: a module that was changed since runs its own code.

While a module's code is probed, reads of its attributes and of its configuration's are recorded. A `Snapshot` has their values,
and the children that ran as they are. Children that probes replace by stand-ins are their matches' to look at.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as torch_module

_UNIMPORTANT = frozenset(  # changes of these are looked at in each call, or change no number
    ("training", "gradient_checkpointing", "layer_idx", "forward", "config", "return_dict", "use_cache", "extra_repr")
)
_KEPT_AS = {"_experts_implementation": "_experts_implementation_internal"}  # properties of a configuration that models set later

CODE_CHANGED = "its class has another forward"


@dataclass(frozen=True)
class Snapshot:
    """Values that a module's code read. It holds no reference to the module, so that copies of the module use their own."""

    code: Callable[..., Any] | None = None  # its class's forward
    attributes: tuple[tuple[str, Any], ...] = ()
    config: tuple[tuple[str, Any], ...] = ()  # "text_config.vocab_size" is one of a part of the configuration
    tensors: tuple[tuple[str, str | None], ...] = ()  # parameters, buffers and what was not there: which dict has it
    children: tuple[tuple[str, nn.Module, Snapshot], ...] = ()

    @property
    def read_tensors(self) -> set[str]:
        """Parameters and buffers of its own that the code reads, whose values a probe can't tell from numbers: 1.0 at first."""
        return {name for name, place in self.tensors if place is not None}

    def unchanged(self, module: nn.Module) -> bool:
        """Whether the module's code would read what it read then."""
        own = vars(module)
        for name, value in self.attributes:
            now = own.get(name)
            if now is not value and not _equal(now, value):
                return False
        config = own.get("config") if self.config else None
        for name, value in self.config:
            now = _setting(config, name)
            if now is not value and not _equal(now, value):
                return False
        for name, place in self.tensors:
            if _place(own, name) != place:
                return False
        for name, child, snapshot in self.children:
            if own["_modules"].get(name) is not child or is_watched(child) or not snapshot.unchanged(child):
                return False
        return self.has_code_of(module)

    def has_code_of(self, module: nn.Module) -> bool:
        """Whether the module's class has the forward that was read."""
        code = type(module).forward
        if self.code is None or code is self.code:
            return True
        return inspect.unwrap(code) is inspect.unwrap(self.code)  # FSDP2's classes wrap it

    def change(self, module: nn.Module) -> str | None:
        """Return what has changed, as a clause, or None."""
        own = vars(module)
        for name, value in self.attributes:
            if not _equal(own.get(name), value):
                return f"its {name} was {_words(value)} and is {_words(own.get(name))}"
        for name, value in self.config:
            now = _setting(own.get("config"), name)
            if not _equal(now, value):
                return f"its config.{name} was {_words(value)} and is {_words(now)}"
        for name, place in self.tensors:
            if (now := _place(own, name)) != place:
                return f"its {name} was {'added' if place is None else 'removed' if now is None else 'kept in another way'}"
        for name, child, snapshot in self.children:
            if own["_modules"].get(name) is not child:
                return f"its {name} is another module"
            if is_watched(child):
                return f"its {name} has hooks or a forward of its own"
            if (why := snapshot.change(child)) is not None:
                return f"{why}, in its {name}"
        return None if self.has_code_of(module) else CODE_CHANGED


UNREAD = Snapshot()  # nothing has been read of it: it is always unchanged


def _equal(now: Any, then: Any) -> bool:
    if now is then:
        return True
    return type(now) is type(then) and isinstance(then, bool | int | float | str | tuple | list | dict) and bool(now == then)


def _setting(config: Any, name: str) -> Any:
    """Return a configuration's attribute, or one of its parts', by its __dict__; None where it is not there."""
    if "." not in name:  # each call asks for some
        return None if config is None else vars(config).get(name)
    found = config
    for each in name.split("."):
        found = getattr(found, "__dict__", {}).get(each)
    return found


def _place(own: dict[str, Any], name: str) -> str | None:
    """Return which dict of a module has an attribute: of parameters, of buffers or of children, or else "" or None.

    Matches read parameters in their dict. One that is pruned, or made for each call, is there no more.
    """
    for kind in ("_parameters", "_buffers", "_modules"):
        if own[kind].get(name) is not None:
            return kind
    return None if own.get(name) is None else ""


def _found(own: dict[str, Any], name: str) -> Any:
    """Return an attribute of a module by its __dict__, also a parameter, a buffer or a child."""
    place = _place(own, name)
    return (own[place] if place else own).get(name)


def _words(value: Any) -> str:
    return repr(value) if isinstance(value, bool | int | float | str | None) else f"a {type(value).__name__}"


def is_watched(module: nn.Module) -> bool:
    """Whether hooks or a forward of its own see this module's calls, which an op in place of its parent would not make."""
    return "forward" in vars(module) or hooked(module)


FSDP = "torch.distributed.fsdp"  # its hooks only gather weights
ZERO = "deepspeed.runtime.zero", "deepspeed.utils.nvtx"  # so do DeepSpeed's, one of which its nvtx wraps
SILENT = FSDP, *ZERO, "onepass.testing.invariance"  # whose hooks only look
_NO_MATTER = (*SILENT, "transformers.")  # whose hooks only record outputs


GLOBAL_HOOKS: tuple[dict[int, Callable[..., Any]], ...] = (  # of torch.nn.modules.module.register_module_forward_hook and its kin
    torch_module._global_forward_hooks,
    torch_module._global_forward_pre_hooks,
    torch_module._global_backward_hooks,
    torch_module._global_backward_pre_hooks,
)


def hooked(module: nn.Module, but_by: tuple[str, ...] = _NO_MATTER) -> bool:
    """Whether hooks see or change this module's calls. Hooks from packages with these prefixes do not count."""
    a, b, c, d = GLOBAL_HOOKS
    e, f, g, h = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    if not (a or b or c or d or e or f or g or h):  # no loop: each call of a layer asks this of all its modules
        return False
    for hooks in (a, b, c, d, e, f, g, h):
        for hook in hooks.values():
            if not (getattr(hook, "__module__", None) or "").startswith(but_by):
                return True
    return False


# ---- recording ----


class Reads:
    """Names that a module's code reads while it is probed."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.names: set[str] = set()
        self.config: set[str] = set()  # of settings
        self.given: set[str] = set()  # what probes had in place of the module's own

    def record(self, made: nn.Module, given: set[str]) -> None:
        """Record what the code of a probe reads, apart from what it was given."""
        self.given |= given
        own = vars(made)
        own["_onepass_reads"] = self
        if "config" in own:
            own["config"] = RecordingConfig(own["config"], self)
        made.__class__ = type(type(made).__name__, (_Recording, type(made)), {})

    def snapshot(self) -> Snapshot:
        own = vars(self.module)
        names = {name for name in self.names - self.given - _UNIMPORTANT if not name.startswith("_")}
        children = {name: child for name in names if (child := own["_modules"].get(name)) is not None}
        tensors = {name for name in names - children.keys() if isinstance(_found(own, name), Tensor)}
        tensors |= {name for name in names if _found(own, name) is None and not hasattr(type(self.module), name)}
        return Snapshot(
            code=type(self.module).forward,
            attributes=tuple((name, _kept(own.get(name))) for name in sorted(names - tensors - children.keys())),
            config=tuple((name, _kept(_setting(own.get("config"), name))) for name in sorted(self.config)),
            tensors=tuple((name, _place(own, name)) for name in sorted(tensors)),
            children=tuple((name, children[name], snapshot_of(children[name])) for name in sorted(children)),
        )


def snapshot_of(module: nn.Module) -> Snapshot:
    """Return a snapshot of all that a module has: nobody knows what its code reads."""
    reads = Reads(module)
    own = vars(module)
    reads.names = {*own, *own["_parameters"], *own["_buffers"], *own["_modules"]}
    return reads.snapshot()


def _kept(value: Any) -> Any:
    """Return a copy of what can be changed in place."""
    return value.copy() if isinstance(value, list | dict) else value


class RecordingConfig:
    """A configuration whose reads are recorded, and those of its parts, as a text model's is one."""

    def __init__(self, config: Any, reads: Reads, place: str = "") -> None:
        vars(self).update(_config=config, _reads=reads, _place=place)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # of a copy that has nothing yet
            raise AttributeError(name)
        aliases = _KEPT_AS | (getattr(self._config, "attribute_map", None) or {})
        place = self._place + aliases.get(name, name)
        if name not in _UNIMPORTANT and (name in _KEPT_AS or not name.startswith("_")):
            self._reads.config.add(place)
        value = getattr(self._config, name)
        is_part = hasattr(type(value), "model_type") and name in vars(self._config)
        return RecordingConfig(value, self._reads, f"{place}.") if is_part else value

    def get_text_config(self, *args: Any, **options: Any) -> Any:
        """Return transformers' choice of a part, or this configuration."""
        found = self._config.get_text_config(*args, **options)
        if found is self._config:
            return self
        return next((getattr(self, name) for name, value in vars(self._config).items() if value is found), found)


class _Recording:
    """Comes before a probed module's class."""

    def __init_subclass__(cls) -> None:
        """Skip the module's class's: it may register or wrap what is made of it."""

    def __getattribute__(self, name: str) -> Any:
        object.__getattribute__(self, "__dict__")["_onepass_reads"].names.add(name)
        return super().__getattribute__(name)


_reads: ContextVar[Reads | None] = ContextVar("onepass_reads", default=None)


@contextmanager
def reads_of(module: nn.Module) -> Iterator[Reads]:
    """Record what probes of this module read in the block."""
    reads = Reads(module)
    token = _reads.set(reads)
    try:
        yield reads
    finally:
        _reads.reset(token)


def recording(module: nn.Module) -> Reads | None:
    """Return what records the reads of this module's code, or None."""
    reads = _reads.get()
    return reads if reads is not None and reads.module is module else None
