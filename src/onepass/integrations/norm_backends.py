"""Backends of rms_norm and layer_norm that run kernels of Liger, Apex and Transformer Engine, if those are installed.

Written for Liger 0.8, Apex's master of 2025 and Transformer Engine 2. A backend refuses, with the reason, calls that its kernels
can't compute as onepass defines them. A backend runs only if a caller names it. For DTensors it gets each rank's part, by the
op's own rule. Remaining differences:

    Liger               runs in fp32 arithmetic (its "gemma"), and doesn't overwrite the incoming gradient, as its default does;
                        silently loses a derivative of its gradients
    Apex                rounds the normalised value to y's dtype before it multiplies by the weight
    Transformer Engine  runs its own kernels or cuDNN's, depending on its environment variables
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from onepass.ops.norm.norm import layer_norm, rms_norm
from onepass.runtime.backend import register_backend
from onepass.runtime.dispatch import not_twice_differentiable
from onepass.runtime.fp8 import FP8Output
from onepass.runtime.op import Reason

_TYPES = (torch.float32, torch.float16, torch.bfloat16)
_LIGER_WIDEST = 65536
_APEX_MOST = 2**31 - 1  # its kernels count elements in 32 bits


@dataclass(frozen=True)
class NormCall:
    """A call of layer_norm, with its signature, or of rms_norm (`_rms_call`)."""

    x: Tensor
    weight: Tensor | None = None
    bias: Tensor | None = None
    eps: float = 1e-5
    _: KW_ONLY
    residual: Tensor | None = None
    zero_centered_gamma: bool = False
    memory_efficient: bool = False
    out: FP8Output = None
    return_input: bool = False  # the op itself returns it, beside what a package returns
    post_residual: Tensor | None = None  # the op itself adds it
    layer: bool = True


def _rms_call(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, **options: Any) -> NormCall:
    return NormCall(x, weight, None, eps, layer=False, **options)


@dataclass(frozen=True)
class NormPackage:
    """A package with norms. `refuses` returns the reason why its kernels can't do a call on a GPU, or None."""

    name: str  # of the backend
    title: str
    modules: tuple[str, ...]  # required, top-level: find_spec imports nothing for these
    install: str
    refuses: Callable[[NormCall], Reason]
    run: Callable[[NormCall], Any]


# ---- common to all packages ----


def _unsupported(package: NormPackage, make: Callable[..., NormCall], *args: Any, **options: Any) -> Reason:
    call = make(*args, **options)
    if not _on_gpu(call.x):
        return f"x is on {call.x.device.type}, and {package.title} needs a CUDA device"
    missing = next((module for module in package.modules if not _installed(module)), None)
    if missing is not None:
        return f"{package.title} is not installed: there is no module {missing} ({package.install})"
    if call.x.dtype not in _TYPES:
        return f"x is {call.x.dtype}"
    if call.x.numel() == 0:
        return "x has no rows"
    if call.memory_efficient:
        return f"memory_efficient keeps no statistics, and {package.title} keeps them"
    if call.out is not None:
        return f"out asks for codes, which are onepass's own, not {package.title}'s"
    return package.refuses(call)


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # partly installed
        return False


def _on_gpu(x: Tensor) -> bool:
    return x.is_cuda


def _run(package: NormPackage, make: Callable[..., NormCall], *args: Any, **options: Any) -> Any:
    call = make(*args, **options)
    with torch.cuda.device_of(call.x):  # some packages launch on the current device
        return package.run(call)


def _parameters(call: NormCall) -> list[tuple[str, Tensor]]:
    named = ("weight", call.weight), ("bias", call.bias)
    return [(name, tensor) for name, tensor in named if tensor is not None]


def _mixed_types(call: NormCall, title: str) -> Reason:
    for name, tensor in _parameters(call):
        if tensor.dtype != call.x.dtype:
            return f"{name} is {tensor.dtype} and x {call.x.dtype}, and {title} takes one type"
    return None


# ---- Liger ----


def _liger_refuses(call: NormCall) -> Reason:
    for name, tensor in _parameters(call):
        if tensor.dtype not in _TYPES:
            return f"{name} is {tensor.dtype}"
    if call.x.shape[-1] > _LIGER_WIDEST:
        return f"rows of {call.x.shape[-1]} are longer than Liger's {_LIGER_WIDEST}"
    return _liger_layer_refuses(call) if call.layer else _liger_rms_refuses(call)


def _liger_layer_refuses(call: NormCall) -> Reason:
    if call.weight is None or call.bias is None:
        return "Liger's layer norm needs a weight and a bias"
    if call.zero_centered_gamma:
        return "Liger's layer norm has no zero_centered_gamma"
    return "Liger's layer norm takes no residual" if call.residual is not None else None


def _liger_rms_refuses(call: NormCall) -> Reason:
    if call.residual is None:
        return None
    if call.weight is None:
        return "Liger's norm with a residual needs a weight"
    if call.residual.dtype != call.x.dtype:  # Liger would normalise the sum before its rounding
        return f"residual is {call.residual.dtype} and x {call.x.dtype}, and Liger takes one type"
    return None


