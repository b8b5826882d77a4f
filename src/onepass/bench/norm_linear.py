"""norm_linear against the two calls that it replaces: a norm, and the matrix product that follows.

Time      matrix products dominate, so times are relative to those of `separate`, not to a copy's. `separate` is onepass's norm
          and then F.linear. The op saves memory: the norm's output is not kept (see kept and peak MiB).
Bytes     forward reads x and the weight and writes y; backward reads dy, x and the weight, and writes dx and dweight.
Gradients of x, the norm's weight (and bias) and the product's weight.
Peers     eager and torch.compile: F.rms_norm or F.layer_norm, then F.linear.
          Transformer Engine: its LayerNormLinear, with the same parameters.
Variants  `rms fp8` has products in eight bits (bench/fp8.py), over `onepass bf16`, beside torchao and Transformer Engine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from onepass.bench import fp8
from onepass.bench.define import OpBench, Random, Run, Shape, Shapes, by_pytorch
from onepass.bench.model import FP8, BenchCase, Call, Contender, Inputs, Result
from onepass.bench.peers import imported, with_parameters
from onepass.ops.norm.norm import layer_norm, layer_norm_reference, rms_norm, rms_norm_reference

_EPS = 1e-5
_FP8 = "rms" + FP8
_SHAPES = Shapes(  # tokens, input features, output features
    gpu={
        "rms": [(16384, 4096, 6144), (16384, 4096, 28672)],
        "layer": [(16384, 4096, 6144)],
        _FP8: [(16384, 2048, 16384), (8192, 4096, 28672)],
    },
    gpu_quick={"rms": [(2048, 4096, 6144)], "layer": [(2048, 4096, 6144)], _FP8: [(8192, 4096, 6144)]},
    cpu={"rms": [(256, 512, 768)], "layer": [(256, 512, 768)], _FP8: [(256, 512, 768)]},
    cpu_quick={"rms": [(128, 128, 192)], _FP8: [(128, 128, 192)]},
)


def _bytes_moved(variant: str, shape: Shape, size: int) -> tuple[int, int]:
    tokens, inner, outer = shape
    x, weight, y = (n * size for n in (tokens * inner, inner * outer, tokens * outer))
    return x + weight + y, 2 * x + 2 * weight + y


def _inputs(case: BenchCase, random: Random) -> Inputs:
    tokens, inner, outer = case.shape
    tensors = {"x": random.input(tokens, inner), "norm_weight": random.parameter(inner), "weight": random.weight(outer, inner)}
    if case.variant == "layer":
        tensors["norm_bias"] = random.parameter(inner)
    return Inputs(tensors, frozenset({"x"}), {"y": random(tokens, outer)})


def _baseline(case: BenchCase) -> Call:
    formula: Callable[..., Any] = rms_norm_reference if case.kind == "rms" else layer_norm_reference

    def call(x: Tensor, norm_weight: Tensor, weight: Tensor, *norm_bias: Tensor) -> Result:
        y = formula(x.float(), norm_weight.float(), *(bias.float() for bias in norm_bias), eps=_EPS)
        return fp8.baseline_linear(case, y, weight)

    return call


# ---- the two calls, by onepass and by PyTorch ----


def _after_norm(norm: Callable[..., Any]) -> Call:
    return lambda x, norm_weight, weight, *bias: F.linear(norm(x, norm_weight, *bias, eps=_EPS), weight)


def _eager(case: BenchCase, run: Run) -> Call:
    function: Callable[..., Any] = F.rms_norm if case.variant == "rms" else F.layer_norm
    return run(_after_norm(lambda x, *parameters, eps: function(x, case.shape[1:2], *parameters, eps)))


# ---- peers ----


def _transformer_engine(case: BenchCase) -> Call:
    _, inner, outer = case.shape
    kind = "RMSNorm" if case.variant == "rms" else "LayerNorm"
    make = imported("transformer_engine.pytorch", "LayerNormLinear")
    module = make(inner, outer, eps=_EPS, normalization=kind, bias=False, params_dtype=case.dtype)
    names = ("layer_norm_weight", "weight") + (("layer_norm_bias",) if case.variant == "layer" else ())
    return with_parameters(module, names)


def _layers(case: BenchCase) -> nn.Module:
    _, inner, outer = case.shape
    norm = nn.RMSNorm(inner, eps=_EPS, dtype=case.dtype)
    return nn.Sequential(norm, nn.Linear(inner, outer, bias=False, dtype=case.dtype))


def _peers(case: BenchCase) -> list[Contender]:
    if case.fp8:
        engine = fp8.transformer_engine(
            "LayerNormLinear", lambda case: case.shape[1:], ("layer_norm_weight", "weight"), eps=_EPS, normalization="RMSNorm"
        )
        return [*fp8.torchao(_layers, ("0.weight", "1.weight")), engine]
    engine = Contender("Transformer Engine", _transformer_engine, "Transformer Engine")
    separate = Contender("separate", lambda case: _after_norm(rms_norm if case.variant == "rms" else layer_norm))
    return [separate, *by_pytorch(_eager), engine]


_APART = "has no norm with the product that follows"
BENCH = OpBench(
    "norm_linear", _SHAPES, (64, 128, 128), _bytes_moved, _inputs, _peers,
    options=lambda case: {"norm": f"{case.kind}_norm", "eps": _EPS},
    keywords=lambda case: ("norm_bias",) if case.variant == "layer" else (),
    weights=(2,), baseline=_baseline, reference="separate",
    without={"Liger": _APART, "QuACK": _APART, "Apex": _APART, "Megatron-core": "takes its own from Transformer Engine"},
)  # fmt: skip
