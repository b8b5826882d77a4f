"""A factor of each query that grows with its position: Llama 4's in layers without rotation, and Ministral 3's.

It is one multiplication of the projection's queries, forward and backward. Each reads q, k and v once and writes them once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from onepass.integrations.huggingface.probe import close, parameters_of
from onepass.runtime.dispatch import under_functorch

IDS = (0, 2, 1, 4, 3)  # position_ids of a trial's tokens, from its first position on: another order than the tokens'
LATE = 2**20  # a position
_STEPS = (1, 2, 7)  # at which a trial looks


@dataclass(frozen=True)
class QueryFactor:
    """1 + scale * log(1 + floor((position + first) / length))."""

    scale: float
    length: int
    first: int
    by_ids: bool  # the positions are position_ids; otherwise tokens of a row are counted

    def takes(self, position_ids: Any) -> bool:
        return not self.by_ids or (isinstance(position_ids, Tensor) and position_ids.dim() == 2)

    def at(self, positions: Tensor) -> Tensor:
        return 1.0 + self.scale * torch.log1p(((positions + self.first) // self.length).float())

    def applied(self, qkv: Tensor, columns: int, position_ids: Tensor | None) -> Tensor:
        """Return qkv [B, S, ...] with its first columns, the queries, multiplied."""
        if self.by_ids:
            assert position_ids is not None  # `takes` has seen it
            return self.scaled(qkv, columns, position_ids)
        tokens = qkv.shape[1]
        if tokens - 1 + self.first < self.length:  # it is 1
            return qkv
        return self.scaled(qkv, columns, torch.arange(tokens, device=qkv.device)[None])

    def scaled(self, qkv: Tensor, columns: int, positions: Tensor) -> Tensor:
        factor = self.at(positions)[..., None]
        if under_functorch() or torch.compiler.is_compiling():
            q, rest = qkv.split((columns, qkv.shape[-1] - columns), -1)
            return torch.cat([(q * factor).to(q.dtype), rest], -1)
        return _ScaledColumns.apply(qkv, columns, factor)  # type: ignore[no-any-return,no-untyped-call]


class _ScaledColumns(torch.autograd.Function):
    """The first columns times a factor of each row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, columns: int, factor: Tensor) -> Tensor:
        ctx.columns = columns
        ctx.save_for_backward(factor)
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        torch.mul(x[..., :columns], factor, out=y[..., :columns])
        y[..., columns:] = x[..., columns:]
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return _ScaledColumns.apply(dy, ctx.columns, *ctx.saved_tensors), None, None  # type: ignore[no-untyped-call]


# ---- recognition ----


def takes_positions(module: Any) -> bool:
    """Whether the module's code needs position_ids."""
    given = parameters_of(module).get("position_ids")
    return given is not None and given.default is inspect.Parameter.empty


def find_factor(module: Any, run: Callable[[int], Tensor | None]) -> QueryFactor | None:
    """Return the factor of the queries that the module's code gives attention, or None where it is none that is known.

    run: returns the queries [1, heads, tokens, D] where the first token's position is this.
    """
    by_ids = takes_positions(module)
    tokens = torch.tensor(IDS if by_ids else range(len(IDS)))
    first, late = run(0), run(LATE)
    if first is None or late is None or close(late, first, 1e-6):
        return None

    def grows(factor: QueryFactor, queries: Tensor | None, at: int) -> bool:
        then, now = factor.at(tokens)[:, None], factor.at(at + tokens)[:, None]
        return queries is not None and close(queries * then, first * now, 1e-6)

    for scale, length, ahead in product(*_numbers_of(module), (0, 1)):
        factor = QueryFactor(scale, length, ahead, by_ids)
        if grows(factor, late, LATE):
            places = [step * length - ahead - 2 for step in _STEPS]
            if all(grows(factor, run(at), at) for at in places):
                return factor
    return None


def _numbers_of(module: Any) -> tuple[list[float], list[int]]:
    """Return numbers that may be a factor's scale, and its length."""
    values = [*vars(module).values(), *(getattr(module.config, "rope_parameters", None) or {}).values()]
    scales = {value for value in values if isinstance(value, float) and value > 0}
    lengths = {int(value) for value in values if isinstance(value, int | float) and value > 1 and value == int(value)}
    return sorted(scales), sorted(lengths)