def _liger(call: NormCall) -> Any:
    offset, in_place = float(call.zero_centered_gamma), False
    if call.layer:
        from liger_kernel.ops.layer_norm import LigerLayerNormFunction

        return LigerLayerNormFunction.apply(call.x, call.weight, call.bias, call.eps)
    if call.residual is not None:
        from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction

        return LigerFusedAddRMSNormFunction.apply(call.x, call.residual, call.weight, call.eps, offset, "gemma", in_place)
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    return LigerRMSNormFunction.apply(call.x, call.weight, call.eps, offset, "gemma", in_place)


# ---- Apex ----


def _apex_refuses(call: NormCall) -> Reason:
    if call.residual is not None:
        return "Apex takes no residual"
    if call.zero_centered_gamma:
        return "Apex has no zero_centered_gamma"
    if call.layer and (call.weight is None) != (call.bias is None):
        return "Apex's layer norm needs weight and bias, or neither"
    if call.x.numel() > _APEX_MOST:
        return f"x has {call.x.numel()} elements, and Apex counts to {_APEX_MOST}"
    return _mixed_types(call, "Apex")  # Apex's function for mixed dtypes returns y in the weight's


def _apex(call: NormCall) -> Any:
    from apex.normalization import fused_layer_norm as apex

    shape = (call.x.shape[-1],)
    with torch.autocast("cuda", enabled=False):  # autocast would round x and the weights, which onepass never does
        if call.layer and call.weight is not None:
            return apex.fused_layer_norm_affine(call.x, call.weight, call.bias, shape, call.eps)
        if call.layer:
            return apex.fused_layer_norm(call.x, shape, call.eps)
        if call.weight is not None:
            return apex.fused_rms_norm_affine(call.x, call.weight, shape, call.eps)
        return apex.fused_rms_norm(call.x, shape, call.eps)


# ---- Transformer Engine: the functions below its modules, because those own their parameters ----


def _te_refuses(call: NormCall) -> Reason:
    if call.residual is not None:
        return "Transformer Engine takes no residual"
    if call.weight is None or (call.layer and call.bias is None):
        return f"Transformer Engine needs a weight{' and a bias' if call.layer else ''}"
    return _mixed_types(call, "Transformer Engine")


class _TENorm(torch.autograd.Function):
    """RMSNorm, or LayerNorm if there is a bias, of a two-dimensional x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, centered: bool) -> Tensor:
        tex, types = _te()
        x, weight = x.contiguous(), weight.contiguous()
        end = eps, None, None, types[x.dtype], 0, centered  # no output given, no quantizer, all multiprocessors
        if bias is None:
            y, mean, rstd = tex.rmsnorm_fwd(x, weight, *end)
        else:
            y, mean, rstd = tex.layernorm_fwd(x, weight, bias.contiguous(), *end)
        ctx.layer, ctx.centered = bias is not None, centered
        ctx.save_for_backward(x, weight, mean, rstd)
        done: Tensor = y
        return done

    @staticmethod
    @not_twice_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        tex, _ = _te()
        x, weight, mean, rstd = ctx.saved_tensors
        dy, dbias = dy.contiguous(), None
        if ctx.layer:
            dx, dweight, dbias = tex.layernorm_bwd(dy, x, mean, rstd, weight, 0, ctx.centered)
        else:
            dx, dweight = tex.rmsnorm_bwd(dy, x, rstd, weight, 0, ctx.centered)
        return dx, dweight, dbias, None, None


def _te() -> tuple[Any, Any]:
    """Return Transformer Engine's compiled functions, which exist once its Python package is imported, and its dtype names."""
    from transformer_engine.pytorch.constants import TE_DType

    return importlib.import_module("transformer_engine_torch"), TE_DType


def _transformer_engine(call: NormCall) -> Any:
    y: Tensor = _TENorm.apply(  # type: ignore[no-untyped-call]
        call.x.reshape(-1, call.x.shape[-1]), call.weight, call.bias, call.eps, call.zero_centered_gamma
    )
    return y.view(call.x.shape)


PACKAGES = (
    NormPackage("liger", "Liger", ("liger_kernel",), "pip install liger-kernel", _liger_refuses, _liger),
    NormPackage(
        "apex", "Apex", ("apex", "fused_layer_norm_cuda"),
        "build github.com/NVIDIA/apex with its CUDA extensions; the apex of PyPI is something else", _apex_refuses, _apex,
    ),
    NormPackage(
        "transformer_engine", "Transformer Engine", ("transformer_engine",),
        "pip install 'transformer-engine[pytorch]'", _te_refuses, _transformer_engine,
    ),
)  # fmt: skip


def register() -> None:
    """Register the packages with rms_norm, layer_norm and `explain`. Called once, when onepass is imported."""
    for package in PACKAGES:
        for op, make in ((rms_norm, _rms_call), (layer_norm, NormCall)):
            register_backend(op.__name__, package.name, partial(_run, package, make), partial(_unsupported, package, make))
