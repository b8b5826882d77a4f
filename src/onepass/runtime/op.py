"""The record of an op: what the public function, `explain`, `doctor`, the command line and the tests know of it.

Options     One `NamedTuple` of an op's options, made once in the public function and passed whole. A NamedTuple, as a frozen
            dataclass takes three times as long to make, and a call is a matter of microseconds.
Registered  A kernel's launcher as a registered op with a fake. Calling it decides between the dispatcher and a direct call.
define_op   Registers the op by name. What only tools need lies in `samples.py` beside the op, and is imported when asked for.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from inspect import Parameter, Signature, signature
from itertools import chain
from types import SimpleNamespace
from typing import Any, get_type_hints

import torch
from torch import Tensor

from onepass.runtime.dispatch import needs_dispatcher, registered

Reason = str | None  # why a backend can't take a call, or None
FORMULA = "the PyTorch formula, its inputs saved and nothing else"  # what "torch" does, as `explain` says it

_SCHEMA_TYPES = {float: "float", int: "int", bool: "bool", str: "str", torch.dtype: "ScalarType", Tensor: "Tensor"}


class Call(SimpleNamespace):
    """The arguments of one call of an op, by their names in its public signature."""


# ---- registered ops ----


class Registered:
    """A function as a registered op: through the dispatcher where somebody watches, called directly where nobody does.

        _forward = Registered(
            "norm(Tensor x, Tensor? weight, NormOptions options, bool keep) -> (Tensor, Tensor?)",
            norm_forward, _forward_fake, NormOptions,
        )

    The schema is PyTorch's, with two additions. A parameter whose type is the name of a record becomes the record's fields; where
    tensors are in records, all are. A returned `Tensor?` may be None: the dispatcher knows tensors only, and carries an empty one
    of bools in its place.

    Args:
        schema: the op's name, parameters and results; tensors come first.
        function: takes the parameters in order, and by keyword what only a direct call may be given.
        fake: takes the parameters and returns tensors without data.
        records: the records that the schema names, NamedTuples or dataclasses.
        dispatched: what the dispatcher runs in the function's place, as graphs want to own what they allocate.
        tags: what PyTorch's compiler must know of the op.
    """

    def __init__(
        self,
        schema: str,
        function: Callable[..., Any],
        fake: Callable[..., Any],
        *records: type[Any],
        dispatched: Callable[..., Any] | None = None,
        tags: Sequence[torch.Tag] = (),
    ) -> None:
        self.function = function
        by_name = {record.__name__: record for record in records}
        name, parameters, results = re.fullmatch(r"(\w+)\((.*)\) -> (.*)", schema).groups()  # type: ignore[union-attr]
        kinds = [parameter.rpartition(" ")[0] for parameter in parameters.split(", ")]
        self._records = [by_name.get(kind) for kind in kinds]
        self._fields = [() if record is None else tuple(get_type_hints(record)) for record in self._records]
        self._of_tensors = self._records[0] is not None
        tensors = [kind.startswith("Tensor") or Tensor in _kinds(by_name.get(kind)) for kind in kinds]
        self._tensors = (*tensors, False).index(False)
        self._optional = [result.endswith("?") for result in results.strip("()").split(", ")]
        flat = ", ".join(
            parameter if record is None else _fields_schema(record)
            for parameter, record in zip(parameters.split(", "), self._records, strict=True)
        )
        # a compiler that has stopped before the op must not go on inside of it
        run = torch._disable_dynamo(self._tensors_of(dispatched or function))  # type: ignore[attr-defined]
        self.op = registered(f"{name}({flat}) -> {results.replace('?', '')}", run, self._tensors_of(fake), tags)

    def __call__(self, *args: Any, **direct: Any) -> Any:
        """`direct`: what may be done beside, such as writing over an input. Through the dispatcher it is not done."""
        tensors = args[: self._tensors]
        if needs_dispatcher(*(chain.from_iterable(tensors) if self._of_tensors else tensors)):
            return self._through_dispatcher(args)
        return self.function(*args, **direct)

    def _through_dispatcher(self, args: tuple[Any, ...]) -> Any:
        flat: list[Any] = []
        for arg, fields in zip(args, self._fields, strict=True):
            # not +=: PyTorch 2.11 compiles no sum with a NamedTuple
            flat.extend([getattr(arg, field) for field in fields] if fields else [arg])
        results = self.op(*flat)
        if len(self._optional) == 1:
            return results
        return tuple(
            None if optional and t.dtype is torch.bool and t.dim() == 1 and not t.shape[0] else t
            for t, optional in zip(results, self._optional, strict=True)
        )

    def _tensors_of(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function as the dispatcher calls it: of flat arguments, to tensors only."""

        def run(*flat: Any) -> Any:
            values = iter(flat)
            args = [
                next(values) if record is None else record(*(next(values) for _ in fields))
                for record, fields in zip(self._records, self._fields, strict=True)
            ]
            results = function(*args)
            if len(self._optional) == 1:
                return results
            like = next(value for value in flat if value is not None)
            return tuple(like.new_empty(0, dtype=torch.bool) if t is None else t for t in results)

        return run


