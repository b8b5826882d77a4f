"""activation_linear against the two calls that it replaces: an activation, and the matrix product that follows.

Time      matrix products dominate, so times are relative to those of `separate`, not to a copy's. `separate` is onepass's
          bias_activation and then F.linear. The op saves memory: the activation's output is not kept (see kept and peak MiB).
Bytes     forward reads x and the weight and writes y; backward reads dy, x and the weight, and writes dx and dweight.
Gradients of x and of the product's weight. There are no biases, as in a Llama's MLP.
Peers     eager and torch.compile: the activation's formula, then F.linear.
          QuACK: F.gelu, then its product, whose backward has the activation's; without tuning, which takes minutes.
Variants  `swiglu fp8` has products in eight bits (bench/fp8.py), over `onepass bf16`, beside torchao.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter

from onepass.bench import fp8
from onepass.bench.model import FP8, BenchCase, Call, Contender, Inputs, OpBench, Result
from onepass.bench.peers import compiled, imported
from onepass.bench.products import Shapes, random_of, tiny
from onepass.ops.activation.activation_linear import activation_linear, activation_linear_reference
from onepass.ops.activation.activations import find_activation
from onepass.ops.activation.bias_activation import bias_activation, bias_activation_reference
from onepass.runtime.backend import explain
from onepass.runtime.fp8_recipe import Precision

OP = "activation_linear"
_FP8 = "swiglu" + FP8
_SHAPES = Shapes(
    full=[
        ("swiglu", 16384, 8192, 2048),
        ("swiglu", 16384, 14336, 4096),
        ("gelu", 16384, 16384, 4096),
        (_FP8, 16384, 8192, 2048),
        (_FP8, 8192, 14336, 4096),
    ],
    small=[("swiglu", 2048, 8192, 2048), ("gelu", 2048, 16384, 4096), (_FP8, 8192, 8192, 2048)],
    cpu=[("swiglu", 256, 768, 512), ("gelu", 256, 768, 512), (_FP8, 256, 768, 512)],
    cpu_small=[("swiglu", 128, 192, 128), (_FP8, 64, 128, 128)],
)


def _case(variant: str, tokens: int, inner: int, outer: int, dtype: torch.dtype) -> BenchCase:
    parts = find_activation(variant.removesuffix(FP8)).parts
    x, weight, y = (n * dtype.itemsize for n in (tokens * inner * parts, inner * outer, tokens * outer))
    moved = x + weight + y, 2 * x + 2 * weight + y
    return BenchCase(OP, variant, (tokens, inner, outer), dtype, *moved, fp8=variant.endswith(FP8))


def _inputs(case: BenchCase, device: torch.device, generator: torch.Generator) -> Inputs:
    tokens, inner, outer = case.shape
    random = random_of(case, device, generator)
    x = random(tokens, inner * find_activation(case.kind).parts)
    weight = Parameter(random(outer, inner).mul_(inner**-0.5))
    return Inputs({"x": x.requires_grad_(), "weight": weight}, frozenset({"x"}), {"y": random(tokens, outer)})


def _formula(case: BenchCase) -> Call:
    return partial(activation_linear_reference, activation=case.kind)


def _baseline(case: BenchCase) -> Call:
    """Compute the activation in fp32, round it once, and multiply in the stored dtype, or in eight bits."""

    def call(x: Tensor, weight: Tensor) -> Result:
        y = bias_activation_reference(x.float(), activation=case.kind)
        return fp8.rounded_linear(y, weight).to(x.dtype) if case.fp8 else F.linear(y.to(x.dtype), weight)

    return call


# ---- onepass and eager code ----


def _ours(case: BenchCase, precision: Precision = None) -> Call:
    return partial(activation_linear, activation=case.kind, precision=precision)


def _separate(case: BenchCase) -> Call:
    def call(x: Tensor, weight: Tensor) -> Result:
        return F.linear(bias_activation(x, None, case.variant), weight)

    return call


def _eager(case: BenchCase) -> Call:
    act = find_activation(case.variant)

    def call(x: Tensor, weight: Tensor) -> Result:
        if not act.gated:
            return F.linear(act.formula(x), weight)
        gate, linear = x.chunk(2, -1)
        return F.linear(act.formula(gate) * linear, weight)

    return call


def _compiled(case: BenchCase) -> Call:
    return compiled(_eager(case))


def _quack(case: BenchCase) -> Call:
    function = partial(imported("quack.linear", "act_linear_func"), activation="gelu_tanh_approx", tuned=False)

    def call(x: Tensor, weight: Tensor) -> Result:
        y: Tensor = function(x, weight, F.gelu(x.detach(), approximate="tanh"))
        return y

    return call


def _layers(case: BenchCase) -> nn.Module:
    _, inner, outer = case.shape
    return nn.Sequential(fp8.SwiGLU(), nn.Linear(inner, outer, bias=False, dtype=case.dtype))


def _alternating(case: BenchCase) -> str | None:
    return "its gates and linear parts alternate" if find_activation(case.kind).gated else None


def _contenders(case: BenchCase) -> list[Contender]:
    if case.fp8:
        return [*fp8.ours(case, _ours, (1,)), *fp8.torchao(_layers, ("1.weight",))]
    return [
        Contender("onepass", _ours, ours=True),
        Contender("separate", _separate),
        Contender("eager", _eager),
        Contender("torch.compile", _compiled, compiles=True),
        Contender("QuACK", _quack, package="QuACK", lacks=_alternating(case)),
    ]


def _backend(case: BenchCase, inputs: Inputs) -> str:
    return explain(OP, *inputs.tensors.values(), activation=case.kind).backend


_APART = "has no activation with the product that follows, alone"
BENCH = OpBench(
    OP, _SHAPES.cases(_case), _inputs, _contenders, _formula, tiny(_case), _backend,
    without={name: _APART for name in ("Liger", "Apex", "Megatron-core", "Transformer Engine")},
    baseline=_baseline, reference=lambda case: fp8.reference(case) if case.fp8 else "separate",
)  # fmt: skip
