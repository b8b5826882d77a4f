"""A loop of one's own under accelerate, with a Hugging Face model as it is and with onepass in one line: the same losses.

    python examples/train_accelerate.py [--size tiny | 1B] [--steps N] [--out DIR] [--small]
    accelerate launch examples/train_accelerate.py --size 1B    # a process a GPU

Nothing is downloaded: the model is made here, and learns the text of Python's standard library, a byte a token. A step has two
microbatches. "tiny" takes seconds on a CPU; "1B" has the sizes of Llama 3.2 1B and wants a GPU of 80 GB. The losses of both runs
go into DIR (trained).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM

from onepass.integrations import huggingface

# how far apart the losses of a step may be: each run rounds in its own way, and a step builds on those before it
SAME = {"tiny": 0.02, "1B": 0.05}
MICROBATCHES = 2  # of a step


@dataclass(frozen=True)
class Size:
    sequences: int  # of a microbatch
    length: int
    rate: float
    mixed: str  # accelerate's mixed precision: weights are fp32
    model: dict[str, Any]


SIZES = {
    "tiny": Size(
        2, 128, 2e-3, "no",
        {"num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 344, "num_attention_heads": 4, "num_key_value_heads": 2,
         "vocab_size": 256},
    ),
    "1B": Size(
        2, 4096, 1e-4, "bf16",
        {"num_hidden_layers": 16, "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32,
         "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256},
    ),
}  # fmt: skip


def new_model(size: Size) -> Any:
    set_seed(0)
    config = AutoConfig.for_model("llama", **size.model, tie_word_embeddings=True, use_cache=False)
    return AutoModelForCausalLM.from_config(config)


def text(size: Size, sequences: int) -> list[Tensor]:
    """As many sequences as are asked for, from the beginning again where there are no more."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    every = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()
    rows = every[: len(every) // size.length * size.length].view(-1, size.length)
    return [rows[at % len(rows)] for at in range(sequences)]


def train(size: Size, steps: int, with_onepass: bool) -> tuple[list[float], list[float]]:
    """Return each step's loss and its seconds."""
    accelerator = Accelerator(mixed_precision=size.mixed, gradient_accumulation_steps=MICROBATCHES)
    model = new_model(size).to(accelerator.device)
    if with_onepass:
        applied = huggingface.apply(model)  # the one line, before accelerate wraps the model
        accelerator.print(applied)
    sequences = steps * MICROBATCHES * size.sequences * accelerator.num_processes
    optimizer = torch.optim.AdamW(model.parameters(), lr=size.rate)
    model, optimizer, batches = accelerator.prepare(model, optimizer, DataLoader(text(size, sequences), size.sequences))
    model.train()
    losses, times, start = [], [], time.perf_counter()
    loss_of_step = torch.zeros((), device=accelerator.device)
    for batch in batches:
        with accelerator.accumulate(model):
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        loss_of_step += loss.detach() / MICROBATCHES
        if accelerator.sync_gradients:
            losses.append(accelerator.reduce(loss_of_step, "mean").item())  # waits for the step
            times.append(time.perf_counter() - start)
            loss_of_step, start = torch.zeros_like(loss_of_step), time.perf_counter()
    accelerator.free_memory()
    return losses, times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--steps", type=int, help="of each run (50)")
    parser.add_argument("--out", type=Path, default=Path("trained"), help="folder for the losses (trained)")
    parser.add_argument("--small", action="store_true", help="10 steps")
    args = parser.parse_args()
    size, steps = SIZES[args.size], args.steps or (10 if args.small else 50)
    if not torch.cuda.is_available():
        torch.set_num_threads(1)  # more would wait for each other wherever the machine has something else to do

    plain, plain_times = train(size, steps, with_onepass=False)
    ours, our_times = train(size, steps, with_onepass=True)

    apart = max(abs(a - b) for a, b in zip(plain, ours, strict=True))
    if not apart <= (same := SAME[args.size]):
        raise SystemExit(f"the losses of both runs must be within {same} of each other at every step, but are {apart:.2g} apart")
    if not Accelerator().is_main_process:
        return
    table = Table("step", "as it is", "with onepass", "apart")
    for step in sorted({*range(0, steps, max(1, steps // 8)), steps - 1}):
        table.add_row(str(step + 1), f"{plain[step]:.4f}", f"{ours[step]:.4f}", f"{abs(plain[step] - ours[step]):.1e}")
    table.add_section()
    table.add_row("s a step", f"{statistics.median(plain_times):.3f}", f"{statistics.median(our_times):.3f}", "")
    Console(width=118).print(table)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "losses.json").write_text(json.dumps({"as it is": plain, "with onepass": ours}) + "\n")


if __name__ == "__main__":
    main()
