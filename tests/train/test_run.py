"""`onepass train` from the text to the table, on a model of a few thousand parameters."""

import csv
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from onepass.cli import main
from onepass.gpt import Config
from onepass.gpt.settings import read_yaml
from onepass.train import checkpoint, command, loop
from onepass.train.checkpoint.folders import index_json
from onepass.train.command import _say_where, _settle, _unless_too_large
from onepass.train.layout import ParallelLayout
from onepass.train.loop import TrainRun
from onepass.train.options import Options
from onepass.train.record import Line
from onepass.train.steps import TrainSteps
from onepass.train.table import Variant, Without, _in_turns, _side_by_side, fusions, table_of_fusions, without

SMALL = shlex.split(
    "--num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 2 --vocab-size 300 --seq-length 16 "
    "--micro-batch-size 4 --train-iters 6 --eval-interval 3 --eval-iters 2 --lr-warmup-iters 2 --samples 2 --sample-tokens 5"
)


def train(corpus, *more):
    return main(["train", "--device", "cpu", "--data", str(corpus), *SMALL, *map(str, more)])


def log(folder):
    with (folder / "log.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def losses(folder):
    return [row["loss"] for row in log(folder)]


def test_fusions_are_switched_off_one_by_one_with_what_needs_them():
    config = Config(hidden_dropout=0.1, memory_efficient_layer_norm=True)
    assert fusions(config) == [
        ["attention_fusion"],
        ["apply_rope_fusion", "attention_fusion"],
        ["norm_linear_fusion"],
        ["norm_fusion", "norm_linear_fusion", "memory_efficient_layer_norm"],
        ["bias_activation_fusion"],
        ["bias_dropout_fusion"],
        ["cross_entropy_loss_fusion"],
        ["gradient_accumulation_fusion"],
    ]
    later = {"pipeline_model_parallel_size": 2, "defer_embedding_wgrad_compute": True, "wgrad_deferral_limit": 2}
    for given in (config, Config(**later, untie_embeddings_and_output_weights=True)):
        for names in fusions(given):
            assert not any(getattr(without(given, names), name) for name in names)  # contradicts nothing
        given.reference()
    assert fusions(Config(qk_layernorm=True))[0] == ["attention_fusion"]
    assert fusions(Config(qk_layernorm=True, normalization="LayerNorm"))[0] != ["attention_fusion"]
    idle = fusions(Config(position_embedding_type="none", norm_linear_fusion=False))
    assert ["bias_dropout_fusion"] not in idle and ["apply_rope_fusion", "attention_fusion"] not in idle
    assert ["norm_linear_fusion"] not in idle and ["norm_fusion"] in idle
    assert not fusions(Config().reference())


def test_a_run_leaves_what_it_says(tmp_path, corpus, capsys):
    folder = tmp_path / "run"
    assert train(corpus, "--run-dir", folder) == 0
    names = {path.name.split(".")[0] for path in folder.iterdir()}
    assert names == {"config", "log", "loss", "events", "tokens", "checkpoints", "samples"}
    rows = log(folder)
    assert [int(row["step"]) for row in rows] == list(range(6))
    assert float(rows[-1]["loss"]) < float(rows[0]["loss"])
    assert [row["step"] for row in rows if row["eval_loss"]] == ["2", "5"]
    assert all(float(row["grad_norm"]) > 0 and float(row["tokens_per_s"]) > 0 for row in rows)
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-00000006"]
    said = capsys.readouterr().out
    for words in ("step 6/6", "a step, ms", "memory of the loss, MiB", "operators in a step", "at most"):
        assert words in said
    for words in ("What each fusion brings", "with all of them", "--no-attention-fusion", "--no-gradient-accumulation-fusion"):
        assert words in said
    assert re.search(r"\nMemory: weights \S+ KiB, moments \S+ KiB,.*, activations \S+ .iB, \S+ .iB a block \(", said)
    assert "Memory at most" not in said  # a CPU tells nobody
    held_out = [float(row["eval_loss"]) for row in rows if row["eval_loss"]]
    shown = re.findall(r"step (\d)/6  loss \S+  held-out loss (\S+)", said)
    assert shown == [("3", f"{held_out[0]:.3f}"), ("6", f"{held_out[1]:.3f}")]
    assert re.search(rf"The loss went from \S+ to \S+ in \d+ s; on held-out text it is {held_out[1]:.3f}\.", said)
    assert "The model continues held-out texts." in said and said.count("|||") == 3
    assert not re.search(r"of that|other text|\b1 \w+s\b", said)  # half sentences, and "1 threads"
    assert len((folder / "samples.txt").read_text().split("|||")) == 3
    settings = read_yaml(folder / "config.yaml")
    assert settings["hidden_size"] == 32 and settings["data"] == [str(corpus)]
    assert Config.from_dict({k: v for k, v in settings.items() if k in Config.names()}).num_layers == 2


def test_a_file_gives_the_same_run_and_flags_count_more(tmp_path, corpus):
    first, second, third = (tmp_path / name for name in "abc")
    assert train(corpus, "--run-dir", first, "--no-table", "--no-fusion-table", "--samples", 0) == 0
    config = first / "config.yaml"
    assert main(["train", "--device", "cpu", "--config", str(config), "--run-dir", str(second)]) == 0
    assert losses(second) == losses(first)
    assert main(["train", "--device", "cpu", "--config", str(config), "--run-dir", str(third), "--seed", "7"]) == 0
    assert losses(third) != losses(first)


def test_settings_come_through_a_pipe(tmp_path, corpus, monkeypatch, capsys):
    """As from `--config <(command)`. Of several ranks one would leave the others nothing."""

    def run(folder):
        read, write = os.pipe()
        os.write(write, b"seq_length: 8\n")
        os.close(write)
        more = "--config", f"/dev/fd/{read}", "--train-iters", "1", "--no-table", "--no-fusion-table", "--samples", "0"
        try:
            return main(["train", "--device", "cpu", "--data", str(corpus), "--run-dir", str(folder), *more])
        finally:
            os.close(read)

    assert run(tmp_path / "run") == 0
    assert read_yaml(tmp_path / "run" / "config.yaml")["seq_length"] == 8
    capsys.readouterr()
    monkeypatch.setattr(command, "started", lambda *_: nullcontext(ParallelLayout(torch.device("cpu"), ranks=2)))
    monkeypatch.setattr(command, "watched", lambda *_: nullcontext())
    monkeypatch.setattr(ParallelLayout, "on_all", lambda layout, act: [act()] * layout.ranks)
    monkeypatch.setattr(ParallelLayout, "on_rank", lambda layout, rank, act: act())
    assert run(tmp_path / "other") == 2
    assert re.search(r"--config /dev/fd/\d+ can't be read: it must be a file, but is a named pipe\n$", capsys.readouterr().err)


def test_a_folder_that_has_a_run_is_left_alone(tmp_path, corpus, capsys):
    assert train(corpus, "--run-dir", tmp_path, "--no-table", "--no-fusion-table", "--samples", 0) == 0
    before = (tmp_path / "log.csv").read_text()
    assert train(corpus, "--run-dir", tmp_path) == 2
    assert "has a run already" in capsys.readouterr().err
    assert (tmp_path / "log.csv").read_text() == before


@pytest.mark.parametrize("more", [(), ("--params-dtype", "bf16"), ("--hidden-dropout", 0.1)], ids=["fp32", "bf16", "dropout"])
def test_a_resumed_run_goes_on_exactly(tmp_path, corpus, more):
    whole, half = tmp_path / "whole", tmp_path / "half"
    options = "--no-table", "--no-fusion-table", "--samples", 0, "--save-interval", 3, "--keep-checkpoints", 0, *more
    assert train(corpus, "--run-dir", whole, *options) == 0
    assert train(corpus, "--run-dir", half, *options) == 0
    assert losses(half) == losses(whole)
    (half / "checkpoints" / "step-00000006").rename(half / "gone")
    rows = (half / "log.csv").read_text().splitlines()
    (half / "log.csv").write_text("\n".join([*rows[:5], rows[5][:9]]))  # as a run that was killed leaves it
    assert main(["train", "--device", "cpu", "--resume", str(half), "--no-table", "--no-fusion-table", "--samples", "0"]) == 0
    assert [row["step"] for row in log(half)] == list("012345")
    assert losses(half) == losses(whole)
    assert [row["eval_loss"] for row in log(half)] == [row["eval_loss"] for row in log(whole)]


def test_a_resumed_run_of_before_norm_fusion_keeps_its_norms(tmp_path, corpus, capsys):
    """persist_layer_norm: false meant PyTorch's norms then, and changes nothing in a run of today."""
    old, new = tmp_path / "old", tmp_path / "new"
    quick = "--no-table", "--no-fusion-table", "--samples", 0, "--train-iters"
    assert train(corpus, "--run-dir", old, "--no-persist-layer-norm", "--no-norm-fusion", *quick, 1) == 0
    assert "persist_layer_norm" not in capsys.readouterr().out
    assert train(corpus, "--run-dir", new, "--no-persist-layer-norm", *quick, 1) == 0
    assert "persist_layer_norm changes nothing: norms are onepass's" in capsys.readouterr().out
    for run in (old, new):
        file = run / "config.yaml"
        file.write_text(re.sub(r"norm_fusion: \w+\n", "", file.read_text(), count=1))
    file = checkpoint.find(old) / "checkpoint.json"
    index = json.loads(file.read_text())
    del index["checksum"], index["config"]["norm_fusion"]
    file.write_text(index_json(index))

    def fused(*more):
        assert main(["train", "--device", "cpu", *map(str, [*more, *quick, 2])]) == 0
        return read_yaml(tmp_path / "resumed" / "config.yaml")["norm_fusion"]

    resumed = "--run-dir", tmp_path / "resumed", "--resume"
    assert not fused(*resumed, old)
    assert not fused(*resumed, old, "--config", old / "config.yaml")
    assert fused(*resumed, old, "--norm-fusion")
    assert fused(*resumed, new)


def test_both_curves(tmp_path, corpus, capsys):
    assert train(corpus, "--run-dir", tmp_path / "run", "--compare", "--no-table", "--no-fusion-table", "--samples", 0) == 0
    ours, theirs = losses(tmp_path / "run"), losses(tmp_path / "run" / "reference")
    assert [float(a) for a in ours] == pytest.approx([float(b) for b in theirs], abs=1e-4)
    assert "The two losses are at most" in capsys.readouterr().out


def test_a_curve_that_was_stopped_is_compared_as_far_as_it_goes(tmp_path, capsys):
    lines = [Line(step, 4.0 - step, 0.1, 1.0, 10.0, 1.0) for step in range(4)]
    other = [replace(line, loss=line.loss + 0.25) for line in lines[:2]]
    _say_where(tmp_path, lines, {"onepass": lines, "PyTorch": other}, Console(), ParallelLayout(torch.device("cpu")))
    assert "The two losses are at most 0.25 apart" in capsys.readouterr().out


def test_weights_of_a_step_gone_wrong_are_not_saved(tmp_path, corpus, capsys):
    """Steps that are not logged neither: the checkpoint would push out one of good weights."""
    rate, saves = ("--lr", 1e30, "--lr-warmup-iters", 0, "--clip-grad", 0), ("--save-interval", 2, "--train-iters", 6)
    assert train(corpus, "--run-dir", tmp_path / "run", *rate, *saves, "--log-interval", 100) == 1
    assert "a lower --lr" in capsys.readouterr().err
    assert not list((tmp_path / "run").glob("checkpoints/*/*.safetensors"))


def test_a_loss_that_is_no_number_stops_the_run(tmp_path, corpus, capsys):
    assert train(corpus, "--run-dir", tmp_path / "run", "--lr", 1e30, "--lr-warmup-iters", 0, "--clip-grad", 0) == 1
    assert "a lower --lr" in capsys.readouterr().err


def test_sigterm_saves_and_ends_well(tmp_path, corpus):
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "onepass", "train", "--device", "cpu", "--data", str(corpus), *SMALL]
    source = str(Path(__file__).parents[2] / "src")
    environment = os.environ | {"PYTHONPATH": source, "OMP_NUM_THREADS": "1", "ONEPASS_BACKEND": "torch"}
    with subprocess.Popen(
        [*command, "--train-iters", "100000", "--run-dir", str(folder)], env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        _until(lambda: (folder / "log.csv").exists() and len((folder / "log.csv").read_text().splitlines()) > 4)
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    done = len(log(folder))
    assert [path.name for path in (folder / "checkpoints").iterdir()] == [f"step-{done:08d}"]
    assert f"stopped after step {done}; go on with --resume" in out.replace("\n", " ")


def _until(true, seconds=300):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.05)


