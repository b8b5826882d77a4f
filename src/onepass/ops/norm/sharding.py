"""How ranks share a norm, and a norm with its linear layer, on DTensors: see runtime/sharding.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onepass.runtime.sharding import (
    PARTIAL,
    WHOLE,
    Layout,
    Output,
    Split,
    add_bias_once,
    all_as,
    first_split,
    leading_split,
    refuse,
    refuse_split,
    split_output,
    sum_over,
)

_VECTORS = "weight", "bias", "norm_weight", "norm_bias"


def shard_norm(given: dict[str, Any], at: Mapping[str, Split], ranks: int) -> Layout:
    """Rows are divided, and whole rows normalised."""
    if "out" in given:
        refuse(given, "out")
    return _by_rows(given, at, _rows(given, at))


def shard_norm_linear(given: dict[str, Any], at: Mapping[str, Split], ranks: int) -> Layout:
    """Rows are divided where the weight is whole; a weight divided by rows is Megatron's column-parallel one."""
    refuse(given, "tp_group", "deferred", "precision")
    x, weight, rows = given["x"], given["weight"], _rows(given, at)
    if at["weight"] == WHOLE:
        return _by_rows(given, at, rows)
    if at["weight"] != 0:
        refuse_split("weight", at["weight"], "Shard(0) or Replicate, as a norm needs whole rows")
    more = int(given["return_norm_output"]) + int(given["return_input"] or given["residual"] is not None)
    y = (x.dim() - 1, weight.shape[0])
    vectors: dict[str, Split] = all_as(WHOLE, "norm_weight", "norm_bias")
    inputs: dict[str, Split]
    outputs: list[Output]
    if rows == 0 and x.shape[0] % ranks == 0:  # sequence parallel: norm(h) is gathered, under products
        inputs = {"x": 0, "residual": 0, **vectors, "weight": 0, "bias": 0}
        outputs = [y, *[split_output(0, x)] * more]
        return Layout(inputs, {name: sum_over(0) for name in vectors}, outputs, "tp_group", {"sequence_parallel": True})
    if rows == WHOLE or more:  # dx is summed in the op, before what comes back through h and norm(h) is added
        inputs = {"x": WHOLE, "residual": WHOLE, **vectors, "weight": 0, "bias": 0}
        return Layout(inputs, outputs=[y, *[WHOLE] * more], group="tp_group", options={"sequence_parallel": False})
    inputs = {"x": WHOLE, **vectors, "weight": 0, "bias": 0}  # dx is summed by the reduce-scatter that divides it
    return Layout(inputs, {name: sum_over(0) for name in ("x", *vectors)}, outputs=y)


def shard_gated_norm_linear(given: dict[str, Any], at: Mapping[str, Split], ranks: int) -> Layout:
    """Rows are divided where the weight is whole. Its rows divide y's columns; its columns divide groups and make y a sum."""
    refuse(given, "tp_group", "deferred", "precision")
    x, weight, norm_weight, width = given["x"], given["weight"], given["norm_weight"], given["group_size"]
    last = x.dim() - 1
    if at["weight"] == 0:
        alike = "x", "z", "norm_weight"
        inputs: dict[str, Split] = all_as(WHOLE, *alike) | {"weight": 0, "bias": 0}
        return Layout(inputs, all_as(PARTIAL, *alike), (last, weight.shape[0]))
    if at["weight"] == 1:
        if width is None or x.shape[-1] % (ranks * width):
            refuse_split("weight", 1, "Shard(0) or Replicate, as each rank needs whole groups of x")
        shared = norm_weight is not None and norm_weight.shape[0] == width
        inputs = {"x": last, "z": last, "norm_weight": WHOLE if shared else 0, "weight": 1, "bias": WHOLE}
        sums = ("bias", "norm_weight") if shared else ("bias",)
        return Layout(inputs, all_as(PARTIAL, *sums), PARTIAL, adapt=add_bias_once)
    rows = _rows(given, at)
    whole = "norm_weight", "weight", "bias"
    inputs = all_as(WHOLE, *whole) | all_as(rows, "x", "z")
    return Layout(inputs, all_as(sum_over(rows), *whole), split_output(rows, x))


def _rows(given: dict[str, Any], at: Mapping[str, Split]) -> Split:
    return first_split(*(leading_split(at[name], given["x"]) for name in ("x", "residual", "z") if name in at))


def _by_rows(given: dict[str, Any], at: Mapping[str, Split], rows: Split) -> Layout:
    inputs: dict[str, Split] = all_as(WHOLE, *_VECTORS) | all_as(rows, "x", "residual", "z")
    return Layout(inputs, {name: sum_over(rows) for name in _VECTORS}, split_output(rows, given["x"]))
