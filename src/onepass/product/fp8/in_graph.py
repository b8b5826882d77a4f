"""Products in eight bits under torch.compile: forward, and what backward makes of dy, as ops that a graph doesn't look into.

A graph can't see when scales change, or which magnitudes were noted. So it holds the weight alone, and
an op finds the weight's state (product/fp8/weight.py) when it runs. What the state lends is copied before the graph gets it.
A product of several weights takes them as one, which an op makes where they don't lie together, and nobody keeps for backward.
Passes that write codes transposed, and the product that is added to main_grad, keep nothing and are ops of their own.

The ops are pure to the graph: run again, as under checkpointing, they have the same bits. Those that look at a state are no part
of a CUDA graph, whose replays would not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from onepass.distributed.tensor_parallel import Start, TPLayout
from onepass.gradients.main_grad import GradRequest, put_gradient
from onepass.gradients.packed_params import concat_no_grad
from onepass.product.fp8.product import PRODUCT, FP8Call, FP8Product, start_transposed
from onepass.product.fp8.prologue import FP8Prologue
from onepass.product.fp8.rows import FP8Rows, kept_rows
from onepass.product.fp8.scales import factors_of, new_factors
from onepass.product.fp8.weight import FP8Operand, FP8Weight, fp8_weight
from onepass.product.product import Forward, OutputGradient, PlainProduct
from onepass.product.prologue import Inputs, Keep, Kept, Needs, Prologue, PrologueGradients
from onepass.runtime.fp8 import E4M3, FP8Target, check_fp8, transposed_width
from onepass.runtime.fp8_recipe import FP8Recipe
from onepass.runtime.op import Registered

if TYPE_CHECKING:
    from onepass.gradients.deferred import DeferredWgrad


LOOKS_AT_A_STATE = (torch.Tag.cudagraph_unsafe,) if hasattr(torch.Tag, "cudagraph_unsafe") else ()  # not in older ones


def as_one(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return all rows of weights or biases, of none None. They are one weight to `fp8_weight`, whether this is a copy or not."""
    if len(tensors) < 2:
        return tensors[0] if tensors else None
    whole: Any = concat_no_grad(tensors)
    whole.packed = tensors
    return whole  # type: ignore[no-any-return]


def state_in_graph(x: Tensor, weights: Sequence[Tensor], recipe: FP8Recipe) -> tuple[FP8Weight, Tensor]:
    """Return the state of the weights when an op of a graph runs, and all of them as one. Raise as an uncompiled call does."""
    weight = as_one(weights)
    assert weight is not None
    check_fp8(x, weight)
    return fp8_weight(weight, recipe), weight


def forward_in_graph(
    prologue: FP8Prologue, inputs: Inputs, weights: Sequence[Tensor], biases: Sequence[Tensor], recipe: FP8Recipe, noted: bool
) -> tuple[Sequence[Tensor | None], Kept]:
    """Run a product when its op does. Return y, copies of what the next refresh changes, and what the prologue keeps.

    The copies are of the inverse and the scale that forward had for x. The last is the row of the weight's factors.
    """
    assert inputs[0] is not None
    state, weight = state_in_graph(inputs[0], weights, recipe)
    needs = [True] * (len(inputs) + 2) if noted else None
    y, _, kept, call = FP8Product(state).forward(prologue, inputs, weight, as_one(biases), needs)
    assert isinstance(call, FP8Call)
    scale, factors = call.x_scale, call.factors
    return (y, call.x_inverse.clone(), None if scale is None else scale.clone(), None if factors is None else factors.row), kept


