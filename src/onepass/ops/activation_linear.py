"""activation_linear: an MLP's activation and its down projection, as one op that keeps the activation's input and not its output.

Formula  y = act(x + activation_bias) @ weight.T + bias, the activation with its bias, clamp, linear_offset and token_weight as in
         ops/bias_activation.py, computed in fp32 and rounded once, to the type that the product's operands have.
Shapes   x [..., K] or, gated, [..., 2K], activation_bias of x's last dimension, token_weight [...] or [..., 1], weight [N, K],
         bias [N], y [..., N]. M rows.
Saves    x in the store asked for (as it is, in fp8, or on the host), activation_bias, token_weight, weight. With save="fp8" the
         weight's gradient, too, is that of the x that was kept: backward rebuilds the activation from it.
Bytes    beside the products: forward reads x and writes the activation, which is let go; backward reads d activation and x and
         writes dx and the activation again, for the weight's gradient, over d activation: one kernel, with the gradients of
         activation_bias and token_weight. So M K elements fewer are kept than by an activation and a linear layer.
Products cuBLAS, through PyTorch, in x's type, or in autocast's where that is on: the weight and bias are rounded to it. The
         gradients of parameters that carry main_grad go there (runtime/main_grad.py).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from onepass.kernels.activations import Activation, activation_of, find_activation
from onepass.kernels.bias_activation import (
    activation_forward,
    activation_forward_fp8,
    activation_unsupported,
    activation_variant,
    check_activation,
    check_finite,
    rebuilt,
    registered_forward,
    registered_forward_fp8,
    run_backward,
)
from onepass.kernels.bias_activation_formula import activation_formula
from onepass.parallel.deferred import DeferredWgrad, check_deferred
from onepass.parallel.product import (
    Spread,
    check_divisible,
    column_sums,
    leave_graph,
    linear_product,
    postponed,
    products_said,
    row_gradients,
    rows_of,
    spread_over,
    spread_product,
)
from onepass.runtime import saved
from onepass.runtime.autocast import product_type
from onepass.runtime.backend import NATIVE, choose, register_op, run_other
from onepass.runtime.checks import check_linear
from onepass.runtime.dispatch import bare_apply, cast, needs_grad, once, transformed, watched
from onepass.runtime.formula import run_formula
from onepass.runtime.main_grad import Asked, asked, has_own_place, main_grads_of, vector_gradient, weight_gradient
from onepass.runtime.main_grad_vectors import Sums, gathered, packed, sums_of, vectors_of

Call = tuple[str, float | None, float | None]  # the activation's key, clamp and linear_offset
Needs = tuple[bool, bool, bool]  # of x, activation_bias and token_weight
Maybe = Tensor | None


def activation_linear_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation_bias: Tensor | None = None,
    token_weight: Tensor | None = None,
    *,
    activation: str = "swiglu",
    clamp: float | None = None,
    linear_offset: float = 0.0,
) -> Tensor:
    """The formula, for every type."""
    act = find_activation(activation)
    activated = activation_formula(x, activation_bias, token_weight, act, clamp=clamp, linear_offset=linear_offset)
    return F.linear(activated.to(x.dtype), weight, bias)


# ---- the activation by kernels, or by the formula where there are none ----


def _by_kernels(x: Tensor, bias: Maybe, token_weight: Maybe, call: Call, product: torch.dtype) -> Tensor:
    forward = registered_forward if watched(x, bias, token_weight) else activation_forward
    return forward(x, bias, token_weight, *call, product)


def _by_formula(x: Tensor, bias: Maybe, token_weight: Maybe, call: Call, product: torch.dtype, save: str = "input") -> Tensor:
    """By PyTorch, over blocks of rows on a CPU; it can be differentiated, and keeps x only."""
    act = activation_of(call[0])
    formula = partial(_rounded_formula, act=act, clamp=call[1], linear_offset=call[2] or 0.0, product=product)
    result: Tensor = run_formula(formula, save, x, shared=(bias,), per_row=(token_weight,), parts=act.parts)
    return result


def _rounded_formula(
    x: Tensor, bias: Maybe, token_weight: Maybe, *, act: Activation, product: torch.dtype, **options: Any
) -> Tensor:
    return cast(activation_formula(x, bias, token_weight, act, **options), product)


def _kept(
    x: Tensor, bias: Maybe, token_weight: Maybe, call: Call, kernels: bool, product: torch.dtype, stored: saved.Stored
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The activation, and what is kept of x: in fp8 its codes and exponents, which the kernel makes as it reads x."""
    if not kernels:
        return _by_formula(x, bias, token_weight, call, product), saved.pack(x, stored)
    if stored.save != "fp8":
        return _by_kernels(x, bias, token_weight, call, product), saved.pack(x, stored)
    forward = registered_forward_fp8 if watched(x, bias, token_weight) else activation_forward_fp8
    activated, *kept = forward(x, bias, token_weight, *call, product)
    return activated, tuple(kept)


