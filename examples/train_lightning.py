"""A Hugging Face model trained by Lightning, as it is and with onepass, which also keeps its gradients in fp32: the same losses.

    python examples/train_lightning.py [--size tiny | 1B] [--steps N] [--out DIR] [--small]

Nothing is downloaded: the model is made here, and learns the text of Python's standard library, a byte a token. A step has two
microbatches. "tiny" takes seconds on a CPU; "1B" has the sizes of Llama 3.2 1B and wants a GPU of 80 GB. The losses of both runs
go into DIR (trained).
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning
import torch
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
    precision: str  # Lightning's: weights are fp32
    model: dict[str, Any]


SIZES = {
    "tiny": Size(
        2, 128, 2e-3, "32-true",
        {"num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 344, "num_attention_heads": 4, "num_key_value_heads": 2,
         "vocab_size": 256},
    ),
    "1B": Size(
        2, 4096, 1e-4, "bf16-mixed",
        {"num_hidden_layers": 16, "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32,
         "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256},
    ),
}  # fmt: skip


class LanguageModel(lightning.LightningModule):
    def __init__(self, size: Size, with_onepass: bool) -> None:
        super().__init__()
        self.size, self.with_onepass = size, with_onepass
        torch.manual_seed(0)
        config = AutoConfig.for_model("llama", **size.model, tie_word_embeddings=True, use_cache=False)
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):  # main_grad lies where the weights do
            self.model = AutoModelForCausalLM.from_config(config)
        self.applied = huggingface.apply(self.model, main_grad=True) if with_onepass else None
        self.losses: list[Tensor] = []
        self.times: list[float] = []

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        self.losses.append(loss.detach())
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Tensor, index: int) -> None:
        if (index + 1) % MICROBATCHES == 0:
            self.losses[-1].item()  # waits for the step
            self.times.append(time.perf_counter())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.applied is not None:  # clips in its step, as Lightning finds no .grad to clip
            return self.applied.optimizer(lr=self.size.rate, max_norm=1.0)
        return torch.optim.AdamW(self.parameters(), lr=self.size.rate)


def text(size: Size, sequences: int) -> list[Tensor]:
    """As many sequences as are asked for, from the beginning again where there are no more."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    every = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()
    rows = every[: len(every) // size.length * size.length].view(-1, size.length)
    return [rows[at % len(rows)] for at in range(sequences)]


def train(size: Size, steps: int, with_onepass: bool, out: Path) -> tuple[list[float], float]:
    """Return each step's loss, and the seconds of the step in the middle."""
    model = LanguageModel(size, with_onepass)
    if model.applied is not None:
        print(model.applied)
    trainer = lightning.Trainer(
        accelerator="auto", devices=1, precision=size.precision, max_steps=steps,
        accumulate_grad_batches=MICROBATCHES, gradient_clip_val=None if with_onepass else 1.0, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=str(out),
    )  # fmt: skip
    trainer.fit(model, DataLoader(text(size, steps * MICROBATCHES * size.sequences), size.sequences))
    losses = torch.stack(model.losses).float().view(steps, MICROBATCHES).mean(1).tolist()
    times = [end - start for start, end in zip(model.times, model.times[1:], strict=False)]
    if model.applied is not None:
        model.applied.undo()
    return losses, statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--steps", type=int, help="of each run (50)")
    parser.add_argument("--out", type=Path, default=Path("trained"), help="folder for the losses (trained)")
    parser.add_argument("--small", action="store_true", help="10 steps")
    args = parser.parse_args()
    size, steps = SIZES[args.size], args.steps or (10 if args.small else 50)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    if not torch.cuda.is_available():
        torch.set_num_threads(1)  # more would wait for each other wherever the machine has something else to do

    plain, plain_time = train(size, steps, False, args.out)
    ours, our_time = train(size, steps, True, args.out)

    table = Table("step", "as it is", "with onepass", "apart")
    for step in sorted({*range(0, steps, max(1, steps // 8)), steps - 1}):
        table.add_row(str(step + 1), f"{plain[step]:.4f}", f"{ours[step]:.4f}", f"{abs(plain[step] - ours[step]):.1e}")
    table.add_section()
    table.add_row("s a step", f"{plain_time:.3f}", f"{our_time:.3f}", "")
    Console(width=118).print(table)
    apart = max(abs(a - b) for a, b in zip(plain, ours, strict=True))
    if not apart <= (same := SAME[args.size]):
        raise SystemExit(f"the losses of both runs must be within {same} of each other at every step, but are {apart:.2g} apart")
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "losses.json").write_text(json.dumps({"as it is": plain, "with onepass": ours}) + "\n")


if __name__ == "__main__":
    main()
