"""The prologue of norm_linear: norm(h), h = x + residual, as rows or as codes. h is kept, and each row's statistics.

Backward writes norm(h) again over its gradient, in the pass that makes the gradients of h and of the norm's parameters; its codes
come from fp32, in a pass of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onepass.gradients.main_grad import GradRequest, name_written
from onepass.gradients.vectors import VectorGrads
from onepass.ops.norm import fp8, kernels
from onepass.ops.norm.formula import NormOptions, norm_backward_formula, norm_by_formula
from onepass.ops.norm.forward import new_stats
from onepass.product.fp8.in_graph import LOOKS_AT_A_STATE, forward_fake, forward_in_graph
from onepass.product.fp8.prologue import Codes
from onepass.product.prologue import Inputs, Kept, Needs, PrologueGradients
from onepass.runtime.dispatch import cast
from onepass.runtime.fp8 import FP8Target, transposed_width
from onepass.runtime.fp8_recipe import FP8Recipe
from onepass.runtime.op import Registered


class NormRows(NamedTuple):
    """norm(h). Inputs: x, norm_weight, norm_bias, residual. Kept: h, norm_weight, norm_bias, the kernels' statistics."""

    options: NormOptions
    use_triton: bool
    returns: tuple[bool, bool]
    x_type: torch.dtype
    residual_type: torch.dtype | None
    dtype: torch.dtype  # the product's

    vectors: tuple[str, ...] = ("norm_weight", "norm_bias")

    # ---- forward ----

    def rows(self, inputs: Inputs, needs: Needs) -> tuple[Tensor, Kept]:
        x, norm_weight, norm_bias, residual = inputs
        assert x is not None
        if self.use_triton:
            normed, h, stats = kernels.forward(x, residual, norm_weight, norm_bias, None, self.options, needs is not None)
            return cast(normed, self.dtype), (x if h is None else h, norm_weight, norm_bias, stats)
        h = x if residual is None else cast(x + residual, x.dtype)
        normed = norm_by_formula(h, norm_weight, norm_bias, self.options)
        return cast(cast(normed, x.dtype), self.dtype), (h, norm_weight, norm_bias, None)

    def codes(self, inputs: Inputs, target: FP8Target, needs: Needs) -> tuple[Codes, Kept]:
        x, norm_weight, norm_bias, residual = inputs
        assert x is not None
        codes_of = fp8.norm_codes if self.use_triton else fp8.norm_codes_formula
        codes, inverse, h, stats = codes_of(x, residual, norm_weight, norm_bias, self.options, target, needs is not None)
        return (codes.view(-1, codes.shape[-1]), inverse), (x if h is None else h, norm_weight, norm_bias, stats)

    def in_graph(self, inputs: Inputs, *product: Any, needs: Needs) -> tuple[Sequence[Any], Kept]:
        x, norm_weight, norm_bias, residual = inputs
        rest = residual, self.options, self.use_triton, self.dtype, needs is not None
        *outputs, h, stats = _forward_op(x, norm_weight, norm_bias, *product[:2], *rest, product[2])
        return outputs, (x if h is None else h, norm_weight, norm_bias, stats)

    # ---- backward ----

    def rows_again(self, kept: Kept) -> Tensor:
        return self.rows((*kept[:3], None), None)[0]

    def codes_again(self, kept: Kept, target: FP8Target) -> Codes:
        return self.codes((*kept[:3], None), target, None)[0]

    def transposed_codes(self, kept: Kept, target: FP8Target) -> Tensor:
        assert target.scale is not None, "rows with scales of their own have no transpose that is an operand"
        transposed: Tensor = _transposed_op(*kept, target.scale, self.options, self.use_triton, target.dtype)
        return transposed

    def backward(
        self, kept: Kept, vectors: VectorGrads | None, drows: Tensor | None, dx: Tensor | None, requests: Sequence[GradRequest],
        *, rebuild: bool = False, target: FP8Target | None = None, ours: bool = True, u: Tensor | None = None,
    ) -> PrologueGradients:  # fmt: skip
        of_x, of_weight, of_bias, of_residual = (request is not GradRequest.SKIP for request in requests)
        of_h = of_x or of_residual
        into, dh, dweight, dbias, rows = None, dx if of_h else None, None, None, None
        if drows is not None:
            dh_type = self.x_type if self.residual_type is None else torch.promote_types(self.x_type, self.residual_type)
            backward: Callable[..., Any] = kernels.backward_into if self.use_triton else norm_backward_formula
            into, dh, dweight, dbias, rows = backward(
                vectors, drows, dh, *kept, self.options, of_h, of_weight, of_bias, dh_type, rebuild,
                into_dy=ours and dh_type == self.dtype,
            )  # fmt: skip
        elif rebuild:
            rows = self.rows_again(kept)
        dresidual = None
        if self.residual_type is not None and dh is not None:
            with name_written([] if vectors is None or into is None else vectors.accumulated(*self.vectors)):
                dresidual = dh.to(self.residual_type) if of_residual else None
                dh = dh.to(self.x_type) if of_x else None
        return PrologueGradients((dh, dweight, dbias, dresidual), into, None if rows is None else cast(rows, self.dtype))


