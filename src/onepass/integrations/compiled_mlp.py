"""A gated MLP after its norm, compiled and in eight bits, as one function for autograd.

Formula  y = down(act(up(norm(h)))), h = x + residual; up: the rows of several weights, gates before values.
Saves    h, up's result and the rows' statistics, as the two products do that this stands for.
Bytes    the activation's backward writes the gradient of up's result as codes, by rows and turned, and up's products take those:
         4 bytes less written and 4 less read for each of its numbers. Elsewhere a graph hands on plain tensors between functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from onepass.distributed.tensor_parallel import rows_of
from onepass.gradients.fp8_scales import factors_of
from onepass.gradients.fp8_weight import FP8Operand, multiply, turned_weight
from onepass.gradients.main_grad import GradRequest, accumulates_elsewhere
from onepass.ops.activation import fp8
from onepass.ops.activation.activation_rows import ActivationRows
from onepass.ops.activation.activations import activation_of, find_activation
from onepass.ops.activation.formula import ActivationOptions
from onepass.ops.activation.kernels import activation_unsupported
from onepass.ops.norm.compiled_projections import use_compiled_projections
from onepass.ops.norm.formula import NormOptions
from onepass.ops.norm.norm_rows import NormRows, norm_rows
from onepass.product.fp8 import PRODUCT
from onepass.product.in_graph import LOOKS_AT_A_STATE, CompiledFP8Product, state_in_graph
from onepass.runtime import saved
from onepass.runtime.backend import choose
from onepass.runtime.dispatch import fast_apply, not_twice_differentiable
from onepass.runtime.fp8 import E4M3, FP8Target, check_fp8, fits_fp8, turned_width
from onepass.runtime.fp8_recipe import FP8Recipe, Precision, recipe_of
from onepass.runtime.op import Registered

# ---- registered ----


def _up_gradient(
    dactivated: Tensor, packed: Tensor, scale: Tensor, weights: Sequence[Tensor], factors: Tensor, options: ActivationOptions,
    recipe: FP8Recipe,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradient of up's input, the codes of its result's gradient, turned, with the inverse of their scale, and the
    activation's codes at forward's scale, turned."""
    state, weight = state_in_graph(packed, weights, recipe)
    state.update(weight)  # for a weight that the graph makes, and may make again in backward
    run = partial(fp8.activation_backward_codes, dactivated, packed, None, None, options, use_triton=True)
    target, inverse = state.gradient_target(partial(run, y_target=None, turned=False))
    gradients = run(target, FP8Target(E4M3, scale))
    assert gradients.dx is not None and gradients.dx_turned is not None and gradients.y_turned is not None
    across = turned_weight(weight, factors_of(factors))
    dx = multiply(FP8Operand(rows_of(gradients.dx), inverse), across, dactivated.dtype, fast=False)
    return dx.view(*packed.shape[:-1], -1), gradients.dx_turned, inverse, gradients.y_turned


