"""What `onepass.batch_invariant()` costs: products by the number of rows, a model's forward of a few tokens, and steps.

    python benchmarks/batch_invariance.py [--part products|forward|steps|generate|bits ...] [--json FILE]

One GPU, bf16. Products and forwards are replayed as CUDA graphs, some calls at a time, so that the CPU doesn't count; "CPU us"
is that of a call. Steps are those of gpt_steps.py's 1B, of whole sequences and of packed documents, optimizer included.
Beside times it says which numbers of rows gave a row other bits than among many. "bits" compares whole models, forward and
backward, in 50 parts of a batch and packed: 124M, 1B, and four layers of Qwen 3 1.7B by `huggingface.apply`, where transformers
is installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from gpt_steps import CASES, DEVICE, trained
from measuring import need_gpus, step_ms, write
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import onepass
from onepass.gpt import Model, preset
from onepass.integrations import huggingface
from onepass.testing.invariance import check_batches, check_packing
from onepass.train.batches import TokenBatch

BF16 = torch.bfloat16
ROWS = (1, 4, 16, 32, 64, 256, 1024, 16384)
PRODUCTS = {  # K -> N
    "1B qkv": (2048, 3072), "1B proj": (2048, 2048), "1B up": (2048, 16384), "1B down": (8192, 2048),
    "1B down's dx": (2048, 8192), "1B up's dx": (16384, 2048),
    "8B qkv": (4096, 6144), "8B up": (4096, 28672), "8B down": (14336, 4096), "124M down": (3072, 768),
}  # fmt: skip
TOKENS = (1, 4, 16, 32, 64)
GENERATED, NEW = (1, 8, 64), 48  # sequences, and their new tokens
WORDS = 50000
DOCUMENTS = 11  # in a row
STEPS, ROUNDS = 3, 5


def graph_us(call: Callable[[], object], calls: int = 20, rounds: int = 5) -> float:
    """Return a call's microseconds on the GPU."""
    for _ in range(3):
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    graph.replay()
    times = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / calls * 1e3)
    return statistics.median(times)


def cpu_us(call: Callable[[], object], calls: int = 200) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    found = (time.perf_counter() - start) / calls * 1e6
    torch.cuda.synchronize()
    return found


def times(call: Callable[[int], Tensor], rows: Sequence[int], calls: int) -> dict[str, list[float]]:
    """Return a call's times by way and number of rows, the CPU's of one row, and the numbers whose bits aren't the most's."""
    us: dict[str, list[float]] = {}
    for way in ("default", "invariant"):
        with onepass.batch_invariant() if way == "invariant" else nullcontext():
            us[way] = [graph_us(lambda count=count: call(count), calls) for count in rows]  # type: ignore[misc]
            us[f"{way} cpu"] = [cpu_us(lambda: call(1))]
            whole = call(rows[-1])
            us[f"{way} apart"] = [count for count in rows if not torch.equal(call(count), whole[:count])]
    return us


def products(console: Console) -> dict[str, Any]:
    shown = Table("over default, rows", *map(str, ROWS), "default us, 1", "CPU us", title="x @ weight.T")
    found: dict[str, Any] = {}
    for name, (K, N) in PRODUCTS.items():
        x, w = torch.randn(ROWS[-1], K, device=DEVICE, dtype=BF16), torch.randn(N, K, device=DEVICE, dtype=BF16)
        b = w.t().contiguous() if "dx" in name else w.t()
        us = times(lambda rows, x=x, b=b: x[:rows] @ b, ROWS, 20)  # type: ignore[misc]
        ratios = [mine / theirs for mine, theirs in zip(us["invariant"], us["default"], strict=True)]
        found[name] = {"K": K, "N": N, "ratios": ratios, **us}
        cpu = f"{us['default cpu'][0]:.0f}, {us['invariant cpu'][0]:.0f}"
        shown.add_row(name, *(f"{ratio:.2f}" for ratio in ratios), f"{us['default'][0]:.1f}", cpu)
        if us["invariant apart"]:
            console.print(f"{name}: other bits at {us['invariant apart']} rows", style="red")
    console.print(shown)
    return found


