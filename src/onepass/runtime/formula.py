"""The "torch" backend: an op's formula with the saving of memory that the kernels have.

Run plainly, a formula keeps every intermediate in fp32 for its backward. Here only its inputs are kept, x in the store asked
for, and backward runs the formula again. It stays differentiable as often as one likes where x is stored exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from onepass.runtime import saved
from onepass.runtime.dispatch import needs_grad


def run_formula(formula: Callable[..., Tensor], save: str, x: Tensor, *rest: Tensor | None) -> Tensor:
    """formula(x, *rest), keeping for backward its arguments only, x in the store that `save` names."""
    if not needs_grad(x, *rest):
        return formula(x, *rest)
    if torch.compiler.is_compiling():  # the compiler chooses by itself what to keep and what to compute again
        return _compiled(formula, save, x, *rest)
    result: Tensor = _Formula.apply(formula, save, x, *rest)  # type: ignore[no-untyped-call]
    return result


def _compiled(formula: Callable[..., Tensor], save: str, x: Tensor, *rest: Tensor | None) -> Tensor:
    if save != "fp8":
        return formula(x, *rest)
    kept: Tensor = _ThroughFp8.apply(x)  # type: ignore[no-untyped-call]
    y: Tensor = _ValueOf.apply(formula(x, *rest).detach(), formula(kept, *rest))  # type: ignore[no-untyped-call]
    return y


class _ThroughFp8(torch.autograd.Function):
    """x as fp8 would give it back; its gradient is x's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return saved.fp8_dequantise(*saved.fp8_quantise(x), x.dtype)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> Tensor:
        return dx


class _ValueOf(torch.autograd.Function):
    """The value of one tensor with the gradient of another."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, differentiated: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor]:
        return None, dy


class _Formula(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, formula: Callable[..., Tensor], save: str, x: Tensor, *rest: Tensor | None) -> Tensor:
        ctx.formula, ctx.stored = formula, saved.describe(x, save)
        ctx.save_for_backward(*saved.pack(x, save), *rest)
        return formula(x, *rest)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        again = torch.is_grad_enabled()  # create_graph=True: this backward will itself be differentiated
        if again and ctx.stored.save == "fp8":
            raise RuntimeError("save='fp8' is differentiable once; save='input' with backend='torch' can do more")
        tensors = ctx.saved_tensors
        parts = len(tensors) - len(ctx.needs_input_grad) + 3  # x's own, by its store
        x, rest = saved.unpack(tensors[:parts], ctx.stored), tensors[parts:]
        needs = ctx.needs_input_grad[2:]
        with torch.enable_grad():
            inputs = [t if t is None or again else t.detach() for t in (x, *rest)]
            asked = [t.requires_grad_() if not again else t for t, need in zip(inputs, needs, strict=True) if need and t is not None]
            grads = iter(torch.autograd.grad(ctx.formula(*inputs), asked, dy, create_graph=again))
        return None, None, *(next(grads) if need else None for need in needs)
