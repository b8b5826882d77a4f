"""The README's first table and its picture, from benchmarks/results. `python benchmarks/figures.py` writes both.

A row appears as soon as a result has it. Eager code and onepass are of one run. The best peer may be of another run, in which
onepass was measured beside it; its cell names the GPU if that is another:

    row                            results, in benchmarks/results/<gpu>/scripts      made by
    Hugging Face, LoRA, mixtures   huggingface*.json, hybrids_*.json, lora.json ...  onepass bench huggingface
    Trainer with `graph=True`      graphed_trainer.json                              benchmarks/graphed_trainer.py
    `onepass.gpt`                  gpt_free_*.json, gpt_fp8_1B.json                  benchmarks/gpt_steps.py
    eager `onepass.gpt`            fusions_*.json                                    benchmarks/fusions.py
    the loss                       linear_cross_entropy.json                         a script of its commit
    a policy's head                linear_cross_entropy.json, one folder above       onepass bench linear_cross_entropy
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

ROOT = Path(__file__).parents[1]
PICTURES = {scheme: ROOT / "docs" / "images" / f"steps-{scheme}.svg" for scheme in ("light", "dark")}
EAGER, OURS, GRAPHED = "eager", "onepass", "onepass, CUDA graph"
LOSS = "8192 x 4096 x 128256"
ONE_CARD = (
    "onepass train --preset 8B --optimizer-moments 8bit --step-in-backward "
    "--recompute-granularity selective --recompute-num-layers 6"
)
MODELS = ("huggingface*.json", "hybrids_*.json", "lora.json", "lora_peers.json")


class Cost(NamedTuple):
    """Of a step or a call."""

    ms: float
    gib: float


class Row(NamedTuple):
    task: str
    gpu: str  # H200
    ours: Cost
    eager: Cost | None  # as people write it, uncompiled; of the same run as ours
    peer: str | None  # the fastest other, of any run that has it beside ours
    over_peer: float = 0.0  # its time over ours, there
    peer_gib: float = 0.0
    peer_gpu: str = ""


# ---- rows ----


def short(gpu: str) -> str:
    """H100 of NVIDIA H100 80GB HBM3."""
    return gpu.split()[1]


def read(folders: Iterable[Path], *patterns: str) -> Iterator[dict]:
    for folder in folders:
        for pattern in patterns:
            for path in sorted((folder / "scripts").glob(pattern)):
                yield json.loads(path.read_text())


def runs_of_models(folders: Iterable[Path], case: str) -> Iterator[tuple[str, dict[str, Cost]]]:
    """Yield the GPU and the costs of contenders, of each file that has the case."""
    for results in read(folders, *MODELS):
        rows = [row for row in results["rows"] if row.get("case") == case and row.get("status") == "ok"]
        if rows:
            yield short(results["device"]), {row["contender"]: Cost(row["ms"], row["peak_gib"]) for row in rows}


def runs_of_trainer(folders: Iterable[Path]) -> Iterator[tuple[str, dict[str, Cost]]]:
    """Yield a small model's steps under Trainer, by its default arguments."""
    names = {
        "liger": "Liger",
        "compile": "torch.compile",
        "compile, CUDA graphs": "torch.compile, CUDA graphs",
        "onepass graph": GRAPHED,
    }
    for results in read(folders, "graphed_trainer.json"):
        ways = {names.get(name, name): way for name, way in results["rows"].items() if "ms" in way}
        yield (
            short(results["gpu"]),
            {name: Cost(way["ms"], way["peak_gib"]) for name, way in ways.items() if name in {EAGER, OURS, *names.values()}},
        )


def runs_of_gpt(folders: Iterable[Path], model: str, *patterns: str) -> Iterator[tuple[str, dict[str, Cost]]]:
    for results in read(folders, *patterns):
        ways = results["rows"].get(model, {})
        yield short(results["gpu"]), {name: Cost(way["ms"], way["peak_gib"]) for name, way in ways.items() if "ms" in way}


def runs_of_fusions(folders: Iterable[Path], model: str, ours: str) -> Iterator[tuple[str, dict[str, Cost]]]:
    for results in read(folders, f"fusions_{model}.json"):
        ways = {name: results["rows"][model]["ways"].get(way, {}) for name, way in ((ours, "whole"), (EAGER, "eager"))}
        yield short(results["gpu"]), {name: Cost(way["ms"], way["peak_gib"]) for name, way in ways.items() if "ms" in way}