def test_a_step_may_be_told_when_the_next_is_on_its_way(tmp_path, corpus, monkeypatch):
    """As on a GPU, which else had nothing to do while its loss is waited for. All is told before it is saved or evaluated."""
    options = "--no-table", "--no-fusion-table", "--samples", 0, "--save-interval", 2, "--eval-interval", 5
    assert train(corpus, "--run-dir", tmp_path / "at once", *options) == 0
    monkeypatch.setattr(TrainRun, "_waits_later", property(lambda run: True, lambda run, late: None), raising=False)
    order = []
    watch(monkeypatch, TrainRun, "_log", lambda run, line: order.append(f"told {line.step}"))
    watch(monkeypatch, TrainSteps, "run", lambda *given: order.append("run"))
    watch(monkeypatch, checkpoint, "save", lambda *given: order.append("saved"))
    assert train(corpus, "--run-dir", tmp_path / "later", *options) == 0
    one, other = (log(tmp_path / name) for name in ("at once", "later"))
    same = ("step", "loss", "lr", "grad_norm", "eval_loss")
    assert [[row[key] for key in same] for row in one] == [[row[key] for key in same] for row in other]
    assert " ".join(order) == "run run told 0 told 1 saved run run told 2 told 3 saved run told 4 run told 5 saved"


