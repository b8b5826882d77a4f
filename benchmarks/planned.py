"""What `onepass plan --gpus` counts with, from results/h200/scripts/rates.json, and its error on rows that were measured.

    python benchmarks/planned.py [--rates]

A test compares the rates with those of src/onepass/train/plan/rates.py, and the errors with their bound.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import torch

from onepass.gpt import Config, preset
from onepass.runtime.units import counted
from onepass.train.options import Options
from onepass.train.plan.block_time import Run
from onepass.train.plan.layout_memory import layout_memory
from onepass.train.plan.layouts import GPULayout, describe, layout_of, undivided
from onepass.train.plan.rates import GPUS, state_bytes
from onepass.train.plan.step_time import step_time

RESULTS = Path(__file__).parent / "results"


def sections() -> dict[str, dict[str, dict[str, Any]]]:
    found: dict[str, dict[str, dict[str, Any]]] = json.loads((RESULTS / "h200" / "scripts" / "rates.json").read_text())[
        "sections"
    ]
    return found


def _products(rows: dict[str, dict[str, Any]]) -> Iterator[tuple[tuple[int, int, int], bool, float]]:
    """Yield each product's M, N and K, whether it is added to fp32, and its seconds."""
    for row in rows.values():
        if "in" not in row:
            continue
        tokens, inner, outer = row["tokens"], row["in"], row["out"]
        sizes = {"forward": (tokens, outer, inner), "dgrad": (tokens, inner, outer), "wgrad": (outer, inner, tokens)}
        for name, shape in sizes.items():
            yield shape, name == "wgrad", row[name] / 1e3


def _fit(rows: dict[str, dict[str, Any]]) -> list[float]:
    """Fit seconds = 2 M N K a + 2 M N b + c + 8 M N d (of what is added) to the products, in relative terms.

    One that is far off what the rest says is left out: a pause of the machine.
    """
    made = [([2.0 * M * N * K, 2.0 * M * N, 1.0, 8.0 * M * N * added], t) for (M, N, K), added, t in _products(rows)]
    for _ in range(2):
        scaled = torch.tensor([[each / t for each in terms] for terms, t in made], dtype=torch.float64)
        units = scaled.abs().amax(0)
        found = (
            torch.linalg.lstsq(scaled / units, torch.ones(len(made), 1, dtype=torch.float64)).solution[:, 0] / units
        ).tolist()
        made = [(terms, t) for terms, t in made if abs(sum(a * b for a, b in zip(terms, found, strict=True)) / t - 1) < 0.2]
    return found


def rates() -> dict[str, float]:
    """Return the rates that were measured, under their names in `onepass.train.plan.rates.GPURates`."""
    found = sections()
    a, b, start, added = _fit(found["products"])
    shapes = {name.rpartition(", in a row")[0]: row for name, row in found["products"].items() if "in a row" in name}
    slower = mean(row["ms"] / shapes[name]["sum"] for name, row in found["sustained"].items())
    narrow = _fit(found["eight_bits"])
    copy = max(row["bytes"] / row["ms"] * 1e3 for row in found["copies"].values() if row["bytes"] >= 1 << 30)
    return {
        "copy": copy, "product": 1 / a / slower, "product_fp8": 1 / narrow[0] / slower, "depth": b / a, "product_start": start,
        "added": added * copy,
        **_attention(found), **_passes(found, copy), **_links(found),
    }  # fmt: skip


def _attention(found: dict[str, Any]) -> dict[str, float]:
    """Return FLOP/s in steps that follow one another, beside the seconds that a call takes for nothing of its size."""
    one, four = (found["attention"][f"{count} x 4096 x 32 x 8 x 64"] for count in (1, 4))
    starts = {kind: (4 * one[kind] - four[kind]) / 3e3 for kind in ("forward", "backward")}
    made = {f"attention_start {kind}": seconds for kind, seconds in starts.items()}
    for name, width, calls, flops in (
        ("one, 4", 64, 16, 2 * 4 * 32 * 64 * 4096**2),
        ("8B, four blocks", 128, 4, 2 * 32 * 128 * 8192**2),
    ):
        step = found["steps"][name]
        longer = step["ms"] / step["busy_ms"]  # the trace is of one step, after a pause
        for kind, parts, times in (("forward", ("flash_fprop",), 1.0), ("backward", ("_dk_dv_kernel", "_dq_kernel"), 2.5)):
            ms = sum(total for kernel, (_, total) in step["kernels"].items() if any(part in kernel for part in parts))
            made[f"attention_{width} {kind}"] = times * flops / (ms * longer / 1e3 / calls - starts[kind])
    few, many = (found["attention"][f"1 x 8192 x {heads} x 128"]["backward"] for heads in ("8 x 1", "32 x 8"))
    return made | {"attention_blocks": 64 * 4 * few / many}


