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

from functools import partial

import torch
from torch import Tensor

from onepass.bench.model import BenchCase, Call, Contender, Inputs, OpBench, Result
from onepass.bench.peers import compiled, imported, liger_cute, needs_cute, on_copies
from onepass.ops.activation.activations import find_activation
from onepass.ops.activation.bias_activation import bias_activation, bias_activation_reference
from onepass.runtime.backend import explain

OP = "bias_activation"
_GATED = ("swiglu", "geglu", "quick_geglu")
_ALL = ("gelu", *_GATED)
_TWO = " two tensors"
_PAIRS = tuple(f"{activation}{_TWO}" for activation in ("swiglu", "geglu"))


def _case(variant: str, rows: int, width: int, dtype: torch.dtype) -> BenchCase:
    parts = 1 if variant == "gelu" else 2
    one = rows * width * dtype.itemsize  # y's bytes
    return BenchCase(OP, variant, (rows, width), dtype, (parts + 1) * one, (2 * parts + 1) * one)


def _cases(device: torch.device, dtype: torch.dtype, quick: bool) -> list[BenchCase]:
    """Return the cases. A shape is (rows, width of the output); x is twice as wide if there is a gate."""
    if device.type == "cuda" and not quick:
        shapes = [(variant, 16384, 16384 if variant == "gelu" else 14336) for variant in _ALL]
        shapes += [(variant, 2048, 16384) for variant in _ALL]
        shapes += [(variant, *shape) for shape in ((600_000, 64), (777, 5000), (131_072, 1408)) for variant in ("gelu", "swiglu")]
        shapes += [(variant, *shape) for shape in ((16384, 14336), (2048, 16384), (131_072, 1408)) for variant in _PAIRS]
    elif device.type == "cuda":
        shapes = [("gelu", 2048, 16384), ("swiglu", 2048, 16384), ("swiglu", 777, 5000), (_PAIRS[0], 2048, 16384)]
    elif not quick:
        shapes = [(variant, 2048, 4096) for variant in (*_ALL, *_PAIRS)]
        shapes += [(variant, *shape) for shape in ((50_000, 64), (777, 5000)) for variant in ("gelu", "swiglu")]
    else:
        shapes = [(variant, 512, 2048) for variant in ("gelu", "swiglu", "geglu", _PAIRS[0])] + [("swiglu", 20_000, 64)]
    order = {variant: i for i, variant in enumerate((*_ALL, *_PAIRS))}  # by variant: its cases reuse compiled kernels
    return [_case(*shape, dtype) for shape in sorted(shapes, key=lambda shape: order[shape[0]])]


def _tiny(case: BenchCase) -> BenchCase:
    return _case(case.variant, 64, 1024, case.dtype)


def _inputs(case: BenchCase, device: torch.device, generator: torch.Generator) -> Inputs:
    rows, width = case.shape
    wide = 2 * width if case.variant in _GATED else width

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=case.dtype)

    if case.variant in _PAIRS:
        gate, linear = (random(rows, width).requires_grad_() for _ in range(2))
        return Inputs({"x": gate, "linear": linear}, frozenset({"x", "linear"}), {"y": random(rows, width)})
    x, bias, dy = random(rows, wide), random(wide), random(rows, width)
    return Inputs({"x": x.requires_grad_(), "bias": bias.requires_grad_()}, frozenset({"x"}), {"y": dy})


def _activation(case: BenchCase) -> str:
    return case.variant.removesuffix(_TWO)


def _of_two(case: BenchCase, function: Call) -> Call:
    """Return a function of the case's tensors: of x and bias, or of a gate and a linear part."""

    def two(x: Tensor, linear: Tensor) -> Result:
        return function(x, None, activation=_activation(case), linear=linear)

    return two if case.variant in _PAIRS else partial(function, activation=_activation(case))


def _formula(case: BenchCase) -> Call:
    return _of_two(case, bias_activation_reference)


# ---- onepass and eager code ----


def _ours(case: BenchCase) -> Call:
    return _of_two(case, bias_activation)


def _eager(case: BenchCase) -> Call:
    act = find_activation(_activation(case)).formula

    def plain(x: Tensor, bias: Tensor) -> Tensor:
        return act(x + bias)

    def gated(x: Tensor, bias: Tensor) -> Tensor:
        gate, linear = (x + bias).chunk(2, -1)
        return act(gate) * linear

    def two(x: Tensor, linear: Tensor) -> Tensor:
        return act(x) * linear

    return two if case.variant in _PAIRS else gated if case.variant in _GATED else plain


def _compiled(case: BenchCase) -> Call:
    return compiled(_eager(case))


# ---- the peers' own functions ----


def _liger(case: BenchCase) -> Call:
    module, name = {
        "swiglu": ("liger_kernel.ops.swiglu", "LigerSiLUMulFunction"),
        "geglu": ("liger_kernel.ops.geglu", "LigerGELUMulFunction"),
    }[_activation(case)]
    return _by_liger(case, imported(module, name).apply)


def _liger_cute(case: BenchCase) -> Call:
    return _by_liger(case, liger_cute(_activation(case)))


def _by_liger(case: BenchCase, function: Call) -> Call:
    if case.variant in _PAIRS:
        return on_copies(function, 2)  # it writes gradients over its arguments

    def call(x: Tensor, bias: Tensor) -> Result:
        gate, linear = (x + bias).chunk(2, -1)
        return function(gate, linear)

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
    if _activation(case) in ("swiglu", "geglu"):
        found.append(Contender("Liger", _liger, package="Liger"))
        found.append(Contender("Liger CuTe", _liger_cute, package="Liger", lacks=needs_cute()))
    if case.variant == "swiglu":
        found.append(Contender("Liger, one tensor", _liger_one_tensor, package="Liger"))
    if case.variant not in _PAIRS:
        found.append(Contender("Megatron-core", _megatron, package="Megatron-core", compiles=True))
    return found


def _backend(case: BenchCase, inputs: Inputs) -> str:
    return explain(OP, activation=_activation(case), **inputs.tensors).backend


_IN_PRODUCTS = "has activations in matrix products only"
BENCH = OpBench(
    OP, _cases, _inputs, _contenders, _formula, _tiny, _backend,
    without={"QuACK": _IN_PRODUCTS, "Apex": _IN_PRODUCTS, "Transformer Engine": "fuses a bias into its MLP's gelu only"},
)  # fmt: skip
