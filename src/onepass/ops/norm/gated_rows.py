"""The prologue of gated_norm_linear: rms_norm(x) * act(z), or the gate first, as rows. x and z are kept.

Backward writes the rows again over their gradient, in the pass that makes the gradients of x, z and norm_weight; wide ones by
forward's kernel, after that. For a product in eight bits the rows are cast, in a pass of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onepass.gradients.main_grad import GradRequest
from onepass.gradients.places import Place
from onepass.gradients.vectors import VectorGrads
from onepass.ops.norm.gated_kernels import WIDEST_REBUILT, GatedNormOptions
from onepass.ops.norm.gated_norm import gated_backward_into, gated_formula, gated_forward
from onepass.product.fp8.in_graph import GraphRows
from onepass.product.fp8.prologue import Codes
from onepass.product.fp8.rows import FP8Rows
from onepass.product.prologue import Inputs, Kept, Needs, PrologueGradients
from onepass.runtime.dispatch import cast
from onepass.runtime.formula import formula_gradients, run_formula
from onepass.runtime.fp8 import FP8Target


class GatedNormRows(NamedTuple):
    """The gated norm. Inputs and kept: x, norm_weight, z."""

    options: GatedNormOptions
    head: int  # columns that norm_weight has: each head of a row is a row to the kernels
    use_triton: bool
    dtype: torch.dtype  # the product's
    place: Place | None  # of z's gradient

    vectors: tuple[str, ...] = ("norm_weight",)
    returns: tuple[bool, bool] = (False, False)

    def rows(self, inputs: Inputs, needs: Needs) -> tuple[Tensor, Kept]:
        x, norm_weight, z = inputs
        assert x is not None and z is not None
        heads, gates = self._by_head(x), self._by_head(z)
        if self.use_triton:
            made: Tensor = gated_forward(heads, gates, norm_weight, self.options)
        else:
            made = gated_by_formula(heads, norm_weight, gates, self.options)
        return cast(made.view(x.shape), self.dtype), inputs

    def _by_head(self, x: Tensor) -> Tensor:
        return x if self.head == x.shape[-1] else x.unflatten(-1, (-1, self.head))

    def rows_again(self, kept: Kept) -> Tensor:
        return self.rows(kept, None)[0]

    def backward(
        self, kept: Kept, vectors: VectorGrads | None, drows: Tensor | None, dx: Tensor | None, requests: Sequence[GradRequest],
        *, rebuild: bool = False, target: FP8Target | None = None, ours: bool = True, u: Tensor | None = None,
    ) -> PrologueGradients:  # fmt: skip
        if drows is None:
            return PrologueGradients((None, None, None), rows=self.rows_again(kept) if rebuild else None)
        x, norm_weight, z = kept
        assert x is not None and z is not None
        of_x, of_weight, of_z = (request is not GradRequest.SKIP for request in requests)
        dy, heads, gates = map(self._by_head, (drows, x, z))
        if self.use_triton:
            apart = rebuild and self.head // self.options.groups > WIDEST_REBUILT
            needs = of_x, of_z, of_weight, rebuild and not apart
            into, (grad_x, grad_z, dweight, rows) = gated_backward_into(
                vectors, dy, heads, gates, norm_weight, self.options, *needs, into_dy=ours, place=self.place
            )
            if apart:
                rows = gated_forward(heads, gates, norm_weight, self.options)
        else:
            if vectors is not None:
                (norm_weight,) = vectors.wide(norm_weight)
            formula = partial(gated_by_formula, options=self.options)
            tensors, needs_of = (heads, norm_weight, gates), (of_x, of_weight, of_z)
            rows, (grad_x, dweight, grad_z) = formula_gradients(formula, tensors, needs_of, cast(dy, x.dtype))
            into = None
        if rows is not None:
            rows = cast(rows.view(x.shape), self.dtype)
        shaped = [None if grad is None else grad.view(x.shape) for grad in (grad_x, grad_z)]
        return PrologueGradients((shaped[0], dweight, shaped[1]), into, rows)

    # ---- eight bits ----

    def codes(self, inputs: Inputs, target: FP8Target, needs: Needs) -> tuple[Codes, Kept]:
        return self.codes_again(inputs, target), inputs

    def codes_again(self, kept: Kept, target: FP8Target) -> Codes:
        return FP8Rows(self.dtype, self.dtype).codes_again((self.rows_again(kept),), target)

    def transposed_codes(self, kept: Kept, target: FP8Target) -> Tensor:
        return FP8Rows(self.dtype, self.dtype).transposed_codes((self.rows_again(kept),), target)

    def in_graph(self, inputs: Inputs, *product: Any, needs: Needs) -> tuple[Sequence[Any], Kept]:
        rows, kept = self.rows(inputs, needs)
        return GraphRows(self.dtype, self.dtype).in_graph((rows,), *product, needs=needs)[0], kept


def gated_by_formula(
    x: Tensor, norm_weight: Tensor | None, z: Tensor, options: GatedNormOptions, dtype: torch.dtype | None = None
) -> Tensor:
    """Return the rows by PyTorch, over blocks of rows on a CPU. They can be differentiated, and keep x, z and norm_weight."""
    formula = partial(gated_formula, options=options, dtype=dtype)
    return run_formula(formula, "input", x, shared=(norm_weight,), per_row=(z,))  # type: ignore[no-any-return]