def _passes(found: dict[str, Any], copy: float) -> dict[str, float]:
    large = [row for name, row in found["passes"].items() if "16384 x 768" not in name]
    forward = mean(row["forward_bytes"] / row["forward"] for row in large) * 1e3 / copy
    row = found["optimizer"][str(1 << 30)]
    return {"passes": forward, "optimizer": 36 * row["parameters"] / row["ms"] * 1e3 / copy}


def _links(found: dict[str, Any]) -> dict[str, float]:
    small, large = (found["collectives"][str(1 << n)] for n in (24, 30))
    moved = large["bytes"] - small["bytes"]
    gather = mean(
        moved / 2 / (large[name] - small[name]) * 1e3
        for name in ("all_gather bf16", "reduce_scatter bf16", "reduce_scatter fp32")
    )
    reduce = moved / (large["all_reduce fp32"] - small["all_reduce fp32"]) * 1e3
    start = mean(small[name] / 1e3 - small["bytes"] / 2 / gather for name in ("all_gather bf16", "reduce_scatter bf16"))
    shares = []
    for name, row in found["overlap"].items():
        if "copy" in name or "exchange" in name:
            continue
        sent = row["beside"] / row["sent_beside"] * row["sent_alone"]  # milliseconds of sending alone, under one product
        shares.append((row["beside"] - row["alone"]) / sent)
    return {"pair": gather, "pair_reduce": reduce, "pair_start": start, "slowdown": mean(shares)}


# ---- measured rows ----


class Row(NamedTuple):
    """A step that was measured, as a plan sees it."""

    gpu: str
    name: str
    commit: str
    run: Run
    layout: GPULayout
    options: Options
    ms: float
    gib: float
    host_ms: float | None = None

    @property
    def planned_ms(self) -> float:
        return step_time(self.run, self.layout).seconds * 1e3

    @property
    def planned_gib(self) -> float:
        memory = layout_memory(self.run.config, self.options, self.layout, int(self.run.gpu.memory.value))
        return memory.total / 2**30

    @property
    def error(self) -> float:
        return self.planned_ms / self.ms - 1

    @property
    def cpu_decides(self) -> bool:
        """Whether the CPU took all but a fiftieth of the step for its calls: a plan counts the GPU's work."""
        return self.host_ms is not None and self.host_ms > 0.98 * self.ms


def _read(gpu: str, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / gpu / "scripts" / f"{name}.json").read_text())
    return found


def _row(
    gpu: str, name: str, commit: str, config: Config, options: Options, ranks: int, seen: float | None = None
) -> Callable[..., Row]:
    run = Run(undivided(config), options.seq_length, GPUS[gpu], state_bytes(options), seen, deterministic=options.deterministic)
    return partial(Row, gpu, name, commit, run, layout_of(config, options, ranks), options)


def parallel_rows(gpu: str) -> Iterator[Row]:
    """Yield the rows of benchmarks/gpt_parallel.py. A packed token sees 512 on average: twice a document."""
    found = _read(gpu, "gpt_parallel_2")
    for name, row in found["rows"].items():
        config = preset("1B", params_dtype="bf16", **row["model"])
        more = {"seq_length": found["size"]["length"], "micro_batch_size": row["micro"], "global_batch_size": row["sequences"]}
        more["release_main_grads"] = False
        seen = 2.0 * found["size"]["document"] if row.get("packed") else None
        made = _row(gpu, name, found["commit"], config, Options(**more, **row["training"]), row["ranks"], seen)
        yield made(row["ms"], max(row["peak_gib_by_rank"]), row["host_ms"])


def fsdp_rows() -> Iterator[Row]:
    """Yield the rows of benchmarks/fsdp.py, by FSDPMainGrads and ShardedAdamW."""
    for ranks in (1, 2):
        found = _read("h100", f"fsdp_{ranks}")
        for name, ways in found["rows"].items():
            micro, sequences, length = (int(word) for word in name.split()[1::2])
            sizes = {"seq_length": length, "micro_batch_size": sequences, "global_batch_size": micro * sequences * ranks}
            options = Options(use_fsdp=True, **sizes)
            made = _row(
                "h100",
                f"FSDP, {counted(ranks, 'GPU')}, {micro} x {sequences}",
                found["commit"],
                preset("1B", params_dtype="bf16"),
                options,
                ranks,
            )
            row = ways["FSDP2, FSDPMainGrads, ShardedAdamW"]
            yield made(row["ms"], row["peak_gib"], row["cpu_ms"])


