"""bias_activation: y = act(x + bias), or act(x1 + bias1) * (x2 + bias2) for a gated act, times a token's weight.

With `linear`, x1 is x and x2 is that tensor: outputs of two layers that can't be one product. There is no bias.

Order    bias, clamp, linear_offset, activation, token weight, dropout. Arithmetic is in fp32, and y is rounded once.
Shapes   x [..., W], bias [W], token_weight [...] or [..., 1], y [..., H]; W is H, or 2H for a gated activation (x1 and x2 are
         the halves of a row). M rows. linear and then x [..., H].
Saves    x, bias, token_weight, linear: backward rebuilds the rest. `save` says how x is kept: as it is, in fp8, or on the host.
         Dropout saves its seed, a number in plain eager mode on a GPU, and no mask (kernels/philox.py).
Bytes    forward reads x and linear and writes y; backward reads dy, x and linear and writes dx and dlinear. The same pass
         reduces the bias gradient from registers: a program owns a strip of rows and BLOCK_H columns, and writes one fp32
         partial a column. The last program of those columns to arrive sums the partials in a fixed order and stores the
         gradient once.
         The token weight's gradient needs whole rows: one fp32 partial a row and column tile, then a column sum of those.
Kernels  ops/activation/kernels.py, shared with activation_linear.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar, overload

import torch
from torch import Tensor

from onepass.gradients.main_grad import grad_requests
from onepass.gradients.vectors import VectorGrads, contiguous_param, saved_vectors, with_fp32_grad
from onepass.kernels.philox import STEPS, Seed, draw_seed, dropout_formula, row_numbers, threshold_of
from onepass.ops.activation import fp8, kernels
from onepass.ops.activation.activations import Activation, find_activation
from onepass.ops.activation.formula import ActivationOptions, activation_formula, check_activation, check_finite
from onepass.ops.activation.sharding import shard_bias_activation
from onepass.runtime import saved
from onepass.runtime.backend import NATIVE, choose, run_other
from onepass.runtime.checks import check_same_shape
from onepass.runtime.dispatch import fast_apply, needs_grad, not_twice_differentiable
from onepass.runtime.formula import run_formula
from onepass.runtime.fp8 import (
    FP8Output,
    FP8Target,
    FP8Tensor,
    check_forward_only,
    describe_output,
    describe_output_formula,
    output_target,
)
from onepass.runtime.op import Call, define_op
from onepass.runtime.sharding import has_dtensor, run_on_shards

_Function = TypeVar("_Function", bound=Callable[..., Tensor])


def bias_activation_reference(
    x: Tensor,
    bias: Tensor | None = None,
    token_weight: Tensor | None = None,
    rows: Tensor | None = None,
    *,
    activation: str = "gelu",
    linear: Tensor | None = None,
    clamp: float | None = None,
    linear_offset: float = 0.0,
    seed: Seed = 0,
    threshold: int = 0,
) -> Tensor:
    """Return y by the formula. With dropout, `rows` has the number of each row."""
    options = ActivationOptions(find_activation(activation).key, clamp, linear_offset, threshold)
    return _formula(x, bias, token_weight, linear, rows, options=options, seed=seed)


def _formula(
    x: Tensor, bias: Tensor | None, token_weight: Tensor | None, linear: Tensor | None, rows: Tensor | None = None,
    *, options: ActivationOptions, seed: Seed | None = None,
) -> Tensor:  # fmt: skip
    y = activation_formula(x, bias, token_weight, options, linear)
    if rows is not None and seed is not None:
        y = dropout_formula(y, seed, rows, options.threshold)
    return y.to(x.dtype)


# ---- autograd ----


class _BiasActivation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor | None, weight: Tensor | None, seed: Tensor | None, linear: Tensor | None,
        options: ActivationOptions, save: str,
    ) -> Tensor:  # fmt: skip
        ctx.call = options, save, x.device
        ctx.vectors = saved_vectors(ctx, 1, bias)
        y: Tensor
        if save == "fp8":
            y, codes, exponents = kernels.forward_fp8(x, bias, weight, seed, options, x.dtype)
            ctx.save_for_backward(codes, exponents, bias, weight, seed, None)
        else:
            y = kernels.forward(x, bias, weight, seed, linear, options, x.dtype)
            kept = saved.offload(x) if save == "offload" else x
            ctx.save_for_backward(kept, None, bias, weight, seed, linear)
        return y

    @staticmethod
    @not_twice_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, exponents, bias, weight, seed, linear = ctx.saved_tensors
        options, save, device = ctx.call
        if save == "offload":
            x = saved.fetch(x, device)
        need_x, need_bias, need_weight, _, need_linear = ctx.needs_input_grad[:5]
        grads = None
        if ctx.vectors is not None:
            vectors, main_grads = ctx.vectors
            grads = VectorGrads(vectors, main_grads, grad_requests(ctx, 2)[1:])
            (need_bias,) = grads.needed()
        needs = need_x, need_bias, need_weight, need_linear
        into, (dx, dbias, dweight, _, dlinear) = kernels.backward_into(
            grads, dy, x, exponents, bias, weight, seed, linear, options, *needs, dy.dtype, None
        )
        if grads is not None:
            (dbias,) = grads.put(into, dbias)
        return dx, dbias, dweight, None, dlinear, None, None


_apply = fast_apply(_BiasActivation)


# ---- the public functions: say what is wrong, choose who does it, return ----


def _check(given: Mapping[str, Any]) -> tuple[Activation, int, FP8Target | None]:
    """Raise where an argument is wrong, else return the activation, how many of 65536 elements drop, and the codes' target."""
    x, linear, dropout = given["x"], given["linear"], given["dropout"]
    if linear is None:
        act = check_activation(given, given["bias"])
    else:
        act = check_activation(given, None, halves=False)
        _check_linear_part(act, x, linear, given["bias"], given["save"])
    threshold = threshold_of("dropout", dropout) if type(dropout) is not float or dropout != 0.0 else 0
    target = output_target(given["out"], x)
    if target is not None and threshold:
        raise ValueError("dropout must be 0 with out='fp8': codes are not dropped")
    if target is not None and linear is not None:
        raise ValueError("linear must be None with out='fp8', which takes gate and linear part as the halves of x")
    return act, threshold, target


