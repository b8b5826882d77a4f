"""Steps of a layer: what its code makes of its children, as a program that runs in its code's place.

Values have numbers. The layer's input is value 0, and steps write the others. `layer_trace.py` finds a layer's steps, and
`layers.py` joins some of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from onepass.integrations.huggingface.attentions import AttentionMatch
from onepass.integrations.huggingface.linears import FoldedNorm
from onepass.integrations.huggingface.mixers import MixerMatch
from onepass.integrations.huggingface.mlps import MLPMatch
from onepass.integrations.huggingface.norms import NormMatch

Values = list[Any]


class LayerStep(Protocol):
    @property
    def reads(self) -> tuple[int, ...]:
        """The values that it reads."""

    def run(self, module: nn.Module, values: Values, given: dict[str, Any]) -> None:
        """Write its values. `given`: the layer's further arguments."""


@dataclass(frozen=True)
class ChildCall:
    """Calls a child with values and with arguments of the layer."""

    name: str
    inputs: tuple[int, ...]  # by position
    named: tuple[tuple[str, int], ...] = ()  # by name, which hooks see
    results: tuple[tuple[int, int], ...] = ()  # an item of what the child returns, and the value that it becomes
    constants: tuple[tuple[str, Any], ...] = ()
    handed_on: tuple[tuple[str, str], ...] = ()  # the child's argument, and the layer's
    others: frozenset[str] | None = None  # hands on all arguments of the layer but these
    everything: bool = False  # hands on all that is given, under the same names
    is_tuple: bool = False  # the child returns a tuple
    may_be_tuple: bool = False  # the first item is the result if it does

    @property
    def reads(self) -> tuple[int, ...]:
        return (*self.inputs, *(value for _, value in self.named))

    def run(self, module: nn.Module, values: Values, given: dict[str, Any]) -> None:
        options = self.options(given)
        if self.named:
            options = {name: values[i] for name, i in self.named} | options
        child: Any = module._modules[self.name]
        self.keep(child(*[values[i] for i in self.inputs], **options), values)

    def options(self, given: dict[str, Any]) -> dict[str, Any]:
        if self.everything:
            return given
        options = dict(self.constants)
        for name, own in self.handed_on:
            if own in given:
                options[name] = given[own]
        if self.others is not None:
            options |= {name: value for name, value in given.items() if name not in self.others}
        return options

    def keep(self, made: Any, values: Values) -> None:
        items = self.is_tuple or (self.may_be_tuple and isinstance(made, tuple))
        for item, i in self.results:
            values[i] = made[item] if items else made


@dataclass(frozen=True)
class Load:
    """Reads a parameter or a buffer of the layer, or an argument that is a tensor."""

    name: str
    result: int
    own: bool
    reads: tuple[int, ...] = ()

    def run(self, module: nn.Module, values: Values, given: dict[str, Any]) -> None:
        values[self.result] = getattr(module, self.name) if self.own else given[self.name]


@dataclass(frozen=True)
class Sum:
    a: int
    b: int
    result: int
    in_place: bool = False  # in the layer's code: the sum has the type of `a`

    @property
    def reads(self) -> tuple[int, ...]:
        return self.a, self.b

    def run(self, module: nn.Module, values: Values, given: dict[str, Any]) -> None:
        values[self.result] = _as_type_of(values[self.a], values[self.a] + values[self.b], self.in_place)


@dataclass(frozen=True)
class Multiplied:
    a: int
    b: int
    result: int
    in_place: bool = False

    @property
    def reads(self) -> tuple[int, ...]:
        return self.a, self.b

    def run(self, module: nn.Module, values: Values, given: dict[str, Any]) -> None:
        values[self.result] = _as_type_of(values[self.a], values[self.a] * values[self.b], self.in_place)


def _as_type_of(a: Tensor, y: Tensor, in_place: bool) -> Tensor:
    return y.to(a.dtype) if in_place else y


@dataclass(frozen=True)
class Cast:
    """Brings a value to fp32, or to the type of a child's weight."""

    a: int
    child: str | None  # None: to fp32
    result: int

    @property
    def reads(self) -> tuple[int, ...]:
        return (self.a,)

    def run(self, module: nn.Module, values: Values, given: dict[str, Any]) -> None:
        child: Any = None if self.child is None else module._modules[self.child]
        values[self.result] = values[self.a].to(torch.float32 if child is None else child.weight.dtype)


@dataclass(frozen=True)
class Scaled:
    a: int
    factor: float
    result: int

    @property
    def reads(self) -> tuple[int, ...]:
        return (self.a,)

    def run(self, module: nn.Module, values: Values, given: dict[str, Any]) -> None:
        values[self.result] = values[self.a] * self.factor


@dataclass(frozen=True)
class Shaped:
    """Gives a value the shape of the layer's input, or makes it rows: two dimensions."""

    a: int
    rows: bool
    result: int

    @property
    def reads(self) -> tuple[int, ...]:
        return (self.a,) if self.rows else (self.a, 0)

    def run(self, module: nn.Module, values: Values, given: dict[str, Any]) -> None:
        a = values[self.a]
        values[self.result] = a.flatten(0, -2) if self.rows else a.reshape(values[0].shape)


