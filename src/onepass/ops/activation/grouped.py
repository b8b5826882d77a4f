"""activation_grouped_linear: the experts' activation and the grouped product after it.

Formula  bias_activation's without a bias, then ops/linear/grouped.py's.
Shapes   x [M, K] or, gated, [M, 2K], token_weight [M] or [M, 1], weight [E, N, K], ends [E] int32, y [M, N].
Saves    in eight bits x and token_weight: backward rebuilds the activation. Else what the two ops save.
Eight bits: forward writes the activation's codes, each row at its own scale, in the activation's pass: of a gated 16-bit x,
         4 + 1 bytes a number of the activation, where an activation and a cast move 4 + 2 and 2 + 1. Backward is the pass that
         activation_linear has, and writes the activation in 16 bits for the weight's gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onepass.gradients.fp8_weight import FP8Operand
from onepass.gradients.grouped import (
    fp8_grouped_forward,
    fp8_input_gradient_op,
    graph_break_before_2_10,
    grouped_linear_product,
    grouped_weight_gradient,
    unfit_for_grouped_fp8,
)
from onepass.gradients.main_grad import GradRequest, grad_requests, main_grads_of
from onepass.ops.activation import fp8, kernels
from onepass.ops.activation.activation_linear import activation_by_formula, backward_by_formula, backward_by_kernels
from onepass.ops.activation.activations import activation_of
from onepass.ops.activation.bias_activation import bias_activation
from onepass.ops.activation.formula import ActivationOptions
from onepass.runtime import saved
from onepass.runtime.autocast import product_type
from onepass.runtime.backend import NATIVE, choose
from onepass.runtime.dispatch import fast_apply, needs_grad, not_twice_differentiable
from onepass.runtime.fp8 import E4M3, FP8Target
from onepass.runtime.fp8_recipe import Precision


def _forward(
    x: Tensor, token_weight: Tensor | None, weight: Tensor, ends: Tensor, options: ActivationOptions, use_triton: bool,
    product: torch.dtype,
) -> Tensor:  # fmt: skip
    codes, inverse = fp8.activation_codes(x, None, token_weight, options, FP8Target(E4M3), use_triton=use_triton)
    assert inverse is not None
    return fp8_grouped_forward(FP8Operand(codes, inverse), weight, ends, product)


class _ActivationGroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, token_weight: Tensor | None, weight: Tensor, ends: Tensor, options: ActivationOptions,
        use_triton: bool, product: torch.dtype, save: str,
    ) -> Tensor:  # fmt: skip
        graph_break_before_2_10()
        ctx.weight, ctx.main_grad = weight, main_grads_of(ctx.needs_input_grad[2:], weight)[0]
        ctx.options, ctx.use_triton, ctx.product = options, use_triton, product
        ctx.stored = saved.saved_format(x, save, activation_of(options.activation).parts)
        ctx.save_for_backward(token_weight, weight, ends, *saved.pack(x, ctx.stored))
        return _forward(x, token_weight, weight, ends, options, use_triton, product)

    @staticmethod
    @not_twice_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        token_weight, weight, ends, *kept = ctx.saved_tensors
        requests = grad_requests(ctx, True, token_weight is not None, True)
        need_dx, need_dtoken_weight, need_dweight = (each is not GradRequest.SKIP for each in requests)
        dy = dy.contiguous()  # PyTorch's product takes no expanded tensor
        dactivated = fp8_input_gradient_op(dy, weight, ends) if need_dx or need_dtoken_weight else None
        needs, rebuild = (need_dx, False, need_dtoken_weight), ctx.product if need_dweight else None
        if dactivated is None and rebuild is None:
            return (None,) * 8
        run = backward_by_kernels if ctx.use_triton else backward_by_formula
        _, dx, _, dtoken_weight, activated = run(
            None, dactivated, tuple(kept), None, token_weight, ctx.options, ctx.stored, needs, rebuild
        )
        dweight = None
        if need_dweight:
            assert activated is not None
            dweight = grouped_weight_gradient(dy, activated, ends, ctx.weight, ctx.main_grad, requests[2])
        return dx, dtoken_weight, dweight, None, None, None, None, None


_apply = fast_apply(_ActivationGroupedLinear)


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
    act = kernels.check_activation(x, None, activation, token_weight, clamp, linear_offset, save)
    product = product_type(x)
    in_fp8 = precision is not None and unfit_for_grouped_fp8(precision, x, weight, product) is None
    chosen = choose("bias_activation", None, kernels.activation_unsupported(x, act))
    options = ActivationOptions(act.key, None if clamp is None else float(clamp), float(linear_offset) or None)
    if not in_fp8 or chosen not in NATIVE:
        given: dict[str, Any] = {"clamp": clamp, "linear_offset": linear_offset, "save": save}
        a = bias_activation(x, None, activation, token_weight=token_weight, **given)
        return grouped_linear_product(a, weight, ends, product_type(a), in_fp8)
    if torch.compiler.is_compiling():  # rounded once, as an uncompiled call does
        a = activation_by_formula(x, None, token_weight, options, torch.float32, save)
        return grouped_linear_product(a, weight, ends, product, in_fp8)
    token_weight = None if token_weight is None else token_weight.contiguous()
    use_triton = chosen == "triton"
    if not needs_grad(x, token_weight, weight):
        return _forward(x, token_weight, weight, ends, options, use_triton, product)
    y: Tensor = _apply(x, token_weight, weight, ends, options, use_triton, product, save)
    return y
