"""The scales of a layer's eight-bit operands, and what the next ones come from.

Three tensors are rounded: the layer's input, its weight, and the gradient of its output. Passes that write codes note the
largest finite magnitude and count what saturates. Delayed scales change in `refresh` alone, once a step, on the device:
microbatches share them, and a forward that is run again under checkpointing has the same bits. A tensor without history has its
own magnitude found by the same pass, run once more: `measure`.

Where the ranks of a group have rows of one tensor, they `share` its scale. The largest magnitude is then that of all ranks, by a
collective of 64 numbers before each new scale. Other tensors have a scale of each rank's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from onepass.kernels.device_tables import is_capturing
from onepass.kernels.fp8 import exponents_below, power_of_two
from onepass.kernels.fp8_tile import SLOTS
from onepass.kernels.language import tl, triton_unsupported
from onepass.kernels.launch import Bound, kernel
from onepass.parallel.collectives import raise_to_largest
from onepass.runtime.fp8 import E4M3, E5M2, FP8Target, scale_for
from onepass.runtime.fp8_recipe import FP8Recipe

ROLES = ("input", "weight", "gradient")
_STATE = ("factors", "amax", "saturated", "history", "steps", "total")
_INVERSE = 4  # its place in a row of factors, after the scale's: cuBLAS reads it at an address that is a multiple of 16
_FACTORS = 2 * _INVERSE


@kernel
def _refresh_kernel(
    factors_ptr, amax_ptr, saturated_ptr, history_ptr, steps_ptr, total_ptr,
    LENGTH: tl.constexpr, MARGIN: tl.constexpr, RECENT: tl.constexpr, E5M2_FROM: tl.constexpr, SLOTS: tl.constexpr,
    INVERSE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a tensor: its scale from its history, after the slots have joined it."""
    role = tl.program_id(0)
    slots = role * SLOTS + tl.arange(0, SLOTS)
    amax = tl.max(tl.load(amax_ptr + slots).to(tl.float32, bitcast=True), 0)
    past = tl.sum(tl.load(saturated_ptr + slots).to(tl.int64), 0)
    tl.store(amax_ptr + slots, 0)
    tl.store(saturated_ptr + slots, 0)
    tl.store(total_ptr + role, tl.load(total_ptr + role) + past)
    step = tl.load(steps_ptr + role)
    tl.store(steps_ptr + role, step + 1)
    place = step % LENGTH
    if not RECENT:
        lanes = tl.arange(0, BLOCK)
        before = tl.load(history_ptr + role * LENGTH + lanes, mask=(lanes < LENGTH) & (lanes != place), other=0.0)
        tl.store(history_ptr + role * LENGTH + place, amax)
        amax = tl.maximum(amax, tl.max(before, 0))
    else:
        tl.store(history_ptr + role * LENGTH + place, amax)
    if amax > 0.0:
        biased = exponents_below(amax, tl.where(role >= E5M2_FROM, 269, 262) - MARGIN)
        tl.store(factors_ptr + role * (2 * INVERSE), power_of_two(biased))
        tl.store(factors_ptr + role * (2 * INVERSE) + INVERSE, power_of_two(254 - biased))


@lru_cache
def _refresh_plan(length: int, margin: int, recent: bool, first_e5m2: int) -> Bound:
    block = 1 << (length - 1).bit_length()
    bound: Bound = _refresh_kernel.bind(length, margin, recent, first_e5m2, SLOTS, _INVERSE, block, num_warps=1)
    return bound


def _refresh_formula(state: Sequence[Tensor], types: Sequence[torch.dtype], margin: int, recent: bool) -> None:
    factors, amax, saturated, history, steps, total = state
    largest = amax.view(torch.float32).amax(1)
    total += saturated.sum(1)
    history.scatter_(1, (steps % history.shape[1]).unsqueeze(1), largest.unsqueeze(1))
    steps += 1
    if not recent:
        largest = history.amax(1)
    for row, most, dtype in zip(factors, largest, types, strict=True):
        row[0] = torch.where(most > 0, scale_for(most, dtype, margin), row[0])
        row[_INVERSE] = 1 / row[0]
    amax.zero_()
    saturated.zero_()


