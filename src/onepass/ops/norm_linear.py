"""norm_linear: a norm and the linear layer after it, as one op that keeps x and no normalised activation.

Formula  y = norm(x) @ weight.T + bias, norm as in ops/norm.py, its result rounded to x's type as operands of products are.
Shapes   x [..., K], norm_weight and norm_bias [K], weight [N, K], bias [N], y [..., N]. M rows.
Saves    x, norm_weight, weight, and for each row 1 / deviation (and the mean) in fp32.
Bytes    beside the products: forward reads x and writes norm(x), which is let go; backward reads d norm(x) and x and writes
         norm(x) again, for the weight's gradient, and dx over d norm(x): one kernel, with the gradients of the norm's own
         parameters. So M K elements fewer are kept than by a norm and a linear one after the other.
Products cuBLAS, through PyTorch, in x's type, or in autocast's where that is on: norm(x) and weight are rounded to it. The
         gradients of parameters that carry main_grad go there (runtime/main_grad.py).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from onepass.kernels.norm import norm_unsupported, norm_variant, registered_forward, run_backward
from onepass.kernels.norm_formula import norm_formula
from onepass.kernels.norm_forward import norm_forward
from onepass.parallel.deferred import DeferredWgrad, check_deferred
from onepass.parallel.product import (
    Spread,
    column_sums,
    leave_graph,
    linear_product,
    postponed,
    products_said,
    rows_of,
    spread_over,
    start_input_gradient,
    start_whole,
)
from onepass.runtime.autocast import product_type
from onepass.runtime.backend import NATIVE, choose, register_op, run_other
from onepass.runtime.checks import check_linear, check_norm, check_vector
from onepass.runtime.dispatch import bare_apply, cast, needs_grad, once, transformed, watched
from onepass.runtime.main_grad import Asked, asked, has_own_place, main_grads_of, vector_gradient, weight_gradient
from onepass.runtime.main_grad_vectors import Sums, gathered, packed, sums_of, vectors_of

NORMS = ("rms_norm", "layer_norm")


def norm_linear_reference(
    x: Tensor,
    norm_weight: Tensor | None,
    weight: Tensor,
    bias: Tensor | None = None,
    norm_bias: Tensor | None = None,
    *,
    norm: str = "rms_norm",
    eps: float = 1e-6,
    zero_centered_gamma: bool = False,
    return_norm_output: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """The formula, for every type: y, or (y, norm(x))."""
    layer = norm == "layer_norm"
    normed = norm_formula(x, norm_weight, norm_bias, layer=layer, eps=eps, zero_centered_gamma=zero_centered_gamma).to(x.dtype)
    y = F.linear(normed, weight, bias)
    return (y, normed) if return_norm_output else y


# ---- the norm by kernels, or by the formula where there are none: both keep x only ----


def _by_kernels(
    x: Tensor, norm_weight: Tensor | None, norm_bias: Tensor | None, eps: float, layer: bool, centered: bool, *, keep: bool
) -> tuple[Tensor, Tensor | None]:
    forward = registered_forward if watched(x, norm_weight, norm_bias) else norm_forward
    normed, _, stats = forward(x, None, norm_weight, norm_bias, eps, layer, centered, keep)
    return normed, stats


def _backward_by_kernels(sums: Sums | None, dy: Tensor, *args: Any) -> tuple[Tensor | None, ...]:
    return run_backward(sums, dy, None, *args)


def _by_formula(
    x: Tensor, norm_weight: Tensor | None, norm_bias: Tensor | None, eps: float, layer: bool, centered: bool, *, keep: bool
) -> tuple[Tensor, Tensor | None]:
    formula = norm_formula(x, norm_weight, norm_bias, layer=layer, eps=eps, zero_centered_gamma=centered, native=True)
    return cast(formula, x.dtype), None


def _backward_by_formula(
    sums: Sums | None, dy: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, stats: Tensor | None,
    eps: float, layer: bool, centered: bool, need_dx: bool, need_dweight: bool, need_dbias: bool, *rest: Any,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    needs = need_dx, need_dweight, need_dbias
    wide = torch.promote_types(x.dtype, torch.float32)
    leaves = [
        None if t is None else t.detach().to(wide).requires_grad_(need) for t, need in zip((x, weight, bias), needs, strict=True)
    ]
    with torch.enable_grad():
        normed = norm_formula(*leaves, layer=layer, eps=eps, zero_centered_gamma=centered, native=True)  # type: ignore[arg-type]
    asked = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
    found = iter(torch.autograd.grad(normed, asked, dy.to(wide)) if asked else ())
    grads = [
        next(found).to(t.dtype) if need and t is not None else None for t, need in zip((x, weight, bias), needs, strict=True)
    ]
    return *grads, normed.detach().to(x.dtype)


def _forward(
    x: Tensor, norm_weight: Tensor | None, norm_bias: Tensor | None, weight: Tensor, bias: Tensor | None,
    call: tuple[float, bool, bool], kernels: bool, product: torch.dtype, spread: Spread | None, keep: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """y, norm(x) and, where backward will want them, the rows' statistics."""
    normed, stats = (_by_kernels if kernels else _by_formula)(x, norm_weight, norm_bias, *call, keep=keep)
    normed = cast(normed, product)
    whole = start_whole(normed, spread).wait()
    return F.linear(whole, weight.to(product), None if bias is None else bias.to(product)), normed, stats


