"""What each fusion brings to a training step, from benchmarks/results: a table, and a sentence for each op's page.

Both are empty until benchmarks/fusions.py has measured a model. `python benchmarks/figures.py` writes them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

WORDS = {  # of the setting that benchmarks/fusions.py turns off
    "attention_fusion": "attention",
    "apply_rope_fusion": "attention and rotary positions",
    "norm_linear_fusion": "a norm into the linear layer after it",
    "norm_fusion": "norms, with the residual's sums",
    "bias_activation_fusion": "bias and activation, into the linear layer after it",
    "bias_dropout_fusion": "bias, dropout and residual",
    "cross_entropy_loss_fusion": "the loss without logits",
    "gradient_accumulation_fusion": "gradients added in the product",
}
LEANER = "memory-efficient norms, and no norm into a linear layer"
PAGES = {  # the mark in an op's page: the setting that the sentence is of
    "brings-activation": "bias_activation_fusion",
    "brings-main-grad": "gradient_accumulation_fusion",
    "brings-norms": "norm_fusion",
    "brings-loss": "cross_entropy_loss_fusion",
    "brings-attention": "apply_rope_fusion",
}


def models(scripts: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """Return each model's results: those of the first folder that has it."""
    found: dict[str, dict[str, Any]] = {}
    for folder in scripts:
        for path in sorted(folder.glob("fusions_*.json")):
            results = json.loads(path.read_text())
            for name, row in results.pop("rows").items():
                found.setdefault(name, results | row)
    order = ("124M", "1B")
    return dict(sorted(found.items(), key=lambda item: order.index(item[0]) if item[0] in order else len(order)))


def table(scripts: Iterable[Path]) -> str:
    """Return a section with a column pair a model, or nothing."""
    found = models(scripts)
    if not found:
        return ""
    lines = ["## What each fusion brings to a step", "", *(_measured(name, row) for name, row in found.items()), ""]
    lines.append("| the step | " + " | ".join(f"{name}, ms | GiB" for name in found) + " |")
    lines.append("|---" * (1 + 2 * len(found)) + "|")
    rows = {"whole": "with all of them", **{name: f"without {words}" for name, words in WORDS.items()}}
    rows |= {"memory_efficient_layer_norm": f"with {LEANER}", "eager": "by PyTorch's operators, uncompiled"}
    for name, words in rows.items():
        cells = [cell for row in found.values() for cell in _cells(row["ways"], name)]
        if any(cells):
            lines.append(f"| {words} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _measured(name: str, row: dict[str, Any]) -> str:
    gpu, torch = row["gpu"], row["versions"]["torch"]
    graphed = ", in CUDA graphs" if row["graphed"] else ""
    order = "deterministic" if row["deterministic"] else "sums in any order"
    return (
        f"- {name}: {row['sequences']} x {row['length']} tokens{graphed}, {order}; {gpu}, torch {torch}; commit {row['commit']}."
    )


def _cells(ways: dict[str, dict[str, Any]], name: str) -> tuple[str, str]:
    cost, whole = ways.get(name, {}), ways["whole"]
    if "ms" not in cost:
        return "", ""
    if name == "whole":
        return f"{cost['ms']:.1f}", f"{cost['peak_gib']:.1f}"
    slower, larger = cost["ms"] / whole["ms"] - 1, cost["peak_gib"] / whole["peak_gib"] - 1
    return f"{cost['ms']:.1f} (**{slower:+.1%}**)", f"{cost['peak_gib']:.1f} (**{larger:+.0%}**)"


def sentences(scripts: Iterable[Path], page: str) -> dict[str, str]:
    """Return a sentence for each mark of an op's page, of the model 1B; empty where it was not measured.

    Args:
        page: where the table is, from an op's page.
    """
    row = models(scripts).get("1B")
    return {mark: _sentence(row, setting, page) if row else "" for mark, setting in PAGES.items()}


def _sentence(row: dict[str, Any], setting: str, page: str) -> str:
    whole, cost = row["ways"]["whole"], row["ways"].get(setting, {})
    if "ms" not in cost:
        return ""
    return (
        f"**In a training step** of Llama 1B, {row['sequences']} x {row['length']} tokens: {whole['ms']:.1f} ms and "
        f"{whole['peak_gib']:.1f} GiB; without {WORDS[setting]}, {cost['ms']:.1f} ms and {cost['peak_gib']:.1f} GiB "
        f"([each fusion]({page}#what-each-fusion-brings-to-a-step))."
    )
