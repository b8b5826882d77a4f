"""activation_linear: an MLP's activation and its down projection, as one op that keeps the activation's input and not its output.

Formula  y = act(x + activation_bias) @ weight.T + bias, with clamp, linear_offset and token_weight as in
         ops/activation/bias_activation.py. The activation is computed in fp32 and rounded once, to the product's type.
Shapes   x [..., K] or, gated, [..., 2K], activation_bias of x's last dimension, token_weight [...] or [..., 1], weight [N, K],
         bias [N], y [..., N]. M rows.
Saves    activation_bias, token_weight, weight, and x as `save` says: as it is, in fp8, or on the host. Backward rebuilds the
         activation from the x that was kept, so with save="fp8" the weight's gradient, too, is that of the kept x.
Bytes    beside the products: forward reads x and writes the activation, which is freed after the product. Backward is one
         kernel: it reads d activation and x, writes dx, and writes the activation again over d activation for the weight's
         gradient; it also reduces the gradients of activation_bias and token_weight. M K elements fewer are kept than by an
         activation and a linear layer.
Products cuBLAS, through PyTorch, in x's type, or in autocast's where that is on: weight and bias are rounded to it.
         Gradients of parameters that carry main_grad are added there (gradients/main_grad.py).
Eight bits: the activation goes from fp32 to codes, in its own pass, and backward writes them turned (ops/activation/fp8.py).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from onepass.gradients.deferred import DeferredWgrad, check_deferred
from onepass.gradients.fp8_gradient import fp8_taker
from onepass.gradients.fp8_linear import fp8_product
from onepass.gradients.fp8_weight import CompiledFP8, FP8Weight, describe_formula, describe_fp8, fp8_state
from onepass.gradients.main_grad import (
    GradRequest,
    accumulates_elsewhere,
    grad_requests,
    main_grads_of,
    name_written,
)
from onepass.gradients.product import (
    describe_products,
    graph_break_if_deferred,
    is_deferred,
    linear_gradients,
    linear_product,
)
from onepass.gradients.vectors import KernelTargets, VectorGrads, contiguous_param, saved_vectors, vector_grads, with_fp32_grad
from onepass.ops.activation import kernels
from onepass.ops.activation.activations import Activation, activation_of, find_activation
from onepass.ops.activation.formula import ActivationOptions, activation_formula
from onepass.ops.activation.fp8_linear import (
    Needs,
    activation_backward_fp8,
    activation_linear_fp8,
    start_activation_operand,
)
from onepass.ops.activation.sharding import shard_activation_linear
from onepass.parallel.tensor_parallel import (
    TPLayout,
    check_divisible,
    column_sums,
    row_gradients,
    rows_of,
    tp_layout,
    tp_product,
)
from onepass.runtime import saved
from onepass.runtime.autocast import product_type
from onepass.runtime.backend import NATIVE, choose, run_other
from onepass.runtime.checks import check_linear
from onepass.runtime.dispatch import cast, fast_apply, needs_grad, not_twice_differentiable, under_functorch, writable
from onepass.runtime.formula import run_formula
from onepass.runtime.fp8_recipe import Precision
from onepass.runtime.op import Call, define_op
from onepass.runtime.sharding import has_dtensor, run_on_shards


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
    """Return y by the formula."""
    options = ActivationOptions(find_activation(activation).key, clamp, linear_offset)
    return F.linear(activation_formula(x, activation_bias, token_weight, options).to(x.dtype), weight, bias)


# ---- the activation by kernels, or by the formula where there are none ----


def _activation(
    x: Tensor, bias: Tensor | None, token_weight: Tensor | None, options: ActivationOptions,
    use_triton: bool, product: torch.dtype,
) -> Tensor:  # fmt: skip
    """Return the activation in the product's type."""
    if use_triton:
        return kernels.forward(x, bias, token_weight, None, None, options, product)  # type: ignore[no-any-return]
    return activation_by_formula(x, bias, token_weight, options, product)


def activation_by_formula(
    x: Tensor, bias: Tensor | None, token_weight: Tensor | None, options: ActivationOptions, product: torch.dtype,
    save: str = "input",
) -> Tensor:  # fmt: skip
    """The same by PyTorch, over blocks of rows on a CPU. It can be differentiated, and keeps x only."""
    formula = partial(_rounded_formula, options=options, product=product)
    parts = activation_of(options.activation).parts
    result: Tensor = run_formula(formula, save, x, shared=(bias,), per_row=(token_weight,), parts=parts)
    return result


def _rounded_formula(
    x: Tensor, bias: Tensor | None, token_weight: Tensor | None, *, options: ActivationOptions, product: torch.dtype
) -> Tensor:
    return cast(activation_formula(x, bias, token_weight, options), product)


