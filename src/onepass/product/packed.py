"""The product of several layers' weights in a graph, as ops that see their memory.

A compiler sees tensors and no memory: concatenated weights are a copy there, made at every step and kept for backward. These ops
are given all of the weights, and take them as one where they lie together when they run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from onepass.distributed.tensor_parallel import Start, input_gradient
from onepass.gradients.packed_params import concat_no_grad
from onepass.product.product import Forward, OutputGradient, PlainProduct
from onepass.product.prologue import Inputs, Keep, Needs, Prologue
from onepass.runtime.dispatch import registered


def _product(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
    return F.linear(x, concat_no_grad(weights), concat_no_grad(biases) if biases else None)


_product_op = registered(
    "product_of_several(Tensor x, Tensor[] weights, Tensor[] biases) -> Tensor",
    _product,
    lambda x, weights, biases: x.new_empty(*x.shape[:-1], sum(weight.shape[0] for weight in weights)),
)
_gradient_op = registered(
    "input_gradient_of_several(Tensor dy, Tensor[] weights) -> Tensor",
    lambda dy, weights: input_gradient(dy, concat_no_grad(weights)),
    lambda dy, weights: dy.new_empty(*dy.shape[:-1], weights[0].shape[1]),
)


class PackedProduct(PlainProduct):
    """A product of several weights in the rows' type: a `Product`, and its own `ProductCall`."""

    __slots__ = ()

    def forward(
        self, prologue: Prologue, inputs: Inputs, weight: Any, bias: Any, needs: Needs, start: Start | None = None,
        keep: Keep | None = None,
    ) -> Forward:  # fmt: skip
        assert start is None, "weights that a graph takes apart have no adapters"
        rows, kept = prologue.rows(inputs, needs)
        return _product_op(rows, weight, [part for part in bias if part is not None]), rows, kept, self

    def output_gradient(
        self, dy: Tensor, weight: Any, came: Tensor | None, asks_rows: bool, asks_weight: bool, *, later: bool, ours: bool = False
    ) -> OutputGradient:  # fmt: skip
        drows = _gradient_op(dy, weight) if asks_rows else None
        return drows if came is None or drows is None else drows.add_(came), dy
