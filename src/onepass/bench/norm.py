"""rms_norm and layer_norm against their peers, alone and with the residual added before; rms_norm with it added after.

Bytes     forward reads x and writes y; backward reads dy and x and writes dx. With a residual, forward reads x and the residual
          and writes the norm and the sum. Backward then reads the gradients of both results and the sum, and writes one gradient
          for both inputs. Added after, forward reads one more tensor, and backward no more. Weight and bias are one row each and
          are not counted.
Gradients of all inputs: x, the residual, the weight and the bias.
Peers     eager and torch.compile: F.rms_norm and F.layer_norm, after or before an addition if there is a residual.
          Liger: writes its RMSNorm's gradient over the incoming one, as its module does by default. "Liger CuTe" has its
          kernels in the CuTe DSL, which refuse wide rows.
          QuACK: its layer norm is a forward and a backward function, wrapped in an autograd.Function here. Forward needs weight
          and bias in fp32; they are converted once and not timed.
          Apex: its fast layer norm, for the hidden sizes that it lists, and its general one.
          Transformer Engine: its modules, with the same parameters.
          cuDNN frontend: its functions, which build a graph for each shape. LayerNorm's parameters are converted to fp32 once.
          Only Liger and QuACK have a function that adds a residual, for RMSNorm. None has a mode for a fixed order.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass.bench.define import OpBench, Random, Run, Shape, Shapes, bind, by_pytorch
from onepass.bench.model import BenchCase, Call, Contender, Inputs, Result
from onepass.bench.peers import imported, in_fp32, liger_rows, once, wide, with_parameters
from onepass.ops.norm.norm import layer_norm_reference, rms_norm_reference

_ADDING, _ADDED = "+residual", "+post_residual"
_EPS = {"rms": 1e-6, "layer": 1e-5}
_SHAPES = Shapes(
    gpu={  # first those that notes cite; then query and key heads, one row, odd sizes, the widest
        "rms": [
            (16384, 1024), (16384, 4096), (16384, 8192), (4096, 32768), (2048, 65536), (256, 4096),
            (262144, 64), (131072, 128), (1, 8192), (4096, 5000), (777, 53248), (1024, 131072),
        ],
        "layer": [(16384, 4096), (8192, 12288), (65536, 768), (4096, 5000), (2048, 25600), (512, 131072)],
        "rms+residual": [(16384, 4096), (8192, 7168)],
        "layer+residual": [(16384, 4096)],
        "rms+post_residual": [(16384, 4096), (8192, 7168), (16384, 1024)],
    },
    gpu_quick={
        "rms": [(256, 4096), (4096, 5000)], "layer": [(2048, 4096)], "rms+residual": [(2048, 4096)],
        "rms+post_residual": [(2048, 4096)],
    },
    cpu={
        "rms": [(2048, 4096), (50_000, 64), (777, 5000)],
        "layer": [(1024, 4096), (777, 5000)],  # with more rows, PyTorch's bf16 sums for dweight on a CPU are too inaccurate
        "rms+residual": [(2048, 4096)],
        "layer+residual": [(777, 5000)],
        "rms+post_residual": [(2048, 4096)],
    },
    cpu_quick={"rms": [(512, 2048), (20_000, 64)], "layer": [(512, 2048)], "rms+residual": [(512, 2048)]},
)  # fmt: skip


def _kind(case: BenchCase) -> str:
    return case.variant.partition("+")[0]


def _adds(case: BenchCase) -> bool:
    return case.variant.endswith(_ADDING)


def _is_added(case: BenchCase) -> bool:
    return case.variant.endswith(_ADDED)


def _bytes_moved(variant: str, shape: Shape, size: int) -> tuple[int, int]:
    once = shape[0] * shape[1] * size
    return (4 * once, 4 * once) if variant.endswith(_ADDING) else ((3 if variant.endswith(_ADDED) else 2) * once, 3 * once)


def _inputs(case: BenchCase, random: Random) -> Inputs:
    rows, hidden = case.shape
    tensors, grads = {"x": random.input(rows, hidden), "weight": random.parameter(hidden)}, {"y": random(rows, hidden)}
    if _kind(case) == "layer":
        tensors["bias"] = random.parameter(hidden)
    if _adds(case):
        tensors["residual"], grads["h"] = random.input(rows, hidden), random(rows, hidden)
    if _is_added(case):
        tensors["post_residual"] = random.input(rows, hidden)
    return Inputs(tensors, frozenset({"x", "residual", "post_residual"} & tensors.keys()), grads)


def _options(case: BenchCase) -> dict[str, Any]:
    return {"eps": _EPS[_kind(case)]}


def _keywords(case: BenchCase) -> tuple[str, ...]:
    return ("residual",) if _adds(case) else ("post_residual",) if _is_added(case) else ()


def _formula(case: BenchCase) -> Call:
    """Return the formula. It normalises the sum as it is stored: rounded to the case's dtype."""
    function: Callable[..., Any] = rms_norm_reference if _kind(case) == "rms" else layer_norm_reference
    return bind(function, _options(case) | {"stored": case.dtype}, _keywords(case))