_FOUR = {"num_layers": 4, "hidden_size": 4096, "ffn_hidden_size": 14336, "num_attention_heads": 32, "num_query_groups": 8}
_MODELS = {
    "124M": ("124M", 16, 1024, {}), "1B": ("1B", 4, 4096, {}), "8B_four_layers": ("1B", 1, 8192, _FOUR),
    "8B": ("8B", 1, 8192, {}), "8B_16k": ("8B", 2, 8192, {}),
}  # fmt: skip
_FILES = (
    ("h200", "gpt_8B"), ("h200", "gpt_8B_speed"), ("h200", "gpt_fp8_1B"), ("h100", "gpt_1B"), ("h100", "gpt_free_1B"),
    ("h100", "gpt_fp8_1B"), ("h100", "gpt_fp8_8B"), ("h100", "gpt_124M"),
)  # fmt: skip


def gpt_rows() -> Iterator[Row]:
    """Yield the rows of benchmarks/gpt_steps.py that a plan counts: all of onepass but those that offload."""
    for gpu, name in _FILES:
        found = _read(gpu, name)
        for model, ways in found["rows"].items():
            for way, row in ways.items():
                if way.startswith("onepass") and "offload" not in way and "error" not in row:
                    yield _gpt_row(gpu, model, way, row, found)


def _gpt_row(gpu: str, model: str, way: str, row: dict[str, Any], found: dict[str, Any]) -> Row:
    base, sequences, length, changes = _MODELS[model]
    changes = dict(changes)
    for word in way.split(", "):
        granularity, _, blocks = word.partition(" ")
        if granularity in ("selective", "full"):
            changes |= {"recompute_granularity": granularity, "recompute_num_layers": int(blocks) if blocks else None}
    changes |= {"fp8_format": "hybrid"} if "fp8" in way else {}
    moments = "8bit" if "8-bit moments" in way else "fp32"
    options = Options(
        seq_length=length, micro_batch_size=sequences, optimizer_moments=moments, deterministic=found["deterministic"]
    )
    order = "" if options.deterministic else ", any order"
    name = f"{model.replace('_', ' ')}, {sequences} x {length}{way.removeprefix('onepass')}{order}"
    return _row(gpu, name, found["commit"], preset(base, params_dtype="bf16", **changes), options, 1)(
        row["ms"], row["peak_gib"], row["host_ms"]
    )


@cache
def measured_rows() -> list[Row]:
    return [*parallel_rows("h200"), *parallel_rows("h100"), *fsdp_rows(), *gpt_rows()]


# ---- published rows: layouts and figures as their sources have them, on machines that nobody here has had ----


class Published(NamedTuple):
    source: str
    name: str
    run: Run
    layout: GPULayout
    seconds: float  # of a step, from the tokens or FLOP/s that are published

    @property
    def planned(self) -> float:
        return step_time(self.run, self.layout).seconds

    @property
    def error(self) -> float:
        return self.planned / self.seconds - 1


MEGATRON = "Megatron-LM's README (main, 2026-08), Megatron-Core r0.8.0, H100, bf16"
BRIDGE = "Megatron Bridge, performance summary (25.11 and 26.02 containers), FP8 with current scaling"
TITAN = "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, H100 at 500 W with HBM2e"
LLAMA = "Balaji at SC'24, as glennklockwood.com/garden/llama-3.1 has it, H100, bf16"
_STATE_BYTES = 36.0
_README = (  # parameters, heads, hidden, blocks, tp, pp, sequences of a step, TFLOP/s a GPU; dp is 48
    ("1.7B", 16, 2048, 24, 1, 1, 192, 408.8), ("7.1B", 32, 4096, 30, 2, 1, 192, 465.9), ("16B", 48, 6144, 32, 4, 1, 192, 489.1),
    ("32B", 56, 7168, 48, 8, 1, 192, 459.6), ("70B", 64, 8192, 84, 8, 2, 384, 419.7), ("119B", 80, 10240, 92, 8, 4, 768, 420.5),
    ("177B", 96, 12288, 96, 8, 6, 1152, 432.8), ("314B", 128, 16384, 96, 8, 8, 1536, 474.4),
    ("462B", 144, 18432, 112, 8, 16, 3072, 459.9),
)  # fmt: skip
_BRIDGE = (  # preset, GPU, layout, tokens a second and GPU
    ("8B", "h100", GPULayout(1, 1, 8, 1, 1, 1, 128, "fsdp"), 14451),
    ("70B", "h100", GPULayout(4, 8, 2, 1, 5, 1, 128, "optimizer", "interleaved"), 1602),
    ("70B", "h100", GPULayout(4, 8, 2, 1, 5, 1, 256, "optimizer", "interleaved"), 1621),
    ("405B", "h100", GPULayout(8, 8, 8, 2, 8, 1, 512, "optimizer", "interleaved"), 292),
    ("405B", "h100", GPULayout(8, 8, 8, 2, 8, 1, 1536, "optimizer", "interleaved"), 311),
    ("8B", "b200", GPULayout(1, 1, 8, 1, 1, 2, 128, "optimizer"), 30624),
    ("405B", "b200", GPULayout(4, 8, 2, 2, 8, 1, 64, "optimizer", "interleaved"), 661),
)
_TITAN = (  # preset, eight bits, recomputation, layout, tokens a second and GPU
    ("8B", False, "selective", GPULayout(1, 1, 8, 1, 1, 2, 16, "fsdp"), 6667),
    ("8B", True, "selective", GPULayout(1, 1, 8, 1, 1, 2, 16, "fsdp"), 8532),
    ("8B", False, "selective", GPULayout(1, 1, 128, 1, 1, 2, 256, "fsdp"), 6514),
    ("70B", True, "full", GPULayout(8, 1, 32, 1, 1, 16, 512, "fsdp"), 829),
    ("405B", True, "full", GPULayout(8, 8, 8, 1, 1, 4, 256, "optimizer"), 100),
)


