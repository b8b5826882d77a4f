"""attention over documents, with a window or a softcap: the options of the bench's cases, their formula, and their peers."""

from __future__ import annotations

from importlib.util import find_spec
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from onepass.bench.model import BenchCase, Call, Contender, Result
from onepass.bench.peers import needs_gpu
from onepass.ops.attention.formula import parts_of

MIXED = (3000, 200, 1500, 96, 4096, 700, 44, 2300, 1024, 900, 350, 2174)
_QUERIES = 4096  # of the formula at once


def lengths_of(case: BenchCase) -> tuple[int, ...]:
    """Return the documents' lengths; in small cases, documents of a third."""
    S = case.shape[1]
    if sum(MIXED) != S:
        return (S // 3, 0, S // 3, S - 2 * (S // 3))
    return MIXED if case.variant == "documents" else (512,) * (S // 512)


def options_of(case: BenchCase) -> dict[str, Any]:
    """Return onepass's options but for the boundaries, which are a tensor."""
    if case.variant == "window":
        return {"window": min(1024, case.shape[1] // 3)}
    return {"softcap": 50.0} if case.variant == "softcap" else {}


def heads_of(case: BenchCase) -> tuple[int, int]:
    """Return how many heads queries have, and keys and values."""
    return case.shape[2], case.shape[3]


# ---- the formula: a document and a block of queries at a time, as all scores of 16,384 tokens don't fit ----


def _rounded_back(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x, and round its gradient, an operand of products."""
    if x.requires_grad:
        x.register_hook(lambda dx: dx.to(dtype).to(dx.dtype))
    return x


def _rounded_forth(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x rounded, an operand of products, and leave its gradient. The difference of neighbours is exact."""
    return x + (x.to(dtype).to(x.dtype) - x).detach()


def formula(case: BenchCase, rounded: bool) -> Call:
    """Return the formula. `rounded`: operands of products have the case's dtype."""
    heads, groups = heads_of(case)
    options = options_of(case)
    window, softcap = options.get("window", case.shape[1]), options.get("softcap")

    def block(q: Tensor, k: Tensor, v: Tensor, ahead: int) -> Tensor:
        """Return y of queries, of which the first comes `ahead` tokens after the first key."""
        wide = torch.promote_types(q.dtype, torch.float32)
        q, k, v = (x.transpose(0, 1).to(wide) for x in (q, k, v))
        k, v = (x.repeat_interleave(heads // groups, 0) for x in (k, v))
        scores = q @ k.mT
        scores = (_rounded_back(scores, case.dtype) if rounded else scores) * case.shape[4] ** -0.5
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        i, j = torch.arange(q.shape[1], device=q.device)[:, None] + ahead, torch.arange(k.shape[1], device=q.device)[None, :]
        p = scores.masked_fill((j > i) | (i - j >= window), float("-inf")).softmax(-1)
        p = _rounded_forth(p, case.dtype) if rounded else p
        y: Tensor = (p @ v).transpose(0, 1)
        return y

    def call(qkv: Tensor, *_: Tensor) -> Result:
        each = []
        for row in qkv:
            q, k, v = (x[0] for x in parts_of(row[None], heads, groups))
            begin = 0
            for length in lengths_of(case) if "documents" in case.variant else (qkv.shape[1],):
                for first in range(begin, begin + length, _QUERIES):
                    end, from_key = min(first + _QUERIES, begin + length), max(begin, first - window + 1)
                    keys = slice(from_key, end)
                    each.append(checkpoint(block, q[first:end], k[keys], v[keys], first - from_key, use_reentrant=False))
                begin += length
        y: Tensor = torch.cat(each).reshape(*qkv.shape[:2], -1)
        return y.to(qkv.dtype)

    return call


def by_pytorch(case: BenchCase) -> Call:
    """PyTorch's attention of each document, or with a window's mask: a CPU's, which rounds each head's gradients before it sums
    those of a group."""
    lengths = lengths_of(case) if "documents" in case.variant else (case.shape[1],)
    window = options_of(case).get("window")

    def call(qkv: Tensor, *_: Tensor) -> Result:
        S = qkv.shape[1]
        seen = None if window is None else torch.ones(S, S, dtype=torch.bool, device=qkv.device).tril().triu(1 - window)
        documents = [parts_of(document, *heads_of(case)) for document in qkv.split(lengths, 1) if document.shape[1]]
        return torch.cat([sdpa(*parts, seen) for parts in documents], 1)

    return call


# ---- peers ----


def _flex(case: BenchCase) -> Call:
    """PyTorch's flex_attention, compiled; its mask is made once, at the first call."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    function, options, masks = torch.compile(flex_attention, dynamic=False), options_of(case), list[Any]()
    document = torch.repeat_interleave(torch.tensor(lengths_of(case))) if "documents" in case.variant else None

    def mask_of(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        seen = i >= j
        if document is not None:
            seen = seen & (document[i] == document[j])
        return seen & (i - j < options["window"]) if "window" in options else seen

    def cap(score: Tensor, *_: Tensor) -> Tensor:
        return options["softcap"] * torch.tanh(score / options["softcap"])  # type: ignore[no-any-return]

    def call(qkv: Tensor, *tensors: Tensor) -> Result:
        nonlocal document
        if not masks:
            document = None if document is None else document.to(qkv.device)
            masks.append(create_block_mask(mask_of, None, None, qkv.shape[1], qkv.shape[1], device=qkv.device.type))
        q, k, v = (x.transpose(1, 2) for x in parts_of(qkv, *heads_of(case)))
        modified = cap if "softcap" in options else None
        y = function(q, k, v, modified, masks[0], enable_gqa=q.shape[1] != k.shape[1])
        return y.transpose(1, 2).flatten(2)

    return call


def _varlen(case: BenchCase) -> Call:
    """PyTorch's attention of documents; keys and values are repeated where it knows no groups."""
    from torch.nn.attention.varlen import varlen_attn

    longest = max(lengths_of(case)) if "documents" in case.variant else case.shape[1]
    by_group = "enable_gqa" in signature(varlen_attn).parameters
    window = (options_of(case)["window"] - 1 if case.variant == "window" else -1, 0)

    def call(qkv: Tensor, *tensors: Tensor) -> Result:
        heads, groups = heads_of(case)
        q, k, v = (x[0] for x in parts_of(qkv, heads, groups))
        if not by_group:
            k, v = (x.repeat_interleave(heads // groups, 1) for x in (k, v))
        at = tensors[0] if tensors else torch.tensor([0, qkv.shape[1]], device=qkv.device, dtype=torch.int32)
        more: dict[str, Any] = {"enable_gqa": heads != groups} if by_group else {}
        y = varlen_attn(q, k, v, at, at, longest, longest, window_size=window, **more)
        return y.flatten(1)[None]  # type: ignore[union-attr]

    return call


def _dense(case: BenchCase) -> Call:
    """SDPA of documents that happen to be as long as each other."""
    length = lengths_of(case)[0]

    def call(qkv: Tensor, *_: Tensor) -> Result:
        parts = parts_of(qkv.view(-1, length, qkv.shape[-1]), *heads_of(case))
        return sdpa(*parts).view(1, qkv.shape[1], -1)

    return call


def sdpa(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None = None) -> Tensor:
    """Attend to the keys that are `seen`; None: causally."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v, seen, is_causal=seen is None, enable_gqa=q.shape[1] != k.shape[1])
    return y.transpose(1, 2).flatten(2)


def visible_keys(case: BenchCase) -> Tensor:
    """Return the keys that each query sees, as cuDNN flex takes them: before the first number, and from the second to the third.

    They are int32, of shape [1, 1 or 3, queries of all sequences or documents], and count from a sequence's or document's start.
    """
    lengths = lengths_of(case) if "documents" in case.variant else (case.shape[1],) * case.shape[0]
    end = torch.cat([torch.arange(1, length + 1, dtype=torch.int32) for length in lengths])
    window = options_of(case).get("window")
    if window is None:
        return end[None, None]
    return torch.stack([torch.zeros_like(end), (end - window).clamp(min=0), end])[None].contiguous()


def peers(case: BenchCase) -> list[Contender]:
    contenders = [Contender("flex_attention", _flex, compiles=True, lacks=needs_gpu())]
    lacks = "no softcap" if case.variant == "softcap" else needs_gpu()
    if find_spec("torch.nn.attention.varlen") is None:
        lacks = f"PyTorch {torch.__version__} has none, 2.10 has"
    contenders.append(Contender("varlen_attn", _varlen, lacks=lacks))
    if len(set(lengths_of(case))) == 1 and "documents" in case.variant:
        contenders.append(Contender("dense SDPA", _dense))
    return contenders