def _eager(case: BenchCase, run: Run) -> Call:
    hidden, eps = case.shape[-1:], _EPS[_kind(case)]
    norm: Callable[..., Tensor] = F.rms_norm if _kind(case) == "rms" else F.layer_norm

    def alone(x: Tensor, *parameters: Tensor) -> Result:
        return norm(x, hidden, *parameters, eps)

    def adding(x: Tensor, *tensors: Tensor) -> Result:
        *parameters, residual = tensors
        h = x + residual
        return norm(h, hidden, *parameters, eps), h

    def added(x: Tensor, *tensors: Tensor) -> Result:
        *parameters, residual = tensors
        return residual + norm(x, hidden, *parameters, eps)

    return run(adding if _adds(case) else added if _is_added(case) else alone)


# ---- the peers' own functions ----


def _by_liger(case: BenchCase, function: Callable[..., Any]) -> Call:
    eps = _EPS[_kind(case)]
    if _adds(case):
        return lambda x, weight, residual: function(x, residual, weight, eps)
    return lambda *tensors: function(*tensors, eps)


def _quack(case: BenchCase) -> Call:
    function = partial(imported("quack", "rmsnorm"), eps=_EPS["rms"])
    if _adds(case):
        return lambda x, weight, residual: function(x, weight, residual=residual, prenorm=True)
    return function


class _QuackLayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, wide: list[Tensor], functions: Any) -> Any:
        y, rstd, mean = functions.layernorm_fwd(x, *wide, eps=_EPS["layer"], return_rstd=True, return_mean=True)
        ctx.save_for_backward(x, weight, rstd, mean)
        ctx.functions = functions
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight, rstd, mean = ctx.saved_tensors
        return *ctx.functions.layernorm_bwd(x, weight, dy, rstd, mean), None, None


def _quack_layer(case: BenchCase) -> Call:
    functions = importlib.import_module("quack.rmsnorm")  # not an attribute of the package: that one is the function
    function: Callable[..., Tensor] = _QuackLayerNorm.apply
    converted = once(wide)
    return lambda x, weight, bias: function(x, weight, bias, converted(weight, bias), functions)


def _cudnn(case: BenchCase) -> Call:
    kind = _kind(case)
    function, converted = partial(imported("cudnn.ops.norm", f"{kind}_norm"), eps=_EPS[kind]), in_fp32()
    if kind == "rms":
        return function
    return lambda x, weight, bias: function(x, case.shape[-1:], *converted(weight, bias))


def _apex(case: BenchCase) -> Call:
    kind = _kind(case)
    function = imported("apex.normalization.fused_layer_norm", f"fused_{kind}_norm_affine")
    return partial(function, normalized_shape=case.shape[-1:], eps=_EPS[kind])


def _apex_fast(case: BenchCase) -> Call:
    function = imported("apex.contrib.layer_norm.layer_norm", "_fast_layer_norm")
    return partial(function, epsilon=_EPS["layer"])


def _transformer_engine(case: BenchCase) -> Call:
    kind = _kind(case)
    module = imported("transformer_engine.pytorch", "RMSNorm" if kind == "rms" else "LayerNorm")
    names = ("weight",) if kind == "rms" else ("weight", "bias")
    return with_parameters(module(case.shape[-1], eps=_EPS[kind], dtype=case.dtype), names)


_LIGER = {"rms": "RMSNorm", "layer": "LayerNorm", "rms+residual": "FusedAddRMSNorm"}


def _peers(case: BenchCase) -> list[Contender]:
    peers = by_pytorch(_eager)
    if case.variant in _LIGER:
        module = f"fused_add_{_kind(case)}_norm" if _adds(case) else f"{_kind(case)}_norm"
        peers += liger_rows(_by_liger, f"liger_kernel.ops.{module}", f"Liger{_LIGER[case.variant]}Function", module)
        peers.append(Contender("QuACK", _quack if _kind(case) == "rms" else _quack_layer, "QuACK"))
    if not _adds(case) and not _is_added(case):
        peers += [Contender("cuDNN frontend", _cudnn, "cuDNN frontend"), Contender("Apex", _apex, "Apex")]
        peers += [Contender("Apex, fast", _apex_fast, "Apex")] if case.variant == "layer" else []
        peers.append(Contender("Transformer Engine", _transformer_engine, "Transformer Engine"))
    return peers


BENCH = OpBench(
    "norm", _SHAPES, (64, 1024), _bytes_moved, _inputs, _peers,
    name=lambda case: f"{_kind(case)}_norm", options=_options, keywords=_keywords, formula=_formula,
    without={"Megatron-core": "takes its norms from Apex, Transformer Engine or PyTorch"},
)  # fmt: skip
