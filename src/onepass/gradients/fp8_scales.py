"""The scales of a layer's eight-bit operands, and what the next ones come from.

Three tensors are rounded: the layer's input, its weight, and the gradient of its output. Passes that write codes note the largest
finite magnitude and count what saturates. Scales change in `refresh` alone, once a step, on the device: microbatches share
them, and a forward that is run again under checkpointing has the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import torch
from torch import Tensor

from onepass.kernels.fp8 import exponents_below, power_of_two
from onepass.kernels.fp8_cast import SLOTS
from onepass.kernels.language import tl, triton_unsupported
from onepass.kernels.launch import Bound, kernel
from onepass.runtime.fp8 import E4M3, E5M2, FP8Target, finite_amax, scale_for
from onepass.runtime.fp8_recipe import FP8Recipe

ROLES = ("input", "weight", "gradient")
_STATE = ("scale", "inverse", "amax", "saturated", "history", "steps", "total")


@kernel
def _refresh_kernel(
    scale_ptr, inverse_ptr, amax_ptr, saturated_ptr, history_ptr, steps_ptr, total_ptr,
    LENGTH: tl.constexpr, MARGIN: tl.constexpr, RECENT: tl.constexpr, E5M2_FROM: tl.constexpr, SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
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
        tl.store(scale_ptr + role, power_of_two(biased))
        tl.store(inverse_ptr + role, power_of_two(254 - biased))


@lru_cache
def _refresh_plan(recipe: FP8Recipe) -> Bound:
    length, recent = recipe.amax_history_len, recipe.amax_compute_algo == "most_recent"
    first_e5m2 = ROLES.index("gradient") if recipe.gradient_type is E5M2 else len(ROLES)
    bound: Bound = _refresh_kernel.bind(
        length, recipe.margin, recent, first_e5m2, SLOTS, 1 << (length - 1).bit_length(), num_warps=1
    )
    return bound


class FP8Scales:
    """The scales of one layer's input, weight and output gradient, with the magnitudes that the next ones come from.

    A scale is 1 until a tensor has started: `start` takes it from the tensor itself.
    """

    def __init__(self, recipe: FP8Recipe, device: torch.device) -> None:
        self.recipe = recipe
        count = len(ROLES)
        self.scale, self.inverse = torch.ones(2, count, device=device).unbind()
        self.amax, self.saturated = torch.zeros(2, count, SLOTS, dtype=torch.int32, device=device).unbind()
        self.history = torch.zeros(count, recipe.amax_history_len, device=device)
        self.steps, self.total = torch.zeros(2, count, dtype=torch.int64, device=device).unbind()
        self.started = [False] * count

    def target(self, role: str, *, noted: bool = True) -> FP8Target:
        """Return what a pass needs that writes codes of this tensor. `noted`: it notes magnitudes and what saturates."""
        place = ROLES.index(role)
        amax, past = (self.amax[place], self.saturated[place]) if noted else (None, None)
        return FP8Target(self._type(place), self.scale[place], amax, past)

    def inverse_of(self, role: str) -> Tensor:
        """Return the inverse of a tensor's scale, of one element."""
        return self.inverse[ROLES.index(role)]

    def _type(self, place: int) -> torch.dtype:
        return self.recipe.gradient_type if ROLES[place] == "gradient" else E4M3

    def start(self, role: str, x: Tensor) -> None:
        """Give a tensor that has no history yet the scale of its own largest magnitude."""
        place = ROLES.index(role)
        if not self.started[place]:
            self.set_from(role, x)
            self.started[place] = True

    def set_from(self, role: str, x: Tensor) -> None:
        """Set a tensor's scale from its own largest magnitude, as "current" scales are."""
        place = ROLES.index(role)
        scale = scale_for(finite_amax(x), self._type(place), self.recipe.margin)
        self.scale[place].copy_(scale)
        torch.div(1.0, scale, out=self.inverse[place])

    def refresh(self) -> None:
        """Let what was noted join the history, and set the scales from it. A tensor whose history is all 0 keeps its scale."""
        if triton_unsupported(self.scale) is None:
            tensors = (getattr(self, name) for name in _STATE)
            _refresh_plan(self.recipe)((len(ROLES), 1, 1), *tensors)
            return
        amax = self.amax.view(torch.float32).amax(1)
        self.total += self.saturated.sum(1)
        places = (self.steps % self.recipe.amax_history_len).unsqueeze(1)
        self.history.scatter_(1, places, amax.unsqueeze(1))
        self.steps += 1
        if self.recipe.amax_compute_algo == "max":
            amax = self.history.amax(1)
        for place in range(len(ROLES)):
            scale = scale_for(amax[place], self._type(place), self.recipe.margin)
            self.scale[place].copy_(torch.where(amax[place] > 0, scale, self.scale[place]))
        torch.div(1.0, self.scale, out=self.inverse)
        self.amax.zero_()
        self.saturated.zero_()

    def saturations(self) -> dict[str, int]:
        """Return how many numbers of each tensor have saturated so far. It waits for the device."""
        return dict(zip(ROLES, (self.total + self.saturated.sum(1)).tolist(), strict=True))

    def state_dict(self) -> dict[str, Tensor]:
        """Return the tensors that a resumed run needs to go on with the same bits."""
        started = torch.tensor(self.started)
        return {**{name: getattr(self, name) for name in _STATE}, "started": started}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over what `state_dict` returned. Raise ValueError where it is of another recipe's history."""
        if state["history"].shape != self.history.shape:
            raise ValueError(
                f"amax_history_len must be {state['history'].shape[1]} as in the state, but is {self.recipe.amax_history_len}"
            )
        for name in _STATE:
            getattr(self, name).copy_(state[name])
        self.started = state["started"].tolist()
