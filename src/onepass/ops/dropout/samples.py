"""Sample calls of dropout_add."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from onepass.kernels.philox import draw_seed, row_numbers, threshold_of
from onepass.ops.dropout import kernels
from onepass.ops.dropout.dropout_add import dropout_add, dropout_add_reference
from onepass.ops.dropout.formula import DropoutOptions
from onepass.runtime.random_calls import Draw, RandomCall, RandomTensor
from onepass.runtime.samples import (
    LARGE,
    NARROW,
    SEED,
    SHAPES,
    THRESHOLD,
    CoveringCall,
    Sample,
    give_main_grad,
    meta,
    random_tensors,
)


def _formula(x: Tensor, residual: Tensor, bias: Tensor | None = None, *, p: float) -> Tensor:
    """Nothing is dropped, or everything: no other call can be repeated."""
    return dropout_add_reference(x * (1 - p), None if bias is None else bias * (1 - p), residual)


_SHAPES = (37, 203), (37, 203), (203,)
SAMPLES = {
    "dropout_add": Sample(partial(random_tensors, _SHAPES[:2]), _formula, {"p": 0.0}),
    "dropout_add: bias": Sample(partial(random_tensors, _SHAPES), _formula, {"p": 0.0}, keywords=("bias",)),
    "dropout_add: everything dropped": Sample(partial(random_tensors, _SHAPES), _formula, {"p": 1.0}, keywords=("bias",)),
}


SHAPES_OF: dict[str, dict[str, Any]] = {}


# ---- random calls ----


def _random_dropout_add(draw: Draw) -> RandomCall:
    dtype, width, lead = draw.dtype(), draw.width(), draw.lead()
    tensors = {"x": RandomTensor((*lead, width), dtype), "residual": RandomTensor((*lead, width), draw.beside(dtype))}
    if draw.flag():
        tensors["bias"] = RandomTensor((width,), draw.beside(dtype), parameter=True)
    p, training = draw.dropout(), draw.flag(0.8)
    threshold = threshold_of("p", p) if training else 0

    def formula(x: Tensor, residual: Tensor, bias: Tensor | None = None) -> Tensor:
        seed = draw_seed(x) if threshold else 0
        return dropout_add_reference(x, bias, residual, row_numbers(x), seed=seed, threshold=threshold)

    return RandomCall(tensors, {"p": p, "training": training}, formula)


RANDOM_CALLS = {"dropout_add": _random_dropout_add}

# ---- calls that launch every kernel, in every form that is shipped ----


def covering_calls() -> Iterator[CoveringCall]:
    yield from _dropout_add_calls()


def _dropout_add_calls() -> Iterator[CoveringCall]:
    """All shapes with the seed as a number; at one shape, all types and options, and the seed in memory, as graphs have it."""
    for shape in (*SHAPES, *NARROW, LARGE):
        yield _dropout_add_call(shape)
    for dtype in (torch.float16, torch.float32):
        yield _dropout_add_call(LARGE, dtype)
        yield _dropout_add_call(LARGE, dtype, "seed in memory")
    for option in ("seed in memory", "no bias", "nothing dropped", "fp32 residual", "main_grad", "some rows", "frozen x"):
        yield _dropout_add_call(LARGE, option=option)


def _dropout_add_call(shape: tuple[int, int], dtype: torch.dtype = torch.bfloat16, option: str = "") -> CoveringCall:
    def run() -> Tensor:
        x, bias = meta(*shape, dtype=dtype, requires_grad=option != "frozen x"), meta(shape[1], dtype=dtype)
        residual = meta(*shape, dtype=torch.float32 if option == "fp32 residual" else dtype)
        if option == "main_grad":
            give_main_grad(bias)
        if option in ("seed in memory", "nothing dropped", "main_grad", "frozen x"):
            y: Tensor = dropout_add(x, residual, 0.0 if option == "nothing dropped" else 0.1, bias=bias, backend="triton")
            return y
        first = torch.empty(1, dtype=torch.int64, device="meta") if option == "some rows" else None
        added = None if option == "no bias" else bias
        options = DropoutOptions(THRESHOLD, SEED)
        y = kernels.dropout_add_forward(x, residual, added, None, first, options)
        kernels.dropout_add_backward(y, None, first, options, dtype, None if added is None else dtype)
        return x

    return CoveringCall(" ".join(filter(None, ("dropout_add", f"{shape[0]}x{shape[1]}", option))), dtype, run)
