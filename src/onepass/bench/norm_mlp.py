"""A block's norm and MLP in eight bits, forward and backward: norm_linear and activation_linear, one after the other.

Time      matrix products dominate, so times are relative to those of onepass without eight bits, not to a copy's.
Bytes     forward reads x and the weights and writes y; backward reads dy, x and the weights, and writes their gradients.
Gradients of x, the norm's weight and both products' weights, by autograd. Only here does an activation's backward write its
          gradient as the codes that the first product's backward takes.
Peers     torchao: RMSNorm, nn.Linear, swiglu and nn.Linear, converted and compiled as a whole.
          Transformer Engine: its LayerNormMLP, with the same parameters.
          bench/fp8.py says how often the weights' codes are made.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from onepass.bench import fp8
from onepass.bench.define import OpBench, Random, Shape, Shapes
from onepass.bench.model import FP8, BenchCase, Call, Contender, Inputs, Result
from onepass.ops.activation.activation_linear import activation_linear, activation_linear_reference
from onepass.ops.activation.bias_activation import bias_activation_reference
from onepass.ops.norm.norm import rms_norm_reference
from onepass.ops.norm.norm_linear import norm_linear, norm_linear_reference
from onepass.runtime.backend import explain

_EPS = 1e-5
_VARIANT = "swiglu" + FP8
_SHAPES = Shapes(  # tokens, hidden, MLP: those of models of 1B and 8B
    gpu={_VARIANT: [(16384, 2048, 8192), (8192, 4096, 14336)]},
    gpu_quick={_VARIANT: [(4096, 2048, 8192)]},
    cpu={_VARIANT: [(256, 512, 768)]},
    cpu_quick={_VARIANT: [(64, 64, 128)]},
)
_TINY = 64, 64, 128  # no tensor is shared out to a CPU's threads


def _bytes_moved(variant: str, shape: Shape, size: int) -> tuple[int, int]:
    tokens, hidden, inner = shape
    x, weights = (n * size for n in (tokens * hidden, 3 * hidden * inner))
    return 2 * x + weights, 3 * x + 2 * weights


def _inputs(case: BenchCase, random: Random) -> Inputs:
    tokens, hidden, inner = case.shape
    tensors = {"x": random.input(tokens, hidden), "norm_weight": random.parameter(hidden)}
    tensors |= {"up": random.weight(2 * inner, hidden), "down": random.weight(hidden, inner)}
    return Inputs(tensors, frozenset({"x"}), {"y": random(tokens, hidden)}, row_elements=2 * inner)


def _one_after_the_other(case: BenchCase, first: Callable[..., Any], second: Callable[..., Any], **options: Any) -> Call:
    first = partial(first, norm="rms_norm", eps=_EPS, **options)
    second = partial(second, activation=case.kind, **options)
    return lambda x, norm_weight, up, down: second(first(x, norm_weight, up), down)


def _baseline(case: BenchCase) -> Call:
    def call(x: Tensor, norm_weight: Tensor, up: Tensor, down: Tensor) -> Result:
        y = rms_norm_reference(x.float(), norm_weight.float(), eps=_EPS)
        assert isinstance(y, Tensor)
        activated = bias_activation_reference(fp8.rounded_linear(y, up), activation=case.kind)
        return fp8.rounded_linear(activated, down).to(x.dtype)

    return call


def _layers(case: BenchCase) -> nn.Module:
    _, hidden, inner = case.shape
    up, down = (nn.Linear(*sizes, bias=False, dtype=case.dtype) for sizes in ((hidden, 2 * inner), (inner, hidden)))
    return nn.Sequential(nn.RMSNorm(hidden, eps=_EPS, dtype=case.dtype), up, fp8.SwiGLU(), down)


def _peers(case: BenchCase) -> list[Contender]:
    engine = fp8.transformer_engine(
        "LayerNormMLP", lambda case: case.shape[1:], ("layer_norm_weight", "fc1_weight", "fc2_weight"),
        eps=_EPS, normalization="RMSNorm", activation="swiglu",
    )  # fmt: skip
    return [*fp8.torchao(_layers, ("0.weight", "1.weight", "3.weight")), engine]


def _backend(case: BenchCase, inputs: Inputs) -> str:
    x, norm_weight, up, _ = inputs.tensors.values()
    return explain("norm_linear", x, norm_weight, up, norm="rms_norm", eps=_EPS, precision="fp8").backend


_IN_FP8 = "has no products in eight bits"
BENCH = OpBench(
    "norm_mlp", _SHAPES, _TINY, _bytes_moved, _inputs, _peers,
    ours=lambda case, precision: _one_after_the_other(case, norm_linear, activation_linear, precision=precision),
    formula=lambda case: _one_after_the_other(case, norm_linear_reference, activation_linear_reference),
    weights=(2, 3), baseline=_baseline, backend=_backend,
    without={"Liger": _IN_FP8, "QuACK": _IN_FP8, "Apex": _IN_FP8, "Megatron-core": "takes them from Transformer Engine"},
)  # fmt: skip