def test_a_steps_rate_is_of_its_own_time(tmp_path, corpus, monkeypatch):
    """Though it is told with the one before, where its call has waited for the device."""
    now = [0.0]
    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=lambda: now[0], monotonic=time.monotonic))
    monkeypatch.setattr(TrainRun, "_waits_later", property(lambda run: True, lambda run, late: None), raising=False)
    watch(monkeypatch, TrainSteps, "run", lambda *given: now.append(now.pop() + 0.5))
    for name in ("save", "_evaluated"):
        watch(monkeypatch, checkpoint if name == "save" else TrainRun, name, lambda *given: now.append(now.pop() + 7.0))
    options = "--no-table", "--no-fusion-table", "--samples", 0, "--save-interval", 2, "--eval-interval", 3
    assert train(corpus, "--run-dir", tmp_path / "run", *options) == 0
    rates = {float(row["tokens_per_s"]) for row in log(tmp_path / "run")}
    assert len(rates) == 1 and rates.pop() < 1e6


def test_times_of_a_gpu_are_those_of_its_events(monkeypatch):
    class Event:
        def __init__(self, enable_timing):
            self.timed, self.waited = enable_timing, False

        def record(self, stream):
            self.stream = stream

        def synchronize(self):
            self.waited = True

        def elapsed_time(self, later):
            assert later.waited and self.timed and later.timed and self.stream == later.stream == "the stream of cuda:1"
            return 1500.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"the stream of {device}")
    first, second = (loop._EndTime(torch.device("cuda", 1)) for _ in range(2))
    assert second.since(first) == 1.5