def runs_of_loss(folders: Iterable[Path], case: str) -> Iterator[tuple[str, dict[str, Cost]]]:
    """Eager's logits are in bf16: the faster of its two ways."""
    for results in read(folders, "linear_cross_entropy.json"):
        ways = {EAGER if name == "eager, bf16 logits" else name: way for name, way in results["rows"][case]["ways"].items()}
        costs = {name: Cost(way["ms"], way["peak_mib"] / 1024) for name, way in ways.items() if "ms" in way}
        yield short(results["gpu"]), costs


def runs_of_op(folders: Iterable[Path], op: str, case: str) -> Iterator[tuple[str, dict[str, Cost]]]:
    for path in (folder / f"{op}.json" for folder in folders):
        if path.exists():
            results = json.loads(path.read_text())
            rows = [row for row in results["rows"] if row["case"] == case and row["status"] == "ok" and not row.get("floor")]
            timed = [row for row in rows if row["backward_ms"] and row["peak_mib"] and row["contender"] != row["reference"]]
            costs = {row["contender"]: Cost(row["forward_ms"] + row["backward_ms"], row["peak_mib"] / 1024) for row in timed}
            yield short(results["hardware"]["name"]), costs


def row_of(task: str, runs: Iterable[tuple[str, dict[str, Cost]]], ours: str = OURS) -> Row | None:
    """Return a task's row, or None where no run has it. Shown is a run with eager, or else the run of the best peer."""
    found = [(gpu, costs) for gpu, costs in runs if ours in costs]
    if not found:
        return None
    others = [
        (cost.ms / costs[ours].ms, name, cost.gib, at)
        for at, (_, costs) in enumerate(found)
        for name, cost in costs.items()
        if not name.startswith((EAGER, OURS))
    ]
    over, peer, gib, of_peer = min(others, default=(0.0, None, 0.0, 0))
    shown = max(range(len(found)), key=lambda at: (EAGER in found[at][1], at == of_peer))
    gpu, costs = found[shown]
    return Row(task, gpu, costs[ours], costs.get(EAGER), peer, over, gib, found[of_peer][0])


def rows_of(folders: list[Path]) -> dict[str, Row]:
    """Return the rows that there are results for."""

    def model(task: str, case: str) -> Row | None:
        return row_of(task, runs_of_models(folders, case))

    head = runs_of_op(folders, "linear_cross_entropy", "log_prob 8192x4096x151936")
    in_eight_bits = runs_of_gpt(folders, "1B", "gpt_fp8_1B.json")
    small = chain(runs_of_gpt(folders, "124M", "gpt_free_124M.json"), runs_of_fusions(folders, "124M", GRAPHED))
    large = chain(runs_of_gpt(folders, "1B", "gpt_free_1B.json"), runs_of_fusions(folders, "1B", OURS))
    found = {
        "llama": model("Fine-tune Llama 1B, 4 x 4096 tokens", "llama_1b 4x4096"),
        "short": model("Fine-tune Llama 1B, 1 x 1024 tokens", "llama_1b 1x1024"),
        "graph": row_of("Fine-tune Llama 124M, 8 x 1024 tokens, with a CUDA graph", runs_of_trainer(folders), GRAPHED),
        "gemma": model("Fine-tune Gemma 4 2B, 1 x 8192 tokens", "gemma4_2b 1x8192"),
        "lora": model("LoRA of Llama 8B, rank 16, 2 x 2048 tokens", "lora_8b 2x2048"),
        "qwen": model("Mixture: Qwen3 30B-A3B, 4 layers, 4 x 4096 tokens", "qwen3_moe_30b 4x4096"),
        "mixture": model("Mixture: gpt-oss 20B, 4 layers, 4 x 4096 tokens", "gpt_oss_20b 4x4096"),
        "policy": row_of("Log-probabilities and entropies of a policy, 8192 x 4096 x 151936", head),
        "loss": row_of(f"`linear_cross_entropy`, {LOSS}", runs_of_loss(folders, LOSS)),
        "fp8": row_of("Pretrain Llama 1B in eight bits, 4 x 4096 tokens", in_eight_bits, "onepass, fp8"),
        "small": row_of("Pretrain GPT 124M, 16 x 1024 tokens, with a CUDA graph", small, GRAPHED),
        "plain": row_of("Pretrain Llama 1B, 4 x 4096 tokens", large),
    }
    return {name: row for name, row in found.items() if row is not None}


def loss_memory(folders: Iterable[Path]) -> str:
    """Say what the loss takes by default, why, and which arguments take less."""
    for results in read(folders, "linear_cross_entropy.json"):
        ways = results["rows"][LOSS]["ways"]
        names = (OURS, "onepass, main_grad and grad_scale", "Liger", "torch.compile")
        by_default, at_least, liger, compiled = (
            f"{ways[name]['peak_mib']:,.0f} MiB and {ways[name]['ms']:.1f} ms" for name in names
        )
        return (
            "By default `linear_cross_entropy` keeps logits of up to 1/32 of the GPU's memory, for speed: "
            f"{by_default} at {LOSS}, where torch.compile takes {compiled} and Liger {liger}. "
            f"With `grad_scale=1.0` and a weight that has `main_grad` it takes {at_least}."
        )
    return ""


