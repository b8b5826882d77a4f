"""Attention's kernels over tiles, warps and stages, each by itself: forward, dq, and dk and dv.

    python benchmarks/attention_tiles.py [case ...] [--kernels forward,dq,dk_dv] [--jobs 12] [--json FILE]

Milliseconds on one GPU, medians, the L2 cache overwritten before each; TFLOP/s of the products that a kernel makes within what is
seen. "error" is the largest difference from the tiles that the op takes, over those tiles' largest number. Other processes
compile first, each some of the candidates, so that a case takes less than a minute. What doesn't fit is a line that says why.
"""

from __future__ import annotations

import argparse
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from measuring import need_gpus, write
from rich.console import Console
from rich.table import Table
from torch import Tensor

from onepass.bench.attention_options import MIXED
from onepass.bench.record import commit, device_name
from onepass.ops.attention import backward, forward
from onepass.ops.attention.formula import AttentionOptions, parts_of
from onepass.ops.attention.forward import AttentionTiles, attend, head_block
from onepass.runtime.ceilings import clock_for


@dataclass(frozen=True)
class Case:
    """Sequences x tokens x heads x groups x width, or documents of one row."""

    B: int
    S: int
    heads: int
    groups: int
    D: int
    lengths: tuple[int, ...] = ()
    window: int = 0
    softcap: float = 0.0

    @property
    def options(self) -> AttentionOptions:
        return AttentionOptions(self.heads, self.groups, False, self.D**-0.5, self.window - 1, 0, self.softcap)

    @property
    def pairs(self) -> int:
        """Queries times the keys that they see, of a head."""
        window = self.window or self.S
        return self.B * sum(sum(min(i + 1, window) for i in range(length)) for length in self.lengths or (self.S,))


CASES = {
    "wide": Case(4, 4096, 32, 32, 128),
    "wide-grouped": Case(2, 8192, 16, 4, 128),
    "narrow": Case(4, 4096, 32, 8, 64),
    "packed-narrow": Case(1, 16384, 32, 8, 64, MIXED),
    "packed-wide": Case(1, 16384, 32, 8, 128, MIXED),
    "short-narrow": Case(1, 16384, 32, 8, 64, (512,) * 32),
    "short-wide": Case(1, 16384, 32, 8, 128, (512,) * 32),
    "window": Case(1, 16384, 32, 8, 128, window=1024),
    "window-narrow": Case(2, 8192, 64, 8, 64, window=128),
    "softcap-narrow": Case(4, 4096, 32, 8, 64, softcap=30.0),
    "softcap": Case(1, 4096, 8, 4, 256, softcap=50.0),
    "softcap-window": Case(1, 4096, 8, 4, 256, window=1024, softcap=50.0),
}

# Queries x keys, warps, stages, programs to a multiprocessor (0: the compiler's choice), by the width of a tile.
_FORWARD = {
    64: [(64, 64, 4, 3), (64, 64, 4, 2), (128, 64, 8, 3), (128, 64, 4, 3), (128, 128, 8, 2), (128, 64, 8, 4)],
    128: [(64, 64, 4, 3), (64, 64, 4, 2), (128, 64, 8, 3), (128, 64, 8, 2), (128, 128, 8, 2), (64, 128, 4, 2)],
    256: [(128, 32, 8, 2), (128, 32, 8, 3), (64, 64, 8, 2), (64, 32, 4, 2), (128, 64, 8, 2), (64, 32, 4, 3)],
}
_DQ = {
    64: [(64, 64, 4, 2, 4), (64, 64, 4, 3), (128, 64, 8, 2, 2), (128, 128, 8, 2, 1), (128, 64, 8, 3)],
    128: [(128, 64, 8, 3), (128, 64, 8, 2, 1), (64, 64, 4, 2, 2), (128, 128, 8, 2, 1), (64, 128, 4, 2), (128, 32, 8, 3, 1)],
    256: [(64, 64, 8, 2), (64, 32, 8, 2), (128, 32, 8, 2), (64, 32, 8, 3)],
}
_DK_DV = {
    64: [(64, 64, 4, 3, 3), (64, 64, 4, 3, 2), (64, 64, 4, 2, 3), (64, 128, 8, 3), (32, 64, 4, 3, 4), (32, 64, 4, 3, 3)],
    128: [(64, 64, 4, 2, 2), (64, 64, 4, 3, 2), (64, 128, 8, 2, 1), (64, 128, 8, 3, 1), (32, 128, 8, 3, 1), (32, 64, 4, 3, 2)],
    256: [(64, 64, 8, 2), (32, 64, 8, 2), (32, 64, 8, 3), (32, 32, 4, 2), (64, 32, 4, 2)],
}
Candidate = tuple[str, tuple[int, ...]]  # the kernel and its tiles


