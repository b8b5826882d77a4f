"""The scales of a layer's eight-bit operands, and what the next ones come from.

Three tensors are rounded: the layer's input, its weight, and the gradient of its output. Passes that write codes of the first and
the last note the largest finite magnitude, and count what saturates and what rounds to zero. Delayed scales change in `refresh`
alone, once a step, on the device: microbatches share them, and a forward that is run again under checkpointing has the same bits.

Until a step has noted a magnitude, a tensor has its own one found by the same pass, run once more in each call: `measure`.
Whether a step has, the device knows first. It chooses the scale, so a host that learns it late runs a pass too many, and changes
no bit. The weight's scale is measured in each call, by any recipe: whoever wrote the weight, no history of another's remains.

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

from onepass.distributed.collectives import raise_to_largest
from onepass.kernels.device_tables import is_capturing
from onepass.kernels.fp8 import exponents_below, power_of_two
from onepass.kernels.language import tl, triton_unsupported
from onepass.kernels.launch import Bound, kernel
from onepass.runtime.fp8 import E4M3, E5M2, SLOTS, FP8Target, scale_for
from onepass.runtime.fp8_recipe import FP8Recipe

ROLES = ("input", "weight", "gradient")
KINDS = ("saturated", "underflowed")  # of counts: numbers past the largest, and numbers that round to zero
_STATE = ("factors", "amax", "noted", "history", "steps", "total")
_STANDS = 1  # the place in a row of factors, after the scale's, that is 1 once a history has set the scale
_INVERSE = 4  # that of the inverse: cuBLAS reads it at an address that is a multiple of 16
_FACTORS = 2 * _INVERSE


@kernel
def _refresh_kernel(
    factors_ptr, amax_ptr, noted_ptr, history_ptr, steps_ptr, total_ptr,
    LENGTH: tl.constexpr, MARGIN: tl.constexpr, RECENT: tl.constexpr, E5M2_FROM: tl.constexpr, SLOTS: tl.constexpr,
    STANDS: tl.constexpr, INVERSE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a tensor: its scale from its history, after the slots have joined it."""
    role, roles = tl.program_id(0), tl.num_programs(0)
    lanes = tl.arange(0, SLOTS)
    amax = tl.max(tl.load(amax_ptr + role * SLOTS + lanes).to(tl.float32, bitcast=True), 0)
    tl.store(amax_ptr + role * SLOTS + lanes, 0)
    for kind in tl.static_range(2):
        slots = (kind * roles + role) * SLOTS + lanes
        count = tl.sum(tl.load(noted_ptr + slots), 0)
        tl.store(noted_ptr + slots, 0)
        total = total_ptr + kind * roles + role
        tl.store(total, tl.load(total) + count)
    step = tl.load(steps_ptr + role)
    tl.store(steps_ptr + role, step + 1)
    place = step % LENGTH
    if not RECENT:
        steps = tl.arange(0, BLOCK)
        before = tl.load(history_ptr + role * LENGTH + steps, mask=(steps < LENGTH) & (steps != place), other=0.0)
        tl.store(history_ptr + role * LENGTH + place, amax)
        amax = tl.maximum(amax, tl.max(before, 0))
    else:
        tl.store(history_ptr + role * LENGTH + place, amax)
    if amax > 0.0:
        biased = exponents_below(amax, tl.where(role >= E5M2_FROM, 269, 262) - MARGIN)
        row = factors_ptr + role * (2 * INVERSE)
        tl.store(row, power_of_two(biased))
        tl.store(row + STANDS, 1.0)
        tl.store(row + INVERSE, power_of_two(254 - biased))


@lru_cache
def _refresh_plan(length: int, margin: int, recent: bool, first_e5m2: int) -> Bound:
    block = 1 << (length - 1).bit_length()
    bound: Bound = _refresh_kernel.bind(length, margin, recent, first_e5m2, SLOTS, _STANDS, _INVERSE, block, num_warps=1)
    return bound


