"""What each fusion brings to a training step: the step without it, beside the whole step and the same model uncompiled.

    python benchmarks/fusions.py [--case 124M|1B|mixture] [--steps N] [--deterministic] [--json FILE]

One GPU, bf16, random tokens, the models of `onepass train`. A fusion that is off runs by PyTorch's operators, as its flag has it
(docs/train.md). Eager is the whole model by PyTorch's operators: fp32 weights under autocast and AdamW(fused=True). Where the CPU
would decide, onepass's steps are CUDA graphs. Every way is measured twice, in turns, and its faster time counts: a machine slows
while it is measured. Sums have any order, as PyTorch's deterministic attention is slow; --deterministic fixes it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import gpt_steps
import torch
from measuring import need_gpus, write
from rich.console import Console
from rich.table import Table

from onepass.gpt import Config
from onepass.train.layout import ParallelLayout
from onepass.train.setup import make
from onepass.train.table import fusions, without

CASES = {
    "124M": gpt_steps.CASES["124M"],
    "1B": gpt_steps.CASES["1B"],
    "mixture": gpt_steps.Case(  # four layers of Qwen3-30B-A3B
        "1B", 4, 4096,
        {"num_layers": 4, "num_attention_heads": 32, "num_query_groups": 4, "kv_channels": 128, "vocab_size": 151936,
         "num_moe_experts": 128, "moe_router_topk": 8, "moe_ffn_hidden_size": 768},
    ),
}  # fmt: skip
GRAPHED = ("124M",)  # steps that the CPU would decide
WHOLE, EAGER, LEANER = "whole", "eager", "memory_efficient_layer_norm"
ROUNDS = 3


class Way(NamedTuple):
    config: Config
    plain: bool = False


def ways(config: Config) -> dict[str, Way]:
    """Return the configurations to measure, by the setting that each turns off first."""
    found = {WHOLE: Way(config)} | {names[0]: Way(without(config, names)) for names in fusions(config)}
    found[LEANER] = Way(config.replace(memory_efficient_layer_norm=True, norm_linear_fusion=False))
    return found | {EAGER: Way(config, plain=True)}


def stepper(case: gpt_steps.Case, way: Way, graphed: bool) -> Callable[[], torch.Tensor]:
    options = replace(case.options(), cuda_graphs=graphed)
    text = torch.randint(case.config().vocab_size, (case.sequences, case.length + 1), device=gpt_steps.DEVICE)
    return gpt_steps.steps_of(make(way.config, options, ParallelLayout(gpt_steps.DEVICE), plain=way.plain, lenient=True), text)


def measured(case: gpt_steps.Case, graphed: bool, steps: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Return the milliseconds and GiB of each way, the faster of two times, or its error."""
    rows: dict[str, Any] = {}
    for name, way in 2 * [*ways(case.config()).items()]:
        if "error" in rows.get(name, {}):  # it would not fit again
            continue
        try:
            found = gpt_steps.measure(partial(stepper, case, way, graphed), case.sequences * case.length, steps, ROUNDS)
            cost = {key: found[key] for key in ("ms", "ms_range", "peak_gib")}
        except Exception as error:  # such as eager code that doesn't fit
            cost = {"error": f"{type(error).__name__}: {error}"[:300]}
            say(f"{name}: {cost['error']}")
        if "ms" not in rows.get(name, {}) or cost.get("ms", float("inf")) < rows[name]["ms"]:
            rows[name] = cost
    return rows


def shown(title: str, rows: dict[str, Any]) -> Table:
    table = Table("without", "ms a step", "peak GiB", title=title, title_justify="left")
    for name, cost in rows.items():
        if "ms" in cost:
            table.add_row(name, f"{cost['ms']:.1f}", f"{cost['peak_gib']:.2f}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--case", choices=list(CASES), default="1B")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    need_gpus(otherwise="onepass train prints such a table without one")
    if args.deterministic:
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False
    case, console = CASES[args.case], Console(width=130)
    rows = measured(case, args.case in GRAPHED, args.steps, lambda line: console.print(line, style="red"))
    console.print(shown(f"{args.case}, {case.sequences} x {case.length}", rows))
    shape = {"sequences": case.sequences, "length": case.length, "graphed": args.case in GRAPHED}
    write(args.json, gpt_steps.DEVICE, deterministic=args.deterministic, rows={args.case: shape | {"ways": rows}})


if __name__ == "__main__":
    main()
