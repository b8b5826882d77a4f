"""benchmarks/graphed_trainer.py on a small model: each way that a CPU has trains, and times are of rounds of steps."""

import importlib
import json
import sys
from pathlib import Path
from unittest import mock

import pytest

pytest.importorskip("transformers", minversion="5")
pytest.importorskip("accelerate")

import onepass


@pytest.fixture
def bench():
    with mock.patch.object(sys, "path", [str(Path(__file__).parents[2] / "benchmarks"), *sys.path]):
        return importlib.import_module("graphed_trainer")


@pytest.fixture
def ticking(bench, monkeypatch):
    """A clock on which a step takes 5 ms."""
    ticks = iter(range(1000))
    monkeypatch.setattr(bench, "time", mock.Mock(perf_counter=lambda: next(ticks) * 0.01))


def test_a_run(bench, ticking, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "WARM", 2)
    monkeypatch.setattr(bench, "ROUNDS", 1)
    path, ways = tmp_path / "run.json", ("eager", "onepass graph, main_grad", "graphed_step")
    argv = ["graphed_trainer.py", "--small", "--rows", "2", "--length", "8", "6", "--steps", "2", "--json", str(path)]
    for way in ways:
        argv += ["--way", way]
    with mock.patch.object(sys, "argv", argv), onepass.use_backend("torch"):
        bench.main()
    found = json.loads(path.read_text())
    assert {"commit", "gpu", "versions"} < found.keys() and found["lengths"] == [8, 6]
    assert [found["rows"][way]["ms"] for way in ways] == pytest.approx([5.0] * 3)
    losses = [found["rows"][way]["loss"] for way in ways]
    assert losses == pytest.approx([losses[0]] * 3, rel=0.02)
    assert "weights on cpu" in found["rows"]["onepass graph, main_grad"]["graphs"]
    assert "Trainer, 2 x 8, 6" in capsys.readouterr().out


class _Given(Exception):
    """The arguments that Trainer was given."""


@pytest.mark.parametrize(
    ("way", "compiled"),
    [("compile", (True, None)), ("compile, CUDA graphs", (True, "reduce-overhead")), ("eager", (False, None))],
)
def test_the_compiler_runs_with_cuda_graphs_and_without(bench, way, compiled, monkeypatch):
    import transformers

    def trainer(args, **_):
        raise _Given(args)

    monkeypatch.setattr(transformers, "Trainer", trainer)
    monkeypatch.setattr(bench, "model_of", mock.Mock())
    monkeypatch.setattr(bench, "RandomRows", mock.Mock())
    with mock.patch.dict("os.environ"), pytest.raises(_Given) as raised:  # TrainingArguments sets variables
        bench.by_trainer(way, mock.Mock(steps=1, rows=1, small=True), mock.Mock())
    given = raised.value.args[0]
    assert way in bench.WAYS and (given.torch_compile, given.torch_compile_mode) == compiled


def test_lengths_change_from_batch_to_batch(bench):
    rows = bench.RandomRows(3, 2, [8, 6], 100)
    assert [len(rows[at]["input_ids"]) for at in range(len(rows))] == [8, 8, 6, 6, 8, 8]
    assert [tuple(batch.shape) for batch in bench._batches(rows, 2, 2)] == [(2, 8), (2, 6)]
