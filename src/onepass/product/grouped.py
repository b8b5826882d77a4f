"""The autograd Function of grouped linear layers: rows sorted by expert, in their own type or in eight bits.

LoRA        t = scale * rows @ a[e].T, and y += t @ b[e].T. The weight's products, and all else, stay as they are.
Eight bits  x, dy and the weight are e4m3, at a scale a row: rows of the weight in forward, its columns in backward. PyTorch's
            grouped product takes nothing else, so a layer's recipe says no more than that it is asked for. No scale and no code
            outlasts a call. The weight's gradient is a product in 16 bits.
"""

from __future__ import annotations

import logging
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

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
from onepass.gradients.releasable_storage import is_first_write, mark_written
from onepass.gradients.written_names import WrittenNames, names_written, note_written
from onepass.kernels.fp8_cast import cast_columns, cast_rows
from onepass.kernels.grouped_product import (
    gradient_by_group,
    group_rows,
    grouped_gradient,
    grouped_product,
    scaled_grouped_product,
    torch_can_group,
    unfit_for_scaled_groups,
)
from onepass.kernels.low_rank import NO_DROPOUT, lora_expand, lora_gradient, lora_shrink
from onepass.kernels.quack_product import add_by_quack, quack_adds
from onepass.product.fp8.rows import FP8Rows
from onepass.product.lora import LoRA
from onepass.product.prologue import Inputs, Keep, Kept, Needs, early_saves, save, saved
from onepass.product.rows import Rows
from onepass.runtime.dispatch import cast, fast_apply, needs_grad, not_twice_differentiable, under_functorch
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
    dy: Tensor, x: Tensor, ends: Tensor, weight: Tensor, main_grad: Tensor | None, request: GradRequest, name: str = "weight"
) -> Tensor | None:
    """Put dy[rows of e].T @ x[rows of e] where the pass wants it, and return what autograd gets. dy and x have the same type.

    `name`: what errors call the weight.
    """
    if dy.shape[0] and torch_can_group(dy, weight):  # PyTorch's refuses no rows
        if main_grad is not None and quack_adds(dy, main_grad, x):
            place = accumulation_target(weight, main_grad, request)
            if place is not None:
                grad = placeholder(weight, request)
                first_write = is_first_write(place)
                add_by_quack(place, dy, x, ends, keep=not first_write)
                if first_write:
                    mark_written(place)
                mark_added(weight)
                return grad
        return vector_gradient(grouped_gradient(dy, x, ends), weight, main_grad, request)
    if torch.compiler.is_compiling():  # whether main_grad was written in this step is not known when a graph is traced
        return vector_gradient(gradient_by_group(dy, x, ends), weight, main_grad, request)
    place = accumulation_target(weight, main_grad, request)
    into, add = (torch.zeros_like(weight), add_to_sum) if place is None else (place, add_gradient)
    grad = None if place is None else placeholder(weight, request)
    for expert, rows in enumerate(group_rows(ends)):
        with name_written([name] if place is not None and expert else []):
            add(into[expert], dy[rows], x[rows], True)
    if place is not None:
        mark_added(weight)
        return grad
    return vector_gradient(into, weight, main_grad, request)


# ---- autograd ----


class GroupedOptions(NamedTuple):
    """What a layer of experts takes beside its tensors."""

    precision: Precision = None
    transposed: bool = False  # the weight is [E, K, N]
    lora: LoRA | None = None  # with a [E, r, K] and b [E, N, r]
    name: str = "weight"  # what errors call the weight
    written: WrittenNames | None = None  # by other functions of the same call

    def product(self, x: Tensor, weight: Tensor, dtype: torch.dtype) -> GroupedProduct:
        """Return how rows are multiplied. The logger ``onepass`` says why they can't be in eight bits."""
        whole = weight.mT if self.transposed else weight
        in_fp8 = self.precision is not None and unfit_for_grouped_fp8(self.precision, x, whole, dtype) is None
        scale = 1.0 if self.lora is None else float(self.lora.scale)
        return GroupedProduct(in_fp8, self.transposed, scale, self.name, self.written)


