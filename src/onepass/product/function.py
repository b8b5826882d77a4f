"""The autograd Function of linear layers: y = prologue(inputs) @ weight.T + bias, whoever makes the rows and the product.

Saves    what the prologue keeps of its inputs, and the weight where an input's gradient needs it.
Backward on one rank, and where ranks have parts of y's sum: the rows' gradient, the prologue's backward, which makes the rows
         again in its own pass, and the weight's gradient. Where ranks have some of the weight's rows: the rows come from all
         ranks under the product for their gradient, whose sum comes under the weight's; the prologue's backward is last.
Again    where torch.utils.checkpoint computes it again, what is saved is handed over before the product. PyTorch stops with the
         last tensor that backward needs, and so without the last product of a block.
Writes   last: a call that finds no memory has written no main_grad, or says which.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from onepass.distributed.tensor_parallel import column_sums, start_sum
from onepass.gradients.deferred import graph_break_if_deferred, is_deferred
from onepass.gradients.main_grad import (
    GradRequest,
    VectorSums,
    accumulates_elsewhere,
    grad_requests,
    main_grad_of,
    name_written,
    vector_gradients,
)
from onepass.gradients.vectors import VectorGrads, accumulates, saved_vectors, vector_grads
from onepass.product.lora import WITH_ADAPTERS, LoRA, are_masked
from onepass.product.product import PlainProduct, Product
from onepass.product.prologue import Inputs, Kept, Prologue, PrologueGradients, early_saves, save, saved
from onepass.runtime.batch_invariance import invariant
from onepass.runtime.dispatch import fast_apply, needs_grad, not_twice_differentiable, under_functorch, writable

SKIP = GradRequest.SKIP
Grads = Sequence[Tensor | None]
_FIRST = 2  # arguments before the tensors


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, prologue: Prologue, product: Any, *tensors: Any) -> Any:
        """`tensors`: the prologue's inputs, the weight and the bias, as many of both as the product takes, and its adapters'."""
        if product.deferred is not None:
            graph_break_if_deferred(product.deferred)
        ctx.prologue, ctx.count, ctx.row_counts = prologue, len(tensors), None
        needs = ctx.needs_input_grad[_FIRST:]  # read once: autograd makes the tuple anew each time
        ctx.num_adapters = count = product.num_adapters
        if count:
            product = product.bind(tensors[-count:], needs[-count:])
            tensors, needs = tensors[:-count], needs[:-count]
        if product.num_weights > 1:  # they are one that has all their rows
            tensors, needs = _joined(tensors, product.num_weights, tuple), _joined(needs, product.num_weights, any)
        *inputs, weight, bias = tensors
        weights = weight if product.num_weights > 1 else (weight if any(needs[:-2]) else None,)
        early = early_saves(weights)
        y, rows, kept, ctx.product = product.forward(prologue, inputs, weight, bias, needs, None, early)
        if product.num_weights > 1:
            ctx.row_counts, weight, bias = [part.shape[0] for part in weight], weight[0], bias[0]
        weight_place = main_grad_of(weight) if needs[-2] else None
        bias_place = main_grad_of(bias) if bias is not None and needs[-1] else None
        ctx.parameters, ctx.main_grads = (weight, bias), (weight_place, bias_place)
        vectors = len(prologue.vectors)
        ctx.vectors = saved_vectors(ctx, _FIRST + 1, *inputs[1 : 1 + vectors]) if vectors else None
        save(ctx, early, *kept, *weights)
        returns_rows, returns_x = prologue.returns
        if not (returns_rows or returns_x):
            return writable(y)
        ctx.set_materialize_grads(False)
        if returns_x and not (needs[0] or any(needs[1 + vectors : -2])):
            ctx.mark_non_differentiable(kept[0])
        return _results(writable(y), prologue, rows, kept)

    @staticmethod
    @not_twice_differentiable
    def backward(ctx: Any, dy: Tensor | None, *more: Any) -> tuple[Tensor | None, ...]:
        asked, row_counts = grad_requests(ctx, ctx.count, first=_FIRST), ctx.row_counts
        if dy is not None and invariant():
            dy = dy.contiguous()  # stored by columns it would be taken for a weight's gradient's
        product, adapters, tensors = ctx.product, ctx.num_adapters, saved(ctx)
        if adapters:
            asked, asked_of_adapters = asked[:-adapters], asked[-adapters:]
        requests: Sequence[GradRequest] = asked
        if row_counts is None:
            *kept, weight = tensors
        else:
            count = len(row_counts)
            kept, weight, requests = tensors[:-count], tensors[-count:], _joined(asked, count, _request_of_any)
        if adapters:
            product, kept = product.of_pass(kept, asked_of_adapters)
        returns_rows, returns_x = ctx.prologue.returns
        came = more[0] if returns_rows else None, more[-1] if returns_x else None
        layout = product.layout
        if layout is None or layout.by_row or dy is None:
            grads, of_adapters = _alone(ctx, product, weight, kept, requests, dy, *came)
        else:
            grads, of_adapters = _over_ranks(ctx, product, weight, kept, requests, dy, *came)
        return None, None, *(grads if row_counts is None else _of_parts(grads, row_counts, asked)), *of_adapters


def _alone(
    ctx: Any, product: Any, weight: Any, kept: Kept, requests: Sequence[GradRequest], dy: Tensor | None, drows: Tensor | None,
    dx: Tensor | None,
) -> tuple[Grads, Grads]:  # fmt: skip
    """The prologue's backward makes the rows again, in its own pass. Return all gradients, and those of adapters."""
    prologue, adapts = ctx.prologue, ctx.num_adapters > 0 and dy is not None
    *of_inputs, of_weight, of_bias = requests
    asks_inputs, asks_weight = _any(of_inputs), of_weight is not SKIP and dy is not None
    later = product.deferred is not None and is_deferred(product.deferred, ctx.parameters[0], of_weight)
    vectors = None if ctx.vectors is None else _vectors(ctx, of_inputs)
    sums = None if dy is None or of_bias is SKIP else column_sums(dy)
    dy_operand = None
    if dy is not None and (asks_inputs or asks_weight or adapts):
        drows, dy_operand = product.output_gradient(dy, weight, drows, asks_inputs, asks_weight, later=later)
    if asks_inputs or asks_weight:
        target = product.target if asks_weight else None
        made = prologue.backward(
            kept, vectors, drows if asks_inputs else None, dx, of_inputs,
            rebuild=target is None and (asks_weight or (adapts and product.asks_a)), target=target, ours=dy is not None,
            u=product.u_of_rows if adapts and not asks_weight else None,
        )  # fmt: skip
    else:
        made = PrologueGradients([None] * len(of_inputs))
    rows = product.start_input(prologue, kept, made, later=later) if asks_weight else None
    if vectors is None:
        adapters = _of_adapters(product, prologue, kept, made, dy) if adapts else ()
        (dbias, *of_adapters), dweight = _put(ctx, product, rows, dy_operand, requests, sums, adapters, later)
        return (*made.inputs, dweight, dbias), of_adapters
    inputs, count = list(made.inputs), len(prologue.vectors)
    pending = vectors.pending(made.into, *inputs[1 : 1 + count])
    with name_written(_written(prologue, vectors, made.into)):
        adapters = _of_adapters(product, prologue, kept, made, dy) if adapts else ()
        (dbias, *put), dweight = _put(ctx, product, rows, dy_operand, requests, sums, [*pending, *adapters], later)
    inputs[1 : 1 + count] = vectors.autograd_grads(made.into, put[:count])
    return (*inputs, dweight, dbias), put[count:]


