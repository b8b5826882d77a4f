"""norm_linear in eight bits: the norm's passes write the codes that its products take (gradients/fp8_product.py)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from onepass.gradients.fp8_compiled import LOOKS_AT_A_STATE, CompiledFP8Call, forward_fake, lent, one_of, state_in_graph
from onepass.gradients.fp8_product import FP8Call, fp8_forward
from onepass.gradients.fp8_weight import CompiledFP8, FP8Operand, FP8Weight
from onepass.ops.norm import fp8
from onepass.ops.norm.formula import NormOptions
from onepass.ops.norm.forward import new_stats
from onepass.parallel.tensor_parallel import TPLayout
from onepass.runtime.fp8 import FP8Target, turned_width
from onepass.runtime.fp8_recipe import FP8Recipe
from onepass.runtime.op import Registered


def norm_linear_fp8(
    state: FP8Weight | CompiledFP8, x: Tensor, norm_weight: Tensor | None, norm_bias: Tensor | None, weight: Tensor,
    bias: Tensor | None, residual: Tensor | None, options: NormOptions, use_triton: bool, product: torch.dtype,
    layout: TPLayout | None, keep: bool,
) -> tuple[Tensor, Tensor, Tensor | None, FP8Call | CompiledFP8Call]:  # fmt: skip
    """Return y by a product in eight bits, h, the rows' statistics, and what backward needs of the state."""
    if isinstance(state, CompiledFP8):
        biases = [] if bias is None else [bias]
        return compiled_norm_product(
            x, norm_weight, norm_bias, [weight], biases, residual, options, use_triton, product, keep, state.recipe
        )
    y, h, stats, call = _forward(
        state, x, norm_weight, norm_bias, weight, bias, residual, options, use_triton, product, layout, keep
    )
    return y, x if h is None else h, stats, call


def _forward(
    state: FP8Weight, x: Tensor, norm_weight: Tensor | None, norm_bias: Tensor | None, weight: Tensor, bias: Tensor | None,
    residual: Tensor | None, options: NormOptions, use_triton: bool, product: torch.dtype, layout: TPLayout | None, keep: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, FP8Call]:  # fmt: skip
    """Return y, h where there is a residual, the statistics, and what backward needs."""
    found: list[tuple[Tensor | None, Tensor | None]] = []

    def run(target: FP8Target) -> tuple[Tensor, Tensor | None]:
        codes_of = fp8.norm_codes if use_triton else fp8.norm_codes_formula
        codes, inverse, h, stats = codes_of(x, residual, norm_weight, norm_bias, options, target, keep)
        found.append((h, stats))
        return codes.view(-1, codes.shape[-1]), inverse

    y, call = fp8_forward(state, weight, bias, x.shape[:-1], product, run, layout, noted=keep)
    return y, *found[-1], call


def compiled_norm_product(
    x: Tensor, norm_weight: Tensor | None, norm_bias: Tensor | None, weights: Sequence[Tensor], biases: Sequence[Tensor],
    residual: Tensor | None, options: NormOptions, use_triton: bool, product: torch.dtype, keep: bool, recipe: FP8Recipe,
) -> tuple[Tensor, Tensor, Tensor | None, CompiledFP8Call]:  # fmt: skip
    """Return what `norm_linear_fp8` does, in a graph, of the rows of all weights."""
    tensors = x, norm_weight, norm_bias, weights, biases, residual
    y, *kept, h, stats = _forward_op(*tensors, options, use_triton, product, keep, recipe)
    return y, x if h is None else h, stats, CompiledFP8Call(weights, recipe, recipe.has_wgrad, *kept)


def _forward_in_graph(
    x: Tensor, norm_weight: Tensor | None, norm_bias: Tensor | None, weights: Sequence[Tensor], biases: Sequence[Tensor],
    residual: Tensor | None, options: NormOptions, use_triton: bool, product: torch.dtype, keep: bool, recipe: FP8Recipe,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    state, weight = state_in_graph(x, weights, recipe)
    tensors = x, norm_weight, norm_bias, weight, one_of(biases), residual
    y, h, stats, call = _forward(state, *tensors, options, use_triton, product, None, keep)
    return y, *lent(call), h, stats


def _forward_fake(
    x: Tensor, norm_weight: Tensor | None, norm_bias: Tensor | None, weights: Sequence[Tensor], biases: Sequence[Tensor],
    residual: Tensor | None, options: NormOptions, use_triton: bool, product: torch.dtype, keep: bool, recipe: FP8Recipe,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    stats = new_stats(x, math.prod(x.shape[:-1]), options.layer) if keep else None
    return *forward_fake(x, weights, recipe, product), None if residual is None else x.new_empty(x.shape), stats


_forward_op = Registered(
    "norm_linear_fp8(Tensor x, Tensor? norm_weight, Tensor? norm_bias, Tensor[] weights, Tensor[] biases, Tensor? residual, "
    "NormOptions options, bool use_triton, ScalarType product, bool keep, FP8Recipe recipe) -> "
    "(Tensor, Tensor, Tensor?, Tensor?, Tensor?, Tensor?)",
    _forward_in_graph,
    _forward_fake,
    NormOptions,
    FP8Recipe,
    tags=LOOKS_AT_A_STATE,
)


def start_norm_operand(
    call: FP8Call | CompiledFP8Call, saved: tuple[Any, ...], options: NormOptions, use_triton: bool, later: bool
) -> Callable[[], FP8Operand]:
    """Return what makes norm(h)'s operand of the weight's gradient, as `FP8Call.start_input` does."""
    h, norm_weight, norm_bias, _, stats = saved

    def turn(target: FP8Target) -> Tensor:
        assert target.scale is not None, "rows with scales of their own have no transpose that is an operand"
        turned: Tensor = _turned_op(h, norm_weight, norm_bias, stats, target.scale, options, use_triton, target.dtype)
        return turned

    def run(target: FP8Target) -> tuple[Tensor, Tensor | None]:
        codes_of = fp8.norm_codes if use_triton else fp8.norm_codes_formula
        codes, inverse, *_ = codes_of(h, None, norm_weight, norm_bias, options, target, False)
        return codes.view(-1, codes.shape[-1]), inverse

    return call.start_input(run, turn, later=later)


def _turned(
    h: Tensor, weight: Tensor | None, bias: Tensor | None, stats: Tensor | None, scale: Tensor, options: NormOptions,
    use_triton: bool, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    turn = fp8.norm_codes_turned if use_triton else fp8.norm_codes_turned_formula
    return turn(h, stats, weight, bias, options, FP8Target(dtype, scale))


_turned_op = Registered(
    "norm_codes_turned(Tensor h, Tensor? weight, Tensor? bias, Tensor? stats, Tensor scale, NormOptions options, "
    "bool use_triton, ScalarType dtype) -> Tensor",
    _turned,
    lambda h, *rest: h.new_empty((h.shape[-1], turned_width(h)), dtype=rest[-1]),
    NormOptions,
)
