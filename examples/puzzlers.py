"""One small program, run in five ways and more, and what each does with the machine. docs/puzzle.md explains what it shows.

    python examples/puzzlers.py [--small] [--out DIR] [--write [--results DIR] [--note TEXT]]

A GPU if there is one, else the CPU. Into DIR (puzzlers) go the timelines one above the other, all tables and the figures as JSON.
--write puts tables and timelines into docs/puzzle.md, and the figures into benchmarks/results.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch._inductor import config as inductor

import onepass
from onepass.bench.record import commit, device_name, versions
from onepass.profiling.model import Profile
from onepass.profiling.picture import draw

ROOT = Path(__file__).parents[1]
PAGE, RESULTS = ROOT / "docs" / "puzzle.md", ROOT / "benchmarks" / "results"
PICTURE = "images/puzzlers.png"  # beside the page
SLICES = 16
FULL, SMALL = (2048, 128), (64, 16)  # rows, columns of a slice
SAME, SAME_TF32 = 1e-5, 2e-3  # of the largest value
LISTED = 5  # names of what ran

Way = Callable[[Tensor, Tensor], Tensor]


# ---- the program, twice ----


def split_stack(x: Tensor, weight: Tensor) -> Tensor:
    parts = torch.split(x, x.shape[1] // SLICES, dim=1)
    normed = [torch.tanh(F.layer_norm(part, part.shape[1:])) for part in parts]
    return F.relu(F.linear(torch.cat(normed, dim=1), weight))


def combined(x: Tensor, weight: Tensor) -> Tensor:
    """By hand: the slices are the middle dimension of one tensor."""
    slices = x.view(x.shape[0], SLICES, -1)
    normed = torch.tanh(F.layer_norm(slices, slices.shape[2:]))
    return F.relu(F.linear(normed.view(x.shape), weight))


# ---- the ways to run it ----


def ways(x: Tensor, weight: Tensor) -> dict[str, Way]:
    found: dict[str, Way] = {
        "split_stack": split_stack,
        "combined": combined,
        "split_stack, compiled": torch.compile(split_stack, dynamic=False),
        "combined, compiled": torch.compile(combined, dynamic=False),
        "split_stack, fused": onepass.fuse(split_stack),
    }
    if x.is_cuda:
        found |= {
            "split_stack, graph": replayed(split_stack, x, weight),
            "combined, compiled, graph": torch.compile(combined, dynamic=False, mode="reduce-overhead"),
            "split_stack, fused, graph": onepass.fuse(split_stack, cuda_graph=True),
        }
    return found


def replayed(fn: Way, x: Tensor, weight: Tensor) -> Way:
    """What fn launches, recorded as a CUDA graph and launched at once."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        fn(x, weight)  # warm-up: what libraries allocate at their first call is no part of a graph
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = fn(x, weight)

    def replay(x: Tensor, weight: Tensor) -> Tensor:
        graph.replay()
        return result

    return replay


# ---- running them ----


def run(rows: int, width: int, device: torch.device, say: Callable[[str], None]) -> tuple[dict[str, Any], dict[str, Profile]]:
    """The figures of all ways, and their profiles. Raises where one computes something else."""
    torch.manual_seed(0)
    x = torch.randn(rows, SLICES * width, device=device)
    weight = torch.randn(SLICES * width, SLICES * width, device=device) / (SLICES * width) ** 0.5
    written = split_stack(x, weight)
    all_ways, far, profiles = ways(x, weight), {}, {}
    for at, (name, fn) in enumerate(all_ways.items(), 1):
        say(f"{at} of {len(all_ways)}: {name}")
        far[name] = checked(name, fn(x, weight), written)
        profiles[name] = onepass.profile(fn, x, weight)
    figures = {
        "commit": commit(),
        "device": device_name(device) if x.is_cuda else f"{device_name(device).partition(',')[0]}, one thread",
        "on_gpu": x.is_cuda,
        "versions": versions(),
        "x": [rows, SLICES, width],
        "small": (rows, width) == SMALL,
        "ways": {name: {**one_way(profile), "differs_by": far[name]} for name, profile in profiles.items()},
        "report": str(all_ways["split_stack, fused"].report()),  # type: ignore[attr-defined]
    }
    return figures, profiles