def _check_linear_part(act: Activation, x: Tensor, linear: Tensor, bias: Tensor | None, save: str) -> None:
    if not act.gated:
        raise ValueError(f"linear must be None where the activation is not gated, but is given with {act.name!r}")
    check_same_shape("linear", linear, x)
    if linear.dtype != x.dtype:
        raise TypeError(f"linear must have x's type {x.dtype}, but is {linear.dtype}")
    if bias is not None:
        raise ValueError("bias must be None with linear: add biases in the products that x and linear come from")
    if save != "input":
        raise ValueError(f"save must be 'input' with linear, but is {save!r}")


def _variant(call: Call) -> str:
    """Describe the kernels of a call and their tiles."""
    target = output_target(call.out, call.x)
    if target is not None and call.x.numel():
        return f"forward in one pass over x; {describe_output(target)}; no backward"
    threshold = threshold_of("dropout", call.dropout)
    description = kernels.activation_variant(call.x, find_activation(call.activation), call.save, call.linear)
    return f"{description}; {threshold} of {STEPS} dropped in the same kernels" if threshold else description


@overload
def bias_activation(
    x: Tensor, bias: Tensor | None = ..., activation: str = ..., *, linear: Tensor | None = ...,
    token_weight: Tensor | None = ..., clamp: float | None = ..., linear_offset: float = ..., dropout: float = ...,
    save: str = ..., out: None = ..., backend: str | None = ...,
) -> Tensor: ...  # fmt: skip
@overload
def bias_activation(
    x: Tensor, bias: Tensor | None = ..., activation: str = ..., *, linear: Tensor | None = ...,
    token_weight: Tensor | None = ..., clamp: float | None = ..., linear_offset: float = ..., dropout: float = ...,
    save: str = ..., out: FP8Target | str, backend: str | None = ...,
) -> FP8Tensor: ...  # fmt: skip
def bias_activation(
    x: Tensor,
    bias: Tensor | None = None,
    activation: str = "gelu",
    *,
    linear: Tensor | None = None,
    token_weight: Tensor | None = None,
    clamp: float | None = None,
    linear_offset: float = 0.0,
    dropout: float = 0.0,
    save: str = "input",
    out: FP8Output = None,
    backend: str | None = None,
) -> Any:
    """Add a bias and apply an activation in one pass; the backward gives the bias gradient in one pass too.

    Args:
        x: ``[..., H]``, or ``[..., 2H]`` for a gated activation: the first half is the gate, the second the linear part. With
            `linear` it is the gate alone, ``[..., H]``.
        bias: as long as x's last dimension, of any floating-point type, or None.
        activation: ``gelu`` (tanh), ``gelu_exact``, ``quick_gelu``, ``silu``, ``relu``, ``squared_relu``: ``act(x + bias)``;
            ``swiglu``, ``geglu``, ``geglu_exact``, ``quick_geglu``, ``reglu``: ``act(x1) * (x2 + linear_offset)``; or a
            registered one.
        linear: for gated activations, the linear part as a tensor of its own, of x's shape and type: ``act(x) * (linear +
            linear_offset)``. Rows of either may be strided. Without a bias, and with neither `save` nor `out`.
        token_weight: ``[...]`` or ``[..., 1]``, multiplied into each row of the result (a router's weight).
        clamp: for gated activations, the limit after the bias: x1 is at most this, x2 lies between minus and plus this.
        linear_offset: for gated activations, added to x2 after the clamp.
        dropout: the probability that an element of the result is dropped; the others are scaled up, as in `dropout_add`. The
            random numbers come from PyTorch's default generator of x's device. There is no training mode: pass 0 in evaluation.
        save: how x is kept for backward: ``input`` as it is, ``fp8`` in about half of bf16's bytes with a bounded error,
            ``offload`` in the host's memory.
        out: ``fp8`` or an `onepass.FP8Target` returns y as codes of eight bits, made of the fp32 y in the same pass. Codes
            can't be differentiated: no input may require grad, but under `torch.no_grad`. Not with dropout.
        backend: ``auto``, ``triton``, ``torch`` or a registered name; None leaves it to `use_backend` and ONEPASS_BACKEND.

    Returns:
        ``[..., H]`` in x's type. Arithmetic is in fp32 and rounded once. With `out` it is an `onepass.FP8Tensor`: ``codes``
        ``[..., H]``, and ``inverse`` of their scale, fp32 ``[..., 1]`` where each row has its own.
    """
    given = {
        "x": x, "bias": bias, "activation": activation, "linear": linear, "token_weight": token_weight, "clamp": clamp,
        "linear_offset": linear_offset, "dropout": dropout, "save": save, "out": out,
    }  # fmt: skip
    if has_dtensor(x, bias, linear):
        return run_on_shards("bias_activation", **given, backend=backend)
    act, threshold, target = _check(given)
    clamp = None if clamp is None else float(clamp)
    if save == "fp8":
        check_finite(x)
    chosen = choose("bias_activation", backend, kernels.activation_unsupported(x, act))
    if chosen not in NATIVE:
        return run_other("bias_activation", chosen, **given | {"dropout": float(dropout)})
    if target is not None:
        check_forward_only(x, bias, token_weight)
        options = ActivationOptions(act.key, clamp, float(linear_offset) if linear_offset else None)
        return fp8.activation_output(x, bias, token_weight, options, target, chosen == "triton")
    drawn = draw_seed(x, bias, token_weight, linear) if threshold else None
    number = drawn if isinstance(drawn, int) else None
    options = ActivationOptions(act.key, clamp, float(linear_offset) if linear_offset else None, threshold, number)
    if chosen == "torch" or x.numel() == 0:
        formula: Callable[..., Tensor] = partial(_formula, options=options, seed=drawn)
        per_row = (token_weight, linear) if drawn is None else (token_weight, linear, row_numbers(x))
        result: Tensor = run_formula(formula, save, x, shared=(with_fp32_grad(bias),), per_row=per_row, parts=act.parts)
        return result
    bias = contiguous_param(bias)
    token_weight = None if token_weight is None else token_weight.contiguous()
    seed = drawn if number is None else None
    if not needs_grad(x, bias, token_weight, linear):
        return kernels.forward(x, bias, token_weight, seed, linear, options, x.dtype)
    return _apply(x, bias, token_weight, seed, linear, options, save)


