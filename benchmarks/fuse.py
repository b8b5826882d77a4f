"""onepass.fuse beside eager code, torch.compile, and the same program combined by hand.

    python benchmarks/fuse.py [--case NAME ...] [--json FILE]

One GPU. Of each way: the kernels of a call, how long they run (the profiler's times), and the wall time of a call among others
that follow without waiting; medians of rounds in which everybody has a turn. "graph" is a CUDA graph (for torch.compile,
mode="reduce-overhead"). Every way's results are compared with those of the program as written.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from measuring import need_gpus, write
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import onepass
from onepass.profiling.record import run

Fn = Callable[..., Any]
WRITTEN = "as written"
_BF16_FAR = 3e-2


@dataclass
class Case:
    """One program: ways to run it, all on the same inputs."""

    name: str
    inputs: Sequence[Tensor]
    ways: dict[str, Fn]
    backward: bool = False
    tolerance: float = 1e-5
    parameters: Sequence[Tensor] = ()
    bars: dict[str, str] = field(default_factory=dict)

    def step(self, fn: Fn) -> Callable[[], Any]:
        if not self.backward:

            def forward() -> Any:
                with torch.no_grad():
                    return fn(*self.inputs)

            return forward
        wanted = [t for t in (*self.inputs, *self.parameters) if t.requires_grad]

        def both() -> Any:
            outputs = fn(*self.inputs)
            outputs = outputs if isinstance(outputs, list | tuple) else [outputs]
            return [*outputs, *torch.autograd.grad(outputs, wanted, self._gradients(outputs))]

        return both

    def _gradients(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        if not hasattr(self, "_made"):
            self._made = [torch.randn_like(y) for y in outputs]
        return self._made


# ---- the programs ----


def split_stack(x: Tensor, weight: Tensor) -> Tensor:
    parts = torch.split(x, 128, dim=1)
    return F.relu(F.linear(torch.cat([torch.tanh(F.layer_norm(part, (128,))) for part in parts], 1), weight))


def combined(x: Tensor, weight: Tensor) -> Tensor:
    normed = torch.tanh(F.layer_norm(x.view(x.shape[0], -1, 128), (128,)))
    return F.relu(F.linear(normed.view(x.shape), weight))


class Norms(nn.Module):
    """A norm of its own for each part of a row."""

    def __init__(self, widths: Sequence[int], dtype: torch.dtype) -> None:
        super().__init__()
        self.widths = list(widths)
        self.norms = nn.ModuleList(nn.LayerNorm(width, dtype=dtype) for width in widths)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([norm(part) for norm, part in zip(self.norms, x.split(self.widths, 1), strict=True)], 1)


class ListedNorms(Norms):
    """The same of separate tensors."""

    def forward(self, *parts: Tensor) -> list[Tensor]:  # type: ignore[override]
        return [norm(part) for norm, part in zip(self.norms, parts, strict=True)]


class Gates(nn.Module):
    """silu(a) * b of separate tensors, each the two halves of one."""

    def forward(self, *parts: Tensor) -> list[Tensor]:
        halves = [part.chunk(2, -1) for part in parts]
        return [F.silu(a) * b for a, b in halves]


class Tables(nn.Module):
    """rms_norm and silu of what came out of many embedding tables."""

    def __init__(self, tables: int, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(width, dtype=dtype) for _ in range(tables))

    def forward(self, *parts: Tensor) -> Tensor:
        return torch.cat([F.silu(norm(part)) for norm, part in zip(self.norms, parts, strict=True)], 1)


class SlicedTables(Tables):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(*x.chunk(len(self.norms), 1))


class Projections(nn.Module):
    """q, k, v and gate, up of a Llama-1B layer."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(2048, n, bias=False, dtype=dtype) for n in (2048, 512, 512))
        self.gate, self.up = (nn.Linear(2048, 8192, bias=False, dtype=dtype) for _ in range(2))

    def forward(self, x: Tensor) -> list[Tensor]:
        return [self.q(x), self.k(x), self.v(x), F.silu(self.gate(x)) * self.up(x)]