def checked(name: str, result: Tensor, written: Tensor) -> float:
    """The largest difference, over the largest value."""
    far = float((result - written).abs().max() / written.abs().max())
    most = SAME_TF32 if written.is_cuda else SAME
    if not far <= most:
        raise RuntimeError(f"{name} must give what split_stack gives, to {most:.0e} of it, but differs by {far:.1e}")
    return far


def one_way(profile: Profile) -> dict[str, Any]:
    ran = what_ran(profile)
    return {
        "ran": ran,
        "kernels": sum(count for _, count, _ in ran),
        "launches": profile.launches if profile.on_gpu else None,
        "busy_us": profile.busy_us,
        "idle_us": profile.idle_us,
        "wall_us": profile.wall_us,
        "wall_range": profile.wall_range,
        "verdict": profile.verdict,
    }


def what_ran(profile: Profile) -> list[tuple[str, float, float]]:
    """Name, count, microseconds, the longest first: of operators and kernels; of a compiler's without their numbers."""
    found: dict[str, list[float]] = {}
    for row in profile.rows:
        count = sum(row.kernels.values()) if profile.on_gpu else row.calls * is_work(row.name)
        if count:
            one = found.setdefault(re.sub(r"^graph_\d+_|_\d+$", "", row.name), [0.0, 0.0])
            one[0] += count
            one[1] += row.us
    return sorted(((name, count, us) for name, (count, us) in found.items()), key=lambda row: -row[2])


def is_work(name: str) -> bool:
    """Of a CPU's rows: an operator, or a loop that inductor wrote; not dynamo's own ranges."""
    return name.startswith("aten::") or "cpp_fused" in name


# ---- as tables ----


def titles(figures: dict[str, Any]) -> list[str]:
    if figures["on_gpu"]:
        return ["kernels", "launches", "GPU busy, us", "idle, us", "wall, us", "bound by", "differs by"]
    return ["operators and loops", "in them, us", "outside, us", "wall, us", "bound by", "differs by"]


def cells(figures: dict[str, Any]) -> Iterable[list[str]]:
    for name, way in figures["ways"].items():
        counts = [f"{way['kernels']:.0f}", *([f"{way['launches']:.0f}"] if figures["on_gpu"] else [])]
        times = [f"{way[key]:,.0f}" for key in ("busy_us", "idle_us", "wall_us")]
        verdict = way["verdict"].removesuffix("-bound")
        yield [name, *counts, *times, verdict, f"{way['differs_by']:.0e}" if way["differs_by"] else "0"]


def listed(way: dict[str, Any]) -> str:
    shown, rest = way["ran"][:LISTED], way["ran"][LISTED:]
    said = [f"{count:.0f} `{name}` {us:,.0f}" for name, count, us in shown]
    if rest:
        said.append(f"{sum(count for _, count, _ in rest):.0f} others {sum(us for *_, us in rest):,.0f}")
    return ", ".join(said)


def on_screen(figures: dict[str, Any]) -> Table:
    table = Table("", title=f"{figures['device']}, x {size(figures)}", title_justify="left")
    for title in titles(figures):
        table.add_column(title, justify="right")
    for row in cells(figures):
        table.add_row(*row)
    return table


def size(figures: dict[str, Any]) -> str:
    rows, slices, width = figures["x"]
    return f"[{rows}, {slices * width}] in {slices} slices of {width}"


