"""The products of a grouped linear layer, in their own type or in eight bits, and where its weight's gradient goes.

Eight bits  x, dy and the weight are e4m3, at a scale a row: rows of the weight in forward, its columns in backward. PyTorch's
            grouped product takes nothing else, so a layer's recipe says no more than that it is asked for. No scale outlasts a
            call. The weight's codes do, between updates (gradients/fp8_weight.py). Its gradient is a product in 16 bits.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass.gradients.fp8_compiled import LOOKS_AT_A_STATE
from onepass.gradients.fp8_weight import FP8Operand, fp8_weight
from onepass.gradients.main_grad import (
    GradRequest,
    accumulation_target,
    add_gradient,
    add_to_sum,
    grad_requests,
    main_grads_of,
    mark_added,
    name_written,
    placeholder,
    vector_gradient,
)
from onepass.kernels.fp8_cast import cast_rows
from onepass.kernels.grouped_product import (
    group_rows,
    grouped_product,
    scaled_grouped_product,
    torch_can_group,
    unfit_for_scaled_groups,
)
from onepass.runtime.dispatch import TORCH, cast, fast_apply, needs_grad, not_twice_differentiable, under_functorch
from onepass.runtime.fp8 import E4M3, check_fp8
from onepass.runtime.fp8_recipe import FP8Recipe, Precision, recipe_of
from onepass.runtime.op import Registered

GROUPED_RECIPE = FP8Recipe(scaling="row", format="e4m3")  # what PyTorch's grouped product takes
_log = logging.getLogger("onepass")


def unfit_for_grouped_fp8(precision: Precision, x: Tensor, weight: Tensor, product: torch.dtype) -> str | None:
    """Return why a layer's products can't be in eight bits, or None. Raise where no product on this device can."""
    if recipe_of(precision) is None:
        return "no precision asks for it"
    check_fp8(x, weight)
    if under_functorch():
        raise RuntimeError("precision must be None under vmap and functional derivatives: a product in eight bits keeps state")
    unfit = unfit_for_scaled_groups(weight.shape, product, weight.device)
    if unfit is not None and not torch.compiler.is_compiling():
        _say(unfit, product)
    return unfit if x.numel() else "there is nothing to do"


@lru_cache
def _say(unfit: str, product: torch.dtype) -> None:
    """Log a reason, once."""
    _log.info("experts' products run in %s, and not in eight bits: %s", product, unfit)


# ---- products in eight bits ----


def fp8_grouped_forward(x: FP8Operand, weight: Tensor, ends: Tensor, product: torch.dtype, noted: bool) -> Tensor:
    """Return the product of x's codes. `noted`: a backward follows, and may come to need the weight's other codes."""
    state = fp8_weight(weight, GROUPED_RECIPE)
    state.update(weight)
    rows = state.rows(weight, lasting=not noted)
    return scaled_grouped_product(*x, *rows, ends, product)


def _forward(x: Tensor, weight: Tensor, ends: Tensor, product: torch.dtype, noted: bool) -> Tensor:
    check_fp8(x, weight)
    return fp8_grouped_forward(FP8Operand(*cast_rows(x, E4M3)), weight, ends, product, noted)


def _input_gradient(dy: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    check_fp8(dy, weight)
    state = fp8_weight(weight, GROUPED_RECIPE)
    state.update(weight)  # for a weight that a compiled graph makes, and may make again in backward
    state.backwards += 1
    return scaled_grouped_product(*cast_rows(dy, E4M3), *state.turned(weight), ends, dy.dtype)


_forward_op = Registered(
    "fp8_grouped_linear(Tensor x, Tensor weight, Tensor ends, ScalarType product, bool noted) -> Tensor",
    _forward,
    lambda x, weight, ends, product, noted: x.new_empty((x.shape[0], weight.shape[1]), dtype=product),
    tags=LOOKS_AT_A_STATE,
)
fp8_input_gradient_op = Registered(
    "fp8_grouped_input_gradient(Tensor dy, Tensor weight, Tensor ends) -> Tensor",
    _input_gradient,
    lambda dy, weight, ends: dy.new_empty((dy.shape[0], weight.shape[2])),
    tags=LOOKS_AT_A_STATE,
)


# ---- the gradient of the weight ----


def grouped_weight_gradient(
    dy: Tensor, x: Tensor, ends: Tensor, weight: Tensor, main_grad: Tensor | None, request: GradRequest
) -> Tensor | None:
    """Put dy[rows of e].T @ x[rows of e] where the pass wants it, and return what autograd gets. dy and x have the same type."""
    if dy.shape[0] and torch_can_group(dy, weight):  # PyTorch's refuses no rows
        return vector_gradient(F.grouped_mm(dy.mT, x, offs=ends), weight, main_grad, request)
    # a graph's sums are made first: whether main_grad was written in this step is not known when it is traced
    place = None if torch.compiler.is_compiling() else accumulation_target(weight, main_grad, request)
    into, add = (torch.zeros_like(weight), add_to_sum) if place is None else (place, add_gradient)
    grad = None if place is None else placeholder(weight, request)
    for expert, rows in enumerate(group_rows(ends)):
        with name_written(["weight"] if place is not None and expert else []):
            add(into[expert], dy[rows], x[rows], True)
    if place is not None:
        mark_added(weight)
        return grad
    return vector_gradient(into, weight, main_grad, request)


# ---- autograd ----


def graph_break_before_2_10() -> None:
    """Break the graph in the forward of a Function whose backward takes each expert's rows, which are known when it runs."""
    if TORCH < (2, 10) and torch.compiler.is_compiling():
        torch._dynamo.graph_break(msg="onepass: experts' products are part of a graph from PyTorch 2.10 on")


class _GroupedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor, product: torch.dtype, in_fp8: bool) -> Tensor:
        graph_break_before_2_10()
        ctx.weight, ctx.main_grad = weight, main_grads_of(ctx.needs_input_grad[1:], weight)[0]
        ctx.in_fp8, ctx.x_type = in_fp8, x.dtype
        x = x if in_fp8 else cast(x, product)
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight if ctx.needs_input_grad[0] else None, ends)
        if in_fp8:
            return _forward_op(x, weight, ends, product, True)  # type: ignore[no-any-return]
        return grouped_product(x, cast(weight, product), ends)

    @staticmethod
    @not_twice_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, ends = ctx.saved_tensors
        dy = dy.contiguous()  # PyTorch's product takes no expanded tensor
        x_request, weight_request = grad_requests(ctx, True, True)
        dx = dweight = None
        if x_request is not GradRequest.SKIP:
            if ctx.in_fp8:
                dx = fp8_input_gradient_op(dy, ctx.weight, ends)  # which has the state, as a saved tensor may not
            else:
                dx = grouped_product(dy, cast(weight, dy.dtype).mT, ends)
            dx = cast(dx, ctx.x_type)
        if weight_request is not GradRequest.SKIP:
            dweight = grouped_weight_gradient(dy, cast(x, dy.dtype), ends, ctx.weight, ctx.main_grad, weight_request)
        return dx, dweight, None, None, None


_apply = fast_apply(_GroupedProduct)


def grouped_linear_product(x: Tensor, weight: Tensor, ends: Tensor, product: torch.dtype, in_fp8: bool) -> Tensor:
    """Return x @ weight[e].T for each expert's rows, in the type `product`."""
    if in_fp8 and not needs_grad(x, weight):
        return _forward_op(x, weight, ends, product, False)  # type: ignore[no-any-return]
    y: Tensor = _apply(x, weight, ends, product, in_fp8)
    return y
