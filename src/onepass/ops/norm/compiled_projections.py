"""Compiled, the product of several layers' weights, which takes them as one where they lie together, with a norm before or none.

What is kept of the norm is its input, as in `norm_linear`.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from onepass.gradients.main_grad import accumulates_elsewhere
from onepass.ops.norm import kernels
from onepass.ops.norm.formula import NormOptions
from onepass.ops.norm.norm_rows import norm_rows
from onepass.product.fp8.in_graph import CompiledFP8Product
from onepass.product.function import run_packed_linear
from onepass.product.packed import PackedProduct
from onepass.product.product import Product
from onepass.runtime.backend import choose
from onepass.runtime.dispatch import product_type, under_functorch
from onepass.runtime.fp8 import check_fp8, fits_fp8
from onepass.runtime.fp8_recipe import Precision, recipe_of


def use_compiled_projections(
    x: Tensor, norm_weight: Tensor | None, weights: Sequence[Tensor], biases: Sequence[Tensor], precision: Precision = None
) -> bool:
    """Compiled, whether this is for the ops: by kernels, in one type, gradients to autograd."""
    if len(weights) == 1 or under_functorch() or not x.numel():
        return False
    if any([accumulates_elsewhere(parameter) for parameter in (*weights, *biases)]):
        return False
    types = {x.dtype, product_type(x), *[parameter.dtype for parameter in (*weights, *biases)]}
    types |= set() if norm_weight is None else {norm_weight.dtype}
    if recipe_of(precision) is not None and not fits_fp8((sum(weight.shape[0] for weight in weights), x.shape[-1])):
        return False
    return len(types) == 1 and choose("norm_linear", None, kernels.norm_unsupported(x)) == "triton"


def projections(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], precision: Precision = None) -> Tensor:
    """Return x times the rows of all weights."""
    product = _product(x, weights, precision)
    rows = product.rows_in(x.dtype, x.dtype)
    return run_packed_linear(rows, product, (x,), weights, biases)  # type: ignore[no-any-return]


def norm_projections(
    x: Tensor, residual: Tensor | None, norm_weight: Tensor | None, norm_bias: Tensor | None, norm: NormOptions,
    weights: Sequence[Tensor], biases: Sequence[Tensor], precision: Precision = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the same of norm(h), and h, which is x + residual."""
    rows, inputs = norm_rows(x, residual, norm, x.dtype), (x, norm_weight, norm_bias, residual)
    return run_packed_linear(rows, _product(x, weights, precision), inputs, weights, biases)  # type: ignore[no-any-return]


def _product(x: Tensor, weights: Sequence[Tensor], precision: Precision) -> Product:
    recipe = recipe_of(precision)
    if recipe is None:
        return PackedProduct(num_weights=len(weights))
    check_fp8(x, weights[0])
    return CompiledFP8Product(recipe, num_weights=len(weights))
