"""LoRA of a head: a low-rank change of its weight, `scale * b @ a`, which is never made."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass.product.lora import LoRA, check_adapter
from onepass.runtime.dispatch import cast


def check_lora(name: str, lora: LoRA | None, hidden: Tensor, weight: Tensor) -> None:
    """Raise unless `lora` goes with a head's hidden states and its weight."""
    if lora is None:
        return
    check_adapter(name, lora, hidden, weight, "hidden")
    if lora.rows is not None:
        raise ValueError(f"{name}.rows must be None, as a head is one weight, but is {lora.rows}")
    if lora.dropout or lora.ends is not None:
        raise ValueError(f"{name}.dropout must be 0 and {name}.ends None: a head has one adapter for all rows, without dropout")


def head_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, lora: LoRA | None) -> Tensor:
    """The products of a head, by the formula, for every type."""
    logits = F.linear(hidden, weight, bias)
    return logits if lora is None else logits + lora.scale * F.linear(F.linear(hidden, lora.a), lora.b)


def cast_lora(lora: LoRA | None, *dtypes: torch.dtype) -> LoRA | None:
    """Round a and b to each type in turn."""
    for dtype in dtypes if lora is not None else ():
        lora = lora._replace(a=cast(lora.a, dtype), b=cast(lora.b, dtype))  # type: ignore[union-attr]
    return lora
