"""Compiled, the product of several layers' weights as an op that sees their memory.

A compiler sees tensors and no memory: `joined` weights are a copy there, made at every step and kept for backward. These ops are
given all of the weights, and take them as one where they lie together when they run. The norm before the product is as in
`norm_linear`: what is kept is its input, and backward makes its result again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass.gradients.fp8_compiled import CompiledFP8Call
from onepass.gradients.fp8_linear import compiled_product, start_operand
from onepass.gradients.fp8_product import PRODUCT
from onepass.gradients.fp8_weight import FP8Operand
from onepass.gradients.main_grad import accumulates_elsewhere
from onepass.gradients.packed_params import concat_no_grad
from onepass.ops.norm import kernels
from onepass.ops.norm.formula import NormOptions
from onepass.ops.norm.fp8_linear import compiled_norm_product, start_norm_operand
from onepass.parallel.tensor_parallel import column_sums, input_gradient, rows_of
from onepass.runtime.autocast import product_type
from onepass.runtime.backend import choose
from onepass.runtime.dispatch import fast_apply, needs_grad, not_twice_differentiable, registered, under_functorch
from onepass.runtime.fp8 import check_fp8, fits_fp8
from onepass.runtime.fp8_recipe import FP8Recipe, Precision, recipe_of

# ---- registered ----


def _product(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
    return F.linear(x, concat_no_grad(weights), concat_no_grad(biases) if biases else None)


def _product_fake(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
    return x.new_empty(*x.shape[:-1], sum(weight.shape[0] for weight in weights))


def _input_gradient(dy: Tensor, weights: Sequence[Tensor]) -> Tensor:
    return input_gradient(dy, concat_no_grad(weights))


def _input_gradient_fake(dy: Tensor, weights: Sequence[Tensor]) -> Tensor:
    return dy.new_empty(*dy.shape[:-1], weights[0].shape[1])


_product_op = registered("product_of_several(Tensor x, Tensor[] weights, Tensor[] biases) -> Tensor", _product, _product_fake)
_gradient_op = registered(
    "input_gradient_of_several(Tensor dy, Tensor[] weights) -> Tensor", _input_gradient, _input_gradient_fake
)


# ---- autograd ----


class _Projections(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, recipe: FP8Recipe | None, count: int, *parameters: Tensor) -> Tensor:
        """`parameters`: so many weights, and as many biases or none."""
        weights, biases = parameters[:count], parameters[count:]
        y: Tensor
        if recipe is None:
            y, ctx.fp8 = _product_op(x, weights, biases), None
        else:
            y, ctx.fp8 = compiled_product(x, weights, biases, recipe, x.dtype, True)
        ctx.rows = [weight.shape[0] for weight in weights]
        ctx.save_for_backward(x, *weights)
        return y

    @staticmethod
    @not_twice_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        need_x, _, _, *needs = ctx.needs_input_grad
        dx, operand = _output_gradient(ctx.fp8, dy, weights, need_x, needs)
        of_x = None if operand is None else start_operand(ctx.fp8, x, later=False)
        return dx, None, None, *_parameters_gradients(dy, x, operand, of_x, weights, ctx.rows, needs)


class _NormProjections(torch.autograd.Function):
    """y, and what came to the norm: the sum of x and the residual, or x itself."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        norm_weight: Tensor | None,
        norm_bias: Tensor | None,
        norm: NormOptions,
        recipe: FP8Recipe | None,
        count: int,
        *parameters: Tensor,
    ) -> tuple[Tensor, Tensor]:
        weights, biases = parameters[:count], parameters[count:]
        if recipe is None:
            normed, h, stats = kernels.forward(x, residual, norm_weight, norm_bias, norm, True)
            y, h, ctx.fp8 = _product_op(normed, weights, biases), x if h is None else h, None
        else:
            y, h, stats, ctx.fp8 = compiled_norm_product(
                x, norm_weight, norm_bias, weights, biases, residual, norm, True, x.dtype, True, recipe
            )
        ctx.norm, ctx.rows = norm, [weight.shape[0] for weight in weights]
        ctx.save_for_backward(h, norm_weight, norm_bias, stats, *weights)
        return y, h

    @staticmethod
    @not_twice_differentiable
    def backward(ctx: Any, dy: Tensor, dh: Tensor) -> tuple[Tensor | None, ...]:
        h, norm_weight, norm_bias, stats, *weights = saved = ctx.saved_tensors
        need_x, need_residual, need_weight, need_bias, _, _, _, *needs = ctx.needs_input_grad
        dnormed, operand = _output_gradient(ctx.fp8, dy, weights, True, needs)
        rebuild = operand is None and any(needs[: len(weights)])
        dx, dnorm_weight, dnorm_bias, normed = kernels.backward(
            dnormed, dh, h, norm_weight, norm_bias, stats, ctx.norm,
            need_x or need_residual, need_weight, need_bias, h.dtype, rebuild,
        )  # fmt: skip
        of_norm = None if operand is None else start_norm_operand(ctx.fp8, (*saved[:3], None, stats), ctx.norm, True, False)
        parameters = _parameters_gradients(dy, normed, operand, of_norm, weights, ctx.rows, needs)
        dx, dresidual = dx if need_x else None, dx if need_residual else None
        return dx, dresidual, dnorm_weight, dnorm_bias, None, None, None, *parameters


