"""What Megatron's optimizer does without Transformer Engine and Apex, in one pass each: Adam, and clipping's norm and scale."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor


def with_fused_adam(get_megatron_optimizer: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap get_megatron_optimizer: PyTorch's Adam and AdamW in it step by PyTorch's fused kernel."""

    @wraps(get_megatron_optimizer, assigned=("__doc__",))  # the report names it as ours
    def get(*args: Any, **options: Any) -> Any:
        made = get_megatron_optimizer(*args, **options)
        for each in getattr(made, "chained_optimizers", [made]):
            inner: Any = getattr(each, "optimizer", None)
            if type(inner) in (torch.optim.Adam, torch.optim.AdamW):
                for group in (inner.defaults, *inner.param_groups):
                    group.update(fused=True, foreach=False)
        return made

    return get


def multi_tensor_l2_norm(chunk_size: int, noop_flag: Any, tensor_lists: Any, *_: Any) -> tuple[Tensor, None]:
    """Return the norm of all tensors, ``[1]`` in fp32. Nobody waits for the GPU, where stock does for each tensor."""
    norms = torch._foreach_norm([t for tensors in tensor_lists for t in tensors], 2, dtype=torch.float32)
    return torch.stack(norms).norm().view(1), None


def multi_tensor_scale(chunk_size: int, noop_flag: Any, tensor_lists: Any, scale: float) -> None:
    """Write the first list's tensors times scale into the second's. In place it is one pass."""
    source, target = tensor_lists
    if all(a.data_ptr() == b.data_ptr() and a.dtype == b.dtype for a, b in zip(source, target, strict=True)):
        torch._foreach_mul_(target, scale)
    else:
        for a, b in zip(source, target, strict=True):
            b.copy_(a * scale if scale != 1.0 else a)
