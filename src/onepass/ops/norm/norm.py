"""norm: layer_norm and rms_norm, alone or after adding a residual.

Formula  h = x + residual, rounded to x's type (without a residual h is x);
         RMSNorm: y = h / sqrt(mean(h^2) + eps) * weight;  LayerNorm: the same of h - mean(h), and + bias.
         zero_centered_gamma: weight + 1 in the place of weight. fp32 all the way, y rounded once, where it is stored.
         rms_norm with post_residual: y + post_residual in the place of y.
Shapes   x, residual and post_residual [..., H], weight and bias [H]; y and h are x's shape and type. M rows, H up to 262144.
Saves    h, weight and for each row 1 / deviation (and the mean) in fp32; with memory_efficient not even these.
Bytes    forward reads x and writes y, with a residual reads x and residual and writes h and y; backward reads dy and h (and
         h's own gradient) and writes dx, which is the residual's gradient too. dweight and dbias in the same pass.
         With post_residual forward reads x and post_residual and writes y; dy is post_residual's gradient.
Kernels  ops/norm/kernels.py and what it names: norm_linear shares them.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal, overload

import torch
from torch import Tensor

from onepass.gradients.main_grad import grad_requests, name_written
from onepass.gradients.vectors import VectorGrads, contiguous_param, saved_vectors, with_fp32_grads
from onepass.ops.norm import fp8, kernels
from onepass.ops.norm.formula import NormOptions, add_rounded, norm_formula
from onepass.runtime.backend import NATIVE, choose, run_other
from onepass.runtime.checks import check_norm, check_same_shape, check_vector
from onepass.runtime.dispatch import fast_apply, needs_grad, not_twice_differentiable, under_functorch
from onepass.runtime.formula import run_formula
from onepass.runtime.fp8 import FP8Output, FP8Target, FP8Tensor, check_forward_only, describe_output_formula, output_target
from onepass.runtime.op import Call, define_op
from onepass.runtime.sharding import Layout, Split, by_rows, has_dtensor, refuse, run_on_shards


def rms_norm_reference(
    x: Tensor,
    weight: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    eps: float = 1e-6,
    zero_centered_gamma: bool = False,
    return_input: bool = False,
    post_residual: Tensor | None = None,
    stored: torch.dtype | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return y, or (y, h), by the formula. `stored` is the type that h is rounded to, x's own unless given."""
    options = NormOptions(False, eps, zero_centered_gamma)
    return _formula(x, weight, None, residual, post_residual, options, stored or x.dtype, return_input)


