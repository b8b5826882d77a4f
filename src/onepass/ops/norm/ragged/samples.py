"""Sample calls of ragged_norm."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from onepass.ops.norm.ragged import kernels
from onepass.runtime.samples import (
    CoveringCall,
    meta,
)

# ---- calls that launch every kernel, in every form that is shipped ----


def covering_calls() -> Iterator[CoveringCall]:
    yield from _ragged_norm_calls()


_RAGGED: dict[str, tuple[int, ...]] = {  # some widths, a lane each
    "64 lanes of 32 to 512": (32, 64, 96, 128, 192, 256, 384, 512) * 8,
    "16 lanes of 128": (128,) * 16,
    "lanes of 16 to 2048": tuple(1 << k for k in range(4, 12)),
    "lanes of 64 and 5000": (64, 5000),
    "odd lanes": (1, 33, 255, 1000, 2001),
    "one lane of 1": (1,),  # a size of 1 is a constant to the compiler
}


def _ragged_norm_calls() -> Iterator[CoveringCall]:
    """Both norms at all mixtures of widths; types, flat outputs and what is left out at one that has most kinds of tiles."""
    for layer in (True, False):
        for lanes in _RAGGED:
            yield _ragged_norm_call(layer, lanes)
        for dtype in (torch.float16, torch.float32):
            for lanes in ("lanes of 16 to 2048", "odd lanes"):
                yield _ragged_norm_call(layer, lanes, dtype)
        for option in ("flat", "no vectors", "frozen vectors", "fp32 vectors"):
            yield _ragged_norm_call(layer, "64 lanes of 32 to 512", option=option)


def _ragged_norm_call(layer: bool, lanes: str, dtype: torch.dtype = torch.bfloat16, option: str = "") -> CoveringCall:
    def run() -> Tensor:
        xs = [meta(2048, width, dtype=dtype) for width in _RAGGED[lanes]]
        vector_type = torch.float32 if option == "fp32 vectors" else dtype
        weights = [] if option == "no vectors" else [meta(x.shape[-1], dtype=vector_type) for x in xs]
        asked = bool(weights) and option != "frozen vectors"
        _, mean, rstd = kernels.ragged_forward(xs, weights, weights if layer else [], layer, 1e-5, option != "flat")
        kernels.ragged_backward(xs, xs, weights, mean, rstd, layer, option != "flat", asked, asked and layer)
        return xs[0]

    return CoveringCall(" ".join(filter(None, ("ragged", "layer_norm" if layer else "rms_norm", lanes, option))), dtype, run)
