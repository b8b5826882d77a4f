"""How ranks share a linear layer on DTensors: see runtime/sharding.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onepass.runtime.sharding import PARTIAL, WHOLE, Layout, Split, add_bias_once, leading_split, refuse, split_output, sum_over


def shard_linear(given: dict[str, Any], at: Mapping[str, Split], ranks: int) -> Layout:
    """Rows are divided where the weight is whole. Its rows divide y's columns, its columns make y a sum."""
    refuse(given, "tp_group", "deferred", "precision")
    x, weight = given["x"], given["weight"]
    last = x.dim() - 1
    if at["weight"] == 0:
        return Layout({"x": WHOLE, "weight": 0, "bias": 0}, {"x": PARTIAL}, (last, weight.shape[0]))
    if at["weight"] == 1:
        return Layout({"x": last, "weight": 1, "bias": WHOLE}, {"bias": PARTIAL}, PARTIAL, adapt=add_bias_once)
    rows = leading_split(at["x"], x)
    inputs: dict[str, Split] = {"x": rows, "weight": WHOLE, "bias": WHOLE}
    return Layout(inputs, {"weight": sum_over(rows), "bias": sum_over(rows)}, split_output(rows, x))
