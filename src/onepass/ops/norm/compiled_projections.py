"""Compiled, the product of several layers' weights as an op that sees their memory.

A compiler sees tensors and no memory: `joined` weights are a copy there, made at every step and kept for backward. These ops are
given all of the weights, and take them as one where they lie together when they run. The norm before the product is as in
`norm_linear`: what is kept is its input, and backward makes its result again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass.distributed.tensor_parallel import column_sums, input_gradient, rows_of
from onepass.gradients.main_grad import GradRequest, accumulates_elsewhere
from onepass.gradients.packed_params import concat_no_grad
from onepass.ops.norm import kernels
from onepass.ops.norm.formula import NormOptions
from onepass.ops.norm.norm_rows import norm_rows
from onepass.product.fp8 import PRODUCT
from onepass.product.in_graph import CompiledFP8Product
from onepass.product.prologue import Prologue
from onepass.product.rows import Rows
from onepass.runtime.backend import choose
from onepass.runtime.dispatch import fast_apply, needs_grad, not_twice_differentiable, product_type, registered, under_functorch
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
    def forward(ctx: Any, prologue: Prologue, recipe: FP8Recipe | None, count: int, *tensors: Tensor | None) -> Any:
        """Return y, and then what stands for x where the prologue returns it.

        `tensors`: the prologue's inputs, `count` weights, and as many biases.
        """
        inputs, weights, biases = _parts(tensors, count)
        needs = ctx.needs_input_grad[_FIRST:]
        ctx.prologue, ctx.rows = prologue, [weight.shape[0] for weight in weights]
        if recipe is None:
            rows, kept = prologue.rows(inputs, needs)
            y, ctx.call = _product_op(rows, weights, biases), None
        else:
            y, _, kept, ctx.call = CompiledFP8Product(recipe).forward_several(prologue, inputs, weights, biases, needs)
        ctx.has_biases = len(biases) > 0  # Dynamo of PyTorch 2.11 traces no bool() of a tuple
        ctx.save_for_backward(*weights, *kept)
        return (y, kept[0]) if prologue.returns[1] else y

    @staticmethod
    @not_twice_differentiable
    def backward(ctx: Any, dy: Tensor, dx: Tensor | None = None) -> tuple[Tensor | None, ...]:
        count, call, prologue = len(ctx.rows), ctx.call, ctx.prologue
        weights, kept = ctx.saved_tensors[:count], ctx.saved_tensors[count:]
        requests = [GradRequest.ACCUMULATE if need else GradRequest.SKIP for need in ctx.needs_input_grad[_FIRST:]]
        of_inputs, of_weights = requests[: -2 * count], requests[-2 * count : -count]
        asks_inputs, asks_weights = (any([each is not GradRequest.SKIP for each in some]) for some in (of_inputs, of_weights))
        if call is None:
            drows, dy_operand, target = _gradient_op(dy, weights) if asks_inputs else None, dy, None
        else:
            drows, dy_operand = call.output_gradient(dy, None, None, asks_inputs, asks_weights, later=False)
            target = call.target
        made = prologue.backward(kept, None, drows, dx, of_inputs, rebuild=asks_weights and target is None)
        dweights: Sequence[Tensor | None] = [None] * count
        if asks_weights and target is None:
            assert made.rows is not None
            dweights = (rows_of(dy).t() @ rows_of(made.rows)).split(ctx.rows)
        elif asks_weights:
            operand = call.start_input(prologue, kept, made, later=False)()
            dweights = PRODUCT.returned(*dy_operand, *operand, weights[0]).split(ctx.rows)
        grads = [*made.inputs, *dweights]
        if ctx.has_biases and any(ctx.needs_input_grad[-count:]):
            grads += column_sums(dy).to(dy.dtype).split(ctx.rows)
        else:
            grads += [None] * count
        asked = zip(grads, requests, strict=True)
        return None, None, None, *[None if request is GradRequest.SKIP else grad for grad, request in asked]


_FIRST = 3  # arguments before the tensors
_apply = fast_apply(_Projections)


def _parts(tensors: Sequence[Any], count: int) -> tuple[Sequence[Any], Sequence[Tensor], Sequence[Tensor]]:
    """Return the inputs, the weights and the biases, or none."""
    biases = tensors[-count:]
    return tensors[: -2 * count], tensors[-2 * count : -count], [] if biases[0] is None else biases


def _run(
    prologue: Prologue, recipe: FP8Recipe | None, inputs: Sequence[Tensor | None], weights: Sequence[Tensor],
    biases: Sequence[Tensor],
) -> Any:  # fmt: skip
    if recipe is not None and not needs_grad(*inputs, *weights, *biases):
        y, _, kept, _ = CompiledFP8Product(recipe).forward_several(prologue, inputs, weights, biases, None)
        return (y, kept[0]) if prologue.returns[1] else y
    return _apply(prologue, recipe, len(weights), *inputs, *weights, *(biases or (None,) * len(weights)))


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
    return _run(Rows(x.dtype, x.dtype), recipe, (x,), weights, biases)  # type: ignore[no-any-return]


def norm_projections(
    x: Tensor, residual: Tensor | None, norm_weight: Tensor | None, norm_bias: Tensor | None, norm: NormOptions,
    weights: Sequence[Tensor], biases: Sequence[Tensor], precision: Precision = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """y, and what the norm was taken of: x + residual."""
    inputs = x, norm_weight, norm_bias, residual
    return _run(norm_rows(x, residual, norm, x.dtype), _recipe(x, weights, precision), inputs, weights, biases)  # type: ignore[no-any-return]


def _recipe(x: Tensor, weights: Sequence[Tensor], precision: Precision) -> FP8Recipe | None:
    recipe = recipe_of(precision)
    if recipe is not None:
        check_fp8(x, weights[0])
    return recipe
