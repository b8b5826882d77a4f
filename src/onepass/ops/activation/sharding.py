"""How ranks share an activation, and one with its linear layer, on DTensors: see runtime/sharding.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onepass.ops.activation.activations import find_activation
from onepass.runtime.sharding import (
    PARTIAL,
    WHOLE,
    Layout,
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


def shard_bias_activation(given: dict[str, Any], at: Mapping[str, Split], ranks: int) -> Layout:
    """Rows are divided; so are columns, unless a row of x is gate and linear part: each number has its gate in the other half."""
    refuse(given, "out")
    x, linear = given["x"], given["linear"]
    last = x.dim() - 1
    split = at["x"] if linear is None else first_split(at["x"], at["linear"])
    if given["dropout"]:
        raise ValueError("dropout must be 0 where tensors are DTensors, as ranks would draw alike: `dropout_add` draws for all")
    if split == last and (linear is not None or not find_activation(given["activation"]).gated):
        inputs = all_as(last, "x", "linear") | {"bias": 0, "token_weight": WHOLE}
        return Layout(inputs, {"token_weight": PARTIAL}, (last, x.shape[last]))
    rows = leading_split(split, x)
    inputs = all_as(rows, "x", "linear", "token_weight") | {"bias": WHOLE}
    return Layout(inputs, {"bias": sum_over(rows)}, split_output(rows, x))


def shard_activation_linear(given: dict[str, Any], at: Mapping[str, Split], ranks: int) -> Layout:
    """Rows are divided where the weight is whole. Its rows divide y's columns; its columns divide x's and make y a sum."""
    refuse(given, "tp_group", "deferred", "precision", "lora")
    x, weight = given["x"], given["weight"]
    last = x.dim() - 1
    if at["weight"] == 0:
        alike = ("x", "activation_bias", "token_weight")
        inputs: dict[str, Split] = all_as(WHOLE, *alike) | {"weight": 0, "bias": 0}
        return Layout(inputs, all_as(PARTIAL, *alike), (last, weight.shape[0]))
    if at["weight"] == 1:
        if find_activation(given["activation"]).gated:
            refuse_split("weight", 1, "Shard(0) or Replicate, as a gated activation needs whole rows of x")
        inputs = {"x": last, "activation_bias": 0, "token_weight": WHOLE, "weight": 1, "bias": WHOLE}
        return Layout(inputs, all_as(PARTIAL, "token_weight", "bias"), PARTIAL, adapt=add_bias_once)
    rows = leading_split(at["x"], x)
    whole = ("activation_bias", "weight", "bias")
    inputs = all_as(WHOLE, *whole) | {"x": rows, "token_weight": rows}
    return Layout(inputs, all_as(sum_over(rows), *whole), split_output(rows, x))