def _backward_by_kernels(
    sums: Sums | None, dy: Maybe, kept: tuple[Tensor, ...], bias: Maybe, token_weight: Maybe,
    call: Call, stored: saved.Stored, needs: Needs, product: torch.dtype | None,
) -> tuple[Maybe, ...]:  # fmt: skip
    """The gradients that are needed of x, bias and token_weight, if any; and the activation in the product's type, if any.

    dy is ours, and the activation takes its place.
    """
    x, exponents = kept if stored.save == "fp8" else (saved.unpack(kept, stored), None)
    if dy is None:
        assert product is not None
        return None, None, None, rebuilt(x, exponents, bias, token_weight, *call, product, watched(x, bias, token_weight))
    return run_backward(sums, dy, x, exponents, bias, token_weight, *call, *needs, stored.dtype, product, True)


def _backward_by_formula(
    sums: Sums | None, dy: Maybe, kept: tuple[Tensor, ...], bias: Maybe, token_weight: Maybe,
    call: Call, stored: saved.Stored, needs: Needs, product: torch.dtype | None,
) -> tuple[Maybe, ...]:  # fmt: skip
    """The same by PyTorch."""
    given = saved.unpack(kept, stored), bias, token_weight
    if dy is None:
        assert product is not None
        return None, None, None, _by_formula(*given, call, product)
    leaves: list[Any] = [t if t is None else t.detach().requires_grad_(n) for t, n in zip(given, needs, strict=True)]
    with torch.enable_grad():
        activated = _by_formula(leaves[0], leaves[1], leaves[2], call, dy.dtype)
    found = iter(torch.autograd.grad(activated, [leaf for leaf in leaves if leaf is not None and leaf.requires_grad], dy))
    return *(next(found) if need else None for need in needs), activated.detach()


def _traced(
    x: Tensor, activation_bias: Maybe, token_weight: Maybe, weight: Tensor, bias: Maybe, call: Call, save: str,
    spread: Spread | None, deferred: DeferredWgrad | None,
) -> Tensor:  # fmt: skip
    """The formula for a compiler or a transform, which sees all of it but how gradients get to main_grad and to other ranks."""
    product = product_type(x)
    activated = _by_formula(x, activation_bias, token_weight, call, product, save)
    if spread is not None or (not transformed() and (has_own_place(weight) or has_own_place(bias))):
        return linear_product(activated, weight, bias, spread, deferred)
    return spread_product(activated, weight, bias, None)


# ---- autograd ----


