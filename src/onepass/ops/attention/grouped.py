"""Megatron-core's layout of a projection: for each group its queries, then its key and its value.

Queries' heads are not at equal distances there, as attention's kernels want them, and PyTorch's. Rotation takes a group for a
token, so it reads them in place, and writes q and k apart. v is copied beside them: backward then needs nothing of the
projection. Gradients go back the same way. So a pass that is made anyway changes the layout, and no other does.

Sequences and tokens lie in the projection's order, also in y and in all gradients: Megatron's is [S, B, ...].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onepass.ops.attention.formula import AttentionOptions, Parts, empty_tokens, gates_of, parts_of
from onepass.ops.attention.rope_formula import QKNorm
from onepass.ops.attention.rope_kernels import rope_tiles, rotate
from onepass.ops.attention.rope_norm_kernels import HeadGradients, rotate_back


def rotated_copy(qkv: Tensor, cos: Tensor, sin: Tensor, options: AttentionOptions) -> Tensor:
    """Return qkv with q and k rotated. v is copied too, so that backward does not need qkv itself."""
    rotated = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
    (q, k, v), (into_q, into_k, into_v) = (parts_of(x, *options.layout) for x in (qkv, rotated))
    rotate(cos, sin, q, k, options.interleaved, False, (into_q, into_k))
    into_v.copy_(v)
    if options.gated:
        gates_of(rotated, options).copy_(gates_of(qkv, options))
    return rotated


def group_parts(qkv: Tensor, options: AttentionOptions) -> Parts:
    """Return q [B, S, groups, heads / groups, D], k and v [B, S, groups, D]: views of qkv."""
    share = options.heads // options.groups
    D = qkv.shape[-1] // (options.groups * (share + 2))
    q, k, v = qkv.view(*qkv.shape[:2], options.groups, share + 2, D).split_with_sizes((share, 1, 1), 3)
    return q, k.squeeze(3), v.squeeze(3)


def empty_parts(qkv: Tensor, options: AttentionOptions) -> Parts:
    """Return memory for q [B, S, heads, D], k and v [B, S, groups, D], each dense."""
    heads, groups = options.heads, options.groups
    D = qkv.shape[-1] // (heads + 2 * groups)
    q, k, v = (empty_tokens(qkv, options, count, D) for count in (heads, groups, groups))
    return q, k, v


def empty_memory(qkv: Tensor, options: AttentionOptions, norm: object) -> Tensor:
    """Return memory of one dimension for dense q, k and v; without v where there is a norm, whose backward keeps qkv."""
    B, S, columns = qkv.shape
    heads = options.heads + options.groups * (2 if norm is None else 1)
    return qkv.new_empty(B * S * heads * (columns // options.every))


def parts_of_memory(memory: Tensor, like: Tensor, options: AttentionOptions, D: int) -> tuple[Tensor, ...]:
    """Return q, k and, where there is room for it, v: views of `empty_memory`. like: has B and S."""
    (B, S), counts = like.shape[:2], [options.heads, options.groups, options.groups]
    counts = counts if memory.numel() == B * S * sum(counts) * D else counts[:2]
    parts = zip(memory.split_with_sizes([B * S * count * D for count in counts]), counts, strict=True)
    if options.sequence_first:
        return tuple(part.view(S, B, count, D).transpose(0, 1) for part, count in parts)
    return tuple(part.view(B, S, count, D) for part, count in parts)


def rotate_groups(
    qkv: Tensor, cos: Tensor | None, sin: Tensor | None, parts: tuple[Tensor, ...], options: AttentionOptions, norm: QKNorm | None
) -> Parts:
    """Return q and k of qkv, normalised and rotated where there is something to do it with, and v. They lie in `parts`, but for
    a v that has no place there."""
    q, k, v = group_parts(qkv, options)
    if cos is None or sin is None:
        parts[0].view(q.shape).copy_(q)
        parts[1].copy_(k)
    else:
        order = _token_order(q, cos, options)
        heads, out = (_by_group(pair, order) for pair in ((q, k), parts))
        tables = _table_by_group(cos, q, order), _table_by_group(sin, q, order)
        rotate(*tables, *heads, options.interleaved, False, out, norm)
    return (*parts, v) if len(parts) == 2 else (*parts[:2], parts[2].copy_(v))  # type: ignore[return-value]


def kept_parts(rotated: Tensor, qkv: Tensor | None, y: Tensor, options: AttentionOptions) -> Parts:
    """Return q and k as forward rotated them, and v, of qkv where that was kept. y: attention's result."""
    parts = parts_of_memory(rotated, y, options, y.shape[-1] // options.heads)
    return parts if qkv is None else (*parts, values_of(qkv, options))  # type: ignore[return-value]


def values_of(qkv: Tensor, options: AttentionOptions) -> Tensor:
    return group_parts(qkv, options)[2] if options.by_group else parts_of(qkv, *options.layout)[2]


def empty_gradients(q: Tensor, dqkv: Tensor, options: AttentionOptions) -> Parts:
    """Return where gradients of dense q, k and v go: k's and v's to dqkv, and q's to memory like q's, to be rotated back."""
    _, dk, dv = group_parts(dqkv, options)
    return torch.empty_like(q), dk, dv


def rotate_groups_back(
    gradients: tuple[Tensor, Tensor], dqkv: Tensor | None, cos: Tensor | None, sin: Tensor | None, options: AttentionOptions,
    normed: tuple[QKNorm, Tensor, HeadGradients] | None, **direct: Any,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Write the gradients of q and k, rotated back, to dqkv; without tables that of q alone, as k's lies there.

    normed: the norm, qkv as it came, and what is wanted, without which dqkv may be None. Return the norm's weights' gradients.
    """
    into = None if dqkv is None else group_parts(dqkv, options)[:2]
    if cos is None or sin is None:
        if into is not None:
            into[0].copy_(gradients[0].view(into[0].shape))
        return None, None
    dq = gradients[0].view(*gradients[0].shape[:2], options.groups, -1, gradients[0].shape[-1])
    order = _token_order(dq, cos, options)
    tables = _table_by_group(cos, dq, order), _table_by_group(sin, dq, order)
    by_group, out = _by_group((dq, gradients[1]), order), None if into is None else _by_group(into, order)
    if normed is None:
        rotate(*tables, *by_group, options.interleaved, True, out)
        return None, None
    norm, qkv, needs = normed
    raw = _by_group(group_parts(qkv, options), order)
    return rotate_back(*tables, by_group, raw, norm, options.interleaved, needs, out, **direct)[2:]


# ---- groups as tokens of a rotation, which has two dimensions of tokens ----

_Order = tuple[int, int, int]  # of the dimensions [B, S, groups]


def _token_order(q: Tensor, cos: Tensor, options: AttentionOptions) -> _Order:
    """Return an order in which two of the dimensions are one. q: by group.

    Sequences and groups lie next to each other where tokens are first, or there is one sequence. They are the inner dimension
    where they fill a tile. Elsewhere tokens and groups are one.
    """
    B, _, groups, share, D = q.shape
    if B > 1 and not options.sequence_first:
        return 0, 1, 2
    return (1, 0, 2) if B * groups >= rope_tiles(share, 1, D, cos.shape[-1]).block_s else (0, 2, 1)


def _by_group(parts: tuple[Tensor, ...], order: _Order) -> tuple[Tensor, Tensor]:
    """Return q and k with their tokens, groups for one, in this order, before the heads of a group."""
    q, k, *_ = parts
    groups = k.shape[2]
    q, k = (x if x.dim() == 5 else x.view(*x.shape[:2], groups, -1, x.shape[-1]) for x in (q, k))
    return q.permute(*order, 3, 4), k.permute(*order, 3, 4)


def _table_by_group(table: Tensor, q: Tensor, order: _Order) -> Tensor:
    """Return a table [S, R/2] or [B, S, R/2] for tokens in this order, the same for all groups. A longer one is a copy."""
    table = (table if table.dim() == 3 else table.unsqueeze(0)).unsqueeze(2)
    if q.shape[0] > 1 and (order == (0, 1, 2) or table.shape[0] > 1):
        table = table.expand(-1, -1, q.shape[2], -1)
        return table.permute(*order, 3).contiguous()
    return table.permute(*order, 3)
