"""Calls that launch the kernels of eight-bit scales."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from onepass.product.fp8.scales import ROLES, FP8Scales
from onepass.runtime.fp8_recipe import FP8Recipe
from onepass.runtime.samples import CoveringCall, meta


def covering_calls() -> Iterator[CoveringCall]:
    for recipe in (FP8Recipe(), FP8Recipe(format="e4m3", margin=1, amax_history_len=1, amax_compute_algo="most_recent")):
        yield _fp8_scales_call(recipe)


def _fp8_scales_call(recipe: FP8Recipe) -> CoveringCall:
    def run() -> Tensor:
        scales = FP8Scales(recipe, torch.device("meta"))
        scales.refresh()
        for role in ROLES:
            scales.measure(role, lambda target: None)
        return meta(1, dtype=torch.float32)

    return CoveringCall(f"fp8 scales {recipe.format} {recipe.amax_compute_algo}", torch.float32, run, 89)
