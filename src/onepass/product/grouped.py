"""The autograd Function of grouped linear layers: rows sorted by expert, in their own type or in eight bits.

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

from onepass.gradients.main_grad import (
    GradRequest,
    accumulation_target,
    add_gradient,
    add_to_sum,
    grad_requests,
    main_grad_of,
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
from onepass.product.fp8.rows import FP8Rows
from onepass.product.prologue import Inputs, Kept, Needs
from onepass.product.rows import Rows
from onepass.runtime.dispatch import TORCH, cast, fast_apply, needs_grad, not_twice_differentiable, under_functorch
from onepass.runtime.fp8 import E4M3, FP8Target, check_fp8
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


def _scaled_product(codes: Tensor, inverse: Tensor, weight: Tensor, ends: Tensor, product: torch.dtype) -> Tensor:
    return scaled_grouped_product(codes, inverse, *cast_rows(weight.detach(), E4M3), ends, product)


def _forward_in_graph(x: Tensor, weight: Tensor, ends: Tensor, product: torch.dtype) -> Tensor:
    check_fp8(x, weight)
    return _scaled_product(*cast_rows(x, E4M3), weight, ends, product)


def _input_gradient(dy: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    check_fp8(dy, weight)
    return scaled_grouped_product(*cast_rows(dy, E4M3), *cast_columns(weight.detach()), ends, dy.dtype)


_forward_op = Registered(
    "fp8_grouped_linear(Tensor x, Tensor weight, Tensor ends, ScalarType product) -> Tensor",
    _forward_in_graph,
    lambda x, weight, ends, product: x.new_empty((x.shape[0], weight.shape[1]), dtype=product),
)
_input_gradient_op = Registered(
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


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, prologue: Any, in_fp8: bool, *tensors: Tensor) -> Tensor:
        """`tensors`: the prologue's inputs, the weight and the ends."""
        if TORCH < (2, 10) and torch.compiler.is_compiling():  # backward takes each expert's rows, known when it runs
            torch._dynamo.graph_break(msg="onepass: experts' products are part of a graph from PyTorch 2.10 on")
        *inputs, weight, ends = tensors
        needs = ctx.needs_input_grad[_FIRST:]
        ctx.prologue, ctx.in_fp8, ctx.count = prologue, in_fp8, len(inputs) + 1
        ctx.weight, ctx.main_grad = weight, main_grad_of(weight) if needs[-2] else None
        y, kept = _forward(prologue, in_fp8, inputs, weight, ends, needs)
        ctx.save_for_backward(weight if any(needs[:-2]) else None, ends, *kept)
        return y

    @staticmethod
    @not_twice_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        weight, ends, *kept = ctx.saved_tensors
        dy = dy.contiguous()  # PyTorch's product takes no expanded tensor
        *of_inputs, of_weight = grad_requests(ctx, ctx.count, first=_FIRST)
        asks_weight, drows, dweight = of_weight is not GradRequest.SKIP, None, None
        if any([request is not GradRequest.SKIP for request in of_inputs]):
            in_fp8 = ctx.in_fp8
            drows = _input_gradient_op(dy, weight, ends) if in_fp8 else grouped_product(dy, cast(weight, dy.dtype).mT, ends)
        made = ctx.prologue.backward(kept, None, drows, None, of_inputs, rebuild=asks_weight)
        if asks_weight:
            rows = cast(made.rows, dy.dtype)
            dweight = grouped_weight_gradient(dy, rows, ends, ctx.weight, ctx.main_grad, of_weight)
        return None, None, *made.inputs, dweight, None


_FIRST = 2  # arguments before the tensors
_apply = fast_apply(_GroupedLinear)


def _forward(
    prologue: Any, in_fp8: bool, inputs: Inputs, weight: Tensor, ends: Tensor, needs: Needs
) -> tuple[Tensor, Kept]:  # fmt: skip
    if not in_fp8:
        rows, kept = prologue.rows(inputs, needs)
        return grouped_product(rows, cast(weight, rows.dtype), ends), kept
    if torch.compiler.is_compiling():  # formulas have made the rows, which the op rounds
        return _forward_op(inputs[0], weight, ends, prologue.dtype), prologue.rows(inputs, needs)[1]
    (codes, inverse), kept = prologue.codes(inputs, FP8Target(E4M3), needs)
    assert inverse is not None
    return _scaled_product(codes, inverse, weight, ends, prologue.dtype), kept


def run_grouped_linear(prologue: Any, inputs: Inputs, weight: Tensor, ends: Tensor, *, in_fp8: bool) -> Tensor:
    """Return rows @ weight[e].T for each expert's rows, in the prologue's type."""
    if not needs_grad(*inputs, weight):
        return _forward(prologue, in_fp8, inputs, weight, ends, None)[0]
    y: Tensor = _apply(prologue, in_fp8, *inputs, weight, ends)
    return y


def multiply_grouped_rows(x: Tensor, weight: Tensor, ends: Tensor, product: torch.dtype, in_fp8: bool) -> Tensor:
    """Return x @ weight[e].T for each expert's rows, in the type `product`."""
    x = x if in_fp8 else cast(x, product)
    rows = FP8Rows if in_fp8 else Rows
    return run_grouped_linear(rows(x.dtype, product), (x,), weight, ends, in_fp8=in_fp8)