class _ActivationLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, activation_bias: Maybe, token_weight: Maybe, weight: Tensor, bias: Maybe,
        call: Call, kernels: bool, product: torch.dtype, save: str, spread: Spread | None, deferred: DeferredWgrad | None,
    ) -> Tensor:  # fmt: skip
        leave_graph(deferred)
        ctx.call, ctx.kernels, ctx.product, ctx.spread, ctx.deferred = call, kernels, product, spread, deferred
        ctx.stored = saved.describe(x, save, activation_of(call[0]).parts)
        ctx.parameters, ctx.main_grads = (weight, bias), main_grads_of(ctx.needs_input_grad[3:], weight, bias)
        ctx.vectors = vectors_of(ctx, 1, activation_bias)
        kept: tuple[Tensor, ...] = ()
        if any(ctx.needs_input_grad[:4]):
            activated, kept = _kept(x, activation_bias, token_weight, call, kernels, product, ctx.stored)
        else:  # the bias alone asks
            activated = (_by_kernels if kernels else _by_formula)(x, activation_bias, token_weight, call, product)
        ctx.save_for_backward(activation_bias, token_weight, weight, *kept)
        return spread_product(activated, weight, bias, spread)

    @staticmethod
    @once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        activation_bias, token_weight, weight, *kept = ctx.saved_tensors
        wanted = asked(ctx, True, activation_bias is not None, token_weight is not None, True, ctx.parameters[1] is not None)
        need_dx, need_dactivation_bias, need_dtoken_weight, need_dweight, need_dbias = (each is not Asked.NOT for each in wanted)
        needs = need_dx, need_dactivation_bias, need_dtoken_weight
        grads: tuple[Maybe, ...] = (None, None, None)
        dweight = dbias = activated = None
        if need_dbias:
            dbias = vector_gradient(column_sums(dy), ctx.parameters[1], ctx.main_grads[1], wanted[4])
        if any(needs) or need_dweight:
            through = cast(weight, ctx.product) if any(needs) else None
            later = postponed(ctx.deferred, ctx.parameters[0], wanted[3])
            whole_dy, dactivated = row_gradients(dy, through, need_dweight and not later, ctx.spread)
            backward = _backward_by_kernels if ctx.kernels else _backward_by_formula
            rebuild = ctx.product if need_dweight else None
            sums = sums_of(ctx.vectors, wanted[1:2])
            found = backward(sums, dactivated, tuple(kept), activation_bias, token_weight, ctx.call, ctx.stored, needs, rebuild)
            grads, activated = found[:3], found[3]
        if need_dweight:
            assert activated is not None
            if later:
                dweight = ctx.deferred.keep(dy, activated, ctx.parameters[0], ctx.main_grads[0], ctx.spread)
            else:
                rows = rows_of(whole_dy), rows_of(activated)
                dweight = weight_gradient(*rows, ctx.parameters[0], ctx.main_grads[0], wanted[3])
        return *grads, dweight, dbias, None, None, None, None, None, None


_apply = bare_apply(_ActivationLinear)


# ---- the public face: say what is wrong, choose who does it, return ----


def unsupported(x: Tensor, weight: Any, bias: Any = None, activation: str = "swiglu", **options: Any) -> str | None:
    """Why the kernels can't take this call, or None."""
    return activation_unsupported(x, find_activation(activation))


def variant(
    x: Tensor, weight: Any, bias: Any = None, activation: str = "swiglu",
    *, save: str = "input", deferred: DeferredWgrad | None = None, **options: Any,
) -> str:  # fmt: skip
    """Which kernels a call runs, and their tiles."""
    kernels = activation_variant(x, find_activation(activation), save)
    return f"{kernels}; {products_said(deferred)}; the activation is rebuilt in backward"


