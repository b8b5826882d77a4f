"""Finds the steps of a layer's code: runs it once with stand-ins for its children, and records what it makes of their results.

What is recorded is then compared with the code: other stand-ins must give the same numbers, in training and in evaluation. Code
that does anything else with a value than the steps of `layer_steps.py` is not known.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from onepass.integrations.huggingface.layer_steps import (
    Cast,
    ChildCall,
    LayerStep,
    Load,
    Multiplied,
    Program,
    Scaled,
    Shaped,
    Sum,
)
from onepass.integrations.huggingface.probe import FP64, Function, close, parameters_of, probe, randn

_SIZES = (2, 3, 4)  # of the input: rows, tokens, and numbers a token
_ROWS = (6, 4)
_FUNCTIONS = frozenset(("add", "mul", "view", "reshape", "flatten", "contiguous", "dropout", "float", "to"))
_WEIGHT = torch.float8_e5m2fnuz  # the type of stand-ins' weights, which nothing else has
_MOST = 4  # items of a tuple that a child returns
_OF_NO_USE = frozenset(  # ignored if a layer doesn't hand them on
    ("use_cache", "cache_position", "position_ids", "position_embeddings")
)
_OTHERS = "onepass_others"  # an argument that no layer has a name for


class Argument:
    """Stands for an argument of the layer, which its code may hand on to children, and do nothing else with."""

    def __init__(self, name: str) -> None:
        self.name = name


_CONSTANTS = (NoneType, bool, int, float, str, Argument)

Items = dict[str, int]  # how many items each child returns, if it returns a tuple


class _Unknown(Exception):
    """The code does what no step does."""


class _ReturnsTuple(Exception):
    def __init__(self, child: str) -> None:
        self.child = child


class _Items(tuple[Any, ...]):
    """A tuple of a child, whose length nobody knows: its items are read by place, or all at once."""

    def __getitem__(self, place: Any) -> Any:
        if not isinstance(place, int) or place < 0:
            raise _Unknown
        return super().__getitem__(place)

    def __len__(self) -> int:
        raise _Unknown

    def __add__(self, other: Any) -> Any:
        raise _Unknown

    def __radd__(self, other: Any) -> Any:
        raise _Unknown


class _Awaited(NamedTuple):
    """A tensor that becomes a value once the code reads it."""

    tensor: Tensor
    step: int | None  # the call whose result it is
    item: int
    load: tuple[str, bool] | None  # else its name, and whether it is the layer's own


class LayerTrace(TorchFunctionMode):
    """A run of a layer's code. `given`: arguments; `tensors`: the names of those that must be tensors."""

    def __init__(self, module: nn.Module, items: Items, given: dict[str, Any], tensors: tuple[str, ...]) -> None:
        super().__init__()
        self.items = items
        self.steps: list[LayerStep] = []
        self.calls: list[tuple[str, dict[str, Any]]] = []  # by child: arguments but values, by name
        self.result: int | tuple[int | None, ...] | None = None  # None: it is not known
        self._numbers: dict[int, tuple[Tensor, int]] = {}  # of values, by a tensor's id
        self._made: dict[int, _Awaited] = {}
        self._whole: dict[int, tuple[Tensor, str]] = {}  # what a child returned, if it is no tuple
        self._types: dict[int, str] = {}  # children, by their weight's id
        self._asked: set[str] = set()  # children whose weight's type was read
        self._last = ""  # child that returned a tuple
        self._size = 0
        self._read_only = {0}  # values that are not the code's to write: the input, and what is loaded
        children = {name: child for name, child in module._modules.items() if child is not None}
        self._names = {name: list(parameters_of(child)) for name, child in children.items()}
        stand_ins: dict[str, nn.Module] = {name: Function(self._child(name)) for name in children}
        for name, child in children.items():
            if isinstance(getattr(child, "weight", None), Tensor):
                weight = torch.empty(0, dtype=_WEIGHT)
                vars(stand_ins[name])["weight"] = weight
                self._types[id(weight)] = name
        self._probe = _probe(module, stand_ins)
        for name, tensor in _own_tensors(self._probe).items():
            self._made[id(tensor)] = _Awaited(tensor, None, 0, (name, True))
        self._given = given | {name: randn(*_SIZES, seed=9) for name in tensors}
        for name in tensors:
            self._made[id(self._given[name])] = _Awaited(self._given[name], None, 0, (name, False))

    def run(self) -> LayerTrace:
        """Run the code. Raise _ReturnsTuple if it takes a child's result for a longer tuple."""
        x = randn(*_SIZES)
        self._value(x)
        with self:
            try:
                made = run_code(self._probe, x, self._given)
            except ValueError as error:
                if 0 < self.items.get(self._last, 0) < _MOST:
                    raise _ReturnsTuple(self._last) from error
                raise
        several = made if type(made) is tuple else (made,)
        found = [self._number(each) for each in several]
        if not found or found[0] is None or any(number is None is not each for number, each in zip(found, several, strict=True)):
            raise _Unknown
        self.result = tuple(found) if type(made) is tuple else found[0]
        return self

    def program(self) -> Program:
        assert self.result is not None
        return Program.of(tuple(self.steps), self.result, self._size)

    # ---- values ----

    def _value(self, tensor: Tensor) -> int:
        self._numbers[id(tensor)] = tensor, self._size
        self._size += 1
        return self._size - 1

    def _number(self, value: Any) -> int | None:
        """Return a tensor's value, or None if it is none."""
        if id(value) in self._numbers:
            return self._numbers[id(value)][1]
        made = self._made.pop(id(value), None)
        if made is None:
            return None
        number = self._value(made.tensor)
        if made.load is not None:
            self._read_only.add(number)
            self.steps.append(Load(made.load[0], number, made.load[1]))
        else:
            assert made.step is not None
            call = self.steps[made.step]
            assert isinstance(call, ChildCall)
            self.steps[made.step] = replace(call, results=(*call.results, (made.item, number)))
        return number

    # ---- children ----

    def _child(self, name: str) -> Callable[..., Any]:
        def called(*args: Any, **options: Any) -> Any:
            return self._call(name, args, options)

        return called

    def _call(self, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        numbers = [self._number(value) for value in args]
        by_place = numbers.index(None) if None in numbers else len(args)
        names = self._names[name][by_place : len(args)]
        everything = dict(zip(names, args[by_place:], strict=False)) | options
        values = {key: number for key, value in everything.items() if (number := self._number(value)) is not None}
        constants = {key: value for key, value in everything.items() if key not in values}
        self.calls.append((name, {key: value for key, value in everything.items() if key != "hidden_states"}))
        inputs = tuple(number for number in numbers[:by_place] if number is not None)
        known = all(isinstance(value, _CONSTANTS) for value in constants.values()) and len(names) == len(args) - by_place
        if not known or not (inputs or values):
            raise _Unknown
        is_tuple = name in self.items
        self.steps.append(ChildCall(name, inputs, tuple(values.items()), (), tuple(constants.items()), is_tuple=is_tuple))
        first, at = args[0] if inputs else everything[next(iter(values))], len(self.steps) - 1
        made = [_Awaited(randn(*first.shape, seed=100 + at), at, item, None) for item in range(self.items.get(name, 1))]
        self._made |= {id(each.tensor): each for each in made}
        if is_tuple:
            self._last = name
            return _Items(each.tensor for each in made)
        self._whole[id(made[0].tensor)] = made[0].tensor, name
        return made[0].tensor

    # ---- functions ----

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name in ("unbind", "__getitem__") and id(args[0]) in self._whole:
            raise _ReturnsTuple(self._whole[id(args[0])][1])
        if func == torch.Tensor.dtype.__get__ and id(args[0]) in self._types:  # type: ignore[attr-defined]
            self._asked.add(self._types[id(args[0])])
        if name == "to" and _WEIGHT in (*args, *kwargs.values()):
            a, asked = self._number(args[0]), [*self._asked]
            if a is None or len(asked) != 1:
                raise _Unknown
            self._asked.clear()
            made = args[0].clone()
            self.steps.append(Cast(a, asked[0], self._value(made)))
            return made
        made = func(*args, **kwargs)
        if isinstance(made, Tensor) and args:
            self._record(name, args, kwargs, made)
        return made

    def _record(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], made: Tensor) -> None:
        """Record a step if the function is one. Else the result is no value, even if it is the same tensor."""
        plain = name.removesuffix("_")
        in_place = plain != name
        numbers = [self._number(each) for each in args] if plain in _FUNCTIONS else []
        known = [number for number in numbers if number is not None]
        self._numbers.pop(id(made), None)
        self._made.pop(id(made), None)
        if not known or (in_place and known[0] in self._read_only):
            return
        if (name == "contiguous") or (name == "dropout" and (args[1:] or [kwargs.get("p")])[0] == 0):
            self._numbers[id(made)] = made, known[0]
        elif plain in ("add", "mul") and len(known) == len(args) == 2 and not kwargs:
            kind = Sum if plain == "add" else Multiplied
            self.steps.append(kind(known[0], known[1], self._value(made), in_place))
        elif plain == "mul" and len(args) == 2 and not kwargs and not in_place:
            factor = args[1] if numbers[1] is None else args[0]
            if type(factor) in (int, float):
                self._scale(known[0], float(factor), made)
        elif name == "float" or (name == "to" and (*args[1:], *kwargs.values()) == (torch.float32,)):
            self.steps.append(Cast(known[0], None, self._value(made)))
        elif name in ("view", "reshape", "flatten") and made.shape in (_SIZES, _ROWS):
            self.steps.append(Shaped(known[0], made.shape == _ROWS, self._value(made)))

    def _scale(self, a: int, factor: float, made: Tensor) -> None:
        if factor == 1.0:
            self._numbers[id(made)] = made, a
        else:
            self.steps.append(Scaled(a, factor, self._value(made)))


