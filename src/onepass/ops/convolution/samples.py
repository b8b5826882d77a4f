"""Sample calls of causal_conv1d."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from onepass.ops.convolution.causal_conv1d import causal_conv1d, causal_conv1d_reference
from onepass.runtime.random_calls import Draw, RandomCall, RandomTensor
from onepass.runtime.samples import CoveringCall, Sample, give_main_grad, meta, random_tensors


def _documents(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return x of three documents, one of them empty; the weight, the bias, and boundaries."""
    tensors = random_tensors(((1, 37, 48), (48, 1, 3), (48,)), device, dtype)
    return *tensors, torch.tensor((0, 20, 20, 37), dtype=torch.int32, device=device)


SAMPLES = {
    "causal_conv1d": Sample(partial(random_tensors, ((3, 11, 40), (40, 4), (40,))), causal_conv1d_reference),
    "causal_conv1d: pieces": Sample(
        partial(random_tensors, ((3, 11, 56), (56, 1, 4))),
        causal_conv1d_reference,
        {"split": (16, 16, 24), "l2_norm": (8, 8, None)},
    ),
    "causal_conv1d: documents": Sample(
        _documents, causal_conv1d_reference, {"activation": None, "l2_norm": 16}, keywords=("cu_seqlens",), frozen=1
    ),
}


SHAPES_OF: dict[str, Any] = {}


# ---- random calls ----


def _random_conv(draw: Draw) -> RandomCall:
    dtype, W = draw.dtype(), draw.choose((4, 2, 3, 8))
    sizes, heads = draw.choose(
        (((draw.width(),), (None,)), ((16, 16, 24), (8, 8, None)), ((33, 66), (None, 11)), ((4, 4, 4, 8), (2, None, None, 4))),
        (6, 2, 1, 1),
    )
    lead = (*draw.lead(), 1)[:-1] or (3,)
    C = sum(sizes)
    tensors = {"x": RandomTensor((*lead, C), dtype, "finite")}
    tensors["weight"] = RandomTensor((C, 1, W) if draw.flag() else (C, W), draw.beside(dtype), "tame", parameter=True)
    if draw.flag():
        tensors["bias"] = RandomTensor((C,), draw.beside(dtype), "tame", parameter=True)
    if all(size == 1 for size in lead[:-1]) and draw.flag(0.4):
        tensors["cu_seqlens"] = RandomTensor((draw.choose((3, 2, 5)),), torch.int32, "boundaries", top=lead[-1])
    options: dict[str, Any] = {"activation": draw.choose(("silu", None), (3, 1)), "eps": draw.choose((1e-6, 0.1))}
    if len(sizes) > 1:
        options |= {"split": sizes, "l2_norm": heads}
    return RandomCall(tensors, options, partial(causal_conv1d_reference, **options), finite=True)


RANDOM_CALLS = {"causal_conv1d": _random_conv}

# ---- calls that launch every kernel, in every form that is shipped ----

_QWEN: dict[str, Any] = {"split": (2048, 2048, 4096), "l2_norm": (128, 128, None)}


def covering_calls() -> Iterator[CoveringCall]:
    """Models' pieces in all types and with all options; widths of the convolution; heads of other widths; odd columns."""
    for dtype in (torch.bfloat16, torch.float32):
        for option in ("", "bias", "documents", "documents, bias"):
            yield _conv_call(8192, dtype=dtype, option=option, **_QWEN)
            yield _conv_call(8192, dtype=dtype, option=option)
    for option in ("main_grad", "frozen x", "frozen weight", "sliced"):
        yield _conv_call(8192, option=option, **_QWEN)
    for W in (2, 3, 5, 6, 8):
        yield _conv_call(4096, W)
    yield _conv_call(4096, 8, option="documents, bias", split=(2048, 2048), l2_norm=(128, None))
    for head in (16, 64, 96, 256):
        yield _conv_call(3072, l2_norm=head)
    for C in (1, 100, 5000):
        yield _conv_call(C, activation=None)


def _conv_call(C: int, W: int = 4, dtype: torch.dtype = torch.bfloat16, option: str = "", **options: Any) -> CoveringCall:
    def run() -> Tensor:
        batch, width = 1 if "documents" in option else 4, C + 64 if option == "sliced" else C
        x = meta(batch, 4096, width, dtype=dtype, requires_grad=option != "frozen x")
        weight = meta(C, 1, W, dtype=dtype, requires_grad=option != "frozen weight")
        bias = meta(C, dtype=dtype) if "bias" in option else None
        if option == "main_grad":
            give_main_grad(weight)
        cu_seqlens = torch.empty(9, dtype=torch.int32, device="meta") if "documents" in option else None
        ys = causal_conv1d(x[..., :C], weight, bias, cu_seqlens=cu_seqlens, backend="triton", **options)
        return ys if isinstance(ys, Tensor) else torch.cat(ys, -1)

    said = [option, *(f"{name}={value}" for name, value in options.items())]
    return CoveringCall(" ".join(filter(None, ("causal_conv1d", f"16384x{C} W={W}", *said))), dtype, run)