def watch(monkeypatch, owner, name, look):
    stock = getattr(owner, name)

    def called(*args, **options):
        look(*args)
        return stock(*args, **options)

    monkeypatch.setattr(owner, name, called)


def test_how_often_is_logged(tmp_path, corpus):
    options = "--no-table", "--no-fusion-table", "--samples", 0, "--eval-iters", 0
    assert train(corpus, "--run-dir", tmp_path, "--log-interval", 4, *options) == 0
    assert [row["step"] for row in log(tmp_path)] == ["3", "5"]  # and the last


@pytest.mark.parametrize("asked", (True, False))
def test_bits_are_the_same_where_it_is_asked_for(asked):
    _settle(Options(deterministic=asked))
    assert torch.are_deterministic_algorithms_enabled() == asked


def test_on_a_cpu_the_ways_of_a_small_model_take_turns():
    """What else the machine does slows all of them, and the best of rounds that lie apart counts."""
    called, busy = [], {"a": [0.0, 0.0, 0.03, 0.0, 0.0, 0.0, 0.0], "b": [0.03, 0.03, 0.03, 0.03, 0.03, 0.0, 0.0]}

    def step(name, number, lr):
        called.append(name)
        time.sleep(0.002 + busy[name].pop(0))

    (a, a_unrest), (b, b_unrest) = _in_turns([partial(step, "a"), partial(step, "b")])
    assert "".join(called) == "abaabbaabbaabb"
    assert 2.0 <= a < 15.0 and 2.0 <= b < 15.0
    assert a_unrest > 1.5 and b_unrest > 1.5
    on_cpu, on_gpu = (SimpleNamespace(device=torch.device(kind)) for kind in ("cpu", "cuda"))
    small, large = Config(), Config(num_layers=48, hidden_size=2048)
    variants = [Variant(config, None, layout, None) for config, layout in ((small, on_cpu), (large, on_cpu), (small, on_gpu))]
    assert [_side_by_side(variant, 10) for variant in variants] == [True, False, False]


def test_the_table_of_fusions_is_set_beside_the_better_of_two():
    runs = [Without([], 30.0, 4.0), Without(["--no-rope-fusion"], 12.0, 5.0), Without([], 10.0, 4.0)]
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(table_of_fusions(runs))
    said = console.export_text()
    assert "10.0" in said and "30.0" not in said
    assert "+20.0%" in said and "+25.0%" in said and "--no-rope-fusion" in said
    assert "busy" not in said
    runs[1].unrest = 2.6
    console.print(table_of_fusions(runs))
    assert "The machine was busy: times of the same step differ by up to 2.6 x" in " ".join(console.export_text().split())


def test_what_does_not_fit_beside_a_run_has_a_line_in_place_of_a_table():
    out = io.StringIO()
    with _unless_too_large("PyTorch's operators take", "--no-table", Console(file=out, width=200)):
        raise torch.OutOfMemoryError("none left")
    said = "PyTorch's operators take more memory than there is, so there is no table of it; --no-table does not try."
    assert out.getvalue() == said + "\n"
    with pytest.raises(RuntimeError, match="another"), _unless_too_large("", "", Console(file=out)):
        raise RuntimeError("another")