def _activation_and_kept(
    x: Tensor, bias: Tensor | None, token_weight: Tensor | None, options: ActivationOptions, use_triton: bool,
    product: torch.dtype, stored: saved.SavedFormat,
) -> tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
    """Return the activation and what backward keeps of x: in fp8 the codes and exponents that the kernel makes as it reads x."""
    if use_triton and stored.save == "fp8":
        activated, *kept = kernels.forward_fp8(x, bias, token_weight, None, options, product)
        return activated, tuple(kept)
    return _activation(x, bias, token_weight, options, use_triton, product), saved.pack(x, stored)


def backward_by_kernels(
    grads: VectorGrads | None, dy: Tensor | None, kept: tuple[Tensor, ...], bias: Tensor | None, token_weight: Tensor | None,
    options: ActivationOptions, stored: saved.SavedFormat, needs: Needs, product: torch.dtype | None,
) -> tuple[KernelTargets | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Return what the kernel added to, the needed gradients of x, bias and token_weight, and the activation, if `product` is its
    type.

    dy belongs to the caller alone: the activation is written over it.
    """
    x, exponents = kept if stored.save == "fp8" else (saved.unpack(kept, stored), None)
    if dy is None:
        assert product is not None
        return None, None, None, None, kernels.rebuild_activation(x, exponents, bias, token_weight, options, product)
    into, found = kernels.backward_into(
        grads, dy, x, exponents, bias, token_weight, None, None, options, *needs, False, stored.dtype, product, into_dy=True
    )
    return into, *found[:4]


def backward_by_formula(
    grads: VectorGrads | None, dy: Tensor | None, kept: tuple[Tensor, ...], bias: Tensor | None, token_weight: Tensor | None,
    options: ActivationOptions, stored: saved.SavedFormat, needs: Needs, product: torch.dtype | None,
) -> tuple[KernelTargets | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """The same by PyTorch, which adds to no main_grad."""
    if grads is not None:
        (bias,) = grads.wide(bias)
    given = saved.unpack(kept, stored), bias, token_weight
    if dy is None:
        assert product is not None
        return None, None, None, None, activation_by_formula(*given, options, product)
    leaves: list[Any] = [t if t is None else t.detach().requires_grad_(n) for t, n in zip(given, needs, strict=True)]
    with torch.enable_grad():
        activated = activation_by_formula(leaves[0], leaves[1], leaves[2], options, dy.dtype)
    found = iter(torch.autograd.grad(activated, [leaf for leaf in leaves if leaf is not None and leaf.requires_grad], dy))
    dx, dbias, dtoken_weight = (next(found) if need else None for need in needs)
    return None, dx, dbias, dtoken_weight, activated.detach()


def _traced(
    x: Tensor, activation_bias: Tensor | None, token_weight: Tensor | None, weight: Tensor, bias: Tensor | None,
    options: ActivationOptions, save: str, layout: TPLayout | None, deferred: DeferredWgrad | None, state: Any,
) -> Tensor:  # fmt: skip
    """Run the formula for a compiler or a transform: only how gradients get to main_grad and other ranks is opaque to it.

    A product in eight bits is opaque too. It takes the activation in fp32, which is rounded once.
    """
    if state is not None:
        activated = activation_by_formula(x, activation_bias, token_weight, options, torch.float32, save)
        return fp8_product(activated, weight, bias, state, layout, deferred, product_type(x))
    activated = activation_by_formula(x, activation_bias, token_weight, options, product_type(x), save)
    if layout is not None or (not under_functorch() and (accumulates_elsewhere(weight) or accumulates_elsewhere(bias))):
        return linear_product(activated, weight, bias, layout, deferred)
    return tp_product(activated, weight, bias, None)


# ---- autograd ----


class _ActivationLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, activation_bias: Tensor | None, token_weight: Tensor | None, weight: Tensor, bias: Tensor | None,
        options: ActivationOptions, use_triton: bool, product: torch.dtype, save: str,
        layout: TPLayout | None, deferred: DeferredWgrad | None, state: FP8Weight | CompiledFP8 | None, taker: FP8Weight | None,
    ) -> Tensor:  # fmt: skip
        graph_break_if_deferred(deferred)
        ctx.options, ctx.use_triton, ctx.product, ctx.layout, ctx.deferred = options, use_triton, product, layout, deferred
        ctx.stored = saved.saved_format(x, save, activation_of(options.activation).parts)
        ctx.parameters, ctx.main_grads = (weight, bias), main_grads_of(ctx.needs_input_grad[3:], weight, bias)
        ctx.vectors = saved_vectors(ctx, 1, activation_bias)
        kept: tuple[Tensor, ...] = ()
        ctx.fp8 = None
        if state is not None:
            ctx.taker = taker
            y, ctx.fp8 = activation_linear_fp8(
                state, x, activation_bias, token_weight, weight, bias, options, use_triton, product, layout, True
            )
            kept = saved.pack(x, ctx.stored) if any(ctx.needs_input_grad[:4]) else ()
        elif any(ctx.needs_input_grad[:4]):
            activated, kept = _activation_and_kept(x, activation_bias, token_weight, options, use_triton, product, ctx.stored)
        else:  # the bias alone asks
            activated = _activation(x, activation_bias, token_weight, options, use_triton, product)
        ctx.save_for_backward(activation_bias, token_weight, weight, *kept)
        return writable(tp_product(activated, weight, bias, layout) if state is None else y)

    @staticmethod
    @not_twice_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        activation_bias, token_weight, weight, *kept = ctx.saved_tensors
        requests = grad_requests(
            ctx, True, activation_bias is not None, token_weight is not None, True, ctx.parameters[1] is not None
        )
        need_dx, need_dactivation_bias, need_dtoken_weight, need_dweight, need_dbias = (
            each is not GradRequest.SKIP for each in requests
        )
        needs = need_dx, need_dactivation_bias, need_dtoken_weight
        keep = rows = into = dx = dactivation_bias = dtoken_weight = operand = y_codes = None
        vectors = vector_grads(ctx.vectors, requests[1:2])
        sums = column_sums(dy) if need_dbias else None
        later = is_deferred(ctx.deferred, ctx.parameters[0], requests[3])
        if any(needs) or need_dweight:
            activated = None
            if ctx.fp8 is None:
                through = cast(weight, ctx.product) if any(needs) else None
                whole_dy, dactivated = row_gradients(dy, through, need_dweight and not later, ctx.layout)
            else:
                dactivated, operand, whole_dy = ctx.fp8.output_gradient(dy, weight, any(needs), need_dweight, later=later)
            backward = backward_by_kernels if ctx.use_triton else backward_by_formula
            rebuild = ctx.product if need_dweight and operand is None else None
            if operand is not None and need_dx and ctx.taker is not None:
                x = saved.unpack(tuple(kept), ctx.stored)
                dx, dactivation_bias, dtoken_weight, y_codes = activation_backward_fp8(
                    ctx, vectors, dactivated, x, activation_bias, token_weight, needs
                )
            elif dactivated is not None or rebuild is not None:
                into, dx, dactivation_bias, dtoken_weight, activated = backward(
                    vectors, dactivated, tuple(kept), activation_bias, token_weight, ctx.options, ctx.stored, needs, rebuild
                )
            if operand is None and later:
                keep = partial(ctx.deferred.keep, dy, activated, ctx.parameters[0], ctx.main_grads[0], ctx.layout)
            elif operand is None and need_dweight:
                assert activated is not None
                rows = rows_of(whole_dy), rows_of(activated)
        pending = () if vectors is None else vectors.pending(into, dactivation_bias)
        with name_written([] if into is None else ["activation_bias"]):
            if operand is not None:
                given = saved.unpack(tuple(kept), ctx.stored), activation_bias, token_weight, ctx.options, ctx.use_triton
                start = start_activation_operand(ctx.fp8, *given, y_codes, later)
                place = ctx.parameters[0], ctx.main_grads[0], requests[3], ctx.deferred if later else None
                keep = partial(ctx.fp8.weight_gradient, operand, start, *place)
            dweight, dbias, *put = linear_gradients(ctx.parameters, ctx.main_grads, requests[3:], sums, rows, keep, pending)
        if vectors is not None:
            (dactivation_bias,) = vectors.autograd_grads(into, put)
        return dx, dactivation_bias, dtoken_weight, dweight, dbias, None, None, None, None, None, None, None, None


_apply = fast_apply(_ActivationLinear)


# ---- the public function: say what is wrong, choose who does it, return ----


def _check(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, activation_bias: Tensor | None, token_weight: Tensor | None,
    clamp: float | None, linear_offset: float, save: str, tp_group: dist.ProcessGroup | None, sequence_parallel: bool,
) -> Activation:  # fmt: skip
    """Raise where an argument is wrong, else return the activation."""
    act = kernels.check_activation(x, activation_bias, activation, token_weight, clamp, linear_offset, save, "activation_bias")
    check_linear(x, x.shape[-1] // act.parts, weight, bias)
    if sequence_parallel:
        check_divisible(x, tp_group)
    return act


def _check_call(call: Call) -> None:
    _check(
        call.x, call.weight, call.bias, call.activation, call.activation_bias, call.token_weight,
        call.clamp, call.linear_offset, call.save, call.tp_group, call.sequence_parallel,
    )  # fmt: skip
    check_deferred(call.deferred, call.weight)


def _variant(call: Call) -> str:
    """Describe the kernels of a call and their tiles."""
    said = kernels.activation_variant(call.x, find_activation(call.activation), call.save)
    products = describe_fp8(call.precision, call.x, call.weight) or describe_products(call.deferred)
    return f"{said}; {products}; the activation is rebuilt in backward"


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
    precision: Precision = None,
    backend: str | None = None,
) -> Tensor:
    """Apply an activation and the linear layer after it; only x is kept for backward, which rebuilds the activation.

    Args:
        x: ``[..., K]``, or ``[..., 2K]`` for a gated activation: the first half is the gate, the second the linear part.
        weight: ``[N, K]``, of x's type. The gradient of any parameter here that has a ``main_grad`` is added there.
        bias: ``[N]``, of x's type, or None.
        activation: as in `bias_activation`; the default is ``swiglu``.
        activation_bias: added to x: as long as its last dimension, of any floating-point type, or None.
        token_weight: ``[...]`` or ``[..., 1]``, multiplied into each row of the activation (a router's weight).
        clamp, linear_offset: for gated activations, as in `bias_activation`.
        save: how x is kept for backward: ``input`` as it is, ``fp8`` in about half of bf16's bytes with a bounded error,
            ``offload`` in the host's memory. With ``fp8`` the weight's gradient is made from the codes too.
        tp_group: each rank has some columns of the weight and of the activation. y is summed over the ranks before the bias is
            added. Forward is collective, and with sequence_parallel backward is too.
        sequence_parallel: y is this rank's part along the first dimension; the bias's gradient is a part of a sum over tp_group.
        deferred: keeps the rebuilt activation and y's gradient until its `flush`, which makes the weight's gradient. The weight
            must carry main_grad.
        precision: ``fp8`` or an `onepass.FP8Recipe` runs the products in eight bits; None in x's type, or autocast's. Under
            sequence_parallel y's gradient is gathered in eight bits too, at a scale that the ranks share.
        backend: ``auto``, ``triton``, ``torch`` or a registered name; None leaves it to `use_backend` and ONEPASS_BACKEND.

    Returns:
        ``[..., N]`` in x's type. The activation is computed in fp32 and rounded once, as an operand of the product.
    """
    if has_dtensor(x, weight):
        return run_on_shards(  # type: ignore[no-any-return]
            "activation_linear", x=x, weight=weight, bias=bias, activation=activation, activation_bias=activation_bias,
            token_weight=token_weight, clamp=clamp, linear_offset=linear_offset, save=save, tp_group=tp_group,
            sequence_parallel=sequence_parallel, deferred=deferred, precision=precision, backend=backend,
        )  # fmt: skip
    act = _check(
        x, weight, bias, activation, activation_bias, token_weight, clamp, linear_offset, save, tp_group, sequence_parallel
    )
    deferred = check_deferred(deferred, weight)
    clamp = None if clamp is None else float(clamp)
    if save == "fp8":
        kernels.check_finite(x)
    layout = tp_layout(tp_group, by_row=True, sequence=sequence_parallel)
    chosen = choose("activation_linear", backend, kernels.activation_unsupported(x, act))
    if chosen not in NATIVE:
        return run_other(  # type: ignore[no-any-return]
            "activation_linear", chosen, x, weight, bias, activation,
            activation_bias=activation_bias, token_weight=token_weight, clamp=clamp, linear_offset=linear_offset, save=save,
            tp_group=tp_group, sequence_parallel=sequence_parallel, deferred=deferred, precision=precision,
        )  # fmt: skip
    use_triton = chosen == "triton" and x.numel() > 0
    state = fp8_state(precision, x, weight, layout)
    traced = chosen == "torch" and (torch.compiler.is_compiling() or under_functorch())  # these choose by themselves what to keep
    activation_bias = (with_fp32_grad if traced else contiguous_param)(activation_bias)
    options = ActivationOptions(act.key, clamp, float(linear_offset) if linear_offset else None)
    if traced:
        return _traced(x, activation_bias, token_weight, weight, bias, options, save, layout, deferred, state)
    token_weight = None if token_weight is None else token_weight.contiguous()
    product = product_type(x)
    if not needs_grad(x, activation_bias, token_weight, weight, bias):
        if state is not None:
            return activation_linear_fp8(
                state, x, activation_bias, token_weight, weight, bias, options, use_triton, product, layout, False
            )[0]
        activated = _activation(x, activation_bias, token_weight, options, use_triton, product)
        return tp_product(activated, weight, bias, layout)
    return _apply(  # type: ignore[no-any-return]
        x, activation_bias, token_weight, weight, bias, options, use_triton, product, save, layout, deferred, state,
        None if state is None else fp8_taker(x),
    )  # fmt: skip


define_op(
    activation_linear,
    check=_check_call,
    unsupported=lambda call: kernels.activation_unsupported(call.x, find_activation(call.activation)),
    variant=_variant,
    sharding=shard_activation_linear,
    formula=describe_formula,
)
