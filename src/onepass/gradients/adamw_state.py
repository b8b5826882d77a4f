"""The state that AdamW keeps of parameters: its names, types and memory, on the device or in the host's memory.

    exp_avg, exp_avg_sq              moments in fp32 or bf16
    exp_avg_code, exp_avg_sq_code    in 8 bits, with exp_avg_scale and exp_avg_sq_scale (`gradients/eight_bits.py`)
    low                              the lower 16 bits of a bf16 weight's master
    master                           an fp16 weight's

Alike parameters that are stepped together lie one after another in a memory of each name, and have the same place in all: one
table of addresses serves them (`gradients/adamw_kernels.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from onepass.gradients.adamw_formula import AdamWSlice
from onepass.gradients.eight_bits import BLOCK
from onepass.gradients.offloaded_state import Passage, StateRing
from onepass.runtime.sizes import ceil_div

Moments = Literal["fp32", "bf16", "8bit"]
MOMENTS = "exp_avg", "exp_avg_sq"
CODES = "exp_avg_code", "exp_avg_sq_code"  # other optimizers don't take them for moments
SCALES = "exp_avg_scale", "exp_avg_sq_scale"
LOW, MASTER = "low", "master"
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "8bit": torch.int8}  # of moments
PASSAGE = 1 << 26  # numbers whose state passes together
_APART = 512  # bytes: where a tensor begins

Types = Mapping[str, torch.dtype]  # of a parameter's state, by name


def take_moments(groups: Iterable[dict[str, Any]], default: str | None, kinds: Iterable[str | None]) -> dict[Tensor, str | None]:
    """Return each parameter's kind of moments, its group's own or the default. Groups lose it: a group of torch's has no such
    option, and would miss it in a checkpoint."""
    found: dict[Tensor, str | None] = {}
    for group in groups:
        kind = group.pop("moments", default)
        if kind not in kinds:
            *names, last = map(str, kinds)
            raise ValueError(f"moments must be {', '.join(names)} or {last}, but is {kind!r}")
        found |= dict.fromkeys(group["params"], kind)
    return found


def embeddings_of(module: nn.Module | None) -> set[Tensor]:
    """Return the weights of the module's embeddings, an output layer's that is tied to one too."""
    if module is None:
        return set()
    found: set[Any] = {each for each in module.modules() if isinstance(each, nn.Embedding) or hasattr(each, "is_embedding")}
    return {each.weight for each in found}


def embeddings_apart(groups: Iterable[Mapping[str, Any]], module: nn.Module, moments: str | None) -> list[dict[str, Any]]:
    """Return the groups, for moments in 8 bits with embeddings in groups of their own, which keep fp32."""
    embeddings = embeddings_of(module) if moments == "8bit" else set()
    found: list[dict[str, Any]] = []
    for group in groups:
        params = list(group["params"])
        wide = [] if "moments" in group else [each for each in params if each in embeddings]
        rest = [each for each in params if all(each is not other for other in wide)]
        found += [{**group, "params": rest}] if rest or not wide else []
        found += [{**group, "params": wide, "moments": "fp32"}] if wide else []
    return found


def check_state(theirs: Mapping[str, Any], shape: tuple[int, ...], name: str = "", masters: bool = False) -> None:
    """Raise where a parameter's state has not all that makes moments, or in other shapes. masters: it must have these, too."""
    coded = CODES[0] in theirs
    needed = [*(CODES if coded else MOMENTS), *(SCALES if coded else ())]
    beside = [kind for kind in (MASTER, LOW) if kind in theirs]
    for kind in [*needed, *(beside or [MASTER] * masters)]:
        there = tuple(theirs[kind].shape) if kind in theirs else None
        if kind in SCALES and there is not None and math.prod(there) * BLOCK == math.prod(shape):
            continue
        if there != shape:
            wanted = f"{math.prod(shape) // BLOCK} numbers" if kind in SCALES else f"shape {shape}"
            raise ValueError(f"state must have {kind} of {wanted}{f' for {name}' * bool(name)}, but has {there}")


