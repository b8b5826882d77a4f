"""How ranks share rotary positions and attention on DTensors: see runtime/sharding.py."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from onepass.runtime.sharding import (
    PARTIAL,
    WHOLE,
    Layout,
    Split,
    all_as,
    first_split,
    leading_split,
    refuse_split,
    split_output,
    sum_over,
)

_NORMS = "q_weight", "k_weight"  # of each head


def shard_rope(given: dict[str, Any], at: Mapping[str, Split], ranks: int) -> Layout:
    """Heads of q and of k are divided each by itself; sequences and positions for both, and for tables that have them."""
    q, k = given["q"], given["k"]
    documents = given["cu_seqlens"] is not None  # their positions are counted from the sequence's start
    rows: Split = WHOLE
    if not documents:
        rows = first_split(leading_split(at["q"], q, last=2), leading_split(at["k"], k, last=2))
    heads = q.dim() - 2
    inputs: dict[str, Split] = all_as(WHOLE, "cu_seqlens", *_NORMS)
    for name in ("q", "k"):
        inputs[name] = rows if rows != WHOLE else heads if at[name] == heads else WHOLE
    for name in ("cos", "sin"):
        inputs[name] = table_split(given[name], rows, q.dim() - 3)
    gradients = {f"{name}_weight": sum_over(inputs[name]) for name in ("q", "k")}
    return Layout(inputs, gradients, [split_output(inputs["q"], q), split_output(inputs["k"], k)])


def shard_attention(given: dict[str, Any], at: Mapping[str, Split], ranks: int) -> Layout:
    """Sequences are divided. A qkv divided by columns is gathered, as one rank's are no heads, and then heads are divided."""
    qkv, heads = given["qkv"], given["heads"]
    groups = heads if given["groups"] is None else given["groups"]
    tables = {name: table_split(given[name], WHOLE, 1) for name in ("cos", "sin")}
    options = {"overwrite": False}  # it is the DTensor's memory
    if at["qkv"] == qkv.dim() - 1:
        if groups % ranks:
            refuse_split("qkv", at["qkv"], f"Shard(0) or Replicate, as {ranks} ranks can't share {groups} groups of heads")
        inputs: dict[str, Split] = {"qkv": WHOLE, "sinks": 0, **all_as(WHOLE, "cu_seqlens", *_NORMS), **tables}
        queries = heads * (1 + bool(given["gated"]))  # and gates
        own = partial(_own_heads, heads=heads, groups=groups, queries=queries, by_group=given["by_group"])
        y = (qkv.dim() - 1, heads * (qkv.shape[-1] // (queries + 2 * groups)))
        sums = all_as(PARTIAL, "qkv", *_NORMS)
        return Layout(inputs, sums, y, options=options, adapt=own)
    rows: Split = 0 if at["qkv"] == 0 and given["cu_seqlens"] is None else WHOLE
    if rows == 0:
        tables = {name: table_split(given[name], 0, 1) for name in ("cos", "sin")}
    inputs = {"qkv": rows, **all_as(WHOLE, "sinks", "cu_seqlens", *_NORMS), **tables}
    return Layout(inputs, all_as(sum_over(rows), "sinks", *_NORMS), split_output(rows, qkv), options=options)


def table_split(table: Tensor | None, rows: Split, sequence: int) -> Split:
    """How a table [..., S, R/2] is divided where S is that dimension of q: it may have fewer dimensions, or sizes of 1."""
    if table is None or rows == WHOLE:
        return WHOLE
    dim = int(rows) - sequence + table.dim() - 2
    return dim if dim >= 0 and table.shape[dim] > 1 else WHOLE


def _own_heads(
    parts: dict[str, Any], rank: int, ranks: int, heads: int, groups: int, queries: int, by_group: bool
) -> None:  # fmt: skip
    """The queries, keys and values of a rank's heads, one after another; by group those of its groups."""
    qkv = parts["qkv"]
    size = qkv.shape[-1] // (queries + 2 * groups)
    sections = [qkv] if by_group else qkv.split([queries * size, groups * size, groups * size], -1)
    parts["qkv"] = torch.cat([section.chunk(ranks, -1)[rank] for section in sections], -1)
    parts["heads"], parts["groups"] = heads // ranks, groups // ranks
