"""The formula of causal attention, for every type; the same by PyTorch's own attention; and how a projection's parts lie."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass.kernels.rope_formula import rope_formula

Parts = tuple[Tensor, Tensor, Tensor]


class Heads(NamedTuple):
    """Heads of the queries, groups of keys and values, how q and k are turned, and by what scores are multiplied."""

    heads: int
    groups: int
    interleaved: bool
    scale: float


def parts_of(qkv: Tensor, heads: int, groups: int) -> Parts:
    """q [B, S, heads, D], k and v [B, S, groups, D], views of a projection's [B, S, (heads + 2 groups) D]."""
    B, S, columns = qkv.shape
    every = heads + 2 * groups
    # not unflatten and split, which are written in Python: 3.6 us for 5.8
    q, k, v = qkv.view(B, S, every, columns // every).split_with_sizes((heads, groups, groups), 2)
    return q, k, v


def attention_formula(qkv: Tensor, cos: Tensor | None, sin: Tensor | None, h: Heads) -> Tensor:
    """[B, S, heads D], with all scores at once, in fp32 or what is wider."""
    q, k, v = turned_parts(qkv, cos, sin, h)
    wide = torch.promote_types(qkv.dtype, torch.float32)
    q, k, v = (x.to(wide).transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(h.heads // h.groups, 1) for x in (k, v))
    S = qkv.shape[1]
    later = torch.ones(S, S, dtype=torch.bool, device=qkv.device).triu(1)
    scores = (q @ k.mT * h.scale).masked_fill(later, float("-inf"))
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2).to(qkv.dtype)


def turned_parts(qkv: Tensor, cos: Tensor | None, sin: Tensor | None, h: Heads) -> Parts:
    """q and k turned, where there are tables, and v."""
    q, k, v = parts_of(qkv, h.heads, h.groups)
    if cos is None or sin is None:
        return q, k, v
    return rope_formula(q, cos, sin, h.interleaved), rope_formula(k, cos, sin, h.interleaved), v


def attention_by_pytorch(parts: Parts, h: Heads) -> Tensor:
    """The same of parts whose q and k are turned."""
    q, k, v = (x.transpose(1, 2) for x in parts)
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=h.scale, enable_gqa=h.heads != h.groups)
    return y.transpose(1, 2).flatten(2).contiguous()
