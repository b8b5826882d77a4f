"""grouped_linear: the product of rows sorted by expert with their expert's weight.

Formula  y[rows of e] = x[rows of e] @ weight[e].T, for every expert e.
Shapes   x [M, K], weight [E, N, K], y [M, N]; ends [E] int32: where each expert's rows end. An expert may have none.
Saves    x and the weight.
Numbers  the weight's gradient has fp32 sums. PyTorch's grouped product rounds it once before it is added to main_grad; QuACK's
         and the loop over experts add each product to main_grad directly.
Eight bits: product/grouped.py. Forward and backward cast rows, 3 bytes a number of 16-bit x and dy.
"""

from __future__ import annotations

import torch
from torch import Tensor

from onepass.ops.linear.routing import Routes, scatter_tokens
from onepass.product.gathered_rows import GatheredRows
from onepass.product.grouped import GroupedOptions, multiply_grouped_rows, run_grouped_linear
from onepass.runtime.dispatch import product_type
from onepass.runtime.fp8_recipe import Precision


def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor, precision: Precision = None) -> Tensor:
    """Return y in x's type, or autocast's. The gradient of a weight that carries main_grad is added there.

    Args:
        precision: ``fp8`` or an `onepass.FP8Recipe` runs forward and x's gradient in eight bits where PyTorch can. Elsewhere
            products keep their type, and the logger ``onepass`` says why.
    """
    return multiply_grouped_rows(x, weight, ends, product_type(x), GroupedOptions(precision))


def gathered_grouped_linear(x: Tensor, weight: Tensor, routes: Routes, options: GroupedOptions) -> Tensor:
    """Return `grouped_linear` of each route's row of x, [tokens, K]. It saves x, not the rows: backward gathers them again."""
    dtype = product_type(x)
    if torch.compiler.is_compiling():  # it keeps what it likes
        return multiply_grouped_rows(scatter_tokens(x, routes), weight, routes.ends, dtype, options)
    inputs = x, routes.tokens, routes.rows
    product = options.product(x, weight, dtype)
    return run_grouped_linear(GatheredRows(x.dtype, dtype), inputs, weight, routes.ends, product, options.lora)
