"""softmax over the last dimension of scale * x, where a mask and causality leave scores out.

Formula  z = scale * x, y = exp(z - max z) / sum exp(z - max z) over the scores of a row that are left in, and 0 at the others. A
         row with nothing left in is 0. fp32 all the way, y rounded once, where it is stored.
         dx = scale * y * (dy - sum(y * dy)), and 0 where y is 0. y here is the one that was stored.
Shapes   x and y [..., R, C], mask broadcast to x's shape. M rows in all, C up to 16384 by the kernels.
Saves    y, which what comes after it saves as well: no mask, as y is 0 there.
Bytes    forward reads x and the mask and writes y; backward reads y and dy and writes dx. Of causal rows only what lies left of
         the diagonal is read; zeros are written right of it.
Kernels  ops/softmax/kernels.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from onepass.kernels.language import kernels_unsupported
from onepass.ops.softmax.kernels import WIDEST, SoftmaxOptions, mask_layout, softmax_backward, softmax_forward, softmax_tiles
from onepass.runtime.backend import NATIVE, choose, run_other
from onepass.runtime.checks import check_device, check_floating, check_number
from onepass.runtime.dispatch import cast, fast_apply, needs_grad, not_twice_differentiable, under_functorch
from onepass.runtime.formula import run_formula
from onepass.runtime.op import Registered, define_op
from onepass.runtime.sharding import WHOLE, Layout, Split, has_dtensor, leading_split, run_on_shards, split_output


def softmax_reference(x: Tensor, mask: Tensor | None = None, *, scale: float = 1.0, causal: bool = False) -> Tensor:
    """The formula, for every type."""
    return _formula(x, mask, _row_numbers(x) if causal else None, scale=scale)


def _formula(x: Tensor, mask: Tensor | None, rows: Tensor | None, *, scale: float) -> Tensor:
    """`rows`: the number of each row in its matrix, where the softmax is causal."""
    z = x.to(_wide_type(x)) * scale
    if rows is not None:
        later = torch.arange(x.shape[-1], device=x.device) > rows[..., None]
        mask = later if mask is None else mask | later
    if mask is None:
        return cast(z.softmax(-1), x.dtype)
    return cast(z.masked_fill(mask, -math.inf).softmax(-1).masked_fill(mask, 0.0), x.dtype)


def _gradient_formula(dy: Tensor, y: Tensor, *, scale: float) -> Tensor:
    wide = _wide_type(y)
    p, g = y.to(wide), dy.to(wide)
    total = torch.where(p == 0, 0.0, p * g).sum(-1, keepdim=True)
    return cast(torch.where(p == 0, 0.0, p * (g - total)) * scale, y.dtype)


def _wide_type(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _row_numbers(x: Tensor) -> Tensor:
    return torch.arange(x.shape[-2], device=x.device).expand(x.shape[:-1])


# ---- registered ops ----


def _forward_fake(x: Tensor, mask: Tensor | None, options: SoftmaxOptions) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _backward_fake(dy: Tensor, y: Tensor, options: SoftmaxOptions) -> Tensor:
    return torch.empty_like(y, memory_format=torch.contiguous_format)


_forward = Registered(
    "softmax(Tensor x, Tensor? mask, SoftmaxOptions options) -> Tensor", softmax_forward, _forward_fake, SoftmaxOptions
)
_backward = Registered(
    "softmax_backward(Tensor dy, Tensor y, SoftmaxOptions options) -> Tensor", softmax_backward, _backward_fake, SoftmaxOptions
)


# ---- autograd ----


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor | None, options: SoftmaxOptions) -> Tensor:
        y: Tensor = _forward(x, mask, options)
        ctx.options = options
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @not_twice_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (y,) = ctx.saved_tensors
        return _backward(dy, y, ctx.options), None, None


class _SoftmaxFormula(torch.autograd.Function):
    """By PyTorch, keeping as little. It can be differentiated as often as one likes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor | None, options: SoftmaxOptions) -> Tensor:
        y = _forward_by_formula(x, mask, options)
        ctx.scale = options.scale
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (y,) = ctx.saved_tensors
        return run_formula(partial(_gradient_formula, scale=ctx.scale), "input", dy, per_row=(y,)), None, None


def _forward_by_formula(x: Tensor, mask: Tensor | None, options: SoftmaxOptions) -> Tensor:
    per_row = None if mask is None else mask.expand(x.shape), _row_numbers(x) if options.causal else None
    y: Tensor = run_formula(partial(_formula, scale=options.scale), "input", x, per_row=per_row)
    return y


_apply = fast_apply(_Softmax)


# ---- the public face: say what is wrong, choose who does it, return ----


def unsupported(x: Tensor, **options: Any) -> str | None:
    """Why the kernels can't take this call, or None."""
    if x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"x is {x.dtype}"
    if x.shape[-1] > WIDEST:
        return f"a row of x has {x.shape[-1]} columns, and the kernels hold {WIDEST}"
    return kernels_unsupported("x", x)


