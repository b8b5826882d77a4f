"""main_grad: a weight that carries this tensor has its gradient added there, by the matrix product itself.

Megatron's convention: `weight.main_grad` (fp32, fp16 or bf16, of the weight's shape) accumulates over microbatches. Where
`weight.grad_added_to_main_grad` exists it is set to True and autograd gets a placeholder, so that the hooks waiting for a
gradient run; otherwise autograd gets none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onepass.runtime.dispatch import registered, watched

_TYPES = (torch.float32, torch.float16, torch.bfloat16)


def main_grad_of(weight: Tensor) -> Tensor | None:
    """The weight's main_grad, or None where it carries none. Raises where it can't take a gradient."""
    main_grad: Any = getattr(weight, "main_grad", None)
    if main_grad is None:
        return None
    if not isinstance(main_grad, Tensor):
        raise TypeError(f"main_grad must be a tensor, but is a {type(main_grad).__name__}")
    if main_grad.shape != weight.shape:
        raise ValueError(f"main_grad must have its weight's shape {tuple(weight.shape)}, but has {tuple(main_grad.shape)}")
    if main_grad.dtype not in _TYPES:
        raise TypeError(f"main_grad must be fp32, fp16 or bf16, but is {main_grad.dtype}")
    if main_grad.device != weight.device:
        raise ValueError(f"main_grad must be on {weight.device}, as its weight, but is on {main_grad.device}")
    return main_grad


def weight_gradient(dy: Tensor, x: Tensor, weight: Tensor, main_grad: Tensor | None) -> Tensor | None:
    """The gradient of `x @ weight.T` by weight, of rows dy [M, N] and x [M, K]; added to main_grad where there is one.

    `weight` is the parameter itself: what comes back for autograd depends on its attributes.
    """
    if main_grad is None:
        return (dy.t() @ x).to(weight.dtype)
    if watched(dy, x, main_grad):
        _add_op(main_grad, dy, x)
    else:
        add_weight_gradient(main_grad, dy, x)
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    return torch.zeros_like(weight)


def add_weight_gradient(main_grad: Tensor, dy: Tensor, x: Tensor) -> None:
    """main_grad += dy.T @ x, with fp32 sums and one rounding where main_grad is narrower."""
    if dy.dtype == main_grad.dtype:
        main_grad.addmm_(dy.t(), x)
    elif dy.is_cuda and main_grad.dtype is torch.float32:
        torch.addmm(main_grad, dy.t(), x, out_dtype=torch.float32, out=main_grad)
    elif main_grad.dtype is torch.float32:
        main_grad.addmm_(dy.float().t(), x.float())
    else:  # another 16-bit type, or fp32 into 16 bits
        main_grad.copy_(torch.addmm(main_grad.float(), dy.float().t(), x.float()))


_add_op = registered("add_weight_gradient(Tensor(a!) main_grad, Tensor dy, Tensor x) -> ()", add_weight_gradient, lambda *_: None)
