"""Whether a model learns the same with AdamW's moments in fewer bits: held-out losses beside fp32 moments', seed by seed.

    python benchmarks/moments_losses.py [--preset NAME] [--steps N] [--seeds N] [--workers N] [--cpu]
        [--moments KIND ...] [--data FILE ...] [--json FILE]

The same weights, text and learning rates for each kind of one seed, in bf16 with fp32 masters. A seed is of the weights and of
the order of the text; what two seeds' losses with fp32 moments are apart is the measure of what a kind's and fp32's may be.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from measuring import need_gpus, write
from rich.console import Console
from rich.table import Table

from onepass.gpt import preset
from onepass.train import text
from onepass.train.batches import Batches
from onepass.train.layout import ParallelLayout
from onepass.train.options import TRAINING, Options
from onepass.train.setup import make
from onepass.train.updates import learning_rate

KINDS = ("fp32", "bf16", "8bit")
HELD_OUT = 32  # batches


def held_out_loss(run: tuple[str, int], args: argparse.Namespace, folder: Path) -> float:
    """Train with one kind of moments and one seed."""
    moments, seed = run
    device = torch.device("cpu" if args.cpu else "cuda")
    config = preset(args.preset, params_dtype="bf16")
    given = {"train_iters": args.steps, "seed": seed, "optimizer_moments": moments, "cuda_graphs": not args.cpu}
    options = Options.from_dict(TRAINING[args.preset] | given)
    if args.workers > 1:
        torch.set_num_threads(1)
    trained = make(config, options, ParallelLayout(device))
    tokens = text.load(folder, config.vocab_size)
    sizes = options.micro_batch_size, options.seq_length
    batches, valid = (Batches(part, *sizes, of, 0, 1, device) for part, of in ((tokens.train, seed), (tokens.valid, 0)))
    for step in range(args.steps):
        trained.steps.run(batches.of_step(step))
        trained.update.step(learning_rate(step, options))
    trained.model.eval()
    return float(torch.stack([trained.steps.loss(valid.of_step(number)) for number in range(HELD_OUT)]).mean())


def trained_all(
    runs: Iterable[tuple[str, int]], args: argparse.Namespace, folder: Path, console: Console
) -> dict[str, list[float]]:
    """Return the losses of each kind by seed, and say each as it comes."""
    found: dict[tuple[str, int], float] = {}
    began, train = time.perf_counter(), partial(held_out_loss, args=args, folder=folder)
    with ProcessPoolExecutor(args.workers, mp_context=get_context("spawn")) as pool:
        waiting = {pool.submit(train, run): run for run in runs}
        for done in as_completed(waiting):
            run = waiting[done]
            found[run] = done.result()
            console.print(f"{time.perf_counter() - began:5.0f} s  moments {run[0]}, seed {run[1]}: {found[run]:.5f}")
    kinds = dict.fromkeys(sorted((kind for kind, _ in found), key=KINDS.index))
    return {kind: [found[kind, seed] for seed in range(args.seeds)] for kind in kinds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--preset", default="tiny", choices=[*TRAINING])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--moments", action="append", choices=KINDS[1:], help="kinds beside fp32; all")
    parser.add_argument("--data", nargs="+", default=(), help="text files; Python's own library where none is given")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if not args.cpu:
        need_gpus(otherwise="--cpu needs none")
    console = Console(width=130)
    with tempfile.TemporaryDirectory() as name:
        folder, size = Path(name), preset(args.preset).vocab_size
        length = int(TRAINING[args.preset].get("seq_length", Options().seq_length))
        text.prepare(folder, tuple(args.data), size, length, lambda *_: None)
        count = len(text.load(folder, size).train)
        kinds = ("fp32", *(args.moments or KINDS[1:]))
        losses = trained_all(product(kinds, range(args.seeds)), args, folder, console)
    spread = statistics.stdev(losses["fp32"]) if args.seeds > 1 else None
    shown = Table("moments", "held-out loss", "apart from fp32", "most of a seed", title=f"{args.preset}, {args.steps} steps")
    rows: list[dict[str, Any]] = []
    for kind, mine in losses.items():
        apart = [a - b for a, b in zip(mine, losses["fp32"], strict=True)]
        row = {"moments": kind, "losses": mine, "apart": statistics.mean(apart), "most": max(map(abs, apart))}
        rows.append(row)
        shown.add_row(kind, f"{statistics.mean(mine):.5f}", f"{row['apart']:+.5f}", f"{row['most']:.5f}")
    console.print(shown)
    if spread is not None:
        console.print(f"seeds with fp32 moments have a standard deviation of {spread:.5f}")
    device = torch.device("cpu" if args.cpu else "cuda")
    write(args.json, device, preset=args.preset, steps=args.steps, tokens=count, held_out=HELD_OUT, spread=spread, rows=rows)


if __name__ == "__main__":
    main()