define_op(
    bias_activation,
    check=lambda call: _check(vars(call)),
    unsupported=lambda call: kernels.activation_unsupported(call.x, find_activation(call.activation)),
    variant=_variant,
    sharding=shard_bias_activation,
    formula=describe_output_formula,
)


def _shorthand_of(activation: str) -> Callable[[_Function], _Function]:
    """Mark a function as `bias_activation` with this activation, for `explain`."""

    def mark(function: _Function) -> _Function:
        function.__dict__["shorthand_of"] = bias_activation, {"activation": activation}
        return function

    return mark


@_shorthand_of("gelu")
def bias_gelu(
    x: Tensor,
    bias: Tensor | None = None,
    *,
    token_weight: Tensor | None = None,
    dropout: float = 0.0,
    save: str = "input",
    backend: str | None = None,
) -> Tensor:
    """Return gelu(x + bias), the tanh approximation: `bias_activation` with ``activation="gelu"``."""
    return bias_activation(x, bias, "gelu", token_weight=token_weight, dropout=dropout, save=save, backend=backend)


@_shorthand_of("swiglu")
def bias_swiglu(
    x: Tensor,
    bias: Tensor | None = None,
    *,
    token_weight: Tensor | None = None,
    clamp: float | None = None,
    linear_offset: float = 0.0,
    dropout: float = 0.0,
    save: str = "input",
    backend: str | None = None,
) -> Tensor:
    """Return silu(x1 + b1) * (x2 + b2 + linear_offset): `bias_activation` with ``activation="swiglu"``."""
    return bias_activation(
        x, bias, "swiglu", token_weight=token_weight, clamp=clamp, linear_offset=linear_offset,
        dropout=dropout, save=save, backend=backend,
    )  # fmt: skip