def forward_fake(
    x: Tensor, weights: Sequence[Tensor], recipe: FP8Recipe, product: torch.dtype
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return tensors without data: what `forward_in_graph` returns but for what the prologue keeps."""
    y = x.new_empty((*x.shape[:-1], sum(weight.shape[0] for weight in weights)), dtype=product)
    if recipe.scaling == "row":
        return y, x.new_empty((math.prod(x.shape[:-1]), 1), dtype=torch.float32), None, None
    return y, x.new_empty((), dtype=torch.float32), x.new_empty((), dtype=torch.float32), new_factors(x)


# ---- rows as they are ----


class GraphRows(FP8Rows):
    """Rows as they are, in a graph."""

    __slots__ = ()

    def in_graph(self, inputs: Inputs, *product: Any, needs: Needs) -> tuple[Sequence[Any], Kept]:
        (x,) = inputs
        return _forward_op(x, *product, self.dtype, needs is not None), kept_rows(x, needs)


def _forward(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], recipe: FP8Recipe, product: torch.dtype, noted: bool
) -> Sequence[Tensor | None]:
    return forward_in_graph(FP8Rows(x.dtype, product), (x,), weights, biases, recipe, noted)[0]


_forward_op = Registered(
    "fp8_linear(Tensor x, Tensor[] weights, Tensor[] biases, FP8Recipe recipe, ScalarType product, bool noted) -> "
    "(Tensor, Tensor, Tensor?, Tensor?)",
    _forward,
    lambda x, weights, biases, recipe, product, noted: forward_fake(x, weights, recipe, product),
    FP8Recipe,
    tags=LOOKS_AT_A_STATE,
)


# ---- backward, and the product ----


def _output_gradient(
    dy: Tensor, weights: Sequence[Tensor], factors: Tensor | None, asks_x: bool, asks_weight: bool, recipe: FP8Recipe
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    state, weight = state_in_graph(dy, weights, recipe)
    state.update(weight)  # for a weight that the graph makes, and may make again in backward
    ours = None if factors is None else factors_of(factors)
    call = FP8Call(state, state.version, dy, None, ours)  # nothing of x is looked at
    drows, operand = call.output_gradient(dy, weight, None, asks_x, asks_weight, later=False)
    if not (asks_weight and recipe.has_wgrad):
        return drows, None, None
    return drows, operand.codes, operand.inverse.clone()


def _output_gradient_fake(
    dy: Tensor, weights: Sequence[Tensor], factors: Tensor | None, asks_x: bool, asks_weight: bool, recipe: FP8Recipe
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    dx = dy.new_empty((*dy.shape[:-1], weights[0].shape[1])) if asks_x else None
    if not (asks_weight and recipe.has_wgrad):
        return dx, None, None
    codes = dy.new_empty((dy.shape[-1], transposed_width(dy)), dtype=recipe.gradient_type)
    return dx, codes, dy.new_empty((), dtype=torch.float32)


_output_gradient_op = Registered(
    "fp8_output_gradient(Tensor dy, Tensor[] weights, Tensor? factors, bool asks_x, bool asks_weight, FP8Recipe recipe) -> "
    "(Tensor?, Tensor?, Tensor?)",
    _output_gradient,
    _output_gradient_fake,
    FP8Recipe,
    tags=LOOKS_AT_A_STATE,
)


class CompiledFP8Call(NamedTuple):
    """`FP8Call` in a graph. It has no properties: the compiler of PyTorch 2.10 can't read those of a tuple."""

    weights: Sequence[Tensor]
    recipe: FP8Recipe
    x_inverse: Tensor
    target: FP8Target | None
    factors: Tensor | None  # the weight's row
    layout: TPLayout | None = None
    deferred: DeferredWgrad | None = None

    def start_input(
        self, prologue: Any, kept: Kept, made: PrologueGradients | None, *, later: bool
    ) -> Callable[[], Any]:  # fmt: skip
        if self.target is None:
            return PlainProduct().start_input(prologue, kept, made, later=False)
        return start_transposed(prologue, kept, made, self.target, self.x_inverse)

    def output_gradient(
        self, dy: Tensor, weight: Tensor | None, came: Tensor | None, asks_rows: bool, asks_weight: bool, *, later: bool,
        ours: bool = False,
    ) -> OutputGradient:  # fmt: skip
        drows, codes, inverse = _output_gradient_op(dy, self.weights, self.factors, asks_rows, asks_weight, self.recipe)
        operand = dy if codes is None or inverse is None else FP8Operand(codes, inverse)
        return drows if came is None or drows is None else drows.add_(came), operand

    def weight_gradient(
        self, dy: Any, rows: Callable[[], Any], weight: Tensor, main_grad: Tensor | None, request: GradRequest, *, later: bool
    ) -> Tensor | None:  # fmt: skip
        if self.target is None:
            return PlainProduct().weight_gradient(dy, rows, weight, main_grad, request, later=False)
        return put_gradient(PRODUCT, (*dy, *rows()), weight, main_grad, request)


class CompiledFP8Product(NamedTuple):
    """A product of one or several weights in eight bits in a graph: a `Product`. A call that defers breaks the graph."""

    recipe: FP8Recipe
    deferred: DeferredWgrad | None = None
    num_weights: int = 1

    takes_unrounded: bool = True
    num_adapters: int = 0

    def rows_in(self, x_type: torch.dtype, dtype: torch.dtype) -> Prologue:
        return GraphRows(x_type, dtype)

    def forward(
        self, prologue: Any, inputs: Inputs, weight: Any, bias: Any, needs: Needs, start: Start | None = None,
        keep: Keep | None = None,
    ) -> Forward:  # fmt: skip
        rows, recipe = prologue.rows(inputs, None)[0] if prologue.returns[0] else None, self.recipe
        weights, biases = (weight, bias) if self.num_weights > 1 else ((weight,), (bias,))
        biases = [bias for bias in biases if bias is not None]
        (y, x_inverse, x_scale, factors), kept = prologue.in_graph(inputs, weights, biases, recipe, needs=needs)
        target = FP8Target(E4M3, x_scale) if recipe.has_wgrad else None
        if start is not None:
            wide = prologue.rows(inputs, None)[0] if rows is None else rows
            y = y + start(wide, y.shape[-1], None).view(y.shape)
        return y, rows, kept, CompiledFP8Call(weights, recipe, x_inverse, target, factors)

    def mark_output(self, y: Tensor, bias: Tensor | None) -> None:
        pass
