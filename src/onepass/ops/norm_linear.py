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
import torch.nn.functional as F
from torch import Tensor

from onepass.kernels.norm import norm_unsupported, norm_variant, registered_backward, registered_forward
from onepass.kernels.norm_backward import norm_backward
from onepass.kernels.norm_formula import norm_formula
from onepass.kernels.norm_forward import norm_forward
from onepass.runtime.backend import NATIVE, choose, register_op, run_other
from onepass.runtime.checks import check_device, check_floating, check_norm, check_vector
from onepass.runtime.dispatch import bare_apply, cast, needs_grad, once, transformed, watched
from onepass.runtime.main_grad import Asked, asked, gathered, has_own_place, main_grads_of, vector_gradient, weight_gradient
from onepass.runtime.product import column_sums, linear_product

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


def _backward_by_kernels(
    dy: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, *rest: Any
) -> tuple[Tensor | None, ...]:
    backward = registered_backward if watched(dy, x, weight, bias) else norm_backward
    return backward(dy, None, x, weight, bias, *rest)


def _by_formula(
    x: Tensor, norm_weight: Tensor | None, norm_bias: Tensor | None, eps: float, layer: bool, centered: bool, *, keep: bool
) -> tuple[Tensor, Tensor | None]:
    formula = norm_formula(x, norm_weight, norm_bias, layer=layer, eps=eps, zero_centered_gamma=centered, native=True)
    return cast(formula, x.dtype), None


def _backward_by_formula(
    dy: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, stats: None,
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
    call: tuple[float, bool, bool], kernels: bool, product: torch.dtype, keep: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """y, norm(x) and, where backward will want them, the rows' statistics."""
    normed, stats = (_by_kernels if kernels else _by_formula)(x, norm_weight, norm_bias, *call, keep=keep)
    normed = cast(normed, product)
    return F.linear(normed, weight.to(product), None if bias is None else bias.to(product)), normed, stats


def _traced(
    x: Tensor, norm_weight: Tensor | None, weight: Tensor, bias: Tensor | None, norm_bias: Tensor | None, options: dict[str, Any]
) -> Any:
    """The formula for a compiler or a transform, which sees all of it but how a gradient gets into main_grad."""
    if transformed() or not (has_own_place(weight) or has_own_place(bias)):
        return norm_linear_reference(x, norm_weight, weight, bias, norm_bias, **options)
    layer, eps, centered = options["norm"] == "layer_norm", options["eps"], options["zero_centered_gamma"]
    normed = norm_formula(x, norm_weight, norm_bias, layer=layer, eps=eps, zero_centered_gamma=centered).to(x.dtype)
    y = linear_product(normed.to(_product_type(x)), weight, bias)
    return (y, normed) if options["return_norm_output"] else y


# ---- autograd ----


class _NormLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, norm_weight: Tensor | None, norm_bias: Tensor | None, weight: Tensor, bias: Tensor | None,
        call: tuple[float, bool, bool], kernels: bool, return_norm_output: bool, product: torch.dtype,
    ) -> Any:  # fmt: skip
        y, normed, stats = _forward(x, norm_weight, norm_bias, weight, bias, call, kernels, product, True)
        ctx.call, ctx.kernels, ctx.product = call, kernels, product
        ctx.parameters, ctx.main_grads = (weight, bias), main_grads_of(ctx, 3, weight, bias)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, norm_weight, norm_bias, weight, stats)
        return (y, normed) if return_norm_output else y

    @staticmethod
    @once
    def backward(ctx: Any, dy: Tensor | None, dnormed: Tensor | None = None) -> tuple[Tensor | None, ...]:
        x, norm_weight, norm_bias, weight, stats = ctx.saved_tensors
        wanted = asked(ctx, True, norm_weight is not None, norm_bias is not None, True, ctx.parameters[1] is not None)
        need_dx, need_dnorm_weight, need_dnorm_bias, need_dweight, need_dbias = (each is not Asked.NOT for each in wanted)
        dx = dnorm_weight = dnorm_bias = dweight = dbias = None
        tokens = x.numel() // x.shape[-1]
        rows = None if dy is None else dy.reshape(tokens, weight.shape[0])
        through_norm = need_dx or need_dnorm_weight or need_dnorm_bias
        normed = None
        if through_norm:
            dnormed = _through_linear(rows, weight.to(ctx.product), dnormed, x)
        if dnormed is not None and (through_norm or need_dweight):
            backward = _backward_by_kernels if ctx.kernels else _backward_by_formula
            needs = need_dx, need_dnorm_weight, need_dnorm_bias
            rebuild = need_dweight and rows is not None
            into_dy = rows is not None and x.dtype == ctx.product  # then it is ours, and dx may take its place
            dx, dnorm_weight, dnorm_bias, normed = backward(
                dnormed, x, norm_weight, norm_bias, stats, *ctx.call, *needs, x.dtype, rebuild, into_dy
            )
        elif need_dweight and rows is not None:
            normed = (_by_kernels if ctx.kernels else _by_formula)(x, norm_weight, norm_bias, *ctx.call, keep=False)[0]
        if rows is not None:
            if need_dbias:
                dbias = vector_gradient(column_sums(rows), ctx.parameters[1], ctx.main_grads[1], wanted[4])
            if need_dweight:
                assert normed is not None
                normed = normed.to(ctx.product).reshape(tokens, weight.shape[1])
                dweight = weight_gradient(rows, normed, ctx.parameters[0], ctx.main_grads[0], wanted[3])
        return dx, dnorm_weight, dnorm_bias, dweight, dbias, None, None, None, None


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
    *, norm: str = "rms_norm", norm_bias: Tensor | None = None, **options: Any,
) -> str:  # fmt: skip
    """Which kernels a call runs, and their tiles."""
    kernels = norm_variant(x, None, norm_weight, norm == "layer_norm", False, norm_bias)
    return f"{kernels}; products by cuBLAS; norm(x) is rebuilt in backward"