def _output_gradient(
    fp8: CompiledFP8Call | None, dy: Tensor, weights: Sequence[Tensor], need_x: bool, needs: Sequence[bool]
) -> tuple[Tensor | None, FP8Operand | None]:
    """Return the gradient of the product's input, and what its weights' gradient takes of dy in eight bits."""
    if fp8 is None:
        return _gradient_op(dy, weights) if need_x else None, None
    found = fp8.output_gradient(dy, weights[0], need_x, any(needs[: len(weights)]), later=False)
    return found.dx, found.operand


def _parameters_gradients(
    dy: Tensor, x: Tensor | None, operand: FP8Operand | None, of_x: Callable[[], FP8Operand] | None, weights: Sequence[Tensor],
    rows: list[int], needs: Sequence[bool],
) -> list[Tensor | None]:  # fmt: skip
    """Of the weights, and of as many biases or none. Weights' are of the operands in eight bits, or of x."""
    count = len(rows)
    grads: list[Tensor | None] = [None for _ in needs]
    if operand is not None and of_x is not None:
        grads[:count] = PRODUCT.returned(*operand, *of_x(), weights[0]).split(rows)
    elif any(needs[:count]) and x is not None:
        grads[:count] = (rows_of(dy).t() @ rows_of(x)).split(rows)
    if any(needs[count:]):
        grads[count:] = column_sums(dy).to(dy.dtype).split(rows)
    return [grad if need else None for grad, need in zip(grads, needs, strict=True)]


_apply, _apply_norm = fast_apply(_Projections), fast_apply(_NormProjections)


# ---- what a Product asks ----


def use_compiled_projections(
    x: Tensor, late: Tensor | None, weights: Sequence[Tensor], biases: Sequence[Tensor], precision: Precision = None
) -> bool:
    """Compiled, whether this is for the ops: by kernels, in one type, gradients to autograd."""
    if len(weights) == 1 or under_functorch() or not x.numel():
        return False
    if any([accumulates_elsewhere(parameter) for parameter in (*weights, *biases)]):
        return False
    types = {x.dtype, product_type(x), *[parameter.dtype for parameter in (*weights, *biases)]}
    types |= set() if late is None else {late.dtype}
    if recipe_of(precision) is not None and not fits_fp8((sum(weight.shape[0] for weight in weights), x.shape[-1])):
        return False
    return len(types) == 1 and choose("norm_linear", None, kernels.norm_unsupported(x)) == "triton"


def projections(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], precision: Precision = None) -> Tensor:
    recipe = _recipe(x, weights, precision)
    if recipe is not None and not needs_grad(x, *weights, *biases):
        return compiled_product(x, weights, biases, recipe, x.dtype, False)[0]
    return _apply(x, recipe, len(weights), *weights, *biases)  # type: ignore[no-any-return]


def norm_projections(
    x: Tensor, residual: Tensor | None, norm_weight: Tensor | None, norm_bias: Tensor | None, norm: NormOptions,
    weights: Sequence[Tensor], biases: Sequence[Tensor], precision: Precision = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """y, and what the norm was taken of: x + residual."""
    recipe, vectors = _recipe(x, weights, precision), (norm_weight, norm_bias)
    if recipe is not None and not needs_grad(x, residual, *vectors, *weights, *biases):
        return compiled_norm_product(x, *vectors, weights, biases, residual, norm, True, x.dtype, False, recipe)[:2]
    y: tuple[Tensor, Tensor] = _apply_norm(x, residual, *vectors, norm, recipe, len(weights), *weights, *biases)
    return y


def _recipe(x: Tensor, weights: Sequence[Tensor], precision: Precision) -> FP8Recipe | None:
    recipe = recipe_of(precision)
    if recipe is not None:
        check_fp8(x, weights[0])
    return recipe
