"""lora_linear against PEFT's layer: a frozen weight and an adapter of rank 16.

Time      matrix products dominate, so times are relative to those of `eager`, not to a copy's.
Bytes     forward reads x, the weight and the adapter and writes y; backward reads dy, x, the weight and the adapter, and writes
          dx and the adapter's gradients.
Gradients of x and of the adapter; the weight is frozen.
Variants  `fp32` adapters as PEFT makes them, `bf16` as `autocast_adapter_dtype=False` leaves them. `bf16 fp8` has the weight's
          products in eight bits, over `onepass bf16`.
Peers     eager: as PEFT's layer computes, without its dropout. torch.compile of the same.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onepass.bench import fp8
from onepass.bench.define import OpBench, Random, Run, Shape, Shapes, by_pytorch
from onepass.bench.model import FP8, BenchCase, Call, Contender, Inputs
from onepass.ops.linear.lora_linear import lora_linear_reference

_RANK, _SCALE = 16, 2.0
_FP8 = "bf16" + FP8
_LLAMA_8B = [(4096, 4096, 6144), (4096, 4096, 28672), (4096, 14336, 4096)]  # tokens, input features, output features
_SHAPES = Shapes(
    gpu={"fp32": _LLAMA_8B, "bf16": _LLAMA_8B, _FP8: _LLAMA_8B},
    gpu_quick={"fp32": _LLAMA_8B[:1]},
    cpu={"fp32": [(256, 512, 768)], "bf16": [(256, 512, 768)], _FP8: [(256, 512, 768)]},
    cpu_quick={"fp32": [(128, 128, 192)]},
)


def _bytes_moved(variant: str, shape: Shape, size: int) -> tuple[int, int]:
    tokens, inner, outer = shape
    adapter = _RANK * (inner + outer) * (4 if variant == "fp32" else size)
    x, weight, y = (n * size for n in (tokens * inner, inner * outer, tokens * outer))
    return x + weight + adapter + y, y + 2 * x + weight + 2 * adapter


def _inputs(case: BenchCase, random: Random) -> Inputs:
    tokens, inner, outer = case.shape
    weight, a, b = random.weight(outer, inner), random.weight(_RANK, inner), random.weight(outer, _RANK)
    if case.variant == "fp32":
        a, b = nn.Parameter(a.detach().float()), nn.Parameter(b.detach().float())
    with torch.no_grad():
        b.mul_(0.1)
    tensors = {"x": random.input(tokens, inner), "weight": weight.requires_grad_(False), "lora_a": a, "lora_b": b}
    return Inputs(tensors, frozenset({"x"}), {"y": random(tokens, outer)})


def _baseline(case: BenchCase) -> Call:
    def call(x: Tensor, weight: Tensor, lora_a: Tensor, lora_b: Tensor) -> Tensor:
        """Round both products, and their sum."""
        a, b = lora_a.to(case.dtype), lora_b.to(case.dtype)
        t = (_SCALE * F.linear(x.to(case.dtype), a).float()).to(case.dtype)
        return fp8.baseline_linear(case, x, weight) + F.linear(t, b)

    return call


def _eager(case: BenchCase, run: Run) -> Call:
    def linear(x: Tensor, weight: Tensor, lora_a: Tensor, lora_b: Tensor) -> Tensor:
        y = F.linear(x, weight)
        return (y + F.linear(F.linear(x.to(lora_a.dtype), lora_a), lora_b) * _SCALE).to(y.dtype)

    return run(linear)


def _peers(case: BenchCase) -> list[Contender]:
    return [] if case.fp8 else by_pytorch(_eager)


_APART = "has no LoRA layer"
BENCH = OpBench(
    "lora_linear", _SHAPES, (64, 128, 128), _bytes_moved, _inputs, _peers,
    options=lambda case: {"scale": _SCALE}, weights=(1,), baseline=_baseline, reference="eager",
    formula=lambda case: lambda *tensors: lora_linear_reference(*tensors, scale=_SCALE),
    without={"Liger": _APART, "Megatron-core": _APART, "Apex": _APART},
)  # fmt: skip
