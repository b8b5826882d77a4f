"""gated_delta_rule against its peers: linear attention of hybrid layers, forward and backward, by whose kernels onepass takes.

Bytes     forward reads q, k, v, g and beta and writes y; backward reads these and dy and writes their gradients. Products bind,
          and what passes from chunk to chunk: fractions of a copy are small.
Variants  `plain`; eight `documents` in one sequence.
Shapes    sequences x tokens x heads of q and k x heads of v. Heads have 128 columns.
Peers     FLA and FlashQLA: their public functions, on tensors as ours. "formula" is onepass's own in plain PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass.bench.define import OpBench, Random, Shape, Shapes
from onepass.bench.model import BenchCase, Call, Contender, Inputs
from onepass.bench.peers import imported
from onepass.ops.delta.chunks import delta_rule_as_cast
from onepass.ops.delta.gated_delta_rule import gated_delta_rule

_HEAD, _DOCUMENTS = 128, 8
_SHAPES = Shapes(
    gpu={"plain": [(1, 16384, 16, 32), (4, 4096, 16, 32), (2, 4096, 16, 16)], "documents": [(1, 16384, 16, 32)]},
    gpu_quick={"plain": [(1, 2048, 16, 32)]},  # by the formula, where no kernels are installed, 16384 tokens take half a minute
    cpu={"plain": [(1, 512, 2, 4)], "documents": [(1, 1024, 1, 2)]},
)


def _bytes_moved(variant: str, shape: Shape, size: int) -> tuple[int, int]:
    B, S, key_heads, H = shape
    values = B * S * H * _HEAD * size
    inputs = 2 * B * S * key_heads * _HEAD * size + values + B * S * H * (4 + size)
    return inputs + values, 2 * inputs + values


def _inputs(case: BenchCase, random: Random) -> Inputs:
    B, S, key_heads, H = case.shape
    q, k = (F.normalize(random(B, S, key_heads, _HEAD), dim=-1).requires_grad_() for _ in range(2))
    g = (-F.softplus(random(B, S, H).float())).requires_grad_()
    beta = random(B, S, H).sigmoid().requires_grad_()
    tensors: dict[str, Tensor] = {"q": q, "k": k, "v": random.input(B, S, H, _HEAD), "g": g, "beta": beta}
    if case.variant == "documents":
        tensors["cu_seqlens"] = torch.tensor(
            [S * i // _DOCUMENTS for i in range(_DOCUMENTS + 1)], dtype=torch.int32, device=random.device
        )
    return Inputs(tensors, frozenset({"q", "k", "v", "g", "beta"}), {"y": random(B, S, H, _HEAD)})


def _keywords(case: BenchCase) -> tuple[str, ...]:
    return ("cu_seqlens",) if case.variant == "documents" else ()


def _formula(case: BenchCase) -> Call:
    def call(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        return gated_delta_rule(q, k, v, g, beta, cu_seqlens=cu_seqlens, backend="torch")  # type: ignore[return-value]

    return call


def _baseline(case: BenchCase) -> Call:
    """The formula with operands of products rounded to the case's type, as kernels round them."""

    def call(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        with torch.autocast(q.device.type, case.dtype, enabled=q.is_cuda and case.dtype is not torch.float32):
            return delta_rule_as_cast(q, k, v, g, beta, None, cu_seqlens, _HEAD**-0.5)[0]

    return call


def _of_module(module: str) -> Callable[[BenchCase], Call]:
    def make(case: BenchCase) -> Call:
        function: Callable[..., tuple[Tensor, Any]] = imported(module, "chunk_gated_delta_rule")

        def call(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
            return function(q, k, v, g, beta, cu_seqlens=cu_seqlens)[0]

        return call

    return make


def _peers(case: BenchCase) -> list[Contender]:
    return [
        Contender("formula", _formula),
        Contender("FlashQLA", _of_module("flash_qla"), package="FlashQLA"),
        Contender("FLA", _of_module("fla.ops.gated_delta_rule"), package="FLA"),
    ]


BENCH = OpBench("gated_delta_rule", _SHAPES, (1, 64, 1, 2), _bytes_moved, _inputs, _peers, keywords=_keywords, baseline=_baseline)
