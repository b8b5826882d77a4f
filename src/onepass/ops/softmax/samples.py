"""Sample calls of softmax."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from onepass.ops.softmax.softmax import softmax, softmax_reference
from onepass.runtime.random_calls import Draw, RandomCall, RandomTensor
from onepass.runtime.samples import CoveringCall, Sample, meta, random_tensors


def _with_mask(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Scores of three heads, and a mask of all heads, which leaves nothing of one row."""
    (x,) = random_tensors(((2, 3, 11, 203),), device, dtype)
    mask = torch.arange(2 * 11 * 203, device=device).remainder(3).view(2, 1, 11, 203) == 0
    mask[0, 0, 5] = True
    return x, mask


_SCORES = partial(random_tensors, ((3, 11, 203),))
SAMPLES = {
    # dx is made of the y that is stored, and so has its rounding too
    "softmax": Sample(_SCORES, softmax_reference, {"scale": 0.3, "causal": True}, roundings=2.0),
    "softmax: plain": Sample(_SCORES, softmax_reference),
    "softmax: mask": Sample(_with_mask, softmax_reference, {"scale": 2.0}, keywords=("mask",), frozen=1),
    "softmax: mask, causal": Sample(_with_mask, softmax_reference, {"causal": True}, keywords=("mask",), frozen=1),
}


SHAPES_OF = {"softmax": {"mask": lambda x, given: x.shape}}
TYPES_OF = {"mask": torch.bool}


# ---- random calls ----


class _RoundedSoftmax(torch.autograd.Function):
    """The formula with y rounded to a type before its gradient is made of it, which is what the op keeps."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor | None, dtype: torch.dtype, options: dict[str, Any]) -> Tensor:
        y = softmax_reference(x, mask, **options)
        there = softmax_reference(torch.zeros_like(x), mask, **options) > 0
        ctx.save_for_backward(y.to(dtype).to(y.dtype) if x.dtype is torch.float32 else y, there)
        ctx.scale = options["scale"]
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        y, there = ctx.saved_tensors
        dx = ctx.scale * y * (dy - (y * dy).sum(-1, keepdim=True))
        return torch.where(there, dx, 0.0), None, None, None


def _random_softmax(draw: Draw) -> RandomCall:
    dtype, width, lead = draw.dtype(), draw.width(), draw.lead()
    tensors = {"x": RandomTensor((*lead, width), dtype)}
    if draw.flag(0.4):
        shape = tuple(draw.choose((size, 1), (3, 1)) for size in (*lead, width))
        tensors["mask"] = RandomTensor(shape[draw.choose((0, 1), (3, 1)) :], torch.bool, "mask")
    options = {"scale": draw.choose((1.0, 0.125, -2.0)), "causal": bool(lead) and draw.flag(0.4)}

    def formula(x: Tensor, mask: Tensor | None = None) -> Tensor:
        y: Tensor = _RoundedSoftmax.apply(x, mask, dtype, options)
        return y

    floor = 1e-7 * abs(options["scale"])  # where one probability is 1, all gradients of the row cancel
    return RandomCall(tensors, options, formula, floors=lambda given: {"dx": floor})


RANDOM_CALLS = {"softmax": _random_softmax}

# ---- calls that launch every kernel, in every form that is shipped ----

_WIDTHS = (1, 64, 777, 2048, 3001, 5000, 8192, 16384)
_MASKS = {  # shapes, for x [4, 8, 512, columns]: rows in one level, two and three
    "mask": (4, 8, 512, 0),
    "mask of all heads": (4, 1, 512, 0),
    "mask of columns": (4, 1, 1, 0),
    "mask of rows": (4, 8, 512, 1),
}


def covering_calls() -> Iterator[CoveringCall]:
    """All widths, plain, causal and with a mask of all heads; other types and masks at some of them."""
    for width in _WIDTHS:
        for option in ("", "causal", "mask of all heads"):
            yield _softmax_call(width, option=option)
    for width in (2048, 5000, 16384):
        for dtype in (torch.float16, torch.float32):
            for option in ("", "causal", "mask of all heads"):
                yield _softmax_call(width, dtype, option)
    for width in (2048, 16384):
        for option in ("mask", "mask of columns", "mask of rows", "mask of all heads, causal", "sliced"):
            yield _softmax_call(width, option=option)


def _softmax_call(width: int, dtype: torch.dtype = torch.bfloat16, option: str = "") -> CoveringCall:
    def run() -> Tensor:
        extra = 8 if option == "sliced" else 0
        x = meta(4, 8, 512, width + extra, dtype=dtype)[..., :width]
        shape = _MASKS.get(option.partition(",")[0])
        mask = None
        if shape is not None:
            mask = torch.empty(*shape[:-1], shape[-1] or width, dtype=torch.bool, device="meta")
        return softmax(x, scale=0.125, mask=mask, causal="causal" in option, backend="triton")

    return CoveringCall(" ".join(filter(None, ("softmax", f"16384x{width}", option))), dtype, run)
