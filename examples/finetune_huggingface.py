"""A Hugging Face model trained by transformers' Trainer, as it is and with onepass in one line: the same losses.

    python examples/finetune_huggingface.py [--size tiny | 1B] [--steps N] [--out DIR] [--small]

Nothing is downloaded: the model is made here, and learns the text of Python's standard library, a byte a token. "tiny" takes a
minute on a CPU; "1B" has the sizes of Llama 3.2 1B and wants a GPU of 80 GB. The losses of both runs and the trained model go
into DIR (finetuned).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM, PrinterCallback, Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.utils import logging

from onepass.integrations.huggingface import apply

SAME = 0.02  # how far apart the losses of a step may be: each run rounds in its own way, and a step builds on those before it


@dataclass(frozen=True)
class Size:
    sequences: int  # of a step
    length: int
    rate: float
    dtype: torch.dtype
    model: dict[str, Any]


SIZES = {
    "tiny": Size(
        4, 128, 2e-3, torch.float32,
        {"num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 344, "num_attention_heads": 4, "num_key_value_heads": 2,
         "vocab_size": 256},
    ),
    "1B": Size(
        4, 4096, 1e-4, torch.bfloat16,
        {"num_hidden_layers": 16, "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32,
         "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256},
    ),
}  # fmt: skip


# ---- a model and something to learn ----


def new_model(size: Size) -> Any:
    set_seed(0)
    config = AutoConfig.for_model("llama", **size.model, tie_word_embeddings=True, use_cache=False)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):  # onepass lays weights together where they are
        return AutoModelForCausalLM.from_config(config, dtype=size.dtype, attn_implementation="sdpa")


def text(size: Size, steps: int) -> list[dict[str, torch.Tensor]]:
    """As many sequences as the steps need, from the beginning again where there are no more."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    every = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()
    sequences = every[: len(every) // size.length * size.length].view(-1, size.length)
    chosen = (sequences[at % len(sequences)] for at in range(steps * size.sequences))
    return [{"input_ids": sequence, "labels": sequence} for sequence in chosen]


# ---- training it ----


class Watch(TrainerCallback):
    """What Trainer says of each step, and when."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.ends: list[float] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        if logs and "loss" in logs:
            self.losses.append(float(logs["loss"]))
            self.ends.append(time.perf_counter())


def train(model: Any, size: Size, steps: int, out: Path) -> Watch:
    options = TrainingArguments(
        output_dir=str(out), max_steps=steps, per_device_train_batch_size=size.sequences, learning_rate=size.rate,
        warmup_steps=steps // 10, max_grad_norm=1.0, logging_steps=1, logging_nan_inf_filter=False, save_strategy="no",
        report_to="none", disable_tqdm=True, dataloader_pin_memory=torch.cuda.is_available(), seed=0,
    )  # fmt: skip
    watch = Watch()
    trainer = Trainer(model, options, train_dataset=text(size, steps), callbacks=[watch])
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return watch


def tokens_per_second(watch: Watch, size: Size) -> float:
    """Of the step in the middle: the first ones also compile kernels."""
    times = [end - start for start, end in pairwise(watch.ends)]
    return size.sequences * size.length / statistics.median(times)


# ---- both ways ----


def shown(plain: Watch, ours: Watch, size: Size) -> Table:
    table = Table("step", "as it is", "with onepass", "apart")
    last = len(plain.losses) - 1
    for step in sorted({*range(0, last, max(1, last // 8)), last}):
        a, b = plain.losses[step], ours.losses[step]
        table.add_row(str(step + 1), f"{a:.4f}", f"{b:.4f}", f"{abs(a - b):.1e}")
    table.add_section()
    table.add_row("tokens/s", f"{tokens_per_second(plain, size):,.0f}", f"{tokens_per_second(ours, size):,.0f}", "")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--steps", type=int, help="of each run (100)")
    parser.add_argument("--out", type=Path, default=Path("finetuned"), help="folder for losses and model (finetuned)")
    parser.add_argument("--small", action="store_true", help="20 steps, in seconds")
    args = parser.parse_args()
    size, steps = SIZES[args.size], args.steps or (20 if args.small else 100)
    console = Console(width=118)
    logging.disable_progress_bar()
    if not torch.cuda.is_available():
        torch.set_num_threads(1)  # more would wait for each other wherever the machine has something else to do

    plain = train(new_model(size), size, steps, args.out)
    gc.collect()  # Trainer holds itself, and with it the model

    model = new_model(size)
    applied = apply(model)  # the one line
    ours = train(model, size, steps, args.out)

    print(applied)
    console.print(shown(plain, ours, size))
    apart = max(abs(a - b) for a, b in zip(plain.losses, ours.losses, strict=True))
    if not apart <= SAME:
        raise SystemExit(f"the losses of both runs must be within {SAME} of each other at every step, but are {apart:.2g} apart")
    console.print(f"loss {ours.losses[0]:.2f} to {ours.losses[-1]:.2f}; with onepass and without it at most {apart:.1e} apart")
    model.save_pretrained(args.out / "model")
    (args.out / "losses.json").write_text(json.dumps({"as it is": plain.losses, "with onepass": ours.losses}) + "\n")


if __name__ == "__main__":
    main()