def state_types(moments: torch.dtype, beside: Types) -> Types:
    """Return the types of a state with such moments. beside: of what is kept beside the weight."""
    if moments is torch.int8:
        return {CODES[0]: torch.int8, CODES[1]: torch.uint8, **dict.fromkeys(SCALES, torch.float32), **beside}
    return {**dict.fromkeys(MOMENTS, moments), **beside}


class PassedStretch(NamedTuple):
    """A part of a parameter's state that is on the device with its passage."""

    passage: Passage
    start: int
    stop: int
    used: Mapping[str, Tensor]  # the device's memory


@dataclass(eq=False)
class ParameterState:
    """A parameter's state, or that of a rank's part of it. All tensors are one-dimensional."""

    weight: Tensor
    stored: Mapping[str, Tensor]
    row: int  # the parameter's place in its stepper's count of steps
    device: torch.device  # where it is stepped
    first: int = 0  # of its numbers, in this rank's part of the parameter
    passed: list[PassedStretch] = field(default_factory=list)  # of state in the host's memory

    @property
    def coded(self) -> bool:
        return CODES[0] in self.stored

    def grads_of(self, grad: Tensor) -> list[Tensor]:
        """Return the parts of a gradient that `slices` take: views, which a gradient without memory does not allow."""
        return [grad[each.start : each.stop] for each in self.passed] or [grad]

    def slices(self, grads: list[Tensor]) -> Iterator[tuple[Passage | None, AdamWSlice]]:
        """Yield what kernels step, and the passage that brings its state."""
        if not self.passed:
            yield None, _slice(self.weight, grads[0], self.stored, self.row, self.first)
        for (passage, start, stop, used), grad in zip(self.passed, grads, strict=bool(self.passed)):
            yield passage, _slice(self.weight[start:stop], grad, used, self.row, self.first + start)

    def read(self, kind: str) -> Tensor:
        """Return the master, exp_avg or exp_avg_sq in fp32, on the weight's device: a copy, or its memory where that is it."""
        return _slice(self.weight, self.weight, self._here(kind), self.row).read(kind)  # the gradient may have no memory

    def write(self, kind: str, values: Tensor, start: int = 0, stop: int | None = None) -> None:
        """Store fp32 numbers of a kind, or a part of them. Weights follow their masters."""
        state, stop = self._here(kind), self.weight.numel() if stop is None else stop
        here = _slice(self.weight, self.weight, state, self.row)
        values = values.reshape(-1).to(self.weight.device, torch.float32)
        if self.coded and kind != MASTER and stop - start < self.weight.numel():  # blocks may be cut
            whole = here.read(kind)
            whole[start:stop] = values
            here.write(kind, whole)
        else:
            here.part(start, stop).write(kind, values)
        for name, mine in self.stored.items():
            if state[name] is not mine:
                mine.copy_(state[name])

    def load(self, theirs: Mapping[str, Tensor]) -> None:
        """Copy a state, or begin anew without one. Moments that are stored otherwise are converted. Without "low" or "master",
        masters are the weights."""
        converted = bool(theirs) and (CODES[0] in theirs) != self.coded
        for name, mine in self.stored.items():
            if name == MASTER:
                mine.copy_(self.weight)
            elif name in theirs and (name == LOW or not converted):
                mine.copy_(theirs[name])
            else:
                mine.zero_()
        if converted:
            given = _slice(self.weight, self.weight, theirs, self.row)
            for kind in MOMENTS:
                self.write(kind, given.read(kind))
        if MASTER in theirs:
            self.write(MASTER, theirs[MASTER])

    def _here(self, kind: str) -> dict[str, Tensor]:
        """Return the stored tensors. Those that make this kind are on the weight's device, or copies there."""
        made_of = (LOW, MASTER) if kind == MASTER else [names[MOMENTS.index(kind)] for names in (MOMENTS, CODES, SCALES)]
        return {name: each.to(self.weight.device) if name in made_of else each for name, each in self.stored.items()}


