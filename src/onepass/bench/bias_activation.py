"""bias_activation against its peers: bias and activation, and backward with the bias gradient.

"two tensors": a gate and a linear part that two products gave, without a bias.

Bytes     forward reads x and writes y; backward reads dy and x and writes dx. The bias and its gradient are one row each and are
          not counted. x is both of two tensors.
Peers     eager and torch.compile: the addition and the activation's formula.
          Liger: an activation without a bias, so eager code adds it before. A contender of its own is Liger's function for a
          gate and a linear part in one tensor (swiglu only). Its others take two tensors. "Liger CuTe" has its kernels in
          the CuTe DSL.
          Megatron-core: the function that its configuration selects. For quick_geglu that is the one for experts, with token
          weights of 1. It sums the bias gradient from a rounded tensor, which is allowed, as in eager code.
          QuACK and Apex fuse activations into matrix products only. Transformer Engine has activations without a bias, and
          fuses a bias only inside its MLP.
"""

from __future__ import annotations

import torch
from torch import Tensor

from onepass.bench.define import OpBench, Random, Run, Shape, Shapes, by_pytorch, of_each
from onepass.bench.model import BenchCase, Call, Contender, Inputs
from onepass.bench.peers import imported, liger_rows, on_copies, once
from onepass.ops.activation.activations import find_activation

_GATED = ("swiglu", "geglu", "quick_geglu")
_TWO = " two tensors"
_PAIRS = tuple(f"{activation}{_TWO}" for activation in ("swiglu", "geglu"))
_FURTHER = [(600_000, 64), (777, 5000), (131_072, 1408)]
_SHAPES = Shapes(  # rows, width of the output; x is twice as wide if there is a gate
    gpu={
        "gelu": [(16384, 16384), (2048, 16384), *_FURTHER],
        "swiglu": [(16384, 14336), (2048, 16384), *_FURTHER],
        **of_each(_GATED[1:], [(16384, 14336), (2048, 16384)]),
        **of_each(_PAIRS, [(16384, 14336), (2048, 16384), (131_072, 1408)]),
    },
    gpu_quick={"gelu": [(2048, 16384)], "swiglu": [(2048, 16384), (777, 5000)], _PAIRS[0]: [(2048, 16384)]},
    cpu={
        **of_each(("gelu", "swiglu"), [(2048, 4096), (50_000, 64), (777, 5000)]),
        **of_each((*_GATED[1:], *_PAIRS), [(2048, 4096)]),
    },
    cpu_quick={"gelu": [(512, 2048)], "swiglu": [(512, 2048), (20_000, 64)], "geglu": [(512, 2048)], _PAIRS[0]: [(512, 2048)]},
)


def _bytes_moved(variant: str, shape: Shape, size: int) -> tuple[int, int]:
    parts, y = 1 if variant == "gelu" else 2, shape[0] * shape[1] * size
    return (parts + 1) * y, (2 * parts + 1) * y


def _inputs(case: BenchCase, random: Random) -> Inputs:
    rows, width = case.shape
    if case.variant in _PAIRS:
        tensors = {"x": random.input(rows, width), "linear": random.input(rows, width)}
    else:
        wide = 2 * width if case.variant in _GATED else width
        tensors = {"x": random.input(rows, wide), "bias": random.parameter(wide)}
    return Inputs(tensors, frozenset({"x", "linear"} & tensors.keys()), {"y": random(rows, width)})


def _activation(case: BenchCase) -> str:
    return case.variant.removesuffix(_TWO)


def _eager(case: BenchCase, run: Run) -> Call:
    act = find_activation(_activation(case)).formula

    def gated(x: Tensor, bias: Tensor) -> Tensor:
        gate, linear = (x + bias).chunk(2, -1)
        return act(gate) * linear

    if case.variant in _PAIRS:
        return run(lambda x, linear: act(x) * linear)
    return run(gated if case.variant in _GATED else lambda x, bias: act(x + bias))


# ---- the peers' own functions ----


def _by_liger(case: BenchCase, function: Call) -> Call:
    if case.variant in _PAIRS:
        return on_copies(function, 2)  # it writes gradients over its arguments
    return lambda x, bias: function(*(x + bias).chunk(2, -1))


def _liger_one_tensor(case: BenchCase) -> Call:
    function = imported("liger_kernel.ops.swiglu", "LigerFusedGateUpSiLUMulFunction").apply
    return lambda x, bias: function(x + bias)


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
    ones = once(lambda x: torch.ones(x.shape[0], 1, device=x.device))  # fp32, as the weights that a model's router provides
    return lambda x, bias: function(x, bias, ones(x))


_LIGER = {"swiglu": "LigerSiLUMulFunction", "geglu": "LigerGELUMulFunction"}


def _peers(case: BenchCase) -> list[Contender]:
    peers, activation = by_pytorch(_eager), _activation(case)
    if activation in _LIGER:
        peers += liger_rows(_by_liger, f"liger_kernel.ops.{activation}", _LIGER[activation], activation)
    if case.variant == "swiglu":
        peers.append(Contender("Liger, one tensor", _liger_one_tensor, package="Liger"))
    if case.variant not in _PAIRS:
        peers.append(Contender("Megatron-core", _megatron, package="Megatron-core", compiles=True))
    return peers


_IN_PRODUCTS = "has activations in matrix products only"
BENCH = OpBench(
    "bias_activation", _SHAPES, (64, 1024), _bytes_moved, _inputs, _peers,
    options=lambda case: {"activation": _activation(case)},
    keywords=lambda case: ("linear",) if case.variant in _PAIRS else (),
    without={"QuACK": _IN_PRODUCTS, "Apex": _IN_PRODUCTS, "Transformer Engine": "fuses a bias into its MLP's gelu only"},
)  # fmt: skip
