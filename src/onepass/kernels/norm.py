"""Both norms' kernels as their ops call them: directly, or where somebody watches as registered ops."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onepass.kernels.norm_backward import ALWAYS_HELD, norm_backward, reads_twice, tiles_for, too_few_processors
from onepass.kernels.norm_forward import forward_tiles, norm_forward
from onepass.runtime.dispatch import registered, transformed, watched
from onepass.runtime.lang import no_triton
from onepass.runtime.main_grad_vectors import Sums

WIDEST = 262144
_TYPES = (torch.bfloat16, torch.float32, torch.float16)

Maybe = Tensor | None


# ---- registered: opaque to the compiler, visible to checkpointing; they return tensors only, empty ones for what there is not


def registered_forward(
    x: Tensor, residual: Maybe, weight: Maybe, bias: Maybe, eps: float, layer: bool, centered: bool, keep: bool
) -> tuple[Tensor, Maybe, Maybe]:
    """`norm_forward`, as a registered op."""
    y, h, stats = _forward_op(x, residual, weight, bias, eps, layer, centered, keep)
    return y, h if residual is not None else None, stats if keep else None


def registered_backward(
    dy: Tensor, dh: Maybe, x: Tensor, weight: Maybe, bias: Maybe, stats: Maybe,
    eps: float, layer: bool, centered: bool, need_dx: bool, need_dweight: bool, need_dbias: bool, dx_type: torch.dtype,
    rebuild: bool = False, into_dy: bool = False,
) -> tuple[Maybe, Maybe, Maybe, Maybe]:  # fmt: skip
    """`norm_backward`, as a registered op: it writes nothing over dy."""
    needs = need_dx, need_dweight, need_dbias
    found = _backward_op(dy, dh, x, weight, bias, stats, eps, layer, centered, *needs, dx_type, rebuild)
    dx, dweight, dbias, y = (t if need else None for t, need in zip(found, (*needs, rebuild), strict=True))
    return dx, dweight, dbias, y


def run_backward(
    sums: Sums | None, dy: Tensor, dh: Maybe, x: Tensor, weight: Maybe, bias: Maybe, *rest: Any
) -> tuple[Maybe, Maybe, Maybe, Maybe]:
    """`norm_backward`, as a registered op where somebody watches; dweight and dbias go where `sums` says, if anywhere."""
    seen = watched(dy, dh, x, weight, bias)
    run = registered_backward if seen else norm_backward
    if sums is None:
        return run(dy, dh, x, weight, bias, *rest)
    into = None if seen else sums.into()
    if into is None:
        weight, bias = sums.wide(weight, bias)
        dx, dweight, dbias, y = run(dy, dh, x, weight, bias, *rest)
    else:
        dx, dweight, dbias, y = norm_backward(dy, dh, x, weight, bias, *rest, into=into)
    dweight, dbias = sums.settled(into, dweight, dbias)
    return dx, dweight, dbias, y


def _forward_all(x: Tensor, *args: Any) -> tuple[Tensor, ...]:
    return tuple(t if t is not None else x.new_empty(0) for t in norm_forward(x, *args))


def _backward_all(dy: Tensor, *args: Any) -> tuple[Tensor, ...]:
    found = norm_backward(dy, *args, keep_scratch=False)  # graphs want to own what they allocate
    return tuple(t if t is not None else dy.new_empty(0) for t in found)


def _forward_fake(
    x: Tensor, residual: Maybe, weight: Any, bias: Any, eps: float, layer: bool, centered: bool, keep: bool
) -> tuple[Tensor, ...]:
    rows = x.numel() // x.shape[-1]
    return (
        x.new_empty(x.shape),
        x.new_empty(0 if residual is None else x.shape),
        x.new_empty(rows * (1 + layer), dtype=torch.float32) if keep else x.new_empty(0),
    )


def _backward_fake(dy: Tensor, dh: Any, x: Tensor, weight: Any, bias: Any, *rest: Any) -> tuple[Tensor, ...]:
    need_dx, need_dweight, need_dbias, dx_type, rebuild = rest[-5:]
    return (
        dy.new_empty(x.shape, dtype=dx_type) if need_dx else dy.new_empty(0),
        weight.new_empty(weight.shape) if need_dweight else dy.new_empty(0),
        bias.new_empty(bias.shape) if need_dbias else dy.new_empty(0),
        x.new_empty(x.shape) if rebuild else dy.new_empty(0),
    )


_forward_op = registered(
    "norm(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, float eps, bool layer, bool centered, bool keep) "
    "-> (Tensor, Tensor, Tensor)",
    _forward_all,
    _forward_fake,
)
_backward_op = registered(
    "norm_backward(Tensor dy, Tensor? dh, Tensor x, Tensor? weight, Tensor? bias, Tensor? stats, float eps, "
    "bool layer, bool centered, bool need_dx, bool need_dweight, bool need_dbias, ScalarType dx_type, bool rebuild) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _backward_all,
    _backward_fake,
)


# ---- what can be said of a call ----


def norm_unsupported(x: Tensor) -> str | None:
    """Why the kernels can't take this call, or None."""
    if x.dtype not in _TYPES:
        return f"x is {x.dtype}"
    if x.shape[-1] > WIDEST:
        return f"rows of {x.shape[-1]} are longer than {WIDEST}"
    if transformed():
        return "vmap, a functional derivative or forward-mode differentiation is in force"
    reason = no_triton(x)
    return too_few_processors(x) if reason is None and x.shape[-1] > ALWAYS_HELD and x.is_cuda else reason


def norm_variant(
    x: Tensor, residual: Maybe, weight: Maybe, layer: bool, memory_efficient: bool, rebuilt_with: Maybe = None
) -> str:
    """Which kernels a call runs, and their tiles. `rebuilt_with`: y's bias, where backward builds y again."""
    H = x.shape[-1]
    if not x.numel():
        return "the PyTorch formula, as there is nothing to do"
    ahead = forward_tiles(H, layer, x.dtype is torch.float32, residual is not None)
    back = tiles_for(x, residual, weight, rebuilt_with, layer)
    if ahead.short:
        said = f"forward with {ahead.block_m} rows a program, in registers"
    else:
        said = f"forward with one row a program, in pieces of {ahead.block_h}, read again from the caches"
        said += f" but for {ahead.held} held in registers" if ahead.held else ""
    if back.shared:
        said += f"; backward with {back.pieces} programs a row, tiles of {back.block_h} columns"
    else:
        said += f"; backward with {back.block_m} rows at a time a program, in registers"
        said += f", chunks of {back.block_h} columns" if back.pieces > 1 else ""
    said += f", {back.resident} programs a multiprocessor, the next {back.stages - 1} turns' rows on their way"
    kept = "x" if residual is None else "h"
    if not memory_efficient:
        return f"{said}; keeps {kept} and its rows' statistics"
    return f"{said}; keeps {kept} only" + (", which backward reads once more for its statistics" if reads_twice(back) else "")
