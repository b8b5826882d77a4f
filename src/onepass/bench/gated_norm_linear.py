"""gated_norm_linear against the two calls that it replaces: a gated norm of heads, and the output projection that follows.

Time      matrix products dominate, so times are relative to those of `separate`, not to a copy's. `separate` is onepass's
          gated_rms_norm and then F.linear. The op saves memory: the gated rows are not kept (see kept and peak MiB).
Bytes     forward reads x, z and the weight and writes y; backward reads dy, x, z and the weight, and writes dx, dz and dweight.
Gradients of x, z, the norm's weight, which all heads share, and the product's weight.
Peers     eager and torch.compile: as transformers writes the norm, then F.linear.
          FLA: its gated norm, then F.linear.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from onepass.bench import fp8
from onepass.bench.define import OpBench, Random, Shape, Shapes, by_pytorch
from onepass.bench.gated_norm import EPS, fla_norm, norm_then_gate
from onepass.bench.model import BenchCase, Call, Contender, Inputs, Result
from onepass.ops.norm.gated_norm import gated_rms_norm, gated_rms_norm_reference

_HEAD = 128
_SHAPES = Shapes(  # tokens, features of all heads, output features
    gpu={"heads": [(16384, 4096, 2048), (16384, 8192, 4096)]},
    gpu_quick={"heads": [(2048, 4096, 2048)]},
    cpu={"heads": [(256, 768, 512)]},
    cpu_quick={"heads": [(64, 256, 128)]},
)


def _bytes_moved(variant: str, shape: Shape, size: int) -> tuple[int, int]:
    tokens, inner, outer = shape
    x, weight, y = (n * size for n in (tokens * inner, inner * outer, tokens * outer))
    return 2 * x + weight + y, 4 * x + 2 * weight + y


def _inputs(case: BenchCase, random: Random) -> Inputs:
    tokens, inner, outer = case.shape
    tensors = {"x": random.input(tokens, inner), "z": random.input(tokens, inner), "norm_weight": random.parameter(_HEAD)}
    tensors["weight"] = random.weight(outer, inner)
    return Inputs(tensors, frozenset({"x", "z"}), {"y": random(tokens, outer)})


def _after(norm: Callable[..., Any]) -> Call:
    def call(x: Tensor, z: Tensor, norm_weight: Tensor, weight: Tensor) -> Result:
        heads, gates = (t.unflatten(-1, (-1, _HEAD)) for t in (x, z))
        return F.linear(norm(heads, gates, norm_weight).flatten(-2), weight)

    return call


def _baseline(case: BenchCase) -> Call:
    def call(x: Tensor, z: Tensor, norm_weight: Tensor, weight: Tensor) -> Result:
        heads, gates = (t.float().unflatten(-1, (-1, _HEAD)) for t in (x, z))
        rows = gated_rms_norm_reference(heads, gates, norm_weight.float(), eps=EPS).flatten(-2)
        return fp8.baseline_linear(case, rows, weight)

    return call


def _peers(case: BenchCase) -> list[Contender]:
    separate = Contender("separate", lambda case: _after(gated_rms_norm))
    eager = by_pytorch(lambda case, run: run(_after(norm_then_gate)))
    return [separate, *eager, Contender("FLA", lambda case: _after(fla_norm(case)), package="FLA")]


_APART = "has no gated norm with the product that follows"
BENCH = OpBench(
    "gated_norm_linear", _SHAPES, (64, 128, 128), _bytes_moved, _inputs, _peers,
    options=lambda case: {"eps": EPS, "group_size": _HEAD}, weights=(3,), baseline=_baseline, reference="separate",
    without={"Megatron-core": _APART, "mamba-ssm": _APART},
)  # fmt: skip
