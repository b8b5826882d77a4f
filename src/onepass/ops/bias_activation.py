"""bias_activation: y = act(x + bias), or act(x1 + bias1) * (x2 + bias2) for a gated act, times a token's weight.

Order    bias, clamp, linear_offset, activation, token weight, dropout; fp32 all the way, rounded once, where y is stored.
Shapes   x [..., W], bias [W], token_weight [...] or [..., 1], y [..., H]; W is H, or 2H for a gated activation (x1 and x2 are
         the halves of a row). M rows.
Saves    x, bias, token_weight: backward rebuilds the rest. x in the store asked for: as it is, in fp8, or on the host. Of dropout
         the seed, which in plain eager mode is a number, and no mask (kernels/random.py).
Bytes    forward reads x and writes y; backward reads dy and x and writes dx. The bias gradient is reduced from registers in
         the same pass: a program owns a strip of rows and BLOCK_H columns, writes one fp32 partial a column, and the last
         program of those columns to arrive sums the partials, always in the same order, and stores the gradient once.
         The token weight's gradient needs whole rows: one fp32 partial a row and column tile, then a column sum of those.
Kernels  kernels/bias_activation.py: activation_linear shares them.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from onepass.kernels.activations import Activation, find_activation
from onepass.kernels.bias_activation import (
    activation_forward,
    activation_forward_fp8,
    activation_unsupported,
    activation_variant,
    check_activation,
    check_finite,
    registered_forward,
    registered_forward_fp8,
    run_backward,
)
from onepass.kernels.bias_activation_formula import activation_formula
from onepass.kernels.random import STEPS, Seed, dropout_options, dropped_formula, row_numbers, threshold_of
from onepass.runtime import saved
from onepass.runtime.backend import NATIVE, choose, register_op, run_other, shorthand
from onepass.runtime.dispatch import bare_apply, needs_grad, once, watched
from onepass.runtime.formula import run_formula
from onepass.runtime.main_grad import asked
from onepass.runtime.main_grad_vectors import Sums, gathered, packed, vectors_of
from onepass.runtime.seeds import drawn_seed


def bias_activation_reference(
    x: Tensor,
    bias: Tensor | None = None,
    token_weight: Tensor | None = None,
    rows: Tensor | None = None,
    *,
    activation: str | Activation = "gelu",
    clamp: float | None = None,
    linear_offset: float = 0.0,
    seed: Seed = 0,
    threshold: int = 0,
) -> Tensor:
    """The formula, for every type: fp64 inputs make it the oracle, others the `torch` backend (fp32 inside).

    rows has the number of each row, where anything is dropped.
    """
    act = activation if isinstance(activation, Activation) else find_activation(activation)
    y = activation_formula(x, bias, token_weight, act, clamp=clamp, linear_offset=linear_offset)
    if rows is not None:
        y = dropped_formula(y, seed, rows, threshold)
    return y.to(x.dtype)


# ---- autograd ----


class _BiasActivation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor | None, weight: Tensor | None,
        activation: str, clamp: float | None, offset: float | None, save: str, seed: Seed | None, threshold: int,
    ) -> Tensor:  # fmt: skip
        in_memory = isinstance(seed, Tensor)
        ctx.call = activation, clamp, offset, save, x.device
        ctx.dropout = None if in_memory else seed, threshold
        dropout = dropout_options(seed, threshold)
        ctx.vectors = vectors_of(ctx, 1, bias)
        seen = watched(x, bias, weight)
        if save == "fp8":
            forward = registered_forward_fp8 if seen else activation_forward_fp8
            y, codes, exponents = forward(x, bias, weight, activation, clamp, offset, **dropout)
            ctx.save_for_backward(codes, exponents, bias, weight, seed if in_memory else None)
        else:
            forward = registered_forward if seen else activation_forward
            y = forward(x, bias, weight, activation, clamp, offset, **dropout)
            kept = saved.offload(x) if save == "offload" else x
            ctx.save_for_backward(kept, None, bias, weight, seed if in_memory else None)
        return y

    @staticmethod
    @once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, exponents, bias, weight, in_memory = ctx.saved_tensors
        activation, clamp, offset, save, device = ctx.call
        number, threshold = ctx.dropout
        dropout = dropout_options(in_memory if number is None else number, threshold)
        if save == "offload":
            x = saved.fetch(x, device)
        need_x, need_bias, need_weight = ctx.needs_input_grad[:3]
        sums = None
        if ctx.vectors is not None:
            vectors, main_grads = ctx.vectors
            sums = Sums(vectors, main_grads, asked(ctx, True, True)[1:])
            (need_bias,) = sums.needed()
        needs = need_x, need_bias, need_weight
        call = activation, clamp, offset, *needs
        dx, dbias, dweight, _ = run_backward(sums, dy, x, exponents, bias, weight, *call, **dropout)
        return dx, dbias, dweight, None, None, None, None, None, None


_apply = bare_apply(_BiasActivation)


# ---- the public face: say what is wrong, choose who does it, return ----


def unsupported(x: Tensor, bias: Tensor | None = None, activation: str = "gelu", **options: Any) -> str | None:
    """Why the kernels can't take this call, or None."""
    return activation_unsupported(x, find_activation(activation))