class GroupedProduct(NamedTuple):
    """How rows of experts are multiplied with their weights."""

    in_fp8: bool
    transposed: bool
    scale: float  # of LoRA
    name: str
    written: WrittenNames | None


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, prologue: Any, product: GroupedProduct, *tensors: Tensor | None) -> Tensor:
        """`tensors`: the prologue's inputs, the weight, a and b of LoRA or None, and the ends."""
        *inputs, weight, a, b, ends = tensors
        assert weight is not None
        needs = ctx.needs_input_grad[_FIRST:]
        ctx.prologue, ctx.product, ctx.count, ctx.written = prologue, product, len(inputs) + 3, product.written
        ctx.vectors = weight, a, b
        ctx.main_grads = main_grads_of(needs[-4:-1], weight, a, b)
        of_rows = (*needs[:-4], needs[-4] or needs[-3])  # the gradient of LoRA's a takes the rows as the weight's does
        others = weight if any(needs[:-4]) else None, ends
        early = early_saves(others)
        y, kept = _forward(prologue, product, inputs, weight, a, b, ends, of_rows, early)
        save(ctx, early, *kept, *others)
        return y

    @staticmethod
    @not_twice_differentiable
    @names_written
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        *kept, t, a, b, weight, ends = saved(ctx)
        product, skip = ctx.product, GradRequest.SKIP
        dy = dy.contiguous()  # PyTorch's product takes no expanded tensor
        *of_inputs, of_weight, of_a, of_b = grad_requests(ctx, ctx.count, first=_FIRST)
        drows = u = None
        grads: list[Tensor | None] = [None, None, None]
        asked = any([request is not skip for request in of_inputs])
        if a is not None and (asked or of_a is not skip):
            u = _low_rank(dy, b, ends, product)
        if asked:
            whole = weight.mT if product.transposed else weight
            drows = _input_gradient_op(dy, whole, ends) if product.in_fp8 else grouped_product(dy, cast(whole, dy.dtype).mT, ends)
            if u is not None:
                drows = lora_expand(u, a.mT, drows, ends, None, NO_DROPOUT)
        made = ctx.prologue.backward(kept, None, drows, None, of_inputs, rebuild=of_weight is not skip or of_a is not skip)
        rows = None if made.rows is None else cast(made.rows, dy.dtype)
        if of_weight is not skip:
            assert rows is not None
            first, second = (rows, dy) if product.transposed else (dy, rows)
            of_call = ctx.vectors[0], ctx.main_grads[0], of_weight, product.name
            grads[0] = grouped_weight_gradient(first, second, ends, *of_call)
            note_written(ctx.written, product.name, ctx.main_grads[0], of_weight)
        if of_a is not skip:
            of_rows = lora_gradient(u, rows, ends, None, False, NO_DROPOUT)
            grads[1] = vector_gradient(of_rows, ctx.vectors[1], ctx.main_grads[1], of_a)
            note_written(ctx.written, f"{product.name}.a", ctx.main_grads[1], of_a)
        if of_b is not skip:
            of_columns = lora_gradient(t, dy, ends, None, True, NO_DROPOUT)
            grads[2] = vector_gradient(of_columns, ctx.vectors[2], ctx.main_grads[2], of_b)
            note_written(ctx.written, f"{product.name}.b", ctx.main_grads[2], of_b)
        return None, None, *made.inputs, *grads, None


_FIRST = 2  # arguments before the tensors
_apply = fast_apply(_GroupedLinear)


def _low_rank(rows: Tensor, w: Tensor, ends: Tensor, product: GroupedProduct) -> Tensor:
    """Return scale * rows @ w of each expert."""
    t: Tensor = lora_shrink(rows, w, ends, None, None, product.scale, NO_DROPOUT)
    return t


def _forward(
    prologue: Any, product: GroupedProduct, inputs: Inputs, weight: Tensor, a: Tensor | None, b: Tensor | None, ends: Any,
    needs: Needs, keep: Keep | None,
) -> tuple[Tensor, Kept]:  # fmt: skip
    """Return y, and what backward needs of the prologue and of LoRA: t, a and b. `keep` takes that, too, before the product."""
    whole, rows = weight.mT if product.transposed else weight, None
    if not product.in_fp8:
        rows, kept = prologue.rows(inputs, needs)
        multiply = partial(grouped_product, rows, cast(whole, rows.dtype), ends)
    elif torch.compiler.is_compiling():  # formulas have made the rows, which the op rounds
        kept = prologue.rows(inputs, needs)[1]
        multiply = partial(_forward_op, inputs[0], whole, ends, prologue.dtype)
    else:
        (codes, inverse), kept = prologue.codes(inputs, FP8Target(E4M3), needs)
        multiply = partial(_scaled_product, codes, inverse, whole, ends, prologue.dtype)
    t: Any = None
    if a is not None and b is not None:
        rows = prologue.rows(inputs, None)[0] if rows is None else rows
        a, b = cast(a, rows.dtype), cast(b, rows.dtype)
        t = _low_rank(rows, a.mT, ends, product)
    kept = (*kept, t, a, b)
    if keep is not None:
        keep(kept)
    y = multiply()
    return y if t is None else lora_expand(t, b, y, ends, None, NO_DROPOUT), kept


def run_grouped_linear(
    prologue: Any, inputs: Inputs, weight: Tensor, ends: Tensor, product: GroupedProduct, lora: LoRA | None = None
) -> Tensor:
    """Return rows @ weight[e].T for each expert's rows, and what LoRA adds, in the prologue's type."""
    a, b = (None, None) if lora is None else lora[:2]
    if not needs_grad(*inputs, weight, a, b):
        return _forward(prologue, product, inputs, weight, a, b, ends, None, None)[0]
    y: Tensor = _apply(prologue, product, *inputs, weight, a, b, ends)
    return y


def multiply_grouped_rows(x: Tensor, weight: Tensor, ends: Tensor, dtype: torch.dtype, options: GroupedOptions) -> Tensor:
    """Return x @ weight[e].T for each expert's rows, and what LoRA adds, in `dtype`."""
    product = options.product(x, weight, dtype)
    x = x if product.in_fp8 else cast(x, dtype)
    rows = FP8Rows if product.in_fp8 else Rows
    return run_grouped_linear(rows(x.dtype, dtype), (x,), weight, ends, product, options.lora)
