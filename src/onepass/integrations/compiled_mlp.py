"""A gated MLP after its norm, compiled and in eight bits: a prologue of down's product, which has all that comes before it.

Formula  y = down(act(up(norm(h)))), h = x + residual; up: the rows of several weights, gates before values.
Saves    h, up's result and the rows' statistics, as the two products do that this stands for.
Bytes    the activation's backward writes the gradient of up's result as codes, by rows and transposed, which up's products take:
         4 bytes less written and 4 less read for each of its numbers. Elsewhere a graph hands on plain tensors between functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onepass.distributed.tensor_parallel import rows_of
from onepass.gradients.main_grad import GradRequest, accumulates_elsewhere
from onepass.gradients.vectors import VectorGrads
from onepass.ops.activation import fp8
from onepass.ops.activation.activation_rows import ActivationRows
from onepass.ops.activation.activations import activation_of, find_activation
from onepass.ops.activation.formula import ActivationOptions
from onepass.ops.activation.fp8_kernels import ActivationNeeds
from onepass.ops.activation.kernels import activation_unsupported
from onepass.ops.norm.compiled_projections import use_compiled_projections
from onepass.ops.norm.formula import NormOptions
from onepass.ops.norm.norm_rows import NormRows, norm_rows
from onepass.product.fp8.in_graph import LOOKS_AT_A_STATE, CompiledFP8Call, CompiledFP8Product, state_in_graph
from onepass.product.fp8.product import PRODUCT, start_transposed
from onepass.product.fp8.scales import factors_of
from onepass.product.fp8.weight import FP8Operand, multiply, transposed_weight
from onepass.product.function import run_linear
from onepass.product.prologue import Inputs, Kept, Needs, PrologueGradients
from onepass.runtime import saved
from onepass.runtime.backend import choose
from onepass.runtime.fp8 import E4M3, FP8Target, check_fp8, fits_fp8, transposed_width
from onepass.runtime.fp8_recipe import FP8Recipe, Precision, recipe_of
from onepass.runtime.op import Registered

# ---- registered ----


def _up_gradient(
    dactivated: Tensor, packed: Tensor, scale: Tensor, weights: Sequence[Tensor], factors: Tensor, options: ActivationOptions,
    recipe: FP8Recipe,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradient of up's input, the codes of its result's gradient, transposed, with the inverse of their scale, and the
    activation's codes at forward's scale, transposed."""
    state, weight = state_in_graph(packed, weights, recipe)
    state.update(weight)  # for a weight that the graph makes, and may make again in backward
    run = partial(fp8.activation_backward_codes, dactivated, packed, None, None, options, use_triton=True)
    target, inverse = state.gradient_target(partial(run, y_target=None, needs=ActivationNeeds(dx_transposed=False)))
    gradients = run(target, FP8Target(E4M3, scale))
    assert gradients.dx is not None and gradients.dx_transposed is not None and gradients.y_transposed is not None
    across = transposed_weight(weight, factors_of(factors))
    dx = multiply(FP8Operand(rows_of(gradients.dx), inverse), across, dactivated.dtype, fast=False)
    return dx.view(*packed.shape[:-1], -1), gradients.dx_transposed, inverse, gradients.y_transposed