# ---- the table ----


def table(rows: Iterable[Row]) -> str:
    titles = ("a training step, or a call", "eager PyTorch", "onepass", "gain", "over the best peer", "peak GiB")
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for row in rows:
        elsewhere = f" ({row.peer_gpu})" if row.peer_gpu != row.gpu else ""
        beside = f"{row.over_peer:.2f} x {row.peer}{elsewhere}" if row.peer else ""
        gpu = "" if row.gpu == "H200" else f" ({row.gpu})"
        if row.eager is None:
            eager = gain = ""
            memory = f"{row.peer_gib:.1f} (peer) → {row.ours.gib:.1f}" if row.peer else f"{row.ours.gib:.1f}"
        else:
            eager, gain = f"{row.eager.ms:.1f} ms", f"**{row.eager.ms / row.ours.ms:.2f} x**"
            memory = f"{row.eager.gib:.1f} → {row.ours.gib:.1f}"
        lines.append(f"| {row.task}{gpu} | {eager} | {row.ours.ms:.1f} ms | {gain} | {beside} | {memory} |")
    return "\n".join(lines)


# ---- who gains what ----


def gains(rows: dict[str, Row], folders: list[Path]) -> str:
    """Return a table for readers: what each calls, and what that brings."""
    written, fused = kernels(folders)
    lines = ["| you | call | it brings | more |", "|---|---|---|---|"]
    for who, call, brings, *pages in (
        ("fine-tune a Hugging Face model", "`huggingface.apply(model)`", than_eager(rows["llama"]), "Hugging Face: huggingface"),
        (
            "train adapters on one card",
            "the same, before or after `get_peft_model`",
            than_eager(rows["lora"]),
            "LoRA and QLoRA: lora",
        ),
        ("train a mixture of experts", "the same", than_eager(rows["mixture"]), "Mixtures: experts"),
        (
            "fine-tune a small model",
            "`huggingface.apply(model, graph=True)`",
            than_eager(rows["graph"])
            if "graph" in rows
            else "forward and backward as CUDA graphs, for steps that wait for the CPU",
            "Trainer: huggingface/training",
        ),
        ("train all weights of an 8B on one card", f"`{ONE_CARD}`", on_one_card(folders), "Memory: train/memory"),
        ("pretrain a small model", "`onepass train`", than_peer(rows["small"]), "Training: train"),
        ("pretrain in eight bits", "`onepass train --fp8-format hybrid`", than_peer(rows["fp8"]), "Eight bits: fp8"),
        (
            "train by reinforcement or preferences",
            "`trl.install()`, `verl.install()`, or `linear_cross_entropy(return_stats=...)`",
            than_peer(rows["policy"]),
            *("TRL: trl", "verl: verl", "Losses: ops/losses"),
        ),
        (
            "have a Megatron-core or torchtitan script",
            "`megatron.install()`, or torchtitan's overrides",
            "its fusions without Apex and Transformer Engine, and longer batches in the same memory",
            *("Megatron-core: megatron", "torchtitan: torchtitan"),
        ),
        (
            "write the model yourself",
            "an op or a module in place of each line",
            "[each op beside its peers](docs/figures.md#each-op-at-its-largest-case)",
            *("Your own model: your-model", "Ops: guide"),
        ),
        (
            "have many small operators, or wonder where time goes",
            "`onepass.fuse(model)`, `onepass.profile(step)`",
            f"{written:.0f} kernels as {fused:.0f}, with the same results up to rounding",
            *("Fusion: fusion", "Profiling: profile"),
        ),
    ):
        links = ", ".join(f"[{words}](docs/{page}.md)" for words, page in (each.split(": ") for each in pages))
        lines.append(f"| {who} | {call} | {brings} | {links} |")
    return "\n".join(lines)


def than_eager(row: Row) -> str:
    assert row.eager is not None
    return f"{1 - row.ours.ms / row.eager.ms:.0%} less time and {1 - row.ours.gib / row.eager.gib:.0%} less memory than eager"


def than_peer(row: Row) -> str:
    assert row.peer is not None
    return f"{1 - 1 / row.over_peer:.0%} less time than {row.peer.replace('plain, ', 'compiled PyTorch with ')}"


