"""What a trace of a step says: which kernels ran when, and what of that was at the same time. For the other files here."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from onepass.profiling.trace import Interval

_CYCLES = 120_000_000  # about 60 ms


def fill_queue() -> None:
    """Keep the GPU waiting while what follows is queued, as in the middle of a training step: the CPU is ahead."""
    torch.cuda._sleep(_CYCLES)


def kernels(step: Callable[[], object]) -> list[tuple[str, Interval]]:
    """The name of each of a step's kernels, and its start and end in milliseconds."""
    torch.cuda.synchronize()
    dist.barrier()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as profiler:
        fill_queue()
        step()
        torch.cuda.synchronize()
    found = [e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA and e.time_range.elapsed_us() > 0]
    return [(e.name, (e.time_range.start / 1e3, e.time_range.end / 1e3)) for e in found if "spin_kernel" not in e.name]


def common(first: list[Interval], second: list[Interval]) -> float:
    return sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in first for b in second)
