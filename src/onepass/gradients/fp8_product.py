"""The product of a linear layer in eight bits, forward and backward.

Forward casts x, and multiplies it by the weight's codes. Backward casts dy in both layouts, and multiplies it by the weight's
turned codes and by x's, which are cast again from x: what is kept is what a 16-bit product keeps. The weight's codes are made
after each update of the weight, in both layouts, and shared by microbatches.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from onepass.gradients.fp8_scales import FP8Scales
from onepass.gradients.main_grad import (
    GradientKind,
    GradRequest,
    add_gradient,
    as_op,
    grad_requests,
    main_grads_of,
    overwrite_main_grad,
    put_gradient,
    vector_gradient,
    weight_gradient,
)
from onepass.gradients.releasable_storage import is_first_write, mark_written
from onepass.kernels.fp8_cast import cast_rows, cast_tensor
from onepass.parallel.tensor_parallel import column_sums, rows_of
from onepass.runtime.dispatch import fast_apply, not_twice_differentiable, registered
from onepass.runtime.fp8 import E4M3, MULTIPLE, scaled_product
from onepass.runtime.fp8_recipe import FP8Recipe


class FP8Operand(NamedTuple):
    """Codes with the inverse of their scale, as a product takes them."""

    codes: Tensor
    inverse: Tensor


class FP8Weight:
    """A weight in eight bits, by its rows and turned, with the scales of its layer."""

    def __init__(self, weight: Tensor, recipe: FP8Recipe) -> None:
        self.recipe = recipe
        self.scales = FP8Scales(recipe, weight.device)
        self._version: int | None = None

    def update(self, weight: Tensor) -> None:
        """After an update of the weight set all scales, and make its codes again."""
        if self._version == weight._version:
            return
        if self.recipe.scaling == "row":
            self.rows, self.turned = (FP8Operand(*cast_rows(each, E4M3)) for each in (weight, weight.detach().t()))
        else:
            self._cast(weight)
        self._version = weight._version

    def _cast(self, weight: Tensor) -> None:
        scales = self.scales
        if self._version is not None and self.recipe.scaling == "delayed":
            scales.refresh()
        if self.recipe.scaling == "current":
            scales.set_from("weight", weight)
        else:
            scales.start("weight", weight)
        codes, turned = cast_tensor(weight, scales.target("weight"), turned=True)
        assert codes is not None and turned is not None
        inverse = scales.inverse_of("weight").clone()  # a backward may come after the next update of the scale
        self.rows, self.turned = FP8Operand(codes, inverse), FP8Operand(turned, inverse)

    def check_unchanged(self, version: int) -> None:
        """Raise where the weight was updated between forward and backward, as autograd does for tensors that it saved."""
        if self._version != version:
            raise RuntimeError("weight must not be updated between forward and backward: its codes are another's by now")

    @property
    def version(self) -> int:
        assert self._version is not None
        return self._version

    def cast(
        self, role: str, x: Tensor, *, codes: bool = True, turned: bool = False
    ) -> tuple[FP8Operand | None, FP8Operand | None]:
        """Cast x or dy by the recipe, in one layout or both. By row there is no turned one."""
        scales = self.scales
        target = scales.target(role)
        if self.recipe.scaling == "row":
            return FP8Operand(*cast_rows(x, target.dtype)), None
        (scales.start if self.recipe.scaling == "delayed" else scales.set_from)(role, x)
        inverse = scales.inverse_of(role)
        inverse = inverse.clone() if self.recipe.scaling == "current" else inverse  # the next call sets another
        found = cast_tensor(x, target, codes=codes, turned=turned)
        plain, across = (None if each is None else FP8Operand(each, inverse) for each in found)
        return plain, across

    def cast_again(self, role: str, x: Tensor) -> FP8Operand:
        """Cast x once more, turned, with the codes that `cast` gave it, and note nothing."""
        if self.recipe.scaling == "current":
            self.scales.set_from(role, x)
        _, turned = cast_tensor(x, self.scales.target(role, noted=False), codes=False, turned=True)
        assert turned is not None
        return FP8Operand(turned, self.scales.inverse_of(role))


def multiply(a: FP8Operand, b: FP8Operand, dtype: torch.dtype, *, fast: bool) -> Tensor:
    """Return a @ b.T."""
    return scaled_product(*a, *b, dtype, fast=fast)


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


# ---- the product ----


class _FP8Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, state: FP8Weight) -> Tensor:
        state.update(weight)
        rows = rows_of(x)
        ours, _ = state.cast("input", rows)
        assert ours is not None
        y = multiply(ours, state.rows, x.dtype, fast=True).view(*x.shape[:-1], -1)
        ctx.call = weight, bias, state, state.version, main_grads_of(ctx.needs_input_grad[1:], weight, bias)
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None)
        return y if bias is None else y.add_(bias)

    @staticmethod
    @not_twice_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        weight, bias, state, version, main_grads = ctx.call
        state.check_unchanged(version)
        x_request, *requests = grad_requests(ctx, True, True, bias is not None)
        asks_x, asks_weight = (request is not GradRequest.SKIP for request in (x_request, requests[0]))
        in_fp8 = asks_weight and state.recipe.has_wgrad
        rows = rows_of(dy)
        ours = turned = dx = dweight = dbias = None
        if asks_x or in_fp8:
            ours, turned = state.cast("gradient", rows, codes=asks_x, turned=in_fp8)
        if ours is not None:
            dx = multiply(ours, state.turned, dy.dtype, fast=False).view(*dy.shape[:-1], -1)
        if turned is not None:
            operands = *turned, *state.cast_again("input", rows_of(x))
            dweight = put_gradient(_PRODUCT, operands, weight, main_grads[0], requests[0])
        elif asks_weight:
            dweight = weight_gradient(rows, rows_of(x), weight, main_grads[0], requests[0])
        if bias is not None and requests[1] is not GradRequest.SKIP:
            dbias = vector_gradient(column_sums(dy), bias, main_grads[1], requests[1])
        return dx, dweight, dbias, None


_apply = fast_apply(_FP8Product)


def fp8_product(x: Tensor, weight: Tensor, bias: Tensor | None, state: FP8Weight) -> Tensor:
    """Return x @ weight.T + bias, with products in eight bits by the state's recipe."""
    y: Tensor = _apply(x, weight, bias, state)
    return y
