"""linear with a main_grad, against F.linear and the addition that a data-parallel hook makes afterwards.

Time      matrix products dominate, so times are relative to those of `F.linear + add_`, not to a copy's.
Bytes     forward reads x and the weight and writes y; backward reads dy, x, weight and main_grad, and writes dx and main_grad.
Gradients of x, and of the weight (and the bias) in an fp32 main_grad, by .backward() as in training.
Variants  `plain fp8` has products in eight bits (bench/fp8.py), over `onepass bf16`.
Peers     `F.linear + add_` is what people run without Apex's extension; torch.compile compiles it. Apex's own kernel is one
          cuBLAS product; `onepass bench wgrad` measures that product by itself. In eight bits torchao and Transformer Engine.
          QuACK: its products, without tuning, which takes minutes for each shape; one adds to main_grad.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onepass.bench import fp8
from onepass.bench.define import OpBench, Random, Shape, Shapes, by_pytorch, give_main_grad
from onepass.bench.model import FP8, BenchCase, Call, Contender, Inputs
from onepass.bench.peers import imported

_FP8 = "plain" + FP8
_SHAPES = Shapes(  # tokens, input features, output features
    gpu={
        "plain": [(2048, 4096, 4096), (8192, 4096, 4096), (8192, 4096, 14336), (4096, 8192, 28672), (8192, 12288, 12288)],
        "bias": [(8192, 4096, 4096)],
        _FP8: [(16384, 2048, 16384), (16384, 8192, 2048), (8192, 4096, 28672), (8192, 14336, 4096)],
    },
    gpu_quick={"plain": [(2048, 4096, 4096)], "bias": [(2048, 4096, 4096)], _FP8: [(8192, 4096, 4096)]},
    cpu={"plain": [(256, 512, 768)], "bias": [(256, 512, 768)], _FP8: [(256, 512, 768)]},
    cpu_quick={"plain": [(128, 128, 192)], _FP8: [(128, 128, 192)]},
)


def _bytes_moved(variant: str, shape: Shape, size: int) -> tuple[int, int]:
    tokens, inner, outer = shape
    x, weight, y = (n * size for n in (tokens * inner, inner * outer, tokens * outer))
    return x + weight + y, y + 2 * x + weight + 8 * inner * outer


def _inputs(case: BenchCase, random: Random) -> Inputs:
    tokens, inner, outer = case.shape
    tensors = {"x": random.input(tokens, inner), "weight": random.weight(outer, inner)}
    if case.variant == "bias":
        tensors["bias"] = random.parameter(outer)
    for name in tensors.keys() - {"x"}:
        give_main_grad(tensors[name])
    return Inputs(tensors, frozenset({"x"}), {"y": random(tokens, outer)}, trained=True)


class _QuackLinear(torch.autograd.Function):
    """QuACK's linear function, with its product that adds in place: its own function adds to .grad, in the weight's type."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, product: Any, add_product: Any) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.main_grad, ctx.biased, ctx.products = weight.main_grad, bias is not None, (product, add_product)  # type: ignore[attr-defined]
        y: Tensor = product(x, weight.t(), bias=bias)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), (product, add_product) = ctx.saved_tensors, ctx.products
        add_product(dy.t(), x, ctx.main_grad, dynamic_scheduler=True)
        return product(dy, weight, dynamic_scheduler=True), None, dy.sum(0) if ctx.biased else None, None, None


def _quack(case: BenchCase) -> Call:
    products = [partial(imported("quack.gemm_interface", name), tuned=False) for name in ("gemm", "gemm_add_inplace")]
    function: Callable[..., Tensor] = _QuackLinear.apply
    return lambda x, weight, bias=None: function(x, weight, bias, *products)


def _layers(case: BenchCase) -> nn.Module:
    _, inner, outer = case.shape
    return nn.Sequential(nn.Linear(inner, outer, bias=False, dtype=case.dtype))


def _peers(case: BenchCase) -> list[Contender]:
    if case.fp8:
        engine = fp8.transformer_engine("Linear", lambda case: case.shape[1:], ("weight",), fuse_wgrad_accumulation=True)
        return [*fp8.torchao(_layers, ("0.weight",)), engine]
    eager = by_pytorch(lambda case, run: run(lambda *tensors: F.linear(*tensors)), "F.linear + add_")
    return [*eager, Contender("QuACK", _quack, package="QuACK")]


_APART = "has no linear layer with a main_grad"
BENCH = OpBench(
    "linear", _SHAPES, (64, 128, 128), _bytes_moved, _inputs, _peers,
    weights=(1,), baseline=lambda case: partial(fp8.baseline_linear, case), reference="F.linear + add_",
    without={"Liger": _APART, "Apex": "its kernel is in wgrad", "Megatron-core": "uses Apex's",
             "Transformer Engine": "compared in eight bits"},
)  # fmt: skip
