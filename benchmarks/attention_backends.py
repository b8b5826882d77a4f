"""attention by each package's kernels, each pass by itself: what the table of ops/attention/choice.py is made of.

    python benchmarks/attention_backends.py [word ...] [--part 1/2] [--json FILE]

Milliseconds on one GPU without rotation, medians, the L2 cache overwritten before each; backward in a fixed order and, after the
stroke, in any. "onepass" are this package's own kernels alone, "torch" is PyTorch's scaled_dot_product_attention, and MiB is what
backward allocates. What a package doesn't take is a line that says why. Words choose the cases whose names have one of them, and
--part 2/2 every second, for a machine of two GPUs.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from attention_tiles import Case
from measuring import need_gpus, write
from rich.console import Console
from rich.table import Table

from onepass.bench.attention_options import MIXED
from onepass.ops.attention.attention import attend_with, attention
from onepass.runtime.backend import find_op
from onepass.runtime.ceilings import clock_for

BY = ("onepass", "cudnn", "flash_attn", "varlen_attn", "torch")


def title_of(case: Case) -> str:
    kind = f"{len(case.lengths)} documents" if case.lengths else f"window {case.window}" if case.window else "plain"
    kind = f"softcap {case.softcap:g}" if case.softcap else kind
    return f"{case.B} x {case.S}, {case.heads}/{case.groups} x {case.D}, {kind}"


def cases() -> list[Case]:
    kinds = (32, 32, 128), (32, 8, 128), (32, 8, 64), (16, 16, 64)
    plain = [Case(16384 // S, S, *kind) for kind in kinds for S in (512, 1024, 2048, 4096, 8192, 16384)]
    few = [Case(16, 1024, 12, 12, 64), Case(2, 8192, 16, 4, 128), Case(2, 4096, 16, 16, 128), Case(1, 4096, 8, 4, 256)]
    windows = [Case(16384 // S, S, heads, groups, D, window=window) for D, heads, groups in ((128, 32, 8), (64, 32, 8))
               for S, window in ((2048, 512), (4096, 128), (4096, 1024), (16384, 1024), (16384, 4096))]  # fmt: skip
    documents = [Case(1, 16384, 32, 8, D, lengths) for D in (128, 64) for lengths in (MIXED, (512,) * 32, (2048,) * 8)]
    return [*plain, *few, *windows, *documents, Case(1, 4096, 8, 4, 256, softcap=50.0)]


def attend(by: str, case: Case, options: dict[str, Any], qkv: torch.Tensor) -> torch.Tensor:
    """By onepass's own kernels, which have no backend's name, or by a backend."""
    if by == "onepass":
        return attend_with(by, find_op(attention).call(qkv, case.heads, case.groups, **options))
    return attention(qkv, case.heads, case.groups, **options, backend=by)


def measure(case: Case, clock: Any) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    random = partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    qkv = random(case.B, case.S, (case.heads + 2 * case.groups) * case.D).requires_grad_()
    dy = random(case.B, case.S, case.heads * case.D)
    boundaries = torch.tensor((0, *case.lengths), device="cuda").cumsum(0).int() if case.lengths else None
    given = {"cu_seqlens": boundaries, "window": case.window or None, "softcap": case.softcap or None}
    rows = []
    for by in BY:
        if by == "torch" and "plain" not in title_of(case):  # it makes a mask
            continue
        row: dict[str, Any] = {"case": title_of(case), **asdict(case), "by": by}
        for order, deterministic in (("in order", True), ("any order", False)):
            torch.use_deterministic_algorithms(deterministic)  # varlen_attn's order is the process's
            torch.utils.deterministic.fill_uninitialized_memory = False
            forward = partial(attend, by, case, given | {"deterministic": deterministic})
            try:
                y = forward(qkv)
            except RuntimeError as error:
                row[f"{order}, reason"] = str(error).partition(": ")[2]
                continue
            backward = partial(torch.autograd.grad, y, qkv, dy, retain_graph=True)
            backward()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            backward()
            row[f"{order}, MiB"] = (torch.cuda.max_memory_allocated() - before) / 2**20
            row.setdefault("forward", clock(partial(forward, qkv.detach())))
            row[order] = clock(backward)
        rows.append(row)
        torch.use_deterministic_algorithms(False)
    return rows


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("words", nargs="*", metavar="word", help="such as documents")
    arguments.add_argument("--part", default="1/1", help="of the cases, such as 2/2")
    arguments.add_argument("--json", type=Path)
    args = arguments.parse_args()
    need_gpus()
    part, parts = map(int, args.part.split("/"))
    device, console, found = torch.device("cuda", 0), Console(width=120), list[dict[str, Any]]()
    timer = clock_for(device)

    def clock(call: Any) -> float:
        return timer.median(lambda _: call())  # type: ignore[no-any-return]

    chosen = [case for case in cases() if not args.words or any(word in title_of(case) for word in args.words)]
    for case in chosen[part - 1 :: parts]:
        rows = measure(case, clock)
        found += rows
        table = Table("by", "forward", "backward", "MiB", title=title_of(case), title_justify="left")
        for row in rows:
            if "forward" not in row:
                table.add_row(row["by"], row["in order, reason"], "", "")
                continue
            both = (" / ".join(f"{row[key]:{shape}}" if key in row else "-" for key in (f"in order{end}", f"any order{end}"))
                    for end, shape in (("", ".3f"), (", MiB", ".0f")))  # fmt: skip
            table.add_row(row["by"], f"{row['forward']:.3f}", *both)
        console.print(table)
        write(args.json, device, rows=found)


if __name__ == "__main__":
    main()
