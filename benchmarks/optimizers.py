"""AdamW with moments in 8 bits, by packages: its pass alone, and training steps of a slice of Llama 8B.

    python benchmarks/optimizers.py [--json FILE] [--layers 4] [--length 8192 1024] [--contender NAME] [--small]

A Llama of 8B's widths, its weights in bf16 without masters, the blocks and the loss by onepass's ops for all:

    onepass               ShardedAdamW(moments="8bit")
    onepass in backward   the same with in_backward=True
    torchao               torchao.optim.AdamW8bit, which compiles its step, where it is installed
    bitsandbytes          bitsandbytes.optim.AdamW8bit, where it is installed
    torch                 torch.optim.AdamW(fused=True), whose moments are bf16
    none                  gradients are computed, and nothing steps

Milliseconds, medians over the rounds: of the optimizer's step, queued behind others, and of whole steps, forward, backward,
step and zero_grad. MiB: what the optimizer keeps, and the most that a whole step allocates above what is there before.
"of the best peer" is the time over that of the faster of torchao and bitsandbytes. --small is a size for a CPU.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from measuring import need_gpus, peak_mib, step_ms, write
from rich.console import Console
from rich.table import Table
from torch import nn

from onepass.bench.huggingface_cases import OURS, ModelCase
from onepass.bench.huggingface_process import as_contender, new_model, tokens
from onepass.bench.peers import imported
from onepass.parallel import ShardedAdamW
from onepass.runtime.ceilings import clock_for
from onepass.runtime.errors import version_of

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer | None]
RATE = 1e-5
PEERS = "torchao", "bitsandbytes"
CONTENDERS: dict[str, Make] = {
    "onepass": lambda weights: ShardedAdamW(weights, lr=RATE, moments="8bit"),
    "onepass in backward": lambda weights: ShardedAdamW(weights, lr=RATE, moments="8bit", in_backward=True),
    **{name: lambda weights, name=name: imported(f"{name}.optim", "AdamW8bit")(weights, lr=RATE) for name in PEERS},  # type: ignore[misc]
    "torch": lambda weights: torch.optim.AdamW(weights, lr=RATE, fused=True),
    "none": lambda weights: None,
}
WIDTHS = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 128256, "tie_word_embeddings": False, "rms_norm_eps": 1e-5, "max_position_embeddings": 8192,
}  # fmt: skip
SMALL = {
    "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "vocab_size": 1024,
}  # fmt: skip


def case_of(layers: int, small: bool) -> ModelCase:
    sizes = WIDTHS | {"num_hidden_layers": layers} | (SMALL if small else {})
    return ModelCase(f"llama_8b, {layers} layers", "llama", 1, 1, sizes)


class Bench:
    def __init__(self, case: ModelCase, device: torch.device, rounds: int) -> None:
        self.case, self.device, self.rounds = case, device, rounds
        self.model = new_model(case, device)
        self.run = as_contender(self.model, OURS)
        self.weights = list(self.model.parameters())
        self.clock = clock_for(device)

    def row(self, name: str, length: int) -> dict[str, Any]:
        self.model.zero_grad()
        batch = next(tokens(replace(self.case, length=length), self.device))
        before = self.allocated()
        optimizer = CONTENDERS[name](self.weights)

        def gradients() -> None:
            self.run(input_ids=batch, labels=batch).loss.backward()

        def step() -> None:
            gradients()
            if optimizer is not None:
                optimizer.step()
            self.model.zero_grad()

        for _ in range(2):  # state is made, and steps are compiled
            step()
        found: dict[str, Any] = {"name": name, "tokens": length, "kept_mib": (self.allocated() - before) / 2**20}
        times, _ = step_ms(step, self.rounds, 3)
        found["whole_ms"] = statistics.median(times)
        if self.device.type == "cuda":
            found["peak_mib"] = peak_mib(step)
        if optimizer is not None and not name.endswith("backward"):
            gradients()
            found["step_ms"] = self.clock.median(lambda _: optimizer.step(), rounds=self.rounds)
        return found

    def allocated(self) -> int:
        gc.collect()
        return torch.cuda.memory_allocated() if self.device.type == "cuda" else 0


def with_shares(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add each time's share of the faster peer's."""
    for time in ("step_ms", "whole_ms"):
        for row in (row for row in rows if time in row):
            peers = [other[time] for other in rows if other["name"] in PEERS and other["tokens"] == row["tokens"]]
            if peers:
                row[f"{time.removesuffix('_ms')}_of_peer"] = row[time] / min(peers)
    return rows


COLUMNS = {
    "tokens": ("tokens", "d"),
    "step_ms": ("step ms", ".2f"), "step_of_peer": ("of the best peer", ".2f"), "whole_ms": ("whole step ms", ".1f"),
    "whole_of_peer": ("of the best peer", ".3f"), "kept_mib": ("kept MiB", ".0f"), "peak_mib": ("peak MiB above", ".0f"),
}  # fmt: skip


def table(rows: list[dict[str, Any]], title: str) -> Table:
    made = Table("", *(name for name, _ in COLUMNS.values()), title=title)
    for row in rows:
        made.add_row(row["name"], *(format(row[key], how) if key in row else "" for key, (_, how) in COLUMNS.items()))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--length", type=int, nargs="+", default=[8192, 1024])
    parser.add_argument("--contender", action="append", choices=CONTENDERS, help="only this one (can be repeated)")
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    if not args.small:
        need_gpus(otherwise="--small needs none")
    device = torch.device("cpu" if args.small else "cuda")
    case = case_of(args.layers, args.small)
    bench = Bench(case, device, 2 if args.small else 5)
    count = sum(weight.numel() for weight in bench.weights)
    rows: list[dict[str, Any]] = []
    for name in args.contender or CONTENDERS:
        if name in PEERS and version_of(name) is None:
            print(f"{name} is not installed")
            continue
        for length in args.length:
            rows.append(bench.row(name, length))
            print(rows[-1], flush=True)
    Console(width=130).print(table(with_shares(rows), f"{case.name}: {count / 1e9:.2f} billion bf16 weights"))
    write(args.json, device, case=case.name, parameters=count, rows=rows)


if __name__ == "__main__":
    main()
