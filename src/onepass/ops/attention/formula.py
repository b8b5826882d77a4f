"""The formula of attention for every type, the same by PyTorch's own attention, and the parts of a fused projection."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass.ops.attention.rope_formula import QKNorm, normed_rope_formula, rope_formula
from onepass.runtime.documents import are_readable, are_right, document_of, ranges_of, tables_of_documents

Parts = tuple[Tensor, Tensor, Tensor]
Weights = tuple[Tensor | None, Tensor | None]  # of a norm of q's heads, and of k's


class AttentionOptions(NamedTuple):
    """What attention takes besides tensors."""

    heads: int  # of the queries
    groups: int  # of the keys and values
    interleaved: bool  # the pairs that the tables rotate are neighbours
    scale: float  # of the scores
    left: int = -1  # a query sees so many keys before its own, or all: -1
    right: int = 0  # and so many after its own, or all: -1
    softcap: float = 0.0  # the scores' bound, or none: 0
    eps: float = 1e-6  # of the norm of q's and k's heads, where there are weights
    zero_centered_gamma: bool = False  # those weights are kept as their distances from 1
    in_order: bool = True  # sums have a fixed order
    kernels: str = ""  # whose, of choice.py, where a caller names them
    by_group: bool = False  # qkv has for each group its queries, its key and its value
    sequence_first: bool = False  # and lies in memory as [S, B, ...]
    gated: bool = False  # qkv has for each head its query, then its gate

    @property
    def layout(self) -> tuple[int, int, bool]:
        """What `parts_of` takes."""
        return self.heads, self.groups, self.gated

    @property
    def every(self) -> int:
        """How many heads qkv has: of queries, gates, keys and values."""
        return self.heads * (1 + self.gated) + 2 * self.groups


def norm_of(options: AttentionOptions, q_weight: Tensor, k_weight: Tensor) -> QKNorm:
    return QKNorm(q_weight, k_weight, options.eps, options.zero_centered_gamma)


def parts_of(qkv: Tensor, heads: int, groups: int, gated: bool = False) -> Parts:
    """Return q [B, S, heads, D], k and v [B, S, groups, D]: views of a projection's [B, S, (heads + 2 groups) D].

    gated: each head's query is followed by its gate.
    """
    B, S, columns = qkv.shape
    if gated:
        every = 2 * (heads + groups)
        q, k, v = qkv.view(B, S, every, columns // every).split_with_sizes((2 * heads, groups, groups), 2)
        return q[:, :, ::2], k, v
    every = heads + 2 * groups
    # not unflatten and split, which are written in Python: 3.6 us for 5.8
    q, k, v = qkv.view(B, S, every, columns // every).split_with_sizes((heads, groups, groups), 2)
    return q, k, v


def gates_of(qkv: Tensor, options: AttentionOptions) -> Tensor:
    """Return the heads' gates [B, S, heads, D], a view of qkv."""
    heads, columns = options.heads, qkv.shape[-1] // options.every
    gates: Tensor = qkv.narrow(-1, 0, 2 * heads * columns).unflatten(-1, (heads, 2, columns)).select(-2, 1)
    return gates


def without_gates(qkv: Tensor, options: AttentionOptions) -> tuple[Tensor, Tensor]:
    """Return copies of qkv without its gates, and of the gates [B, S, heads D]."""
    heads, columns = options.heads, qkv.shape[-1] // options.every
    both, rest = qkv.split((2 * heads * columns, 2 * options.groups * columns), -1)
    q, gates = both.unflatten(-1, (heads, 2, columns)).unbind(-2)
    return torch.cat([q.flatten(-2), rest], -1), gates.flatten(-2)


def gated_formula(y: Tensor, gates: Tensor) -> Tensor:
    """Return y times its gates' sigmoid, rounded once."""
    wide = torch.promote_types(y.dtype, torch.float32)
    return (y.to(wide) * gates.to(wide).sigmoid()).to(y.dtype)


def ungrouped(qkv: Tensor, options: AttentionOptions) -> tuple[Tensor, AttentionOptions]:
    """Return qkv with all queries first, then keys, then values, and options that say so. A copy where it was `by_group`."""
    if not options.by_group:
        return qkv, options
    share = options.heads // options.groups
    parts = qkv.unflatten(-1, (options.groups, share + 2, -1)).split_with_sizes((share, 1, 1), 3)
    return torch.cat([part.flatten(2) for part in parts], -1), options._replace(by_group=False)


def attention_formula(
    qkv: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    options: AttentionOptions,
    cu_seqlens: Tensor | None = None,
    sinks: Tensor | None = None,
    weights: Weights = (None, None),
) -> Tensor:
    """Return y [B, S, heads D]. All scores of a document exist at once, in fp32 or what is wider."""
    y = formula_of_parts(rotated_parts(qkv, cos, sin, options, cu_seqlens, weights), options, cu_seqlens, sinks)
    return gated_formula(y, gates_of(qkv, options).flatten(2)) if options.gated else y


def formula_of_parts(
    parts: Parts, options: AttentionOptions, cu_seqlens: Tensor | None = None, sinks: Tensor | None = None
) -> Tensor:
    """Return `attention_formula` of q, k and v, of which q and k are rotated already. v may be narrower."""
    return _by_document(parts, options, cu_seqlens, sinks, _scores_at_once)


