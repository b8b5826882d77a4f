"""A training step of whole models: onepass beside the same model by PyTorch's operators, compiled and not.

    python benchmarks/gpt_steps.py [--case NAME ...] [--way NAME ...] [--steps N] [--json FILE]

One GPU, bf16, random tokens. Plain is benchmarks/plain_gpt.py, compiled, with AdamW(fused=True): under autocast over fp32
parameters, gradients and moments, or all in bf16. onepass has bf16 parameters, fp32 main_grad, masters and moments, and its own
AdamW. All clip, and have the same settings of determinism. "By default" the first steps decide on a CUDA graph, as in onepass
train; other ways have one where they say so. "Gradients kept" and "gradients released" are
--no-release-main-grads and --release-main-grads, of which onepass does one by itself; "selective" and "full" are
--recompute-granularity, with a number of blocks behind it --recompute-num-layers; "8-bit moments", "in backward" and "offload"
are --optimizer-moments 8bit, --step-in-backward and --offload-optimizer; "8-bit inputs" is --activation-func-fp8-input-store,
"fp8" --fp8-format hybrid. "torchao" is the plain model with its products in eight bits by torchao, where that is installed.
Tokens a second are over steps that follow one another, optimizer included; memory is the allocator's peak; the share of peak is
6 x parameters x tokens and attention's causal half, over cuBLAS's best product of the same run.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import plain_gpt
import torch
from measuring import need_gpus, step_ms, write
from rich.console import Console
from rich.table import Table

from onepass.gpt import Config, preset
from onepass.runtime.ceilings import clock_for, matmul_tflops
from onepass.train.batches import TokenBatch
from onepass.train.layout import ParallelLayout
from onepass.train.options import Options
from onepass.train.setup import Trained, make

DEVICE = torch.device("cuda", 0)
WARM_S = 2.0  # of steps before any counts: a process that has just compiled is slower for its first second
ROUNDS = 9


@dataclass(frozen=True)
class Case:
    preset: str
    sequences: int
    length: int
    changes: dict[str, Any]

    def config(self) -> Config:
        return preset(self.preset, params_dtype="bf16", **self.changes)

    def options(self) -> Options:
        return Options(seq_length=self.length, micro_batch_size=self.sequences, cuda_graphs=False)  # a graph is a row of its own


CASES = {
    "124M": Case("124M", 16, 1024, {}),
    "1B": Case("1B", 4, 4096, {}),
    "8B_four_layers": Case(
        "1B", 1, 8192,
        {"num_layers": 4, "hidden_size": 4096, "ffn_hidden_size": 14336, "num_attention_heads": 32, "num_query_groups": 8},
    ),
    "8B": Case("8B", 1, 8192, {}),
    "8B_16k": Case("8B", 2, 8192, {}),
    "124M_llama": Case(
        "124M", 16, 1024,
        {"normalization": "RMSNorm", "add_bias_linear": False, "gated_linear_unit": True, "activation_func": "silu",
         "position_embedding_type": "rope", "ffn_hidden_size": 2048},
    ),
}  # fmt: skip
WAYS = (
    "onepass", "onepass, by default", "onepass, gradients kept", "onepass, gradients released", "onepass, CUDA graph",
    "onepass, 8-bit inputs", "onepass, 8-bit inputs, gradients released", "onepass, selective", "onepass, full", "onepass, fp8",
    "onepass, 8-bit moments", "onepass, 8-bit moments, in backward", "onepass, 8-bit moments, in backward, selective 6",
    "onepass, 8-bit moments, in backward, selective", "onepass, 8-bit moments, in backward, selective, offload",
    "onepass, in backward, selective, offload", "onepass, 8-bit moments, in backward, full",
    "onepass, fp8 tensorwise", "onepass, fp8 rowwise",
    "plain", "plain, bf16 weights", "plain, CUDA graphs", "torchao tensorwise", "torchao rowwise",
)  # fmt: skip


def trained(case: Case, way: str) -> Trained:
    config, options = case.config(), case.options()
    if "8-bit inputs" in way:
        config = config.replace(activation_func_fp8_input_store=True)
    for each in way.split(", "):
        granularity, _, blocks = each.partition(" ")
        if granularity in ("selective", "full"):
            count = int(blocks) if blocks else None
            config = config.replace(recompute_granularity=granularity, recompute_num_layers=count)
    if "fp8" in way:
        config = config.replace(fp8_format="hybrid", fp8_recipe=way.partition("fp8 ")[2] or "delayed")
    if "gradients" in way:
        options = replace(options, release_main_grads="gradients released" in way)
    state = {"optimizer_moments": "8bit" if "8-bit moments" in way else "fp32", "offload_optimizer": "offload" in way}
    options = replace(options, step_in_backward="in backward" in way, **state)
    if way in ("onepass, CUDA graph", "onepass, by default"):
        options = replace(options, cuda_graphs=True if way == "onepass, CUDA graph" else None)
    return make(config, options, ParallelLayout(DEVICE))


def stepper(case: Case, way: str) -> Callable[[], torch.Tensor]:
    text = torch.randint(case.config().vocab_size, (case.sequences, case.length + 1), device=DEVICE)
    if not way.startswith("onepass"):
        return plain_gpt.stepper(case.config(), text, way)
    return steps_of(trained(case, way), text)


def steps_of(made: Trained, text: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Return a step on the same tokens each time."""
    batch = TokenBatch(text[:, :-1], text[:, 1:])

    def step() -> torch.Tensor:
        made.update.set_rate(1e-5)
        loss, _ = made.steps.run(batch)
        made.update.step(1e-5)
        return loss

    return step


