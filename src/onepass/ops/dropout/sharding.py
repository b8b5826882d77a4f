"""How ranks share dropout_add on DTensors: see runtime/sharding.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onepass.runtime.sharding import WHOLE, Layout, Split, first_split, leading_split, refuse, split_output, sum_over


def shard_dropout_add(given: dict[str, Any], at: Mapping[str, Split], ranks: int) -> Layout:
    """Rows are divided. The first rank's random state decides for all: those with the same rows drop the same elements.

    Where the first dimension is divided, the elements dropped are those of one rank with all rows. Where another is, rows are
    numbered rank by rank, so that no two rows of the whole drop alike.
    """
    refuse(given, "tp_group")
    x = given["x"]
    rows = first_split(leading_split(at["x"], x), leading_split(at["residual"], x))
    inputs: dict[str, Split] = {"x": rows, "residual": rows, "bias": WHOLE}
    random = bool(given["training"] and given["p"])
    return Layout(
        inputs, {"bias": sum_over(rows)}, split_output(rows, x),
        group="tp_group" if random else "", options={"sequence_parallel": rows != WHOLE} if random else {},
    )  # fmt: skip