def forward(console: Console) -> dict[str, Any]:
    """Run the 1B model and its head on a few sequences of one token."""
    torch.manual_seed(0)
    model = Model(preset("1B", params_dtype="bf16"), device=DEVICE).eval()
    tokens = torch.randint(model.config.vocab_size, (TOKENS[-1], 1), device=DEVICE)
    with torch.no_grad():
        us = times(lambda rows: model(tokens[:rows]), TOKENS, 5)
    ratios = [mine / theirs for mine, theirs in zip(us["invariant"], us["default"], strict=True)]
    shown = Table("1B forward, sequences of one token", *map(str, TOKENS))
    shown.add_row("over default", *(f"{ratio:.2f}" for ratio in ratios))
    shown.add_row("default us", *(f"{each:.0f}" for each in us["default"]))
    console.print(shown, f"other bits than in {TOKENS[-1]}: default {us['default apart']}, invariant {us['invariant apart']}")
    return {"tokens": TOKENS, "ratios": ratios, **us}


def documents(sequences: int, length: int) -> Tensor:
    """Boundaries of documents of many lengths, the same at each call."""
    generator = torch.Generator().manual_seed(0)
    inner = torch.randint(1, length, (sequences, DOCUMENTS - 1), generator=generator).sort(-1).values
    ends = torch.full((sequences, 1), length)
    return torch.cat([torch.zeros_like(ends), inner, ends], 1).int().to(DEVICE)


def steps(console: Console) -> dict[str, Any]:
    case = CASES["1B"]
    made = trained(case, "onepass")
    text = torch.randint(case.config().vocab_size, (case.sequences, case.length + 1), device=DEVICE)
    batches = {"1B, 4 x 4096": TokenBatch(text[:, :-1], text[:, 1:])}
    batches["1B, packed"] = batches["1B, 4 x 4096"]._replace(cu_seqlens=documents(case.sequences, case.length))
    shown, found = Table("step", "default ms", "invariant ms", "over default", "CPU ms, both"), {}

    for name, batch in batches.items():

        def step(batch: TokenBatch = batch) -> None:
            made.update.set_rate(1e-5)
            made.steps.run(batch)
            made.update.step(1e-5)

        ms: dict[str, list[float]] = {"default": [], "invariant": []}
        host: dict[str, float] = {}
        for _ in range(ROUNDS):  # in turns, as a GPU's clock drifts
            for way in ms:
                with onepass.batch_invariant() if way == "invariant" else nullcontext():
                    step()
                    walls, hosts = step_ms(step, 1, STEPS)
                    ms[way] += walls
                    host[way] = hosts[-1]
        mine, theirs = statistics.median(ms["invariant"]), statistics.median(ms["default"])
        found[name] = {"ratio": mine / theirs, "ms": ms, "host_ms": host}
        shown.add_row(
            name, f"{theirs:.1f}", f"{mine:.1f}", f"{mine / theirs:.3f}", f"{host['default']:.0f}, {host['invariant']:.0f}"
        )
    console.print(shown)
    return found


def generate(console: Console) -> dict[str, Any]:
    """Time the 1B model's tokens after prompts, greedy, all that the CPU does included."""
    torch.manual_seed(0)
    model = Model(preset("1B", params_dtype="bf16"), device=DEVICE).eval()
    shown, found = Table("generate, sequences", *map(str, GENERATED), title="1B, ms a step of one token each"), {}
    for way in ("default", "invariant"):
        ms = []
        with onepass.batch_invariant() if way == "invariant" else nullcontext():
            for sequences in GENERATED:
                prompts = torch.randint(WORDS, (sequences, 512), device=DEVICE)
                times = []
                for count in (1, 1 + NEW, 1, 1 + NEW):  # the first two warm up
                    torch.cuda.synchronize()
                    start = time.perf_counter()
                    model.generate(prompts, count, temperature=0.0)
                    torch.cuda.synchronize()
                    times.append(time.perf_counter() - start)
                ms.append((times[3] - times[2]) / NEW * 1e3)
        found[way] = ms
        shown.add_row(way, *(f"{each:.2f}" for each in ms))
    console.print(shown)
    return {"sequences": GENERATED, "prompt": 512, "new": NEW, **found}


