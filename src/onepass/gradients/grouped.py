"""The products of a grouped linear layer, in their own type or in eight bits, and where its weight's gradient goes.

Eight bits  x, dy and the weight are e4m3, at a scale a row: rows of the weight in forward, its columns in backward. PyTorch's
            grouped product takes nothing else, so a layer's recipe says no more than that it is asked for. No scale and no code
            outlasts a call. The weight's gradient is a product in 16 bits.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass.gradients.fp8_weight import FP8Operand
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
from onepass.kernels.fp8_cast import cast_columns, cast_rows
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


def fp8_grouped_forward(x: FP8Operand, weight: Tensor, ends: Tensor, product: torch.dtype) -> Tensor:
    """Return the product of x's codes."""
    return scaled_grouped_product(*x, *cast_rows(weight.detach(), E4M3), ends, product)


def _forward(x: Tensor, weight: Tensor, ends: Tensor, product: torch.dtype) -> Tensor:
    check_fp8(x, weight)
    return fp8_grouped_forward(FP8Operand(*cast_rows(x, E4M3)), weight, ends, product)


def _input_gradient(dy: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    check_fp8(dy, weight)
    return scaled_grouped_product(*cast_rows(dy, E4M3), *cast_columns(weight.detach()), ends, dy.dtype)


_forward_op = Registered(
    "fp8_grouped_linear(Tensor x, Tensor weight, Tensor ends, ScalarType product) -> Tensor",
    _forward,
    lambda x, weight, ends, product: x.new_empty((x.shape[0], weight.shape[1]), dtype=product),
)
fp8_input_gradient_op = Registered(
    "fp8_grouped_input_gradient(Tensor dy, Tensor weight, Tensor ends) -> Tensor",
    _input_gradient,
    lambda dy, weight, ends: dy.new_empty((dy.shape[0], weight.shape[2])),
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
            return _forward_op(x, weight, ends, product)  # type: ignore[no-any-return]
        return grouped_product(x, cast(weight, product), ends)

    @staticmethod
    @not_twice_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, ends = ctx.saved_tensors
        dy = dy.contiguous()  # PyTorch's product takes no expanded tensor
        x_request, weight_request = grad_requests(ctx, True, True)
        dx = dweight = None
        if x_request is not GradRequest.SKIP:
            in_fp8 = ctx.in_fp8
            dx = fp8_input_gradient_op(dy, weight, ends) if in_fp8 else grouped_product(dy, cast(weight, dy.dtype).mT, ends)
            dx = cast(dx, ctx.x_type)
        if weight_request is not GradRequest.SKIP:
            dweight = grouped_weight_gradient(dy, cast(x, dy.dtype), ends, ctx.weight, ctx.main_grad, weight_request)
        return dx, dweight, None, None, None


_apply = fast_apply(_GroupedProduct)


def grouped_linear_product(x: Tensor, weight: Tensor, ends: Tensor, product: torch.dtype, in_fp8: bool) -> Tensor:
    """Return x @ weight[e].T for each expert's rows, in the type `product`."""
    if in_fp8 and not needs_grad(x, weight):
        return _forward_op(x, weight, ends, product)  # type: ignore[no-any-return]
    y: Tensor = _apply(x, weight, ends, product, in_fp8)
    return y
