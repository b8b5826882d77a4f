"""linear_cross_entropy beside its floor, the three products of its shape by cuBLAS, and beside everybody else's.

    python benchmarks/linear_cross_entropy.py [--case N,D,V ...] [--only ours|quack] [--json FILE]
    torchrun --nproc-per-node 2 benchmarks/linear_cross_entropy.py [--json FILE]

One GPU, bf16. Milliseconds of forward and backward, medians of rounds in which everybody has a turn, as a GPU at its power limit
slows down whoever comes last; over the floor of the same rounds. MiB are the most that was allocated above what was there
before, returned gradients included. Liger 0.8, cut-cross-entropy and F.linear_cross_entropy (PyTorch 2.13) where they are
installed; QuACK in a run of its own, with --only quack. Under torchrun the vocabulary is divided over the GPUs, with and without
the sequence, and set against one GPU's time of the same run over their number.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

import onepass
from onepass.bench.peers import find_peers
from onepass.bench.record import commit, device_name, versions
from onepass.runtime.ceilings import clock_for

CASES = ((8192, 4096, 128256), (32768, 4096, 128256), (8192, 2304, 256000), (16384, 4096, 32000), (4096, 4096, 128256))
ROW = (8192, 4096, 128256)  # of which everything is measured
GPT2 = (8192, 768, 50257)  # an odd vocabulary, whose products cuBLAS makes at a quarter of its speed
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass
class Way:
    """Somebody's loss, of hidden states, a weight and labels."""

    loss: Loss
    floor: str = "three"  # which products it is set against
    main_grad: bool = False
    frozen: bool = False  # the weight
    backward: bool = True


def ways(case: tuple[int, int, int]) -> Iterator[tuple[str, Way]]:
    ours = onepass.linear_cross_entropy
    yield "onepass", Way(ours)
    yield "onepass, main_grad", Way(ours, main_grad=True)
    yield "onepass, main_grad and grad_scale", Way(lambda h, w, y: ours(h, w, y, grad_scale=1.0), main_grad=True)
    if case == ROW:
        yield "onepass, chunk_bytes 256 MiB", Way(lambda h, w, y: ours(h, w, y, chunk_bytes=256 << 20))
        yield "onepass, fp32 logits", Way(lambda h, w, y: ours(h, w, y, logits_dtype=torch.float32))
        yield "onepass, stats", Way(lambda h, w, y: ours(h, w, y, return_stats=True)[0])
        yield "onepass, loss only", Way(ours, "one", backward=False)
        yield "onepass, frozen head", Way(ours, "two", frozen=True)
        yield "onepass, reduction none", Way(lambda h, w, y: ours(h, w, y, reduction="none"), "four")
        yield (
            "onepass, reduction none, 1.5 GiB",
            Way(lambda h, w, y: ours(h, w, y, reduction="none", chunk_bytes=1536 << 20), "four", main_grad=True),
        )
    yield from _others(case)


def _others(case: tuple[int, int, int]) -> Iterator[tuple[str, Way]]:
    eager: Loss = lambda h, w, y: F.cross_entropy((h @ w.t()).float(), y)  # noqa: E731
    if case[0] * case[2] < 1 << 31:
        yield "eager, fp32 logits", Way(eager)
    yield "eager, bf16 logits", Way(lambda h, w, y: F.cross_entropy(h @ w.t(), y))
    yield "torch.compile", Way(torch.compile(eager, dynamic=False))
    if hasattr(F, "linear_cross_entropy"):
        chunked = torch.nn.LinearCrossEntropyOptions()  # without them it is eager code
        yield "F.linear_cross_entropy", Way(lambda h, w, y: F.linear_cross_entropy(h, w, y, options=chunked))
    try:
        from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as Liger

        yield "Liger", Way(lambda h, w, y: Liger.apply(h, w, y)[0])
        more = (None, None, -100, 0.0, 0.0, "mean", None, False, torch.float32)
        yield "Liger, fp32 sums", Way(lambda h, w, y: Liger.apply(h, w, y, *more)[0])
    except ImportError:
        pass
    try:
        from cut_cross_entropy import linear_cross_entropy as cut

        yield "CCE", Way(lambda h, w, y: cut(h, w, y))
    except ImportError:
        pass


