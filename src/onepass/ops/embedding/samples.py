"""Sample calls of embedding."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from onepass.ops.embedding.embedding import embedding, embedding_reference
from onepass.runtime.random_calls import Draw, RandomCall, RandomTensor
from onepass.runtime.samples import CoveringCall, Sample, give_main_grad, meta, random_tensors


def _table(rows: int, first: int, vocabulary: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Ids of a vocabulary, some of which are often there, and the rows of a table from `first` on."""
    ids = torch.arange(3 * 11).mul(7).remainder(vocabulary).view(3, 11)
    ids[1] = first + 1
    return ids.to(device), *random_tensors(((rows, 61),), device, dtype)


SAMPLES = {
    "embedding": Sample(partial(_table, 50, 0, 50), embedding_reference, {"padding_idx": 3}),
    "embedding: a shard": Sample(
        partial(_table, 20, 11, 50), embedding_reference, {"vocab_start": 11, "vocab_size": 50, "padding_idx": -25}
    ),
}


SHAPES_OF: dict[str, Any] = {"embedding": {}}
TYPES_OF = {"ids": torch.int64}


# ---- random calls ----


def _random_embedding(draw: Draw) -> RandomCall:
    dtype, width, lead = draw.dtype(), draw.width(), draw.lead()
    vocabulary = draw.choose((5, 1, 64, 300, 1000))
    start = draw.choose((0, 1, 2)) if vocabulary > 4 else 0
    rows = vocabulary - start - (draw.choose((0, 1)) if vocabulary > 4 else 0)
    tensors = {
        "weight": RandomTensor((rows, width), dtype, parameter=True),
        # a fifth of the ids are alike
        "ids": RandomTensor(lead, draw.choose((torch.int64, torch.int32)), "labels", top=vocabulary, ignore_index=start),
    }
    options: dict[str, Any] = {"padding_idx": draw.choose((None, 0, -1)), "vocab_start": start, "vocab_size": vocabulary}
    return RandomCall(tensors, options, partial(embedding_reference, **options))


RANDOM_CALLS = {"embedding": _random_embedding}

# ---- calls that launch every kernel, in every form that is shipped ----


def covering_calls() -> Iterator[CoveringCall]:
    """Widths of all tiles and alignments; types of weight, main_grad and ids; large vocabularies."""
    for width in (1, 16, 64, 777, 2048, 3001, 8192):
        yield _call(width)
    for dtype in (torch.float16, torch.float32):
        for width in (64, 777, 2048):
            yield _call(width, dtype)
    for width in (777, 2048):
        for option in ("main_grad", "int32", "frozen", "a shard"):
            yield _call(width, option=option)
    yield _call(2048, torch.float32, "main_grad")
    yield _call(2048, option="32000")
    yield _call(64, option="20000000")


def _call(width: int, dtype: torch.dtype = torch.bfloat16, option: str = "") -> CoveringCall:
    def run() -> Tensor:
        rows = int(option) if option.isdigit() else 128256
        weight = meta(rows, width, dtype=dtype, requires_grad=option != "frozen")
        ids = torch.empty(16384, dtype=torch.int32 if option == "int32" else torch.int64, device="meta")
        if option == "main_grad":
            give_main_grad(weight)
        shard = {"vocab_start": 1000, "vocab_size": 1 << 18} if option == "a shard" else {}
        y = embedding(ids, weight, backend="triton", **shard)
        return y if y.requires_grad else y + meta(1, dtype=dtype)

    return CoveringCall(" ".join(filter(None, (f"embedding 16384x{width}", option))), dtype, run)
