"""A recommender with 24 embedding tables, as people write it and by onepass.fuse: a look-up a table, or one of all tables.

    python examples/recommender.py [--small] [--out DIR]

A GPU if there is one, else the CPU. It trains each way on the same clicks, compares the losses, and prints what a step launches
and how long it takes; into DIR (recommender) as JSON too. --small: small tables and no compiler, in seconds.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import onepass
from onepass.bench.record import commit, device_name, versions

TABLES, DENSE = 24, 13  # columns of ids, and of numbers
FULL, SMALL = (8192, 64, 200_000), (64, 8, 200)  # examples of a batch, width of a row, rows of the largest table
STEPS = 10
SAME = 1e-3  # of the loss: sums in another order


class Recommender(nn.Module):
    def __init__(self, rows: list[int], width: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(count, width) for count in rows)
        self.bottom = nn.Linear(DENSE, width)
        self.top = nn.Sequential(nn.Linear((len(rows) + 1) * width, 4 * width), nn.ReLU(), nn.Linear(4 * width, 1))

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        looked_up = [table(ids[:, i]) for i, table in enumerate(self.tables)]
        return self.top(torch.cat([F.relu(self.bottom(dense)), *looked_up], dim=1)).squeeze(1)


class OneTable(Recommender):
    """By hand: one table, in which each column's rows follow those of the column before."""

    def __init__(self, rows: list[int], width: int) -> None:
        super().__init__(rows, width)
        table = nn.Embedding(sum(rows), width)
        table.weight.data.copy_(torch.cat([each.weight.data for each in self.tables]))
        self.tables = nn.ModuleList([table])
        self.register_buffer("offsets", torch.tensor([0, *rows[:-1]]).cumsum(0))

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        looked_up = self.tables[0](ids + self.offsets).flatten(1)
        return self.top(torch.cat([F.relu(self.bottom(dense)), looked_up], dim=1)).squeeze(1)


def ways(device: torch.device, small: bool, rows: list[int], width: int) -> dict[str, tuple[nn.Module, Callable[..., Tensor]]]:
    """Return name -> the module that is trained and the function that calls it. All begin with the same numbers."""

    def made(kind: type[Recommender]) -> nn.Module:
        torch.manual_seed(0)
        return kind(rows, width).to(device)

    written, fused = made(Recommender), made(Recommender)
    found: dict[str, tuple[nn.Module, Callable[..., Tensor]]] = {
        "as written": (written, written),
        "fused": (fused, onepass.fuse(fused, compiler="none" if small else "auto")),
    }
    by_hand = made(OneTable)
    if small:
        return found | {"one table by hand": (by_hand, by_hand)}
    compiled = made(Recommender)
    found |= {
        "compiled": (compiled, torch.compile(compiled, dynamic=False)),
        "one table by hand, compiled": (by_hand, torch.compile(by_hand, dynamic=False)),
    }
    if device.type == "cpu":
        return found
    fused, compiled = made(Recommender), made(Recommender)
    return found | {
        "fused, CUDA graphs": (fused, onepass.fuse(fused, cuda_graph=True)),
        "compiled, CUDA graphs": (compiled, torch.compile(compiled, dynamic=False, mode="reduce-overhead")),
    }


def clicks(device: torch.device, rows: list[int], batch: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return numbers, ids and whether somebody clicked, which depends on both. Low ids are frequent, as popular things are."""
    generator = torch.Generator().manual_seed(1)
    dense = torch.randn(batch, DENSE, generator=generator)
    ids = torch.stack([(torch.rand(batch, generator=generator) ** 3 * count).long() for count in rows], dim=1)
    liked = dense[:, 0] + (ids % 2 * 2 - 1).float().sum(1) / len(rows) ** 0.5
    return dense.to(device), ids.to(device), (liked > 0).float().to(device)


def train(
    module: nn.Module, call: Callable[..., Tensor], data: tuple[Tensor, Tensor, Tensor], steps: int
) -> tuple[list[float], Any]:
    """Return the losses of the steps, and the profile of another one."""
    dense, ids, labels = data
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(call(dense, ids), labels)
        loss.backward()
        optimizer.step()
        return loss

    losses = [step().detach() for _ in range(steps)]
    return torch.stack(losses).tolist(), onepass.profile(step)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--small", action="store_true", help="small tables and no compiler, in seconds")
    parser.add_argument("--out", type=Path, default=Path("recommender"), help="folder for the figures (recommender)")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    batch, width, largest = SMALL if args.small else FULL
    rows = [max(3, int(largest ** (1 - i / TABLES))) for i in range(TABLES)]
    data = clicks(device, rows, batch)
    table = Table(
        "", title=f"{device_name(device)}: {batch} examples, {TABLES} tables of {rows[-1]} to {rows[0]:,} rows of {width}"
    )
    for title in ("kernels" if device.type == "cuda" else "operators", "busy, us", "wall, us", "peak MiB", "last loss"):
        table.add_column(title, justify="right")
    figures: dict[str, Any] = {}
    report = ""
    for name, (module, call) in ways(device, args.small, rows, width).items():
        losses, profile = train(module, call, data, STEPS)
        first = figures.setdefault("as written", {"losses": losses})["losses"]
        if not all(abs(a - b) <= SAME * abs(b) for a, b in zip(losses, first, strict=True)):
            raise RuntimeError(f"{name} must train as the program as written does, but its losses are {losses}, not {first}")
        report = str(call.report()) if name == "fused" else report  # type: ignore[attr-defined]
        ran = sum(profile.kernel_names().values())
        peak = (profile.peak_bytes or 0) / 2**20
        table.add_row(
            name, f"{ran:.0f}", f"{profile.busy_us:,.0f}", f"{profile.wall_us:,.0f}", f"{peak:,.0f}", f"{losses[-1]:.4f}"
        )
        figures[name] = {"losses": losses, "ran": ran, "names": profile.kernel_names(), "peak_bytes": profile.peak_bytes}
        figures[name] |= {"busy_us": profile.busy_us, "wall_us": profile.wall_us, "wall_range": profile.wall_range}
    console = Console(width=118)
    console.print(table)
    console.print(report, markup=False, highlight=False)
    args.out.mkdir(parents=True, exist_ok=True)
    made_by = {
        "commit": commit(),
        "device": device_name(device),
        "versions": versions(),
        "rows": rows,
        "batch": batch,
        "width": width,
    }
    (args.out / "recommender.json").write_text(json.dumps({**made_by, "ways": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