def _traced(
    x: Tensor, norm_weight: Tensor | None, weight: Tensor, bias: Tensor | None, norm_bias: Tensor | None, spread: Spread | None,
    deferred: DeferredWgrad | None, options: dict[str, Any],
) -> Any:  # fmt: skip
    """The formula for a compiler or a transform, which sees all of it but how gradients get to main_grad and to other ranks."""
    if spread is None and (transformed() or not (has_own_place(weight) or has_own_place(bias))):
        return norm_linear_reference(x, norm_weight, weight, bias, norm_bias, **options)
    layer, eps, centered = options["norm"] == "layer_norm", options["eps"], options["zero_centered_gamma"]
    normed = norm_formula(x, norm_weight, norm_bias, layer=layer, eps=eps, zero_centered_gamma=centered).to(x.dtype)
    y = linear_product(normed.to(product_type(x)), weight, bias, spread, deferred)
    return (y, normed) if options["return_norm_output"] else y


# ---- autograd ----


class _NormLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, norm_weight: Tensor | None, norm_bias: Tensor | None, weight: Tensor, bias: Tensor | None,
        call: tuple[float, bool, bool], kernels: bool, return_norm_output: bool, product: torch.dtype, spread: Spread | None,
        deferred: DeferredWgrad | None,
    ) -> Any:  # fmt: skip
        leave_graph(deferred)
        y, normed, stats = _forward(x, norm_weight, norm_bias, weight, bias, call, kernels, product, spread, True)
        ctx.call, ctx.kernels, ctx.product, ctx.spread, ctx.deferred = call, kernels, product, spread, deferred
        ctx.parameters, ctx.main_grads = (weight, bias), main_grads_of(ctx.needs_input_grad[3:], weight, bias)
        ctx.vectors = vectors_of(ctx, 1, norm_weight, norm_bias)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, norm_weight, norm_bias, weight, stats)
        return (y, normed) if return_norm_output else y

    @staticmethod
    @once
    def backward(ctx: Any, dy: Tensor | None, dnormed: Tensor | None = None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        wanted = asked(ctx, True, saved[1] is not None, saved[2] is not None, True, ctx.parameters[1] is not None)
        dbias = None
        if dy is not None and wanted[4] is not Asked.NOT:
            dbias = vector_gradient(column_sums(dy), ctx.parameters[1], ctx.main_grads[1], wanted[4])
        if ctx.spread is None or dy is None:
            grads = _backward_alone(ctx, saved, dy, dnormed, wanted)
        else:
            grads = _backward_spread(ctx, saved, dy, dnormed, wanted)
        return *grads, dbias, None, None, None, None, None, None


Grads = tuple[Tensor | None, ...]  # of x, the norm's weight, its bias, and the weight


def _backward_alone(
    ctx: Any, saved: tuple[Any, ...], dy: Tensor | None, dnormed: Tensor | None, wanted: list[Asked]
) -> Grads:  # fmt: skip
    """One kernel for the norm's gradients and norm(x), which the weight's gradient needs."""
    x, norm_weight, norm_bias, weight, stats = saved
    needs = [each is not Asked.NOT for each in wanted[:3]]
    need_dweight = wanted[3] is not Asked.NOT and dy is not None
    rows = None if dy is None else rows_of(dy)
    grads: Grads = (None, None, None)
    normed = None
    if any(needs):
        dnormed = _through_linear(rows, weight.to(ctx.product), dnormed, x)
    if dnormed is not None and (any(needs) or need_dweight):
        backward = _backward_by_kernels if ctx.kernels else _backward_by_formula
        sums = sums_of(ctx.vectors, wanted[1:3])
        into_dy = rows is not None and x.dtype == ctx.product  # then it is ours, and dx may take its place
        found = backward(sums, dnormed, x, norm_weight, norm_bias, stats, *ctx.call, *needs, x.dtype, need_dweight, into_dy)
        grads, normed = found[:3], found[3]
    elif need_dweight:
        normed = _rebuilt(ctx, x, norm_weight, norm_bias)
    if not need_dweight:
        return *grads, None
    assert rows is not None and normed is not None
    normed = normed.to(ctx.product)
    if postponed(ctx.deferred, ctx.parameters[0], wanted[3]):
        return *grads, ctx.deferred.keep(rows, normed, ctx.parameters[0], ctx.main_grads[0], None)
    return *grads, weight_gradient(rows, rows_of(normed), ctx.parameters[0], ctx.main_grads[0], wanted[3])


def _backward_spread(
    ctx: Any, saved: tuple[Any, ...], dy: Tensor, dnormed: Tensor | None, wanted: list[Asked]
) -> Grads:  # fmt: skip
    """norm(x) comes from all ranks under the product for d norm(x), whose sum comes under the product for the weight."""
    x, norm_weight, norm_bias, weight, stats = saved
    needs = [each is not Asked.NOT for each in wanted[:3]]
    need_dweight = wanted[3] is not Asked.NOT
    gathering = summing = dweight = None
    if need_dweight:
        normed = _rebuilt(ctx, x, norm_weight, norm_bias)
        if postponed(ctx.deferred, ctx.parameters[0], wanted[3]):
            dweight = ctx.deferred.keep(dy, normed, ctx.parameters[0], ctx.main_grads[0], ctx.spread)
        else:
            gathering = start_whole(normed, ctx.spread)
    if any(needs):
        summing = start_input_gradient(dy, weight.to(ctx.product), ctx.spread)
    if gathering is not None:
        dweight = weight_gradient(rows_of(dy), rows_of(gathering.wait()), ctx.parameters[0], ctx.main_grads[0], wanted[3])
    if summing is None:
        return None, None, None, dweight
    through = summing.wait()
    dnormed = through if dnormed is None else through + dnormed
    backward = _backward_by_kernels if ctx.kernels else _backward_by_formula
    sums = sums_of(ctx.vectors, wanted[1:3])
    into_dy = x.dtype == ctx.product
    grads = backward(sums, dnormed, x, norm_weight, norm_bias, stats, *ctx.call, *needs, x.dtype, False, into_dy)[:3]
    return *grads, dweight


def _rebuilt(ctx: Any, x: Tensor, norm_weight: Tensor | None, norm_bias: Tensor | None) -> Tensor:
    normed, _ = (_by_kernels if ctx.kernels else _by_formula)(x, norm_weight, norm_bias, *ctx.call, keep=False)
    return normed.to(ctx.product)


def _through_linear(rows: Tensor | None, weight: Tensor, dnormed: Tensor | None, x: Tensor) -> Tensor | None:
    """The whole gradient of norm(x): what comes through the linear layer, and what came for norm(x) itself."""
    if rows is None:
        return dnormed
    if dnormed is None:
        return (rows @ weight).view(x.shape)
    return torch.addmm(dnormed.reshape(rows.shape[0], weight.shape[1]), rows, weight).view(x.shape)  # one rounding for both


_apply = bare_apply(_NormLinear)


# ---- the public face: say what is wrong, choose who does it, return ----


def unsupported(x: Tensor, *args: Any, **options: Any) -> str | None:
    """Why the kernels can't take this call, or None."""
    return norm_unsupported(x)


def variant(
    x: Tensor, norm_weight: Tensor | None, weight: Any, bias: Any = None,
    *, norm: str = "rms_norm", norm_bias: Tensor | None = None, deferred: DeferredWgrad | None = None, **options: Any,
) -> str:  # fmt: skip
    """Which kernels a call runs, and their tiles."""
    kernels = norm_variant(x, None, norm_weight, norm == "layer_norm", False, norm_bias)
    return f"{kernels}; {products_said(deferred)}; norm(x) is rebuilt in backward"


def _check(
    x: Tensor, norm_weight: Tensor | None, weight: Tensor, bias: Tensor | None = None,
    *, norm: str = "rms_norm", norm_bias: Tensor | None = None, eps: float = 1e-6,
    zero_centered_gamma: bool = False, return_norm_output: bool = False,
    tp_group: dist.ProcessGroup | None = None, sequence_parallel: bool = False, deferred: DeferredWgrad | None = None,
) -> None:  # fmt: skip
    check_norm(x, eps)
    if norm not in NORMS:
        raise ValueError(f"norm must be one of {', '.join(NORMS)}, but is {norm!r}")
    if norm_weight is not None:
        check_vector("norm_weight", norm_weight, x)
    elif zero_centered_gamma:
        raise ValueError("zero_centered_gamma says how norm_weight is kept, but there is no norm_weight")
    if norm_bias is not None:
        if norm == "rms_norm":
            raise ValueError("norm_bias needs norm='layer_norm': an RMSNorm has no bias")
        check_vector("norm_bias", norm_bias, x)
    check_linear(x, x.shape[-1], weight, bias)
    check_deferred(deferred, weight)


def norm_linear(
    x: Tensor,
    norm_weight: Tensor | None,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: str = "rms_norm",
    norm_bias: Tensor | None = None,
    eps: float = 1e-6,
    zero_centered_gamma: bool = False,
    return_norm_output: bool = False,
    tp_group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
    deferred: DeferredWgrad | None = None,
    backend: str | None = None,
) -> Any:
    """A norm and the linear layer after it; only x is kept for backward, which rebuilds the normalised rows.

    Args:
        x: ``[..., K]``.
        norm_weight: ``[K]``, of any floating-point type, or None.
        weight: ``[N, K]``, of x's type. The gradient of a parameter with a ``main_grad``, any of these, is added there.
        bias: ``[N]``, of x's type, or None.
        norm: ``rms_norm`` or ``layer_norm``.
        norm_bias: ``[K]``, for ``layer_norm``.
        eps, zero_centered_gamma: the norm's, as in `rms_norm` and `layer_norm`.
        return_norm_output: return norm(x) as well, of the x that is given; it can be differentiated too.
        tp_group: the ranks that each have some rows of the weight and of the bias, and get as many columns of y: x's gradient is
            summed over them, under the product for the weight's. Forward and backward are collective.
        sequence_parallel: x is this rank's part along the first dimension, and norm(x) is gathered for the product, y that of all
            parts; so is x's gradient this rank's part, and those of the norm's parameters are parts of a sum over tp_group
            (`onepass.parallel.reduce_sequence_parallel_grads`).
        deferred: keeps norm(x), made again, and y's gradient for the weight's, until its `flush`. The weight must carry
            main_grad.
        backend: ``auto``, ``triton``, ``torch`` or a registered name; None leaves it to `use_backend` and ONEPASS_BACKEND.

    Returns:
        y ``[..., N]`` in x's type; with `return_norm_output` (y, norm(x)).
    """
    _check(x, norm_weight, weight, bias, norm=norm, norm_bias=norm_bias, eps=eps, zero_centered_gamma=zero_centered_gamma)
    deferred = check_deferred(deferred, weight)
    chosen = choose("norm_linear", backend, norm_unsupported(x))
    options: dict[str, Any] = {"norm": norm, "eps": eps, "zero_centered_gamma": zero_centered_gamma}
    options["return_norm_output"] = return_norm_output
    spread = spread_over(tp_group, by_row=False, sequence=sequence_parallel)
    if chosen not in NATIVE:
        options |= {"tp_group": tp_group, "sequence_parallel": sequence_parallel} if spread is not None else {}
        options |= {} if deferred is None else {"deferred": deferred}
        return run_other("norm_linear", chosen, x, norm_weight, weight, bias, norm_bias=norm_bias, **options)
    kernels = chosen == "triton" and x.numel() > 0
    prepared = packed if kernels else gathered
    norm_weight, norm_bias = prepared(norm_weight), prepared(norm_bias)
    if chosen == "torch" and (torch.compiler.is_compiling() or transformed()):  # these choose by themselves what to keep
        return _traced(x, norm_weight, weight, bias, norm_bias, spread, deferred, options)
    call = float(eps), norm == "layer_norm", bool(zero_centered_gamma)
    product = product_type(x)
    if not needs_grad(x, norm_weight, norm_bias, weight, bias):
        y, normed, _ = _forward(x, norm_weight, norm_bias, weight, bias, call, kernels, product, spread, False)
        return (y, normed) if return_norm_output else y
    return _apply(x, norm_weight, norm_bias, weight, bias, call, kernels, return_norm_output, product, spread, deferred)


register_op(norm_linear, _check, unsupported, variant)
