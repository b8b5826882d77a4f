"""How ranks share an embedding on DTensors: see runtime/sharding.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onepass.runtime.sharding import PARTIAL, WHOLE, Layout, Split, split_output, sum_over


def shard_embedding(given: dict[str, Any], at: Mapping[str, Split], ranks: int) -> Layout:
    """Ids are divided where the table is whole. Its rows, a part of the vocabulary, make y a sum; its columns divide y's."""
    ids, weight = given["ids"], given["weight"]
    if at["weight"] == 0:
        if given["vocab_size"] is not None:
            raise ValueError(f"vocab_size must be None for a weight that is a DTensor, but is {given['vocab_size']}")
        return Layout({"ids": WHOLE, "weight": 0}, outputs=PARTIAL, options={"vocab_size": weight.shape[0]}, adapt=_first_row)
    if at["weight"] == 1:
        return Layout({"ids": WHOLE, "weight": 1}, outputs=(ids.dim(), weight.shape[1]))
    return Layout({"ids": at["ids"], "weight": WHOLE}, {"weight": sum_over(at["ids"])}, split_output(at["ids"], ids))


def _first_row(parts: dict[str, Any], rank: int, ranks: int) -> None:
    """The id of this rank's first row, as DTensors divide: the last ranks have less, or nothing."""
    rows = parts["vocab_size"]
    parts["vocab_start"] = min(rows, rank * -(-rows // ranks))
