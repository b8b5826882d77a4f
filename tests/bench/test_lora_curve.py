"""benchmarks/lora_curve.py: its runs made small, and what it makes of their losses."""

import importlib
import json
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

pytest.importorskip("transformers", minversion="5")
pytest.importorskip("peft")

import onepass
from onepass.integrations.huggingface import mlps

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")  # transformers' own


@pytest.fixture
def bench():
    with mock.patch.object(sys, "path", [str(Path(__file__).parents[2] / "benchmarks"), *sys.path]):
        return importlib.import_module("lora_curve")


def test_a_run(bench, tmp_path, monkeypatch):
    """All runs of a seed begin with one loss, and onepass's ops are in one of them."""
    adapted, stock = [], mlps.activation_linear
    monkeypatch.setattr(mlps, "activation_linear", lambda *a, lora, **o: adapted.append(len(lora)) or stock(*a, lora=lora, **o))
    path = tmp_path / "curve.json"
    arguments = ["lora_curve.py", "--quick", "--steps", "6", "--seeds", "2", "--length", "16", "--json", str(path)]
    with mock.patch.object(sys, "argv", arguments), onepass.use_backend("torch"):
        bench.main()
    found = json.loads(path.read_text())
    assert {"commit", "gpu", "versions"} < found.keys() and set(found["losses"]) == set(bench.RUNS)
    curves = torch.tensor([found["losses"][name] for name in bench.RUNS])
    assert curves.shape == (5, 2, 6)
    assert (curves[:, :, 0] - curves[0, :, 0]).abs().max() < 0.02
    assert (curves[0, 0] - curves[0, 1]).abs().mean() > 1e-3  # seeds
    assert len(set(map(str, found["losses"].values()))) >= len(bench.RUNS) - 1  # reordered: sums of gradients differ in last bits
    assert adapted == [1] * 2 * 6 * 2  # layers, steps and seeds


def test_distances(bench):
    steps = torch.zeros(2, 12, dtype=torch.float64)
    found = {name: steps + i for i, name in enumerate(bench.RUNS)}  # PEFT 0, onepass 1, autocast 2, reordered 3, fp32 4
    found["onepass"][1, -1] = -6.0
    found["PEFT"][1] += 0.5
    rows = {(row["run"], row["beside"]): row for row in bench.distances(found)}
    ours = rows["onepass", "PEFT"]
    assert ours["mean"] == pytest.approx((12 * 1 + 11 * 0.5 + 6.5) / 24) and ours["most"] == 6.5
    assert ours["end"] == pytest.approx(3.0)  # the second seed's last two: .5 and -6.5
    assert rows["PEFT", "another seed"]["mean"] == pytest.approx(0.5)
    shares = bench.of_noise(list(rows.values()))
    assert shares["from PEFT, of PEFT's under autocast"] == pytest.approx(1.0 / 1.75)
    assert shares["from PEFT in fp32, of PEFT's"] == pytest.approx((11 * 3 + 10 + 12 * 3) / 24 / 3.75)