def variant(
    x: Tensor, bias: Tensor | None = None, activation: str = "gelu",
    *, save: str = "input", dropout: float = 0.0, **options: Any,
) -> str:  # fmt: skip
    """Which kernels a call runs, and their tiles."""
    threshold = threshold_of("dropout", dropout)
    said = f"; {threshold} of {STEPS} dropped in the same kernels" if threshold else ""
    return activation_variant(x, find_activation(activation), save) + said


def _check(x: Tensor, bias: Tensor | None = None, activation: str = "gelu", *, dropout: float = 0.0, **options: Any) -> None:
    """Raise where an argument is wrong."""
    check_activation(x, bias, activation, **options)
    threshold_of("dropout", dropout)


def bias_activation(
    x: Tensor,
    bias: Tensor | None = None,
    activation: str = "gelu",
    *,
    token_weight: Tensor | None = None,
    clamp: float | None = None,
    linear_offset: float = 0.0,
    dropout: float = 0.0,
    save: str = "input",
    backend: str | None = None,
) -> Tensor:
    """Add a bias and apply an activation in one pass; the backward gives the bias gradient in one pass too.

    Args:
        x: ``[..., H]``, or ``[..., 2H]`` for a gated activation, whose halves are the gate and the linear part.
        bias: as long as x's last dimension, of any floating-point type.
        activation: ``gelu`` (tanh), ``gelu_exact``, ``quick_gelu``, ``silu``, ``relu``, ``squared_relu``: ``act(x + bias)``;
            ``swiglu``, ``geglu``, ``quick_geglu``, ``reglu``: ``act(x1) * (x2 + linear_offset)``; or a registered one.
        token_weight: ``[...]`` or ``[..., 1]``, multiplied into each row of the result (a router's weight).
        clamp: for gated ones, x1 to at most this and x2 to within plus and minus this, after the bias.
        linear_offset: for gated ones, added to x2 after the clamp.
        dropout: how probably an element of the result is dropped, in this pass, and what is kept scaled up: as in `dropout_add`,
            by PyTorch's default generator of x's device. There is no training mode here: 0 drops nothing.
        save: how x is kept for backward: ``input`` as it is, ``fp8`` in about half of bf16's bytes with a bounded error,
            ``offload`` in the host's memory.
        backend: ``auto``, ``triton``, ``torch`` or a registered name; None leaves it to `use_backend` and ONEPASS_BACKEND.

    Returns:
        ``[..., H]`` in x's type. Arithmetic is in fp32 and rounded once.
    """
    act = check_activation(x, bias, activation, token_weight, clamp, linear_offset, save)
    threshold = threshold_of("dropout", dropout) if type(dropout) is not float or dropout != 0.0 else 0
    clamp = None if clamp is None else float(clamp)
    check_finite(x, save)
    chosen = choose("bias_activation", backend, activation_unsupported(x, act))
    if chosen not in NATIVE:
        options: dict[str, Any] = {"token_weight": token_weight, "clamp": clamp, "linear_offset": linear_offset, "save": save}
        options |= {"dropout": dropout} if threshold else {}
        return run_other("bias_activation", chosen, x, bias, activation, **options)  # type: ignore[no-any-return]
    seed = drawn_seed(x, bias, token_weight) if threshold else None
    if chosen == "torch" or x.numel() == 0:
        formula = partial(bias_activation_reference, activation=act, clamp=clamp, linear_offset=linear_offset)
        per_row: tuple[Tensor | None, ...] = (token_weight,)
        if seed is not None:
            formula, per_row = partial(formula, seed=seed, threshold=threshold), (token_weight, row_numbers(x))
        result: Tensor = run_formula(formula, save, x, shared=(gathered(bias),), per_row=per_row, parts=act.parts)
        return result
    offset = float(linear_offset) if linear_offset else None
    bias = packed(bias)
    token_weight = None if token_weight is None else token_weight.contiguous()
    if not needs_grad(x, bias, token_weight):
        forward = registered_forward if watched(x, bias, token_weight) else activation_forward
        return forward(x, bias, token_weight, act.key, clamp, offset, **dropout_options(seed, threshold))
    return _apply(x, bias, token_weight, act.key, clamp, offset, save, seed, threshold)  # type: ignore[no-any-return]


register_op(bias_activation, _check, unsupported, variant)


bias_gelu = shorthand("bias_gelu", bias_activation, activation="gelu")
bias_swiglu = shorthand("bias_swiglu", bias_activation, activation="swiglu")
bias_geglu = shorthand("bias_geglu", bias_activation, activation="geglu")
bias_quick_geglu = shorthand("bias_quick_geglu", bias_activation, activation="quick_geglu")