def on_one_card(folders: Iterable[Path]) -> str:
    """Say what the way of docs/train/memory.md takes."""
    results = next(read(folders, "gpt_8B.json"))
    gib = results["rows"]["8B"]["onepass, 8-bit moments, in backward, selective 6"]["peak_gib"]
    return f"{gib:.0f} GiB, by AdamW with fp32 masters"


def kernels(folders: Iterable[Path]) -> tuple[float, float]:
    """Return how many kernels code of many slices runs, as written and fused."""
    ways = next(read(folders, "fuse.json"))["rows"]["split_stack"]["ways"]
    return ways["as written"]["kernels"], ways["fused"]["kernels"]


# ---- the picture: how much of eager's time and memory is left ----

WIDTH, PANEL, GAP, PITCH, TOP, BAR = 700, 330, 40, 54, 58, 16
COLOURS = {
    "light": {"text": "#1f2328", "dim": "#59636e", "eager": "#d1d9e0", "onepass": "#0969da"},
    "dark": {"text": "#f0f6fc", "dim": "#9198a1", "eager": "#3d444d", "onepass": "#4493f8"},
}
PANELS = (("Time of a step", "ms", "ms", 0), ("Peak memory", "gib", "GiB", 1))


def drawn(rows: Iterable[Row]) -> list[Row]:
    """Return the steps that have eager beside them. A call is no step."""
    return [row for row in rows if row.eager is not None and "`" not in row.task]


def brief(row: Row) -> str:
    return row.task.removeprefix("Mixture: ").replace(" tokens", "").replace("with a CUDA graph", "graph")


def said(rows: Iterable[Row]) -> str:
    """Return the picture in words."""
    each = [
        f"{brief(row)}: {row.eager.ms:.0f} to {row.ours.ms:.0f} ms, {row.eager.gib:.0f} to {row.ours.gib:.0f} GiB"
        for row in drawn(rows)
    ]
    return f"Eager PyTorch to onepass, a training step and its peak memory. {'; '.join(each)}."


def picture(rows: Iterable[Row], scheme: str) -> str:
    """Return an SVG: a pair of bars, one over the other, for each row and panel."""
    colours, shown = COLOURS[scheme], drawn(rows)
    height = TOP + PITCH * len(shown) + 6
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img" '
        'font-family="-apple-system, Segoe UI, Helvetica, Arial, sans-serif" font-size="13">',
        f"<title>{escape(said(rows))}</title>",
        *_legend(colours),
    ]
    for title, figure, unit, panel in PANELS:
        left = panel * (PANEL + GAP)
        lines.append(_text(left, 44, title, colours["text"], "font-weight='600'"))
        for at, row in enumerate(shown):
            top = TOP + PITCH * at
            before, after = getattr(row.eager, figure), getattr(row.ours, figure)
            label = brief(row) if panel == 0 else f"{1 - after / before:.0%} less"
            lines.append(_text(left, top + 12, label, colours["text"]))
            lines.append(_bar(left, top + 19, PANEL, colours["eager"]))
            lines.append(_bar(left, top + 19, PANEL * after / before, colours["onepass"]))
            figures = f"{after:.0f} of {before:.0f} {unit}"
            lines.append(_text(left + PANEL, top + 12, figures, colours["dim"], "text-anchor='end'"))
    return "\n".join([*lines, "</svg>", ""])


def _legend(colours: dict[str, str]) -> Iterator[str]:
    for left, name, words in ((0, "onepass", "onepass"), (100, "eager", "eager PyTorch")):
        yield f'<rect x="{left}" y="4" width="14" height="14" rx="3" fill="{colours[name]}"/>'
        yield _text(left + 20, 16, words, colours["text"])


def _text(x: float, y: float, words: str, colour: str, more: str = "") -> str:
    return f'<text x="{x}" y="{y}" fill="{colour}"{" " + more if more else ""}>{escape(words)}</text>'


def _bar(x: float, y: float, width: float, colour: str) -> str:
    return f'<rect x="{x}" y="{y}" width="{width:.1f}" height="{BAR}" rx="3" fill="{colour}"/>'


def picture_line(rows: Iterable[Row]) -> str:
    """Return the README's line that shows the picture of the reader's colour scheme."""
    light, dark = (PICTURES[scheme].relative_to(ROOT) for scheme in ("light", "dark"))
    source = f'<source media="(prefers-color-scheme: dark)" srcset="{dark}">'
    words = escape(said(rows), {'"': "&quot;"})
    return f'<picture>{source}<img src="{light}" width="{WIDTH}" alt="{words}"></picture>'


def pictures(rows: Iterable[Row]) -> dict[Path, str]:
    return {path: picture(rows, scheme) for scheme, path in PICTURES.items()}
