"""The product of a linear layer in eight bits, forward and backward.

Forward casts x, and multiplies it by the weight's codes. Backward casts dy in both layouts, and multiplies it by the weight's
turned codes and by x's, which are cast again from x: what is kept is what a 16-bit product keeps. The weight's codes are made
after each update of the weight, in both layouts, and shared by microbatches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from onepass.gradients.fp8_scales import FP8Scales, factors_of
from onepass.gradients.fp8_updates import (
    BEFORE_ANY,
    Version,
    count_optimizer_steps,
    is_divided,
    may_have_changed,
    version_of,
    whole_of,
)
from onepass.gradients.main_grad import (
    GradientKind,
    GradRequest,
    add_gradient,
    as_op,
    grad_requests,
    main_grads_of,
    overwrite_main_grad,
    put_gradient,
)
from onepass.gradients.product import linear_gradients
from onepass.gradients.releasable_storage import is_first_write, mark_written
from onepass.kernels.fp8_cast import cast_rows, cast_tensor
from onepass.parallel.tensor_parallel import TPLayout, column_sums, rows_of
from onepass.runtime.dispatch import fast_apply, needs_grad, not_twice_differentiable, registered, under_functorch
from onepass.runtime.fp8 import E4M3, MULTIPLE, FP8Target, check_fp8, scaled_product
from onepass.runtime.fp8_recipe import FP8Recipe, Precision, recipe_of

if TYPE_CHECKING:
    from onepass.gradients.deferred import DeferredWgrad


class FP8Operand(NamedTuple):
    """Codes, by rows or turned, with the inverse of their scale, as a product takes them."""

    codes: Tensor
    inverse: Tensor


Pass = Callable[[FP8Target], tuple[Tensor, Tensor | None]]  # writes codes for a target; returns them, and a row's own inverses


class FP8Weight:
    """A weight in eight bits, by its rows and turned, with the scales of its layer."""

    def __init__(self, weight: Tensor, recipe: FP8Recipe) -> None:
        self.recipe = recipe
        self.scales = FP8Scales(recipe, weight.device)
        self._version: Version | None = None
        self._counted = False  # what a cast of this weight notes is in a loaded state already
        count_optimizer_steps()

    # ---- the weight ----

    def update(self, weight: Tensor) -> None:
        """After an update of the weight set all scales, and make its codes again."""
        version = version_of(weight)
        if self._version == version:
            return
        weight_now = weight.detach()
        if self.recipe.scaling == "row":
            self.rows, self.turned = (FP8Operand(*cast_rows(each, E4M3)) for each in (weight_now, weight_now.t()))
        else:
            if self._version is not None and self.recipe.scaling == "delayed":
                self.scales.refresh()
            self.rows, self.turned = self.cast("weight", weight_now, turned=True, lasting=True, noted=not self._counted)
        self._version, self._counted = version, False

    @contextmanager
    def unchanged(self, weight: Tensor) -> Iterator[None]:
        """Keep codes and scales through a block that writes the values into the weight that it has already."""
        current = self._version is not None and not may_have_changed(weight, self._version)
        yield
        if current and not is_divided(weight):
            self._version = version_of(weight)

    def check_unchanged(self, version: Version) -> None:
        """Raise where the weight was updated between forward and backward, as autograd does for tensors that it saved."""
        if self._version != version:
            raise RuntimeError("weight must not be updated between forward and backward: its codes are another's by now")

    @property
    def version(self) -> Version:
        assert self._version is not None
        return self._version

    # ---- state ----

    @property
    def is_fresh(self) -> bool:
        """Whether there is no state to save, as before the first forward."""
        return self._version is None and not self._counted

    def state_dict(self, weight: Tensor) -> dict[str, Any]:
        """Return what a resumed run needs to go on with the same bits: plain tensors, a dict and a bool. Codes are made again."""
        updated = self._version is not None and may_have_changed(weight, self._version)
        return {**self.scales.state_dict(), "recipe": asdict(self.recipe), "updated": updated}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state of the same recipe. The weight's codes are made at its next use, from the values that it then has."""
        self.scales.load_state_dict(state)
        self._version, self._counted = (BEFORE_ANY, False) if state["updated"] else (None, True)

    # ---- the other operands ----

    def target(self, role: str, run: Callable[[FP8Target], object], *, lasting: bool = False) -> tuple[FP8Target, Tensor]:
        """Return what a pass writes codes for, by the recipe, and the inverse of the scale that it has.

        Args:
            run: the pass itself. Where the scale comes from this tensor, it runs once more before.
            lasting: the scale is kept beyond the next update.
        """
        scales = self.scales
        if self.recipe.scaling == "current":
            scale, inverse = factors_of(scales.measure(role, run))
            return FP8Target(scales.type_of(role), scale), inverse
        scales.start(role, run)
        target, inverse = scales.target(role), scales.factors_of(role).inverse
        if lasting:
            scale, inverse = factors_of(scales.row_of(role).clone())
            target = target._replace(scale=scale)
        return target, inverse

    def input_operand(self, run: Pass, noted: bool) -> tuple[FP8Operand, Tensor | None]:
        """Return the codes of x that a pass writes, and their scale where rows share one. `noted`: the scales to come see it."""
        if self.recipe.scaling == "row":
            codes, inverse = run(FP8Target(E4M3))
            assert inverse is not None
            return FP8Operand(codes, inverse), None
        target, inverse = self.target("input", run)
        codes, _ = run(target if noted else FP8Target(E4M3, target.scale))
        return FP8Operand(codes, inverse), target.scale

    def cast(
        self, role: str, x: Tensor, *, codes: bool = True, turned: bool = False, lasting: bool = False, noted: bool = True
    ) -> tuple[FP8Operand | None, FP8Operand | None]:
        """Cast rows in one layout or both. By row there is no turned one. `noted`: the scales to come see it."""
        if self.recipe.scaling == "row":
            return (FP8Operand(*cast_rows(x, self.scales.type_of(role))) if codes else None), None
        target, inverse = self.target(role, partial(cast_tensor, x, codes=False), lasting=lasting)
        target = target if noted else FP8Target(target.dtype, target.scale)
        found = cast_tensor(x, target, codes=codes, turned=turned)
        plain, across = (None if each is None else FP8Operand(each, inverse) for each in found)
        return plain, across