def quack(case: tuple[int, int, int]) -> Iterator[tuple[str, Way]]:
    from quack.linear_cross_entropy import chunked_linear_cross_entropy as theirs

    yield "onepass", Way(onepass.linear_cross_entropy)
    yield "QuACK", Way(lambda h, w, y: theirs(h, w, y, use_scaled_exp=False, tuned=False))


# ---- measuring ----


class Inputs:
    def __init__(self, case: tuple[int, int, int]) -> None:
        N, D, V = case
        self.hidden = torch.randn(N, D, device="cuda", dtype=torch.bfloat16).requires_grad_()
        self.weight = torch.nn.Parameter((torch.randn(V, D, device="cuda") / D**0.5).bfloat16())
        self.labels = torch.randint(0, V, (N,), device="cuda")
        self.gathering = torch.nn.Parameter(self.weight.detach())
        self.ones = torch.ones(N, device="cuda")

    def step(self, way: Way) -> Callable[[Any], None]:
        weight = self.weight.detach() if way.frozen else self.gathering if way.main_grad else self.weight

        def run(_: Any) -> None:
            self.clear()
            with torch.set_grad_enabled(way.backward):
                loss = way.loss(self.hidden, weight, self.labels)
            if way.backward:
                loss.backward(self.ones if loss.dim() else None)  # type: ignore[no-untyped-call]

        return run

    def clear(self) -> None:
        self.hidden.grad = self.weight.grad = self.gathering.grad = None


def products(inputs: Inputs) -> dict[str, Callable[[Any], object]]:
    hidden, weight = inputs.hidden.detach(), inputs.weight.detach()
    logits = torch.empty(hidden.shape[0], weight.shape[0], device="cuda", dtype=torch.bfloat16)
    dhidden, dweight = torch.empty_like(hidden), torch.empty_like(weight)
    steps = (
        lambda: torch.mm(hidden, weight.t(), out=logits),
        lambda: torch.mm(logits, weight, out=dhidden),
        lambda: torch.mm(logits.t(), hidden, out=dweight),
    )
    counts = {"one": (0,), "two": (0, 1), "three": (0, 1, 2), "four": (0, 0, 1, 2)}
    return {name: lambda _, which=which: [steps[i]() for i in which] for name, which in counts.items()}  # type: ignore[misc]