def layer_norm_reference(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    eps: float = 1e-5,
    zero_centered_gamma: bool = False,
    return_input: bool = False,
    stored: torch.dtype | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return y, or (y, h), by the formula. `stored` is the type that h is rounded to, x's own unless given."""
    options = NormOptions(True, eps, zero_centered_gamma)
    return _formula(x, weight, bias, residual, None, options, stored or x.dtype, return_input)


def _formula(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, post: Tensor | None,
    options: NormOptions, stored: torch.dtype, return_input: bool = False, native: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    layer, eps, centered = options
    h = x if residual is None else add_rounded(x, residual, stored)
    y = norm_formula(h, weight, bias, layer=layer, eps=eps, zero_centered_gamma=centered, native=native)
    y = (y if post is None else y + post.to(y.dtype)).to(x.dtype)
    return (y, h.to(x.dtype)) if return_input or residual is not None else y


# ---- autograd ----


class _NormFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, post: Tensor | None,
        options: NormOptions, keep: bool, returns_input: bool,
    ) -> Any:  # fmt: skip
        y, h, stats = kernels.forward(x, residual, weight, bias, post, options, keep)
        ctx.call = options, x.dtype, None if residual is None else residual.dtype, None if post is None else post.dtype
        ctx.vectors = saved_vectors(ctx, 2, weight, bias)
        h = x if residual is None else h
        ctx.save_for_backward(h, weight, bias, stats)
        if not returns_input:
            return y
        ctx.set_materialize_grads(False)  # y or h may have been used alone
        if residual is None and not ctx.needs_input_grad[0]:
            ctx.mark_non_differentiable(h)
        return y, h

    @staticmethod
    @not_twice_differentiable
    def backward(ctx: Any, dy: Tensor | None, dh: Tensor | None = None) -> tuple[Tensor | None, ...]:
        x, weight, bias, stats = ctx.saved_tensors
        options, x_type, residual_type, post_type = ctx.call
        need_x, need_residual, need_dweight, need_dbias, need_post = ctx.needs_input_grad[:5]
        dpost = dy.to(post_type) if need_post and dy is not None else None
        if need_post and not (need_x or need_dweight):
            return None, None, None, None, dpost, None, None, None
        grads = None
        if dy is None:
            dx, dweight, dbias = dh, None, None
        else:
            dx_type = x_type if residual_type is None else torch.promote_types(x_type, residual_type)
            needs = need_x or need_residual, need_dweight, need_dbias
            if ctx.vectors is not None:
                vectors, main_grads = ctx.vectors
                grads = VectorGrads(vectors, main_grads, grad_requests(ctx, 4)[2:])
                needs = needs[0], *grads.needed()
            into, dx, dweight, dbias, _ = kernels.backward_into(
                grads, dy, dh, x, weight, bias, stats, options, *needs, dx_type, False
            )
            if grads is not None:
                dweight, dbias = grads.put(into, dweight, dbias)
        if residual_type is None:  # dx is None or of x's type
            return dx if need_x else None, None, dweight, dbias, dpost, None, None, None
        with name_written([] if grads is None else grads.accumulated("weight", "bias")):
            return (
                dx.to(x_type) if need_x and dx is not None else None,
                dx.to(residual_type) if need_residual and dx is not None else None,
                dweight, dbias, None, None, None, None,
            )  # fmt: skip


_apply = fast_apply(_NormFunction)


# ---- the public functions: say what is wrong, choose who does it, return ----


def _check(given: Mapping[str, Any], bias: Tensor | None = None) -> FP8Target | None:
    """Raise where an argument is wrong, else return the target of y's codes."""
    x, weight, residual = given["x"], given["weight"], given["residual"]
    check_norm(x, given["eps"])
    if weight is not None:
        check_vector("weight", weight, x)
    elif given["zero_centered_gamma"]:
        raise ValueError("zero_centered_gamma says how weight is kept, but there is no weight")
    if bias is not None:
        check_vector("bias", bias, x)
    if residual is not None:
        check_same_shape("residual", residual, x)
    if given.get("post_residual") is not None:
        check_same_shape("post_residual", given["post_residual"], x)
        for name in ("residual", "return_input", "out"):
            if given[name] is not None and given[name] is not False:
                raise ValueError(f"{name} must be left out where there is a post_residual, but is given")
    return output_target(given["out"], x)


def shard_norm(given: dict[str, Any], at: Mapping[str, Split], ranks: int) -> Layout:
    """Rows are divided, and whole rows normalised."""
    refuse(given, "out")
    return by_rows(given, at, ("x", "residual", *(["post_residual"] if "post_residual" in given else [])), ("weight", "bias"))


def _norm(name: str, given: Mapping[str, Any], bias: Tensor | None, target: FP8Target | None, backend: str | None) -> Any:
    x, weight, residual, return_input = given["x"], given["weight"], given["residual"], given["return_input"]
    post = given.get("post_residual")
    chosen = choose(name, backend, kernels.norm_unsupported(x))
    if return_input and residual is None:
        traced = torch.compiler.is_compiling() or under_functorch()
        if traced or chosen != "triton" or target is not None or x.numel() == 0 or not needs_grad(x, weight, bias):
            return _norm(name, {**given, "return_input": False}, bias, target, backend), x
    options = NormOptions(name == "layer_norm", float(given["eps"]), given["zero_centered_gamma"])
    if chosen not in NATIVE:  # a backend returns h beside y where there is a residual, and only there
        if post is not None:
            return (_norm(name, {**given, "post_residual": None}, bias, target, backend) + post).to(x.dtype)
        return run_other(name, chosen, **{**given, "eps": options.eps, "return_input": False})
    if target is not None:
        check_forward_only(x, residual, weight, bias)
        vectors = contiguous_param(weight), contiguous_param(bias)
        return fp8.norm_output(x, residual, *vectors, options, target, chosen == "triton")
    if chosen == "torch" or x.numel() == 0:
        formula = partial(_native_formula, options=options)
        return run_formula(formula, "input", x, shared=with_fp32_grads(weight, bias), per_row=(residual, post))
    weight, bias = contiguous_param(weight), contiguous_param(bias)
    if not needs_grad(x, residual, weight, bias, post):
        y, h, _ = kernels.forward(x, residual, weight, bias, post, options, False)
        return y if residual is None else (y, h)
    return _apply(x, residual, weight, bias, post, options, not given["memory_efficient"], return_input or residual is not None)


def _native_formula(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, post: Tensor | None, options: NormOptions
) -> Any:
    return _formula(x, weight, bias, residual, post, options, x.dtype, native=True)


# What comes back depends on whether there is a residual: type checkers are told.
@overload
def rms_norm(
    x: Tensor, weight: Tensor | None = ..., eps: float = ..., *, residual: None = ...,
    zero_centered_gamma: bool = ..., memory_efficient: bool = ..., return_input: Literal[False] = ..., out: None = ...,
    post_residual: Tensor | None = ..., backend: str | None = ...,
) -> Tensor: ...  # fmt: skip
@overload
def rms_norm(
    x: Tensor, weight: Tensor | None = ..., eps: float = ..., *, residual: Tensor | None = ...,
    zero_centered_gamma: bool = ..., memory_efficient: bool = ..., return_input: Literal[True], out: None = ...,
    backend: str | None = ...,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def rms_norm(
    x: Tensor, weight: Tensor | None = ..., eps: float = ..., *, residual: Tensor,
    zero_centered_gamma: bool = ..., memory_efficient: bool = ..., return_input: bool = ..., out: None = ...,
    backend: str | None = ...,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def rms_norm(
    x: Tensor, weight: Tensor | None = ..., eps: float = ..., *, residual: None = ...,
    zero_centered_gamma: bool = ..., memory_efficient: bool = ..., return_input: Literal[False] = ..., out: FP8Target | str,
    backend: str | None = ...,
) -> FP8Tensor: ...  # fmt: skip
@overload
def rms_norm(
    x: Tensor, weight: Tensor | None = ..., eps: float = ..., *, residual: Tensor,
    zero_centered_gamma: bool = ..., memory_efficient: bool = ..., return_input: bool = ..., out: FP8Target | str,
    backend: str | None = ...,
) -> tuple[FP8Tensor, Tensor]: ...  # fmt: skip
def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    residual: Tensor | None = None,
    zero_centered_gamma: bool = False,
    memory_efficient: bool = False,
    return_input: bool = False,
    out: FP8Output = None,
    post_residual: Tensor | None = None,
    backend: str | None = None,
) -> Any:
    """RMSNorm over the last dimension, after adding a residual if there is one; one kernel forward, one backward.

    Args:
        x: ``[..., H]``, H from 1 to 262144 on a GPU.
        weight: ``[H]``, of any floating-point type, or None.
        eps: added to the mean of the squares; above 0.
        residual: of x's shape: added to x before.
        zero_centered_gamma: weight is kept as its distance from 1; the sum is fp32.
        memory_efficient: keep no statistics for backward, which computes them again (rows of over 4096 or so are read once more
            for it); the gradients are the same.
        return_input: return h without a residual too. It is x itself, and what uses it in the place of x has its gradient added
            by the norm's backward, not by autograd in another pass.
        out: ``fp8`` or an `onepass.FP8Target` returns y as codes of eight bits, made of the fp32 y in the same pass. Codes
            can't be differentiated: no input may require grad, but under `torch.no_grad`.
        post_residual: of x's shape: added to the norm's result, as blocks do whose norms come last (OLMo 2, Gemma 2). It goes
            with none of residual, return_input and out.
        backend: ``auto``, ``triton``, ``torch`` or a registered name; None leaves it to `use_backend` and ONEPASS_BACKEND.

    Returns:
        y, of x's shape and type, rounded once, with post_residual in it; with a residual (y, h), where h is x + residual,
        rounded to x's type, and y the norm of that h.
        With `return_input` (y, h) always, where h without a residual is x.
        With `out` y is an `onepass.FP8Tensor`: ``codes`` of x's shape, and ``inverse`` of their scale, fp32 ``[..., 1]`` where
        each row has its own.
    """
    given = {
        "x": x, "weight": weight, "eps": eps, "residual": residual, "zero_centered_gamma": zero_centered_gamma,
        "memory_efficient": memory_efficient, "return_input": return_input, "out": out,
        "post_residual": post_residual,
    }  # fmt: skip
    if has_dtensor(x, weight):
        return run_on_shards("rms_norm", **given, backend=backend)
    return _norm("rms_norm", given, None, _check(given), backend)


@overload
def layer_norm(
    x: Tensor, weight: Tensor | None = ..., bias: Tensor | None = ..., eps: float = ..., *, residual: None = ...,
    zero_centered_gamma: bool = ..., memory_efficient: bool = ..., return_input: Literal[False] = ..., out: None = ...,
    backend: str | None = ...,
) -> Tensor: ...  # fmt: skip
@overload
def layer_norm(
    x: Tensor, weight: Tensor | None = ..., bias: Tensor | None = ..., eps: float = ..., *, residual: Tensor | None = ...,
    zero_centered_gamma: bool = ..., memory_efficient: bool = ..., return_input: Literal[True], out: None = ...,
    backend: str | None = ...,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def layer_norm(
    x: Tensor, weight: Tensor | None = ..., bias: Tensor | None = ..., eps: float = ..., *, residual: Tensor,
    zero_centered_gamma: bool = ..., memory_efficient: bool = ..., return_input: bool = ..., out: None = ...,
    backend: str | None = ...,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def layer_norm(
    x: Tensor, weight: Tensor | None = ..., bias: Tensor | None = ..., eps: float = ..., *, residual: None = ...,
    zero_centered_gamma: bool = ..., memory_efficient: bool = ..., return_input: Literal[False] = ..., out: FP8Target | str,
    backend: str | None = ...,
) -> FP8Tensor: ...  # fmt: skip
@overload
def layer_norm(
    x: Tensor, weight: Tensor | None = ..., bias: Tensor | None = ..., eps: float = ..., *, residual: Tensor,
    zero_centered_gamma: bool = ..., memory_efficient: bool = ..., return_input: bool = ..., out: FP8Target | str,
    backend: str | None = ...,
) -> tuple[FP8Tensor, Tensor]: ...  # fmt: skip
def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    residual: Tensor | None = None,
    zero_centered_gamma: bool = False,
    memory_efficient: bool = False,
    return_input: bool = False,
    out: FP8Output = None,
    backend: str | None = None,
) -> Any:
    """LayerNorm over the last dimension, after adding a residual if there is one; one kernel forward, one backward.

    Args:
        x: ``[..., H]``, H from 1 to 262144 on a GPU.
        weight, bias: ``[H]``, of any floating-point type, or None.
        eps: added to the variance; above 0.
        residual: of x's shape: added to x before.
        zero_centered_gamma: weight is kept as its distance from 1; the sum is fp32.
        memory_efficient: keep no statistics for backward, which computes them again (rows of over 4096 or so are read once more
            for it); the gradients are the same.
        return_input: return h without a residual too. It is x itself, and what uses it in the place of x has its gradient added
            by the norm's backward, not by autograd in another pass.
        out: ``fp8`` or an `onepass.FP8Target` returns y as codes of eight bits, made of the fp32 y in the same pass. Codes
            can't be differentiated: no input may require grad, but under `torch.no_grad`.
        backend: ``auto``, ``triton``, ``torch`` or a registered name; None leaves it to `use_backend` and ONEPASS_BACKEND.

    Returns:
        y, of x's shape and type; with a residual (y, h), where h is x + residual, rounded to x's type, and y the norm of that h.
        With `return_input` (y, h) always, where h without a residual is x.
        With `out` y is an `onepass.FP8Tensor`: ``codes`` of x's shape, and ``inverse`` of their scale, fp32 ``[..., 1]`` where
        each row has its own.
    """
    given = {
        "x": x, "weight": weight, "bias": bias, "eps": eps, "residual": residual, "zero_centered_gamma": zero_centered_gamma,
        "memory_efficient": memory_efficient, "return_input": return_input, "out": out,
    }  # fmt: skip
    if has_dtensor(x, weight):
        return run_on_shards("layer_norm", **given, backend=backend)
    return _norm("layer_norm", given, bias, _check(given, bias), backend)


def _variant(call: Call, layer: bool) -> str:
    """Describe the kernels of a call and their tiles."""
    target = output_target(call.out, call.x)
    if target is not None:
        return fp8.output_variant(call.x, call.residual, layer, target)
    post = not layer and call.post_residual is not None
    bias = call.bias if layer else None
    return kernels.norm_variant(call.x, call.residual, call.weight, bias, layer, call.memory_efficient, post=post)


define_op(
    rms_norm,
    check=lambda call: _check(vars(call)),
    unsupported=lambda call: kernels.norm_unsupported(call.x),
    variant=lambda call: _variant(call, False),
    sharding=shard_norm,
    formula=describe_output_formula,
)
define_op(
    layer_norm,
    check=lambda call: _check(vars(call), call.bias),
    unsupported=lambda call: kernels.norm_unsupported(call.x),
    variant=lambda call: _variant(call, True),
    sharding=shard_norm,
    formula=describe_output_formula,
)