def fp8_weight(weight: Tensor, recipe: FP8Recipe) -> FP8Weight:
    """Return the weight's state, which it carries as `weight.fp8`. Another recipe starts another state."""
    weight = whole_of(weight)
    state: FP8Weight | None = getattr(weight, "fp8", None)
    if state is None or state.recipe != recipe or state.scales.factors.device != weight.device:
        state = weight.fp8 = FP8Weight(weight, recipe)  # type: ignore[attr-defined]
    return state


def fp8_state(
    precision: Precision, x: Tensor, weight: Tensor, layout: TPLayout | None = None,
    deferred: DeferredWgrad | None = None,
) -> FP8Weight | None:  # fmt: skip
    """Return the state of a product that `precision` wants in eight bits, or None where it keeps its type. Raise where it can't."""
    if precision is None:
        return None
    recipe = recipe_of(precision)
    check_fp8(x, weight)
    if recipe is None or unfit_for_fp8(x, weight) is not None:
        return None
    if under_functorch():
        raise RuntimeError("precision must be None under vmap and functional derivatives: a product in eight bits keeps state")
    if torch.compiler.is_compiling():
        raise RuntimeError("precision must be None under torch.compile")
    if layout is not None:
        raise ValueError("precision must be None over a tp_group of several ranks")
    if deferred is not None:
        raise ValueError("precision must be None with deferred")
    return fp8_weight(weight, recipe)


