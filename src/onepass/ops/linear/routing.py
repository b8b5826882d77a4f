"""Routing of tokens to the experts of a mixture and back: rows are sorted by expert, for grouped products."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from onepass.runtime.dispatch import not_twice_differentiable


class Routes(NamedTuple):
    """The rows of T tokens, k each, sorted by expert."""

    weights: Tensor  # [T x k] fp32: each row's weight
    tokens: Tensor  # [T x k]: each row's token
    rows: Tensor  # [T, k]: each token's rows
    ends: Tensor  # [experts] int32: where each expert's rows end


def route(weights: Tensor, chosen: Tensor, experts: int) -> Routes:
    """Sort rows by expert. chosen [T, k]: each token's experts; weights [T, k]: theirs; experts: how many there are."""
    flat, k = chosen.flatten(), chosen.shape[1]
    order = flat.argsort(stable=True)
    rows = torch.empty_like(order)
    rows[order] = torch.arange(order.shape[0], device=order.device)
    ends = count_tokens(flat, experts).cumsum(0).int()
    return Routes(weights.flatten()[order], order // k, rows.view(-1, k), ends)


def count_tokens(chosen: Tensor, experts: int) -> Tensor:
    """Count how often each expert is chosen. bincount would wait for the GPU."""
    return (chosen.unsqueeze(-1) == torch.arange(experts, device=chosen.device)).sum(0)


# ---- scatter and gather: each is the other's gradient, and neither needs atomics ----


class _ScatterTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tokens: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        return x[tokens]

    @staticmethod
    @not_twice_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (rows,) = ctx.saved_tensors
        return dy[rows].sum(1), None, None


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tokens: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        return x[rows].sum(1)

    @staticmethod
    @not_twice_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (tokens,) = ctx.saved_tensors
        return dy[tokens], None, None


def scatter_tokens(x: Tensor, routes: Routes) -> Tensor:
    """Copy each token's row [T, H] to its experts' rows [T x k, H]."""
    y: Tensor = _ScatterTokens.apply(x, routes.tokens, routes.rows)
    return y


def gather_tokens(x: Tensor, routes: Routes) -> Tensor:
    """Sum each token's rows [T x k, H] to [T, H]."""
    y: Tensor = _GatherTokens.apply(x, routes.tokens, routes.rows)
    return y
