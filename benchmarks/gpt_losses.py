"""Whether a model learns the same fused: losses beside the reference's, and beside what chance does to them.

    python benchmarks/gpt_losses.py [--preset NAME] [--sequences N] [--length N] [--steps N] [--lr RATE] [--json FILE] ...

The same text, weights and learning rates in all runs, without dropout:

    reference    PyTorch's operators in fp32
    onepass      every fusion, in fp32, and in bf16 with fp32 masters
    autocast     PyTorch's operators under bf16 autocast, fp32 weights

and, as a measure, two runs of the reference that differ in nothing but the seed of their dropout. Distances are of losses at the
same step: the mean over all steps, and the largest. The rate rises slowly: at 6e-4 after 50 steps a batch of odd text made the
loss of every run without dropout jump from 7.3 to 10.9 and back, which a last bit decides.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from measuring import write
from rich.console import Console
from rich.table import Table

from onepass.gpt import preset
from onepass.train import text
from onepass.train.batches import Batches
from onepass.train.layout import ParallelLayout
from onepass.train.options import Options
from onepass.train.setup import make
from onepass.train.updates import learning_rate

DROPOUT = 0.1
# of each: whether it is by PyTorch's operators, its parameters' type, its dropout, and the seed of that
RUNS: dict[str, tuple[bool, str, float, int]] = {
    "reference": (True, "fp32", 0.0, 0),
    "onepass, fp32": (False, "fp32", 0.0, 0),
    "onepass, bf16": (False, "bf16", 0.0, 0),
    "autocast, bf16": (True, "bf16", 0.0, 0),
    "dropout, one seed": (True, "fp32", DROPOUT, 1),
    "dropout, another": (True, "fp32", DROPOUT, 2),
}
PAIRS = [
    ("onepass, fp32", "reference"),
    ("onepass, bf16", "reference"),
    ("autocast, bf16", "reference"),
    ("onepass, bf16", "autocast, bf16"),
    ("dropout, one seed", "dropout, another"),
]


def losses(name: str, args: argparse.Namespace, tokens: text.Tokens, device: torch.device) -> torch.Tensor:
    plain, dtype, dropout, seed = RUNS[name]
    config = preset(args.preset, params_dtype=dtype, hidden_dropout=dropout)
    rates = {"lr": args.lr, "lr_warmup_iters": args.warmup, "cuda_graphs": False}
    options = Options(seq_length=args.length, micro_batch_size=args.sequences, train_iters=args.steps, **rates)
    trained = make(config, options, ParallelLayout(device), plain=plain)
    batches = Batches(tokens.train, args.sequences, args.length, 1, 0, 1, device)
    found = []
    for step in range(args.steps):
        torch.manual_seed(1000 * step + seed)
        loss, _ = trained.steps.run(batches.of_step(step))
        trained.update.step(learning_rate(step, options))
        found.append(loss.detach().double().cpu())
    return torch.stack(found)


def distances(found: dict[str, torch.Tensor]) -> list[dict[str, Any]]:
    rows = []
    for one, other in PAIRS:
        apart = (found[one] - found[other]).abs()
        rows.append({"run": one, "beside": other, "mean": float(apart.mean()), "most": float(apart.max())})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--preset", default="124M")
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--warmup", type=int, default=100)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    console, found = Console(width=130), {}
    with tempfile.TemporaryDirectory() as folder:
        size = preset(args.preset).vocab_size
        text.prepare(Path(folder), (), size, args.length, lambda *_: None)
        tokens = text.load(Path(folder), size)
        for name in RUNS:
            found[name] = losses(name, args, tokens, device)
            console.print(f"{name}: {found[name][0]:.4f} -> {found[name][-1]:.4f}")
    rows = distances(found)
    shown = Table("", "beside", "mean distance", "largest", title=f"losses of {args.steps} steps, {args.preset}")
    for row in rows:
        shown.add_row(row["run"], row["beside"], f"{row['mean']:.2e}", f"{row['most']:.2e}")
    console.print(shown)
    settings = {"preset": args.preset, "tokens": args.sequences * args.length, "steps": args.steps, "lr": args.lr}
    curves = {name: [round(float(loss), 5) for loss in run] for name, run in found.items()}
    write(args.json, device, **settings, warmup=args.warmup, rows=rows, losses=curves)


if __name__ == "__main__":
    main()
