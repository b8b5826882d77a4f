"""What the files here share: times and memory of a step, over the ranks of torchrun too, its trace, and the record of a run."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from onepass.bench.record import commit, device_name, versions
from onepass.profiling.record import run
from onepass.profiling.trace import Interval

_CYCLES = 120_000_000  # about 60 ms


def write(path: Path | None, device: torch.device, **found: Any) -> None:
    """Write what was found, beside the commit, the device and the versions, if there is a path."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        record = {"commit": commit(), "gpu": device_name(device), "versions": versions(), **found}
        path.write_text(json.dumps(record, indent=1) + "\n")


def need_gpus(count: int = 1, otherwise: str = "") -> None:
    """End the process by a sentence and exit status 2 where PyTorch sees fewer GPUs. `otherwise`: what needs none."""
    if (there := torch.cuda.device_count()) < count:
        wanted = "a GPU" if count == 1 else f"{count} GPUs"
        _refuse(f"needs {wanted}, and PyTorch sees {there or 'none'} here{otherwise and f'; {otherwise}'}")


def _refuse(why: str) -> NoReturn:
    print(f"{Path(sys.argv[0]).name}: {why}", file=sys.stderr)
    raise SystemExit(2)


def join_ranks() -> torch.device:
    """Join the others that torchrun started, and return this rank's GPU."""
    rank = os.environ.get("LOCAL_RANK")
    need_gpus(int(rank or 0) + 1)
    if rank is None:
        _refuse("is started by torchrun, which sets LOCAL_RANK: its first lines have the command")
    device = torch.device("cuda", int(rank))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


# ---- times and memory ----


def ranks_ms(step: Callable[[], object], wait: Callable[[], None] = lambda: None) -> float:
    """Return a step's milliseconds on this GPU. All ranks begin at once; `wait` is queued before."""
    torch.cuda.synchronize()
    dist.barrier()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    wait()
    start.record()
    step()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end))


def step_ms(step: Callable[[], object], rounds: int, steps: int) -> tuple[list[float], list[float]]:
    """Return the milliseconds of a step among others, and those until the CPU has queued it, a number for each round."""
    runs = [run(step, steps) for _ in range(rounds)]
    return [wall / 1e3 for wall, _ in runs], [host / 1e3 for _, host in runs]


def peak_mib(step: Callable[[], object]) -> float:
    """Return the most that a step allocates beyond what is there before."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def fill_queue() -> None:
    """Keep the GPU waiting while what follows is queued, as in the middle of a training step: the CPU is ahead."""
    torch.cuda._sleep(_CYCLES)


# ---- traces: which kernels ran when, and what of that was at the same time ----


def kernels(step: Callable[[], object]) -> list[tuple[str, Interval]]:
    """The name of each of a step's kernels, and its start and end in milliseconds."""
    torch.cuda.synchronize()
    if dist.is_initialized():
        dist.barrier()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as profiler:
        fill_queue()
        step()
        torch.cuda.synchronize()
    found = [e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA and e.time_range.elapsed_us() > 0]
    return [(e.name, (e.time_range.start / 1e3, e.time_range.end / 1e3)) for e in found if "spin_kernel" not in e.name]


def common(first: list[Interval], second: list[Interval]) -> float:
    return sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in first for b in second)