def _cast(x: Tensor) -> bool:
    """Whether autocast is on: the linear layer's operands are rounded to its type then, but for fp64, which it leaves alone."""
    return not x.is_meta and torch.is_autocast_enabled(x.device.type) and x.dtype is not torch.float64


def _product_type(x: Tensor) -> torch.dtype:
    return torch.get_autocast_dtype(x.device.type) if _cast(x) else x.dtype


def _check(
    x: Tensor, norm_weight: Tensor | None, weight: Tensor, bias: Tensor | None = None,
    *, norm: str = "rms_norm", norm_bias: Tensor | None = None, eps: float = 1e-6,
    zero_centered_gamma: bool = False, return_norm_output: bool = False,
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
    check_floating("weight", weight)
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        raise ValueError(f"weight must have shape (N, {x.shape[-1]}), with x's last dimension, but has {tuple(weight.shape)}")
    cast = _cast(x)
    if weight.dtype != x.dtype and not cast:
        raise TypeError(f"weight must have x's type {x.dtype}, but is {weight.dtype}")
    check_device("weight", weight, x)
    if bias is not None:
        check_floating("bias", bias, optional=True)
        if bias.shape != weight.shape[:1]:
            raise ValueError(f"bias must have shape {tuple(weight.shape[:1])}, as weight's rows, but has {tuple(bias.shape)}")
        if bias.dtype != x.dtype and not cast:
            raise TypeError(f"bias must have x's type {x.dtype}, but is {bias.dtype}")
        check_device("bias", bias, x)


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
        return_norm_output: return norm(x) as well; it can be differentiated too.
        backend: ``auto``, ``triton``, ``torch`` or a registered name; None leaves it to `use_backend` and ONEPASS_BACKEND.

    Returns:
        y ``[..., N]`` in x's type; with `return_norm_output` (y, norm(x)).
    """
    _check(x, norm_weight, weight, bias, norm=norm, norm_bias=norm_bias, eps=eps, zero_centered_gamma=zero_centered_gamma)
    chosen = choose("norm_linear", backend, norm_unsupported(x))
    options: dict[str, Any] = {"norm": norm, "eps": eps, "zero_centered_gamma": zero_centered_gamma}
    options["return_norm_output"] = return_norm_output
    if chosen not in NATIVE:
        return run_other("norm_linear", chosen, x, norm_weight, weight, bias, norm_bias=norm_bias, **options)
    norm_weight, norm_bias = gathered(norm_weight), gathered(norm_bias)
    if chosen == "torch" and (torch.compiler.is_compiling() or transformed()):  # these choose by themselves what to keep
        return _traced(x, norm_weight, weight, bias, norm_bias, options)
    norm_weight = None if norm_weight is None else norm_weight.contiguous()
    norm_bias = None if norm_bias is None else norm_bias.contiguous()
    call = float(eps), norm == "layer_norm", bool(zero_centered_gamma)
    kernels = chosen == "triton" and x.numel() > 0
    product = _product_type(x)
    if not needs_grad(x, norm_weight, norm_bias, weight, bias):
        y, normed, _ = _forward(x, norm_weight, norm_bias, weight, bias, call, kernels, product, False)
        return (y, normed) if return_norm_output else y
    return _apply(x, norm_weight, norm_bias, weight, bias, call, kernels, return_norm_output, product)


register_op(norm_linear, _check, unsupported, variant)