def candidates(case: Case, kernels: list[str]) -> list[Candidate]:
    """Return what is tried. The first of each kernel is compared with."""
    W = head_block(case.D)
    smem = 232448
    dq, dk_dv = backward.backward_tiles(case.D, case.S, case.options, bool(case.lengths), smem)
    stock = {"forward": forward.forward_tiles(W, smem), "dq": dq, "dk_dv": dk_dv}
    found = []
    for kernel, tiles in (("forward", _FORWARD), ("dq", _DQ), ("dk_dv", _DK_DV)):
        if kernel in kernels:
            of_width = [(*each, 0) if len(each) == 4 else each for each in tiles[W]]
            found += [(kernel, each) for each in dict.fromkeys([tuple(stock[kernel]), *of_width])]
    return found


@dataclass
class Drawn:
    qkv: Tensor
    documents: Tensor | None
    call: backward.BackwardCall
    dqkv: Tensor


def draw(case: Case) -> Drawn:
    torch.manual_seed(0)
    random = partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    qkv = random(case.B, case.S, (case.heads + 2 * case.groups) * case.D)
    documents = torch.tensor((0, *case.lengths), device="cuda").cumsum(0).int() if case.lengths else None
    parts = parts_of(qkv, case.heads, case.groups)
    y, lse = attend(*parts, case.options, documents)
    call = backward.BackwardCall(random(y.shape), *parts, y, lse, case.options, documents)
    backward.write_dq(call, None, backward.dq_tiles(head_block(case.D), 232448))  # delta
    return Drawn(qkv, documents, call, torch.zeros_like(qkv))


def run_of(case: Case, drawn: Drawn, candidate: Candidate) -> Callable[[], Tensor]:
    """Return a function that launches the kernel and returns what it writes."""
    kernel, numbers = candidate
    tiles = AttentionTiles(*numbers)
    dq, dk, dv = parts_of(drawn.dqkv, case.heads, case.groups)
    if kernel == "forward":
        parts = parts_of(drawn.qkv, case.heads, case.groups)

        def run() -> Tensor:
            with mock.patch.object(forward, "forward_tiles", return_value=tiles):
                return attend(*parts, case.options, drawn.documents)[0]

        return run
    if kernel == "dq":
        return lambda: (backward.write_dq(drawn.call, dq, tiles), dq)[1]
    return lambda: (backward.write_dk_dv(drawn.call, dk, dv, tiles), drawn.dqkv[..., case.heads * case.D :])[1]


def compile_candidate(case: Case, candidate: Candidate) -> None:
    """Run once, in a process of its own: the binary is then in Triton's cache."""
    try:
        run_of(case, draw(case), candidate)()
        torch.cuda.synchronize()
    except Exception:
        return  # it is said where it is timed


def sweep(name: str, kernels: list[str], pool: ProcessPoolExecutor) -> list[dict[str, object]]:
    case = CASES[name]
    tried = candidates(case, kernels)
    list(pool.map(partial(compile_candidate, case), tried))
    drawn, clock, rows, first = draw(case), clock_for(torch.device("cuda", 0)), [], {}
    for kernel, tiles in tried:
        row: dict[str, object] = {"case": name, "kernel": kernel, "tiles": tiles}
        try:
            run = run_of(case, drawn, (kernel, tiles))
            drawn.dqkv.zero_()
            got = run().float()
            wanted = first.setdefault(kernel, got.clone())
            error = ((got - wanted).abs().max() / wanted.abs().max()).item()
            seconds = clock.median(lambda _, run=run: run()) / 1e3
            products = {"forward": 2, "dq": 3, "dk_dv": 4}[kernel]
            flops = 2 * products * case.pairs * case.heads * case.D
            row |= {"ms": 1e3 * seconds, "tflops": flops / seconds / 1e12, "error": error}
        except Exception as problem:
            row["problem"] = f"{type(problem).__name__} {str(problem).strip()[-60:]}"
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=["wide"], help=f"of {', '.join(CASES)}")
    parser.add_argument("--kernels", default="forward,dq,dk_dv")
    parser.add_argument("--jobs", type=int, default=12)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    need_gpus()
    rows: list[dict[str, object]] = []
    with ProcessPoolExecutor(args.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        for name in args.cases:
            rows += sweep(name, args.kernels.split(","), pool)
    table = Table(title=f"{device_name(torch.device('cuda'))}, commit {commit()}", title_justify="left")
    for heading in ("case", "kernel", "queries x keys, warps, stages, programs", "ms", "TFLOP/s", "error"):
        table.add_column(heading)
    for row in rows:
        m, n, *rest = row["tiles"]  # type: ignore[misc]
        cells = [*(str(row[column]) for column in ("case", "kernel")), f"{m} x {n}, {', '.join(map(str, rest))}"]
        if "problem" in row:
            table.add_row(*cells, "", "", str(row["problem"]))
        else:
            table.add_row(*cells, f"{row['ms']:.3f}", f"{row['tflops']:.0f}", f"{row['error']:.1e}")
    Console(width=150).print(table)
    write(args.json, torch.device("cuda"), rows=rows)


if __name__ == "__main__":
    main()
