"""The weight of a linear layer in eight bits, and the operands of its products.

The weight's codes are made where a product takes them: by rows in forward, transposed in backward. Forward also finds their
scale. Nothing made of a weight outlasts a call, so none is old, whoever wrote the weight. Over the ranks of a group:

                 x                         dy                        the weight
    column       all rows on every rank    own columns, own scale    own rows, own scale
      sequence   own rows, one scale       own columns, own scale    own rows, own scale
    row          own columns, own scale    all rows on every rank    own columns, own scale
      sequence   own columns, own scale    own rows, one scale       own columns, own scale

A tensor whose rows are divided over the ranks is cast at one scale, and gathered as codes: the bits that one rank would make of
all rows, in half the bytes. What every rank has whole gets the same scale on each of them by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from onepass.distributed.collectives import Pending, start_all_gather
from onepass.distributed.tensor_parallel import TPLayout
from onepass.gradients.main_grad import is_capturing
from onepass.kernels.cublaslt import add_scaled_product, scaled_product
from onepass.kernels.fp8_cast import cast_columns, cast_rows, cast_tensor
from onepass.kernels.fp8_transpose import transpose_codes
from onepass.product.fp8.scales import FP8Factors, FP8Scales
from onepass.product.fp8.updates import (
    BEFORE_ANY,
    Version,
    count_optimizer_steps,
    may_have_changed,
    refresh_after_steps,
    version_of,
    whole_of,
)
from onepass.product.frozen.fp8 import FP8FrozenWeight
from onepass.runtime.cuda_graph import current_step
from onepass.runtime.fp8 import E4M3, FP8Target
from onepass.runtime.fp8_recipe import FP8Recipe


class FP8Operand(NamedTuple):
    """Codes, by rows or transposed, with the inverse of their scale, as a product takes them."""

    codes: Tensor
    inverse: Tensor

    def part(self, first: int, last: int) -> FP8Operand:
        """Return some of its rows."""
        return FP8Operand(self.codes[first:last], self.inverse[first:last] if self.inverse.dim() else self.inverse)

    def transposed(self) -> FP8Operand:
        """Return the transpose of rows that share a scale."""
        return FP8Operand(transpose_codes(self.codes), self.inverse)


class PendingOperand:
    """The rows of all ranks, which are being gathered."""

    def __init__(self, own: FP8Operand, group: dist.ProcessGroup) -> None:
        """`own`: rows at a scale that all ranks share, or at scales of their own."""
        self._dtype = own.codes.dtype
        self._codes = start_all_gather(own.codes.view(torch.uint8), group)
        self._inverse = start_all_gather(own.inverse, group) if own.inverse.dim() else Pending(own.inverse)

    def wait(self) -> FP8Operand:
        return FP8Operand(self._codes.wait().view(self._dtype), self._inverse.wait())


def multiply(a: FP8Operand, b: FP8Operand, dtype: torch.dtype, *, fast: bool, out: Tensor | None = None) -> Tensor:
    """Return a @ b.T."""
    return scaled_product(a.codes, a.inverse, b.codes, b.inverse, dtype, fast=fast, out=out)


def add_multiplied(out: Tensor, a: FP8Operand, b: FP8Operand, *, fast: bool) -> Tensor:
    """Add a @ b.T, rounded to the type of `out`, to it."""
    return add_scaled_product(out, a.codes, a.inverse, b.codes, b.inverse, fast=fast)


class FP8Weight:
    """The scales of a weight's layer in eight bits. A copy and a pickle of the module have them and their history."""

    def __init__(self, weight: Tensor, recipe: FP8Recipe) -> None:
        self.recipe = recipe
        self.scales = FP8Scales(recipe, weight.device)
        self.shape: torch.Size | None = None  # of the weight
        self._version: Version | None = None  # of the weight, in the last forward
        self._loaded = False
        self._replayed = False  # optimizers' steps refresh the scales
        count_optimizer_steps()

    def __reduce__(self) -> tuple[Callable[..., FP8Weight], tuple[FP8Recipe, dict[str, Tensor]]]:
        return _from_scales, (self.recipe, self.scales.state_dict())

    # ---- the weight ----

    def update(self, weight: Tensor) -> None:
        """After an update of the weight, which ends a step, set the delayed scales of the input and the gradient.

        A write through `weight.data` changes no version. Scales without a history are then measured in each call, and others wait
        for an optimizer's step. A replay of a CUDA graph sees no update: optimizers' steps change the scales that it reads.
        """
        version, captures, step = version_of(weight), is_capturing(weight), current_step()
        due = self._version not in (None, version) and not (captures or self._replayed)
        if captures or step is not None:  # what warms up for the capture of a whole step: its replays refresh, too
            self._replayed = True
            refresh_after_steps(self.scales)
        if step is not None and not any(scales is self.scales for scales in step.scales):
            step.scales.append(self.scales)
        if due and self.recipe.scaling == "delayed":
            with _outside_inference_mode():  # scales serve training too
                self.scales.refresh()
        self._version, self.shape = version, weight.shape

    def rows(self, weight: Tensor) -> tuple[FP8Operand, FP8Factors | None]:
        """Return the weight's codes by rows, and their scale where they share one. The call's backward takes it too."""
        if isinstance(weight, FP8FrozenWeight):
            return FP8Operand(*weight.row_codes()), weight.factors
        weight = weight.detach()
        if self.recipe.scaling == "row":
            return FP8Operand(*cast_rows(weight, E4M3)), None
        factors = self.scales.measure("weight", partial(cast_tensor, weight, codes=False))
        codes, _ = cast_tensor(weight, FP8Target(E4M3, factors.scale))
        assert codes is not None
        return FP8Operand(codes, factors.inverse), factors

    def check_unchanged(self, version: Version) -> None:
        """Raise where the weight was updated between forward and backward, as autograd does for tensors that it saved."""
        if self._version != version:
            raise RuntimeError("weight must not be updated between forward and backward: scales are the next step's")

    @property
    def version(self) -> Version:
        assert self._version is not None
        return self._version

    # ---- state ----

    @property
    def is_fresh(self) -> bool:
        """Whether there is no state to save, as before the first forward."""
        return self._version is None and not self._loaded

    def state_dict(self, weight: Tensor) -> dict[str, Any]:
        """Return what a resumed run needs to go on with the same bits: plain tensors, a dict and a bool."""
        # where a graph is replayed, the optimizer's step has refreshed the scales already
        updated = self._version is not None and not self._replayed and may_have_changed(weight, self._version)
        return {**self.scales.state_dict(), "recipe": asdict(self.recipe), "updated": updated}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state of the same recipe."""
        self.scales.load_state_dict(state)
        self._version, self._loaded = BEFORE_ANY if state["updated"] else None, True

    # ---- the other operands ----

    @property
    def takes_codes(self) -> bool:
        """Whether another op's backward can write dy's codes in both layouts: they have one scale, known before."""
        return self.recipe.scaling == "delayed" and self.recipe.has_wgrad

    def gradient_target(self, run: Callable[[FP8Target], object]) -> tuple[FP8Target, Tensor]:
        """Return what that backward writes dy for, and the scale's inverse as it is now. `run`: as `target` has it."""
        target, inverse = self.target("gradient", run)
        return target, inverse.clone()

    def share(self, layout: TPLayout) -> None:
        """Let the ranks have one scale for the tensor that is divided by rows over them."""
        if layout.gathers_x or layout.gathers_dy:
            self.scales.share("input" if layout.gathers_x else "gradient", layout.group)

    def target(self, role: str, run: Callable[[FP8Target], object], *, noted: bool = True) -> tuple[FP8Target, Tensor]:
        """Return what a pass writes codes for, by the recipe, and the inverse of the scale that it has.

        `run` is the pass itself, which runs once more before where the scale comes from this tensor. `noted`: the scales to come
        see this tensor.
        """
        scales = self.scales
        if self.recipe.scaling == "current":
            factors = scales.measure(role, run)
            return FP8Target(scales.type_of(role), factors.scale), factors.inverse
        factors = scales.factors_of(role) if scales.stands(role) else scales.measure(role, run)
        return scales.target(role, factors, noted), factors.inverse

    def input_target(self, run: Callable[[FP8Target], object], noted: bool) -> tuple[FP8Target, Tensor | None]:
        """Return what a pass writes codes of x for, and the inverse of the scale that rows share, if they do."""
        return (FP8Target(E4M3), None) if self.recipe.scaling == "row" else self.target("input", run, noted=noted)

    def cast(
        self, role: str, x: Tensor, *, codes: bool = True, transposed: bool = False
    ) -> tuple[FP8Operand | None, FP8Operand | None]:  # fmt: skip
        """Cast rows in one layout or both. By row there is no transposed one."""
        if self.recipe.scaling == "row":
            return (FP8Operand(*cast_rows(x, self.scales.type_of(role))) if codes else None), None
        target, inverse = self.target(role, partial(cast_tensor, x, codes=False))
        return _operands(cast_tensor(x, target, codes=codes, transposed=transposed), inverse)


