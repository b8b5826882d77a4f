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

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from onepass.bench import fp8
from onepass.bench.model import FP8, BenchCase, Call, Contender, Inputs, OpBench, Result
from onepass.bench.products import Shapes, random_of
from onepass.ops.activation.activation_linear import activation_linear, activation_linear_reference
from onepass.ops.activation.bias_activation import bias_activation_reference
from onepass.ops.norm.norm import rms_norm_reference
from onepass.ops.norm.norm_linear import norm_linear, norm_linear_reference
from onepass.runtime.backend import explain
from onepass.runtime.fp8_recipe import Precision

OP = "norm_mlp"
_EPS = 1e-5
_VARIANT = "swiglu" + FP8
_SHAPES = Shapes(  # tokens, hidden, MLP: those of models of 1B and 8B
    full=[(_VARIANT, 16384, 2048, 8192), (_VARIANT, 8192, 4096, 14336)],
    small=[(_VARIANT, 4096, 2048, 8192)],
    cpu=[(_VARIANT, 256, 512, 768)],
    cpu_small=[(_VARIANT, 64, 64, 128)],
)


def _case(variant: str, tokens: int, hidden: int, inner: int, dtype: torch.dtype) -> BenchCase:
    x, weights = (n * dtype.itemsize for n in (tokens * hidden, 3 * hidden * inner))
    return BenchCase(OP, variant, (tokens, hidden, inner), dtype, 2 * x + weights, 3 * x + 2 * weights, fp8=True)


def _tiny(case: BenchCase) -> BenchCase:
    return _case(case.variant, 64, 64, 128, case.dtype)  # no tensor is shared out to a CPU's threads


def _inputs(case: BenchCase, device: torch.device, generator: torch.Generator) -> Inputs:
    tokens, hidden, inner = case.shape
    random = random_of(case, device, generator)
    tensors = {"x": random(tokens, hidden).requires_grad_(), "norm_weight": Parameter(random(hidden))}
    tensors["up"] = Parameter(random(2 * inner, hidden).mul_(hidden**-0.5))
    tensors["down"] = Parameter(random(hidden, inner).mul_(inner**-0.5))
    return Inputs(tensors, frozenset({"x"}), {"y": random(tokens, hidden)}, row_elements=2 * inner)


def _formula(case: BenchCase) -> Call:
    def call(x: Tensor, norm_weight: Tensor, up: Tensor, down: Tensor) -> Result:
        z = norm_linear_reference(x, norm_weight, up, norm="rms_norm", eps=_EPS)
        assert isinstance(z, Tensor)
        return activation_linear_reference(z, down, activation=case.kind)

    return call


def _baseline(case: BenchCase) -> Call:
    def call(x: Tensor, norm_weight: Tensor, up: Tensor, down: Tensor) -> Result:
        y = rms_norm_reference(x.float(), norm_weight.float(), residual=None, eps=_EPS, zero_centered_gamma=False)
        assert isinstance(y, Tensor)
        activated = bias_activation_reference(fp8.rounded_linear(y, up), activation=case.kind)
        return fp8.rounded_linear(activated, down).to(x.dtype)

    return call


def _ours(case: BenchCase, precision: Precision) -> Call:
    def call(x: Tensor, norm_weight: Tensor, up: Tensor, down: Tensor) -> Result:
        z = norm_linear(x, norm_weight, up, norm="rms_norm", eps=_EPS, precision=precision)
        assert isinstance(z, Tensor)
        return activation_linear(z, down, activation=case.kind, precision=precision)

    return call


def _layers(case: BenchCase) -> nn.Module:
    _, hidden, inner = case.shape
    up, down = (nn.Linear(*sizes, bias=False, dtype=case.dtype) for sizes in ((hidden, 2 * inner), (inner, hidden)))
    return nn.Sequential(nn.RMSNorm(hidden, eps=_EPS, dtype=case.dtype), up, fp8.SwiGLU(), down)


def _contenders(case: BenchCase) -> list[Contender]:
    engine = fp8.transformer_engine(
        "LayerNormMLP", lambda case: case.shape[1:], ("layer_norm_weight", "fc1_weight", "fc2_weight"),
        eps=_EPS, normalization="RMSNorm", activation="swiglu",
    )  # fmt: skip
    return [*fp8.ours(case, _ours, (2, 3)), *fp8.torchao(_layers, ("0.weight", "1.weight", "3.weight")), engine]


def _backend(case: BenchCase, inputs: Inputs) -> str:
    x, norm_weight, up, _ = inputs.tensors.values()
    return explain("norm_linear", x, norm_weight, up, norm="rms_norm", eps=_EPS, precision="fp8").backend


_IN_FP8 = "has no products in eight bits"
BENCH = OpBench(
    OP, _SHAPES.cases(_case), _inputs, _contenders, _formula, _tiny, _backend,
    without={"Liger": _IN_FP8, "QuACK": _IN_FP8, "Apex": _IN_FP8, "Megatron-core": "takes them from Transformer Engine"},
    baseline=_baseline, reference=fp8.reference,
)  # fmt: skip
