"""softmax of attention's scores against its peers: scaled, with a mask of bytes, causal.

Bytes     forward reads x and writes y, and with a mask reads that too; backward reads y and dy and writes dx. Causal rows are
          counted whole, as copies are, though nobody needs to read what is left out.
Peers     eager and torch.compile: the lines people write, in fp32 and rounded once.
Errors    against the formula in fp64, a part of the batch at a time. Gradients are made of the y that is stored, as PyTorch's
          softmax of a narrow type makes them: that is the baseline, where a scale of 1/8 rounds nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from onepass.bench.model import BenchCase, Call, Contender, Inputs, OpBench, Result
from onepass.bench.peers import compiled
from onepass.ops.softmax.softmax import softmax, softmax_reference
from onepass.runtime.backend import explain

OP = "softmax"
SCALE = 0.125
_VARIANTS = ("plain", "causal", "mask")


def _case(variant: str, batch: int, heads: int, rows: int, columns: int, dtype: torch.dtype) -> BenchCase:
    one = batch * heads * rows * columns * dtype.itemsize
    mask = batch * rows * columns if variant == "mask" else 0
    return BenchCase(OP, variant, (batch, heads, rows, columns), dtype, 2 * one + mask, 3 * one)


def _cases(device: torch.device, dtype: torch.dtype, quick: bool) -> list[BenchCase]:
    if device.type == "cuda" and not quick:
        shapes = [(32, 32, 2048, 2048), (4, 32, 4096, 4096), (1, 4, 16384, 16384), (64, 16, 197, 197)]
    elif device.type == "cuda":
        shapes = [(8, 16, 1024, 1024)]
    else:
        shapes = [(2, 4, 256, 256)] if quick else [(4, 8, 512, 512), (4, 8, 197, 197)]
    return [_case(variant, *shape, dtype) for variant in _VARIANTS for shape in shapes]


def _tiny(case: BenchCase) -> BenchCase:
    return _case(case.variant, 2, 2, 32, 128, case.dtype)


def _inputs(case: BenchCase, device: torch.device, generator: torch.Generator) -> Inputs:
    batch, _, rows, columns = case.shape

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=case.dtype)

    tensors = {"x": random(*case.shape).mul_(8).requires_grad_()}
    if case.variant == "mask":
        tensors["mask"] = torch.rand(batch, 1, rows, columns, generator=generator, device=device) > 0.7
    return Inputs(tensors, frozenset(tensors), {"y": random(*case.shape)})


def _formula(case: BenchCase) -> Call:
    def formula(x: Tensor, mask: Tensor | None = None) -> Result:
        return softmax_reference(x, mask, scale=SCALE, causal=case.variant == "causal")

    return formula


def _ours(case: BenchCase) -> Call:
    def ours(x: Tensor, mask: Tensor | None = None) -> Result:
        return softmax(x, scale=SCALE, mask=mask, causal=case.variant == "causal")

    return ours


def _plain(case: BenchCase, wide: bool = True) -> Call:
    rows, columns = case.shape[-2:]

    def plain(x: Tensor, mask: Tensor | None = None) -> Result:
        z = (x.float() if wide else x) * SCALE
        if case.variant == "causal":
            mask = torch.ones(rows, columns, dtype=torch.bool, device=x.device).triu(1)
        if mask is not None:
            z = z.masked_fill(mask, float("-inf"))
        return z.softmax(-1).to(x.dtype)

    return plain


def _contenders(case: BenchCase) -> list[Contender]:
    return [
        Contender("onepass", _ours, ours=True),
        Contender("eager", _plain),
        Contender("torch.compile", lambda case: compiled(_plain(case)), compiles=True),
    ]


def _backend(case: BenchCase, inputs: Inputs) -> str:
    given = inputs.tensors
    return explain(OP, given["x"], scale=SCALE, mask=given.get("mask"), causal=case.variant == "causal").backend


BENCH = OpBench(
    OP, _cases, _inputs, _contenders, _formula, _tiny, _backend,
    baseline=lambda case: _plain(case, wide=False),
    without=dict.fromkeys(("Liger", "QuACK", "Apex", "Transformer Engine", "Megatron-core"), "has none that can be installed"),
)  # fmt: skip
