"""linear_cross_entropy with the vocabulary divided over GPUs, with and without the sequence, beside one GPU of the same run.

    torchrun --nproc-per-node 2 benchmarks/linear_cross_entropy.py [--case N,D,V ...] [--json FILE]

bf16. Milliseconds of forward and backward, medians of rounds in which everybody has a turn, as a GPU at its power limit slows
down whoever comes last; set against one GPU's over their number. MiB are the most that was allocated above what was there
before, returned gradients included. `onepass bench linear_cross_entropy` measures one GPU, beside its floor and its peers.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from measuring import fill_queue, join_ranks, peak_mib, ranks_ms, write
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import Parameter

import onepass

CASES = (
    (8192, 4096, 128256), (32768, 4096, 128256), (8192, 2304, 256000), (16384, 4096, 32000), (4096, 4096, 128256),
    (8192, 768, 50257),  # an odd vocabulary, whose products cuBLAS makes at a quarter of its speed
)  # fmt: skip


def stepper(hidden: Tensor, weight: Parameter, labels: Tensor, *args: Any, **options: Any) -> Callable[[], None]:
    def step() -> None:
        hidden.grad = weight.grad = None
        onepass.linear_cross_entropy(hidden, weight, labels, *args, **options).backward()

    return step


def measure(case: tuple[int, int, int], rounds: int) -> Any:
    """Return figures of one GPU, of all with whole hidden states, and of all with parts of them."""
    (N, D, V), group, rank, ranks = case, dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    hidden = torch.randn(N, D, device="cuda", dtype=torch.bfloat16).requires_grad_()
    weight, labels = Parameter((torch.randn(V, D, device="cuda") / D**0.5).bfloat16()), torch.randint(0, V, (N,), device="cuda")
    part = Parameter(weight.detach().chunk(ranks)[rank].clone())
    rows = hidden.detach().chunk(ranks)[rank].clone().requires_grad_()
    gathering = Parameter(part.detach())
    gathering.main_grad = torch.zeros(part.shape, device="cuda")  # type: ignore[attr-defined]
    turns = {
        "one GPU": stepper(hidden, weight, labels),
        "tensor parallel": stepper(hidden, part, labels, group),
        "and sequence parallel": stepper(rows, part, labels, group, sequence_parallel=True),
        "tensor parallel, main_grad and grad_scale": stepper(hidden, gathering, labels, group, grad_scale=1.0),
    }
    found: dict[str, dict[str, float]] = {}
    for name, step in turns.items():
        step()
        found[name] = {"peak_mib": peak_mib(step)}
    times: dict[str, list[float]] = {name: [] for name in turns}
    for _ in range(rounds):
        for name, step in turns.items():
            times[name] += [ranks_ms(step, fill_queue) for _ in range(4)]  # as many on every rank: a clock would decide by itself
    one = statistics.median(times["one GPU"])
    for name, each in times.items():
        found[name]["ms"] = statistics.median(each)
        found[name]["of_its_share"] = found[name]["ms"] / (one if name == "one GPU" else one / ranks)
    return {"ranks": ranks, "ways": found}


def table(case: tuple[int, int, int], result: Any) -> Table:
    title = f"N {case[0]}, D {case[1]}, V {case[2]} over {result['ranks']} GPUs"
    made = Table("", "ms", f"x one GPU's / {result['ranks']}", "peak MiB", title=title, title_justify="left")
    for name, row in result["ways"].items():
        made.add_row(name, f"{row['ms']:.2f}", f"{row['of_its_share']:.3f}", f"{row['peak_mib']:.0f}")
    return made


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--case", action="append", type=_sizes, help="N,D,V; may be repeated")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device, rows = join_ranks(), {}
    console = Console(width=130, quiet=dist.get_rank() > 0)
    for case in args.case or CASES:
        result = rows["{} x {} x {}".format(*case)] = measure(case, args.rounds)
        console.print(table(case, result))
        torch.cuda.empty_cache()
    if dist.get_rank() == 0:
        write(args.json, device, rows=rows)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
