"""torchtitan's attention within documents, by onepass. Imports torchtitan."""

from __future__ import annotations

from abc import ABCMeta
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention, VarlenAttention, VarlenMetadata
from torchtitan.protocols.module import Module

from onepass.integrations.torchtitan_configs import new_config
from onepass.ops.attention.attention import attention as attend


class DocumentAttention(VarlenAttention):
    """Attention within documents, in a window or not."""

    Config = new_config("DocumentAttention", VarlenAttention)

    def __init__(self, config: Any) -> None:
        super(VarlenAttention, self).__init__()  # VarlenAttention's own chooses a FlashAttention
        before, after = (None if keys < 0 else keys for keys in config.window_size)
        self.causal = after == 0
        self.window = (None if before is None else before + 1) if self.causal else (before, after)

    def forward(
        self, q_BLNH: Tensor, k_BLNH: Tensor, v_BLNH: Tensor, *, attention_masks: Any, scale: float | None = None, **options: Any
    ) -> Tensor:  # fmt: skip
        return _attend(q_BLNH, k_BLNH, v_BLNH, options, scale=scale, **self.sees(attention_masks))

    def sees(self, attention_masks: Any) -> dict[str, Any]:
        """Return the options of `onepass.attention` that say which keys a query sees."""
        if not isinstance(attention_masks, VarlenMetadata):
            raise TypeError(f"attention_masks must be VarlenMetadata, but is {type(attention_masks).__qualname__}")
        return {"causal": self.causal, "window": self.window, "cu_seqlens": attention_masks.cu_seq_q}


def _attend(
    q: Tensor, k: Tensor, v: Tensor, others: dict[str, Any], *, cu_seqlens: Tensor | None = None, **options: Any
) -> Tensor:  # fmt: skip
    """Return y [B, L, heads, D]. q, k and v are copied into one tensor: a read and a write of each."""
    others = {name: value for name, value in others.items() if name != "enable_gqa" and value is not None}
    if others:
        raise NotImplementedError(f"onepass's attention knows no {', '.join(others)}: leave the override `attention` off")
    if isinstance(q, DTensor) or q.shape[1] != k.shape[1]:
        raise NotImplementedError("onepass's attention knows no context parallelism: leave the override `attention` off")
    if q.shape[-1] != v.shape[-1]:
        raise NotImplementedError(
            f"onepass's attention needs heads of one size, but q's have {q.shape[-1]} and v's {v.shape[-1]}: leave the override "
            "`attention` off"
        )
    heads, groups, qkv = q.shape[2], k.shape[2], torch.cat([q, k, v], 2).flatten(2)
    if cu_seqlens is not None:
        qkv = qkv.flatten(0, 1)[None]
    y = attend(qkv, heads, groups, cu_seqlens=cu_seqlens, deterministic=False, **options)
    return y.view(q.shape)


class InnerAttention(Module.Config, metaclass=ABCMeta):
    """All of torchtitan's, for `attention` to take or refuse."""


for _stock in (VarlenAttention, ScaledDotProductAttention, FlexAttention):
    InnerAttention.register(_stock.Config)