def _own_tensors(made: nn.Module) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in {**made._parameters, **made._buffers}.items() if tensor is not None}


def _probe(module: nn.Module, children: dict[str, nn.Module], training: bool = False) -> nn.Module:
    """Return the layer with these children, and with small tensors of its own: a vector is as wide as the input."""

    def small(tensors: dict[str, Any]) -> dict[str, Tensor | None]:
        made = {}
        for i, (name, each) in enumerate(tensors.items()):
            sizes = None if each is None else [1 if n == 1 else _SIZES[-1] for n in each.shape]
            made[name] = None if sizes is None else randn(*sizes, seed=20 + i)
        return made

    own = {"_parameters": small(module._parameters), "_buffers": small(module._buffers)}
    return probe(module, children, training=training, **own)


def run_code(made: nn.Module, x: Tensor, given: dict[str, Any]) -> Any:
    """Run the layer's code with None for arguments that have no default."""
    others = list(parameters_of(made).items())[1:]
    needed = [name for name, each in others if each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD]
    with torch.no_grad():
        return type(made).forward(made, x, **dict.fromkeys(needed) | given)


def trace(module: nn.Module, items: Items, tensors: tuple[str, ...] = (), given: dict[str, Any] | None = None) -> LayerTrace:
    """Return the last run of the layer's code, once it is clear which children return tuples. `items` gets those."""
    while True:
        found = LayerTrace(module, items, given or {}, tensors)
        try:
            return found.run()
        except _ReturnsTuple as error:
            items[error.child] = items.get(error.child, 1) + 1
        except Exception:  # the code's own too, as of arguments that stand for others
            return found


