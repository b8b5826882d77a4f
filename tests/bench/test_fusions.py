"""benchmarks/fusions.py on a CPU: a step without each fusion, by eager code too, and what is kept of them."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TINY = {
    "num_layers": 1, "hidden_size": 64, "ffn_hidden_size": 96, "num_attention_heads": 4, "num_query_groups": 2, "kv_channels": 16,
    "vocab_size": 128,
}  # fmt: skip

pytestmark = pytest.mark.usefixtures("by_formula")


@pytest.fixture
def fusions(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import fusions

    monkeypatch.setattr(sys.modules["gpt_steps"], "DEVICE", torch.device("cpu"))
    return fusions


@pytest.mark.parametrize("name", ["124M", "1B", "mixture"])
def test_each_way_takes_a_step_with_the_same_loss(fusions: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    experts = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 32} if name == "mixture" else {}
    given = fusions.CASES[name]
    case = replace(given, sequences=2, length=16, changes=given.changes | TINY | experts)
    losses: list[float] = []
    times: list[float] = []

    def measure(make_step: Any, tokens: int, steps: int, rounds: int) -> dict[str, Any]:
        torch.manual_seed(0)
        losses.append(float(make_step()()))
        assert tokens == 32
        times.append(1.0 + 7 * len(times) % 25)  # the first time is the faster of some, and the second of others
        return {"ms": times[-1], "ms_range": [1.0, 2.0], "peak_gib": 1.0}

    monkeypatch.setattr(sys.modules["gpt_steps"], "measure", measure)
    rows = fusions.measured(case, False, 1, print)
    assert next(iter(rows)) == "whole" and list(rows)[-1] == "eager"
    assert {"attention_fusion", "norm_fusion", "bias_activation_fusion", "cross_entropy_loss_fusion"} < set(rows)
    assert "gradient_accumulation_fusion" in rows and "memory_efficient_layer_norm" in rows
    assert len(losses) == 2 * len(rows)
    turns = [*zip(times[: len(rows)], times[len(rows) :], strict=True)]
    assert {0, 1} == {turn.index(min(turn)) for turn in turns}
    assert [row["ms"] for row in rows.values()] == [min(turn) for turn in turns]  # one rule for all
    assert losses == pytest.approx([losses[0]] * len(losses), rel=2e-2)
    assert not [name for name, row in rows.items() if "error" in row]


def test_every_fusion_has_words_on_the_page(fusions: Any) -> None:
    import fusion_tables

    measured = {name for case in fusions.CASES.values() for name in fusions.ways(case.config())}
    assert measured == set(fusion_tables.WORDS) | {"whole", "eager", "memory_efficient_layer_norm"}


def test_what_does_not_fit_is_a_line(fusions: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(*given: Any) -> dict[str, Any]:
        raise torch.OutOfMemoryError("no memory")

    said: list[str] = []
    monkeypatch.setattr(sys.modules["gpt_steps"], "measure", measure)
    rows = fusions.measured(fusions.CASES["1B"], False, 1, said.append)
    assert rows["eager"] == {"error": "OutOfMemoryError: no memory"}
    assert said.count("eager: OutOfMemoryError: no memory") == 1


def test_without_a_gpu_it_says_so(fusions: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["fusions.py"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="2"):
        fusions.main()
    assert "fusions.py: needs a GPU" in capsys.readouterr().err
