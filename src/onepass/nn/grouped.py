"""The product of rows that lie together by expert with their expert's weight: y = x[e's rows] @ weight[e].T, for all at once.

Shapes   x [M, K], weight [E, N, K], ends [E] int32: where each expert's rows end; an expert may have none. y [M, N].
Saves    x and the weight.
Numbers  The weight's gradient is made in fp32 sums and, where PyTorch's grouped product makes it, rounded once before it is added
         to main_grad. The loop adds each expert's product to main_grad itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass.runtime.autocast import product_type
from onepass.runtime.dispatch import bare_apply, cast, once
from onepass.runtime.main_grad import Asked, add_gradient, asked, main_grads_of, place_of, settled, vector_gradient

_ALIGNED = 8  # numbers of 16 bits: PyTorch's product takes rows that begin at multiples of 16 bytes


def grouped_by_torch(x: Tensor, weight: Tensor) -> bool:
    """Whether PyTorch's grouped product, which never asks the GPU how many rows an expert has, can take these."""
    return (
        hasattr(F, "grouped_mm")
        and x.is_cuda
        and x.dtype is torch.bfloat16
        and weight.shape[1] % _ALIGNED == 0
        and weight.shape[2] % _ALIGNED == 0
        and torch.cuda.get_device_properties(x.device).major >= 8  # get_device_capability breaks a compiled graph
    )


def _rows(ends: Tensor) -> Iterator[slice]:
    """Of each expert; on a GPU this waits for it."""
    start = 0
    for end in ends.tolist():
        yield slice(start, end)
        start = end


def _product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """x @ weight[e] of each expert's rows, of a weight [E, K, N]."""
    y = x.new_empty(x.shape[0], weight.shape[2])
    for expert, rows in enumerate(_rows(ends)):
        torch.mm(x[rows], weight[expert], out=y[rows])
    return y


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        ctx.weight, ctx.main_grad = weight, main_grads_of(ctx.needs_input_grad[1:], weight)[0]
        ctx.by_torch = grouped_by_torch(x, weight)
        ctx.save_for_backward(x, weight, ends)
        weight = cast(weight, x.dtype)
        return F.grouped_mm(x, weight.mT, offs=ends) if ctx.by_torch else _product(x, weight.mT, ends)

    @staticmethod
    @once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, ends = ctx.saved_tensors
        dy = dy.contiguous()  # PyTorch's product takes no expanded one
        wanted_x, wanted_weight = asked(ctx, True, True)
        dx = None
        if wanted_x is not Asked.NOT:
            weight = cast(weight, dy.dtype)
            dx = F.grouped_mm(dy, weight, offs=ends) if ctx.by_torch else _product(dy, weight, ends)
        if wanted_weight is Asked.NOT:
            return dx, None, None
        if ctx.by_torch:
            dweight = F.grouped_mm(dy.mT, x, offs=ends)
            return dx, vector_gradient(dweight, ctx.weight, ctx.main_grad, wanted_weight), None
        place = place_of(ctx.weight, ctx.main_grad, wanted_weight)
        into = torch.zeros_like(ctx.weight) if place is None else place
        for expert, rows in enumerate(_rows(ends)):
            add_gradient(into[expert], dy[rows], x[rows])
        if place is not None:
            return dx, settled(ctx.weight, wanted_weight), None
        return dx, vector_gradient(into, ctx.weight, ctx.main_grad, wanted_weight), None


_apply = bare_apply(_Grouped)


def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """In x's type, or autocast's. The gradient of a weight that carries main_grad is added there."""
    y: Tensor = _apply(cast(x, product_type(x)), weight, ends)
    return y
