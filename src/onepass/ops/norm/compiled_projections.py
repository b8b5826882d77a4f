"""Compiled, the product of several layers' weights as an op that sees their memory.

A compiler sees tensors and no memory: `joined` weights are a copy there, made at every step and kept for backward. These ops are
given all of the weights, and take them as one where they lie together when they run. The norm before the product is as in
`norm_linear`: what is kept is its input, and backward makes its result again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass.gradients.main_grad import accumulates_elsewhere
from onepass.gradients.packed_params import concat_no_grad
from onepass.ops.norm import kernels
from onepass.ops.norm.formula import NormOptions
from onepass.parallel.tensor_parallel import column_sums, input_gradient, rows_of
from onepass.runtime.autocast import product_type
from onepass.runtime.backend import choose
from onepass.runtime.dispatch import fast_apply, not_twice_differentiable, registered, under_functorch

# ---- registered ----


def _product(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
    return F.linear(x, concat_no_grad(weights), concat_no_grad(biases) if biases else None)


def _product_fake(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
    return x.new_empty(*x.shape[:-1], sum(weight.shape[0] for weight in weights))


def _input_gradient(dy: Tensor, weights: Sequence[Tensor]) -> Tensor:
    return input_gradient(dy, concat_no_grad(weights))


def _input_gradient_fake(dy: Tensor, weights: Sequence[Tensor]) -> Tensor:
    return dy.new_empty(*dy.shape[:-1], weights[0].shape[1])


_product_op = registered("product_of_several(Tensor x, Tensor[] weights, Tensor[] biases) -> Tensor", _product, _product_fake)
_gradient_op = registered(
    "input_gradient_of_several(Tensor dy, Tensor[] weights) -> Tensor", _input_gradient, _input_gradient_fake
)


# ---- autograd ----


class _Projections(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int, *parameters: Tensor) -> Tensor:
        """`parameters`: so many weights, and as many biases or none."""
        ctx.count, ctx.rows = count, [weight.shape[0] for weight in parameters[:count]]
        ctx.save_for_backward(x, *parameters[:count])
        y: Tensor = _product_op(x, parameters[:count], parameters[count:])
        return y

    @staticmethod
    @not_twice_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        need_x, _, *needs = ctx.needs_input_grad
        dx = _gradient_op(dy, weights) if need_x else None
        return dx, None, *_parameters_gradients(dy, x, ctx.rows, needs)


class _NormProjections(torch.autograd.Function):
    """y, and what came to the norm: the sum of x and the residual, or x itself."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        norm_weight: Tensor | None,
        norm_bias: Tensor | None,
        norm: NormOptions,
        count: int,
        *parameters: Tensor,
    ) -> tuple[Tensor, Tensor]:
        normed, h, stats = kernels.forward(x, residual, norm_weight, norm_bias, norm, True)
        h = x if h is None else h
        ctx.norm, ctx.rows = norm, [weight.shape[0] for weight in parameters[:count]]
        ctx.save_for_backward(h, norm_weight, norm_bias, stats, *parameters[:count])
        return _product_op(normed, parameters[:count], parameters[count:]), h

    @staticmethod
    @not_twice_differentiable
    def backward(ctx: Any, dy: Tensor, dh: Tensor) -> tuple[Tensor | None, ...]:
        h, norm_weight, norm_bias, stats, *weights = ctx.saved_tensors
        need_x, need_residual, need_weight, need_bias, _, _, *needs = ctx.needs_input_grad
        dx, dnorm_weight, dnorm_bias, normed = kernels.backward(
            _gradient_op(dy, weights), dh, h, norm_weight, norm_bias, stats, ctx.norm,
            need_x or need_residual, need_weight, need_bias, h.dtype, any(needs[: len(weights)]),
        )  # fmt: skip
        parameters = _parameters_gradients(dy, normed, ctx.rows, needs)
        dx, dresidual = dx if need_x else None, dx if need_residual else None
        return dx, dresidual, dnorm_weight, dnorm_bias, None, None, *parameters


def _parameters_gradients(dy: Tensor, x: Tensor | None, rows: list[int], needs: Sequence[bool]) -> list[Tensor | None]:
    """Of the weights, and of as many biases or none."""
    count = len(rows)
    grads: list[Tensor | None] = [None for _ in needs]
    if any(needs[:count]) and x is not None:
        grads[:count] = (rows_of(dy).t() @ rows_of(x)).split(rows)
    if any(needs[count:]):
        grads[count:] = column_sums(dy).to(dy.dtype).split(rows)
    return [grad if need else None for grad, need in zip(grads, needs, strict=True)]


_apply, _apply_norm = fast_apply(_Projections), fast_apply(_NormProjections)


# ---- what a Product asks ----


def use_compiled_projections(x: Tensor, late: Tensor | None, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> bool:
    """Compiled, whether this is for the ops: by kernels, in one type, gradients to autograd."""
    if len(weights) == 1 or under_functorch() or not x.numel():
        return False
    if any([accumulates_elsewhere(parameter) for parameter in (*weights, *biases)]):
        return False
    types = {x.dtype, product_type(x), *[parameter.dtype for parameter in (*weights, *biases)]}
    types |= set() if late is None else {late.dtype}
    return len(types) == 1 and choose("norm_linear", None, kernels.norm_unsupported(x)) == "triton"


def projections(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
    return _apply(x, len(weights), *weights, *biases)  # type: ignore[no-any-return]


def norm_projections(
    x: Tensor, residual: Tensor | None, norm_weight: Tensor | None, norm_bias: Tensor | None, norm: NormOptions,
    weights: Sequence[Tensor], biases: Sequence[Tensor],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """y, and what the norm was taken of: x + residual."""
    y: tuple[Tensor, Tensor] = _apply_norm(x, residual, norm_weight, norm_bias, norm, len(weights), *weights, *biases)
    return y