class Plain(nn.Module):
    """Nothing to fuse: one thing after another."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024, dtype=dtype), nn.GELU()) for _ in range(6)))

    def forward(self, x: Tensor) -> Any:
        return self.layers(x)


def _compiled(fn: Any, **options: Any) -> Any:
    return torch.compile(fn, dynamic=False, **options)


def _split_stack(backward: bool) -> Case:
    x, weight = (torch.randn(2048, 2048, device="cuda", requires_grad=backward) for _ in range(2))
    ways: dict[str, Fn] = {
        WRITTEN: split_stack,
        "combined by hand": combined,
        "compiled": _compiled(split_stack),
        "combined, compiled": _compiled(combined),
        "fused": onepass.fuse(split_stack),
        "combined, compiled, graph": _compiled(combined, mode="reduce-overhead"),
        "fused, graph": onepass.fuse(split_stack, cuda_graph=True),
    }
    return Case("split_stack, forward and backward" if backward else "split_stack", [x, weight], ways, backward, 2e-2)


def _module(
    name: str, module: nn.Module, inputs: Sequence[Tensor], backward: bool, compiled: bool = True, graph: bool = True
) -> Case:
    module = module.cuda()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.02 if parameter.dim() > 1 else 1.0)
    ways: dict[str, Fn] = {WRITTEN: module}
    if compiled:
        ways["compiled"] = _compiled(module)
    ways["fused"] = onepass.fuse(module)
    if graph:
        ways["fused, graph"] = onepass.fuse(module, cuda_graph=True)
    return Case(name, inputs, ways, backward, _BF16_FAR, list(module.parameters()))


def _random(*shape: int, dtype: torch.dtype = torch.bfloat16, grad: bool = False) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype, requires_grad=grad)


def _widths() -> list[int]:
    widths = torch.linspace(32, 512, 64).div(8).round().mul(8).int().tolist()
    return [int(width) for width in widths]


def cases() -> dict[str, Callable[[], Case]]:
    """Where nothing is asked of torch.compile it is left out: it compiles a kernel for each tensor."""
    bf16, widths = torch.bfloat16, _widths()
    row, halves = sum(widths), widths[::4]

    def rows(*sizes: int, grad: bool) -> list[Tensor]:
        return [_random(2048, size, grad=grad) for size in sizes]

    return {
        "split_stack": lambda: _split_stack(False),
        "split_stack_backward": lambda: _split_stack(True),
        "64_norms": lambda: _module("64 layer_norms of 32 to 512, slices", Norms(widths, bf16), rows(row, grad=True), True),
        "256_tables": lambda: _module(
            "256 tables x 64, separate tensors", Tables(256, 64, bf16), rows(*[64] * 256, grad=False), False, compiled=False
        ),
        "projections": lambda: _module("q/k/v and gate/up, 512 tokens", Projections(bf16), [_random(512, 2048)], False),
        "projections_backward": lambda: _module(
            "q/k/v and gate/up, 512 tokens, forward and backward", Projections(bf16), [_random(512, 2048, grad=True)], True
        ),
        "nothing": lambda: _module("nothing to fuse", Plain(bf16), [_random(512, 1024)], False, graph=False),
        "nothing_backward": lambda: _module(
            "nothing to fuse, forward and backward", Plain(bf16), [_random(512, 1024, grad=True)], True, graph=False
        ),
        "256_tables_slices": lambda: _module(
            "256 tables x 64, slices", SlicedTables(256, 64, bf16), rows(256 * 64, grad=False), False, compiled=False
        ),
        "64_norms_separate": lambda: _module(
            "64 layer_norms of 32 to 512, separate tensors",
            ListedNorms(widths, bf16),
            rows(*widths, grad=True),
            True,
            compiled=False,
        ),
        "16_gates": lambda: _module(
            "16 swiglus of 32 to 512, separate tensors", Gates(), rows(*[2 * w for w in halves], grad=True), True, graph=False
        ),
    }


# ---- measuring ----


def kernels(step: Callable[[], Any], calls: int = 5) -> tuple[float, float, dict[str, float]]:
    """A call's kernels, their microseconds, and each by its name."""
    step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as profiler:
        for _ in range(calls):
            step()
        torch.cuda.synchronize()
    found = [e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    names: dict[str, float] = {}
    for event in found:
        names[event.name[:80]] = names.get(event.name[:80], 0) + 1 / calls
    return len(found) / calls, sum(e.time_range.elapsed_us() for e in found) / calls, names


def far(results: Any, written: Any) -> float:
    """The largest difference, over the largest value, of any result."""
    pairs = zip(_flat(results), _flat(written), strict=True)
    return max(float((a.float() - b.float()).abs().max() / b.float().abs().max().clamp_min(1e-30)) for a, b in pairs)


def _flat(results: Any) -> Iterator[Tensor]:
    for result in results if isinstance(results, list | tuple) else [results]:
        yield result.detach().clone()


def measure(case: Case, rounds: int) -> dict[str, Any]:
    steps = {name: case.step(fn) for name, fn in case.ways.items()}
    found: dict[str, Any] = {}
    reference = list(_flat(steps[WRITTEN]()))
    for name, step in steps.items():
        started = time.perf_counter()
        torch.compiler.cudagraph_mark_step_begin()
        result = list(_flat(step()))
        torch.cuda.synchronize()
        row: dict[str, Any] = {"first_call_s": time.perf_counter() - started, "far": far(result, reference)}
        if row["far"] > case.tolerance:
            row["error"] = f"differs by {row['far']:.1e}"
        for _ in range(5):
            torch.compiler.cudagraph_mark_step_begin()
            step()
        row["kernels"], row["gpu_us"], row["names"] = kernels(step)
        found[name] = row
    walls: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            step()
            calls = 10 if name == WRITTEN else 40
            walls[name].append(run(step, calls)[0])
    for name, each in walls.items():
        found[name]["wall_us"] = statistics.median(each)
        found[name]["wall_us_range"] = [min(each), max(each)]
    for name, fn in case.ways.items():
        if name.startswith("fused") and hasattr(fn, "report"):
            report = fn.report()
            found[name]["fuse_s"] = sum(graph.seconds for graph in report.graphs)
            found[name]["report"] = str(report)
    return found


def table(case: Case, result: dict[str, Any]) -> Table:
    made = Table("", "kernels", "GPU us", "wall us", "", "differs by", title=case.name, title_justify="left")
    base = result.get("combined, compiled", result.get("compiled", result[WRITTEN]))["wall_us"]
    for name, row in result.items():
        times = f"{row['gpu_us']:.1f}", f"{row['wall_us']:.1f}", f"{row['wall_us'] / base:.3f}"
        style = "bold red" if "error" in row else "bold cyan" if name.startswith("fused") else ""
        made.add_row(name, f"{row['kernels']:.0f}", *times, f"{row['far']:.1e}", style=style)
    return made


def main() -> None:
    known = cases()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--case", action="append", choices=list(known))
    parser.add_argument("--way", action="append", help="of a case, beside what is written; all of them if not given")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--verbose", action="store_true", help="also each way's kernels and the reports")
    args = parser.parse_args()
    need_gpus()
    torch.set_float32_matmul_precision("high")  # TF32, as who trains in fp32 has it
    console = Console(width=150)
    rows: dict[str, Any] = {}
    for name in track(args.case or list(known), "cases", console=Console(stderr=True), transient=True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        case = known[name]()
        if args.way:
            case.ways = {way: fn for way, fn in case.ways.items() if way in (WRITTEN, *args.way)}
        try:
            result = measure(case, args.rounds)
        except Exception as error:
            if args.json is None:
                raise
            rows[name] = {"error": repr(error)}
            console.print(f"{name}: {error!r}", style="red")
            continue
        console.print(table(case, result))
        if args.verbose:
            for way, row in result.items():
                console.print(way, row["names"])
                console.print(row.get("report", ""))
        for row in result.values():
            row.pop("report", None)
        rows[name] = {"title": case.name, "ways": result}
    write(args.json, torch.device("cuda"), rows=rows)


if __name__ == "__main__":
    main()
