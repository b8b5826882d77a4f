"""How much of what tensor parallelism sends is hidden under matrix products: in an MLP's backward, and in a flush.

    torchrun --nproc-per-node 2 benchmarks/tensor_parallel.py [--json FILE]

A column-parallel layer, gelu, and a row-parallel layer with sequence parallelism, bf16, as Megatron's MLP. Read from a trace of
the kernels: hidden is the part of the time in which something is sent while a product runs too. "Waiting for each" is the same
with every collective waited for where it starts. The flush is that of a head's deferred gradients, of several microbatches.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from measuring import common, join_ranks, kernels, ranks_ms, write
from torch import Tensor

import onepass
from onepass.distributed import collectives, tensor_parallel
from onepass.parallel import DeferredWgrad
from onepass.profiling.trace import length, union

TOKENS, BATCH, HIDDEN, INNER = 4096, 4, 8192, 28672
VOCABULARY, MICROBATCHES = 65536, 4


def layer(group: dist.ProcessGroup, device: torch.device) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """The MLP of this rank, and its part of the input."""
    ranks = group.size()
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


def traced(step: Callable[[], object]) -> dict[str, float]:
    """Milliseconds of a step's kernels: sent, products, both at once, and from the first to the last."""
    ran = kernels(step)
    sent = union([span for name, span in ran if "nccl" in name.lower()])
    products = union([span for name, span in ran if any(word in name.lower() for word in ("gemm", "nvjet", "cutlass"))])
    whole = max(end for _, (_, end) in ran) - min(start for _, (start, _) in ran)
    return {"sent": length(sent), "products": length(products), "both": common(sent, products), "whole": whole}


@contextmanager
def waiting_for_each() -> Iterator[None]:
    """Every collective is waited for where it starts."""

    def at_once(start: Callable[..., collectives.Pending]) -> Callable[..., collectives.Pending]:
        return lambda *args: collectives.Pending(start(*args).wait())

    names = ("start_all_gather", "start_reduce_scatter", "start_all_reduce")
    with mock.patch.multiple(tensor_parallel, **{name: at_once(getattr(tensor_parallel, name)) for name in names}):
        yield


def backward_of(group: dist.ProcessGroup, device: torch.device) -> Callable[[], object]:
    forward, x = layer(group, device)
    y = forward(x)
    dy = torch.randn_like(y)
    return lambda: y.backward(dy, retain_graph=True)


def flush_of(group: dist.ProcessGroup, device: torch.device) -> Callable[[], object]:
    """What backward keeps, put there as it does, without the rest of backward."""
    ranks, type_ = group.size(), torch.bfloat16
    head = torch.nn.Parameter(torch.empty(VOCABULARY // ranks, HIDDEN, device=device, dtype=type_))
    main_grad = torch.zeros_like(head, dtype=torch.float32)
    layout = tensor_parallel.tp_layout(group, by_row=False, sequence=True)
    x = torch.randn(TOKENS // ranks, 1, HIDDEN, device=device, dtype=type_)
    dy = torch.randn(TOKENS, 1, VOCABULARY // ranks, device=device, dtype=type_)
    deferred = DeferredWgrad()

    def flush() -> None:
        for _ in range(MICROBATCHES):
            deferred.keep(dy, x, head, main_grad, layout)
        deferred.flush()

    return flush


def measured(step: Callable[[], object]) -> dict[str, object]:
    """Times, traces, and the median of the shares that are hidden."""
    found: dict[str, object] = {"ms": milliseconds(step)}
    traces = [traced(step) for _ in range(6)][1:]
    shares = [trace["both"] / trace["sent"] for trace in traces]
    found |= {"traces_ms": traces, "hidden_shares": shares, "hidden_share": sorted(shares)[len(shares) // 2]}
    with waiting_for_each():
        found["waiting_for_each_ms"] = milliseconds(step)
        found["waiting_for_each_trace_ms"] = traced(step)
    return found


def milliseconds(step: Callable[[], object], times: int = 10) -> float:
    return sorted([ranks_ms(step) for _ in range(3 + times)][3:])[times // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device = join_ranks()
    steps = {"backward": backward_of, "flush": flush_of}
    found = {name: measured(made(dist.group.WORLD, device)) for name, made in steps.items()}
    if dist.get_rank() == 0:
        print(json.dumps(found, indent=1))
        shape = {"tokens": TOKENS * BATCH, "hidden": HIDDEN, "inner": INNER, "ranks": dist.get_world_size()}
        flushed = {"tokens": TOKENS, "vocabulary": VOCABULARY, "microbatches": MICROBATCHES}
        write(args.json, device, **shape, flushed=flushed, **found)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
