"""How ranks share a softmax on DTensors: see runtime/sharding.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onepass.runtime.sharding import WHOLE, Layout, Split, leading_split, split_output


def shard_softmax(given: dict[str, Any], at: Mapping[str, Split], ranks: int) -> Layout:
    """Rows are divided, and a mask with them where it has them. A causal call knows its rows by their place in a whole matrix."""
    x, mask = given["x"], given["mask"]
    rows = leading_split(at["x"], x, last=2 if given["causal"] else 1)
    masked: Split = WHOLE
    if rows != WHOLE and mask is not None:
        dim = int(rows) - (x.dim() - mask.dim())
        masked = dim if dim >= 0 and mask.shape[dim] > 1 else WHOLE
    return Layout({"x": rows, "mask": masked}, outputs=split_output(rows, x))