def describe_fp8(precision: Precision, x: Tensor, weight: Tensor) -> str | None:
    """Return what `explain` says of a product's precision, or None where there is nothing to say."""
    recipe = recipe_of(precision)
    if recipe is None:
        return None
    unfit = unfit_for_fp8(x, weight)
    if unfit is not None:
        return f"products in their own type, as {unfit}"
    kinds = "e4m3" if recipe.format == "e4m3" else "e4m3, gradients in e5m2"
    wgrad = "" if recipe.has_wgrad else ", the weight's gradient in 16 bits"
    return f"products in eight bits ({kinds}; {recipe.scaling} scales{wgrad})"


def multiply(a: FP8Operand, b: FP8Operand, dtype: torch.dtype, *, fast: bool) -> Tensor:
    """Return a @ b.T."""
    return scaled_product(a.codes, a.inverse, b.codes, b.inverse, dtype, fast=fast)


def unfit_for_fp8(x: Tensor, weight: Tensor) -> str | None:
    """Return why this product stays in its own type, or None."""
    N, K = weight.shape
    if N % MULTIPLE or K % MULTIPLE:
        return f"the weight's sizes, {N} x {K}, are not multiples of {MULTIPLE}"
    return None if x.numel() else "there is nothing to do"


# ---- the weight's gradient ----


def _add_product(main_grad: Tensor, a: Tensor, a_inverse: Tensor, b: Tensor, b_inverse: Tensor) -> None:
    """Add a @ b.T to main_grad. A step's first gradient is written there by the product: cuBLAS adds nothing in eight bits."""
    if is_first_write(main_grad) and main_grad.dtype is torch.float32:
        _overwrite_by_product(main_grad, a, a_inverse, b, b_inverse)
        mark_written(main_grad)
    else:
        add_gradient(main_grad, scaled_product(a, a_inverse, b, b_inverse, torch.float32), None)


def _overwrite_by_product(main_grad: Tensor, a: Tensor, a_inverse: Tensor, b: Tensor, b_inverse: Tensor) -> None:
    wide = main_grad.dtype is torch.float32
    product = scaled_product(a, a_inverse, b, b_inverse, torch.float32, out=main_grad if wide else None)
    if not wide:
        main_grad.copy_(product)


def _product(a: Tensor, a_inverse: Tensor, b: Tensor, b_inverse: Tensor, weight: Tensor) -> Tensor:
    return scaled_product(a, a_inverse, b, b_inverse, weight.dtype)


def _overwrite(a: Tensor, a_inverse: Tensor, b: Tensor, b_inverse: Tensor, weight: Any) -> Tensor:
    """Write over the main_grad of Megatron-FSDP."""
    return overwrite_main_grad(weight, lambda main_grad: _overwrite_by_product(main_grad, a, a_inverse, b, b_inverse))


_OPERANDS = "Tensor a, Tensor a_inverse, Tensor b, Tensor b_inverse, Tensor weight"
_overwrite_op = registered(
    f"overwrite_fp8_gradient({_OPERANDS}) -> Tensor", _overwrite, lambda *operands: torch.empty_like(operands[-1])
)
_add_op = registered(f"add_fp8_gradient(Tensor(a!) main_grad, {_OPERANDS}) -> ()", as_op(_add_product), lambda *_: None)
_PRODUCT = GradientKind(_product, _overwrite, _overwrite_op, _add_product, _add_op)


def fp8_weight_gradient(
    dy: FP8Operand, x: FP8Operand, weight: Tensor, main_grad: Tensor | None, request: GradRequest
) -> Tensor | None:
    """Put the weight's gradient, made of turned operands, where it belongs, and return what autograd gets."""
    return put_gradient(_PRODUCT, (dy.codes, dy.inverse, x.codes, x.inverse), weight, main_grad, request)


# ---- forward and backward ----

# Another shape. Results may be written in place, which autograd forbids of a view.
_as_no_view = torch.ops.aten._unsafe_view.default