def on_page(figures: dict[str, Any]) -> str:
    """What stands in docs/puzzle.md between the markers."""
    names = titles(figures)
    packages = ", ".join(f"{name} {figures['versions'][name]}" for name in ("torch", "triton") if figures["versions"][name])
    products = "TF32 products" if figures["on_gpu"] else "fp32"
    lines = [
        f"{figures['device']}; x {size(figures)}, {products}; {packages}; commit {figures['commit']}.",
        *([figures["note"]] if figures.get("note") else []),
        "",
        f"| | {' | '.join(names)} |",
        f"|---|{'---|' * len(names)}",
        *(f"| {' | '.join(row)} |" for row in cells(figures)),
        "",
        "What ran, the longest first: how many of it, and their microseconds together.",
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {listed(way)} |" for name, way in figures["ways"].items()),
        *(["", f"![timelines of all ways on one time axis]({PICTURE})"] if figures["on_gpu"] else []),
    ]
    if not figures["small"]:
        lines += ["", "The report of `fused`:", "", "```", figures["report"], "```"]
    return "\n".join(lines)


# ---- as files ----


def picture(profiles: dict[str, Profile], path: Path) -> None:
    draw([profile.timeline(name.replace(", ", "\n")) for name, profile in profiles.items()], path)


def save(figures: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(figures, indent=1) + "\n")


def marker(figures: dict[str, Any]) -> str:
    return f"puzzlers, {'GPU' if figures['on_gpu'] else 'CPU'}{', small' if figures['small'] else ''}"


def with_figures(page: str, figures: dict[str, Any]) -> str:
    start, end = f"<!-- {marker(figures)} -->\n", f"<!-- /{marker(figures)} -->"
    before, found, rest = page.partition(start)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"the page must have the lines {start.strip()} and {end}")
    return f"{before}{start}{on_page(figures)}\n{end}{after}"


def write(figures: dict[str, Any], profiles: dict[str, Profile], page: Path, results: Path) -> None:
    if not figures["commit"]:
        raise ValueError("a figure without a commit can't be repeated: run in a checkout, or say which it is in ONEPASS_COMMIT")
    page.write_text(with_figures(page.read_text(), figures))
    save(figures, results / "scripts" / f"{'puzzlers_small' if figures['small'] else 'puzzlers'}.json")
    if figures["on_gpu"]:
        picture(profiles, page.parent / PICTURE)


def default_results(device: torch.device) -> Path:
    name = torch.cuda.get_device_name(device).removeprefix("NVIDIA ").split()[0].lower() if device.type == "cuda" else "cpu"
    return RESULTS / name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--small", action="store_true", help=f"x [{SMALL[0]}, {SLICES * SMALL[1]}], in seconds")
    parser.add_argument("--out", type=Path, default=Path("puzzlers"), help="folder for what it finds (puzzlers)")
    parser.add_argument("--write", action="store_true", help="also into docs/puzzle.md and benchmarks/results")
    parser.add_argument("--results", type=Path, help="folder for --write (benchmarks/results/NAME OF THE GPU, or .../cpu)")
    parser.add_argument("--note", help="what a reader of the page should know of this run, such as which of several it is")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")  # TF32 on a GPU, as who trains in fp32 has it
    if device.type == "cpu":
        torch.set_num_threads(1)  # more would wait for each other wherever the machine has something else to do
        inductor.cpp.enable_kernel_profile = True  # so that the profiler sees the loops that inductor writes
    progress = Console(stderr=True)
    figures, profiles = run(*(SMALL if args.small else FULL), device, lambda text: progress.print(text, style="dim"))
    figures["note"] = args.note
    console = Console(width=118)
    console.print(on_screen(figures))
    console.print(figures["report"], markup=False, highlight=False)
    save(figures, args.out / "puzzlers.json")
    tables = "\n\n".join(f"---- {name} ----\n\n{profile}" for name, profile in profiles.items())
    (args.out / "profiles.txt").write_text(tables + "\n")
    picture(profiles, args.out / "puzzlers.png")
    progress.print(f"timelines, tables and figures: {args.out}", style="dim")
    if args.write:
        write(figures, profiles, PAGE, args.results or default_results(device))


if __name__ == "__main__":
    main()