def _kinds(record: type[Any] | None) -> list[Any]:
    """The types of a record's fields, without None."""
    hints = [] if record is None else get_type_hints(record).values()
    return [next(k for k in getattr(hint, "__args__", (hint,)) if k is not type(None)) for hint in hints]


def _fields_schema(record: type[Any]) -> str:
    """A record's fields as parameters of a schema."""
    optional = [type(None) in getattr(hint, "__args__", ()) for hint in get_type_hints(record).values()]
    fields = zip(get_type_hints(record), _kinds(record), optional, strict=True)
    return ", ".join(f"{_SCHEMA_TYPES[kind]}{'?' * may_be_none} {name}" for name, kind, may_be_none in fields)


# ---- what is known of an op ----


@dataclass
class Backend:
    """Somebody else's kernels for one op: `run` takes the op's own arguments, without `backend`."""

    run: Callable[..., Any]
    unsupported: Callable[..., Reason]


@dataclass
class Op:
    """What is known of one op. `check`, `unsupported`, `variant` and `formula` take a `Call`."""

    name: str
    function: Callable[..., Any]
    check: Callable[[Call], object]  # raises where the arguments are wrong
    unsupported: Callable[[Call], Reason]  # why the kernels can't take this call
    variant: Callable[[Call], str]  # which kernels would run, with what tiles, and why
    formula: Callable[[Call], str] | None  # what "torch" does, where that is more than the formula
    sharding: Callable[..., Any]  # how ranks share a call on DTensors, a `runtime.sharding.Rule`
    samples_module: str
    others: dict[str, Backend] = field(default_factory=dict)

    def named(self, *args: Any, **options: Any) -> dict[str, Any]:
        """The arguments but `backend` by their names, with the public function's defaults; a compiler traces it."""
        by_position = dict(zip(self.positional, args))  # noqa: B905  (PyTorch 2.9's compiler takes strict=False for True)
        given = self.defaults | by_position | options
        return {name: value for name, value in given.items() if name != "backend"}

    def call(self, *args: Any, **options: Any) -> Call:
        """The arguments but `backend` by their names in the public function's signature, with its defaults."""
        bound = self._signature.bind(*args, **options)
        bound.apply_defaults()
        return Call(**{name: value for name, value in bound.arguments.items() if name != "backend"})

    @cached_property
    def _signature(self) -> Signature:
        return signature(self.function)

    @cached_property
    def defaults(self) -> dict[str, Any]:
        """Of the options that have one."""
        return {name: p.default for name, p in self._signature.parameters.items() if p.default is not Parameter.empty}

    @cached_property
    def positional(self) -> list[str]:
        """The arguments that may be given by position."""
        return [name for name, p in self._signature.parameters.items() if p.kind is Parameter.POSITIONAL_OR_KEYWORD]

    @property
    def samples(self) -> Any:
        """The module of this op's sample calls, for tools only."""
        return importlib.import_module(self.samples_module)


OPS: dict[str, Op] = {}


def define_op(
    function: Callable[..., Any],
    *,
    check: Callable[[Call], object],
    unsupported: Callable[[Call], Reason],
    variant: Callable[[Call], str],
    sharding: Callable[..., Any],
    formula: Callable[[Call], str] | None = None,
    samples_module: str = "",
) -> None:
    """Make an op known to `explain`, `doctor`, the registry of backends, the command line and the contract tests.

    Its sample calls are in `samples.py` of its folder, unless another module is named.
    """
    samples_module = samples_module or f"{function.__module__.rpartition('.')[0]}.samples"
    OPS[function.__name__] = Op(function.__name__, function, check, unsupported, variant, formula, sharding, samples_module)
