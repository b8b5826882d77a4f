"""A bias and an activation between eight-bit products: results go out as codes, and are never rounded to 16 bits.

Formula  ops/activation/formula.py's in fp32, without dropout, then runtime/fp8.py's `quantise`.
Shapes   x [..., W], bias [W], token_weight [...] or [..., 1], y and dy [..., H]; W is H, or 2H for a gated activation. M rows.
         A transposed copy is [W or H, M up to a multiple of 16], with zeros after the last row: the product that makes the
         weight's gradient sums over rows.
Bytes    of 16-bit x and dy, a number of y, gated: forward 4 + 1, or 8 + 1 where rows of more than 8192 have scales of their own;
         backward 4 + 2 read, and 2 + 2 + 1 written as dx, dx transposed and y transposed.
Kernels  ops/activation/fp8_kernels.py. Only `activation_output` is a registered op: other callers are opaque to a compiler.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from onepass.ops.activation import fp8_kernels
from onepass.ops.activation.activations import activation_of
from onepass.ops.activation.formula import ActivationOptions, activation_formula
from onepass.ops.activation.fp8_kernels import ActivationNeeds
from onepass.runtime import fp8
from onepass.runtime.fp8 import FP8Target, FP8Tensor
from onepass.runtime.op import Registered


class ActivationGradients(NamedTuple):
    """What the backward pass writes, each None where it is not asked for."""

    dx: Tensor | None  # codes, of x's shape
    dx_transposed: Tensor | None  # codes [W, M up to a multiple of 16]
    y_transposed: Tensor | None  # codes [H, M up to a multiple of 16]
    dbias: Tensor | None  # of bias's type
    dtoken_weight: Tensor | None  # of token_weight's type and shape


def activation_codes(
    x: Tensor, bias: Tensor | None, token_weight: Tensor | None, options: ActivationOptions, target: FP8Target,
    *, use_triton: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Return the codes of y [..., H]; where the target has no scale, also the inverses of the rows' scales, fp32 [M, 1].

    The target's amax and counts are raised where it has them and a scale.

    Args:
        options: without dropout.
        use_triton: run kernels, which take x of 32 or 16 bits. Else PyTorch computes the formula.
    """
    _check_options(options)
    if use_triton and x.numel():
        return fp8_kernels.forward_codes(x, _contiguous(bias), _contiguous(token_weight), options, target)
    with torch.no_grad():
        y = activation_formula(x, bias, token_weight, options).float().contiguous()
    return fp8.quantise_rows(y, target.dtype) if target.scale is None else (fp8.quantise_tensor(y, target), None)


_BOTH = ActivationNeeds()  # of dx's codes


def activation_backward_codes(
    dy: Tensor | None, x: Tensor, bias: Tensor | None, token_weight: Tensor | None, options: ActivationOptions,
    dx_target: FP8Target | None, y_target: FP8Target | None,
    needs: ActivationNeeds = _BOTH, *, use_triton: bool,
) -> ActivationGradients:  # fmt: skip
    """Return the gradients of x as codes, and y's codes transposed, in one pass over x and dy.

    The sums for bias and token_weight are of numbers in fp32 that were not rounded, in a fixed order.

    Args:
        dy: d y, of 16 or 32 bits. None where y_transposed is all that is asked for.
        dx_target: what dx is written for, with a scale; its amax and counts are raised. None leaves out dx and dx_transposed.
        y_target: what forward wrote y for, with a scale. It is not raised again. None leaves out y_transposed.
        needs: which of these to compute. The types of bias's and token_weight's gradients are their own.
        use_triton: as in `activation_codes`.
    """
    _check_options(options)
    for name, target in (("dx_target", dx_target), ("y_target", y_target)):
        if target is not None and target.scale is None:
            raise ValueError(f"{name} must have a scale, which all rows share once they are transposed, but has None")
    if dx_target is None or not (needs.dx or needs.dx_transposed):
        dx_target, needs = None, needs._replace(dx=False, dx_transposed=False)
    if dy is None and any(needs):
        raise ValueError("dy must be a tensor where a gradient is asked for, but is None")
    if use_triton and x.numel():
        given = x, _contiguous(bias), _contiguous(token_weight)
        return ActivationGradients(*fp8_kernels.backward_codes(dy, *given, options, dx_target, y_target, needs))
    return _backward_formula(dy, x, bias, token_weight, options, dx_target, y_target, needs)