def norm_rows(
    x: Tensor, residual: Tensor | None, options: NormOptions, dtype: torch.dtype, use_triton: bool = True,
    returns: tuple[bool, bool] = (False, True),
) -> NormRows:  # fmt: skip
    """Return the prologue of a call. By default kernels run, and h is returned."""
    return NormRows(options, use_triton, returns, x.dtype, None if residual is None else residual.dtype, dtype)


# ---- registered ----


def _forward(
    x: Tensor, norm_weight: Tensor | None, norm_bias: Tensor | None, weights: Sequence[Tensor], biases: Sequence[Tensor],
    residual: Tensor | None, options: NormOptions, *rest: Any,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    use_triton, product, keep, recipe = rest
    prologue = NormRows(options, use_triton, (False, False), x.dtype, None, product)
    inputs = x, norm_weight, norm_bias, residual
    outputs, (h, _, _, stats) = forward_in_graph(prologue, inputs, weights, biases, recipe, keep)
    return *outputs, None if residual is None else h, stats


def _forward_fake(
    x: Tensor, norm_weight: Tensor | None, norm_bias: Tensor | None, weights: Sequence[Tensor], biases: Sequence[Tensor],
    residual: Tensor | None, options: NormOptions, *rest: Any,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    _use_triton, product, keep, recipe = rest
    stats = new_stats(x, math.prod(x.shape[:-1]), options.layer) if keep else None
    return *forward_fake(x, weights, recipe, product), None if residual is None else x.new_empty(x.shape), stats


_forward_op = Registered(
    "norm_linear_fp8(Tensor x, Tensor? norm_weight, Tensor? norm_bias, Tensor[] weights, Tensor[] biases, Tensor? residual, "
    "NormOptions options, bool use_triton, ScalarType product, bool keep, FP8Recipe recipe) -> "
    "(Tensor, Tensor, Tensor?, Tensor?, Tensor?, Tensor?)",
    _forward,
    _forward_fake,
    NormOptions,
    FP8Recipe,
    tags=LOOKS_AT_A_STATE,
)


def _transposed(
    h: Tensor, weight: Tensor | None, bias: Tensor | None, stats: Tensor | None, scale: Tensor, options: NormOptions,
    use_triton: bool, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    transpose = fp8.norm_codes_transposed if use_triton else fp8.norm_codes_transposed_formula
    return transpose(h, stats, weight, bias, options, FP8Target(dtype, scale))


_transposed_op = Registered(
    "norm_codes_transposed(Tensor h, Tensor? weight, Tensor? bias, Tensor? stats, Tensor scale, NormOptions options, "
    "bool use_triton, ScalarType dtype) -> Tensor",
    _transposed,
    lambda h, *rest: h.new_empty((h.shape[-1], transposed_width(h)), dtype=rest[-1]),
    NormOptions,
)
