"""The product of a linear layer whose parameters' gradients go to main_grad, to autograd, or to `DeferredWgrad`.

parallel/tensor_parallel.py divides it over ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from onepass.gradients.main_grad import GradRequest, grad_requests, main_grad_of, vector_gradient, weight_gradient
from onepass.parallel.tensor_parallel import (
    TPLayout,
    column_sums,
    input_gradient,
    row_gradients,
    rows_of,
    start_gather,
    start_input_gradient,
    tp_product,
)
from onepass.runtime.dispatch import cast, fast_apply, not_twice_differentiable

if TYPE_CHECKING:
    from onepass.gradients.deferred import DeferredWgrad


def is_deferred(deferred: DeferredWgrad | None, weight: Tensor, request: GradRequest) -> bool:
    """Whether backward keeps the operands of the weight's gradient instead of making it."""
    return deferred is not None and deferred.takes(weight, request)


def describe_products(deferred: DeferredWgrad | None) -> str:
    """Return what `explain` says of the products."""
    return "products by cuBLAS" if deferred is None else "products by cuBLAS, the weight's gradient's in flush()"


def graph_break_if_deferred(deferred: DeferredWgrad | None) -> None:
    """Break the graph in the forward of a Function that may defer a gradient: a compiled graph can't keep its operands."""
    if deferred is not None and torch.compiler.is_compiling():
        torch._dynamo.graph_break(msg="onepass: a compiled graph can't keep what a deferred gradient is made of")


class _LinearProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layout: TPLayout | None, deferred: DeferredWgrad | None
    ) -> Tensor:
        graph_break_if_deferred(deferred)
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad  # read once: autograd makes the tuple anew each time
        weight_place = main_grad_of(weight) if needs_weight else None  # main_grads_of would take 2 us of a 20 us call
        bias_place = main_grad_of(bias) if bias is not None and needs_bias else None
        ctx.call = weight, bias, (weight_place, bias_place), layout, deferred
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None)
        return tp_product(x, weight, bias, layout)

    @staticmethod
    @not_twice_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        own_weight, own_bias, main_grads, layout, deferred = ctx.call
        x_request, weight_request, bias_request = grad_requests(ctx, True, True, own_bias is not None)
        weight = cast(weight, dy.dtype) if x_request is not GradRequest.SKIP else None
        x = x if weight_request is not GradRequest.SKIP else None
        dweight = dbias = None
        if is_deferred(deferred, own_weight, weight_request):
            dweight, x = deferred.keep(dy, x, own_weight, main_grads[0], layout), None
        whole_dy, dx, gathering, summing = dy, None, None, None
        if layout is None:
            dx = None if weight is None else input_gradient(dy, weight)
        elif layout.by_row:
            whole_dy, dx = row_gradients(dy, weight, x is not None, layout)
        else:
            gathering = None if x is None else start_gather(x, layout)
            summing = None if weight is None else start_input_gradient(dy, weight, layout)
        if bias_request is not GradRequest.SKIP:
            dbias = vector_gradient(column_sums(dy), own_bias, main_grads[1], bias_request)
        if x is not None:
            rows = rows_of(whole_dy), rows_of(x if gathering is None else gathering.wait())
            dweight = weight_gradient(*rows, own_weight, main_grads[0], weight_request)
        return dx if summing is None else summing.wait(), dweight, dbias, None, None


_apply = fast_apply(_LinearProduct)


def linear_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, layout: TPLayout | None = None, deferred: DeferredWgrad | None = None
) -> Tensor:
    """Return x @ weight.T + bias. x has the product's type, and parameters are rounded to it."""
    y: Tensor = _apply(x, weight, bias, layout, deferred)
    return y