def variant(x: Tensor, *, mask: Tensor | None = None, causal: bool = False, **options: Any) -> str:
    """Which kernels a call runs, and their tiles."""
    if not x.numel():
        return "the PyTorch formula, as there is nothing to do"
    tiles = softmax_tiles(x.shape[-1])
    rows = "one row" if tiles.block_m == 1 else f"{tiles.block_m} rows"
    description = f"forward and backward with {rows} a program, in registers of {tiles.num_warps} warps; keeps y"
    if causal:
        description += "; columns right of the diagonal are not read"
    if mask is not None:
        copied = mask_layout(mask.shape, mask.stride(), x.shape) is None
        description += "; the mask is copied, as it lies" if copied else "; the mask is read where it lies"
    return description


def _check(given: Mapping[str, Any]) -> None:
    x, scale, mask, causal = given["x"], given["scale"], given["mask"], given["causal"]
    check_floating("x", x)
    if x.dim() == 0:
        raise ValueError("x must have at least one dimension, but is a scalar")
    if type(scale) is not float:
        check_number("scale", scale)
    if not -math.inf < scale < math.inf:  # isfinite would break a compiled graph
        raise ValueError(f"scale must be finite, but is {scale!r}")
    if causal and x.dim() < 2:
        raise ValueError(f"x must have at least two dimensions, rows and columns, to be causal, but has shape {tuple(x.shape)}")
    if mask is not None:
        _check_mask(mask, x)


def _check_mask(mask: Tensor, x: Tensor) -> None:
    if not isinstance(mask, Tensor) or mask.dtype is not torch.bool:
        kind = f"one of {mask.dtype}" if isinstance(mask, Tensor) else f"a {type(mask).__name__}"
        raise TypeError(f"mask must be a tensor of torch.bool, True where a score is left out, or None, but is {kind}")
    fits = mask.dim() <= x.dim()
    for size, of_x in zip(reversed(mask.shape), reversed(x.shape)):  # noqa: B905  (PyTorch 2.9's compiler takes strict=False for True)
        fits = fits and size in (1, of_x)
    if not fits:
        raise ValueError(f"mask must be broadcastable to x's shape {tuple(x.shape)}, but has shape {tuple(mask.shape)}")
    check_device("mask", mask, x)


def shard_softmax(given: dict[str, Any], at: Mapping[str, Split], ranks: int) -> Layout:
    """Rows are divided, and a mask with them where it has them. A causal call knows its rows by their place in a whole matrix."""
    x, mask = given["x"], given["mask"]
    rows = leading_split(at["x"], x, last=2 if given["causal"] else 1)
    masked: Split = WHOLE
    if rows != WHOLE and mask is not None:
        dim = int(rows) - (x.dim() - mask.dim())
        masked = dim if dim >= 0 and mask.shape[dim] > 1 else WHOLE
    return Layout({"x": rows, "mask": masked}, outputs=split_output(rows, x))


def softmax(
    x: Tensor,
    *,
    scale: float = 1.0,
    mask: Tensor | None = None,
    causal: bool = False,
    backend: str | None = None,
) -> Tensor:
    """Softmax over the last dimension of ``scale * x``, without the scores that are left out; one kernel forward, one backward.

    What is left out is 0 in y, and so is its gradient, whatever x holds there. A row with nothing left in is 0 all over.
    Otherwise NaN and infinities propagate as in ``torch.softmax``: a row that has NaN or +inf left in, or only -inf, is NaN.

    Args:
        x: ``[..., C]``, or ``[..., R, C]`` where it is causal; C up to 16384 on a GPU.
        scale: what scores are multiplied by, in fp32.
        mask: bool, True where a score is left out, broadcastable to x's shape; or None. It is read where it lies.
        causal: leave out column j of row i where j > i, of each of x's matrices.
        backend: ``auto``, ``triton``, ``torch`` or a registered name; None leaves it to `use_backend` and ONEPASS_BACKEND.

    Returns:
        y, of x's shape and type, also under autocast. Arithmetic is in fp32, and y is rounded once. Only y is kept for backward.
        Writing to y in place makes backward raise.
    """
    given = {"x": x, "scale": scale, "mask": mask, "causal": causal}
    if has_dtensor(x):
        return run_on_shards("softmax", **given, backend=backend)  # type: ignore[no-any-return]
    _check(given)
    chosen = choose("softmax", backend, unsupported(x))
    if chosen not in NATIVE:
        return run_other("softmax", chosen, **given)  # type: ignore[no-any-return]
    options = SoftmaxOptions(float(scale), bool(causal))
    if chosen == "torch" or x.numel() == 0:
        plain = torch.compiler.is_compiling() or under_functorch() or not needs_grad(x)
        by_formula: Any = _forward_by_formula if plain else _SoftmaxFormula.apply
        return by_formula(x, mask, options)  # type: ignore[no-any-return]
    if not needs_grad(x):
        return _forward(x, mask, options)  # type: ignore[no-any-return]
    return _apply(x, mask, options)  # type: ignore[no-any-return]


define_op(
    softmax,
    check=lambda call: _check(vars(call)),
    unsupported=lambda call: unsupported(**vars(call)),
    variant=lambda call: variant(**vars(call)),
    sharding=shard_softmax,
    formula=lambda call: "the PyTorch formula, y saved and nothing else",
)
