"""activation_linear in eight bits: the activation's passes write the codes that its products take (gradients/fp8_product.py)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from onepass.gradients.fp8_compiled import LOOKS_AT_A_STATE, CompiledFP8Call, forward_fake, lent, state_in_graph
from onepass.gradients.fp8_gradient import FP8Gradient
from onepass.gradients.fp8_product import FP8Call, fp8_forward
from onepass.gradients.fp8_weight import CompiledFP8, FP8Operand, FP8Weight
from onepass.gradients.vectors import VectorGrads
from onepass.ops.activation import fp8
from onepass.ops.activation.activations import activation_of
from onepass.ops.activation.formula import ActivationOptions
from onepass.parallel.tensor_parallel import TPLayout
from onepass.runtime.fp8 import E4M3, FP8Target, turned_width
from onepass.runtime.fp8_recipe import FP8Recipe
from onepass.runtime.op import Registered

Needs = tuple[bool, bool, bool]  # of x, activation_bias and token_weight


# ---- forward ----


def activation_linear_fp8(
    state: FP8Weight | CompiledFP8, x: Tensor, bias: Tensor | None, token_weight: Tensor | None, weight: Tensor,
    linear_bias: Tensor | None, options: ActivationOptions, use_triton: bool, product: torch.dtype, layout: TPLayout | None,
    noted: bool,
) -> tuple[Tensor, FP8Call | CompiledFP8Call]:  # fmt: skip
    """Return y by a product in eight bits, and what backward needs of the state."""
    if isinstance(state, CompiledFP8):
        given = x, bias, token_weight, weight, linear_bias
        y, *kept = _forward_op(*given, options, use_triton, product, noted, state.recipe)
        return y, CompiledFP8Call([weight], state.recipe, state.recipe.has_wgrad, *kept)
    run = partial(_activation_codes, x, bias, token_weight, options, use_triton)
    return fp8_forward(state, weight, linear_bias, x.shape[:-1], product, run, layout, noted=noted)


def _activation_codes(
    x: Tensor, bias: Tensor | None, token_weight: Tensor | None, options: ActivationOptions, use_triton: bool, target: FP8Target
) -> tuple[Tensor, Tensor | None]:
    """Return the activation's codes, by rows."""
    codes, inverse = fp8.activation_codes(x, bias, token_weight, options, target, use_triton=use_triton)
    return codes.view(-1, codes.shape[-1]), inverse


def _forward_in_graph(
    x: Tensor, bias: Tensor | None, token_weight: Tensor | None, weight: Tensor, linear_bias: Tensor | None,
    options: ActivationOptions, use_triton: bool, product: torch.dtype, noted: bool, recipe: FP8Recipe,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    run = partial(_activation_codes, x, bias, token_weight, options, use_triton)
    state, weight = state_in_graph(x, [weight], recipe)
    y, call = fp8_forward(state, weight, linear_bias, x.shape[:-1], product, run, noted=noted)
    return y, *lent(call)


_forward_op = Registered(
    "activation_linear_fp8(Tensor x, Tensor? bias, Tensor? token_weight, Tensor weight, Tensor? linear_bias, "
    "ActivationOptions options, bool use_triton, ScalarType product, bool noted, FP8Recipe recipe) -> "
    "(Tensor, Tensor, Tensor?, Tensor?)",
    _forward_in_graph,
    lambda x, bias, token_weight, weight, linear_bias, options, use_triton, product, noted, recipe: forward_fake(
        x, [weight], recipe, product
    ),
    ActivationOptions,
    FP8Recipe,
    tags=LOOKS_AT_A_STATE,
)


# ---- backward ----


def start_activation_operand(
    call: FP8Call | CompiledFP8Call, x: Tensor, bias: Tensor | None, token_weight: Tensor | None, options: ActivationOptions,
    use_triton: bool, turned: Tensor | None, later: bool,
) -> Callable[[], FP8Operand]:  # fmt: skip
    """Return what makes the activation's operand of the weight's gradient, as `FP8Call.start_input` does.

    Args:
        turned: the codes, where a pass has written them already.
    """

    def turn(target: FP8Target) -> Tensor:
        assert target.scale is not None
        if turned is not None:
            return turned
        found: Tensor = _turned_op(x, bias, token_weight, target.scale, options, use_triton, target.dtype)
        return found

    return call.start_input(partial(_activation_codes, x, bias, token_weight, options, use_triton), turn, later=later)


def _turned(
    x: Tensor, bias: Tensor | None, token_weight: Tensor | None, scale: Tensor, options: ActivationOptions, use_triton: bool,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    target = FP8Target(dtype, scale)
    found = fp8.activation_backward_codes(None, x, bias, token_weight, options, None, target, use_triton=use_triton)
    assert found.y_turned is not None
    return found.y_turned


def _turned_fake(x: Tensor, *rest: Any) -> Tensor:
    parts = activation_of(rest[3].activation).parts
    return x.new_empty((x.shape[-1] // parts, turned_width(x)), dtype=rest[-1])


_turned_op = Registered(
    "activation_codes_turned(Tensor x, Tensor? bias, Tensor? token_weight, Tensor scale, ActivationOptions options, "
    "bool use_triton, ScalarType dtype) -> Tensor",
    _turned,
    _turned_fake,
    ActivationOptions,
)


def activation_backward_fp8(
    ctx: Any, vectors: VectorGrads | None, dy: Tensor | None, x: Tensor, bias: Tensor | None, token_weight: Tensor | None,
    needs: Needs,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:  # fmt: skip
    """Return x's gradient in eight bits for the product that made x, those of bias and token_weight, and y's codes, turned."""
    if vectors is not None:
        (bias,) = vectors.wide(bias)
    run = partial(fp8.activation_backward_codes, dy, x, bias, token_weight, ctx.options, use_triton=ctx.use_triton)
    target, inverse = ctx.taker.gradient_target(partial(run, y_target=None, turned=False))
    found = run(target, FP8Target(E4M3, ctx.fp8.x_scale), need_dbias=needs[1], need_dtoken_weight=needs[2])
    assert found.dx is not None and found.dx_turned is not None and found.y_turned is not None
    dx = FP8Gradient(found.dx, found.dx_turned, inverse, x.dtype, ctx.taker)
    return dx, found.dbias, found.dtoken_weight, found.y_turned
