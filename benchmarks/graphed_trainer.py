"""A small model under transformers' Trainer, where the CPU decides how long a step takes: with CUDA graphs and without.

    python benchmarks/graphed_trainer.py [--way NAME ...] [--steps N] [--length N ...] [--json FILE] [--small]

A Llama of 124M in bf16, 8 x 1024 random tokens, Trainer's defaults: fused AdamW, clipping to 1, a linear schedule:

    eager               the model as transformers has it
    liger               Liger's kernels, where they are installed
    compile             TrainingArguments(torch_compile=True)
    compile, CUDA graphs           the same with torch_compile_mode="reduce-overhead"
    compile, no waits              compile with TrainingArguments(logging_nan_inf_filter=False,
                                   accelerator_config={"non_blocking": True}): the CPU waits for no GPU
    onepass             huggingface.apply(model)
    onepass graph       huggingface.apply(model, graph=True)
    onepass graph, no waits        the same with these two arguments
    onepass graph, main_grad       no waits, apply(model, main_grad=True, graph=True), applied.optimizer(max_norm=1.0)
    graphed_step        apply(model), and no Trainer: forward, backward and AdamW's step in one CUDA graph
    graphed_step, clipped          the same with clip_grad_norm_, as Trainer has it

Milliseconds a step: of all steps between two synchronisations, the median of the rounds. Memory is the allocator's peak, and
loss the mean (of graphed_step the last one). "of graphed_step" is a time over its. With several lengths batches
take turns, and the graph's rows are padded. On a GPU each way has its own process: what Liger and torch.compile leave behind
reaches no other.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import statistics
import tempfile
import time
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from measuring import need_gpus, write
from rich.console import Console
from rich.table import Table

import onepass
from onepass.bench.peers import imported
from onepass.integrations import huggingface

WAYS = (
    "eager", "liger", "compile", "compile, CUDA graphs", "compile, no waits", "onepass", "onepass graph",
    "onepass graph, no waits", "onepass graph, main_grad", "graphed_step", "graphed_step, clipped",
)  # fmt: skip
RATE, WARM, ROUNDS = 1e-4, 20, 5
MODEL = {
    "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12, "num_key_value_heads": 12,
    "vocab_size": 50304, "use_cache": False,
}  # fmt: skip
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
SMALL |= {"vocab_size": 512}


class RandomRows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Rows of random tokens, whose length changes from batch to batch."""

    def __init__(self, batches: int, rows: int, lengths: list[int], vocabulary: int) -> None:
        self.rows, self.lengths, self.count = rows, lengths, batches * rows
        generator = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(vocabulary, (64, max(lengths)), generator=generator)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        length = self.lengths[index // self.rows % len(self.lengths)]
        row = self.tokens[index % 64, :length]
        return {"input_ids": row, "labels": row}


def model_of(args: argparse.Namespace) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    with torch.device("cpu" if args.small else "cuda"):
        return LlamaForCausalLM._from_config(LlamaConfig(**MODEL | (SMALL if args.small else {})), dtype=torch.bfloat16)


class Clock:
    """Times of rounds of steps: the GPU is waited for between rounds only."""

    def __init__(self, steps: int, on_gpu: bool) -> None:
        self.steps, self.on_gpu, self.done, self.ms = steps, on_gpu, 0, []  # type: ignore[var-annotated]

    def step(self) -> None:
        self.done += 1
        if self.done < WARM or (self.done - WARM) % self.steps:
            return
        if self.on_gpu:
            torch.cuda.synchronize()
        now = time.perf_counter()
        if self.done > WARM:
            self.ms.append((now - self.began) / self.steps * 1e3)
        self.began = now


def by_trainer(way: str, args: argparse.Namespace, clock: Clock) -> tuple[float, str]:
    """Return the last loss, and what the report says of graphs."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    model, applied, optimizer = model_of(args), None, None
    if way == "liger":
        imported("liger_kernel.transformers", "_apply_liger_kernel_to_instance")(model=model)
    elif way.startswith("onepass"):
        applied = huggingface.apply(model, graph="graph" in way, main_grad="main_grad" in way)
        optimizer = applied.optimizer(lr=RATE, max_norm=1.0) if "main_grad" in way else None

    class OnStep(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.step()

    count, waits = WARM + ROUNDS * args.steps, not way.endswith(("no waits", "main_grad"))
    with tempfile.TemporaryDirectory() as folder:
        given = TrainingArguments(
            folder, per_device_train_batch_size=args.rows, max_steps=count, learning_rate=RATE, report_to=[], save_strategy="no",
            logging_steps=count, disable_tqdm=True, use_cpu=args.small, train_sampling_strategy="sequential",
            torch_compile=way.startswith("compile"),
            torch_compile_mode="reduce-overhead" if way == "compile, CUDA graphs" else None,
            max_grad_norm=0.0 if "main_grad" in way else 1.0, logging_nan_inf_filter=waits,
            accelerator_config=None if waits else {"non_blocking": True},
        )  # fmt: skip
        rows = RandomRows(count, args.rows, args.length, model.config.vocab_size)
        trainer = Trainer(model=model, args=given, train_dataset=rows, optimizers=(optimizer, None), callbacks=[OnStep()])
        trainer.train()
    graphs = [] if applied is None else [f"{row.by}; {row.why or ''}" for row in applied.rows if row.part == "graph"]
    return next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry), "".join(graphs)


def by_step(args: argparse.Namespace, clock: Clock, clips: bool) -> tuple[float, str]:
    """Return the last loss of steps that are one CUDA graph."""
    model = model_of(args)
    huggingface.apply(model)
    device = model.device
    lr = torch.tensor(RATE, device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True, capturable=not args.small)

    def train_step(**batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(**batch).loss
        loss.backward()
        if clips:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    step = onepass.graphed_step(train_step)
    model.train()
    rows = RandomRows(64, args.rows, args.length, model.config.vocab_size)
    for batch in _batches(rows, WARM + ROUNDS * args.steps, args.rows):
        loss = step(input_ids=batch.to(device), labels=batch.to(device))
        clock.step()
    return loss.item(), f"{step.graphs} graphs"


def _batches(rows: RandomRows, count: int, size: int) -> Iterator[torch.Tensor]:
    for at in range(count):
        yield torch.stack([rows[at * size + row]["input_ids"] for row in range(size)])


def measure(way: str, args: argparse.Namespace) -> dict[str, Any]:
    gc.collect()
    torch._dynamo.reset()
    clock = Clock(args.steps, not args.small)
    if not args.small:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    loss, graphs = by_step(args, clock, "clipped" in way) if way.startswith("graphed_step") else by_trainer(way, args, clock)
    peak = 0.0 if args.small else torch.cuda.max_memory_allocated() / 2**30
    ms = statistics.median(clock.ms)
    return {"ms": ms, "ms_range": [min(clock.ms), max(clock.ms)], "peak_gib": peak, "loss": loss, "graphs": graphs}


def by_itself(way: str, args: argparse.Namespace) -> dict[str, Any]:
    with get_context("spawn").Pool(1) as pool:
        return pool.apply(measure, (way, args))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--way", action="append", choices=WAYS)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, nargs="+", default=[1024])
    parser.add_argument("--steps", type=int, default=40, help="in a round")
    parser.add_argument("--small", action="store_true", help="a small model, on a CPU")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if not args.small:
        need_gpus(otherwise="--small needs none")
    rows: dict[str, Any] = {}
    ways = args.way or [way for way in WAYS if way != "liger" or importlib.util.find_spec("liger_kernel")]
    device, lengths = torch.device("cpu" if args.small else "cuda"), ", ".join(map(str, args.length))
    for way in ways:
        try:
            rows[way] = measure(way, args) if args.small else by_itself(way, args)
        except Exception as error:  # the others are measured still
            rows[way] = {"error": repr(error)}
        write(args.json, device, rows=rows, batch=args.rows, lengths=args.length)
    shown = Table("", "ms a step", "of graphed_step", "peak GiB", "loss", "graphs", title=f"Trainer, {args.rows} x {lengths}")
    whole = rows.get("graphed_step", {}).get("ms")
    for way, found in rows.items():
        if "error" in found:
            shown.add_row(way, "", "", "", "", found["error"][:400])
            continue
        share = "" if whole is None else f"{found['ms'] / whole:.2f}"
        shown.add_row(way, f"{found['ms']:.1f}", share, f"{found['peak_gib']:.2f}", f"{found['loss']:.3f}", found["graphs"])
    Console(width=130).print(shown)


if __name__ == "__main__":
    main()
