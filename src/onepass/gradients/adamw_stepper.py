"""What a step of AdamW is on one device, by kernels or by PyTorch's operators: counts of steps, options, and slices to step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from onepass.gradients.adamw_formula import AdamWSlice, step_formula
from onepass.gradients.adamw_kernels import OPTIONS, SCALARS, AdamWBatch, batches_of, step_batch, write_scalars
from onepass.gradients.offloaded_state import Passage
from onepass.kernels.device_tables import is_capturing
from onepass.kernels.language import triton_unsupported
from onepass.runtime import backend


class AdamWStepper:
    """A device's counts of steps, one for each parameter of the groups, its options, and slices to step."""

    def __init__(self, device: torch.device, groups: list[dict[str, Any]]) -> None:
        self.device = device
        self.group_of = [place for place, group in enumerate(groups) for _ in group["params"]]
        self.steps = torch.zeros(len(self.group_of), device=device)
        self.counts = self.steps.unbind()
        self.scalars = torch.zeros(len(self.group_of) * SCALARS, device=device)
        # fp64: OPTIONS of all groups, then max_norm
        self.options = torch.zeros(len(groups) * OPTIONS + 1, dtype=torch.float64, device=device)
        self.places = self.options.unbind()
        self.known: list[float | None] = [0.0] * len(self.places)  # None: not known here
        self.captured = False  # whether a graph's replays may write the options, which nobody here sees
        self.stretches: list[AdamWSlice] = []
        self.passages: list[tuple[Passage | None, list[AdamWSlice], list[AdamWBatch]]] = []
        self.rows = torch.zeros(0, 2, dtype=torch.int64, device=device)  # of parameters that are stepped, and their groups

    def lay(self, passed: Iterable[tuple[Passage | None, AdamWSlice]]) -> None:
        """Make tables of addresses of slices, those of a passage together."""
        found: dict[Passage | None, list[AdamWSlice]] = {}
        self.stretches = []
        for passage, stretch in passed:
            found.setdefault(passage, []).append(stretch)
            self.stretches.append(stretch)
        for stretch in self.stretches:
            if stretch.weight.device != self.device:
                raise RuntimeError(
                    f"parameters must stay on the device where their optimizer was made, {self.device}, but one of "
                    f"{stretch.weight.numel()} numbers is on {stretch.weight.device} by now: make the "
                    "optimizer after moving the model"
                )
        self.passages = [
            (passage, some, batches_of(each for each in some if each.weight.numel())) for passage, some in found.items()
        ]
        rows = [(row, self.group_of[row]) for row in dict.fromkeys(stretch.row for stretch in self.stretches)]
        self.rows = torch.tensor(rows, dtype=torch.int64).view(-1, 2).to(self.device)

    def move_gradients(self, grads: list[Tensor]) -> None:
        """Take these gradients of `stretches`: the last ones but for their addresses, storages and offsets shared alike."""
        moved = {id(old.grad): new for old, new in zip(self.stretches, grads, strict=True)}
        self.passages = [
            (passage, [each._replace(grad=moved[id(each.grad)]) for each in some], batches)
            for passage, some, batches in self.passages
        ]
        self.stretches = [old._replace(grad=new) for old, new in zip(self.stretches, grads, strict=True)]
        for _, _, batches in self.passages:
            for batch in batches:
                batch.sources = [moved[id(source)] for source in batch.sources]
                batch.tensors = (batch.tensors[0], batch.sources[0], *batch.tensors[2:])

    def run(self, groups: list[dict[str, Any]], norm: Tensor | None, max_norm: float | None, zero: bool) -> None:
        if not self.stretches:  # with shard a rank may step nothing
            return
        if max_norm == math.inf:  # over a norm of inf it would be NaN
            norm = max_norm = None
        norm = None if norm is None else norm.to(self.device)
        if self._use_triton():
            self._write_options(groups, max_norm)
            write_scalars(self.options, self.rows, self.steps, norm, self.scalars)
            for passage, _, batches in self.passages:
                with _present(passage):
                    for batch in batches:
                        step_batch(batch, self.scalars, zero)
            return
        factor = None if norm is None or max_norm is None else (max_norm / (norm + 1e-6)).clamp(max=1.0)
        if factor is not None and factor.device.type == "cpu" and factor == 1:  # reading it waits for nothing on a CPU
            factor = None
        try:
            self._run_formula(groups, factor, zero)
        except RuntimeError as error:  # out of memory, most likely: kernels allocate nothing
            raise type(error)(
                f"{error}. AdamW's step broke off: some weights, exp_avg and exp_avg_sq are ahead, and the step is counted. Load "
                "a checkpoint"
            ) from error

    def _run_formula(self, groups: list[dict[str, Any]], factor: Tensor | None, zero: bool) -> None:
        self.steps[self.rows[:, 0]] += 1
        for passage, some, _ in self.passages:
            with _present(passage):
                for place, group in enumerate(groups):
                    options = {name: group[name] for name in ("lr", "weight_decay", "eps")}
                    options["beta1"], options["beta2"] = group["betas"]
                    mine = [each for each in some if self.group_of[each.row] == place]
                    step_formula(mine, self.counts, factor, **options)
        if zero:
            torch._foreach_zero_([each.grad for each in self.stretches])

    def _use_triton(self) -> bool:
        """Whether kernels step. No other package has kernels for this, so choosing one by `use_backend` changes nothing."""
        named = backend.current_backend()
        return backend.choose("AdamW", named if named in backend.NATIVE else "auto", triton_unsupported(self.steps)) == "triton"

    def _write_options(self, groups: list[dict[str, Any]], max_norm: float | None) -> None:
        """Write the options that have changed, as arguments of launches; in a CUDA graph, and after one, write all."""
        columns = [[group["lr"], *group["betas"], group["eps"], group["weight_decay"]] for group in groups]
        values = [
            *(value for option in zip(*columns, strict=True) for value in option),
            math.inf if max_norm is None else max_norm,
        ]
        self.captured |= is_capturing(self.device)
        changed = {}
        for place, value in enumerate(values):
            if isinstance(value, Tensor) and value.device.type != "cpu":
                self.places[place].copy_(value)
                self.known[place] = None
            elif self.captured or self.known[place] != value:
                changed[place], self.known[place] = float(value), None
        if changed:
            places, numbers = [self.places[place] for place in changed], list(changed.values())
            torch._foreach_zero_(places)
            torch._foreach_add_(places, numbers)
            for place, number in changed.items():  # not before they are written: that may fail
                self.known[place] = None if self.captured else number


@contextmanager
def _present(passage: Passage | None) -> Iterator[None]:
    """Have a passage's state on the device in the block."""
    if passage is not None:
        passage.ring.enter(passage)
    yield
    if passage is not None:
        passage.ring.leave(passage)


def check_options(group: Mapping[str, Any]) -> None:
    for name, value in (("lr", group["lr"]), ("eps", group["eps"]), ("weight_decay", group["weight_decay"])):
        if not isinstance(value, Tensor) and not value >= 0:
            raise ValueError(f"{name} must be 0 or more, but is {value}")
    for beta in group["betas"]:
        if not isinstance(beta, Tensor) and not 0 <= beta < 1:
            raise ValueError(f"betas must be at least 0 and below 1, but are {tuple(group['betas'])}")


def check_max_norm(max_norm: float | None) -> None:
    if max_norm is not None and (not isinstance(max_norm, int | float) or not max_norm >= 0):
        raise ValueError(f"max_norm must be a number of 0 or more, or None, but is {max_norm!r}")