def _backward_formula(
    dy: Tensor | None, x: Tensor, bias: Tensor | None, token_weight: Tensor | None, options: ActivationOptions,
    dx_target: FP8Target | None, y_target: FP8Target | None, needs: ActivationNeeds,
) -> ActivationGradients:  # fmt: skip
    """`activation_backward_codes` by PyTorch. Leaves are in fp32, so that autograd rounds nothing."""
    differentiated = dx_target is not None, needs.dbias, needs.dtoken_weight
    leaves: list[Any] = [
        t if t is None else t.detach().float().requires_grad_(need)
        for t, need in zip((x, bias, token_weight), differentiated, strict=True)
    ]
    with torch.enable_grad():
        y = activation_formula(leaves[0], leaves[1], leaves[2], options)
    asked = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
    grads = iter(torch.autograd.grad(y, asked, None if dy is None else dy.detach().float()) if asked else ())
    dx, dbias, dtoken_weight = (next(grads) if need else None for need in differentiated)
    plain = across = y_transposed = None
    if dx_target is not None and dx is not None:
        rounded = fp8.quantise_tensor(dx, dx_target)
        plain, across = rounded if needs.dx else None, fp8.transpose(rounded) if needs.dx_transposed else None
    if y_target is not None:
        y_transposed = fp8.transpose(fp8.quantise_tensor(y, y_target._replace(amax=None)))
    if bias is not None and dbias is not None:
        dbias = dbias.to(bias.dtype)
    if token_weight is not None and dtoken_weight is not None:
        dtoken_weight = dtoken_weight.to(token_weight.dtype)
    return ActivationGradients(plain, across, y_transposed, dbias, dtoken_weight)


def _check_options(options: ActivationOptions) -> None:
    if options.threshold:
        raise ValueError(f"options must be without dropout, but drop {options.threshold} of 65536")


def _contiguous(vector: Tensor | None) -> Tensor | None:
    return None if vector is None else vector.detach().contiguous()


# ---- `out=` of bias_activation: a registered op, which compilers see ----


def _output(
    x: Tensor, bias: Tensor | None, token_weight: Tensor | None,
    scale: Tensor | None, amax: Tensor | None, saturated: Tensor | None, underflowed: Tensor | None,
    options: ActivationOptions, dtype: torch.dtype, use_triton: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    target = FP8Target(dtype, scale, amax, saturated, underflowed)
    codes, inverse = activation_codes(x, bias, token_weight, options, target, use_triton=use_triton)
    if scale is not None:
        return codes, 1 / scale
    assert inverse is not None
    return codes, inverse.view(*codes.shape[:-1], 1)


def _output_fake(
    x: Tensor, bias: Tensor | None, token_weight: Tensor | None,
    scale: Tensor | None, amax: Tensor | None, saturated: Tensor | None, underflowed: Tensor | None,
    options: ActivationOptions, dtype: torch.dtype, use_triton: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    lead, width = x.shape[:-1], x.shape[-1] // activation_of(options.activation).parts
    inverse = x.new_empty((*lead, 1), dtype=torch.float32) if scale is None else torch.empty_like(scale)
    return x.new_empty((*lead, width), dtype=dtype), inverse


_output_op = Registered(
    "bias_activation_codes(Tensor x, Tensor? bias, Tensor? token_weight, Tensor? scale, Tensor(a!)? amax, "
    "Tensor(b!)? saturated, Tensor(c!)? underflowed, ActivationOptions options, ScalarType dtype, bool use_triton) -> "
    "(Tensor, Tensor)",
    _output,
    _output_fake,
    ActivationOptions,
)


def activation_output(
    x: Tensor, bias: Tensor | None, token_weight: Tensor | None, options: ActivationOptions, target: FP8Target, use_triton: bool
) -> FP8Tensor:
    """Return y as codes."""
    return FP8Tensor(*_output_op(x, bias, token_weight, *target[1:], options, target.dtype, use_triton))
