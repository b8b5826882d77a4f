"""The precision of the products of layers that a model has already."""

from __future__ import annotations

from torch import nn

from onepass.nn.linear import ColumnParallelLinear, Linear, RowParallelLinear
from onepass.nn.norm_linear import NormLinear
from onepass.runtime.fp8_recipe import Precision, recipe_of


def set_precision(module: nn.Module, precision: Precision) -> int:
    """Run the products of all onepass linear layers of a module in eight bits, or None: in their own type. Return how many.

        onepass.nn.set_precision(model.layers, "fp8")

    Args:
        precision: ``fp8``, an `onepass.FP8Recipe`, or None.
    """
    recipe_of(precision)
    kinds = Linear, ColumnParallelLinear, RowParallelLinear, NormLinear
    layers = [each for each in module.modules() if isinstance(each, kinds)]
    for layer in layers:
        layer.precision = precision
    return len(layers)
