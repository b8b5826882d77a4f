"""Mamba 2's scan by chunks of tokens, in plain PyTorch: matrix products within chunks, and a state from chunk to chunk.

With d a token's step, G the sum of d A within a chunk and S the state before it:
    y_i = C_i exp(G_i) S + sum over j <= i of exp(G_i - G_j) (C_i B_j) d_j x_j + D x_i
    S becomes exp(G_last) S + sum over j of exp(G_last - G_j) B_j d_j x_j
Documents lie in chunks of their own (runtime/chunks.py).
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass.runtime.chunks import CHUNK, in_chunks, slots_of
from onepass.runtime.dispatch import cast, under_autocast
from onepass.runtime.documents import are_right


class ScanOptions(NamedTuple):
    """What the scan takes besides tensors."""

    softplus: bool
    least: float  # of dt
    most: float
    final: bool  # whether final states are returned
    wheel: str = ""


class ScanInputs(NamedTuple):
    x: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor | None
    dt_bias: Tensor | None
    states: Tensor | None
    cu_seqlens: Tensor | None


def step_sizes(dt: Tensor, dt_bias: Tensor | None, options: ScanOptions, wide: torch.dtype) -> Tensor:
    """Return dt as the scan uses it. `dt_bias` has its heads' dimension and those after it."""
    dt = dt.to(wide)
    if dt_bias is not None:
        dt = dt + dt_bias.to(wide)
    if options.softplus:
        dt = F.softplus(dt)
    return dt.clamp(options.least, options.most)


def chunked_scan(inputs: ScanInputs, options: ScanOptions) -> tuple[Tensor, Tensor]:
    """Return y of x's type and the final states, of each sequence or document, in fp32 or wider."""
    device = inputs.x.device.type
    with torch.autocast(device, enabled=False) if under_autocast(inputs.x) else nullcontext():
        return scan_as_cast(inputs, options)


def scan_as_cast(inputs: ScanInputs, options: ScanOptions) -> tuple[Tensor, Tensor]:
    """`chunked_scan`, whose products' operands autocast may round."""
    x, dt, A, B, C, D, dt_bias, first, cu_seqlens = inputs
    (batch, S, H, P), N, dtype = x.shape, B.shape[-1], x.dtype
    wide = torch.promote_types(dtype, torch.float32)
    slots = None if cu_seqlens is None else slots_of(cu_seqlens, S)
    x, A = x.to(wide), A.to(wide)
    if cu_seqlens is not None:
        A = A + torch.where(are_right(cu_seqlens, S), 0.0, torch.nan)
    rows = x, dt.to(wide)[..., None], B.to(wide), C.to(wide)
    v, steps, B, C = (in_chunks(t, H, slots) for t in rows)
    # in chunks, whose tokens are as many in every document: softplus has other bits at a tensor's end
    steps = step_sizes(steps, None if dt_bias is None else dt_bias[:, None, None, None], options, wide)
    steps = torch.where(in_chunks(x.new_ones(batch, S, 1, 1), 1, slots) > 0, steps, 0.0)
    v, g = steps * v, steps * A[:, None, None, None]
    states = x.new_zeros(batch, H, N, P) if first is None else first.to(wide).mT.contiguous()
    if slots is not None and first is None:
        states = states.expand(slots.last.shape[0], H, N, P)

    total = g.double().cumsum(-2)  # [batch, H, chunks, CHUNK, 1]. Sums of a chunk are large where their differences are small
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=x.device).tril()
    decay = (total - total.mT).to(wide).masked_fill(~lower, -torch.inf).exp()
    grown = total.to(wide).exp()
    inner = (C @ B.mT * decay) @ v
    reads, kept = C * grown, grown[..., -1:, :]
    writes = (B * (total[..., -1:, :] - total).to(wide).exp()).mT @ v

    now, ys, passed = states if slots is None else states[:1], [], []
    for n in range(g.shape[2]):
        if slots is not None:
            own = states.index_select(0, slots.document[n : n + 1])
            now = torch.where(slots.first[n], own, now)
        ys.append(reads[:, :, n] @ now)
        now = kept[:, :, n] * now + writes[:, :, n]
        passed.append(now)
    y = (inner + torch.stack(ys, 2)).flatten(2, 3).transpose(1, 2)  # [batch, slots, H, P]
    y = y[:, :S] if slots is None else y.index_select(1, slots.slots)
    if D is not None:
        y = y + D.to(wide)[:, None] * x
    if slots is not None:
        now = torch.where(slots.empty[:, None, None, None], states, torch.cat(passed).index_select(0, slots.last))
    return cast(y, dtype).flatten(1).view(x.shape), now.mT
