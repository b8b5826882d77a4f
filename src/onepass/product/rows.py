"""Rows as they are: the prologue of a plain linear layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onepass.distributed.tensor_parallel import rows_of
from onepass.gradients.main_grad import GradRequest
from onepass.gradients.vectors import VectorGrads
from onepass.kernels.fp8_cast import cast_rows, cast_tensor
from onepass.product.in_graph import LOOKS_AT_A_STATE, forward_fake, forward_in_graph
from onepass.product.prologue import Codes, Inputs, Kept, Needs, PrologueGradients
from onepass.runtime.fp8 import FP8Target, turned_width
from onepass.runtime.fp8_recipe import FP8Recipe
from onepass.runtime.op import Registered


class Rows(NamedTuple):
    """x, rounded to the product's type."""

    x_type: torch.dtype
    dtype: torch.dtype  # the product's

    vectors: tuple[str, ...] = ()
    returns: tuple[bool, bool] = (False, False)

    def rows(self, inputs: Inputs, needs: Needs) -> tuple[Tensor, Kept]:
        x, dtype = inputs[0], self.dtype
        assert x is not None
        rows = x if x.dtype is dtype else x.to(dtype)  # no call of `cast`, `rows_again` or `_kept`: a plain layer feels each
        return rows, ((x,) if needs is not None and needs[1] else (None,))

    def codes(self, inputs: Inputs, target: FP8Target, needs: Needs) -> tuple[Codes, Kept]:
        return self.codes_again(inputs, target), _kept(inputs[0], needs)

    def in_graph(self, inputs: Inputs, *product: Any, needs: Needs) -> tuple[Sequence[Any], Kept]:
        (x,) = inputs
        return _forward_op(x, *product, self.dtype, needs is not None), _kept(x, needs)

    def rows_again(self, kept: Kept) -> Tensor:
        (x,) = kept
        assert x is not None
        return x if x.dtype is self.dtype else x.to(self.dtype)

    def codes_again(self, kept: Kept, target: FP8Target) -> Codes:
        (x,) = kept
        assert x is not None
        if target.scale is None:
            return cast_rows(rows_of(x), target.dtype)
        codes, _ = cast_tensor(rows_of(x), target)
        assert codes is not None
        return codes, None

    def transposed_codes(self, kept: Kept, target: FP8Target) -> Tensor:
        (x,) = kept
        assert x is not None and target.scale is not None
        transposed: Tensor = _transposed_op(rows_of(x), target.scale, target.dtype)
        return transposed

    def backward(
        self, kept: Kept, vectors: VectorGrads | None, drows: Tensor | None, dx: Tensor | None, requests: Sequence[GradRequest],
        *, rebuild: bool = False, target: FP8Target | None = None, ours: bool = True,
    ) -> PrologueGradients:  # fmt: skip
        dx = drows if drows is None or drows.dtype is self.x_type else drows.to(self.x_type)
        return PrologueGradients((dx,), None, self.rows_again(kept) if rebuild else None)


def _kept(x: Tensor | None, needs: Needs) -> Kept:
    """Return x where the weight's gradient needs it."""
    return (x if needs is not None and needs[1] else None,)


def _transposed(rows: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    _, transposed = cast_tensor(rows, FP8Target(dtype, scale), codes=False, turned=True)
    assert transposed is not None
    return transposed


_transposed_op = Registered(
    "fp8_cast_turned(Tensor rows, Tensor scale, ScalarType dtype) -> Tensor",
    _transposed,
    lambda rows, scale, dtype: rows.new_empty((rows.shape[-1], turned_width(rows)), dtype=dtype),
)


def _forward(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], recipe: FP8Recipe, product: torch.dtype, noted: bool
) -> Sequence[Tensor | None]:
    return forward_in_graph(Rows(x.dtype, product), (x,), weights, biases, recipe, noted)[0]


_forward_op = Registered(
    "fp8_linear(Tensor x, Tensor[] weights, Tensor[] biases, FP8Recipe recipe, ScalarType product, bool noted) -> "
    "(Tensor, Tensor, Tensor?, Tensor?)",
    _forward,
    lambda x, weights, biases, recipe, product, noted: forward_fake(x, weights, recipe, product),
    FP8Recipe,
    tags=LOOKS_AT_A_STATE,
)
