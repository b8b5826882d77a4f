"""activation_grouped_linear: the experts' activation and the grouped product after it.

Formula  bias_activation's without a bias, then ops/linear/grouped.py's.
Shapes   x [M, K] or, gated, [M, 2K], token_weight [M] or [M, 1], weight [E, N, K], ends [E] int32, y [M, N].
Saves    x and token_weight: backward rebuilds the activation in its own pass.
Eight bits: forward writes the activation's codes, each row at its own scale, in the activation's pass: of a gated 16-bit x,
         4 + 1 bytes a number of the activation, where an activation and a cast move 4 + 2 and 2 + 1. Backward is the pass that
         activation_linear has, and writes the activation in 16 bits for the weight's gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onepass.ops.activation import kernels
from onepass.ops.activation.activation_rows import ActivationRows, activation_by_formula
from onepass.ops.activation.activations import activation_of
from onepass.ops.activation.bias_activation import bias_activation
from onepass.ops.activation.formula import ActivationOptions, check_activation
from onepass.product.grouped import GroupedOptions, multiply_grouped_rows, run_grouped_linear
from onepass.runtime import saved
from onepass.runtime.backend import NATIVE, choose
from onepass.runtime.dispatch import product_type
from onepass.runtime.fp8_recipe import Precision


def activation_grouped_linear(
    x: Tensor,
    weight: Tensor,
    ends: Tensor,
    activation: str,
    *,
    token_weight: Tensor | None = None,
    clamp: float | None = None,
    linear_offset: float = 0.0,
    save: str = "input",
    precision: Precision = None,
) -> Tensor:
    """Return y in x's type, or autocast's. The gradient of a weight that carries main_grad is added there.

    Args:
        activation, token_weight, clamp, linear_offset, save: as in `bias_activation`.
        precision: as in `grouped_linear`.
    """
    given: dict[str, Any] = {
        "x": x, "activation": activation, "token_weight": token_weight, "clamp": clamp, "linear_offset": linear_offset,
        "save": save,
    }  # fmt: skip
    act = check_activation(given, None)
    options = ActivationOptions(act.key, None if clamp is None else float(clamp), float(linear_offset) or None)
    return multiply_activated_rows(x, weight, ends, options, token_weight, GroupedOptions(precision), save=save)


def multiply_activated_rows(
    x: Tensor, weight: Tensor, ends: Tensor, options: ActivationOptions, token_weight: Tensor | None, how: GroupedOptions,
    *, save: str = "input", backend: str | None = None,
) -> Tensor:  # fmt: skip
    """Return `activation_grouped_linear`, of arguments that are right."""
    dtype, act, compiling = product_type(x), activation_of(options.activation), torch.compiler.is_compiling()
    product = how.product(x, weight, dtype)
    chosen = choose("bias_activation", backend, kernels.activation_unsupported(x, act))
    if options.interleaved and (product.in_fp8 or compiling or chosen not in NATIVE):  # those take halves
        x, options = torch.cat((x[..., ::2], x[..., 1::2]), -1), options._replace(interleaved=False)
    if chosen not in NATIVE or (compiling and not product.in_fp8):
        given: dict[str, Any] = {"clamp": options.clamp, "linear_offset": options.linear_offset or 0.0, "save": save}
        a = bias_activation(x, activation=act.name, token_weight=token_weight, **given)
        return multiply_grouped_rows(a, weight, ends, product_type(a), how)
    if compiling:  # rounded once, as an uncompiled call does
        a = activation_by_formula(x, None, token_weight, options, torch.float32, save)
        return multiply_grouped_rows(a, weight, ends, dtype, how)
    prologue = ActivationRows(options, chosen == "triton" and x.numel() > 0, saved.saved_format(x, save, act.parts), dtype)
    inputs = x, None, None if token_weight is None else token_weight.contiguous()
    return run_grouped_linear(prologue, inputs, weight, ends, product, how.lora)
