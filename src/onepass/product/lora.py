"""What LoRA is to a layer: its record, what is wrong with one, and its formula, y += scale * rows @ a.T @ b.T."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass.runtime.checks import check_device, check_floating, check_number
from onepass.runtime.dispatch import under_autocast


class LoRA(NamedTuple):
    """What LoRA adds to a linear layer of rows x: ``scale * (x @ a.T) @ b.T``.

    Of a layer that PEFT has wrapped: ``LoRA(layer.lora_A["default"].weight, layer.lora_B["default"].weight,
    layer.scaling["default"])``, beside ``layer.base_layer.weight``.

    Args:
        a: ``[r, K]``, of x's type or fp32, which is rounded to the product's type. Its gradient has its own type. With a tp_group
            it is whole on every rank, and so is its gradient, or has this rank's columns, as the weight does.
        b: ``[N, r]``, of the same types: this rank's rows, or all of them, as of the weight.
        scale: multiplies the product of both; alpha / r, or alpha / sqrt(r) for rsLoRA.
        rows: ``(first, last)``, the weight's rows that it changes, where several layers are one weight. b has as many. None: all.
    """

    a: Tensor
    b: Tensor
    scale: float = 1.0
    rows: tuple[int, int] | None = None


Adapters = LoRA | Sequence[LoRA] | None


def check_adapter(
    name: str, lora: object, x: Tensor, weight: Tensor, like: str = "x", fields: Sequence[str] | None = None
) -> LoRA:  # fmt: skip
    """Return `lora`. Raise unless it goes with the weight and what it multiplies. `fields`: the names of a, b and the scale."""
    if not isinstance(lora, LoRA):
        raise TypeError(f"{name} must be an onepass.LoRA or None, but is a {type(lora).__name__}")
    named_a, named_b, named_scale = fields or (f"{name}.a", f"{name}.b", f"{name}.scale")
    N, K = weight.shape
    if lora.rows is not None:
        first, last = lora.rows
        if not 0 <= first < last <= N:
            raise ValueError(f"{name}.rows must be two of the weight's {N} rows, the first below the last, but is {lora.rows}")
        N = last - first
    rank = lora.a.shape[0] if isinstance(lora.a, Tensor) and lora.a.dim() else "r"
    for named, value, shape in ((named_a, lora.a, (rank, K)), (named_b, lora.b, (N, rank))):
        check_floating(named, value)
        if value.shape != shape:
            raise ValueError(f"{named} must have shape ({shape[0]}, {shape[1]}), but has {tuple(value.shape)}")
        if value.dtype not in (x.dtype, torch.float32) and not under_autocast(x):
            raise TypeError(f"{named} must have {like}'s type {x.dtype} or fp32, but is {value.dtype}")
        check_device(named, value, x, like)
    if rank == 0:
        raise ValueError(f"{named_a} must have at least one row, but has shape {tuple(lora.a.shape)}")
    check_number(named_scale, lora.scale)
    if not -math.inf < lora.scale < math.inf:
        raise ValueError(f"{named_scale} must be finite, but is {lora.scale!r}")
    return lora


def adapters_of(lora: Adapters) -> Sequence[LoRA]:
    """Return a layer's adapters, none or several."""
    if lora is None:
        return ()
    return [lora] if isinstance(lora, LoRA) else lora


def check_adapters(lora: Adapters, x: Tensor, weight: Tensor) -> Sequence[LoRA]:
    """Return a layer's adapters. Raise where one doesn't go with the layer."""
    if lora is None:
        return ()
    if isinstance(lora, LoRA) or not isinstance(lora, Sequence):
        return [check_adapter("lora", lora, x, weight)]
    adapters = [check_adapter(f"lora[{i}]", one, x, weight) for i, one in enumerate(lora)]
    if len(adapters) > 1:
        N = weight.shape[0]
        for rows, after in pairwise(sorted([one.rows or (0, N) for one in adapters])):
            if rows != after and after[0] < rows[1]:
                raise ValueError(f"lora must change the same rows of the weight or others, but {rows} and {after} overlap")
    return adapters


def add_adapters(y: Tensor, rows: Tensor, adapters: Sequence[LoRA]) -> Tensor:
    """Return y and what adapters add to it, by the formula, for every type."""
    for a, b, scale, part in adapters:
        added = scale * F.linear(F.linear(rows, a.to(rows.dtype)), b.to(rows.dtype))
        y = y + (added if part is None else F.pad(added, (part[0], y.shape[-1] - part[1])))
    return y


def describe_adapters(lora: Adapters) -> str:
    """Return what `explain` says of them after the products."""
    ranks = ", ".join(str(one.a.shape[0]) for one in adapters_of(lora))
    return f", LoRA of rank {ranks} around them" if ranks else ""
