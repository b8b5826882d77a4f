"""How much of the data-parallel reduction of gradients by `MainGrads` is left after backward.

    torchrun --nproc-per-node 2 benchmarks/main_grads.py [--json FILE] [--small]

A stack of 24 transformer layers (norm and qkv, attention, projection; norm and up, gelu and down), bf16 weights, fp32 main_grad,
one microbatch. Milliseconds, medians over the rounds of the slowest rank's:

    reduction   finish() after a backward in accumulate(): all reductions, one after the other, under nothing
    backward    that backward
    overlapped  backward and finish(), the reductions starting as buckets fill
    exposed     from a trace: what is sent while no other kernel runs; and its share of the reduction
    slower      overlapped - backward: what the reduction costs a step, with what it slows down the kernels beside it

--small is a stack that two processes without GPUs can run, over gloo, by the clock on the wall and without traces.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from measuring import common, fill_queue, join_ranks, kernels, ranks_ms, write
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import onepass
from onepass.parallel import MainGrads
from onepass.profiling.trace import length, union


class Size(NamedTuple):
    layers: int
    hidden: int
    heads: int
    sequence: int
    batch: int
    rounds: int
    buckets_mib: tuple[float, ...]


REAL = Size(24, 2048, 16, 2048, 4, 7, (8, 32, 128))  # 32 is MainGrads' own
SMALL = Size(3, 128, 2, 64, 2, 3, (0.25, 1))


class Layer(nn.Module):
    """x [sequence, batch, hidden] to the same."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        hidden = size.hidden
        self.heads = size.heads
        self.first_norm = nn.Parameter(torch.ones(hidden))
        self.qkv, self.projection = _weight(hidden, 3 * hidden), _weight(hidden, hidden)
        self.second_norm = nn.Parameter(torch.ones(hidden))
        self.up, self.down = _weight(hidden, 4 * hidden), _weight(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        qkv = onepass.norm_linear(x, self.first_norm, self.qkv)
        q, k, v = (each.transpose(1, 2) for each in qkv.transpose(0, 1).unflatten(2, (3, self.heads, -1)).unbind(2))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + onepass.linear(mixed.permute(2, 0, 1, 3).flatten(2), self.projection)
        h = onepass.norm_linear(x, self.second_norm, self.up)
        return x + onepass.activation_linear(h, self.down, activation="gelu")


def _weight(inner: int, outer: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(outer, inner) * inner**-0.5)


class Bench:
    """A stack, its input and the gradient of its output, on this rank's device."""

    def __init__(self, size: Size, device: torch.device) -> None:
        self.device = device
        torch.manual_seed(0)
        with device:
            self.stack = nn.Sequential(*(Layer(size) for _ in range(size.layers))).bfloat16()
            self.x, self.dy = torch.randn(2, size.sequence, size.batch, size.hidden, dtype=torch.bfloat16)

    def milliseconds(self, step: Callable[[], object]) -> float:
        if self.device.type == "cuda":
            return ranks_ms(step, fill_queue)
        dist.barrier()
        start = perf_counter()
        step()
        return 1e3 * (perf_counter() - start)

    def backward(self, main_grads: MainGrads) -> Callable[[], None]:
        """A microbatch's, after its forward."""
        main_grads.zero_()
        y = self.stack(self.x)
        return lambda: y.backward(self.dy)

    def round(self, main_grads: MainGrads) -> dict[str, float]:
        """One after the other, so that a GPU that gets warmer slows down all alike."""
        backward = self.backward(main_grads)
        with main_grads.accumulate():
            alone = self.milliseconds(backward)
        reduction = self.milliseconds(main_grads.finish)
        overlapped = self.milliseconds(self.overlapped(main_grads))
        return {"backward_ms": alone, "reduction_ms": reduction, "overlapped_ms": overlapped}

    def overlapped(self, main_grads: MainGrads) -> Callable[[], None]:
        backward = self.backward(main_grads)

        def step() -> None:
            backward()
            main_grads.finish()

        return step

    def traced(self, main_grads: MainGrads) -> dict[str, float]:
        """Of an overlapped backward: what is sent, and what of it under no other kernel."""
        ran = kernels(self.overlapped(main_grads))
        sent = union([span for name, span in ran if "nccl" in name.lower()])
        others = union([span for name, span in ran if "nccl" not in name.lower()])
        return {"sent_ms": length(sent), "exposed_ms": length(sent) - common(sent, others)}

    def slowest(self, found: dict[str, float]) -> dict[str, float]:
        """Each number of the rank where it is the largest."""
        numbers = torch.tensor(list(found.values()), device=self.device)
        dist.all_reduce(numbers, dist.ReduceOp.MAX)
        return dict(zip(found, numbers.tolist(), strict=True))

    def row(self, bucket_mib: float, shard: bool, rounds: int) -> dict[str, Any]:
        main_grads = MainGrads(self.stack, bucket_bytes=int(bucket_mib * 2**20), shard=shard)
        found = [self.slowest(self.round(main_grads)) for _ in range(rounds + 1)][1:]
        row = {key: median(each[key] for each in found) for key in found[0]}
        row["slower_ms"] = median(each["overlapped_ms"] - each["backward_ms"] for each in found)
        if self.device.type == "cuda":
            traces = [self.slowest(self.traced(main_grads)) for _ in range(4)][1:]
            row |= {key: median(each[key] for each in traces) for key in traces[0]}
            row["exposed"] = row["exposed_ms"] / row["reduction_ms"]
        gib = sum(buffer.nbytes for buffer in main_grads.buffers) / 2**30
        kind = "reduce-scatter" if shard else "all-reduce"
        made = {"kind": kind, "bucket_mib": bucket_mib, "buckets": len(main_grads.buckets), "gib": gib}
        main_grads.close()
        return made | row


COLUMNS = {
    "reduction": "reduction_ms",
    "backward": "backward_ms",
    "overlapped": "overlapped_ms",
    "slower": "slower_ms",
    "exposed": "exposed_ms",
}


def table(rows: list[dict[str, Any]]) -> Table:
    made = Table("", "bucket MiB", "buckets", *COLUMNS, "exposed / reduction", title=f"ms; {rows[0]['gib']:.3f} GiB of gradients")
    for row in rows:
        times = [f"{row[key]:.2f}" if key in row else "" for key in COLUMNS.values()]
        share = f"{row['exposed']:.1%}" if "exposed" in row else ""
        made.add_row(row["kind"], str(row["bucket_mib"]), str(row["buckets"]), *times, share)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    size = SMALL if args.small else REAL
    if args.small:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    else:
        device = join_ranks()
    bench = Bench(size, device)
    rows = [bench.row(bucket_mib, shard, size.rounds) for shard in (False, True) for bucket_mib in size.buckets_mib]
    if dist.get_rank() == 0:
        Console(width=130).print(table(rows))
        write(args.json, device, ranks=dist.get_world_size(), **size._asdict(), rows=rows)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