class FP8Call(NamedTuple):
    """What the backward of one call needs of its layer's state."""

    state: FP8Weight
    version: Version
    x_inverse: Tensor  # and the scale that forward had for x, None where rows had their own
    x_scale: Tensor | None

    def gradient_operands(self, rows: Tensor, asks_x: bool, asks_weight: bool) -> tuple[FP8Operand | None, FP8Operand | None]:
        """Cast dy for the products that the pass asks for: by rows for dx, turned for an eight-bit gradient of the weight."""
        self.state.check_unchanged(self.version)
        in_fp8 = asks_weight and self.state.recipe.has_wgrad
        if not (asks_x or in_fp8):
            return None, None
        return self.state.cast("gradient", rows, codes=asks_x, turned=in_fp8)

    def input_gradient(self, ours: FP8Operand, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return dx. `shape`: all of its dimensions but the last."""
        return multiply(ours, self.state.turned, dtype, fast=False).view(*shape, -1)

    def turned_input(self, run: Callable[[FP8Target], Tensor]) -> FP8Operand:
        """Return x's codes turned, which `run` writes for a target that has forward's scale and notes nothing."""
        return FP8Operand(run(FP8Target(E4M3, self.x_scale)), self.x_inverse)


def fp8_forward(
    state: FP8Weight, weight: Tensor, bias: Tensor | None, shape: Sequence[int], dtype: torch.dtype, run: Pass,
    *, noted: bool = True,
) -> tuple[Tensor, FP8Call]:  # fmt: skip
    """Return x @ weight.T + bias, and what backward needs.

    Args:
        shape: x's dimensions but the last.
        run: writes x's codes.
        noted: x's magnitudes count for the scales to come, as in training.
    """
    state.update(weight)
    ours, scale = state.input_operand(run, noted)
    y = multiply(ours, state.rows, dtype, fast=True)
    y = _as_no_view(y, [*shape, y.shape[1]])
    return y if bias is None else y.add_(bias), FP8Call(state, state.version, ours.inverse, scale)


class _FP8Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, state: FP8Weight) -> Tensor:
        y, ctx.fp8 = fp8_forward(state, weight, bias, x.shape[:-1], x.dtype, partial(_cast_plain, rows_of(x)))
        ctx.call = weight, bias, main_grads_of(ctx.needs_input_grad[1:], weight, bias)
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None)
        return y

    @staticmethod
    @not_twice_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        weight, bias, main_grads = ctx.call
        x_request, *requests = grad_requests(ctx, True, True, bias is not None)
        asks_x, asks_weight, asks_bias = (each is not GradRequest.SKIP for each in (x_request, *requests))
        rows = rows_of(dy)
        ours, turned = ctx.fp8.gradient_operands(rows, asks_x, asks_weight)
        dx = None if ours is None else ctx.fp8.input_gradient(ours, dy.shape[:-1], dy.dtype)
        make = wide = None
        if turned is not None:
            x_turned = ctx.fp8.turned_input(partial(_cast_turned, rows_of(x)))
            make = partial(fp8_weight_gradient, turned, x_turned, weight, main_grads[0], requests[0])
        elif asks_weight:
            wide = rows, rows_of(x)
        sums = column_sums(dy) if asks_bias else None
        dweight, dbias = linear_gradients((weight, bias), main_grads, requests, sums, wide, make)
        return dx, dweight, dbias, None


def _cast_plain(rows: Tensor, target: FP8Target) -> tuple[Tensor, Tensor | None]:
    if target.scale is None:
        return cast_rows(rows, target.dtype)
    codes, _ = cast_tensor(rows, target)
    assert codes is not None
    return codes, None


def _cast_turned(rows: Tensor, target: FP8Target) -> Tensor:
    _, turned = cast_tensor(rows, target, codes=False, turned=True)
    assert turned is not None
    return turned


_apply = fast_apply(_FP8Product)


def fp8_product(x: Tensor, weight: Tensor, bias: Tensor | None, state: FP8Weight) -> Tensor:
    """Return x @ weight.T + bias, with products in eight bits by the state's recipe."""
    if needs_grad(x, weight, bias):
        y: Tensor = _apply(x, weight, bias, state)
        return y
    return fp8_forward(state, weight, bias, x.shape[:-1], x.dtype, partial(_cast_plain, rows_of(x)), noted=False)[0]