def _published(
    source: str, name: str, config: Config, sequence: int, gpu: str, layout: GPULayout, rate: float, ours: bool
) -> Published:
    """Return a row from the tokens a second on each GPU."""
    run = Run(config, sequence, GPUS[gpu], _STATE_BYTES, ours=ours, deterministic=False)
    return Published(source, name, run, layout, layout.batch * sequence / (rate * layout.gpus))


def _of_readme() -> Iterator[Published]:
    """Yield Megatron-LM's table: GPTs of 4,096 tokens and a vocabulary of 131,072. Its FLOPs count attention whole."""
    for size, heads, hidden, blocks, tensor, stages, batch, tflops in _README:
        config = Config(
            num_layers=blocks, hidden_size=hidden, num_attention_heads=heads, vocab_size=131072, max_position_embeddings=4096,
            position_embedding_type="learned_absolute", normalization="LayerNorm", add_bias_linear=True, gated_linear_unit=False,
            activation_func="gelu", params_dtype="bf16", untie_embeddings_and_output_weights=stages > 1,
        )  # fmt: skip
        flops = 72 * blocks * hidden**2 + 12 * blocks * hidden * 4096 + 6 * hidden * 131072
        layout = GPULayout(tensor, stages, 48, 1, 1, 1, batch)
        yield _published(MEGATRON, f"GPT {size}", config, 4096, "h100", layout, tflops * 1e12 / flops, False)


@cache
def published_rows() -> list[Published]:
    rows = [*_of_readme()]
    llama = {name: preset(name, params_dtype="bf16") for name in ("8B", "70B", "405B")}
    for name, gpu, layout, tokens in _BRIDGE:
        # Megatron counts the embedding and the head as two of 128 blocks, which it divides over stages
        config = llama[name].replace(fp8_format="hybrid", num_layers=128 if name == "405B" else llama[name].num_layers)
        rows.append(_published(BRIDGE, f"Llama 3 {name}, {gpu.upper()}", config, 8192, gpu, layout, tokens, False))
    for name, eight, again, layout, tokens in _TITAN:
        config = llama[name].replace(recompute_granularity=again, fp8_format="hybrid" if eight else None)
        rows.append(
            _published(TITAN, f"Llama 3 {name}, {'eight bits' if eight else 'bf16'}", config, 8192, "h100", layout, tokens, True)
        )
    rate = 430e12 / llama["405B"].flops_per_token(8192)
    rows.append(_published(LLAMA, "Llama 3 405B", llama["405B"], 8192, "h100", GPULayout(8, 16, 64, 1, 1, 1, 2048), rate, False))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rates", action="store_true", help="only the rates, as measured")
    if parser.parse_args().rates:
        for name, value in rates().items():
            print(f"{name:28}{value:.4g}")
        return
    for row in measured_rows():
        cpu = "  CPU decides" if row.cpu_decides else ""
        memory = f"{row.gib:6.1f} GiB, planned {row.planned_gib:6.1f}"
        print(f"{row.gpu} {row.name:52}{row.ms:8.1f} ms, planned{row.planned_ms:8.1f}, {row.error:+6.1%}  {memory}{cpu}")
    for each in published_rows():
        layout = f"{describe(each.layout)}, {each.layout.gpus:,} GPUs"
        print(f"{each.name:30}{layout:44}{each.seconds:8.3f} s, planned{each.planned:8.3f}, {each.error:+6.1%}  {each.source}")


if __name__ == "__main__":
    main()
