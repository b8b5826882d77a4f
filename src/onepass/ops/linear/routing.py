"""Routing of tokens to the experts of a mixture and back: rows are sorted by expert, for grouped products."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from onepass.gradients.written_names import WrittenNames, names_written
from onepass.kernels.mapped_rows import spread_by_map, sum_by_map
from onepass.kernels.token_rows import order_rows, spread_rows, sum_rows
from onepass.runtime.dispatch import not_twice_differentiable, under_checkpoint


class Routes(NamedTuple):
    """The rows of T tokens, k each, sorted by expert."""

    weights: Tensor  # [T x k]: each row's weight
    tokens: Tensor  # [T x k] int32: each row's token
    rows: Tensor  # [T, k] int32: each token's rows, -1 of an expert that there isn't
    ends: Tensor  # [experts] int32: where each expert's rows end


class _Order(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor, chosen: Tensor, experts: int, written: WrittenNames | None) -> Any:
        ctx.written = written
        by_row, tokens, rows, ends = order_rows(chosen, weights, experts)
        ctx.save_for_backward(rows)
        ctx.mark_non_differentiable(tokens, rows, ends)
        ctx.set_materialize_grads(False)
        return by_row, tokens, rows, ends

    @staticmethod
    @not_twice_differentiable
    @names_written
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        (rows,) = ctx.saved_tensors
        return sum_rows(grad.unsqueeze(1), rows.view(-1, 1), None).view(rows.shape), None, None, None  # NaN without a row


def sort_rows(weights: Tensor, chosen: Tensor, experts: int, written: WrittenNames | None = None) -> Routes:
    """Sort rows by expert. chosen [T, k]: each token's experts; weights [T, k]: theirs; experts: how many there are.

    `written`: what backward's errors name.
    """
    return Routes(*_Order.apply(weights, chosen, experts, written))


# ---- scatter and gather: each is the other's gradient, and neither needs atomics ----


class _ScatterTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tokens: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        return spread_rows(x, tokens, rows)  # type: ignore[no-any-return]

    @staticmethod
    @not_twice_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (rows,) = ctx.saved_tensors
        return sum_rows(dy, rows, None), None, None


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, tokens: Tensor, rows: Tensor, start: Tensor | None, written: WrittenNames | None
    ) -> Tensor:  # fmt: skip
        ctx.written, ctx.kept = written, None
        if under_checkpoint():  # 8 bytes a row stay, as what saved them here would have the product before it computed again
            ctx.kept = tokens, rows
        else:
            ctx.save_for_backward(tokens, rows)
        return sum_rows(x, rows, start)  # type: ignore[no-any-return]

    @staticmethod
    @not_twice_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.written is not None:
            ctx.written.clear()  # a pass begins
        tokens, rows = ctx.saved_tensors if ctx.kept is None else ctx.kept
        return spread_rows(dy, tokens, rows), None, None, dy if ctx.needs_input_grad[3] else None, None


def scatter_tokens(x: Tensor, routes: Routes) -> Tensor:
    """Copy each token's row [T, H] to its experts' rows [T x k, H]."""
    y: Tensor = _ScatterTokens.apply(x, routes.tokens, routes.rows)
    return y


def gather_tokens(
    x: Tensor, routes: Routes, start: Tensor | None = None, written: WrittenNames | None = None
) -> Tensor:  # fmt: skip
    """Sum each token's rows [T x k, H], and those of `start`, to [T, H]. `written`: what the pass through a call will write."""
    y: Tensor = _GatherTokens.apply(x, routes.tokens, routes.rows, start, written)
    return y


# ---- the same of tokens with numbers of rows of their own (kernels/mapped_rows.py) ----


class _MoveByMap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, spread: bool) -> Tensor:
        ctx.spread = spread
        ctx.save_for_backward(order)
        return (spread_by_map if spread else sum_by_map)(x, order)  # type: ignore[no-any-return]

    @staticmethod
    @not_twice_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return (sum_by_map if ctx.spread else spread_by_map)(dy, *ctx.saved_tensors), None, None


def scatter_tokens_by_map(x: Tensor, order: Tensor) -> Tensor:
    """Copy each token's row [T, H] to its places, [S, H]."""
    y: Tensor = _MoveByMap.apply(x, order, True)
    return y


def gather_tokens_by_map(x: Tensor, order: Tensor) -> Tensor:
    """Sum the rows [S, H] at each token's places to [T, H]."""
    y: Tensor = _MoveByMap.apply(x, order, False)
    return y