def _up_gradient_fake(
    dactivated: Tensor, packed: Tensor, scale: Tensor, weights: Sequence[Tensor], factors: Tensor, options: ActivationOptions,
    recipe: FP8Recipe,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dx = packed.new_empty((*packed.shape[:-1], weights[0].shape[1]))
    turned = packed.new_empty((packed.shape[-1], turned_width(packed)), dtype=recipe.gradient_type)
    across = packed.new_empty((dactivated.shape[-1], turned_width(packed)), dtype=E4M3)
    return dx, turned, packed.new_empty((), dtype=torch.float32), across


_up_gradient_op = Registered(
    "gated_mlp_up_gradient(Tensor dactivated, Tensor packed, Tensor scale, Tensor[] weights, Tensor factors, "
    "ActivationOptions options, FP8Recipe recipe) -> (Tensor, Tensor, Tensor, Tensor)",
    _up_gradient,
    _up_gradient_fake,
    ActivationOptions,
    FP8Recipe,
    tags=LOOKS_AT_A_STATE,
)


# ---- autograd ----


class _GatedMLP(torch.autograd.Function):
    """y, and what came to the norm: the sum of x and the residual, or x itself."""

    @staticmethod
    def forward(
        ctx: Any, norm: NormRows, activation: ActivationRows, recipe: FP8Recipe, x: Tensor, norm_weight: Tensor | None,
        norm_bias: Tensor | None, residual: Tensor | None, down: Tensor, *weights: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        product, needs = CompiledFP8Product(recipe), [True] * 6
        inputs = x, norm_weight, norm_bias, residual
        packed, _, kept, ctx.up = product.forward_several(norm, inputs, weights, [], needs)
        y, _, _, ctx.down = product.forward(activation, (packed, None, None), down, None, needs)
        ctx.norm, ctx.activation, ctx.recipe, ctx.rows = norm, activation, recipe, [weight.shape[0] for weight in weights]
        ctx.save_for_backward(packed, down, *kept, *weights)
        h = kept[0]
        assert h is not None
        return y, h

    @staticmethod
    @not_twice_differentiable
    def backward(ctx: Any, dy: Tensor, dh: Tensor) -> tuple[Tensor | None, ...]:
        packed, down, *rest = ctx.saved_tensors
        kept, weights = rest[:4], rest[4:]
        requests = [GradRequest.ACCUMULATE if need else GradRequest.SKIP for need in ctx.needs_input_grad[3:7]]
        dactivated, operand = ctx.down.output_gradient(dy, None, None, True, True, later=False)
        given = dactivated, packed, ctx.down.target.scale, weights, ctx.up.factors, ctx.activation.options, ctx.recipe
        dnormed, transposed, inverse, activated = _up_gradient_op(*given)
        ddown = PRODUCT.returned(*operand, activated, ctx.down.x_inverse, down)
        made = ctx.norm.backward(kept, None, dnormed, dh, requests, ours=False)
        normed = ctx.up.start_input(ctx.norm, kept, made, later=False)()
        dweights = PRODUCT.returned(transposed, inverse, *normed, weights[0]).split(ctx.rows)
        return None, None, None, *made.inputs, ddown, *dweights


_apply = fast_apply(_GatedMLP)


# ---- what a model asks ----


def use_gated_mlp(
    x: Tensor, late: Tensor | None, weights: Sequence[Tensor], down: Tensor, activation: str, precision: Precision
) -> bool:  # fmt: skip
    """Compiled, whether this is for the function: in eight bits at scales known before, all weights trained.

    Args:
        late: as in `use_compiled_projections`.
    """
    recipe, act = recipe_of(precision), find_activation(activation)
    if recipe is None or recipe.scaling != "delayed" or not recipe.has_wgrad or not torch.is_grad_enabled():
        return False
    trained = all([weight.requires_grad for weight in (down, *weights)])
    if not trained or accumulates_elsewhere(down) or down.dtype != x.dtype or not fits_fp8(down.shape):
        return False
    kernels_take_it = choose("activation_linear", None, activation_unsupported(x, act)) == "triton"
    return kernels_take_it and use_compiled_projections(x, late, weights, [], precision)


def gated_mlp(
    x: Tensor, residual: Tensor | None, norm_weight: Tensor | None, norm_bias: Tensor | None, norm: NormOptions,
    weights: Sequence[Tensor], down: Tensor, activation: str, precision: Precision,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return y, and what the norm was taken of: x + residual."""
    recipe, options = recipe_of(precision), ActivationOptions(find_activation(activation).key, None, None)
    assert recipe is not None
    check_fp8(x, down)
    prologue = norm_rows(x, residual, norm, x.dtype)
    stored = saved.saved_format(x, "input", activation_of(options.activation).parts)
    activated = ActivationRows(options, True, stored, x.dtype)
    y: tuple[Tensor, Tensor] = _apply(
        prologue, activated, recipe, x, norm_weight, norm_bias, residual, down, *weights
    )  # fmt: skip
    return y