def _of_adapters(product: Any, prologue: Prologue, kept: Kept, made: PrologueGradients | None, dy: Tensor | None) -> Any:
    """Make the gradients of adapters of the rows that the prologue's backward has made again, or of others."""
    da = None if made is None else made.da
    return product.gradients(dy, lambda: prologue.rows_again(kept) if made is None or made.rows is None else made.rows, da)


def _over_ranks(
    ctx: Any, product: Any, weight: Any, kept: Kept, requests: Sequence[GradRequest], dy: Tensor, drows: Tensor | None,
    dx: Tensor | None,
) -> tuple[Grads, Grads]:  # fmt: skip
    """Rows come from all ranks under the product for their gradient, whose sum comes under the product for the weight."""
    prologue = ctx.prologue
    *of_inputs, of_weight, of_bias = requests
    asks_inputs, asks_weight = _any(of_inputs), of_weight is not SKIP
    later = is_deferred(product.deferred, ctx.parameters[0], of_weight)
    rows = product.start_input(prologue, kept, None, later=later) if asks_weight else None
    through, dy_operand = product.output_gradient(dy, weight, None, asks_inputs, asks_weight, later=later)
    summing = start_sum(through, product.layout) if asks_inputs else None
    sums = None if of_bias is SKIP else column_sums(dy)
    adapters = _of_adapters(product, prologue, kept, None, dy) if ctx.num_adapters else ()
    (dbias, *of_adapters), dweight = _put(ctx, product, rows, dy_operand, requests, sums, adapters, later)
    if summing is None:
        return (*[None for _ in of_inputs], dweight, dbias), of_adapters
    vectors, names = _vectors(ctx, of_inputs), zip(("weight", "bias"), ctx.parameters, requests[-2:], strict=True)
    written = [name for name, parameter, request in names if accumulates(parameter, request)]
    with name_written(written):
        through = summing.wait()
        drows = through if drows is None else through + drows
        made = prologue.backward(kept, vectors, drows, dx, of_inputs)
    inputs = list(made.inputs)
    if vectors is not None:
        with name_written([*written, *_written(prologue, vectors, made.into)]):
            found = inputs[1 : 1 + len(prologue.vectors)]
            inputs[1 : 1 + len(prologue.vectors)] = vectors.put(made.into, *found)
    return (*inputs, dweight, dbias), of_adapters