def _slice(weight: Tensor, grad: Tensor, state: Mapping[str, Tensor], row: int, first: int = 0) -> AdamWSlice:
    exp_avg, exp_avg_sq = (state[name] for name in (CODES if CODES[0] in state else MOMENTS))
    beside, scale, scale_sq = state.get(LOW, state.get(MASTER)), state.get(SCALES[0]), state.get(SCALES[1])
    return AdamWSlice(weight, grad, exp_avg, exp_avg_sq, beside, row, scale, scale_sq, first)


# ---- memory ----


def allocate_state(
    device: torch.device, wanted: list[tuple[int, Types]], ring: StateRing | None
) -> Iterator[tuple[dict[str, Tensor], list[PassedStretch]]]:
    """Allocate zeros for the state of parameters that are stepped together, from their numbers and types: on the device, or with
    a ring in the host's memory."""
    if ring is None:
        yield from ((state, []) for state in _laid(wanted, lambda dtype, count: torch.zeros(count, dtype=dtype, device=device)))
        return
    states = _laid(wanted, ring.host_memory)
    passed: list[list[PassedStretch]] = [[] for _ in wanted]
    for stretches in _passages([count for count, _ in wanted]):
        there = [(stop - start, wanted[place][1]) for place, start, stop in stretches]
        _laid(there, needed := _Pieces(None))
        passage, memory = ring.add_passage(needed.end)
        for (place, start, stop), used in zip(stretches, _laid(there, _Pieces(memory)), strict=True):
            passed[place].append(PassedStretch(passage, start, stop, used))
            for name, mine in used.items():
                unit = BLOCK if name in SCALES else 1
                passage.add(states[place][name][start // unit : ceil_div(stop, unit)], mine)
    yield from zip(states, passed, strict=True)


def _passages(counts: list[int]) -> Iterator[list[tuple[int, int, int]]]:
    """Divide parameters' numbers into stretches that pass together: place, start and stop."""
    found: list[tuple[int, int, int]] = []
    room = PASSAGE
    for place, count in enumerate(counts):
        start = 0
        while start < count:
            stop = min(count, start + room // BLOCK * BLOCK)
            found.append((place, start, stop))
            room, start = room - (stop - start), stop
            if room < BLOCK:
                yield found
                found, room = [], PASSAGE
    if found:
        yield found


class _Pieces:
    """Hands out pieces of a memory one after another. None: nothing, but `end` counts its bytes."""

    def __init__(self, memory: Tensor | None) -> None:
        self._memory, self.end = memory, 0

    def __call__(self, dtype: torch.dtype, count: int) -> Tensor:
        begin = self.end
        self.end += ceil_div(count * dtype.itemsize, _APART) * _APART
        if self._memory is None:
            return torch.empty(0, dtype=dtype, device="cpu")
        return self._memory[begin : begin + count * dtype.itemsize].view(dtype)


def _laid(wanted: list[tuple[int, Types]], allocate: Callable[[torch.dtype, int], Tensor]) -> list[dict[str, Tensor]]:
    """Return parameters' states. Of alike parameters those of one name are a memory of their own, side by side: torch.save takes
    no storage of several types."""
    states: list[dict[str, Tensor]] = [{} for _ in wanted]
    alike: dict[tuple[tuple[str, torch.dtype], ...], list[tuple[int, int]]] = {}
    for place, (size, types) in enumerate(wanted):
        alike.setdefault((*types.items(),), []).append((place, size))
    for named, places in alike.items():
        for name, dtype in named:
            unit = BLOCK if name in SCALES else 1
            begins = [0, *accumulate(ceil_div(size, BLOCK) * BLOCK // unit for _, size in places)]
            memory = allocate(dtype, begins[-1])
            for (place, size), begin in zip(places, begins, strict=False):
                states[place][name] = memory[begin : begin + size // unit]
    return states
