"""The formula of causal attention for every type, the same by PyTorch's own attention, and the parts of a fused projection."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass.ops.attention.rope_formula import rope_formula

Parts = tuple[Tensor, Tensor, Tensor]


class AttentionOptions(NamedTuple):
    """What attention takes besides tensors."""

    heads: int  # of the queries
    groups: int  # of the keys and values
    interleaved: bool  # the pairs that the tables turn are neighbours
    scale: float  # of the scores


def parts_of(qkv: Tensor, heads: int, groups: int) -> Parts:
    """Return q [B, S, heads, D], k and v [B, S, groups, D]: views of a projection's [B, S, (heads + 2 groups) D]."""
    B, S, columns = qkv.shape
    every = heads + 2 * groups
    # not unflatten and split, which are written in Python: 3.6 us for 5.8
    q, k, v = qkv.view(B, S, every, columns // every).split_with_sizes((heads, groups, groups), 2)
    return q, k, v


def attention_formula(qkv: Tensor, cos: Tensor | None, sin: Tensor | None, options: AttentionOptions) -> Tensor:
    """Return y [B, S, heads D]. All scores exist at once, in fp32 or what is wider."""
    heads, groups, _, scale = options
    q, k, v = rotated_parts(qkv, cos, sin, options)
    wide = torch.promote_types(qkv.dtype, torch.float32)
    q, k, v = (x.to(wide).transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(heads // groups, 1) for x in (k, v))
    S = qkv.shape[1]
    later = torch.ones(S, S, dtype=torch.bool, device=qkv.device).triu(1)
    scores = (q @ k.mT * scale).masked_fill(later, float("-inf"))
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2).to(qkv.dtype)


def rotated_parts(qkv: Tensor, cos: Tensor | None, sin: Tensor | None, options: AttentionOptions) -> Parts:
    """Return q, k and v, by the formula; the tables, where there are any, turn q and k."""
    q, k, v = parts_of(qkv, options.heads, options.groups)
    if cos is None or sin is None:
        return q, k, v
    return rope_formula(q, cos, sin, options.interleaved), rope_formula(k, cos, sin, options.interleaved), v


def attention_by_pytorch(parts: Parts, options: AttentionOptions) -> Tensor:
    """Return y [B, S, heads D] by `scaled_dot_product_attention`, of parts whose q and k are turned already."""
    q, k, v = (x.transpose(1, 2) for x in parts)
    grouped = options.heads != options.groups
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=options.scale, enable_gqa=grouped)
    return y.transpose(1, 2).flatten(2).contiguous()
