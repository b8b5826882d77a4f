"""benchmarks/optimizers.py: its contenders step a small model, peers by stand-ins, and times are shares of the faster peer's."""

import importlib
import json
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

pytest.importorskip("transformers", minversion="5")

import onepass


@pytest.fixture
def bench():
    with mock.patch.object(sys, "path", [str(Path(__file__).parents[2] / "benchmarks"), *sys.path]):
        return importlib.import_module("optimizers")


def test_a_run(bench, tmp_path, monkeypatch):
    made = []

    def peer(module, name):
        made.append(f"{module}.{name}")
        return torch.optim.AdamW

    monkeypatch.setattr(bench, "imported", peer)
    monkeypatch.setattr(bench, "version_of", {"torchao": "1"}.get)
    monkeypatch.setattr(bench, "step_ms", lambda step, rounds, steps: ([1.0], [1.0]))
    monkeypatch.setattr(bench, "clock_for", lambda device: mock.Mock(median=lambda step, rounds: 1.0))
    path = tmp_path / "optimizers.json"
    argv = ["optimizers.py", "--small", "--layers", "1", "--length", "8", "--json", str(path)]
    with mock.patch.object(sys, "argv", argv), onepass.use_backend("torch"):
        bench.main()
    found = json.loads(path.read_text())
    assert {"commit", "gpu", "versions", "parameters"} < found.keys() and made == ["torchao.optim.AdamW8bit"]
    rows = {row["name"]: row for row in found["rows"]}
    assert set(rows) == set(bench.CONTENDERS) - {"bitsandbytes"}
    assert [name for name, row in rows.items() if "step_ms" not in row] == ["onepass in backward", "none"]
    assert {row["whole_of_peer"] for row in rows.values()} == {1.0}


def test_shares_are_of_the_faster_peer_at_as_many_tokens(bench):
    times = {("onepass", 8): 3.0, ("torchao", 8): 5.0, ("bitsandbytes", 8): 4.0, ("onepass", 2): 3.0, ("torchao", 2): 2.0}
    rows = [{"name": name, "tokens": tokens, "whole_ms": ms} for (name, tokens), ms in times.items()]
    assert [row["whole_of_peer"] for row in bench.with_shares(rows)] == [0.75, 1.25, 1.0, 1.5, 1.0]
    assert "step_of_peer" not in rows[0]