# ---- steps that are joined ----


@dataclass(frozen=True)
class JoinedNorm:
    name: str
    match: NormMatch
    x: int
    result: int

    def is_ours(self, module: nn.Module) -> bool:
        """Whether the norm still has its place, and may be joined with others."""
        return module._modules[self.name] is self.match.module and self.match.untouched()


@dataclass(frozen=True)
class ChildNorm(JoinedNorm):
    """A norm of a value, or of the sum of two, which becomes a value too."""

    residual: int | None
    total: int  # the sum; x itself where there is none
    uncast: int | None = None  # what x was before a cast

    @property
    def reads(self) -> tuple[int, ...]:
        return (self.x,) if self.residual is None else (self.x, self.residual)

    def run(self, module: nn.Module, values: Values, given: dict[str, Any]) -> None:
        x, residual = values[self.x], None if self.residual is None else values[self.residual]
        if residual is not None and self.is_ours(module) and self.is_like_x(values):
            values[self.result], values[self.total] = self.match(x, residual)
            return
        child: Any = module._modules[self.name]
        total = values[self.total] = x if residual is None else x + residual
        values[self.result] = child(total)

    def is_like_x(self, values: Values) -> bool:
        """Whether the sum has x's shape and type: an op gives it those."""
        if self.residual is None:
            return True
        x, residual = values[self.x], values[self.residual]
        fits = x.dtype is residual.dtype or torch.promote_types(x.dtype, residual.dtype) is x.dtype
        return fits and x.shape == residual.shape


@dataclass(frozen=True)
class PostNorm(JoinedNorm):
    """A norm whose result is added to a value."""

    residual: int

    @property
    def reads(self) -> tuple[int, ...]:
        return self.x, self.residual

    def run(self, module: nn.Module, values: Values, given: dict[str, Any]) -> None:
        x, residual = values[self.x], values[self.residual]
        if x.dtype is residual.dtype and x.shape == residual.shape and self.is_ours(module):
            values[self.result] = self.match.plus(x, residual)
        else:
            child: Any = module._modules[self.name]
            values[self.result] = residual + child(x)


Taker = AttentionMatch | MLPMatch | MixerMatch


@dataclass(frozen=True)
class FoldedCall:
    """A call of attention, of a mixer or of an MLP whose first product takes the norm in.

    The product returns the norm's input too, for those who read it later: its gradients are then added up in the norm's backward.
    """

    norm: ChildNorm
    call: ChildCall
    match: Taker

    @property
    def reads(self) -> tuple[int, ...]:
        return self.norm.reads

    def run(self, module: nn.Module, values: Values, given: dict[str, Any]) -> None:
        norm, call = self.norm, self.call
        child: Any = module._modules[call.name]
        if norm.is_ours(module) and norm.is_like_x(values) and child is self.match.module and self.match.ready():
            x, folded = values[norm.x], FoldedNorm(norm.match, None if norm.residual is None else values[norm.residual])
            made = child(x, onepass_folded=folded, **call.options(given))
            assert folded.h is not None
            if norm.uncast is not None and values[norm.uncast] is x:  # it had the type already
                values[norm.uncast] = folded.h
            values[norm.total] = folded.h
            call.keep(made, values)
        else:
            norm.run(module, values, given)
            call.run(module, values, given)


# ---- all of a layer's ----


@dataclass(frozen=True)
class Program:
    """The steps of a layer, in order, and what it returns."""

    steps: tuple[LayerStep, ...]
    result: int | tuple[int | None, ...]  # a value, or a tuple of values and of None
    size: int  # how many values there are
    unread: tuple[tuple[int, ...], ...]  # after each step: the values that nothing reads any more

    @classmethod
    def of(cls, steps: tuple[LayerStep, ...], result: int | tuple[int | None, ...], size: int) -> Program:
        last = {value: at for at, step in enumerate(steps) for value in step.reads}
        kept = (result,) if isinstance(result, int) else result
        unread = tuple(tuple(value for value, end in last.items() if end == at and value not in kept) for at in range(len(steps)))
        return cls(steps, result, size, unread)

    @property
    def returned(self) -> list[int]:
        return [each for each in ((self.result,) if isinstance(self.result, int) else self.result) if each is not None]

    @property
    def own_tensors(self) -> set[str]:
        """The names of the layer's own parameters and buffers that it reads."""
        return {step.name for step in self.steps if isinstance(step, Load) and step.own}

    def run(self, module: nn.Module, x: Tensor, given: dict[str, Any]) -> Any:
        values: Values = [None] * self.size
        values[0] = x
        for step, unread in zip(self.steps, self.unread):  # noqa: B905  (PyTorch 2.9's compiler takes strict=False for True)
            step.run(module, values, given)
            for value in unread:  # frees its memory
                values[value] = None
        if isinstance(self.result, int):
            return values[self.result]
        return tuple([None if each is None else values[each] for each in self.result])