def _check(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str = "swiglu",
    *, activation_bias: Tensor | None = None, token_weight: Tensor | None = None,
    clamp: float | None = None, linear_offset: float = 0.0, save: str = "input",
    tp_group: dist.ProcessGroup | None = None, sequence_parallel: bool = False, deferred: DeferredWgrad | None = None,
) -> Activation:  # fmt: skip
    """Raise where an argument is wrong; the activation where none is."""
    act = check_activation(x, activation_bias, activation, token_weight, clamp, linear_offset, save, "activation_bias")
    check_linear(x, x.shape[-1] // act.parts, weight, bias)
    if sequence_parallel:
        check_divisible(x, tp_group)
    check_deferred(deferred, weight)
    return act


def activation_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str = "swiglu",
    *,
    activation_bias: Tensor | None = None,
    token_weight: Tensor | None = None,
    clamp: float | None = None,
    linear_offset: float = 0.0,
    save: str = "input",
    tp_group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
    deferred: DeferredWgrad | None = None,
    backend: str | None = None,
) -> Tensor:
    """An activation and the linear layer after it; only x is kept for backward, which rebuilds the activation.

    Args:
        x: ``[..., K]``, or ``[..., 2K]`` for a gated activation, whose halves are the gate and the linear part.
        weight: ``[N, K]``, of x's type. The gradient of a parameter with a ``main_grad``, any of these, is added there.
        bias: ``[N]``, of x's type, or None.
        activation: as in `bias_activation`, ``swiglu`` unless said otherwise.
        activation_bias: added to x: as long as its last dimension, of any floating-point type, or None.
        token_weight: ``[...]`` or ``[..., 1]``, multiplied into each row of the activation (a router's weight).
        clamp, linear_offset: of gated activations, as in `bias_activation`.
        save: how x is kept for backward: ``input`` as it is, ``fp8`` in about half of bf16's bytes with a bounded error, from
            which the weight's gradient is made too, ``offload`` in the host's memory.
        tp_group: the ranks that each have some columns of the weight, and of the activation: y is summed over them, and then the
            bias is added. Forward is collective, and under sequence_parallel backward is.
        sequence_parallel: y is this rank's part along the first dimension; the bias's gradient is a part of a sum over tp_group.
        deferred: keeps the activation, made again, and y's gradient for the weight's, until its `flush`. The weight must carry
            main_grad.
        backend: ``auto``, ``triton``, ``torch`` or a registered name; None leaves it to `use_backend` and ONEPASS_BACKEND.

    Returns:
        ``[..., N]`` in x's type. The activation is fp32 and rounded once, as an operand of the product.
    """
    act = _check(
        x, weight, bias, activation, activation_bias=activation_bias, token_weight=token_weight,
        clamp=clamp, linear_offset=linear_offset, save=save, tp_group=tp_group, sequence_parallel=sequence_parallel,
    )  # fmt: skip
    deferred = check_deferred(deferred, weight)
    clamp = None if clamp is None else float(clamp)
    check_finite(x, save)
    spread = spread_over(tp_group, by_row=True, sequence=sequence_parallel)
    chosen = choose("activation_linear", backend, activation_unsupported(x, act))
    if chosen not in NATIVE:
        options: dict[str, Any] = {"token_weight": token_weight, "clamp": clamp, "linear_offset": linear_offset, "save": save}
        options |= {"tp_group": tp_group, "sequence_parallel": sequence_parallel} if spread is not None else {}
        options |= {} if deferred is None else {"deferred": deferred}
        result: Tensor = run_other(
            "activation_linear", chosen, x, weight, bias, activation, activation_bias=activation_bias, **options
        )
        return result
    kernels = chosen == "triton" and x.numel() > 0
    activation_bias = (packed if kernels else gathered)(activation_bias)
    call = act.key, clamp, float(linear_offset) if linear_offset else None
    if chosen == "torch" and (torch.compiler.is_compiling() or transformed()):  # these choose by themselves what to keep
        return _traced(x, activation_bias, token_weight, weight, bias, call, save, spread, deferred)
    token_weight = None if token_weight is None else token_weight.contiguous()
    product = product_type(x)
    if not needs_grad(x, activation_bias, token_weight, weight, bias):
        activated = (_by_kernels if kernels else _by_formula)(x, activation_bias, token_weight, call, product)
        return spread_product(activated, weight, bias, spread)
    return _apply(  # type: ignore[no-any-return]
        x, activation_bias, token_weight, weight, bias, call, kernels, product, save, spread, deferred
    )


register_op(activation_linear, _check, unsupported, variant)
