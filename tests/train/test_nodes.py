"""Runs of two machines that torchrun starts, with a disk each or a shared one. A machine is killed; disks change places."""

import re
import shlex
import shutil
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from parallel import worlds
from parallel.meeting import launched, meet_at
from train.checkpoint_runs import whole
from train.machines import two_machines

import onepass
from onepass.cli import main
from onepass.train import checkpoint, loop
from onepass.train import record as run_record
from onepass.train.record import read_log

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="this PyTorch has no gloo")
SCRIPT = Path(__file__).with_name("node_run.py")
SMALL = shlex.split(
    "--device cpu --num-layers 1 --hidden-size 16 --ffn-hidden-size 16 --num-attention-heads 2 --vocab-size 300 --seq-length 16 "
    "--micro-batch-size 2 --lr-warmup-iters 2 --eval-iters 0 --samples 1 --sample-tokens 2 --no-table --no-fusion-table "
    "--use-distributed-optimizer --save-interval 5 --keep-checkpoints 0"
)
STEPS, DIES_AT, SAVED = 16, 13, 10


@pytest.fixture(scope="module")
def straight(tmp_path_factory, corpus):
    """The folder of the same run on two ranks of one machine, which nothing has interrupted."""
    folder = tmp_path_factory.mktemp("straight")
    worlds.started(run_straight, (2, str(folder), str(corpus)), 2)
    return folder / "run"


def run_straight(rank, ranks, folder, corpus):
    torch.set_num_threads(1)
    launched(rank, ranks)
    meet_at(f"{folder}/meeting", rank, ranks)
    loop.MatrixPeak = run_record.draw = lambda *args: None
    with onepass.use_backend("torch"):
        assert main(["train", *SMALL, "--data", corpus, "--run-dir", f"{folder}/run", "--train-iters", str(STEPS)]) == 0


def ended(*processes, seconds=240):
    """Wait for processes, which end without error, and return what they said."""
    statuses = [process.wait(seconds) for process in processes]
    said = [process.output.read_text() for process in processes]
    assert not any(statuses), said
    return said


def gathered(folder, *nodes):
    """Copy the files of a checkpoint's nodes to one folder, and return its tensors."""
    for node in nodes:
        shutil.copytree(node, folder, dirs_exist_ok=True)
    return whole(folder)


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_killed_machine_comes_back_and_the_run_goes_on(straight, corpus, tmp_path):
    """Each machine has its own disk. Later the disks change places."""
    with two_machines(tmp_path) as (a, b):
        arguments = [SCRIPT, *SMALL, "--data", corpus, "--run-dir", "run", "--train-iters", STEPS]
        first, second = (
            each.start(*arguments, restarts=3, DIES_AT=str(DIES_AT), WITH_TORCHRUN="1") for each in (a, b)
        )  # fmt: skip
        assert second.wait(240) == -signal.SIGKILL, second.output.read_text()
        before = read_log(a.folder / "run" / "log.csv")
        said = ended(first, b.start(*arguments, restarts=3))
        assert re.search(
            rf"restarted (1 of 3 times by torchrun|by torchrun with a new node): going on from step {SAVED}, run/checkpoints/",
            said[0],
        )
        assert "2 nodes have a folder each, with tokens and a part of each checkpoint. Its files are in run." in said[0]
        assert said[1].count("trains for") == 0
        log, uninterrupted = (read_log(place / "log.csv") for place in (a.folder / "run", straight))
        once, values, expected = (
            [(line.step, line.loss, line.grad_norm) for line in lines] for lines in (before, log, uninterrupted)
        )  # fmt: skip
        assert len(once) > SAVED and once == expected[: len(once)]  # steps that were made again have the same bits
        assert values == expected
        path = Path("checkpoints", f"step-{STEPS:08}")
        assert not (a.folder / "run" / path / "1.safetensors").exists() and not (b.folder / "run" / "log.csv").exists()
        parts = [each.folder / "run" / path for each in (a, b)]
        assert same(gathered(tmp_path / "whole", *parts), whole(straight / path))
        assert not any((each.folder / "run" / ".torchrun").exists() for each in (a, b))

        swapped(a, b, corpus, straight)


def swapped(a, b, corpus, straight):
    """The disks change places: each rank's part is on the other machine, as are settings and log."""
    a.folder, b.folder = b.folder, a.folder
    (b.folder / "run" / "config.yaml").unlink()
    arguments = [SCRIPT, "--device", "cpu", "--resume", f"run/checkpoints/step-{SAVED:08}", "--data", corpus]
    said = ended(a.start(*arguments), b.start(*arguments))
    assert "step 11/16" in said[0], said
    log, uninterrupted = (read_log(place / "log.csv") for place in (a.folder / "run", straight))
    assert [(line.step, line.loss) for line in log] == [(line.step, line.loss) for line in uninterrupted]
    assert (a.folder / "run" / "checkpoints" / f"step-{SAVED:08}" / "0.safetensors").exists()


def test_a_shared_disk_and_a_folder_named_by_the_time(straight, corpus, tmp_path):
    """A worker dies. The run is found again by the torchrun process that began it."""
    with two_machines(tmp_path) as (a, b):
        b.folder = a.folder
        arguments = [SCRIPT, *SMALL, "--data", corpus, "--train-iters", STEPS]
        said = ended(*[each.start(*arguments, restarts=2, DIES_AT=str(DIES_AT)) for each in (a, b)])
        assert re.search(rf"restarted (1 of 2 times by torchrun|.* new node): going on from step {SAVED}, runs/", said[0]), said
        (run,) = (a.folder / "runs").iterdir()
        assert "2 nodes share one folder." in said[0]
        assert same(whole(checkpoint.find(run)), whole(checkpoint.find(straight)))