def measure(make_step: Callable[[], Callable[[], torch.Tensor]], tokens: int, steps: int, rounds: int = ROUNDS) -> dict[str, Any]:
    """Return the time and the memory of steps of so many tokens. What was measured before must be gone."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    step = make_step()
    step()
    torch.cuda.synchronize()
    first = time.perf_counter() - started
    warm = time.perf_counter() + WARM_S
    while time.perf_counter() < warm:
        step()
    times, queued = step_ms(step, rounds, steps)
    ms = statistics.median(times)
    return {
        "ms": ms,
        "ms_range": [min(times), max(times)],
        "host_ms": queued[-1],
        "tokens_per_s": tokens / ms * 1e3,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
        "first_s": first,
        "loss": float(step()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--case", action="append", choices=list(CASES))
    parser.add_argument("--way", action="append", choices=WAYS)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--no-deterministic", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    need_gpus()
    console = Console(width=130)
    if not args.no_deterministic:
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False
    peak = matmul_tflops(clock_for(DEVICE))
    rows: dict[str, Any] = {}
    for name in args.case or ["124M", "1B"]:
        case = CASES[name]
        flops = case.config().flops_per_token(case.length)
        title = f"{name}, {case.sequences} x {case.length}"
        shown = Table("", "ms a step", "tokens/s", "of peak", "peak GiB", "CPU ms", title=title)
        rows[name] = {}
        for way in args.way or [way for way in WAYS if importlib.util.find_spec("torchao") or "torchao" not in way]:
            torch._dynamo.reset()
            try:
                found = measure(partial(stepper, case, way), case.sequences * case.length, args.steps)
            except Exception as error:
                rows[name][way] = {"error": repr(error)}
                console.print(f"{name}, {way}: {error!r}"[:2000], style="red")
                continue
            found["of_peak"] = found["tokens_per_s"] * flops / peak / 1e12
            rows[name][way] = found
            shown.add_row(
                way, f"{found['ms']:.1f}", f"{found['tokens_per_s']:,.0f}", f"{found['of_peak']:.3f}", f"{found['peak_gib']:.2f}",
                f"{found['host_ms']:.1f}",
            )  # fmt: skip
            write(args.json, DEVICE, tflops=peak, deterministic=not args.no_deterministic, rows=rows)
        console.print(shown)


if __name__ == "__main__":
    main()
