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

import torch.nn.functional as F
from torch import Tensor, nn

from onepass.bench import fp8
from onepass.bench.define import OpBench, Random, Run, Shape, Shapes, by_pytorch
from onepass.bench.model import FP8, BenchCase, Call, Contender, Inputs, Result
from onepass.bench.peers import imported
from onepass.ops.activation.activations import find_activation
from onepass.ops.activation.bias_activation import bias_activation, bias_activation_reference

_FP8 = "swiglu" + FP8
_SHAPES = Shapes(  # tokens, features of the activation's result, output features
    gpu={
        "swiglu": [(16384, 8192, 2048), (16384, 14336, 4096)],
        "gelu": [(16384, 16384, 4096)],
        _FP8: [(16384, 8192, 2048), (8192, 14336, 4096)],
    },
    gpu_quick={"swiglu": [(2048, 8192, 2048)], "gelu": [(2048, 16384, 4096)], _FP8: [(8192, 8192, 2048)]},
    cpu={"swiglu": [(256, 768, 512)], "gelu": [(256, 768, 512)], _FP8: [(256, 768, 512)]},
    cpu_quick={"swiglu": [(128, 192, 128)], _FP8: [(64, 128, 128)]},
)


def _bytes_moved(variant: str, shape: Shape, size: int) -> tuple[int, int]:
    tokens, inner, outer = shape
    parts = find_activation(variant.removesuffix(FP8)).parts
    x, weight, y = (n * size for n in (tokens * inner * parts, inner * outer, tokens * outer))
    return x + weight + y, 2 * x + 2 * weight + y


def _inputs(case: BenchCase, random: Random) -> Inputs:
    tokens, inner, outer = case.shape
    tensors = {"x": random.input(tokens, inner * find_activation(case.kind).parts), "weight": random.weight(outer, inner)}
    return Inputs(tensors, frozenset({"x"}), {"y": random(tokens, outer)})


def _baseline(case: BenchCase) -> Call:
    act = partial(bias_activation_reference, activation=case.kind)
    return lambda x, weight: fp8.baseline_linear(case, act(x.float()), weight)


def _eager(case: BenchCase, run: Run) -> Call:
    act = find_activation(case.variant)

    def call(x: Tensor, weight: Tensor) -> Result:
        if not act.gated:
            return F.linear(act.formula(x), weight)
        gate, linear = x.chunk(2, -1)
        return F.linear(act.formula(gate) * linear, weight)

    return run(call)


def _quack(case: BenchCase) -> Call:
    function = partial(imported("quack.linear", "act_linear_func"), activation="gelu_tanh_approx", tuned=False)
    return lambda x, weight: function(x, weight, F.gelu(x.detach(), approximate="tanh"))


def _layers(case: BenchCase) -> nn.Module:
    _, inner, outer = case.shape
    return nn.Sequential(fp8.SwiGLU(), nn.Linear(inner, outer, bias=False, dtype=case.dtype))


def _peers(case: BenchCase) -> list[Contender]:
    if case.fp8:
        return fp8.torchao(_layers, ("1.weight",))
    separate = Contender("separate", lambda case: lambda x, weight: F.linear(bias_activation(x, None, case.variant), weight))
    lacks = "its gates and linear parts alternate" if find_activation(case.kind).gated else None
    return [separate, *by_pytorch(_eager), Contender("QuACK", _quack, package="QuACK", lacks=lacks)]


_APART = "has no activation with the product that follows, alone"
BENCH = OpBench(
    "activation_linear", _SHAPES, (64, 128, 128), _bytes_moved, _inputs, _peers,
    options=lambda case: {"activation": case.kind}, weights=(1,), baseline=_baseline, reference="separate",
    without={name: _APART for name in ("Liger", "Apex", "Megatron-core", "Transformer Engine")},
)  # fmt: skip
