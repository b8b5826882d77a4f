"""router_logits: x @ weight.T of bf16 tokens in fp32, by tensor cores.

Logits decide, so they are computed in fp32. On a GPU that is a product without tensor cores: of 16384 tokens of 2048 and
64 experts it takes .12 ms on an H200, .28 backward, where the bytes of x take .02. But x has 8 bits, and an fp32 number is the
sum of three of 8 bits. Products of two such numbers are exact in fp32, and tensor cores add them with a few bits less: logits are
right to 2e-6.

    weight = w1 + w2 + w3, dlogits = d1 + d2 + d3       each of bf16; a bf16 weight is w1 alone
    logits = x (w1 + w2 + w3)^T                         one product to 3 E columns, then their sums
    dx = (d1 + d2 + d3) w1 + d1 w2                      one product of 4 E columns, right to 2^-16: dx is rounded to bf16
    dweight = (d1 + d2 + d3)^T x                        one product of 3 E rows, then their sums
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onepass.runtime.dispatch import fast_apply, not_twice_differentiable, under_functorch
from onepass.runtime.sharding import has_dtensor

_PARTS = 3  # of 8 bits, in the 24 of fp32


def router_logits(x: Tensor, weight: Tensor) -> Tensor:
    """Return x @ weight.T, at least in fp32 whatever their types and autocast.

    By tensor cores an infinity times an fp32 weight is NaN. Mask logits after this, by -inf.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    with torch.autocast(x.device.type, enabled=False):
        if _has_tensor_cores(x, weight):
            y: Tensor = _apply(x.reshape(-1, x.shape[-1]), weight)
            return y.view(*x.shape[:-1], weight.shape[0])
        return x.to(wide) @ weight.to(wide).t()


def _has_tensor_cores(x: Tensor, weight: Tensor) -> bool:
    """Whether the product goes in parts. A compiler would have to know `torch.mm(out_dtype=)`, which not all its versions do."""
    types = x.dtype is torch.bfloat16 and weight.dtype in (torch.bfloat16, torch.float32)
    plain = torch.compiler.is_compiling() or under_functorch() or has_dtensor(x) or has_dtensor(weight)
    return types and x.is_cuda and x.numel() > 0 and not plain


def _parts(x: Tensor) -> list[Tensor]:
    """Return bf16 tensors whose sum is x."""
    if x.dtype is torch.bfloat16:
        return [x]
    found, rest = [x.to(torch.bfloat16)], x
    for _ in range(1, _PARTS):
        rest = rest - found[-1]
        found.append(rest.to(torch.bfloat16))
    return found


def _mm(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a @ b, summed in fp32."""
    return torch.mm(a, b, out_dtype=dtype) if a.is_cuda else (a.float() @ b.float()).to(dtype)


class _RouterLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        found = _parts(weight)
        parts = torch.cat(found) if len(found) > 1 else found[0]  # a bf16 weight itself
        ctx.weight_type = weight.dtype
        ctx.save_for_backward(x, parts)
        y = _mm(x, parts.t(), torch.float32)
        return y.view(len(x), -1, len(weight)).sum(1)

    @staticmethod
    @not_twice_differentiable
    def backward(ctx: Any, dlogits: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, parts = ctx.saved_tensors
        experts = dlogits.shape[1]
        d, w = _parts(dlogits), parts.split(experts)
        beside = torch.cat([*d, d[0]], 1)
        dx = dweight = None
        if ctx.needs_input_grad[0]:
            rows = [*[w[0]] * _PARTS, w[1] if len(w) > 1 else torch.zeros_like(w[0])]
            dx = _mm(beside, torch.cat(rows), x.dtype)
        if ctx.needs_input_grad[1]:
            sums = _mm(beside[:, : _PARTS * experts].t(), x, torch.float32)
            dweight = sums.view(_PARTS, experts, -1).sum(0).to(ctx.weight_type)
        return dx, dweight


_apply = fast_apply(_RouterLogits)
