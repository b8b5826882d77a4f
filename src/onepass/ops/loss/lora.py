"""LoRA of a head: a low-rank change of its weight, `scale * b @ a`, which is never made."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass.runtime.checks import check_device, check_floating, check_number
from onepass.runtime.dispatch import cast, under_autocast


class LoRA(NamedTuple):
    """What LoRA adds to a head: the logits are ``hidden @ weight.T + scale * (hidden @ a.T) @ b.T``.

    Of a layer that PEFT has wrapped: ``LoRA(head.lora_A["default"].weight, head.lora_B["default"].weight,
    head.scaling["default"])``, beside ``head.base_layer.weight``.

    Args:
        a: ``[r, D]``, of hidden's type or fp32, which is rounded to the products' type. Whole on every rank of a tp_group, and
            its gradient is the sum over them.
        b: ``[V, r]``, of the same types. With a tp_group, this rank's rows, as of the weight.
        scale: multiplies the product of both.
    """

    a: Tensor
    b: Tensor
    scale: float = 1.0


def check_lora(name: str, lora: LoRA | None, hidden: Tensor, weight: Tensor) -> None:
    """Raise unless `lora` goes with a head's hidden states and its weight."""
    if lora is None:
        return
    if not isinstance(lora, LoRA):
        raise TypeError(f"{name} must be an onepass.LoRA or None, but is a {type(lora).__name__}")
    (V, D), rank = weight.shape, lora.a.shape[0] if isinstance(lora.a, Tensor) and lora.a.dim() else "r"
    for part, value, shape in (("a", lora.a, (rank, D)), ("b", lora.b, (V, rank))):
        check_floating(f"{name}.{part}", value)
        if value.shape != shape:
            raise ValueError(f"{name}.{part} must have shape ({shape[0]}, {shape[1]}), but has {tuple(value.shape)}")
        if value.dtype not in (hidden.dtype, torch.float32) and not under_autocast(hidden):
            raise TypeError(f"{name}.{part} must have hidden's type {hidden.dtype} or fp32, but is {value.dtype}")
        check_device(f"{name}.{part}", value, hidden, "hidden")
    if rank == 0:
        raise ValueError(f"{name}.a must have at least one row, but has shape {tuple(lora.a.shape)}")
    check_number(f"{name}.scale", lora.scale)
    if not -math.inf < lora.scale < math.inf:
        raise ValueError(f"{name}.scale must be finite, but is {lora.scale!r}")


def head_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, lora: LoRA | None) -> Tensor:
    """The products of a head, by the formula, for every type."""
    logits = F.linear(hidden, weight, bias)
    return logits if lora is None else logits + lora.scale * F.linear(F.linear(hidden, lora.a), lora.b)


def cast_lora(lora: LoRA | None, *dtypes: torch.dtype) -> LoRA | None:
    """Round a and b to each type in turn."""
    for dtype in dtypes if lora is not None else ():
        lora = lora._replace(a=cast(lora.a, dtype), b=cast(lora.b, dtype))  # type: ignore[union-attr]
    return lora
