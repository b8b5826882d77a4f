"""causal_conv1d against its peers: the convolution of a hybrid layer, its SiLU, and what follows.

Bytes     forward reads x and writes y; backward reads dy and x and writes dx. Weights are few and are not counted.
Variants  `plain`, with a bias, as Mamba 2 has it. `split`: q, k and v of half of the columns, a quarter each for q and k, whose
          heads of 128 are normalised, as in Qwen3-Next. `documents`: the same of documents of 512 rows in one sequence.
Shapes    sequences x rows x columns. The convolution is 4 wide.
Peers     eager and torch.compile: nn.Conv1d's of columns first, as transformers writes it; documents one after another.
          causal-conv1d and FLA: their convolution with SiLU. What follows is eager code, FLA's norm of heads in its row.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass.bench.define import OpBench, Random, Run, Shape, Shapes, by_pytorch
from onepass.bench.model import BenchCase, Call, Contender, Inputs, Result
from onepass.bench.peers import imported, once

W, _HEAD, _EPS = 4, 128, 1e-6
_GPU = [(1, 16384, 8192), (4, 4096, 8192), (1, 4096, 8192)]
_SHAPES = Shapes(
    gpu={"split": _GPU, "plain": [(8, 2048, 5376), (4, 4096, 10240)], "documents": _GPU[:1]},
    cpu={"split": [(1, 512, 2048)], "plain": [(2, 256, 5376)], "documents": [(1, 1024, 2048)]},
)


def _sizes(case: BenchCase) -> tuple[int, ...]:
    C = case.shape[-1]
    return (C,) if case.variant == "plain" else (C // 4, C // 4, C // 2)


def _bytes_moved(variant: str, shape: Shape, size: int) -> tuple[int, int]:
    return 2 * math.prod(shape) * size, 3 * math.prod(shape) * size


def _inputs(case: BenchCase, random: Random) -> Inputs:
    B, S, C = case.shape
    tensors = {"x": random.input(B, S, C), "weight": random.parameter(C, 1, W)}
    if case.variant == "plain":
        tensors["bias"] = random.parameter(C)
    if case.variant == "documents":
        tensors["cu_seqlens"] = torch.tensor((*range(0, S, 512), S), dtype=torch.int32, device=random.device)
    names = ("y",) if case.variant == "plain" else ("q", "k", "v")
    return Inputs(tensors, frozenset({"x"}), {name: random(B, S, c) for name, c in zip(names, _sizes(case), strict=True)})


def _options(case: BenchCase) -> dict[str, Any]:
    return {} if case.variant == "plain" else {"split": _sizes(case), "l2_norm": (_HEAD, _HEAD, None), "eps": _EPS}


def _keywords(case: BenchCase) -> tuple[str, ...]:
    return ("cu_seqlens",) if case.variant == "documents" else ()


# ---- code as people write it, and packages ----


def _written_norm(heads: Tensor) -> Tensor:
    return heads * torch.rsqrt((heads * heads).sum(-1, keepdim=True) + _EPS)


def _after(case: BenchCase, convolve: Callable[..., Tensor], norm: Callable[[Tensor], Tensor] = _written_norm) -> Call:
    """Split what a convolution returns, and normalise the heads of q and k."""

    def call(x: Tensor, weight: Tensor, *others: Tensor) -> Result:
        y = convolve(x, weight[:, 0], *others)
        if case.variant == "plain":
            return y
        q, k, v = y.split(_sizes(case), -1)
        q, k = (norm(t.unflatten(-1, (-1, _HEAD))).flatten(-2) for t in (q, k))
        return q, k, v

    return call


def _eager(case: BenchCase, run: Run) -> Call:
    def convolve(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        y = F.conv1d(x.transpose(1, 2), weight[:, None], bias, padding=W - 1, groups=weight.shape[0])
        return F.silu(y[..., : x.shape[1]]).transpose(1, 2)

    def of_documents(x: Tensor, weight: Tensor, cu_seqlens: Tensor) -> Tensor:
        return torch.cat([convolve(document, weight) for document in x.split(512, 1)], 1)

    return run(_after(case, of_documents if case.variant == "documents" else convolve))


def _causal_conv1d(case: BenchCase) -> Call:
    function: Callable[..., Tensor] = imported("causal_conv1d", "causal_conv1d_fn")
    numbers = once(lambda cu_seqlens: torch.repeat_interleave(cu_seqlens.diff())[None].int())

    def convolve(x: Tensor, weight: Tensor, other: Tensor | None = None) -> Tensor:
        documents = case.variant == "documents" and other is not None
        more = {"seq_idx": numbers(other)} if documents else {"bias": other}
        return function(x.transpose(1, 2), weight, activation="silu", **more).transpose(1, 2)

    return _after(case, convolve)


def _fla(case: BenchCase) -> Call:
    function: Callable[..., tuple[Tensor, Any]] = imported("fla.modules.convolution", "causal_conv1d")
    norm: Callable[..., Tensor] = imported("fla.modules.l2norm", "l2norm")

    def convolve(x: Tensor, weight: Tensor, other: Tensor | None = None) -> Tensor:
        name = "cu_seqlens" if case.variant == "documents" else "bias"
        return function(x, weight, activation="silu", **{name: other})[0]

    return _after(case, convolve, lambda heads: norm(heads, eps=_EPS))


def _peers(case: BenchCase) -> list[Contender]:
    theirs = Contender("causal-conv1d", _causal_conv1d, package="causal-conv1d")
    return [*by_pytorch(_eager), theirs, Contender("FLA", _fla, package="FLA")]


BENCH = OpBench("causal_conv1d", _SHAPES, (1, 64, 512), _bytes_moved, _inputs, _peers, options=_options, keywords=_keywords)
