"""An oracle of attention over documents, windows, softcaps and sinks: head by head in fp64, with no code of ours."""

import math

import torch


def rotated(x, cos, sin, interleaved=False):
    """Turn x [T, heads, D] by tables [T, R/2]."""
    half = cos.shape[-1]
    y = x.clone()
    one, other = (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (slice(0, half), slice(half, 2 * half))
    a, b = x[..., one], x[..., other]
    y[..., one] = a * cos[:, None] - b * sin[:, None]
    y[..., other] = b * cos[:, None] + a * sin[:, None]
    return y


def visible(T, boundaries, causal, window):
    """[T, T], by what a person would say: whether query i sees key j."""
    document = torch.tensor([sum(t >= b for b in boundaries[1:]) for t in range(T)])
    if isinstance(window, int):
        before, after = window - 1, 0
    else:
        before, after = window or (None, None)
        after = 0 if causal else after
    i, j = torch.arange(T)[:, None], torch.arange(T)[None, :]
    near = (i - j <= (T if before is None else before)) & (j - i <= (T if after is None else after))
    return near & (document[:, None] == document[None, :])


def packed_attention(
    qkv, heads, groups, *, cos=None, sin=None, interleaved=False, scale=None, causal=True, cu_seqlens=None, window=None,
    softcap=None, sinks=None,
):  # fmt: skip
    """y of one row of tokens, [1, T, heads D], head by head."""
    _, T, columns = qkv.shape
    D = columns // (heads + 2 * groups)
    boundaries = [0, T] if cu_seqlens is None else cu_seqlens.tolist()
    q, k, v = qkv[0].reshape(T, -1, D).split([heads, groups, groups], 1)
    if cos is not None:
        if cos.dim() == 2 and cu_seqlens is not None:
            at = [t - max(b for b in boundaries[:-1] if b <= t) for t in range(T)]
            cos, sin = cos[at], sin[at]
        cos, sin = (table.reshape(T, -1).to(qkv.dtype) for table in (cos, sin))
        q, k = rotated(q, cos, sin, interleaved), rotated(k, cos, sin, interleaved)
    sees = visible(T, boundaries, causal, window).to(qkv.device)
    each = []
    for head in range(heads):
        group = head // (heads // groups)
        scores = torch.einsum("id,jd->ij", q[:, head], k[:, group]) * (scale or 1 / math.sqrt(D))
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = torch.where(sees, scores, -math.inf)
        if sinks is not None:  # a last key, of value 0
            scores = torch.cat([scores, sinks[head].to(scores.dtype).expand(T, 1)], 1)
        weights = (scores - scores.detach().amax(1, keepdim=True)).exp()
        each.append((weights[:, :T] @ v[:, group]) / weights.sum(1, keepdim=True))
    return torch.stack(each, 1).reshape(1, T, heads * D)
