"""Both norms' kernels as registered ops, and what can be said of a call before it runs."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from onepass.gradients.vectors import KernelTargets, VectorGrads
from onepass.kernels.language import triton_unsupported
from onepass.kernels.layout import groups_of
from onepass.ops.norm.backward import ALWAYS_HELD, norm_backward, reads_twice, runs_once, tiles_for, too_few_processors
from onepass.ops.norm.few_rows import are_few, few_rows_tiles
from onepass.ops.norm.formula import NormOptions
from onepass.ops.norm.forward import SHORT, forward_tiles, norm_forward
from onepass.runtime.dispatch import under_functorch
from onepass.runtime.op import Registered
from onepass.runtime.sizes import ceil_div

WIDEST = 262144
TYPES = (torch.bfloat16, torch.float32, torch.float16)


def _forward_fake(
    x: Tensor, residual: Tensor | None, weight: Any, bias: Any, post: Any, options: NormOptions, keep: bool
) -> tuple[Tensor | None, ...]:
    rows = x.numel() // x.shape[-1]
    return (
        x.new_empty(x.shape),
        None if residual is None else x.new_empty(x.shape),
        x.new_empty(rows * (1 + options.layer), dtype=torch.float32) if keep else None,
    )


def _backward_fake(
    dy: Tensor, dh: Any, x: Tensor, weight: Any, bias: Any, stats: Any, options: NormOptions, *needs: Any
) -> tuple[Tensor | None, ...]:
    need_dx, need_dweight, need_dbias, dx_type, rebuild = needs
    return (
        dy.new_empty(x.shape, dtype=dx_type) if need_dx else None,
        weight.new_empty(weight.shape) if need_dweight else None,
        bias.new_empty(bias.shape) if need_dbias else None,
        x.new_empty(x.shape) if rebuild else None,
    )


forward = Registered(
    "norm(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, Tensor? post, NormOptions options, bool keep) "
    "-> (Tensor, Tensor?, Tensor?)",
    norm_forward,
    _forward_fake,
    NormOptions,
)
backward = Registered(
    "norm_backward(Tensor dy, Tensor? dh, Tensor x, Tensor? weight, Tensor? bias, Tensor? stats, NormOptions options, "
    "bool need_dx, bool need_dweight, bool need_dbias, ScalarType dx_type, bool rebuild) -> (Tensor?, Tensor?, Tensor?, Tensor?)",
    norm_backward,
    _backward_fake,
    NormOptions,
    dispatched=partial(norm_backward, keep_scratch=False),
)


def backward_into(
    grads: VectorGrads | None, dy: Tensor, dh: Tensor | None, x: Tensor, weight: Tensor | None, bias: Tensor | None,
    *rest: Any, into_dy: bool = False,
) -> tuple[KernelTargets | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """`backward`, with dweight and dbias added to main_grads where `grads` can: to those that come first."""
    if grads is None:
        return None, *backward(dy, dh, x, weight, bias, *rest, into_dy=into_dy)
    into = grads.into(dy, dh, x, weight, bias)
    if into is None:
        weight, bias = grads.wide(weight, bias)
    return into, *backward(dy, dh, x, weight, bias, *rest, into_dy=into_dy, into=None if into is None else into.tensors)


# ---- what can be said of a call ----


def norm_unsupported(x: Tensor) -> str | None:
    """Why the kernels can't take this call, or None."""
    if x.dtype not in TYPES:
        return f"x is {x.dtype}"
    H = x.shape[-1]
    if H > WIDEST:
        return f"rows of {H} are longer than {WIDEST}"
    if under_functorch():
        return "vmap, a functional derivative or forward-mode differentiation is in force"
    reason = triton_unsupported(x)
    return too_few_processors(x) if reason is None and H > ALWAYS_HELD and x.is_cuda else reason


def norm_variant(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    layer: bool,
    memory_efficient: bool,
    rebuilds: bool = False,
    post: bool = False,
) -> str:
    """Which kernels a call runs, and their tiles. `rebuilds`: backward builds y again; `post`: a residual is added to y."""
    H = x.shape[-1]
    if not x.numel():
        return "the PyTorch formula, as there is nothing to do"
    ahead = forward_tiles(H, layer, x.dtype is torch.float32, residual is not None or post)
    back = tiles_for(x, residual, weight, bias if rebuilds else None, layer)
    if ahead.short:
        description = f"forward with {ahead.block_m} rows a program, in registers"
    else:
        description = f"forward with one row a program, in pieces of {ahead.block_h}, read again from the caches"
        description += f" but for {ahead.held} held in registers" if ahead.held else ""
    sums = any(vector is not None and vector.requires_grad for vector in (weight, bias))
    lies = groups_of(x, H <= SHORT)
    if are_few(x.numel() // H, H) and not memory_efficient and (lies is None or not lies[2]):
        description += "; backward with a program a row"
        description += f", beside {ceil_div(H, few_rows_tiles(H).block_h)} that sum the weight's gradient" if sums else ""
        return f"{description}; keeps {'x' if residual is None else 'h'} and its rows' statistics"
    if back.shared:
        description += f"; backward with {back.pieces} programs a row, tiles of {back.block_h} columns"
    else:
        description += f"; backward with {back.block_m} rows at a time a program, in registers"
        description += f", chunks of {back.block_h} columns" if back.pieces > 1 else ""
    if not sums and runs_once(back, layer, residual is not None):
        description += ", as many programs as that takes"
    else:
        description += f", {back.resident} programs a multiprocessor, the next {back.stages - 1} turns' rows on their way"
    kept = "x" if residual is None else "h"
    if not memory_efficient:
        return f"{description}; keeps {kept} and its rows' statistics"
    again = ", which backward reads once more for its statistics" if reads_twice(back) else ""
    return f"{description}; keeps {kept} only{again}"
