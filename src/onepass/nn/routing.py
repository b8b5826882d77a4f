"""Tokens on their way to the experts of a mixture and back, sorted by expert, so that the experts' products are grouped ones."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from onepass.runtime.dispatch import once


class Routes(NamedTuple):
    """Where T tokens go: T x k rows, sorted by expert."""

    weights: Tensor  # [T x k] fp32, of the rows
    tokens: Tensor  # [T x k]: each row's token
    rows: Tensor  # [T, k]: each token's rows
    ends: Tensor  # [experts] int32: where each expert's rows end


def routes_of(weights: Tensor, chosen: Tensor, experts: int) -> Routes:
    """Of each token's chosen experts [T, k], of that many, and their weights [T, k]."""
    flat, k = chosen.flatten(), chosen.shape[1]
    order = flat.argsort(stable=True)
    rows = torch.empty_like(order)
    rows[order] = torch.arange(order.shape[0], device=order.device)
    ends = counted(flat, experts).cumsum(0).int()
    return Routes(weights.flatten()[order], order // k, rows.view(-1, k), ends)


def counted(chosen: Tensor, experts: int) -> Tensor:
    """How often each expert is chosen. Not by bincount, which waits for the GPU."""
    return (chosen.unsqueeze(-1) == torch.arange(experts, device=chosen.device)).sum(0)


# ---- rows of tokens and back: each is the other's gradient, and neither needs atomics ----


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tokens: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        return x[tokens]

    @staticmethod
    @once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (rows,) = ctx.saved_tensors
        return dy[rows].sum(1), None, None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tokens: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        return x[rows].sum(1)

    @staticmethod
    @once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (tokens,) = ctx.saved_tensors
        return dy[tokens], None, None


def spread(x: Tensor, routes: Routes) -> Tensor:
    """[T x k, H] of [T, H]."""
    y: Tensor = _Spread.apply(x, routes.tokens, routes.rows)  # type: ignore[no-untyped-call]
    return y


def collect(x: Tensor, routes: Routes) -> Tensor:
    """[T, H] of [T x k, H]: the sum of each token's rows."""
    y: Tensor = _Collect.apply(x, routes.tokens, routes.rows)  # type: ignore[no-untyped-call]
    return y