# ---- the program ----


@dataclass(frozen=True)
class LayerArguments:
    """The arguments that a layer's code may be given where its program runs."""

    first: str  # the hidden states' name
    names: tuple[str, ...]  # of the others, in order
    passed: frozenset[str]  # those that it hands on, or reads as tensors
    unread: frozenset[str]  # those of which it makes nothing
    tensors: tuple[str, ...]  # those that must be tensors
    others_too: bool  # whether it hands on keywords that it doesn't name

    def given(self, args: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any] | None:
        """Return a call's arguments by name. Return None if there are others, or if a tensor is not there."""
        passed = {}
        named = dict(zip(self.names, args))  # noqa: B905  (PyTorch 2.9's compiler takes strict=False for True)
        for name, value in {**named, **options}.items():
            if (name in self.passed) if name in self.names else self.others_too:
                passed[name] = value
            elif value is not None and value is not False and name not in _OF_NO_USE and name not in self.unread:
                return None
        for name in self.tensors:
            if not isinstance(passed.get(name), Tensor):
                return None
        return passed


class Found(NamedTuple):
    """What a layer's code does."""

    program: Program
    arguments: LayerArguments


def find_program(module: nn.Module, plain: frozenset[str]) -> Found | None:
    """Return what the layer's code does, or None where that is not known. `plain`: children that return no tuples."""
    names = [name for name, each in parameters_of(module).items() if each.kind in _BY_NAME]
    if not names:
        return None
    first, *names = names
    items: Items = {}
    base: LayerTrace = trace(module, items)
    tensors: tuple[str, ...] = ()
    for name in names:
        if base.result is not None:
            break
        base, tensors = trace(module, items, (name,)), (name,)
    may_be = None if base.result is None else _verified(module, base, items, tensors, plain)
    if may_be is None:
        return None
    handed = {name: _places(module, base, items, tensors, name) for name in (*names, _OTHERS) if name not in tensors}
    others_too = bool(handed[_OTHERS])
    passed = frozenset(name for name, places in handed.items() if places and name != _OTHERS)
    unread = frozenset(name for name, places in handed.items() if places == {} and name != _OTHERS)
    steps = []
    for at, step in enumerate(base.steps):
        if isinstance(step, ChildCall):
            own = [(key, name) for name in passed for key in (handed[name] or {}).get(at, ())]
            others = passed | {*tensors} if at in (handed[_OTHERS] or ()) else None
            everything = not tensors and {*own} == {(name, name) for name in passed} and (others is not None) == others_too
            step = replace(
                step, constants=_constants(module, step), handed_on=tuple(sorted(own)), others=others, everything=everything,
                may_be_tuple=step.name in may_be,
            )  # fmt: skip
        steps.append(step)
    arguments = LayerArguments(first, tuple(names), passed | {*tensors}, unread, tensors, others_too)
    return Found(replace(base.program(), steps=tuple(steps)), arguments)


