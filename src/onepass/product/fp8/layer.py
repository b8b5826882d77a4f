"""The product in eight bits of a layer, by its recipe and its weight: called now, or in a graph. It is entered in `PRODUCTS`."""

from __future__ import annotations

import torch
from torch import Tensor

from onepass.distributed.tensor_parallel import TPLayout
from onepass.gradients.deferred import DeferredWgrad
from onepass.product.fp8.in_graph import CompiledFP8Product
from onepass.product.fp8.product import FP8Product
from onepass.product.fp8.weight import fp8_weight
from onepass.product.precision import PRODUCTS
from onepass.product.product import Product
from onepass.runtime.batch_invariance import refuse
from onepass.runtime.dispatch import under_functorch
from onepass.runtime.fp8_recipe import FP8Recipe


def fp8_product(
    recipe: FP8Recipe, weight: Tensor, layout: TPLayout | None, deferred: DeferredWgrad | None
) -> Product:  # fmt: skip
    """Return the product. Its weight carries the scales, which ranks share where they have rows of one tensor."""
    if under_functorch():
        raise RuntimeError("precision must be None under vmap and functional derivatives: a product in eight bits keeps state")
    if recipe.scaling != "row":
        refuse(f"precision with {recipe.scaling} scales", "a scale is of all rows, where by 'row' each has its own")
    if torch.compiler.is_compiling():
        if layout is not None:
            raise RuntimeError("precision must be None under torch.compile with a tp_group: run the call uncompiled")
        return CompiledFP8Product(recipe, deferred)
    state = fp8_weight(weight, recipe)
    if layout is not None:
        state.share(layout)
    return FP8Product(state, layout, deferred)


PRODUCTS[FP8Recipe] = fp8_product