@_shorthand_of("geglu")
def bias_geglu(
    x: Tensor,
    bias: Tensor | None = None,
    *,
    token_weight: Tensor | None = None,
    clamp: float | None = None,
    linear_offset: float = 0.0,
    dropout: float = 0.0,
    save: str = "input",
    backend: str | None = None,
) -> Tensor:
    """Return gelu(x1 + b1) * (x2 + b2 + linear_offset): `bias_activation` with ``activation="geglu"``."""
    return bias_activation(
        x, bias, "geglu", token_weight=token_weight, clamp=clamp, linear_offset=linear_offset,
        dropout=dropout, save=save, backend=backend,
    )  # fmt: skip


@_shorthand_of("quick_geglu")
def bias_quick_geglu(
    x: Tensor,
    bias: Tensor | None = None,
    *,
    token_weight: Tensor | None = None,
    clamp: float | None = None,
    linear_offset: float = 0.0,
    dropout: float = 0.0,
    save: str = "input",
    backend: str | None = None,
) -> Tensor:
    """Return quick_gelu(x1 + b1) * (x2 + b2 + linear_offset): `bias_activation` with ``activation="quick_geglu"``."""
    return bias_activation(
        x, bias, "quick_geglu", token_weight=token_weight, clamp=clamp, linear_offset=linear_offset,
        dropout=dropout, save=save, backend=backend,
    )  # fmt: skip