def _joined(values: Sequence[Any], count: int, join: Callable[[Any], Any]) -> tuple[Any, ...]:
    """Join the last values: `count` of the weights, and as many of their biases."""
    return *values[: -2 * count], join(values[-2 * count : -count]), join(values[-count:])


def _request_of_any(requests: Sequence[GradRequest]) -> GradRequest:
    return GradRequest.ACCUMULATE if _any(requests) else SKIP


def _of_parts(grads: Grads, row_counts: list[int], requests: Sequence[GradRequest]) -> Grads:
    """Split the gradients of all weights and of all biases."""
    *of_inputs, dweight, dbias = grads
    no_parts = [None] * len(row_counts)
    dweights, dbiases = (no_parts if grad is None else grad.split(row_counts) for grad in (dweight, dbias))
    each = zip((*of_inputs, *dweights, *dbiases), requests, strict=True)
    return [None if request is SKIP else grad for grad, request in each]


def _any(requests: Sequence[GradRequest]) -> bool:
    return requests.count(SKIP) < len(requests)


def _vectors(ctx: Any, of_inputs: Sequence[GradRequest]) -> VectorGrads | None:
    if ctx.vectors is None:
        return None
    return vector_grads(ctx.vectors, of_inputs[1 : 1 + len(ctx.prologue.vectors)])


def _written(prologue: Prologue, vectors: VectorGrads | None, into: Any) -> list[str]:
    """Return the names of the vectors whose main_grad the prologue's kernel has written."""
    return [] if vectors is None or into is None else vectors.accumulated(*prologue.vectors)


def _results(y: Tensor, prologue: Prologue, rows: Tensor | None, kept: Kept) -> Any:
    """Return y, and after it what else the call returns."""
    returns_rows, returns_x = prologue.returns
    more = (*((rows,) if returns_rows else ()), *((kept[0],) if returns_x else ()))
    return (y, *more) if more else y


