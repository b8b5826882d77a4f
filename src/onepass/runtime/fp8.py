"""Eight-bit floats as operands of products: scales, and rounding by PyTorch, which kernels equal bit for bit.

A tensor is kept as codes and a scale, its own or one a row: x is about codes / scale. Scales are powers of two: only codes round.
A finite value past the format's largest saturates. NaN and infinities never become numbers: e4m3, which has no infinity, has NaN
for both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass.runtime.dispatch import needs_grad, under_functorch
from onepass.runtime.op import FORMULA, Call

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16  # of elements: rows of operands, and the dimension that is summed over
SLOTS = 64  # of the largest magnitudes and of counts: programs don't queue for one address
_CAPABILITY = 8, 9  # Ada; Hopper is 9.0
_LARGEST = {E4M3: 448.0, E5M2: 57344.0}  # 1.75 times a power of two, both
_EXPONENT = {E4M3: 8, E5M2: 15}  # of that power
_ZERO_TO = {E4M3: 2.0**-10, E5M2: 2.0**-17}  # half the smallest number, which rounds to even
_MATTERS = 4096  # times that, in a row: a row with such a number loses little by what is rounded to zero


class FP8Target(NamedTuple):
    """What a pass writes its result for: an operand of an eight-bit product.

    Args:
        dtype: E4M3 or E5M2: torch.float8_e4m3fn or torch.float8_e5m2.
        scale: fp32, of one element; None gives each row a scale of its own.
        amax: int32 [64], the bits of fp32 numbers. One or more are raised to the largest finite magnitude written.
        saturated: int64, as many, to which the counts of finite numbers that saturate are added. Given with amax. Counts may be
            int32, too, which wraps at 2^31.
        underflowed: of the same kind, to which the counts of numbers that round to zero are added, where that can matter: of
            tiles or rows whose largest magnitude is less than 4096 times what rounds to zero. Given with amax, or not.
    """

    dtype: torch.dtype = E4M3
    scale: Tensor | None = None
    amax: Tensor | None = None
    saturated: Tensor | None = None
    underflowed: Tensor | None = None


class FP8Tensor(NamedTuple):
    """A tensor as codes and the inverse of their scale, which is a power of two. The tensor is about codes * inverse.

    Args:
        codes: of the tensor's shape, contiguous, torch.float8_e4m3fn or torch.float8_e5m2.
        inverse: fp32, ``[..., 1]`` of the leading dimensions where each row has its own scale, else of one element.
    """

    codes: Tensor
    inverse: Tensor

    def dequantise(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return codes * inverse, rounded to a type."""
        return dequantise(self.codes, self.inverse, dtype)


def fits_fp8(weight_shape: Sequence[int]) -> bool:
    """Whether products in eight bits take a weight of these sizes."""
    return not any(size % MULTIPLE for size in weight_shape)


@lru_cache
def unfit_gpu(device: torch.device) -> str | None:
    """Return why a GPU has no products in eight bits, or None."""
    capability = torch.cuda.get_device_capability(device)
    if capability >= _CAPABILITY:
        return None
    return f"{torch.cuda.get_device_name(device)} has {capability[0]}.{capability[1]}"


def check_fp8(x: Tensor, weight: Tensor) -> None:
    """Raise where products of these can't be in eight bits."""
    for name, tensor in (("x", x), ("weight", weight)):
        if tensor.dtype is torch.float64:
            raise TypeError(f"{name} must be fp32, bf16 or fp16 with precision='fp8', but is fp64")
    if not torch.compiler.is_compiling() and weight.is_inference():
        raise RuntimeError("weight must not be made in inference_mode with precision='fp8': its updates would not be seen")
    check_gpu("precision", x)


def check_gpu(argument: str, x: Tensor) -> None:
    """Raise where the argument asks for eight bits on a GPU that has none. A compiled call meets that in its kernel."""
    if x.is_cuda and not torch.compiler.is_compiling() and (unfit := unfit_gpu(x.device)) is not None:
        raise RuntimeError(f"{argument} must be None on this GPU: eight bits need compute capability 8.9 or later, but {unfit}")


