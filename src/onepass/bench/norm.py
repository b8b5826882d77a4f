"""rms_norm and layer_norm against their peers, alone and with the residual added before.

Bytes     forward reads x and writes y; backward reads dy and x and writes dx. With a residual, forward reads x and the residual
          and writes the norm and the sum. Backward then reads the gradients of both results and the sum, and writes one gradient
          for both inputs. Weight and bias are one row each and are not counted.
Gradients of all inputs: x, the residual, the weight and the bias.
Peers     eager and torch.compile: F.rms_norm and F.layer_norm, after an addition if there is a residual.
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
from torch.nn import Parameter

from onepass.bench.model import BenchCase, Call, Contender, Inputs, OpBench, Result
from onepass.bench.peers import compiled, imported, in_fp32, liger_cute, needs_cute, with_parameters
from onepass.ops.norm.norm import layer_norm, layer_norm_reference, rms_norm, rms_norm_reference
from onepass.runtime.backend import explain

OP = "norm"
_VARIANTS = ("rms", "layer", "rms+residual", "layer+residual")
_EPS = {"rms": 1e-6, "layer": 1e-5}


def _kind(case: BenchCase) -> str:
    return case.variant.removesuffix("+residual")


def _adds(case: BenchCase) -> bool:
    return case.variant.endswith("+residual")


def _case(variant: str, rows: int, hidden: int, dtype: torch.dtype) -> BenchCase:
    forward, backward = (4, 4) if variant.endswith("+residual") else (2, 3)
    one = rows * hidden * dtype.itemsize
    return BenchCase(OP, variant, (rows, hidden), dtype, forward * one, backward * one)


_TARGETS = {  # the cases that issues and notes cite
    "rms": [(16384, 1024), (16384, 4096), (16384, 8192), (4096, 32768), (2048, 65536), (256, 4096)],
    "layer": [(16384, 4096), (8192, 12288)],
    "rms+residual": [(16384, 4096)],
}
_FURTHER = {  # query and key heads, one row, odd sizes, the widest
    "rms": [(262144, 64), (131072, 128), (1, 8192), (4096, 5000), (777, 53248), (1024, 131072)],
    "layer": [(65536, 768), (4096, 5000), (2048, 25600), (512, 131072)],
    "rms+residual": [(8192, 7168)],
    "layer+residual": [(16384, 4096)],
}
_FEW = {
    "rms": [(256, 4096), (4096, 5000)],
    "layer": [(2048, 4096)],
    "rms+residual": [(2048, 4096)],
}
_CPU = {
    "rms": [(2048, 4096), (50_000, 64), (777, 5000)],
    "layer": [(1024, 4096), (777, 5000)],  # with more rows, PyTorch's bf16 sums for dweight on a CPU are too inaccurate
    "rms+residual": [(2048, 4096)],
    "layer+residual": [(777, 5000)],
}
_CPU_FEW = {"rms": [(512, 2048), (20_000, 64)], "layer": [(512, 2048)], "rms+residual": [(512, 2048)]}


def _cases(device: torch.device, dtype: torch.dtype, quick: bool) -> list[BenchCase]:
    """Return the cases sorted by variant, so that a variant's cases reuse compiled kernels."""
    full, few = ([_TARGETS, _FURTHER], [_FEW]) if device.type == "cuda" else ([_CPU], [_CPU_FEW])
    chosen = few if quick else full
    return [_case(variant, *shape, dtype) for variant in _VARIANTS for shapes in chosen for shape in shapes.get(variant, ())]


def _tiny(case: BenchCase) -> BenchCase:
    return _case(case.variant, 64, 1024, case.dtype)


def _inputs(case: BenchCase, device: torch.device, generator: torch.Generator) -> Inputs:
    rows, hidden = case.shape

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=case.dtype)

    tensors = {"x": random(rows, hidden).requires_grad_(), "weight": Parameter(random(hidden))}
    grads = {"y": random(rows, hidden)}
    if _kind(case) == "layer":
        tensors["bias"] = Parameter(random(hidden))
    if _adds(case):
        tensors["residual"] = random(rows, hidden).requires_grad_()
        grads["h"] = random(rows, hidden)
    return Inputs(tensors, frozenset({"x", "residual"} & tensors.keys()), grads)


def _formula(case: BenchCase) -> Call:
    """Return the formula. It normalises the sum as it is stored: rounded to the case's dtype."""
    options: dict[str, Any] = {"eps": _EPS[_kind(case)], "zero_centered_gamma": False, "stored": case.dtype}

    def rms(x: Tensor, weight: Tensor, residual: Tensor | None = None) -> Result:
        return rms_norm_reference(x, weight, residual, **options)

    def layer(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None = None) -> Result:
        return layer_norm_reference(x, weight, bias, residual, **options)

    return rms if _kind(case) == "rms" else layer


# ---- onepass and eager code ----


def _ours(case: BenchCase) -> Call:
    def rms_adding(x: Tensor, weight: Tensor, residual: Tensor) -> Result:
        return rms_norm(x, weight, _EPS["rms"], residual=residual)

    def layer_adding(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor) -> Result:
        return layer_norm(x, weight, bias, _EPS["layer"], residual=residual)

    if _adds(case):
        return rms_adding if _kind(case) == "rms" else layer_adding
    return partial(rms_norm if _kind(case) == "rms" else layer_norm, eps=_EPS[_kind(case)])


