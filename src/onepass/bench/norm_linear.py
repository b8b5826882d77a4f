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
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter

from onepass.bench import fp8
from onepass.bench.model import FP8, BenchCase, Call, Contender, Inputs, OpBench, Result
from onepass.bench.peers import compiled, imported, with_parameters
from onepass.bench.products import Shapes, random_of, tiny
from onepass.ops.norm.norm import layer_norm, layer_norm_reference, rms_norm, rms_norm_reference
from onepass.ops.norm.norm_linear import norm_linear, norm_linear_reference
from onepass.runtime.backend import explain
from onepass.runtime.fp8_recipe import Precision

OP = "norm_linear"
_EPS = 1e-5
_FP8 = "rms" + FP8
_SHAPES = Shapes(
    full=[
        ("rms", 16384, 4096, 6144),
        ("rms", 16384, 4096, 28672),
        ("layer", 16384, 4096, 6144),
        (_FP8, 16384, 2048, 16384),
        (_FP8, 8192, 4096, 28672),
    ],
    small=[("rms", 2048, 4096, 6144), ("layer", 2048, 4096, 6144), (_FP8, 8192, 4096, 6144)],
    cpu=[("rms", 256, 512, 768), ("layer", 256, 512, 768), (_FP8, 256, 512, 768)],
    cpu_small=[("rms", 128, 128, 192), (_FP8, 128, 128, 192)],
)


def _case(variant: str, tokens: int, inner: int, outer: int, dtype: torch.dtype) -> BenchCase:
    x, weight, y = (n * dtype.itemsize for n in (tokens * inner, inner * outer, tokens * outer))
    moved = x + weight + y, 2 * x + 2 * weight + y
    return BenchCase(OP, variant, (tokens, inner, outer), dtype, *moved, fp8=variant.endswith(FP8))


def _inputs(case: BenchCase, device: torch.device, generator: torch.Generator) -> Inputs:
    tokens, inner, outer = case.shape
    random = random_of(case, device, generator)
    tensors = {"x": random(tokens, inner).requires_grad_(), "norm_weight": Parameter(random(inner))}
    tensors["weight"] = Parameter(random(outer, inner).mul_(inner**-0.5))
    if case.variant == "layer":
        tensors["norm_bias"] = Parameter(random(inner))
    return Inputs(tensors, frozenset({"x"}), {"y": random(tokens, outer)})


def _options(case: BenchCase) -> dict[str, Any]:
    return {"norm": f"{case.kind}_norm", "eps": _EPS}


def _formula(case: BenchCase) -> Call:
    def call(x: Tensor, norm_weight: Tensor, weight: Tensor, norm_bias: Tensor | None = None) -> Result:
        return norm_linear_reference(x, norm_weight, weight, None, norm_bias, zero_centered_gamma=False, **_options(case))

    return call


def _baseline(case: BenchCase) -> Call:
    """Compute the norm in fp32, round it once, and multiply in the stored dtype, or in eight bits."""
    formula: Callable[..., Any] = rms_norm_reference if case.kind == "rms" else layer_norm_reference
    norm = partial(formula, residual=None, eps=_EPS, zero_centered_gamma=False)

    def call(x: Tensor, norm_weight: Tensor, weight: Tensor, *norm_bias: Tensor) -> Result:
        y = norm(x.float(), norm_weight.float(), *(bias.float() for bias in norm_bias))
        return fp8.rounded_linear(y, weight).to(x.dtype) if case.fp8 else F.linear(y.to(x.dtype), weight)

    return call


# ---- onepass and eager code ----


def _ours(case: BenchCase, precision: Precision = None) -> Call:
    options = _options(case)

    def call(x: Tensor, norm_weight: Tensor, weight: Tensor, norm_bias: Tensor | None = None) -> Result:
        result: Result = norm_linear(x, norm_weight, weight, norm_bias=norm_bias, precision=precision, **options)
        return result

    return call


def _separate(case: BenchCase) -> Call:
    function: Callable[..., Any] = rms_norm if case.variant == "rms" else layer_norm

    def call(x: Tensor, norm_weight: Tensor, weight: Tensor, *norm_bias: Tensor) -> Result:
        return F.linear(function(x, norm_weight, *norm_bias, _EPS), weight)

    return call


def _eager(case: BenchCase) -> Call:
    function: Callable[..., Any] = F.rms_norm if case.variant == "rms" else F.layer_norm
    inner = case.shape[1:2]

    def call(x: Tensor, norm_weight: Tensor, weight: Tensor, *norm_bias: Tensor) -> Result:
        return F.linear(function(x, inner, norm_weight, *norm_bias, _EPS), weight)

    return call


def _compiled(case: BenchCase) -> Call:
    return compiled(_eager(case))


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


def _contenders(case: BenchCase) -> list[Contender]:
    if case.fp8:
        engine = fp8.transformer_engine(
            "LayerNormLinear", lambda case: case.shape[1:], ("layer_norm_weight", "weight"), eps=_EPS, normalization="RMSNorm"
        )
        return [*fp8.ours(case, _ours, (2,)), *fp8.torchao(_layers, ("0.weight", "1.weight")), engine]
    return [
        Contender("onepass", _ours, ours=True),
        Contender("separate", _separate),
        Contender("eager", _eager),
        Contender("torch.compile", _compiled, compiles=True),
        Contender("Transformer Engine", _transformer_engine, "Transformer Engine"),
    ]


def _backend(case: BenchCase, inputs: Inputs) -> str:
    x, norm_weight, weight = (inputs.tensors[name] for name in ("x", "norm_weight", "weight"))
    return explain(OP, x, norm_weight, weight, norm_bias=inputs.tensors.get("norm_bias"), **_options(case)).backend


_APART = "has no norm with the product that follows"
BENCH = OpBench(
    OP, _SHAPES.cases(_case), _inputs, _contenders, _formula, tiny(_case), _backend,
    without={"Liger": _APART, "QuACK": _APART, "Apex": _APART, "Megatron-core": "takes its own from Transformer Engine"},
    baseline=_baseline, reference=lambda case: fp8.reference(case) if case.fp8 else "separate",
)  # fmt: skip