def largest(dtype: torch.dtype) -> float:
    """Return the largest finite number of an eight-bit type."""
    return _LARGEST[dtype]


def finite_amax(x: Tensor, dim: int | None = None) -> Tensor:
    """Return the largest finite magnitude of x, in fp32: of all of it, or along a dimension, which stays."""
    sizes = x.detach().float().abs().nan_to_num(0.0, 0.0, 0.0)
    if not sizes.numel():
        return sizes.new_zeros(() if dim is None else [1 if i == dim % x.dim() else n for i, n in enumerate(x.shape)])
    return sizes.amax() if dim is None else sizes.amax(dim, keepdim=True)


def scale_for(amax: Tensor, dtype: torch.dtype, margin: int = 0) -> Tensor:
    """Return the largest power of two that brings amax to at most the type's largest number over 2**margin; 1 for an amax of 0.

    It is at most 2**126 and at least 2**-126, so that its inverse is a normal number too.
    """
    bits = amax.float().view(torch.int32)
    # up to the next power of two where the mantissa is above 1.75
    exponent = ((bits + 0x1FFFFF) >> 23) - 127
    power = (_EXPONENT[dtype] - margin - exponent).clamp(-126, 126)
    return torch.where(bits == 0, 1.0, ((power + 127) << 23).view(torch.float32))


def quantise(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x * scale in an eight-bit type, rounded to nearest even as PyTorch's cast does, and saturated."""
    wide, most = x.detach().float(), _LARGEST[dtype]
    # of an infinity PyTorch's cast to e4m3 makes NaN in some versions, and the largest number in others
    infinite = wide if dtype is E5M2 else torch.copysign(wide.new_tensor(torch.nan), wide)
    return torch.where(wide.isinf(), infinite, (wide * scale).clamp(-most, most)).to(dtype)


def saturated(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return how many finite numbers of x are past what the type holds at this scale."""
    wide = (x.detach().float() * scale).abs()
    return ((wide > _LARGEST[dtype]) & x.isfinite()).sum()


def underflowed(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return how many numbers of x round to zero at this scale and are none, in rows that such a loss matters to."""
    sizes = x.detach().float().abs().reshape(-1, x.shape[-1])
    scaled = sizes * scale
    matters = scaled.amax(-1, keepdim=True) < _MATTERS * _ZERO_TO[dtype]
    return ((scaled <= _ZERO_TO[dtype]) & (sizes > 0) & matters).sum()


def dequantise(codes: Tensor, inverse: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return codes times the inverse of their scale."""
    return (codes.float() * inverse).to(dtype)


def quantise_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return x's codes at a scale for each row, contiguous as products take them, and the inverses of the scales, [rows, 1]."""
    rows = x.detach().contiguous().view(x.shape[:-1].numel(), x.shape[-1])
    scale = scale_for(finite_amax(rows, -1), dtype)
    return quantise(rows, scale, dtype).view(x.shape), 1 / scale


def quantise_tensor(x: Tensor, target: FP8Target) -> Tensor:
    """Return x's codes at the target's scale, and note there what the next scale comes from."""
    assert target.scale is not None
    if target.amax is not None and target.saturated is not None:
        noted = target.amax[:1].view(torch.float32)
        torch.maximum(noted, finite_amax(x), out=noted)
        target.saturated[:1] += saturated(x, target.scale, target.dtype)
        if target.underflowed is not None:
            target.underflowed[:1] += underflowed(x, target.scale, target.dtype)
    return quantise(x, target.scale, target.dtype)


def transposed_width(x: Tensor) -> int:
    """Return how many columns x's transposed codes have."""
    rows = math.prod(x.shape[:-1])  # Size.numel() would make a compiler's sizes constants
    return rows + -rows % MULTIPLE


def transpose(codes: Tensor) -> Tensor:
    """Return the transpose of codes, with zeros up to a multiple of 16 columns."""
    rows = codes.reshape(codes.shape[:-1].numel(), codes.shape[-1]).view(torch.uint8)
    return F.pad(rows.t(), (0, -len(rows) % MULTIPLE)).contiguous().view(codes.dtype)


# ---- `out=`, by which an op returns its result as codes: what all such ops check ----

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
