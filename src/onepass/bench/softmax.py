"""softmax against its peers: attention scores, scaled, causal or with a mask that all heads of a sequence share.

Bytes     forward reads the scores and the mask, and writes y; backward reads y and dy and writes dx. Causal scores right of the
          diagonal need not be read; zeros are written there.
Shapes    sequences x heads x rows x columns.
Peers     eager and torch.compile: the scores in fp32, scaled, masked, and rounded after the softmax, as models write it. A causal
          mask is made once and not timed.
          Liger, in Triton and in the CuTe DSL, and QuACK neither scale nor mask: eager code does that before.
Errors    onepass saves the rounded y that it returns, and so does its baseline; eager code saves y in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from onepass.bench.define import OpBench, Random, Shape, Shapes, by_pytorch, of_each
from onepass.bench.model import BenchCase, Call, Contender, Inputs, Result
from onepass.bench.peers import imported, liger_rows

SCALE = 0.125
_VARIANTS = ("plain", "causal", "mask")
_GPU = [(32, 32, 2048, 2048), (16, 32, 1024, 1024), (64, 16, 512, 512), (4, 12, 1000, 1000), (1, 4, 16384, 16384)]
_CPU = [(1, 4, 1024, 1024), (4, 4, 250, 250)]
_SHAPES = Shapes(*(of_each(_VARIANTS, shapes) for shapes in (_GPU, _CPU, _GPU[1:2], _CPU[1:])))


def _bytes_moved(variant: str, shape: Shape, size: int) -> tuple[int, int]:
    sequences, heads, rows, columns = shape
    scores = math.prod(shape)
    read = sequences * heads * sum(min(row + 1, columns) for row in range(rows)) if variant == "causal" else scores
    mask = sequences * rows * columns if variant == "mask" else 0
    return (read + scores) * size + mask, (2 * read + scores) * size


def _inputs(case: BenchCase, random: Random) -> Inputs:
    sequences, _, *scores = case.shape
    tensors = {"x": random(*case.shape).mul_(8).requires_grad_()}
    if case.variant == "mask":
        tensors["mask"] = random.integers(4, sequences, 1, *scores) == 0
    return Inputs(tensors, frozenset(tensors), {"y": random(*case.shape)})


class _StoredSoftmax(torch.autograd.Function):
    """Softmax whose backward uses y as it is stored, rounded to dtype. In fp64 it is exact."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, dtype: torch.dtype) -> Tensor:
        y = z.softmax(-1)
        ctx.save_for_backward(y if y.dtype == torch.float64 else y.to(dtype))
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        y = ctx.saved_tensors[0].to(dy.dtype)
        return y * (dy - (y * dy).sum(-1, keepdim=True)), None


def _later(x: Tensor) -> Tensor:
    """Return the causal mask: True right of the diagonal."""
    return torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).triu(1)


def _formula(case: BenchCase) -> Call:
    def formula(x: Tensor, mask: Tensor | None = None) -> Result:
        mask = _later(x) if case.variant == "causal" else mask
        z = x * SCALE if mask is None else (x * SCALE).masked_fill(mask, -math.inf)
        y: Tensor = _StoredSoftmax.apply(z, case.dtype)  # type: ignore[no-untyped-call]
        return y

    return formula


def _written(x: Tensor, mask: Tensor | None) -> Tensor:
    z = x.float() * SCALE
    if mask is not None:
        z = z.masked_fill(mask, -math.inf)
    return torch.softmax(z, -1).to(x.dtype)


def _with_causal_mask(case: BenchCase, function: Any) -> Call:
    made: list[Tensor] = []

    def call(x: Tensor, mask: Tensor | None = None) -> Result:
        if case.variant == "causal":
            if not made or made[0].shape != x.shape[-2:]:
                made[:] = [_later(x)]
            mask = made[0]
        result: Tensor = function(x, mask)
        return result

    return call


# ---- peers that neither scale nor mask ----


def _prepared(case: BenchCase, function: Callable[[Tensor], Tensor]) -> Call:
    """Return a function that scales and masks before the peer's softmax of rows."""

    def call(x: Tensor, mask: Tensor | None) -> Tensor:
        z = x * SCALE
        if mask is not None:
            z = z.masked_fill(mask, -math.inf)
        return function(z.flatten(0, -2)).view_as(x)

    return _with_causal_mask(case, call)


def _peers(case: BenchCase) -> list[Contender]:
    # beside the others' graphs, if one of eager's fp32 tensors takes 16 GiB
    lacks = "its tensors don't fit beside the others'" if math.prod(case.shape) >= 1 << 32 else None
    liger = liger_rows(_prepared, "liger_kernel.ops.softmax", "LigerSoftmaxFunction", "softmax", lacks)
    quack = Contender("QuACK", lambda case: _prepared(case, imported("quack", "softmax")), package="QuACK", lacks=lacks)
    return [*by_pytorch(lambda case, run: _with_causal_mask(case, run(_written)), lacks=lacks), *liger, quack]


_EXTENSION = "has scaled softmaxes as a CUDA extension, which is not built here"
BENCH = OpBench(
    "softmax", _SHAPES, (1, 4, 64, 64), _bytes_moved, _inputs, _peers,
    options=lambda case: {"scale": SCALE, "causal": case.variant == "causal"},
    keywords=lambda case: ("mask",) if case.variant == "mask" else (),
    formula=_formula,
    without={
        "Apex": _EXTENSION, "Megatron-core": "calls Apex's extension", "Transformer Engine": _EXTENSION,
    },
)  # fmt: skip
