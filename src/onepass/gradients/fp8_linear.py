"""A linear layer's product in eight bits, of an x that is cast for it (gradients/fp8_product.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from onepass.gradients.fp8_compiled import LOOKS_AT_A_STATE, CompiledFP8Call, forward_fake, lent, one_of, state_in_graph
from onepass.gradients.fp8_gradient import takes_fp8_gradient
from onepass.gradients.fp8_product import FP8Call, fp8_forward
from onepass.gradients.fp8_weight import CompiledFP8, FP8Operand, FP8Weight
from onepass.gradients.main_grad import GradRequest, grad_requests, main_grads_of
from onepass.gradients.product import graph_break_if_deferred, is_deferred, linear_gradients
from onepass.kernels.fp8_cast import cast_rows, cast_tensor
from onepass.parallel.tensor_parallel import TPLayout, column_sums, rows_of, start_gather, start_sum
from onepass.runtime.dispatch import cast, fast_apply, needs_grad, not_twice_differentiable, writable
from onepass.runtime.fp8 import FP8Target, turned_width
from onepass.runtime.fp8_recipe import FP8Recipe
from onepass.runtime.op import Registered

if TYPE_CHECKING:
    from onepass.gradients.deferred import DeferredWgrad


def _cast_plain(rows: Tensor, target: FP8Target) -> tuple[Tensor, Tensor | None]:
    if target.scale is None:
        return cast_rows(rows, target.dtype)
    codes, _ = cast_tensor(rows, target)
    assert codes is not None
    return codes, None


def start_operand(call: FP8Call | CompiledFP8Call, x: Tensor, *, later: bool) -> Callable[[], FP8Operand]:
    """Return what makes x's operand of the weight's gradient, as `FP8Call.start_input` does."""
    rows = rows_of(x)
    return call.start_input(partial(_cast_plain, rows), partial(_cast_turned, rows), later=later)


def _cast_turned(rows: Tensor, target: FP8Target) -> Tensor:
    assert target.scale is not None
    turned: Tensor = _turned_op(rows, target.scale, target.dtype)
    return turned


def _turned(rows: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    _, turned = cast_tensor(rows, FP8Target(dtype, scale), codes=False, turned=True)
    assert turned is not None
    return turned


_turned_op = Registered(
    "fp8_cast_turned(Tensor rows, Tensor scale, ScalarType dtype) -> Tensor",
    _turned,
    lambda rows, scale, dtype: rows.new_empty((rows.shape[-1], turned_width(rows)), dtype=dtype),
)


# ---- forward ----


def _forward(
    state: FP8Weight, x: Tensor, weight: Tensor, bias: Tensor | None, product: torch.dtype, layout: TPLayout | None, noted: bool
) -> tuple[Tensor, FP8Call]:
    run = partial(_cast_plain, rows_of(x))
    return fp8_forward(state, weight, bias, x.shape[:-1], product, run, layout, noted=noted)


def _forward_in_graph(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], recipe: FP8Recipe, product: torch.dtype, noted: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    state, weight = state_in_graph(x, weights, recipe)
    y, call = _forward(state, x, weight, one_of(biases), product, None, noted)
    return y, *lent(call)


_forward_op = Registered(
    "fp8_linear(Tensor x, Tensor[] weights, Tensor[] biases, FP8Recipe recipe, ScalarType product, bool noted) -> "
    "(Tensor, Tensor, Tensor?, Tensor?)",
    _forward_in_graph,
    lambda x, weights, biases, recipe, product, noted: forward_fake(x, weights, recipe, product),
    FP8Recipe,
    tags=LOOKS_AT_A_STATE,
)


def compiled_product(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], recipe: FP8Recipe, product: torch.dtype, noted: bool
) -> tuple[Tensor, CompiledFP8Call]:
    """Return the product of all weights' rows, in a graph, and what backward needs."""
    y, *kept = _forward_op(x, weights, biases, recipe, product, noted)
    return y, CompiledFP8Call(weights, recipe, recipe.has_wgrad, *kept)


def _run(
    state: FP8Weight | CompiledFP8, x: Tensor, weight: Tensor, bias: Tensor | None, product: torch.dtype,
    layout: TPLayout | None, noted: bool,
) -> tuple[Tensor, FP8Call | CompiledFP8Call]:  # fmt: skip
    """Return y, and what backward needs."""
    if isinstance(state, CompiledFP8):
        return compiled_product(x, [weight], [] if bias is None else [bias], state.recipe, product, noted)
    return _forward(state, x, weight, bias, product, layout, noted)


class _FP8Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, state: FP8Weight | CompiledFP8, product: torch.dtype,
        layout: TPLayout | None, deferred: DeferredWgrad | None,
    ) -> Tensor:  # fmt: skip
        graph_break_if_deferred(deferred)
        y, ctx.fp8 = _run(state, x, weight, bias, product, layout, True)
        ctx.call = weight, bias, main_grads_of(ctx.needs_input_grad[1:], weight, bias), layout, deferred, x.dtype
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None)
        return writable(y)

    @staticmethod
    @not_twice_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x,), fp8 = ctx.saved_tensors, ctx.fp8
        weight, bias, main_grads, layout, deferred, x_type = ctx.call
        x_request, *requests = grad_requests(ctx, True, True, bias is not None)
        asks_x, asks_weight, asks_bias = (each is not GradRequest.SKIP for each in (x_request, *requests))
        later = is_deferred(deferred, weight, requests[0])
        operand = gathering = summing = instead = wide = None
        if asks_weight and fp8.has_wgrad:
            operand = start_operand(fp8, x, later=later)
        elif asks_weight and not later:
            gathering = start_gather(x, layout)
        gradient = fp8.output_gradient(dy, weight, asks_x, asks_weight, later=later)
        if gradient.dx is not None and layout is not None and not layout.by_row:
            summing = start_sum(gradient.dx, layout)
        place = weight, main_grads[0]
        if operand is not None:
            instead = partial(fp8.weight_gradient, gradient.operand, operand, *place, requests[0], deferred if later else None)
        elif later:
            instead = partial(deferred.keep, dy, x, *place, layout)
        elif gathering is not None:
            wide = gradient.rows, cast(rows_of(gathering.wait()), dy.dtype)
        sums = column_sums(dy) if asks_bias else None
        dweight, dbias = linear_gradients((weight, bias), main_grads, requests, sums, wide, instead)
        dx = gradient.dx if summing is None else summing.wait()
        return None if dx is None else cast(dx, x_type), dweight, dbias, None, None, None, None


_apply = fast_apply(_FP8Product)


def fp8_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: FP8Weight | CompiledFP8, layout: TPLayout | None = None,
    deferred: DeferredWgrad | None = None, product: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """Return x @ weight.T + bias, with products in eight bits by the state's recipe, in the type `product`, by default x's."""
    product = product or x.dtype
    if not needs_grad(x, weight, bias):
        return _run(state, x, weight, bias, product, layout, False)[0]
    y: Tensor = _apply(x, weight, bias, state, product, layout, deferred)
    takes_fp8_gradient(y, state, bias, layout)
    return y
