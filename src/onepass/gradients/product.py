"""The product of a linear layer whose parameters' gradients go to main_grad, to autograd, or to `DeferredWgrad`.

parallel/tensor_parallel.py divides it over ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from onepass.gradients.main_grad import (
    GradRequest,
    VectorSums,
    add_vector_gradient,
    grad_requests,
    main_grad_of,
    prepare_vector_gradient,
    weight_gradient,
)
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
from onepass.runtime.dispatch import cast, fast_apply, not_twice_differentiable, writable

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


def linear_gradients(
    parameters: tuple[Tensor, Tensor | None],
    main_grads: Sequence[Tensor | None],
    requests: Sequence[GradRequest],
    sums: Tensor | None,
    rows: tuple[Tensor, Tensor] | None,
    instead: Callable[[], Tensor | None] | None = None,
    vectors: Sequence[VectorSums | None] = (),
) -> tuple[Tensor | None, ...]:
    """Put the gradients of a weight, a bias and `vectors` where they belong, and return what autograd gets.

    Call it last in a backward. The vectors' main_grads are written after the product, which may find no memory: a failed call has
    written none.

    Args:
        parameters, main_grads, requests: the weight's and the bias's.
        sums: dy's `column_sums`, or None where the pass does not want the bias's gradient.
        rows: those of dy and x, or None where the weight's gradient is made otherwise or not wanted.
        instead: does in the place of the product for the weight what returns its gradient: keeps the operands where it is
            deferred, or makes a product in eight bits.
    """
    (weight, bias), dweight, put = parameters, None, None
    adds, dbias = False, None
    if sums is not None and bias is not None:
        dbias, adds = prepare_vector_gradient(sums, bias, main_grads[1], requests[1])
    if vectors:
        put = [(None, False) if each is None else prepare_vector_gradient(*each) for each in vectors]
    if instead is not None:
        dweight = instead()
    elif rows is not None:
        dweight = weight_gradient(rows[0], rows[1], weight, main_grads[0], requests[0])
    if sums is not None and bias is not None and adds:
        add_vector_gradient(sums, bias, main_grads[1], requests[1])
    if put is None:
        return dweight, dbias
    for each, (_, adds) in zip(vectors, put, strict=True):
        if each is not None and adds:
            add_vector_gradient(*each)
    return dweight, dbias, *[grad for grad, _ in put]


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
        return writable(tp_product(x, weight, bias, layout))

    @staticmethod
    @not_twice_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        own_weight, own_bias, main_grads, layout, deferred = ctx.call
        x_request, *requests = grad_requests(ctx, True, True, own_bias is not None)
        weight = cast(weight, dy.dtype) if x_request is not GradRequest.SKIP else None
        keep = rows = None
        if is_deferred(deferred, own_weight, requests[0]):
            keep, x = partial(deferred.keep, dy, x, own_weight, main_grads[0], layout), None
        elif requests[0] is GradRequest.SKIP:
            x = None
        whole_dy, dx, gathering, summing = dy, None, None, None
        if layout is None:
            dx = None if weight is None else input_gradient(dy, weight)
        elif layout.by_row:
            whole_dy, dx = row_gradients(dy, weight, x is not None, layout)
        else:
            gathering = None if x is None else start_gather(x, layout)
            summing = None if weight is None else start_input_gradient(dy, weight, layout)
        sums = None if requests[1] is GradRequest.SKIP else column_sums(dy)
        if x is not None:
            rows = rows_of(whole_dy), rows_of(x if gathering is None else gathering.wait())
        dweight, dbias = linear_gradients((own_weight, own_bias), main_grads, requests, sums, rows, keep)
        return dx if summing is None else summing.wait(), dweight, dbias, None, None


_apply = fast_apply(_LinearProduct)


def linear_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, layout: TPLayout | None = None, deferred: DeferredWgrad | None = None
) -> Tensor:
    """Return x @ weight.T + bias. x has the product's type, and parameters are rounded to it."""
    y: Tensor = _apply(x, weight, bias, layout, deferred)
    return y
