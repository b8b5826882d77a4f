"""gated_rms_norm against its peers: heads that are normalised, then gated, and Mamba 2's rows, gated first.

Bytes     forward reads x and z and writes y; backward reads dy, x and z and writes dx and dz. The weight is one row and is not
          counted.
Shapes    rows x columns. "groups" are of 1024 columns.
Peers     eager and torch.compile: as transformers writes it, which rounds the norm before it is multiplied.
          FLA normalises first. mamba-ssm does either.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass.bench.define import OpBench, Random, Run, Shape, Shapes, by_pytorch
from onepass.bench.model import BenchCase, Call, Contender, Inputs
from onepass.bench.peers import imported

EPS, _GROUP = 1e-6, 1024
_SHAPES = Shapes(
    gpu={
        "heads": [(524288, 128), (524288, 64), (262144, 256), (4096, 128)],
        "gate first": [(16384, 5120), (8192, 8192)],
        "groups": [(16384, 8192)],
    },
    cpu={"heads": [(20_000, 128)], "gate first": [(1024, 5120)], "groups": [(512, 8192)]},
)


def _bytes_moved(variant: str, shape: Shape, size: int) -> tuple[int, int]:
    rows, columns = shape
    return 3 * rows * columns * size, 5 * rows * columns * size


def _inputs(case: BenchCase, random: Random) -> Inputs:
    rows, columns = case.shape
    tensors = {"x": random.input(rows, columns), "z": random.input(rows, columns), "weight": random.parameter(columns)}
    return Inputs(tensors, frozenset({"x", "z"}), {"y": random(rows, columns)})


def _options(case: BenchCase) -> dict[str, Any]:
    options: dict[str, Any] = {} if case.variant == "heads" else {"norm_before_gate": False}
    return options | ({"group_size": _GROUP} if case.variant == "groups" else {})


def norm_then_gate(x: Tensor, z: Tensor, weight: Tensor) -> Tensor:
    """Gate a norm, as transformers writes it."""
    n = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + EPS)
    return (weight * n.to(x.dtype) * F.silu(z.float())).to(x.dtype)


def _eager(case: BenchCase, run: Run) -> Call:
    group = _options(case).get("group_size", case.shape[-1])

    def gate_first(x: Tensor, z: Tensor, weight: Tensor) -> Tensor:
        h = (x.float() * F.silu(z.float())).unflatten(-1, (-1, group))
        n: Tensor = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)
        return weight * n.flatten(-2).to(x.dtype)

    return run(norm_then_gate if case.variant == "heads" else gate_first)


def fla_norm(case: BenchCase) -> Call:
    function: Callable[..., Tensor] = imported("fla.modules.fused_norm_gate", "rms_norm_gated")
    return lambda x, z, weight: function(x, z, weight, None, eps=EPS)


def _mamba(case: BenchCase) -> Call:
    function: Callable[..., Tensor] = imported("mamba_ssm.ops.triton.layernorm_gated", "rmsnorm_fn")
    return lambda x, z, weight: function(x, weight, None, z=z, eps=EPS, **_options(case))


def _peers(case: BenchCase) -> list[Contender]:
    lacks = None if case.variant == "heads" else "gates after the norm only"
    fla = Contender("FLA", fla_norm, package="FLA", lacks=lacks)
    return [*by_pytorch(_eager), fla, Contender("mamba-ssm", _mamba, package="mamba-ssm")]


BENCH = OpBench(
    "gated_norm", _SHAPES, (64, 1024), _bytes_moved, _inputs, _peers,
    name=lambda case: "gated_rms_norm", options=_options,
    without={"Megatron-core": "takes the norm from Transformer Engine, and gates in a compiled function"},
)  # fmt: skip
