"""Products in eight bits under torch.compile: forward, and what backward makes of dy, as ops that a graph doesn't look into.

A graph can't see when scales change, or which magnitudes were noted. So it holds the weight alone, and
an op finds the weight's state (gradients/fp8_weight.py) when it runs. What the state lends is copied before the graph gets it.
A product of several weights takes them as one, which an op makes where they don't lie together, and nobody keeps for backward.
Passes that write codes turned, and the product that is added to main_grad, keep nothing and are ops of their own.

The ops are pure to the graph: run again, as under checkpointing, they have the same bits. Those that look at a state are no part
of a CUDA graph, whose replays would not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from onepass.gradients.fp8_product import PRODUCT, FP8Call, OutputGradient
from onepass.gradients.fp8_scales import factors_of, new_factors
from onepass.gradients.fp8_weight import FP8Operand, FP8Weight, Pass, fp8_weight
from onepass.gradients.main_grad import GradRequest, put_gradient
from onepass.gradients.packed_params import concat_no_grad
from onepass.parallel.tensor_parallel import rows_of
from onepass.runtime.fp8 import E4M3, FP8Target, check_fp8, turned_width
from onepass.runtime.fp8_recipe import FP8Recipe
from onepass.runtime.op import Registered

if TYPE_CHECKING:
    from onepass.gradients.deferred import DeferredWgrad


LOOKS_AT_A_STATE = (torch.Tag.cudagraph_unsafe,) if hasattr(torch.Tag, "cudagraph_unsafe") else ()  # not in older ones


def one_of(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return all rows of weights or biases, of none None. They are one weight to `fp8_weight`, whether this is a copy or not."""
    if len(tensors) < 2:
        return tensors[0] if tensors else None
    whole: Any = concat_no_grad(tensors)
    whole.packed = tensors
    return whole  # type: ignore[no-any-return]


def state_in_graph(x: Tensor, weights: Sequence[Tensor], recipe: FP8Recipe) -> tuple[FP8Weight, Tensor]:
    """Return the state of the weights when an op of a graph runs, and all of them as one. Raise as an uncompiled call does."""
    weight = one_of(weights)
    assert weight is not None
    check_fp8(x, weight)
    return fp8_weight(weight, recipe), weight


def lent(call: FP8Call) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return copies of the inverse and the scale that forward had for x, which the next refresh changes, and the weight's row."""
    scale, factors = call.x_scale, call.factors
    return call.x_inverse.clone(), None if scale is None else scale.clone(), None if factors is None else factors.row


def forward_fake(
    x: Tensor, weights: Sequence[Tensor], recipe: FP8Recipe, product: torch.dtype
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return tensors without data: the product's result, and what `lent` returns."""
    y = x.new_empty((*x.shape[:-1], sum(weight.shape[0] for weight in weights)), dtype=product)
    if recipe.scaling == "row":
        return y, x.new_empty((math.prod(x.shape[:-1]), 1), dtype=torch.float32), None, None
    return y, x.new_empty((), dtype=torch.float32), x.new_empty((), dtype=torch.float32), new_factors(x)


def _output_gradient(
    dy: Tensor, weights: Sequence[Tensor], factors: Tensor | None, asks_x: bool, asks_weight: bool, recipe: FP8Recipe
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    state, weight = state_in_graph(dy, weights, recipe)
    state.update(weight)  # for a weight that the graph makes, and may make again in backward
    ours = None if factors is None else factors_of(factors)
    call = FP8Call(state, state.version, dy, None, ours, None)  # nothing of x is looked at
    found = call.output_gradient(dy, weight, asks_x, asks_weight, later=False)
    if found.operand is None:
        return found.dx, None, None
    return found.dx, found.operand.codes, found.operand.inverse.clone()


def _output_gradient_fake(
    dy: Tensor, weights: Sequence[Tensor], factors: Tensor | None, asks_x: bool, asks_weight: bool, recipe: FP8Recipe
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    dx = dy.new_empty((*dy.shape[:-1], weights[0].shape[1])) if asks_x else None
    if not (asks_weight and recipe.has_wgrad):
        return dx, None, None
    codes = dy.new_empty((dy.shape[-1], turned_width(dy)), dtype=recipe.gradient_type)
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
    has_wgrad: bool
    x_inverse: Tensor
    x_scale: Tensor | None
    factors: Tensor | None  # the weight's row

    def start_input(self, run: Pass, turn: Callable[[FP8Target], Tensor], *, later: bool) -> Callable[[], FP8Operand]:
        return lambda: FP8Operand(turn(FP8Target(E4M3, self.x_scale)), self.x_inverse)

    def output_gradient(self, dy: Tensor, weight: Tensor, asks_x: bool, asks_weight: bool, *, later: bool) -> OutputGradient:
        dx, codes, inverse = _output_gradient_op(dy, self.weights, self.factors, asks_x, asks_weight, self.recipe)
        operand = None if codes is None or inverse is None else FP8Operand(codes, inverse)
        return OutputGradient(dx, operand, rows_of(dy))

    def weight_gradient(
        self, dy: FP8Operand, x: Callable[[], FP8Operand], weight: Tensor, main_grad: Tensor | None, request: GradRequest,
        deferred: DeferredWgrad | None,
    ) -> Tensor | None:  # fmt: skip
        return put_gradient(PRODUCT, (*dy, *x()), weight, main_grad, request)