class FP8Factors(NamedTuple):
    """A scale and its inverse, both of one element."""

    scale: Tensor
    inverse: Tensor


def factors_of(row: Tensor) -> FP8Factors:
    return FP8Factors(row[0], row[_INVERSE])


class FP8Scales:
    """The scales of one layer's input, weight and output gradient, with the magnitudes that the next ones come from."""

    def __init__(self, recipe: FP8Recipe, device: torch.device) -> None:
        self.recipe = recipe
        count = len(ROLES)
        self.factors = torch.ones(count, _FACTORS, device=device)
        self.amax, self.saturated = torch.zeros(2, count, SLOTS, dtype=torch.int32, device=device).unbind()
        self.history = torch.zeros(count, recipe.amax_history_len, device=device)
        self.steps, self.total = torch.zeros(2, count, dtype=torch.int64, device=device).unbind()
        self.started = [False] * count
        self._types = [E4M3, E4M3, recipe.gradient_type]
        self._of = [factors_of(row) for row in self.factors]
        noted = zip(self.amax, self.saturated, strict=True)
        self._targets = [
            FP8Target(dtype, of.scale, *slots) for dtype, of, slots in zip(self._types, self._of, noted, strict=True)
        ]
        self._groups: dict[str, dist.ProcessGroup] = {}  # that share a tensor's scale

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_groups": {}}  # no group can be pickled: the next call shares again

    def share(self, role: str, group: dist.ProcessGroup) -> None:
        """Let the ranks of a group have one scale for a tensor from now on. Collective where it has a scale already."""
        if self._groups.get(role) is group:
            return
        self._groups[role] = group
        place = ROLES.index(role)
        if self.started[place]:  # the smallest scale of the ranks, all powers of two
            scale, inverse = self._of[place]
            raise_to_largest(self.history[place], group)
            raise_to_largest(inverse, group)
            scale.copy_(1 / inverse)

    def type_of(self, role: str) -> torch.dtype:
        return self._types[ROLES.index(role)]

    def factors_of(self, role: str) -> FP8Factors:
        """Return a tensor's scale and its inverse. They are those of the calls to come: delayed scales change once a step."""
        return self._of[ROLES.index(role)]

    def target(self, role: str) -> FP8Target:
        """Return what a pass needs that writes codes of this tensor and notes magnitudes and what saturates."""
        return self._targets[ROLES.index(role)]

    def start(self, role: str, run: Callable[[FP8Target], object]) -> None:
        """Give a tensor that has no history yet the scale of its own largest magnitude. `run` is the pass that writes codes."""
        place = ROLES.index(role)
        if not self.started[place]:
            if is_capturing(self.factors.device):
                raise RuntimeError(
                    f"the {role} of a product in eight bits has no scale yet: run forward and backward once before the capture"
                )
            self.factors[place] = self.measure(role, run)
            self.started[place] = True

    def restart(self, role: str) -> None:
        """Let the next pass of a tensor find its scale, as the first did."""
        self.started[ROLES.index(role)] = False

    def measure(self, role: str, run: Callable[[FP8Target], object]) -> Tensor:
        """Return a row of factors for the largest magnitude that the pass finds, on all ranks that share the scale."""
        place = ROLES.index(role)
        row = self.factors.new_ones(1, _FACTORS)
        noted = torch.zeros(2, 1, SLOTS, dtype=torch.int32, device=row.device).unbind()
        run(FP8Target(self._types[place], row[0, 0], noted[0][0], noted[1][0]))
        if role in self._groups:
            raise_to_largest(noted[0], self._groups[role])
        none = self.steps.new_zeros(2, 1).unbind()
        self._refresh(row, *noted, row.new_zeros(1, 1), *none, types=self._types[place : place + 1], recent=True)
        return row[0]

    def refresh(self) -> None:
        """Let what was noted join the history, and set the scales from it. A tensor whose history is all 0 keeps its scale.

        Collective over groups that share a scale, whether or not their ranks have noted anything.
        """
        for role, group in self._groups.items():
            raise_to_largest(self.amax[ROLES.index(role)], group)
        recent = self.recipe.amax_compute_algo == "most_recent"
        self._refresh(*[getattr(self, name) for name in _STATE], types=self._types, recent=recent)

    def _refresh(self, *state: Tensor, types: Sequence[torch.dtype], recent: bool) -> None:
        """Set the scales of `state`, tensors as `_STATE` names them."""
        if triton_unsupported(state[0]) is None:
            first_e5m2 = types.index(E5M2) if E5M2 in types else len(types)
            _refresh_plan(state[3].shape[1], self.recipe.margin, recent, first_e5m2)((len(types), 1, 1), *state)
        else:
            _refresh_formula(state, types, self.recipe.margin, recent)

    def saturations(self) -> dict[str, int]:
        """Return how many numbers of each tensor have saturated so far. It waits for the device."""
        return dict(zip(ROLES, self.counts().tolist(), strict=True))

    def counts(self) -> Tensor:
        """Return a copy of how many numbers of each tensor have saturated so far, on the device."""
        return self.total + self.saturated.sum(1)

    def set_counts(self, counts: Tensor | None) -> None:
        """Go back to earlier `counts`; None is none."""
        self.saturated.zero_()
        self.total.zero_() if counts is None else self.total.copy_(counts)

    def state_dict(self) -> dict[str, Tensor]:
        """Return copies of what a resumed run needs to go on with the same bits, a row a tensor."""
        return {
            "scale": self.factors[:, 0].clone(),
            "amax": self.amax.view(torch.float32).amax(1),
            "history": self.history.clone(),
            "steps": self.steps.clone(),
            "saturated": self.counts(),
            "started": torch.tensor(self.started),
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over what `state_dict` returned. Raise ValueError where it is of another recipe's history."""
        if state["history"].shape != self.history.shape:
            raise ValueError(
                f"amax_history_len must be {state['history'].shape[1]} as in the state, but is {self.recipe.amax_history_len}"
            )
        self.factors[:, 0] = state["scale"]
        self.factors[:, _INVERSE] = 1 / self.factors[:, 0]
        self.amax.zero_().view(torch.float32)[:, 0] = state["amax"]
        self.saturated.zero_()
        for own, theirs in ((self.history, "history"), (self.steps, "steps"), (self.total, "saturated")):
            own.copy_(state[theirs])
        self.started = state["started"].tolist()


# ---- of many layers, without a wait for each ----


def counts_of(scales: Sequence[FP8Scales]) -> Tensor:
    """Return how many numbers of each tensor have saturated so far, [layers, roles] on the device."""
    totals, new = (torch.stack([getattr(each, name) for each in scales]) for name in ("total", "saturated"))
    return totals + new.sum(2)


def share_notes(scales: Sequence[FP8Scales], group: dist.ProcessGroup) -> None:
    """Give all ranks of a group the largest magnitudes and the counts of all of them, by one collective: then scales are alike.

    Call it once a step, after the last backward and before scales are refreshed.
    """
    amax, saturated = (torch.stack([getattr(each, name) for each in scales]) for name in ("amax", "saturated"))
    # magnitudes are compared as their bits are: none is negative
    own = torch.stack([amax.amax(2).long(), saturated.sum(2)])
    everywhere = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(everywhere, own, group)
    found = torch.stack(everywhere)
    largest, total = found[:, 0].amax(0), found[:, 1].sum(0).clamp(max=torch.iinfo(torch.int32).max)
    for noted, value in ((amax, largest), (saturated, total)):
        noted.zero_()[:, :, 0] = value
    torch._foreach_copy_([each.amax for each in scales], list(amax.unbind()))
    torch._foreach_copy_([each.saturated for each in scales], list(saturated.unbind()))