class TokenLosses(nn.Module):
    """A GPT as transformers' models are called. Its result is each token's loss; documents begin where positions do."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, use_cache: bool = False) -> Tensor:
        boundaries = None
        if position_ids is not None:
            starts = (position_ids[0] == 0).nonzero()[:, 0]
            boundaries = torch.cat([starts, starts.new_full((1,), input_ids.shape[1])]).int()
        labels = (input_ids * 7 + 3) % WORDS  # each token's own, whatever follows
        return self.model(input_ids, labels, cu_seqlens=boundaries, reduction="none")  # type: ignore[no-any-return]


def qwen3() -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
    config = AutoConfig.for_model("qwen3", num_hidden_layers=4, vocab_size=151936, **sizes)
    model = AutoModelForCausalLM.from_config(config, dtype=BF16).to(DEVICE).eval()
    huggingface.apply(model, batch_invariant=True)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "124M, bf16": lambda: TokenLosses(Model(preset("124M", params_dtype="bf16"), device=DEVICE)),
    "124M, two layers, fp32": lambda: TokenLosses(Model(preset("124M", params_dtype="fp32", num_layers=2), device=DEVICE)),
    "1B, bf16": lambda: TokenLosses(Model(preset("1B", params_dtype="bf16"), device=DEVICE)),
    "Qwen 3, bf16": qwen3,
}
SHAPES = {"sequences of one token": (8192, 1), "of 127 tokens": (64, 127)}
LENGTHS = (1, 7, 64, 100, 500, 333, 1024, 19)  # of documents


def bits(console: Console) -> dict[str, Any]:
    shown, found = Table("bits of a row in other batches", *SHAPES, "packed documents and each alone"), {}
    for name, make in MODELS.items():
        if name.startswith("Qwen") and importlib.util.find_spec("transformers") is None:
            continue
        torch.manual_seed(0)
        with onepass.batch_invariant():
            model = make()
            reports = {}
            for shape, (sequences, length) in SHAPES.items():
                # Qwen's result is logits, and attention in fp32 is PyTorch's, a sequence at a time
                few = 8 if name.startswith("Qwen") else 64 if "fp32" in name else 1
                ids = torch.randint(WORDS, (max(sequences // few, 4), length), device=DEVICE)
                report = check_batches(model, input_ids=ids)
                reports[shape] = str(report).partition("; not looked at")[0]
                console.print(f"{name}, {shape}: {reports[shape]}")
            documents = [torch.randint(WORDS, (length,), device=DEVICE) for length in LENGTHS]
            if "fp32" not in name:  # its attention of documents has no kernel, and raises
                reports["packed"] = str(check_packing(model, documents)).partition("; not looked at")[0]
                console.print(f"{name}, packed: {reports['packed']}")
        found[name] = reports
        shown.add_row(name, *(reports.get(each, "") for each in (*SHAPES, "packed")))
        del model
        torch.cuda.empty_cache()
    console.print(shown)
    return found


PARTS = {"products": products, "forward": forward, "steps": steps, "generate": generate, "bits": bits}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--part", action="append", choices=list(PARTS))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    need_gpus()
    console, found = Console(width=130), {}
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    for part in args.part or PARTS:
        found[part] = PARTS[part](console)
        write(args.json, DEVICE, **found)


if __name__ == "__main__":
    main()
