"""The formula of attention for every type, the same by PyTorch's own attention and by tiles, and the parts of a projection."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass.ops.attention.rope_formula import QKNorm, normed_rope_formula, rope_formula
from onepass.runtime.batch_invariance import invariant
from onepass.runtime.documents import are_readable, are_right, document_of, documents_in_turn, ranges_of, tables_of_documents
from onepass.runtime.sizes import ceil_div

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
    if invariant() and parts[0].numel():
        y = attend_by_tiles(parts, options, cu_seqlens, sinks)
    elif cu_seqlens is not None and are_readable(cu_seqlens):
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


# ---- by tiles, under `batch_invariant()` ----
#
# A document's queries and keys are taken in tiles of 64, from its first token on, the last filled up with zeros. All products,
# exponentials and sums have the shapes of these tiles, whatever the batch is. PyTorch gives equal operands of equal shapes equal
# bits, so a query's depend on its keys alone. A tile of padding adds zeros to gradients, before what the document's own add.

TILE = 64  # tokens


def attend_by_tiles(parts: Parts, options: AttentionOptions, cu_seqlens: Tensor | None, sinks: Tensor | None) -> Tensor:
    """Return y [B, S, heads, D] of q [B, S, heads, D], k and v [B, S, groups, D]; q and k are rotated already."""
    B, S = parts[0].shape[:2]
    documents = documents_in_turn(cu_seqlens, S, "attention by PyTorch's operators")
    ranges = [(first, end) for first, end in documents if end > first]
    each = [_attend_document([x[row, first:end] for x in parts], options, sinks) for row in range(B) for first, end in ranges]
    y: Tensor = torch.cat(each).unflatten(0, (B, S))
    return y


def _attend_document(parts: Sequence[Tensor], options: AttentionOptions, sinks: Tensor | None) -> Tensor:
    """Return y [S, heads, D] of one document."""
    (S, H, _), G = parts[0].shape, options.groups
    queries, keys, values = (in_tiles(x, G) for x in parts)
    ys = [attend_tile(tile, at, keys, values, options, sinks, S) for at, tile in enumerate(queries)]
    by_token: Tensor = torch.stack(ys).unflatten(2, (H // G, TILE)).permute(0, 3, 1, 2, 4)
    return by_token.flatten(2, 3).flatten(0, 1)[:S].to(parts[0].dtype)


def in_tiles(x: Tensor, groups: int) -> tuple[Tensor, ...]:
    """Return tokens [S, heads, D] as tiles [groups, heads / groups * TILE, D], in fp32 or wider."""
    x = F.pad(x, (0, 0, 0, 0, 0, -x.shape[0] % TILE)).to(torch.promote_types(x.dtype, torch.float32))
    tiles = x.unflatten(1, (groups, -1)).unflatten(0, (-1, TILE)).permute(0, 2, 3, 1, 4)
    return tuple(tiles.flatten(2, 3).contiguous().unbind())


def attend_tile(
    queries: Tensor, at: int, keys: Sequence[Tensor], values: Sequence[Tensor], options: AttentionOptions,
    sinks: Tensor | None, end: int,
) -> Tensor:  # fmt: skip
    """Return y of a document's tile of queries, its number `at`, whose keys end at `end`. Queries past that see anything."""
    G, share, left, right = options.groups, options.heads // options.groups, options.left, options.right
    first = 0 if left < 0 else max(0, at * TILE - left) // TILE
    stop = len(keys) if right < 0 else min(len(keys), ceil_div((at + 1) * TILE + right, TILE))
    scores = []
    for number in range(first, stop):
        products = torch.bmm(queries, keys[number].mT) * options.scale
        if options.softcap:
            products = options.softcap * torch.tanh(products / options.softcap)
        hidden = _hidden_in_tile(at, number, options, end, queries.device)
        scores.append(products if hidden is None else products.masked_fill(hidden.repeat(share, 1), float("-inf")))
    tops = [each.detach().amax(-1, keepdim=True) for each in scores]
    if sinks is not None:  # one more key, whose value is 0
        sink = sinks.to(queries.dtype).view(G, share, 1).expand(G, share, TILE).reshape(G, -1, 1)
        tops.append(sink.detach())
    top = torch.stack(tops).amax(0)
    top = top.masked_fill(top == float("-inf"), 0.0)
    total = None if sinks is None else torch.exp(sink - top)
    y = None
    for score, value in zip(scores, values[first:stop], strict=True):
        weights = torch.exp(score - top)
        part, own = weights.sum(-1, keepdim=True), torch.bmm(weights, value)
        total, y = part if total is None else total + part, own if y is None else y + own
    assert y is not None and total is not None
    return y / total


def _hidden_in_tile(at: int, number: int, options: AttentionOptions, end: int, device: torch.device) -> Tensor | None:
    """Return [TILE, TILE], true where a query of tile `at` doesn't see a key of tile `number`, or None where all see all."""
    left, right = options.left, options.right
    ahead = (number - at) * TILE  # of a tile's first key, from its first query
    seen_right = right < 0 or ahead + TILE - 1 <= right
    if seen_right and (left < 0 or ahead - TILE + 1 >= -left) and (right == 0 or (number + 1) * TILE <= end):
        return None
    places = torch.arange(TILE, device=device)
    apart = ahead + places[None, :] - places[:, None]
    hidden = torch.zeros_like(apart, dtype=torch.bool) if right < 0 else apart > right
    if left >= 0:
        hidden = hidden | (apart < -left)
    if right != 0:  # causal queries see no padding, but themselves
        padding = number * TILE + places[None, :] >= end
        hidden = hidden | (padding & (at * TILE + places[:, None] < end))
    return hidden
