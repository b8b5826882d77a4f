"""Settings: frozen dataclasses with typed fields, command-line flags, and conversion from and to YAML."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

from onepass.runtime.errors import install_hint
from onepass.runtime.regular_file import read_regular, read_regular_or_pipe

S = TypeVar("S", bound="Settings")


def setting(default: Any, help: str) -> Any:
    return dataclasses.field(default=default, metadata={"help": help})


class Settings:
    """Base class of frozen dataclasses of settings. Values of the wrong type and unknown names raise ValueError."""

    own_flags: ClassVar[Mapping[str, tuple[str, str | None]]] = {}

    def __post_init__(self) -> None:
        for name, hint in _hints(type(self)).items():
            object.__setattr__(self, name, _of_type(name, getattr(self, name), hint))
        for message in self.contradictions():
            raise ValueError(message)

    def contradictions(self) -> Iterable[str]:
        """Return a message for each contradiction: the fields, their values and the values that they must have."""
        return ()

    def replace(self: S, **changes: Any) -> S:
        """Return a copy with `changes` to its fields."""
        return type(self).from_dict({**self.to_dict(), **changes})

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _hints(type(self))}

    @classmethod
    def names(cls) -> list[str]:
        return list(_hints(cls))

    @classmethod
    def from_dict(cls: type[S], values: Mapping[str, Any]) -> S:
        """Create from a dict. Missing fields get their defaults. An unknown key raises, with the closest field's name."""
        for key in values:
            if key not in _hints(cls):
                raise ValueError(f"{key!r} is no setting{nearest(key, _hints(cls))}")
        return cls(**values)

    @classmethod
    def flags(cls) -> list[Flag]:
        """Return all fields as flags: `--field-name` and `--no-field-name`, or those in `own_flags`."""
        made = []
        for field in dataclasses.fields(cls):  # type: ignore[arg-type]  # subclasses are dataclasses
            choices, kind, optional = _taken_apart(_hints(cls)[field.name])
            dashed = field.name.replace("_", "-")
            on, off = cls.own_flags.get(field.name, (f"--{dashed}", f"--no-{dashed}"))
            off = off if kind is bool else None
            made.append(Flag(field.name, on, off, kind, choices, field.default, optional, field.metadata["help"]))
        return made


class Flag(NamedTuple):
    """A field on the command line. `on` takes a value; a bool has the two flags `on` and `off` without values."""

    field: str
    on: str
    off: str | None
    type: type
    choices: tuple[str, ...]
    default: Any
    optional: bool
    help: str


def nearest(name: str, names: Iterable[str]) -> str:
    """Return the end of an error message: a suggestion of the closest name, or nothing if none is close."""
    near = difflib.get_close_matches(name, list(names), 1)
    return f"; did you mean {near[0]!r}?" if near else ""


# ---- types ----


def _hints(cls: Any) -> dict[str, Any]:
    return _read_hints(cls)


@functools.cache
def _read_hints(cls: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def _of_type(name: str, value: Any, hint: Any) -> Any:
    """Return the value in the field's type, or raise ValueError. Floats accept an int, and tuples of strings a list."""
    choices, kind, optional = _taken_apart(hint)
    if value is None and optional:
        return None
    if type(value) is int and value.bit_length() > 63:
        raise ValueError(f"{name} must be below 2**63 in size, but has {value.bit_length()} bits")
    if kind is float and type(value) is int:
        return float(value)
    if kind is tuple and type(value) in (list, tuple) and all(type(each) is str for each in value):
        return tuple(value)
    if choices and value in choices and type(value) is str:
        return value
    if not choices and type(value) is kind:
        return value
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", tuple: "a list of texts"}
    wanted = " or ".join(map(repr, choices)) if choices else words[kind]
    raise ValueError(f"{name} must be {wanted}{' or None' if optional else ''}, but is {value!r}")


def _taken_apart(hint: Any) -> tuple[tuple[str, ...], type, bool]:
    """Return a Literal's choices (else nothing), the type, and whether None is allowed."""
    optional = typing.get_origin(hint) in (typing.Union, types.UnionType)
    if optional:
        (hint,) = (each for each in typing.get_args(hint) if each is not type(None))
    if typing.get_origin(hint) is tuple:
        return (), tuple, optional
    choices = typing.get_args(hint)
    return choices, str if choices else hint, optional


# ---- YAML ----


def read_yaml(path: str | Path, flags: Iterable[Flag] = (), *, pipe: bool = False) -> dict[str, Any]:
    """Read settings. A key is a field's name or its flag's name: `norm_epsilon` is `layernorm_epsilon`.

    Args:
        pipe: take a named pipe, too, and wait for who writes it.
    """
    data = read_regular_or_pipe(Path(path)) if pipe else read_regular(Path(path))
    values = _yaml().load(data.decode(), Loader=_loader())
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold settings, one a line, as `hidden_size: 768`, but is {values!r:.50}")
    fields = {flag.on.removeprefix("--").replace("-", "_"): flag.field for flag in flags}
    for key in [key for key in values if fields.get(key, key) != key]:
        if fields[key] in values:
            raise ValueError(f"{path} must have a setting once, but has {key!r} and {fields[key]!r}, which are the same")
        values[fields[key]] = values.pop(key)
    return values


def written_yaml(values: Mapping[str, Any]) -> str:
    """Return the settings as YAML, in their order."""
    text: str = _yaml().safe_dump({key: list(v) if isinstance(v, tuple) else v for key, v in values.items()}, sort_keys=False)
    return text


def _yaml() -> Any:
    try:
        import yaml
    except ImportError as error:
        raise ImportError(f"a configuration in YAML needs PyYAML: {install_hint('train')}") from error
    return yaml


def _loader() -> Any:
    """Return a safe YAML loader that reads 1e-5 as a number, for which PyYAML's own reads a string.

    An alias of more than one value raises: a few hundred bytes of aliases of aliases can take all memory.
    """
    yaml = _yaml()

    class Loader(yaml.SafeLoader):  # type: ignore[name-defined, misc]
        def compose_node(self, parent: Any, index: Any) -> Any:
            alias = self.peek_event() if self.check_event(yaml.AliasEvent) else None
            node = super().compose_node(parent, index)
            if alias is not None and not isinstance(node, yaml.ScalarNode):
                raise ValueError(f"line {alias.start_mark.line + 1} must have a value, but has *{alias.anchor}, which is several")
            return node

    Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789"))
    return Loader