def _refresh_formula(state: Sequence[Tensor], types: Sequence[torch.dtype], margin: int, recent: bool) -> None:
    factors, amax, noted, history, steps, total = state
    largest = amax.view(torch.float32).amax(1)
    total += noted.sum(2)
    history.scatter_(1, (steps % history.shape[1]).unsqueeze(1), largest.unsqueeze(1))
    steps += 1
    if not recent:
        largest = history.amax(1)
    for row, most, dtype in zip(factors, largest, types, strict=True):
        row[0] = torch.where(most > 0, scale_for(most, dtype, margin), row[0])
        row[_STANDS] = torch.where(most > 0, 1.0, row[_STANDS])
        row[_INVERSE] = 1 / row[0]
    amax.zero_()
    noted.zero_()


@kernel
def _measured_kernel(
    row_ptr, amax_ptr, factors_ptr,
    MARGIN: tl.constexpr, E5M2: tl.constexpr, SLOTS: tl.constexpr, STANDS: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    """One program: a row of factors from the slots, or that of a history where there is one."""
    amax = tl.max(tl.load(amax_ptr + tl.arange(0, SLOTS)).to(tl.float32, bitcast=True), 0)
    biased = tl.where(amax > 0.0, exponents_below(amax, (269 if E5M2 else 262) - MARGIN), 127)
    scale, inverse = power_of_two(biased), power_of_two(254 - biased)
    if factors_ptr is not None:
        stands = tl.load(factors_ptr + STANDS) > 0.0
        scale = tl.where(stands, tl.load(factors_ptr), scale)
        inverse = tl.where(stands, tl.load(factors_ptr + INVERSE), inverse)
    tl.store(row_ptr, scale)
    tl.store(row_ptr + INVERSE, inverse)


@lru_cache
def _measured_plan(margin: int, e5m2: bool) -> Bound:
    bound: Bound = _measured_kernel.bind(margin, e5m2, SLOTS, _STANDS, _INVERSE, num_warps=1)
    return bound


def _measured_formula(row: Tensor, amax: Tensor, factors: Tensor | None, margin: int, dtype: torch.dtype) -> None:
    row[0] = scale_for(amax.view(torch.float32).amax(), dtype, margin)
    row[_INVERSE] = 1 / row[0]
    if factors is not None:
        row.copy_(torch.where(factors[_STANDS] > 0, factors, row))


class FP8Factors(NamedTuple):
    """A scale and its inverse, both of one element, and the row of memory that has them."""

    scale: Tensor
    inverse: Tensor
    row: Tensor


def factors_of(row: Tensor) -> FP8Factors:
    return FP8Factors(row[0], row[_INVERSE], row)


def new_factors(like: Tensor) -> Tensor:
    """Return a row for a scale and its inverse, on a tensor's device."""
    return like.new_empty(_FACTORS, dtype=torch.float32)


class _Flags:
    """Which scales come from a history, on the way to the host. Nothing waits for the device but `wait`."""

    def __init__(self, stands: Tensor) -> None:
        self._copy, self._arrived = stands.clone(), None
        if stands.is_cuda:
            self._copy, self._arrived = torch.empty(len(ROLES), device="cpu", pin_memory=True), torch.cuda.Event()
            self._copy.copy_(stands, non_blocking=True)
            self._arrived.record(torch.cuda.current_stream(stands.device))

    @property
    def has_arrived(self) -> bool:
        return self._arrived is None or self._arrived.query()

    def wait(self) -> list[bool]:
        if self._arrived is not None:
            self._arrived.synchronize()
        return (self._copy > 0).tolist()


class FP8Scales:
    """The scales of one layer's input, weight and output gradient, with the magnitudes that the next ones come from."""

    def __init__(self, recipe: FP8Recipe, device: torch.device) -> None:
        self.recipe = recipe
        count = len(ROLES)
        self.factors = torch.zeros(count, _FACTORS, device=device)
        self.factors[:, 0] = self.factors[:, _INVERSE] = 1
        self.amax, self._unread = torch.zeros(2, count, SLOTS, dtype=torch.int32, device=device).unbind()
        self.noted = torch.zeros(len(KINDS), count, SLOTS, dtype=torch.int64, device=device)
        self._uncounted = torch.zeros(SLOTS, dtype=torch.int64, device=device)  # by `measure`, whose codes nobody takes
        self.history = torch.zeros(count, recipe.amax_history_len, device=device)
        self.steps = torch.zeros(count, dtype=torch.int64, device=device)
        self.total = torch.zeros(len(KINDS), count, dtype=torch.int64, device=device)
        self.started = [False] * count  # whether a history is known here to set the scale
        self._flags: _Flags | None = None
        self._shared_flags: _Flags | None = None  # of the last refresh
        self._measured: set[str] = set()  # since the last refresh
        self._types = [E4M3, E4M3, recipe.gradient_type]
        self._of = [factors_of(row) for row in self.factors]
        self._groups: dict[str, dist.ProcessGroup] = {}  # that share a tensor's scale

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_groups": {}, "_flags": None, "_shared_flags": None}  # the next call shares again

    def share(self, role: str, group: dist.ProcessGroup) -> None:
        """Let the ranks of a group have one scale for a tensor from now on. The first call is collective."""
        if self._groups.get(role) is group:
            return
        self._groups[role] = group
        place = ROLES.index(role)
        self.started[place], self._shared_flags = False, None  # what this rank alone has heard: all measure until they learn
        row = self.factors[place]
        largest = row[_STANDS : _INVERSE + 1] * row[_STANDS]  # of the ranks that have a history: the smallest scale
        raise_to_largest(self.history[place], group)
        raise_to_largest(largest, group)
        inverse = torch.where(largest[0] > 0, largest[-1], 1.0)
        row[0], row[_STANDS], row[_INVERSE] = 1 / inverse, largest[0], inverse

    def type_of(self, role: str) -> torch.dtype:
        return self._types[ROLES.index(role)]

    def factors_of(self, role: str) -> FP8Factors:
        """Return a tensor's scale and its inverse. They are those of the calls to come: delayed scales change once a step."""
        return self._of[ROLES.index(role)]

    def target(self, role: str, factors: FP8Factors, noted: bool) -> FP8Target:
        """Return what a pass needs that writes codes of this tensor, and counts what saturates and what rounds to zero.

        Args:
            noted: the next scale sees its magnitudes.
        """
        place = ROLES.index(role)
        amax = self.amax if noted else self._unread
        return FP8Target(self._types[place], factors.scale, amax[place], *self.noted[:, place])

    def stands(self, role: str) -> bool:
        """Whether a history is known to set a tensor's scale: then nothing is measured."""
        if self._flags is not None and not is_capturing(self.factors.device) and self._flags.has_arrived:
            self._learn(self._flags, shared=False)
            self._flags = None
        return self.started[ROLES.index(role)]

    def measure(self, role: str, run: Callable[[FP8Target], object]) -> FP8Factors:
        """Return factors for the largest magnitude that the pass finds, on all ranks that share the scale.

        Delayed scales of the input and the gradient are those of the history once there is one. `run` writes codes for a target.
        """
        slots = self.magnitude(role, run)
        if role in self._groups:
            raise_to_largest(slots, self._groups[role])
        return self.factors_for(role, slots)

    def magnitude(self, role: str, run: Callable[[FP8Target], object]) -> Tensor:
        """Return the largest magnitude that a pass finds: the bits of fp32 numbers, int32 [SLOTS], of which it is the largest."""
        place = ROLES.index(role)
        slots = torch.zeros(SLOTS, dtype=torch.int32, device=self.factors.device)
        run(FP8Target(self._types[place], self._of[place].scale, slots, self._uncounted))
        return slots

    def factors_for(self, role: str, slots: Tensor) -> FP8Factors:
        """Return factors for a largest magnitude, or those of the history where that sets the scale."""
        place, margin = ROLES.index(role), self.recipe.margin
        row = new_factors(self.factors)
        delayed = self.recipe.scaling == "delayed" and role != "weight"
        given = row, slots, self.factors[place] if delayed else None
        if triton_unsupported(row) is None:
            _measured_plan(margin, self._types[place] is E5M2)((1, 1, 1), *given)
        else:
            _measured_formula(*given, margin, self._types[place])
        if delayed:
            self._measured.add(role)
        return factors_of(row)

    def refresh(self) -> None:
        """Let what was noted join the history, and set the scales from it. A tensor whose history is all 0 keeps its scale.

        Collective over groups that share a scale, whether or not their ranks have noted anything.
        """
        for role, group in self._groups.items():
            raise_to_largest(self.amax[ROLES.index(role)], group)
        recent, state = self.recipe.amax_compute_algo == "most_recent", [getattr(self, name) for name in _STATE]
        if triton_unsupported(state[0]) is None:
            first_e5m2 = self._types.index(E5M2) if E5M2 in self._types else len(self._types)
            plan = _refresh_plan(self.history.shape[1], self.recipe.margin, recent, first_e5m2)
            plan((len(self._types), 1, 1), *state)
        else:
            _refresh_formula(state, self._types, self.recipe.margin, recent)
        if is_capturing(self.factors.device):
            return
        if self._measured & self._groups.keys():  # ranks learn in the same refresh, of the one before: none waits for this step
            if self._shared_flags is not None:
                self._learn(self._shared_flags, shared=True)
            self._shared_flags = self._ask()
        if self._measured - self._groups.keys() and self._flags is None:  # an answer on its way is heard by a host ahead, too
            self._flags = self._ask()
        self._measured.clear()

    def _ask(self) -> _Flags:
        """Start to learn which scales come from a history now."""
        return _Flags(self.factors[:, _STANDS])

    def _learn(self, flags: _Flags, *, shared: bool) -> None:
        for place, (role, stands) in enumerate(zip(ROLES, flags.wait(), strict=True)):
            if (role in self._groups) is shared:
                self.started[place] |= stands

    def counts(self) -> Tensor:
        """Return how many numbers of each tensor have saturated and rounded to zero so far, [kinds, roles] on the device."""
        return self.total + self.noted.sum(2)

    def set_counts(self, counts: Tensor | None) -> None:
        """Go back to earlier `counts`; None is none."""
        self.noted.zero_()
        self.total.zero_() if counts is None else self.total.copy_(counts)

    def state_dict(self) -> dict[str, Tensor]:
        """Return copies of what a resumed run needs to go on with the same bits, a row a tensor."""
        return {
            "scale": self.factors[:, 0].clone(),
            "amax": self.amax.view(torch.float32).amax(1),
            "history": self.history.clone(),
            "steps": self.steps.clone(),
            "started": self.factors[:, _STANDS] > 0,
            **dict(zip(KINDS, self.counts().unbind(), strict=True)),
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
        self.noted.zero_()
        for own, theirs in ((self.history, "history"), (self.steps, "steps")):
            own.copy_(state[theirs])
        for own, kind in zip(self.total, KINDS, strict=True):
            own.copy_(state[kind]) if kind in state else own.zero_()  # older states have no second kind
        # older states have measured scales without a history too
        self.factors[:, _STANDS] = state["started"].to(self.steps.device) & (self.steps > 0)
        self._flags, self._shared_flags, self.started = None, None, (self.factors[:, _STANDS] > 0).tolist()


# ---- of many layers, without a wait for each ----


def counts_of(scales: Sequence[FP8Scales]) -> Tensor:
    """Return how many numbers of each tensor have saturated and rounded to zero so far, [layers, kinds, roles] on the device."""
    totals, new = (torch.stack([getattr(each, name) for each in scales]) for name in ("total", "noted"))
    return totals + new.sum(3)


def share_notes(scales: Sequence[FP8Scales], group: dist.ProcessGroup) -> None:
    """Give all ranks of a group the largest magnitudes and the counts of all of them, by one collective: then scales are alike.

    Call it once a step, after the last backward and before scales are refreshed.
    """
    amax, noted = (torch.stack([getattr(each, name) for each in scales]) for name in ("amax", "noted"))
    # magnitudes are compared as their bits are: none is negative
    own = torch.cat([amax.amax(2).long().unsqueeze(1), noted.sum(3)], 1)
    everywhere = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(everywhere, own, group)
    found = torch.stack(everywhere)
    largest, total = found[:, :, 0].amax(0), found[:, :, 1:].sum(0)
    for slots, value in ((amax, largest), (noted, total)):
        slots.zero_()[..., 0] = value
    torch._foreach_copy_([each.amax for each in scales], list(amax.unbind()))
    torch._foreach_copy_([each.noted for each in scales], list(noted.unbind()))
