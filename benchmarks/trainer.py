"""A step of a whole model in transformers' Trainer on one GPU, with every weight trained: time and peak memory.

    python benchmarks/trainer.py [--layers N] [--tokens N] [--way NAME ...] [--steps N] [--json FILE]

Llama 3 8B's shape with random weights in bf16, 1 x 8192 random tokens, gradient checkpointing. Masters are fp32 and moments have
8 bits; weights are stepped in backward, clipped by the norm of the step before:

    main_grad      apply(model, main_grad=True), applied.optimizer(moments="8bit", in_backward=True, max_norm=1.0)
    .grad          apply(model), applied.optimizer(moments="8bit", masters=True, in_backward=StepInBackward(max_norm=1.0))

Milliseconds are the median between steps' ends, as Trainer's callbacks see them; memory is the allocator's peak.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from measuring import need_gpus, write
from rich.console import Console
from rich.table import Table

from onepass.integrations import huggingface
from onepass.parallel import StepInBackward

WAYS = ("main_grad", ".grad")


class RandomTokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __init__(self, count: int, length: int, vocabulary: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.rows = torch.randint(vocabulary, (count, length), generator=generator)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def model_of(layers: int, small: bool) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
    if small:
        sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(num_hidden_layers=layers, vocab_size=512 if small else 128256, rope_theta=5e5, use_cache=False, **sizes)
    torch.manual_seed(0)
    with torch.device("cpu" if small else "cuda"):
        return LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)


def measure(way: str, args: argparse.Namespace) -> dict[str, Any]:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    model = model_of(args.layers, args.small)
    if way == "main_grad":
        applied = huggingface.apply(model, main_grad=True, release_main_grad=True)
        optimizer: Any = applied.optimizer(lr=1e-5, moments="8bit", in_backward=True, max_norm=1.0)
    else:
        applied = huggingface.apply(model)
        optimizer = applied.optimizer(lr=1e-5, moments="8bit", masters=True, in_backward=StepInBackward(max_norm=1.0))
    ends = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            if not args.small:
                torch.cuda.synchronize()
            ends.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as folder:
        given = TrainingArguments(
            folder, per_device_train_batch_size=1, max_steps=args.steps, gradient_checkpointing=True, max_grad_norm=0.0,
            gradient_checkpointing_kwargs={"use_reentrant": False}, report_to=[], logging_steps=1, save_strategy="no",
            disable_tqdm=True, lr_scheduler_type="constant", use_cpu=args.small,
        )  # fmt: skip
        tokens = RandomTokens(args.steps, args.tokens, model.config.vocab_size)
        trainer = Trainer(model=model, args=given, train_dataset=tokens, optimizers=(optimizer, None), callbacks=[Clock()])
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    ms = statistics.median(after - before for before, after in pairwise(ends[1:])) * 1e3
    peak = 0.0 if args.small else torch.cuda.max_memory_allocated() / 2**30
    return {"ms": ms, "peak_gib": peak, "losses": losses, "parameters": sum(p.numel() for p in model.parameters())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--way", action="append", choices=WAYS)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--small", action="store_true", help="small widths, on a CPU")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if not args.small:
        need_gpus(otherwise="--small needs none")
    console, rows = Console(width=110), {}
    shown = Table("", "ms a step", "tokens/s", "peak GiB", "loss", title=f"Trainer, {args.layers} layers, 1 x {args.tokens}")
    for way in args.way or WAYS:
        gc.collect()
        if not args.small:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        rows[way] = found = measure(way, args)
        speed, losses = args.tokens / found["ms"] * 1e3, found["losses"]
        shown.add_row(
            way, f"{found['ms']:.0f}", f"{speed:,.0f}", f"{found['peak_gib']:.2f}", f"{losses[0]:.3f} -> {losses[-1]:.3f}"
        )
        device = torch.device("cpu" if args.small else "cuda")
        write(args.json, device, layers=args.layers, tokens=args.tokens, rows=rows)
    console.print(shown)


if __name__ == "__main__":
    main()
