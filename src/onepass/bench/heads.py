"""The products that a loss of hidden states can't do without, by cuBLAS: the floor that its time is set against."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _HeadProducts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, by_token: int, *teacher: Tensor) -> Any:
        logits = hidden @ weight.t()
        if teacher:
            teacher[0] @ teacher[1].t()
        ctx.save_for_backward(hidden, weight, logits)
        ctx.gathers = hasattr(weight, "main_grad")
        if not by_token:
            return hidden.new_zeros(1)
        return tuple(hidden.new_zeros(hidden.shape[0], dtype=torch.float32) for _ in range(by_token))

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, logits = ctx.saved_tensors
        dhidden, dweight = logits @ weight, logits.t() @ hidden if ctx.needs_input_grad[1] else None
        # with a main_grad the floor has the product, without the addition
        return dhidden, None if ctx.gathers else dweight, *(None for _ in ctx.needs_input_grad[2:])


def head_products(hidden: Tensor, weight: Tensor, *teacher: Tensor, by_token: int = 0) -> Any:
    """Make the logits, and in backward their products with the weight and, unless it is frozen, with the hidden states.

    The logits stand in for their own gradient, which has the same shape.

    Args:
        teacher: another head's hidden states and weight, whose logits are made too.
        by_token: how many numbers each token has, 0 of a mean.
    """
    return _HeadProducts.apply(hidden, weight, by_token, *teacher)  # type: ignore[no-untyped-call]