def _put(
    ctx: Any, product: Any, rows: Callable[[], Any] | None, dy: Any, requests: Sequence[GradRequest], sums: Tensor | None,
    vectors: Sequence[VectorSums | None], later: bool,
) -> tuple[list[Tensor | None], Tensor | None]:  # fmt: skip
    """Put gradients where they belong. Return what autograd gets of the bias and `vectors`, and of the weight.

    Args:
        rows, dy: what the weight's gradient is made of. None is no gradient.
        sums: dy's `column_sums`, or None where the pass does not want the bias's gradient.
        later: the weight's gradient is deferred.
    """
    (weight, bias), (weight_place, bias_place) = ctx.parameters, ctx.main_grads
    of_weight, of_bias = requests[-2:]
    work = None
    if rows is not None:
        work = partial(product.weight_gradient, dy, rows, weight, weight_place, of_weight, later=later)
    if sums is None and not vectors:
        return [None], None if work is None else work()
    return vector_gradients([None if sums is None else (sums, bias, bias_place, of_bias), *vectors], work)


_apply = fast_apply(_Linear)


# ---- for ops ----

def run_linear(
    prologue: Prologue, product: Product, inputs: Inputs, weight: Tensor, bias: Tensor | None, adapters: Sequence[LoRA] = ()
) -> Any:  # fmt: skip
    """Return y, and after it what else the prologue returns."""
    if adapters:
        return _run_with_adapters(prologue, product, inputs, weight, bias, adapters)
    if not (torch.is_grad_enabled() and (weight.requires_grad or needs_grad(bias, *inputs))):
        y, rows, kept, _ = product.forward(prologue, inputs, weight, bias, None)
        return _results(y, prologue, rows, kept)
    results = _apply(prologue, product, *inputs, weight, bias)
    product.mark_output(results[0] if isinstance(results, tuple) else results, bias)
    return results


def _run_with_adapters(
    prologue: Prologue, product: Product, inputs: Inputs, weight: Tensor, bias: Tensor | None, adapters: Sequence[LoRA]
) -> Any:  # fmt: skip
    x = inputs[0]
    assert x is not None
    with_adapters, tensors = WITH_ADAPTERS[LoRA](product, adapters, x, weight)
    if needs_grad(weight, bias, *inputs, *tensors):
        results = _apply(prologue, with_adapters, *inputs, weight, bias, *tensors)
        with_adapters.mark_output(results[0] if isinstance(results, tuple) else results, bias)
        return results
    y, rows, kept, _ = with_adapters.bind(tensors, ()).forward(prologue, inputs, weight, bias, None)
    return _results(y, prologue, rows, kept)


def run_packed_linear(
    prologue: Prologue, product: Product, inputs: Inputs, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
) -> Any:  # fmt: skip
    """`run_linear` of a product of several weights, and as many biases or none."""
    biases = biases or (None,) * len(weights)
    if not needs_grad(*inputs, *weights, *biases):
        y, rows, kept, _ = product.forward(prologue, inputs, weights, biases, None)
        return _results(y, prologue, rows, kept)
    return _apply(prologue, product, *inputs, *weights, *biases)


def is_plain(product: Product, weight: Tensor, bias: Tensor | None, adapters: Sequence[LoRA] = ()) -> bool:
    """Whether F.linear does all that the product does: gradients go to autograd, and nothing to other ranks."""
    if type(product) is not PlainProduct or product.layout is not None:
        return False
    if under_functorch():
        return True
    if adapters and are_masked(adapters):
        return False
    if adapters and any([accumulates_elsewhere(tensor) for adapter in adapters for tensor in adapter[:2]]):
        return False
    return not (accumulates_elsewhere(weight) or accumulates_elsewhere(bias))


def multiply_rows(
    x: Tensor, weight: Tensor, bias: Tensor | None, product: Product, dtype: torch.dtype, adapters: Sequence[LoRA] = ()
) -> Tensor:  # fmt: skip
    """Return x @ weight.T + bias in `dtype`."""
    return run_linear(product.rows_in(x.dtype, dtype), product, (x,), weight, bias, adapters)  # type: ignore[no-any-return]
