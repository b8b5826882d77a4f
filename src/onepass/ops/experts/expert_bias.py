"""A bias for each expert: added to rows that are sorted by expert, or weighted and added to tokens.

Rows     y + t * bias[e], where t is a number a row, or 1: an adapter of rank 1 (kernels/low_rank.py), of which an expert is the
         document. A pass over all rows.
Tokens   y + mix @ bias, where mix [T, E] has a token's weights: an adapter whose rank is the number of experts. A pass over 1 / k
         of the numbers, which nothing but a sum over each token's rows may follow.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onepass.gradients.main_grad import GradRequest, grad_requests, main_grads_of, vector_gradient
from onepass.gradients.written_names import WrittenNames, names_written, note_written
from onepass.kernels.low_rank import NO_DROPOUT, lora_expand, lora_gradient, lora_shrink
from onepass.runtime.dispatch import cast, not_twice_differentiable


class _ExpertBias(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, y: Tensor | None, bias: Tensor, ends: Tensor | None, t: Tensor, name: str, written: WrittenNames | None
    ) -> Tensor:  # fmt: skip
        """t: [M, 1], or without ends [T, E]."""
        dtype, needs = t.dtype if y is None else y.dtype, ctx.needs_input_grad
        column = cast(bias, dtype).mT if ends is None else cast(bias, dtype).unsqueeze(-1)
        factors = cast(t, dtype)
        ctx.name, ctx.written = name, written
        ctx.bias, ctx.t_type = bias, t.dtype
        ctx.main_grads = main_grads_of(needs[1:2], bias)
        ctx.save_for_backward(factors, ends, column if needs[3] else None)
        return lora_expand(factors, column, y, ends, None, NO_DROPOUT)  # type: ignore[no-any-return]

    @staticmethod
    @not_twice_differentiable
    @names_written
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        factors, ends, column = ctx.saved_tensors
        request, sums, dbias, dt = grad_requests(ctx, 2)[1], None, None, None
        if request is not GradRequest.SKIP:
            sums = lora_gradient(factors, dy, ends, None, ends is not None, NO_DROPOUT).view(ctx.bias.shape)
        if column is not None:
            dt = cast(lora_shrink(dy, column, ends, None, None, 1.0, NO_DROPOUT), ctx.t_type)
        if sums is not None:
            dbias = vector_gradient(sums, ctx.bias, ctx.main_grads[0], request)
            note_written(ctx.written, ctx.name, ctx.main_grads[0], request)
        return dy if ctx.needs_input_grad[0] else None, dbias, None, dt, None, None


def add_expert_bias(
    y: Tensor, bias: Tensor | None, ends: Tensor, t: Tensor | None, name: str, written: WrittenNames | None
) -> Tensor:  # fmt: skip
    """Return y [M, N] and each row's expert's bias [E, N], times t [M]. `ends` [E]: where each expert's rows end.

    `name`: what errors call the bias.
    """
    if bias is None:
        return y
    factors = y.new_ones(y.shape[0], 1) if t is None else t.unsqueeze(-1)
    added: Tensor = _ExpertBias.apply(y, bias, ends, factors, name, written)
    return added


def add_weighted_bias(
    y: Tensor | None, bias: Tensor | None, weights: Tensor, chosen: Tensor, name: str, written: WrittenNames | None
) -> Tensor | None:  # fmt: skip
    """Return y [T, N], or zeros, and the biases [E, N] of each token's experts, chosen [T, k], times their weights [T, k].

    An expert that isn't there adds nothing. `weights` have the result's type.
    """
    if bias is None:
        return y
    experts = torch.arange(bias.shape[0], device=chosen.device)
    mix = torch.where(chosen[..., None] == experts, weights[..., None], 0).sum(1)
    added: Tensor = _ExpertBias.apply(y, bias, None, mix, name, written)
    return added
