"""embedding against its peers: rows of a table by their ids, and their gradient.

Bytes     forward reads the rows and writes y; backward reads dy, and reads and writes the rows of main_grad in fp32, each once
          however often it was looked up. Without main_grad it writes the table's gradient instead.
Shapes    tokens x features x rows of the table. Ids are drawn as words are: the k-th most frequent row with a weight of 1 / k,
          rows in random order; "uniform" draws all rows alike, and "alike" one row alone.
Peers     eager: F.embedding, whose gradient PyTorch sorts and returns; with main_grad it is then added, as a training loop does.
          torch.compile: the same, compiled.
          Megatron: weight[ids], as its VocabParallelEmbedding has it in deterministic mode: index_put_ sorts. Without that mode
          it is F.embedding.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass.bench.define import OpBench, Random, Shape, Shapes, by_pytorch, give_main_grad, of_each
from onepass.bench.model import BenchCase, Contender, Inputs

_VARIANTS = ("words", "uniform", "alike", "returned")  # returned: words, without main_grad
_GPU = [(16384, 2048, 128256), (16384, 2048, 32000), (8192, 4096, 151936), (65536, 64, 1000000)]
_SHAPES = Shapes(of_each(_VARIANTS, _GPU), of_each(_VARIANTS, [(2048, 256, 32000)]))


def _bytes_moved(variant: str, shape: Shape, size: int) -> tuple[int, int]:
    tokens, features, rows = shape
    looked_up = tokens * features * size
    in_main_grad = 8 * features * _expected_rows(variant, tokens, rows)
    added = rows * features * size if variant == "returned" else in_main_grad
    return 2 * looked_up + 8 * tokens, looked_up + 8 * tokens + added


def _expected_rows(variant: str, tokens: int, rows: int) -> int:
    """Return how many rows are looked up on average."""
    if variant == "alike":
        return 1
    if variant == "uniform":
        return round(rows * -math.expm1(tokens * math.log1p(-1 / rows))) if rows > 1 else 1
    rank = torch.arange(1, rows + 1, dtype=torch.float64)
    share = 1 / rank / (1 / rank).sum()
    return round(float((1 - (1 - share) ** tokens).sum()))


def ids_of(variant: str, tokens: int, rows: int, device: torch.device, generator: torch.Generator) -> Tensor:
    if variant == "alike":
        return torch.full((tokens,), rows // 2, device=device)
    if variant == "uniform":
        return torch.randint(rows, (tokens,), generator=generator, device=device)
    total = (1 / torch.arange(1, rows + 1, dtype=torch.float64, device=device)).cumsum(0)
    drawn = torch.rand(tokens, generator=generator, device=device, dtype=torch.float64) * total[-1]
    rank = torch.searchsorted(total, drawn).clamp_max(rows - 1)
    return torch.randperm(rows, generator=generator, device=device)[rank]


def _inputs(case: BenchCase, random: Random) -> Inputs:
    tokens, features, rows = case.shape
    weight = random.input(rows, features)
    trained = case.variant != "returned"
    if trained:
        give_main_grad(weight)
    tensors = {"ids": ids_of(case.variant, tokens, rows, random.device, random.generator), "weight": weight}
    return Inputs(tensors, frozenset({"ids"}), {"y": random(tokens, features)}, trained)


_MEGATRON = Contender("Megatron", lambda case: lambda ids, weight: weight[ids])
_NONE = "has no embedding of its own"
BENCH = OpBench(
    "embedding", _SHAPES, (64, 64, 128), _bytes_moved, _inputs,
    lambda case: [*by_pytorch(lambda case, run: run(F.embedding)), _MEGATRON],
    without={
        "Liger": "its embedding adds to the gradient with atomics, in the storage type", "QuACK": _NONE, "Apex": _NONE,
        "Transformer Engine": _NONE,
    },
)  # fmt: skip
