"""bias_activation against its peers: bias and activation, and backward with the bias gradient.

Bytes     forward reads x and writes y; backward reads dy and x and writes dx. The bias and its gradient are one row each and are
          not counted.
Peers     eager and torch.compile: the addition and the activation's formula.
          Liger: an activation without a bias, so eager code adds it before. A contender of its own is Liger's function for a
          gate and a linear part in one tensor (swiglu only).
          Megatron-core: the function that its configuration selects. For quick_geglu that is the one for experts, with token
          weights of 1. It sums the bias gradient from a rounded tensor, which is allowed, as in eager code.
          QuACK and Apex fuse activations into matrix products only. Transformer Engine has activations without a bias, and
          fuses a bias only inside its MLP.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from onepass.bench.model import BenchCase, Call, Contender, Inputs, OpBench, Result
from onepass.bench.peers import compiled, imported
from onepass.ops.activation.activations import find_activation
from onepass.ops.activation.bias_activation import bias_activation, bias_activation_reference
from onepass.runtime.backend import explain

OP = "bias_activation"
_GATED = ("swiglu", "geglu", "quick_geglu")
_ALL = ("gelu", *_GATED)


def _case(variant: str, rows: int, width: int, dtype: torch.dtype) -> BenchCase:
    parts = 2 if variant in _GATED else 1
    one = rows * width * dtype.itemsize  # y's bytes
    return BenchCase(OP, variant, (rows, width), dtype, (parts + 1) * one, (2 * parts + 1) * one)


def _cases(device: torch.device, dtype: torch.dtype, quick: bool) -> list[BenchCase]:
    """Return the cases. A shape is (rows, width of the output); x is twice as wide if there is a gate."""
    if device.type == "cuda" and not quick:
        shapes = [(variant, 16384, 16384 if variant == "gelu" else 14336) for variant in _ALL]
        shapes += [(variant, 2048, 16384) for variant in _ALL]
        shapes += [(variant, *shape) for shape in ((600_000, 64), (777, 5000), (131_072, 1408)) for variant in ("gelu", "swiglu")]
    elif device.type == "cuda":
        shapes = [("gelu", 2048, 16384), ("swiglu", 2048, 16384), ("swiglu", 777, 5000)]
    elif not quick:
        shapes = [(variant, 2048, 4096) for variant in _ALL]
        shapes += [(variant, *shape) for shape in ((50_000, 64), (777, 5000)) for variant in ("gelu", "swiglu")]
    else:
        shapes = [("gelu", 512, 2048), ("swiglu", 512, 2048), ("geglu", 512, 2048), ("swiglu", 20_000, 64)]
    order = {variant: i for i, variant in enumerate(_ALL)}  # by variant: its cases reuse compiled kernels
    return [_case(*shape, dtype) for shape in sorted(shapes, key=lambda shape: order[shape[0]])]


def _tiny(case: BenchCase) -> BenchCase:
    return _case(case.variant, 64, 1024, case.dtype)


def _inputs(case: BenchCase, device: torch.device, generator: torch.Generator) -> Inputs:
    rows, width = case.shape
    wide = 2 * width if case.variant in _GATED else width

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=case.dtype)

    x, bias, dy = random(rows, wide), random(wide), random(rows, width)
    return Inputs({"x": x.requires_grad_(), "bias": bias.requires_grad_()}, frozenset({"x"}), {"y": dy})


def _formula(case: BenchCase) -> Call:
    return partial(bias_activation_reference, activation=case.variant)


# ---- onepass and eager code ----


def _ours(case: BenchCase) -> Call:
    return partial(bias_activation, activation=case.variant)


def _eager(case: BenchCase) -> Call:
    act = find_activation(case.variant).formula

    def plain(x: Tensor, bias: Tensor) -> Tensor:
        return act(x + bias)

    def gated(x: Tensor, bias: Tensor) -> Tensor:
        gate, linear = (x + bias).chunk(2, -1)
        return act(gate) * linear

    return gated if case.variant in _GATED else plain


def _compiled(case: BenchCase) -> Call:
    return compiled(_eager(case))


# ---- the peers' own functions ----


def _liger(case: BenchCase) -> Call:
    module, name = {
        "swiglu": ("liger_kernel.ops.swiglu", "LigerSiLUMulFunction"),
        "geglu": ("liger_kernel.ops.geglu", "LigerGELUMulFunction"),
    }[case.variant]
    function = imported(module, name).apply

    def call(x: Tensor, bias: Tensor) -> Tensor:
        gate, linear = (x + bias).chunk(2, -1)
        y: Tensor = function(gate, linear)
        return y

    return call


def _liger_one_tensor(case: BenchCase) -> Call:
    function = imported("liger_kernel.ops.swiglu", "LigerFusedGateUpSiLUMulFunction").apply

    def call(x: Tensor, bias: Tensor) -> Tensor:
        y: Tensor = function(x + bias)
        return y

    return call


def _megatron(case: BenchCase) -> Call:
    module, name = {
        "gelu": ("fused_bias_gelu", "bias_gelu_impl"),
        "swiglu": ("fused_bias_swiglu", "bias_swiglu_impl"),
        "geglu": ("fused_bias_geglu", "bias_geglu_impl"),
        "quick_geglu": ("fused_bias_geglu", "weighted_bias_quick_geglu_impl"),
    }[case.variant]
    function: Call = imported(f"megatron.core.fusions.{module}", name)
    if case.variant != "quick_geglu":
        return function
    ones: list[Tensor] = []  # made once and not timed: in a model the router provides them

    def with_ones(x: Tensor, bias: Tensor) -> Result:
        if not ones:
            ones.append(torch.ones(x.shape[0], 1, device=x.device))  # fp32, as a router's weights are
        return function(x, bias, ones[0])

    return with_ones


def _contenders(case: BenchCase) -> list[Contender]:
    found = [
        Contender("onepass", _ours, ours=True),
        Contender("eager", _eager),
        Contender("torch.compile", _compiled, compiles=True),
    ]
    if case.variant in ("swiglu", "geglu"):
        found.append(Contender("Liger", _liger, package="Liger"))
    if case.variant == "swiglu":
        found.append(Contender("Liger, one tensor", _liger_one_tensor, package="Liger"))
    found.append(Contender("Megatron-core", _megatron, package="Megatron-core", compiles=True))
    return found


def _backend(case: BenchCase, inputs: Inputs) -> str:
    return explain(OP, *inputs.tensors.values(), activation=case.variant).backend


_IN_PRODUCTS = "has activations in matrix products only"
BENCH = OpBench(
    OP, _cases, _inputs, _contenders, _formula, _tiny, _backend,
    without={"QuACK": _IN_PRODUCTS, "Apex": _IN_PRODUCTS, "Transformer Engine": "fuses a bias into its MLP's gelu only"},
)  # fmt: skip