_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def _constants(module: nn.Module, call: ChildCall) -> tuple[tuple[str, Any], ...]:
    """Return the arguments of the call that are no values, but those that the child has by itself."""
    own = parameters_of(module.get_submodule(call.name))
    defaults = {name: own[name].default if name in own else None for name, _ in call.constants}
    return tuple((name, value) for name, value in call.constants if (value or None) is not (defaults[name] or None))


def _places(
    module: nn.Module, base: LayerTrace, items: Items, tensors: tuple[str, ...], name: str
) -> dict[int, list[str]] | None:
    """Return the calls that this argument of the layer comes to, and its names there; None if it changes anything else."""
    other = trace(module, dict(items), tensors, {name: Argument(name)})
    places: dict[int, list[str]] = {}
    if (other.result, len(other.steps)) != (base.result, len(base.steps)):
        return None
    for at, (one, two) in enumerate(zip(base.steps, other.steps, strict=True)):
        if isinstance(one, ChildCall) and isinstance(two, ChildCall):
            arrived = [key for key, value in two.constants if isinstance(value, Argument)]
            kept = tuple(each for each in one.constants if each[0] not in arrived)
            two = replace(two, constants=tuple(each for each in two.constants if each[0] not in arrived))
            one = replace(one, constants=kept)
            if arrived and (name != _OTHERS or arrived == [_OTHERS]):
                places[at] = arrived
        if one != two:
            return None
    return places


def _verified(
    module: nn.Module, base: LayerTrace, items: Items, tensors: tuple[str, ...], plain: frozenset[str]
) -> set[str] | None:
    """Compare the steps with the layer's code. Return the children that may also return a tuple; None if numbers differ."""
    program = base.program()
    if not all(_alike(module, program, items, items, tensors, training) for training in (False, True)):
        return None
    may_be = set()
    for name in {step.name for step in program.steps if isinstance(step, ChildCall)} - plain - items.keys():
        other = items | {name: 2}
        found = {_alike(module, program, items, other, tensors, training) for training in (False, True)}
        if found != {None}:
            steps = trace(module, other, tensors).steps
            as_before = [replace(step, is_tuple=step.name in items) if isinstance(step, ChildCall) else step for step in steps]
            if found != {True} or as_before != base.steps:
                return None
            may_be.add(name)
    return may_be


def _alike(
    module: nn.Module, program: Program, items: Items, other: Items, tensors: tuple[str, ...], training: bool
) -> bool | None:
    """Whether the layer's code, with children that return these other tuples, gives the program's numbers; None: it can't."""
    x, given = randn(3, 5, _SIZES[-1], seed=2), {name: randn(3, 5, _SIZES[-1], seed=3) for name in tensors}
    try:
        expected = run_code(_probe(module, _stand_ins(module, other), training), x.clone(), given)
    except Exception:
        return None
    found = program.run(_probe(module, _stand_ins(module, items), training), x, given)
    pairs = [*zip(found, expected, strict=True)] if type(found) is type(expected) is tuple else [(found, expected)]
    pairs = [pair for pair in pairs if pair != (None, None)]
    if not all(isinstance(each, Tensor) for pair in pairs for each in pair):
        return None
    return all(close(each, other) for each, other in pairs)


def _stand_ins(module: nn.Module, items: Items) -> dict[str, nn.Module]:
    there = [name for name, child in module._modules.items() if child is not None]
    made: dict[str, nn.Module] = {name: Function(partial(_waves, i, items.get(name, 0))) for i, name in enumerate(there)}
    for stand_in in made.values():
        vars(stand_in)["weight"] = torch.empty(0, dtype=FP64)
    return made


def _waves(child: int, items: int, *args: Any, **options: Any) -> Any:
    """Return a child's result in the comparison: it differs by the child, by the item and by each of its inputs."""
    if any(isinstance(value, tuple) for value in (*args, *options.values())):
        raise TypeError
    values = [value for value in (*args, *options.values()) if isinstance(value, Tensor)]
    mixed = sum((value * (1 + i) for i, value in enumerate(values)), torch.zeros((), dtype=FP64))
    made = tuple(torch.sin((0.7 + 0.3 * child) * mixed + 0.2 * item + 0.1) for item in range(max(items, 1)))
    return made if items else made[0]


# ---- what attention is given ----


def hands_on(module: nn.Module, child: str, argument: str) -> bool:
    """Whether the layer's code gives this child an argument as it is, and no tensor of its own."""
    given = Argument(argument)
    runs = [trace(module, {}, given=options) for options in ({}, {argument: given})]
    calls = [[options for name, options in run.calls if name == child] for run in runs]
    if any(isinstance(value, Tensor) for run in calls for options in run for value in options.values()):
        return False
    return any(options.get(argument) is given for options in calls[1])
