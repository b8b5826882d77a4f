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

from onepass.bench.model import BenchCase, Call, Contender, Inputs, OpBench, Result
from onepass.bench.peers import compiled, imported, liger_cute, needs_cute
from onepass.ops.softmax.softmax import softmax
from onepass.runtime.backend import explain

OP = "softmax"
SCALE = 0.125
_VARIANTS = ("plain", "causal", "mask")
_SHAPES = [(32, 32, 2048, 2048), (16, 32, 1024, 1024), (64, 16, 512, 512), (4, 12, 1000, 1000), (1, 4, 16384, 16384)]
_CPU = [(1, 4, 1024, 1024), (4, 4, 250, 250)]


def _case(variant: str, shape: tuple[int, ...], dtype: torch.dtype) -> BenchCase:
    sequences, heads, rows, columns = shape
    scores = sequences * heads * rows * columns
    read = sequences * heads * sum(min(row + 1, columns) for row in range(rows)) if variant == "causal" else scores
    mask = sequences * rows * columns if variant == "mask" else 0
    return BenchCase(OP, variant, shape, dtype, (read + scores) * dtype.itemsize + mask, (2 * read + scores) * dtype.itemsize)


def _cases(device: torch.device, dtype: torch.dtype, quick: bool) -> list[BenchCase]:
    gpu, cpu = (_SHAPES[1:2], _CPU[1:]) if quick else (_SHAPES, _CPU)
    shapes = gpu if device.type == "cuda" else cpu
    return [_case(variant, shape, dtype) for variant in _VARIANTS for shape in shapes]


def _tiny(case: BenchCase) -> BenchCase:
    return _case(case.variant, (1, 4, 64, 64), case.dtype)


def _inputs(case: BenchCase, device: torch.device, generator: torch.Generator) -> Inputs:
    sequences, _, rows, columns = case.shape

    def random() -> Tensor:
        return torch.randn(*case.shape, generator=generator, device=device, dtype=case.dtype)

    tensors = {"x": random().mul_(8).requires_grad_()}
    if case.variant == "mask":
        tensors["mask"] = torch.rand(sequences, 1, rows, columns, generator=generator, device=device) < 0.25
    return Inputs(tensors, frozenset(tensors), {"y": random()})


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


# ---- onepass and eager code ----


def _ours(case: BenchCase) -> Call:
    def ours(x: Tensor, mask: Tensor | None = None) -> Result:
        return softmax(x, scale=SCALE, mask=mask, causal=case.variant == "causal")

    return ours


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


def _eager(case: BenchCase) -> Call:
    return _with_causal_mask(case, _written)


def _compiled(case: BenchCase) -> Call:
    return _with_causal_mask(case, compiled(_written))


# ---- peers that neither scale nor mask ----


def _prepared(case: BenchCase, function: Callable[[Tensor], Tensor]) -> Call:
    """Return a function that scales and masks before the peer's softmax of rows."""

    def call(x: Tensor, mask: Tensor | None) -> Tensor:
        z = x * SCALE
        if mask is not None:
            z = z.masked_fill(mask, -math.inf)
        return function(z.flatten(0, -2)).view_as(x)

    return _with_causal_mask(case, call)


def _liger(case: BenchCase) -> Call:
    return _prepared(case, imported("liger_kernel.ops.softmax", "LigerSoftmaxFunction").apply)


def _liger_cute(case: BenchCase) -> Call:
    return _prepared(case, liger_cute("softmax"))


def _quack(case: BenchCase) -> Call:
    return _prepared(case, imported("quack", "softmax"))


def _contenders(case: BenchCase) -> list[Contender]:
    # beside the others' graphs, if one of eager's fp32 tensors takes 16 GiB
    lacks = "its tensors don't fit beside the others'" if math.prod(case.shape) >= 1 << 32 else None
    return [
        Contender("onepass", _ours, ours=True),
        Contender("eager", _eager, lacks=lacks),
        Contender("torch.compile", _compiled, compiles=True),
        Contender("Liger", _liger, package="Liger", lacks=lacks),
        Contender("Liger CuTe", _liger_cute, package="Liger", lacks=lacks or needs_cute()),
        Contender("QuACK", _quack, package="QuACK", lacks=lacks),
    ]


def _backend(case: BenchCase, inputs: Inputs) -> str:
    given = dict(inputs.tensors)
    return explain(OP, given["x"], scale=SCALE, mask=given.get("mask"), causal=case.variant == "causal").backend


_EXTENSION = "has scaled softmaxes as a CUDA extension, which is not built here"
BENCH = OpBench(
    OP, _cases, _inputs, _contenders, _formula, _tiny, _backend,
    without={
        "Apex": _EXTENSION, "Megatron-core": "calls Apex's extension", "Transformer Engine": _EXTENSION,
    },
)  # fmt: skip
