"""grouped_linear: the product of rows sorted by expert with their expert's weight.

Formula  y[rows of e] = x[rows of e] @ weight[e].T, for every expert e.
Shapes   x [M, K], weight [E, N, K], y [M, N]; ends [E] int32: where each expert's rows end. An expert may have none.
Saves    x and the weight.
Numbers  the weight's gradient has fp32 sums. PyTorch's grouped product rounds it once before it is added to main_grad; the loop
         over experts adds each product to main_grad directly.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass.gradients.main_grad import (
    GradRequest,
    accumulation_target,
    add_gradient,
    grad_requests,
    main_grads_of,
    mark_added,
    name_written,
    placeholder,
    vector_gradient,
)
from onepass.runtime.autocast import product_type
from onepass.runtime.dispatch import cast, fast_apply, not_twice_differentiable

_ALIGNED = 8  # 16-bit numbers: PyTorch's product takes rows that start at multiples of 16 bytes


def torch_can_group(x: Tensor, weight: Tensor) -> bool:
    """Whether PyTorch's grouped product takes these. It does not wait for the GPU to learn each expert's rows."""
    return (
        hasattr(F, "grouped_mm")
        and x.is_cuda
        and x.dtype is torch.bfloat16
        and weight.shape[1] % _ALIGNED == 0
        and weight.shape[2] % _ALIGNED == 0
        and torch.cuda.get_device_properties(x.device).major >= 8  # get_device_capability breaks a compiled graph
    )


def _rows(ends: Tensor) -> Iterator[slice]:
    """Yield each expert's rows. On a GPU this waits for the device."""
    start = 0
    for end in ends.tolist():
        yield slice(start, end)
        start = end


def _product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Return x @ weight[e] for each expert's rows, with weight [E, K, N]."""
    y = x.new_empty(x.shape[0], weight.shape[2])
    for expert, rows in enumerate(_rows(ends)):
        torch.mm(x[rows], weight[expert], out=y[rows])
    return y


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        ctx.weight, ctx.main_grad = weight, main_grads_of(ctx.needs_input_grad[1:], weight)[0]
        ctx.by_torch = torch_can_group(x, weight)
        ctx.save_for_backward(x, weight, ends)
        weight = cast(weight, x.dtype)
        return F.grouped_mm(x, weight.mT, offs=ends) if ctx.by_torch else _product(x, weight.mT, ends)

    @staticmethod
    @not_twice_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, ends = ctx.saved_tensors
        dy = dy.contiguous()  # PyTorch's product takes no expanded tensor
        x_request, weight_request = grad_requests(ctx, True, True)
        dx = None
        if x_request is not GradRequest.SKIP:
            weight = cast(weight, dy.dtype)
            dx = F.grouped_mm(dy, weight, offs=ends) if ctx.by_torch else _product(dy, weight, ends)
        if weight_request is GradRequest.SKIP:
            return dx, None, None
        if ctx.by_torch:
            dweight = F.grouped_mm(dy.mT, x, offs=ends)
            return dx, vector_gradient(dweight, ctx.weight, ctx.main_grad, weight_request), None
        place = accumulation_target(ctx.weight, ctx.main_grad, weight_request)
        into = torch.zeros_like(ctx.weight) if place is None else place
        grad = None if place is None else placeholder(ctx.weight, weight_request)
        for expert, rows in enumerate(_rows(ends)):
            with name_written(["weight"] if place is not None and expert else []):
                add_gradient(into[expert], dy[rows], x[rows])
        if place is not None:
            mark_added(ctx.weight)
            return dx, grad, None
        return dx, vector_gradient(into, ctx.weight, ctx.main_grad, weight_request), None


_apply = fast_apply(_GroupedLinear)


def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Return y in x's type, or autocast's. The gradient of a weight that carries main_grad is added there."""
    y: Tensor = _apply(cast(x, product_type(x)), weight, ends)
    return y
