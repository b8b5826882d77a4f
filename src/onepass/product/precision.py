"""Which product a layer's `precision` asks for, and what `explain` says of it.

A kind of product enters what makes it, by its recipe's type, in `PRODUCTS` when it is imported, as `import onepass` does. A kind
of frozen weight enters what makes its product in `FROZEN`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from onepass.distributed.tensor_parallel import TPLayout
from onepass.gradients.deferred import DeferredWgrad
from onepass.product.product import PlainProduct, Product
from onepass.runtime.fp8 import MULTIPLE, check_fp8, fits_fp8
from onepass.runtime.fp8_recipe import Precision, recipe_of
from onepass.runtime.op import FORMULA, Call

PRODUCTS: dict[type, Callable[[Any, Tensor, TPLayout | None, DeferredWgrad | None], Product]] = {}
FROZEN: dict[type, Callable[[Precision, Tensor, Tensor, TPLayout | None, DeferredWgrad | None], Product]] = {}
_PLAIN = PlainProduct()


def product_for(
    precision: Precision, x: Tensor, weight: Tensor, layout: TPLayout | None, deferred: DeferredWgrad | None
) -> Product:  # fmt: skip
    """Return the product that `precision` asks for. Raise where there is none.

    Ranks that have parts of one weight must all have parts that fit, or none: `validate()` sees where they gather other types.
    """
    if type(weight) in FROZEN:
        return FROZEN[type(weight)](precision, x, weight, layout, deferred)
    if precision is not None:
        recipe = recipe_of(precision)
        check_fp8(x, weight)
        if recipe is not None and unfit_for_fp8(x, weight) is None:
            return PRODUCTS[type(recipe)](recipe, weight, layout, deferred)
    return _PLAIN if layout is None and deferred is None else PlainProduct(layout, deferred)


def describe_products(precision: Precision, x: Tensor, weight: Tensor, deferred: DeferredWgrad | None) -> str:
    """Return what `explain` says of the products."""
    described = _describe(precision, x, weight)
    if described is not None:
        return described
    return "products by PyTorch" if deferred is None else "products by PyTorch, the weight's gradient's in flush()"


def describe_formula(call: Call) -> str:
    """Return what `explain` says of an op's formula, whose product has a precision."""
    described = _describe(call.precision, call.x, call.weight)
    return FORMULA if described is None else f"the PyTorch formula; {described}"


def _describe(precision: Precision, x: Tensor, weight: Any) -> str | None:
    if type(weight) in FROZEN:
        return weight.describe_products()  # type: ignore[no-any-return]
    recipe = recipe_of(precision)
    if recipe is None:
        return None
    unfit = unfit_for_fp8(x, weight)
    if unfit is not None:
        return f"products in their own type, as {unfit}"
    wgrad = "" if recipe.has_wgrad else ", the weight's gradient in 16 bits"
    return f"products in eight bits ({recipe.types}; {recipe.scaling} scales{wgrad})"


def unfit_for_fp8(x: Tensor, weight: Tensor) -> str | None:
    """Return why this product stays in its own type, or None."""
    if not fits_fp8(weight.shape):
        N, K = weight.shape
        return f"the weight's sizes, {N} x {K}, are not multiples of {MULTIPLE}"
    return None if x.numel() else "there is nothing to do"