def _up_gradient_fake(
    dactivated: Tensor, packed: Tensor, scale: Tensor, weights: Sequence[Tensor], factors: Tensor, options: ActivationOptions,
    recipe: FP8Recipe,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dx = packed.new_empty((*packed.shape[:-1], weights[0].shape[1]))
    transposed = packed.new_empty((packed.shape[-1], transposed_width(packed)), dtype=recipe.gradient_type)
    across = packed.new_empty((dactivated.shape[-1], transposed_width(packed)), dtype=E4M3)
    return dx, transposed, packed.new_empty((), dtype=torch.float32), across


_up_gradient_op = Registered(
    "gated_mlp_up_gradient(Tensor dactivated, Tensor packed, Tensor scale, Tensor[] weights, Tensor factors, "
    "ActivationOptions options, FP8Recipe recipe) -> (Tensor, Tensor, Tensor, Tensor)",
    _up_gradient,
    _up_gradient_fake,
    ActivationOptions,
    FP8Recipe,
    tags=LOOKS_AT_A_STATE,
)


# ---- the prologue ----


class GatedMLPRows(NamedTuple):
    """act(up(norm(h))), as a product in eight bits in a graph asks for it.

    Inputs: the norm's, and up's weights. Kept: what the norm keeps, up's result, what up's backward needs, and its weights.
    """

    norm: NormRows
    activation: ActivationRows
    recipe: FP8Recipe  # of up
    dtype: torch.dtype

    vectors: tuple[str, ...] = ("norm_weight", "norm_bias")
    returns: tuple[bool, bool] = (False, True)

    def in_graph(self, inputs: Inputs, *product: Any, needs: Needs) -> tuple[Sequence[Any], Kept]:
        of_norm, weights = inputs[:_NORM], inputs[_NORM:]
        up = CompiledFP8Product(self.recipe, num_weights=len(weights))
        packed, _, kept, call = up.forward(self.norm, of_norm, weights, (), needs)
        results, _ = self.activation.in_graph((packed, None, None), *product, needs=needs)
        assert isinstance(call, CompiledFP8Call) and call.target is not None
        return results, (*kept, packed, call.x_inverse, call.target.scale, call.factors, *weights)

    def backward(
        self, kept: Kept, vectors: VectorGrads | None, drows: Tensor | None, dx: Tensor | None, requests: Sequence[GradRequest],
        *, rebuild: bool = False, target: FP8Target | None = None, ours: bool = True, u: Tensor | None = None,
    ) -> PrologueGradients:  # fmt: skip
        of_norm, (packed, inverse, scale, factors, *weights) = kept[:_NORM], kept[_NORM:]
        if drows is None:  # h alone was used
            made = self.norm.backward(of_norm, vectors, None, dx, requests[:_NORM])
            return made._replace(inputs=(*made.inputs, *[None for _ in weights]))
        assert target is not None and inverse is not None
        dnormed, transposed, gradient_inverse, activated = _up_gradient_op(
            drows, packed, target.scale, weights, factors, self.activation.options, self.recipe
        )
        made = self.norm.backward(of_norm, vectors, dnormed, dx, requests[:_NORM], ours=False)
        normed = start_transposed(self.norm, of_norm, made, FP8Target(E4M3, scale), inverse)()
        dweights = PRODUCT.returned(transposed, gradient_inverse, *normed, weights[0])
        parts = dweights.split([weight.shape[0] for weight in weights if weight is not None])
        return made._replace(inputs=(*made.inputs, *parts), transposed=activated)


_NORM = 4  # inputs of the norm, and tensors that it keeps


# ---- what a model asks ----


def use_gated_mlp(
    x: Tensor, norm_weight: Tensor | None, weights: Sequence[Tensor], down: Tensor, activation: str, precision: Precision
) -> bool:  # fmt: skip
    """Compiled, whether this is for the prologue: in eight bits at scales known before, all weights trained."""
    recipe, act = recipe_of(precision), find_activation(activation)
    if recipe is None or recipe.scaling != "delayed" or not recipe.has_wgrad or not torch.is_grad_enabled():
        return False
    trained = all([weight.requires_grad for weight in (down, *weights)])
    if not trained or accumulates_elsewhere(down) or down.dtype != x.dtype or not fits_fp8(down.shape):
        return False
    kernels_take_it = choose("activation_linear", None, activation_unsupported(x, act)) == "triton"
    return kernels_take_it and use_compiled_projections(x, norm_weight, weights, [], precision)


def gated_mlp(
    x: Tensor, residual: Tensor | None, norm_weight: Tensor | None, norm_bias: Tensor | None, norm: NormOptions,
    weights: Sequence[Tensor], down: Tensor, activation: str, precision: Precision,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return y, and what the norm was taken of: x + residual."""
    recipe, options = recipe_of(precision), ActivationOptions(find_activation(activation).key, None, None)
    assert recipe is not None
    check_fp8(x, down)
    stored = saved.saved_format(x, "input", activation_of(options.activation).parts)
    activated = ActivationRows(options, True, stored, x.dtype)
    mlp: Any = GatedMLPRows(norm_rows(x, residual, norm, x.dtype), activated, recipe, x.dtype)
    inputs = x, norm_weight, norm_bias, residual, *weights
    return run_linear(mlp, CompiledFP8Product(recipe), inputs, down, None)  # type: ignore[no-any-return]
