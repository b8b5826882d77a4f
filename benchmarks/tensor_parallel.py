"""How much of the communication of a tensor-parallel MLP's backward is hidden under matrix products.

    torchrun --nproc-per-node 2 benchmarks/tensor_parallel.py [--json FILE]

A column-parallel layer, gelu, and a row-parallel layer with sequence parallelism, bf16, as Megatron's MLP. Read from a trace of
the kernels: hidden is the part of the time in which something is sent while a product runs too. "Waiting for each" is the same
backward with every collective waited for where it starts.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import onepass
from onepass.bench.record import commit, device_name, versions
from onepass.parallel import collectives, product

TOKENS, BATCH, HIDDEN, INNER = 4096, 4, 8192, 28672
_CYCLES = 60_000_000  # about 30 ms
Interval = tuple[float, float]


def layer(group: dist.ProcessGroup, ranks: int, rank: int) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """The MLP of this rank, and its part of the input."""
    device = torch.device("cuda", rank)
    up = torch.nn.Parameter(torch.randn(INNER // ranks, HIDDEN, device=device, dtype=torch.bfloat16) * HIDDEN**-0.5)
    down = torch.nn.Parameter(torch.randn(HIDDEN, INNER // ranks, device=device, dtype=torch.bfloat16) * INNER**-0.5)
    for weight in (up, down):
        weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)  # type: ignore[attr-defined]

    def forward(x: Tensor) -> Tensor:
        y = onepass.linear(x, up, tp_group=group, sequence_parallel=True)
        y = F.gelu(y, approximate="tanh")
        return onepass.linear(y, down, tp_group=group, sequence_parallel=True, reduce_output=True)

    return forward, torch.randn(TOKENS // ranks, BATCH, HIDDEN, device=device, dtype=torch.bfloat16, requires_grad=True)


# ---- what a trace says ----


def union(intervals: list[Interval]) -> list[Interval]:
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def length(intervals: list[Interval]) -> float:
    return sum(end - start for start, end in intervals)


def common(first: list[Interval], second: list[Interval]) -> float:
    return sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in first for b in second)


def traced(step: Callable[[], object]) -> dict[str, float]:
    """Milliseconds of a step's kernels: sent, products, both at once, and from the first to the last."""
    torch.cuda.synchronize()
    dist.barrier()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as profiler:
        torch.cuda._sleep(_CYCLES)  # meanwhile all is queued, as in the middle of a training step: the CPU is ahead
        step()
        torch.cuda.synchronize()
    kernels = [e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA and e.time_range.elapsed_us() > 0]
    spans = {e: (e.time_range.start / 1e3, e.time_range.end / 1e3) for e in kernels if "spin_kernel" not in e.name}
    sent = union([span for e, span in spans.items() if "nccl" in e.name.lower()])
    products = union([span for e, span in spans.items() if any(word in e.name.lower() for word in ("gemm", "nvjet", "cutlass"))])
    whole = max(end for _, end in spans.values()) - min(start for start, _ in spans.values())
    return {"sent": length(sent), "products": length(products), "both": common(sent, products), "whole": whole}


@contextmanager
def waiting_for_each() -> Iterator[None]:
    """Every collective is waited for where it starts."""

    def at_once(start: Callable[..., collectives.Pending]) -> Callable[..., collectives.Pending]:
        return lambda *args: collectives.Pending(start(*args).wait())

    names = ("start_all_gather", "start_reduce_scatter", "start_all_reduce")
    with mock.patch.multiple(product, **{name: at_once(getattr(product, name)) for name in names}):
        yield


def backward_of(group: dist.ProcessGroup, ranks: int, rank: int) -> Callable[[], object]:
    forward, x = layer(group, ranks, rank)
    y = forward(x)
    dy = torch.randn_like(y)
    return lambda: y.backward(dy, retain_graph=True)


def milliseconds(step: Callable[[], object], times: int = 10) -> float:
    for _ in range(3):
        step()
    found = []
    for _ in range(times):
        torch.cuda.synchronize()
        dist.barrier()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        step()
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end))
    return sorted(found)[times // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    step = backward_of(dist.group.WORLD, ranks, rank)
    found: dict[str, object] = {"backward_ms": milliseconds(step)}
    traces = [traced(step) for _ in range(4)][1:]
    found |= {"traces_ms": traces, "hidden": sorted(trace["both"] / trace["sent"] for trace in traces)[1]}
    with waiting_for_each():
        found["waiting_for_each_ms"] = milliseconds(step)
        found["waiting_for_each_trace_ms"] = traced(step)
    if rank == 0:
        print(json.dumps(found, indent=1))
        if args.json:
            shape = {"tokens": TOKENS * BATCH, "hidden": HIDDEN, "inner": INNER, "ranks": ranks}
            machine = {"commit": commit(), "gpu": device_name(torch.device("cuda")), "versions": versions()}
            args.json.write_text(json.dumps(machine | shape | found, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