def rotated_parts(
    qkv: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    options: AttentionOptions,
    cu_seqlens: Tensor | None = None,
    weights: Weights = (None, None),
) -> Parts:
    """Return q, k and v, by the formula; the tables, where there are any, rotate q and k, which weights normalise before."""
    qkv, options = ungrouped(qkv, options)
    q, k, v = parts_of(qkv, *options.layout)
    if cos is None or sin is None:
        return q, k, v
    cos, sin = tables_of_documents(cos, sin, cu_seqlens, qkv.shape[1])
    q_weight, k_weight = weights
    if q_weight is not None and k_weight is not None:
        norm = options.interleaved, options.eps, options.zero_centered_gamma
        q, k = (normed_rope_formula(x, weight, cos, sin, *norm) for x, weight in ((q, q_weight), (k, k_weight)))
        return q, k, v
    return rope_formula(q, cos, sin, options.interleaved), rope_formula(k, cos, sin, options.interleaved), v


def attention_by_pytorch(
    parts: Parts, options: AttentionOptions, cu_seqlens: Tensor | None = None, sinks: Tensor | None = None
) -> Tensor:
    """Return y [B, S, heads D] by `scaled_dot_product_attention`, of parts whose q and k are rotated already.

    It has no softcap and no sinks: with one of those, by the formula.
    """
    return _by_document(parts, options, cu_seqlens, sinks, _scores_at_once if options.softcap or sinks is not None else _by_sdpa)


def is_plain(options: AttentionOptions, cu_seqlens: Tensor | None = None, sinks: Tensor | None = None) -> bool:
    """Whether every query sees all keys, or all up to its own, in a softmax of nothing else."""
    everywhere = options.left < 0 and options.right in (-1, 0)
    return everywhere and not options.softcap and cu_seqlens is None and sinks is None


def _by_document(
    parts: Parts, options: AttentionOptions, cu_seqlens: Tensor | None, sinks: Tensor | None, attend: Callable[..., Tensor]
) -> Tensor:
    """Return y [B, S, heads D]: of each document alone where the host may read the boundaries, elsewhere at once, by a mask."""
    if cu_seqlens is not None and are_readable(cu_seqlens):
        ranges = [(first, end) for first, end in ranges_of(cu_seqlens) if end > first] or [(0, 0)]
        y = torch.cat([attend(tuple(x[:, first:end] for x in parts), options, None, sinks) for first, end in ranges], 1)
    else:
        y = attend(parts, options, cu_seqlens, sinks)
    return contiguous_tokens(y.flatten(2), options)


def empty_tokens(like: Tensor, options: AttentionOptions, *shape: int) -> Tensor:
    """Return memory for ``[B, S, *shape]``, in the projection's order."""
    B, S = like.shape[:2]
    return like.new_empty(S, B, *shape).transpose(0, 1) if options.sequence_first else like.new_empty(B, S, *shape)


def contiguous_tokens(y: Tensor, options: AttentionOptions) -> Tensor:
    """Return y [B, S, ...] contiguous, as [S, B, ...] where the projection lies so."""
    return y.transpose(0, 1).contiguous().transpose(0, 1) if options.sequence_first else y.contiguous()


def _scores_at_once(parts: Parts, options: AttentionOptions, cu_seqlens: Tensor | None, sinks: Tensor | None) -> Tensor:
    dtype, S = parts[0].dtype, parts[0].shape[1]
    wide = torch.promote_types(dtype, torch.float32)
    q, k, v = (x.to(wide).transpose(1, 2) for x in parts)
    if options.heads != options.groups:
        k, v = (x.repeat_interleave(options.heads // options.groups, 1) for x in (k, v))
    scores = q @ k.mT * options.scale
    if options.softcap:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    if (hidden := _hidden(options, cu_seqlens, S, q.device)) is not None:
        scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:  # one more key, whose value is 0
        scores = torch.cat([scores, sinks.to(wide)[:, None, None].expand(*scores.shape[:-1], 1)], -1)
    y = (scores.softmax(-1)[..., :S] @ v).transpose(1, 2).to(dtype)
    return y if cu_seqlens is None else y.masked_fill(~are_right(cu_seqlens, S), torch.nan)


def _by_sdpa(parts: Parts, options: AttentionOptions, cu_seqlens: Tensor | None, sinks: None) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in parts)
    plain, mask = is_plain(options, cu_seqlens), None
    if not plain and (hidden := _hidden(options, cu_seqlens, q.shape[2], q.device)) is not None:
        mask = ~hidden
    y = F.scaled_dot_product_attention(
        q, k, v, mask,
        is_causal=plain and options.right == 0, scale=options.scale, enable_gqa=options.heads != options.groups,
    ).transpose(1, 2)  # fmt: skip
    return y if cu_seqlens is None else y.masked_fill(~are_right(cu_seqlens, y.shape[1]), torch.nan)


def _hidden(options: AttentionOptions, cu_seqlens: Tensor | None, S: int, device: torch.device) -> Tensor | None:
    """Return [queries, keys], true where a query does not see a key, or None where all see all."""
    tokens = torch.arange(S, device=device)
    ahead = tokens[None, :] - tokens[:, None]  # of the query
    hidden = None if options.right < 0 else ahead > options.right
    if options.left >= 0:
        too_far = ahead < -options.left
        hidden = too_far if hidden is None else hidden | too_far
    if cu_seqlens is not None:
        document = document_of(cu_seqlens, S)
        apart = document[:, None] != document[None, :]
        hidden = apart if hidden is None else hidden | apart
    return hidden
