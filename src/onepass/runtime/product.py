"""The product of a linear layer, y = x @ weight.T + bias, whose parameters' gradients go where runtime/main_grad.py says.

What ops with such a product share where nothing else happens to it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass.runtime.dispatch import bare_apply, once
from onepass.runtime.main_grad import Asked, asked, main_grads_of, vector_gradient, weight_gradient


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        needs_x, needs_weight, _ = ctx.needs_input_grad
        ctx.parameters, ctx.main_grads = (weight, bias), main_grads_of(ctx, 1, weight, bias)
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None)
        return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))

    @staticmethod
    @once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        wanted_x, wanted_weight, wanted_bias = asked(ctx, True, True, ctx.parameters[1] is not None)
        rows = dy.reshape(-1, dy.shape[-1])
        dx = dweight = dbias = None
        if wanted_x is not Asked.NOT:
            dx = (rows @ weight.to(dy.dtype)).view(*dy.shape[:-1], weight.shape[1])
        if wanted_weight is not Asked.NOT:
            dweight = weight_gradient(rows, x.reshape(-1, x.shape[-1]), ctx.parameters[0], ctx.main_grads[0], wanted_weight)
        if wanted_bias is not Asked.NOT:
            dbias = vector_gradient(column_sums(rows), ctx.parameters[1], ctx.main_grads[1], wanted_bias)
        return dx, dweight, dbias


linear_product = bare_apply(_Product)


def column_sums(rows: Tensor) -> Tensor:
    """Of each column, in fp32 or wider: a bias's gradient before it is rounded."""
    return rows.sum(0, dtype=torch.promote_types(rows.dtype, torch.float32))
