"""norm_linear in eight bits: the norm's passes write the codes that its products take (gradients/fp8_product.py)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from onepass.gradients.fp8_product import FP8Call, fp8_forward
from onepass.gradients.fp8_weight import FP8Operand, FP8Weight
from onepass.ops.norm import fp8
from onepass.ops.norm.formula import NormOptions
from onepass.parallel.tensor_parallel import TPLayout
from onepass.runtime.fp8 import FP8Target


def norm_linear_fp8(
    state: FP8Weight, x: Tensor, norm_weight: Tensor | None, norm_bias: Tensor | None, weight: Tensor, bias: Tensor | None,
    residual: Tensor | None, options: NormOptions, use_triton: bool, product: torch.dtype, layout: TPLayout | None, keep: bool,
) -> tuple[Tensor, Tensor, Tensor | None, FP8Call]:  # fmt: skip
    """Return y by a product in eight bits, h, the rows' statistics, and what backward needs of the state."""
    found: list[tuple[Tensor | None, Tensor | None]] = []

    def run(target: FP8Target) -> tuple[Tensor, Tensor | None]:
        codes_of = fp8.norm_codes if use_triton else fp8.norm_codes_formula
        codes, inverse, h, stats = codes_of(x, residual, norm_weight, norm_bias, options, target, keep)
        found.append((h, stats))
        return codes.view(-1, codes.shape[-1]), inverse

    y, call = fp8_forward(state, weight, bias, x.shape[:-1], product, run, layout, noted=keep)
    h, stats = found[-1]
    return y, x if h is None else h, stats, call


def start_norm_operand(
    call: FP8Call, saved: tuple[Any, ...], options: NormOptions, use_triton: bool, later: bool
) -> Callable[[], FP8Operand]:
    """Return what makes norm(h)'s operand of the weight's gradient, as `FP8Call.start_input` does."""
    h, norm_weight, norm_bias, _, stats = saved
    turn = fp8.norm_codes_turned if use_triton else fp8.norm_codes_turned_formula

    def run(target: FP8Target) -> tuple[Tensor, Tensor | None]:
        codes_of = fp8.norm_codes if use_triton else fp8.norm_codes_formula
        codes, inverse, *_ = codes_of(h, None, norm_weight, norm_bias, options, target, False)
        return codes.view(-1, codes.shape[-1]), inverse

    return call.start_input(run, partial(turn, h, stats, norm_weight, norm_bias, options), later=later)