def peak_mib(inputs: Inputs, step: Callable[[Any], None]) -> float:
    inputs.clear()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step(None)
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def measure(case: tuple[int, int, int], source: Callable[[tuple[int, int, int]], Iterator[tuple[str, Way]]], rounds: int) -> Any:
    inputs, clock = Inputs(case), clock_for(torch.device("cuda"))
    inputs.gathering.main_grad = torch.zeros(inputs.weight.shape, device="cuda")  # type: ignore[attr-defined]
    found: dict[str, dict[str, Any]] = {}
    steps: dict[str, tuple[Way, Callable[[Any], object]]] = {}
    for name, way in source(case):
        step = inputs.step(way)
        try:
            step(None)
            found[name] = {"peak_mib": peak_mib(inputs, step)}
            steps[name] = way, step
        except Exception as error:
            found[name] = {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"}
    inputs.clear()
    floors = products(inputs)
    used = {way.floor for way, _ in steps.values()}
    turns = {f"floor {name}": step for name, step in floors.items() if name in used} | {n: s for n, (_, s) in steps.items()}
    times: dict[str, list[float]] = {name: [] for name in turns}
    names = list(turns)
    for i in range(rounds):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            times[name] += clock.times(turns[name], budget_ms=150)
    medians = {name: statistics.median(each) for name, each in times.items()}
    for name, (way, _) in steps.items():
        found[name] |= {"ms": medians[name], "over_floor": medians[name] / medians[f"floor {way.floor}"], "floor": way.floor}
    return {"floors_ms": {n: medians[f"floor {n}"] for n in used}, "ways": found}


# ---- over several GPUs ----


def divided(case: tuple[int, int, int], rounds: int) -> Any:
    """Milliseconds of one GPU, of all with whole hidden states, and of all with parts of them."""
    group, rank, ranks = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    inputs = Inputs(case)
    part = torch.nn.Parameter(inputs.weight.detach().chunk(ranks)[rank].clone())
    rows = inputs.hidden.detach().chunk(ranks)[rank].clone().requires_grad_()
    found: dict[str, dict[str, Any]] = {}

    def shared(hidden: Tensor, weight: Tensor, sequence: bool, **options: Any) -> Callable[[Any], None]:
        def run(_: Any) -> None:
            hidden.grad = weight.grad = None
            loss = onepass.linear_cross_entropy(hidden, weight, inputs.labels, group, sequence_parallel=sequence, **options)
            loss.backward()  # type: ignore[no-untyped-call]

        return run

    alone = inputs.step(Way(onepass.linear_cross_entropy))
    gathering = torch.nn.Parameter(part.detach())
    gathering.main_grad = torch.zeros(part.shape, device="cuda")  # type: ignore[attr-defined]
    turns = {
        "one GPU": alone,
        "tensor parallel": shared(inputs.hidden, part, False),
        "and sequence parallel": shared(rows, part, True),
        "tensor parallel, main_grad and grad_scale": shared(inputs.hidden, gathering, False, grad_scale=1.0),
    }
    for name, step in turns.items():
        step(None)
        found[name] = {"peak_mib": peak_mib(inputs, step)}
    times: dict[str, list[float]] = {name: [] for name in turns}
    for _ in range(rounds):
        for name, step in turns.items():
            for _ in range(4):  # as many on every rank: a clock would decide by itself
                dist.barrier()
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                torch.cuda._sleep(2_000_000)
                start.record()
                step(None)
                end.record()
                torch.cuda.synchronize()
                times[name].append(start.elapsed_time(end))
    one = statistics.median(times["one GPU"])
    for name, each in times.items():
        found[name]["ms"] = statistics.median(each)
        found[name]["of_its_share"] = found[name]["ms"] / (one if name == "one GPU" else one / ranks)
    return {"ranks": ranks, "ways": found}


def shares(case: tuple[int, int, int], result: Any) -> Table:
    title = f"N {case[0]}, D {case[1]}, V {case[2]} over {result['ranks']} GPUs"
    made = Table("", "ms", f"x one GPU's / {result['ranks']}", "peak MiB", title=title, title_justify="left")
    for name, row in result["ways"].items():
        made.add_row(name, f"{row['ms']:.2f}", f"{row['of_its_share']:.3f}", f"{row['peak_mib']:.0f}")
    return made


def table(case: tuple[int, int, int], result: Any) -> Table:
    floors = ", ".join(f"{name} products {ms:.2f} ms" for name, ms in result["floors_ms"].items())
    title = f"N {case[0]}, D {case[1]}, V {case[2]}: {floors}"
    made = Table("", "ms", "over its floor", "peak MiB", title=title, title_justify="left")
    for name, row in result["ways"].items():
        if "error" in row:
            made.add_row(name, "[red]error[/]", row["error"][:60], "")
        else:
            style = "bold cyan" if name.startswith("onepass") else ""
            cells = f"{row['ms']:.2f}", f"{row['over_floor']:.3f} x {row['floor']}", f"{row['peak_mib']:.0f}"
            made.add_row(name, *cells, style=style)
    return made


def only_ours(case: tuple[int, int, int]) -> Iterator[tuple[str, Way]]:
    return ((name, way) for name, way in ways(case) if name.startswith("onepass"))


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--case", action="append", type=_sizes, help="N,D,V; may be repeated")
    parser.add_argument("--only", choices=("ours", "quack"), help="onepass alone, or onepass and QuACK")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    several = "LOCAL_RANK" in os.environ
    if several:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
    source = {"ours": only_ours, "quack": quack}.get(args.only, ways)
    rows = {}
    console = Console(width=130, quiet=several and dist.get_rank() > 0)
    for case in track(args.case or [*CASES, GPT2], "cases", console=Console(stderr=True), transient=True):
        torch._dynamo.reset()
        result = divided(case, args.rounds) if several else measure(case, source, args.rounds)
        console.print((shares if several else table)(case, result))
        rows["{} x {} x {}".format(*case)] = result
        torch.cuda.empty_cache()
    if several:
        dist.destroy_process_group()
    if args.json and os.environ.get("RANK", "0") == "0":
        gpu, found = device_name(torch.device("cuda")), versions() | {"peers": find_peers()}
        record = {"commit": commit(), "gpu": gpu, "versions": found, "rows": rows}
        args.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