def _eager(case: BenchCase) -> Call:
    hidden, eps = case.shape[-1:], _EPS[_kind(case)]

    def rms(x: Tensor, weight: Tensor) -> Result:
        return F.rms_norm(x, hidden, weight, eps)

    def layer(x: Tensor, weight: Tensor, bias: Tensor) -> Result:
        return F.layer_norm(x, hidden, weight, bias, eps)

    def rms_adding(x: Tensor, weight: Tensor, residual: Tensor) -> Result:
        h = x + residual
        return F.rms_norm(h, hidden, weight, eps), h

    def layer_adding(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor) -> Result:
        h = x + residual
        return F.layer_norm(h, hidden, weight, bias, eps), h

    if _adds(case):
        return rms_adding if _kind(case) == "rms" else layer_adding
    return rms if _kind(case) == "rms" else layer


def _compiled(case: BenchCase) -> Call:
    return compiled(_eager(case))


# ---- the peers' own functions ----


def _liger(case: BenchCase) -> Call:
    module, name = {
        "rms": ("rms_norm", "LigerRMSNormFunction"),
        "layer": ("layer_norm", "LigerLayerNormFunction"),
        "rms+residual": ("fused_add_rms_norm", "LigerFusedAddRMSNormFunction"),
    }[case.variant]
    return _by_liger(case, imported(f"liger_kernel.ops.{module}", name).apply)


def _liger_cute(case: BenchCase) -> Call:
    return _by_liger(case, liger_cute("fused_add_rms_norm" if _adds(case) else f"{_kind(case)}_norm"))


def _by_liger(case: BenchCase, function: Callable[..., Any]) -> Call:
    eps = _EPS[_kind(case)]

    def rms(x: Tensor, weight: Tensor) -> Result:
        y: Tensor = function(x, weight, eps)
        return y

    def layer(x: Tensor, weight: Tensor, bias: Tensor) -> Result:
        y: Tensor = function(x, weight, bias, eps)
        return y

    def rms_adding(x: Tensor, weight: Tensor, residual: Tensor) -> Result:
        y, h = function(x, residual, weight, eps)
        return y, h

    if _adds(case):
        return rms_adding
    return rms if _kind(case) == "rms" else layer


def _quack(case: BenchCase) -> Call:
    function = partial(imported("quack", "rmsnorm"), eps=_EPS["rms"])

    def adding(x: Tensor, weight: Tensor, residual: Tensor) -> Result:
        y, h = function(x, weight, residual=residual, prenorm=True)
        return y, h

    return adding if _adds(case) else function


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
    held: list[Tensor] = []
    wide: list[Tensor] = []

    def call(x: Tensor, weight: Tensor, bias: Tensor) -> Result:
        if not held or held[0] is not weight:
            held[:] = weight, bias
            wide[:] = weight.detach().float(), bias.detach().float()
        return function(x, weight, bias, wide, functions)

    return call


def _cudnn(case: BenchCase) -> Call:
    kind = _kind(case)
    function, wide = imported("cudnn.ops.norm", f"{kind}_norm"), in_fp32()

    def layer(x: Tensor, weight: Tensor, bias: Tensor) -> Result:
        y: Tensor = function(x, case.shape[-1:], *wide(weight, bias), eps=_EPS["layer"])
        return y

    return layer if kind == "layer" else partial(function, eps=_EPS["rms"])


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


_PACKAGES: dict[str, list[tuple[str, str, Callable[[BenchCase], Call]]]] = {
    "rms": [
        ("Liger", "Liger", _liger), ("Liger CuTe", "Liger", _liger_cute), ("QuACK", "QuACK", _quack),
        ("cuDNN frontend", "cuDNN frontend", _cudnn), ("Apex", "Apex", _apex),
    ],
    "layer": [
        ("Liger", "Liger", _liger), ("Liger CuTe", "Liger", _liger_cute), ("QuACK", "QuACK", _quack_layer),
        ("cuDNN frontend", "cuDNN frontend", _cudnn), ("Apex", "Apex", _apex), ("Apex, fast", "Apex", _apex_fast),
    ],
    "rms+residual": [("Liger", "Liger", _liger), ("Liger CuTe", "Liger", _liger_cute), ("QuACK", "QuACK", _quack)],
    "layer+residual": [],
}  # fmt: skip


def _contenders(case: BenchCase) -> list[Contender]:
    found = [
        Contender("onepass", _ours, ours=True),
        Contender("eager", _eager),
        Contender("torch.compile", _compiled, compiles=True),
    ]
    for name, package, make in _PACKAGES[case.variant]:
        found.append(Contender(name, make, package, lacks=needs_cute() if make is _liger_cute else None))
    if not _adds(case):
        found.append(Contender("Transformer Engine", _transformer_engine, "Transformer Engine"))
    return found


def _backend(case: BenchCase, inputs: Inputs) -> str:
    given = dict(inputs.tensors)
    residual = given.pop("residual", None)
    return explain(f"{_kind(case)}_norm", *given.values(), residual=residual).backend


BENCH = OpBench(
    OP, _cases, _inputs, _contenders, _formula, _tiny, _backend,
    without={"Megatron-core": "takes its norms from Apex, Transformer Engine or PyTorch"},
)  # fmt: skip
