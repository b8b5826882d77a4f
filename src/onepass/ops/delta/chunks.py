"""The gated delta rule by chunks of tokens, in plain PyTorch: matrix products within chunks, and a state from chunk to chunk.

With G the sum of g within a chunk and S the state before it, the deltas d that its tokens write solve a triangular system:
    (I + A) d = beta (v - exp(G) k S),  A[i, j] = beta_i exp(G_i - G_j) k_i k_j for j < i
    y_i = scale (exp(G_i) q_i S + sum over j <= i of exp(G_i - G_j) (q_i k_j) d_j)
    S becomes exp(G_last) S + sum over j of exp(G_last - G_j) k_j d_j
Documents lie in chunks of their own (runtime/chunks.py).
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

from onepass.runtime.chunks import CHUNK, in_chunks, slots_of
from onepass.runtime.dispatch import cast, under_autocast
from onepass.runtime.documents import are_right


def chunked_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None, cu_seqlens: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Return y of q's type and the final states, of each sequence or document, in fp32 or wider."""
    with torch.autocast(q.device.type, enabled=False) if under_autocast(q) else nullcontext():
        return delta_rule_as_cast(q, k, v, g, beta, state, cu_seqlens, scale)


def delta_rule_as_cast(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None, cu_seqlens: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """`chunked_delta_rule`, whose products' operands autocast may round."""
    (B, S, H, V), K, dtype = v.shape, k.shape[-1], q.dtype
    wide = torch.promote_types(q.dtype, torch.float32)
    rows = [t.to(wide) for t in (q, k, v, g[..., None], beta[..., None])]
    slots = None if cu_seqlens is None else slots_of(cu_seqlens, S)
    if cu_seqlens is not None:
        rows[3] = rows[3] + torch.where(are_right(cu_seqlens, S), 0.0, torch.nan)
    q, k, v, g, beta = (in_chunks(t, H, slots) for t in rows)
    states = v.new_zeros(B, H, K, V) if state is None else state.to(wide)
    if slots is not None and state is None:
        states = states.expand(slots.last.shape[0], H, K, V)

    total = g.double().cumsum(-2)  # [B, H, chunks, CHUNK, 1]. Sums of a chunk are large where their differences are small
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    decay = (total - total.mT).to(wide).masked_fill(~lower, -torch.inf).exp()
    grown = total.to(wide).exp()
    system = (beta * k) @ k.mT * decay
    solved = torch.linalg.solve_triangular(system, torch.cat([beta * v, beta * grown * k], -1), upper=False, unitriangular=True)
    writes, reads = solved.split((V, K), -1)
    scores, queries = scale * (q @ k.mT) * decay, scale * grown * q
    keys, kept = k * (total[..., -1:, :] - total).to(wide).exp(), grown[..., -1:, :]

    S_now, ys, passed = states if slots is None else states[:1], [], []
    for n in range(q.shape[2]):
        if slots is not None:
            own = states.index_select(0, slots.document[n : n + 1])
            S_now = torch.where(slots.first[n], own, S_now)
        deltas = writes[:, :, n] - reads[:, :, n] @ S_now
        ys.append(queries[:, :, n] @ S_now + scores[:, :, n] @ deltas)
        S_now = kept[:, :, n] * S_now + keys[:, :, n].mT @ deltas
        passed.append(S_now)
    y = torch.stack(ys, 2).flatten(2, 3).transpose(1, 2)  # [B, slots, H, V]
    if slots is None:
        return cast(y[:, :S], dtype).flatten(1).view(B, S, H, V), S_now
    final = torch.where(slots.empty[:, None, None, None], states, torch.cat(passed).index_select(0, slots.last))
    return cast(y.index_select(1, slots.slots), dtype), final