def _operands(found: tuple[Tensor | None, Tensor | None], inverse: Tensor) -> tuple[FP8Operand | None, FP8Operand | None]:
    plain, across = found
    return None if plain is None else FP8Operand(plain, inverse), None if across is None else FP8Operand(across, inverse)


def _outside_inference_mode() -> AbstractContextManager[object]:
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


def transposed_weight(weight: Tensor, factors: FP8Factors | None) -> FP8Operand:
    """Return the transpose of a weight's codes at the scale that forward had, for dx. None is a scale a column."""
    if isinstance(weight, FP8FrozenWeight):
        return FP8Operand(*weight.transposed_codes())
    weight = weight.detach()
    if factors is None:
        return FP8Operand(*cast_columns(weight))
    _, codes = cast_tensor(weight, FP8Target(E4M3, factors.scale), codes=False, transposed=True)
    assert codes is not None
    return FP8Operand(codes, factors.inverse)


def _from_scales(recipe: FP8Recipe, scales: dict[str, Tensor]) -> FP8Weight:
    """Return a state on the scales' device."""
    state = FP8Weight(scales["scale"], recipe)
    state.scales.load_state_dict(scales)
    state._loaded = True
    return state


def fp8_weight(weight: Tensor, recipe: FP8Recipe) -> FP8Weight:
    """Return the weight's state, which it carries as `weight.fp8`. Another recipe starts another state.

    Of packed parameters the first one carries it. The first alone, or packed with others, is another weight.
    """
    owner = whole_of(weight)
    state: FP8Weight | None = getattr(owner, "fp8", None)
    if (
        state is None
        or state.recipe != recipe
        or state.scales.factors.device != weight.device
        or (state.shape is not None and state.shape != weight.shape)
    ):
        if recipe.scaling == "delayed" and is_capturing(weight):  # each replay would set the state to zeros again
            raise RuntimeError(
                "a product in eight bits that has no scale yet can't be captured: run forward and backward once before"
            )
        with _outside_inference_mode():
            state = owner.fp8 = FP8Weight(weight, recipe)  # type: ignore[attr-defined]
    return state
