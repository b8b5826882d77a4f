"""The norm of a `MainGrads`' whole gradient, over shards, tensor-parallel ranks and stages, and clipping by it."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from onepass.distributed.collectives import start_all_gather
from onepass.gradients.buckets import Bucket


class _FlatGradients(Protocol):
    """What these functions read of a `MainGrads`."""

    buffers: list[Tensor]
    buckets: list[Bucket]
    shard: bool
    group: dist.ProcessGroup | None
    tp_group: dist.ProcessGroup | None
    pp_group: dist.ProcessGroup | None


def gradient_norm(main_grads: _FlatGradients, norm_type: float) -> Tensor:
    """Return the norm in fp32, on all ranks. The CPU does not wait."""
    if not norm_type > 0:
        raise ValueError(f"norm_type must be positive, but is {norm_type}")
    device, tp_group = main_grads.buffers[0].device, main_grads.tp_group
    all_count = tp_group is None or tp_group.rank() == 0
    if all_count and device.type == "cuda" and not main_grads.shard:  # foreach launches a kernel for every 20 million numbers
        norms = [torch.linalg.vector_norm(buffer, norm_type, dtype=torch.float32) for buffer in main_grads.buffers]
    else:
        parts = [bucket.mine for bucket in main_grads.buckets] if all_count else _parts_of_this_rank(main_grads)
        norms = list(torch._foreach_norm(parts, norm_type, dtype=torch.float32)) if parts else []
    total = torch.stack([*(norm.to(device) for norm in norms), torch.zeros((), device=device)])
    for group in (main_grads.group if main_grads.shard else None, tp_group, main_grads.pp_group):
        # gathered norms of norms: no square overflows, and a maximum keeps NaN
        total = start_all_gather(torch.linalg.vector_norm(total, norm_type).view(1), group).wait()
    whole: Tensor = torch.linalg.vector_norm(total, norm_type)
    return whole


def scale_gradient(main_grads: _FlatGradients, factor: Tensor) -> None:
    for bucket in main_grads.buckets:  # not the gaps between parameters, where a NaN factor would leave NaN
        parts = [bucket.flat[start:stop] for _, start, stop in bucket.parts()]
        if parts:
            torch._foreach_mul_(parts, factor.to(bucket.flat.device))


def _parts_of_this_rank(main_grads: _FlatGradients) -> list[Tensor]:
    """Return the gradients of parameters that differ between tensor-parallel ranks."""
    return [
        bucket.flat[start:stop]
        for bucket in main_grads.buckets
        for place, start, stop in bucket.parts()
        if getattr(place.parameter, "tensor_model_parallel", False)
    ]
