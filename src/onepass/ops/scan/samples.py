"""Sample calls of Mamba 2's scan."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from onepass.ops.scan.mamba_chunk_scan import mamba_chunk_scan_reference
from onepass.runtime.random_calls import Draw, RandomCall, RandomTensor
from onepass.runtime.samples import CoveringCall, Sample, random_tensors


def _scan(B: int, S: int, G: int, H: int, documents: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return x, dt, A, B, C, D and dt's bias, and where there are documents boundaries, one of them empty, and states."""
    shapes = (B, S, H, 6), (B, S, H), (H,), *[(B, S, G, 8)] * 2, *[(H,)] * 2, (documents, H, 6, 8)
    x, dt, A, b, c, D, bias, states = random_tensors(shapes, device, torch.float32)
    tensors = [t.to(dtype) for t in (x, dt.abs(), -A.abs(), 0.3 * b, 0.3 * c, D, bias.abs(), states)]
    if not documents:
        return tuple(tensors[:7])
    ends = [0, *(S * (i + 1) // documents // 3 * 3 for i in range(documents - 2)), *[S] * 2]
    return *tensors, torch.tensor(ends, dtype=torch.int32, device=device)


SAMPLES = {
    "mamba_chunk_scan": Sample(
        partial(_scan, 3, 70, 2, 4, 0),
        mamba_chunk_scan_reference,
        {"dt_softplus": True},
        keywords=("D", "dt_bias"),
        dtype=torch.bfloat16,
    ),
    "mamba_chunk_scan: documents": Sample(
        partial(_scan, 1, 130, 1, 2, 3),
        mamba_chunk_scan_reference,
        {"return_final_states": True, "dt_limit": (0.1, 2.0)},
        keywords=("D", "dt_bias", "initial_states", "cu_seqlens"),
        frozen=1,
        dtype=torch.bfloat16,
    ),
}


SHAPES_OF: dict[str, Any] = {
    "mamba_chunk_scan": {
        "cu_seqlens": lambda x, given: (2,),
        "initial_states": lambda x, given: (x.shape[0], *x.shape[2:], given["B"][3]),
        "D": lambda x, given: x.shape[2:3],
        "dt_bias": lambda x, given: x.shape[2:3],
    }
}
TYPES_OF = {"cu_seqlens": torch.int32}


# ---- random calls ----


def _random_scan(draw: Draw) -> RandomCall:
    dtype, G = draw.dtype(), draw.choose((1, 2, 3))
    H, P, N = G * draw.choose((1, 2)), draw.choose((8, 1, 5, 33)), draw.choose((8, 1, 16, 40))
    B, S = (1, 1, *draw.lead())[-2:]
    groups, per_head = (B, S, G, N), (B, S, H)
    tensors = {"x": RandomTensor((B, S, H, P), dtype, "tame"), "dt": RandomTensor(per_head, draw.beside(dtype), "positive")}
    tensors |= {"A": RandomTensor((H,), torch.float32, "positive")}  # of which the op gets the negative: states don't grow
    tensors |= {name: RandomTensor(groups, dtype, "tame weight", top=4 * N) for name in ("B", "C")}
    for name in ("D", "dt_bias"):
        if draw.flag():
            tensors[name] = RandomTensor((H,), draw.beside(dtype), "positive" if name == "dt_bias" else "tame")
    states = B
    if B == 1 and draw.flag(0.5):
        states = draw.choose((2, 1, 4))
        tensors["cu_seqlens"] = RandomTensor((states + 1,), torch.int32, "boundaries", top=S)
    if draw.flag(0.3):
        tensors["initial_states"] = RandomTensor((states, H, P, N), draw.beside(dtype), "tame")
    options: dict[str, Any] = {"return_final_states": True} if draw.flag() else {}
    options |= {"dt_softplus": True} if draw.flag() else {}

    def arguments(given: dict[str, Tensor]) -> dict[str, Tensor]:
        return given | {"A": -given["A"]}

    return RandomCall(tensors, options, partial(mamba_chunk_scan_reference, **options), finite=True, arguments=arguments)


RANDOM_CALLS = {"mamba_chunk_scan": _random_scan}


def covering_calls() -> Iterator[CoveringCall]:
    """None: its kernels are those of wheels."""
    return iter(())
