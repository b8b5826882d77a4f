"""`out=`, by which an op returns its result as codes of eight bits: what all such ops check."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from onepass.kernels.fp8_tile import SLOTS
from onepass.runtime.dispatch import needs_grad, under_functorch
from onepass.runtime.fp8 import E4M3, E5M2, FP8Target, check_gpu
from onepass.runtime.op import FORMULA, Call

FP8Output = FP8Target | str | None  # an op's argument: None is its result's own type


def output_target(out: object, x: Tensor) -> FP8Target | None:
    """Return what `out` names, or None. Raise where it names nothing, or where x can't be rounded so."""
    if out is None:
        return None
    if out == "fp8":
        target = FP8Target()
    elif isinstance(out, FP8Target):
        target = out
        _check_target(target, x)
    else:
        raise ValueError(f"out must be None, 'fp8' or an FP8Target, but is {out!r}")
    if x.dtype is torch.float64:
        raise TypeError("x must be fp32, bf16 or fp16 with out='fp8', but is fp64")
    check_gpu("out", x)
    return target


def _check_target(target: FP8Target, x: Tensor) -> None:
    if target.dtype not in (E4M3, E5M2):
        raise TypeError(f"out.dtype must be {E4M3} or {E5M2}, but is {target.dtype}")
    if (target.amax is None) is not (target.saturated is None):
        raise ValueError("out.amax and out.saturated must be given together, but one is None")
    if target.amax is not None and target.scale is None:
        raise ValueError("out.scale must be given with out.amax: rows that have their own scales are not noted")
    if target.underflowed is not None and target.amax is None:
        raise ValueError("out.underflowed must be given with out.amax")
    counts = SLOTS, torch.int64, torch.int32
    shapes = {"scale": (1, torch.float32), "amax": (SLOTS, torch.int32), "saturated": counts, "underflowed": counts}
    for name, (count, *dtypes) in shapes.items():
        value = getattr(target, name)
        if value is None:
            continue
        if not isinstance(value, Tensor) or value.dtype not in dtypes or math.prod(value.shape) != count:
            kind = f"{value.dtype} of {value.numel()}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise TypeError(f"out.{name} must be a tensor, {' or '.join(map(str, dtypes))} of {count}, but is {kind}")
        if value.device != x.device:
            raise ValueError(f"out.{name} must be on {x.device}, as x, but is on {value.device}")
        if not value.is_contiguous():
            raise ValueError(f"out.{name} must be contiguous")


def check_forward_only(*tensors: Tensor | None) -> None:
    """Raise where a backward is wanted of codes, or where a transform would have to follow them."""
    if under_functorch():
        raise RuntimeError("out must be None under vmap and functional derivatives: codes can't be differentiated")
    if needs_grad(*tensors):
        raise RuntimeError(
            "out must be None where inputs require grad: codes can't be differentiated. Call the op under torch.no_grad() or in "
            "an autograd Function, or use an op with precision='fp8'"
        )


def describe_output_formula(call: Call) -> str:
    """Return what `explain` says of a formula that takes `out`."""
    target = output_target(call.out, call.x)
    return FORMULA if target is None else f"the PyTorch formula; {describe_output(target)}; no backward"


def describe_output(target: FP8Target) -> str:
    """Return what `explain` says of the result."""
    kind = "e5m2" if target.dtype is E5M2 else "e4m3"
    return f"writes {kind} codes, {'each row at a scale of its own' if target.scale is None else 'at the given scale'}"
