"""Runs that are interrupted, refused or out of disk space: what they leave, and what they say."""

import contextlib
import errno
import fcntl
import io
import json
import os
import resource
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from argparse import Namespace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from parallel import worlds
from parallel.meeting import launched, meet_at
from rich.console import Console
from train.checkpoint_runs import flip

import onepass
from onepass.cli import main
from onepass.gpt import Config
from onepass.runtime.errors import CommandError
from onepass.train import layout, loop, run_lock, text
from onepass.train.beginning import find_beginning, find_place
from onepass.train.layout import ParallelLayout, one_line_of_all_ranks
from onepass.train.loop import TrainRun
from onepass.train.options import Options
from onepass.train.run_lock import locked
from onepass.train.steps import TrainSteps

SMALL = shlex.split(
    "--device cpu --num-layers 1 --hidden-size 16 --ffn-hidden-size 16 --num-attention-heads 2 --vocab-size 300 --seq-length 16 "
    "--micro-batch-size 2 --train-iters 6 --lr-warmup-iters 2 --eval-iters 0 --samples 0 --no-table --no-fusion-table"
)


@pytest.fixture(autouse=True)
def no_peak(monkeypatch):
    monkeypatch.setattr(loop, "MatrixPeak", lambda device, dtype: None)


@pytest.fixture(autouse=True)
def _heard():
    """A shell starts what runs in the background with Ctrl-C ignored, and a run leaves that so."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def ended(tmp_path_factory, corpus):
    folder = tmp_path_factory.mktemp("ended") / "run"
    assert train(corpus, folder, "--save-interval", 4, "--keep-checkpoints", 0) == 0
    return folder


@pytest.fixture
def run(ended, tmp_path):
    """The folder of a run that has ended."""
    return shutil.copytree(ended, tmp_path / "run")


def train(corpus, folder, *more):
    return main(["train", *SMALL, "--data", str(corpus), "--run-dir", str(folder), *map(str, more)])


def resume(folder, *more):
    return main(["train", "--device", "cpu", "--resume", str(folder), "--train-iters", "8", *more])


def content(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def steps(folder):
    return sorted(int(path.name.removeprefix("step-")) for path in (folder / "checkpoints").iterdir())


def signals(monkeypatch, *numbers):
    """Send this process these signals in its third step."""
    stock, calls = TrainSteps.run, []

    def sending(self, batch):
        calls.append(batch)
        if len(calls) == 3:
            for number in numbers:
                signal.raise_signal(number)
        return stock(self, batch)

    monkeypatch.setattr(TrainSteps, "run", sending)
    return calls


# ---- signals ----


def test_ctrl_c_saves_and_says_how_to_go_on(tmp_path, corpus, monkeypatch, capfd):
    folder = tmp_path / "run"
    signals(monkeypatch, signal.SIGINT)
    assert train(corpus, folder) == 130
    said = capfd.readouterr()
    assert steps(folder) == [3] and len((folder / "log.csv").read_text().splitlines()) == 4
    assert f"stopped after step 3; go on with --resume {folder}" in said.out
    assert f"{folder} has log.csv, loss.png and the checkpoints" in said.out  # not samples.txt, which is not there
    assert said.err == "\nstopping after this step, with a checkpoint; Ctrl-C again ends at once\n"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_ctrl_c_ends_at_once(tmp_path, corpus, monkeypatch):
    signals(monkeypatch, signal.SIGINT, signal.SIGINT)
    assert train(corpus, tmp_path) == 130
    assert not (tmp_path / "checkpoints").exists()


def test_ctrl_c_before_the_first_step_ends_at_once(tmp_path, corpus, monkeypatch):
    monkeypatch.setattr(text, "prepare", lambda *_, **__: signal.raise_signal(signal.SIGINT))
    assert train(corpus, tmp_path / "run") == 130
    assert not (tmp_path / "run").exists()


def test_ctrl_c_that_is_ignored_stays_so(tmp_path, corpus, monkeypatch):
    """As in a script that starts the run in the background."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        calls = signals(monkeypatch, signal.SIGINT)
        assert train(corpus, tmp_path) == 0 and len(calls) == 6
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_signal_during_the_last_save_ends_before_the_tables(tmp_path, corpus, monkeypatch):
    stock = loop.checkpoint.save
    monkeypatch.setattr(loop.checkpoint, "save", lambda *a, **by: (signal.raise_signal(signal.SIGINT), stock(*a, **by)))
    monkeypatch.setattr(TrainRun, "samples", lambda run: pytest.fail("the run was to stop"))
    assert train(corpus, tmp_path) == 130
    assert steps(tmp_path) == [6]


def test_a_stopped_comparison_measures_nothing(tmp_path, corpus, monkeypatch, capsys):
    stock = TrainRun.train

    def train_both(run):
        if run.plain:
            signals(monkeypatch, signal.SIGTERM)
        return stock(run)

    monkeypatch.setattr(TrainRun, "train", train_both)
    assert train(corpus, tmp_path, "--compare", "--table", "--log-interval", 6) == 0
    said = capsys.readouterr().out
    assert "stopped after step 3\n" in said and "measuring" not in said and "a step, ms" not in said


# ---- a command that is started again ----


def test_one_command_begins_and_goes_on(tmp_path, corpus, monkeypatch, capsys):
    """As under a scheduler, which knows no other. A damaged checkpoint is passed over, and the folder need have none."""
    folder = tmp_path / "run"
    again = partial(train, corpus, folder, "--resume-if-exists", "--save-interval", 2)
    with monkeypatch.context() as patch:
        signals(patch, signal.SIGTERM)
        assert again() == 0
    assert "going on" not in capsys.readouterr().out and steps(folder) == [2, 3]
    flip(folder / "checkpoints" / "step-00000003" / "0.safetensors", 5000)
    assert again() == 0
    said = capsys.readouterr().out
    assert f"passed over: the checkpoint {folder}/checkpoints/step-00000003 is damaged: 0.safetensors has changed since" in said
    assert f"going on from step 2, {folder}/checkpoints/step-00000002\n" in said and steps(folder) == [4, 6]
    assert [line.split(",")[0] for line in (folder / "log.csv").read_text().splitlines()] == ["step", *"012345"]
    shutil.rmtree(folder / "checkpoints")
    assert again() == 0 and steps(folder) == [4, 6]  # from the first step on
    assert train(corpus, folder) == 2  # without the flag the folder has a run
    assert main(["train", *SMALL, "--data", str(corpus), "--resume-if-exists"]) == 2
    assert capsys.readouterr().err.endswith("--resume-if-exists needs --run-dir, the folder of its run, and no --resume\n")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda path: (path / "0.safetensors").rename(path.parents[2] / "away"), " lacks 0.safetensors"),
        (
            lambda path: (path / "checkpoint.json").write_text("{"),
            " is damaged: {path}/checkpoint.json can't be read: ",
        ),
        (
            lambda path: flip(path / "0.safetensors", 5000),
            " is damaged: 0.safetensors has changed since it was written, in ",
        ),
    ],
    ids=["a part is away", "its index", "its bits"],
)
@pytest.mark.parametrize("torchrun", (False, True))
def test_checkpoints_of_which_none_can_be_used_are_no_new_run(change, said, torchrun, run, corpus, monkeypatch, capsys):
    """They are left as they are: a disk may not be mounted. An older whole one is gone on with."""
    older, path = (run / "checkpoints" / f"step-0000000{step}" for step in (4, 6))
    shutil.move(older, run / "older")
    change(path)
    flags = () if torchrun else ("--resume-if-exists",)
    if torchrun:
        marked(run, monkeypatch)
    before = content(run)
    assert train(corpus, run, *flags, "--keep-checkpoints", 1) == 2
    error = capsys.readouterr().err
    assert f"{run} must have a whole checkpoint to go on from, but the checkpoint {path}{said.format(path=path)}" in error
    assert error.endswith("start the nodes that have the files, or copy them to any node; another --run-dir begins a new run\n")
    assert content(run) == before
    shutil.move(run / "older", older)
    assert train(corpus, run, *flags, "--keep-checkpoints", 1) == 0
    out = capsys.readouterr().out
    assert f"passed over: the checkpoint {path}{said.format(path=path)}" in out and f"going on from step 4, {older}\n" in out


def marked(run, monkeypatch):
    """Make this a process of the torchrun process that trains in a folder."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "/tmp/torchelastic_a/none_1/attempt_1/0/error.json")
    agents = [f"{socket.gethostname()} /tmp/torchelastic_a/none_1"]
    (run / ".torchrun").write_text(json.dumps({"agents": agents, "number": 0}))


@pytest.mark.parametrize("given", ("run", "run/checkpoints/step-00000004", "a link", "run/checkpoints/newest"))
def test_a_restart_is_recognised_whatever_resume_names(given, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for link in ("a link", "run/checkpoints/newest"):
        (tmp_path / link).symlink_to(run / "checkpoints" / "step-00000004")
    marked(run, monkeypatch)
    alone, args = ParallelLayout(torch.device("cpu")), Namespace(folder=None, resume=Path(given), resume_if_exists=False)
    place = find_place(args, alone)
    assert place.again and place.folder.samefile(run)
    begin = find_beginning(args, place, alone)
    assert begin.resume.samefile(run / "checkpoints" / "step-00000006") and begin.verified and begin.number == 0
    monkeypatch.chdir(run)
    args = Namespace(folder=Path("."), resume=None, resume_if_exists=True)
    assert find_beginning(args, find_place(args, alone), alone).resume == Path("checkpoints/step-00000006")


def test_a_restart_waits_for_its_predecessor(run, corpus, monkeypatch, capsys):
    """What that saves meanwhile is gone on from."""
    path, waited = run / "checkpoints" / "step-00000006", []
    shutil.move(path, run / "later")

    def wait(seconds):
        waited.append(seconds)
        if len(waited) == 3:
            shutil.move(run / "later", path)
            predecessor.__exit__(None, None, None)

    monkeypatch.setattr(run_lock.time, "sleep", wait)
    predecessor = locked(run, ParallelLayout(torch.device("cpu")), print)
    predecessor.__enter__()
    assert train(corpus, run, "--resume-if-exists", "--train-iters", 7) == 0
    out = capsys.readouterr().out
    owner = f"process {os.getpid()} on {socket.gethostname()}"
    assert out.count(f"{run} must have one run at a time, but {owner} trains there: wait for it, for 120 s\n") == 1
    assert waited[:3] == [1.0] * 3 and f"going on from step 6, {path}\n" in out
    monkeypatch.setattr(run_lock.time, "sleep", waited.append)
    waited.clear()
    with locked(run, ParallelLayout(torch.device("cpu")), print):
        assert train(corpus, run, "--resume-if-exists") == 2
    assert waited == [1.0] * 120 and " trains there: wait for it\n" in capsys.readouterr().err


def test_a_process_that_torchrun_has_started_again_goes_on(tmp_path, corpus, monkeypatch, capsys):
    """By what its folder says of torchrun, whatever the count. Another torchrun is refused, and so is a run that has ended."""
    monkeypatch.chdir(tmp_path)

    def start(agent, times):
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", f"/tmp/torchelastic_{agent}/none_1/attempt_{times}/0/error.json")
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(times))
        monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
        return main(["train", *SMALL, "--data", str(corpus), "--save-interval", "2"])

    def broken(self, batch):
        calls.append(batch)
        if len(calls) == 4:
            raise RuntimeError("lost")
        return stock(self, batch)

    calls, stock = [], TrainSteps.run
    with monkeypatch.context() as patch:
        patch.setattr(TrainSteps, "run", broken)
        with pytest.raises(RuntimeError, match="lost"):
            start("a", 0)
    (run,) = (tmp_path / "runs").iterdir()
    assert (run / ".torchrun").exists()
    capsys.readouterr()
    assert start("a", 1) == 0
    assert f"restarted 1 of 3 times by torchrun: going on from step 2, runs/{run.name}/" in capsys.readouterr().out
    assert list((tmp_path / "runs").iterdir()) == [run] and not (run / ".torchrun").exists()
    for agent, number in (("a", 9), ("b", 9)):  # checkpoints before its own are not its own
        (run / ".torchrun").write_text(
            json.dumps({"agents": [f"{socket.gethostname()} /tmp/torchelastic_a/none_1"], "number": number})
        )
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", f"/tmp/torchelastic_{agent}/none_1/attempt_0/0/error.json")
        assert train(corpus, run) == {"a": 0, "b": 2}[agent]
    said = capsys.readouterr()
    assert "restarted 1 of 3 times by torchrun: beginning anew, as there was no checkpoint yet" in said.out
    assert "has a run already" in said.err


# ---- saves by time ----


@pytest.mark.parametrize(
    ("more", "saved"),
    [((), [6]), (("--save-minutes", 1e-9), [1, 2, 3, 4, 5, 6]), (("--save-minutes", 1e-9, "--save-interval", 4), [4, 6])],
)
def test_saves_by_time(more, saved, tmp_path, corpus, monkeypatch):
    monkeypatch.setattr(loop, "_SAVING", 0)
    assert train(corpus, tmp_path, "--keep-checkpoints", 0, *more) == 0
    assert steps(tmp_path) == saved


@pytest.mark.parametrize(("minutes", "took", "seconds"), [(10.0, 1.0, 600.0), (10.0, 60.0, 1200.0), (0.0, 1.0, float("inf"))])
def test_a_slow_save_is_made_less_often(minutes, took, seconds, tmp_path):
    alone = ParallelLayout(torch.device("cpu"))
    run = TrainRun(Config(), Options(save_minutes=minutes), alone, tmp_path, Console())
    run._save_by_time(took)
    assert run._save_at - time.monotonic() == pytest.approx(seconds, abs=60.0)


# ---- what is refused changes nothing ----


def truncated(run):
    path = run / "checkpoints" / "step-00000006" / "0.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def broken_number(run):
    path = run / "log.csv"
    path.write_text(path.read_text().replace(",5.", ",5.x", 1))


def broken_line(run):
    path = run / "log.csv"
    path.write_text(path.read_text().replace("\n3,", "\n3\n3,"))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (truncated, "0.safetensors must be of"),
        (
            broken_number,
            "tokens_per_s, seconds, memory_gib, eval_loss in line 2, but has '0,5.x",
        ),
        (broken_line, "in line 5, but has '3': correct it, or move the file away"),
    ],
)
def test_a_refused_resume_changes_nothing(damage, said, run, capsys):
    damage(run)
    before = content(run)
    assert resume(run, "--lr", "0.5") == 2
    written = capsys.readouterr().err.strip()
    assert said in written and "\n" not in written
    assert content(run) == before


def test_a_full_disk_leaves_what_was_there(run, capsys):
    before = content(run)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        assert resume(run, "--lr", "0.5") == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert capsys.readouterr().err == f"onepass train: {run} can't be written: File too large\n"
    assert content(run) == before
    assert resume(run) == 0


def test_a_full_disk_leaves_the_settings_that_were_there(run, capsys):
    """Of the two files that a resumed run writes, the log fits here, and the settings do not."""
    before, limits = (run / "config.yaml").read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    assert (run / "log.csv").stat().st_size < 1000 < len(before)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        assert resume(run, "--lr", "0.5") == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert capsys.readouterr().err == f"onepass train: {run}/config.yaml: File too large\n"
    assert (run / "config.yaml").read_bytes() == before


def test_a_log_without_the_end_of_its_last_line_is_read(run):
    path = run / "log.csv"
    whole = path.read_text()
    path.write_text(whole[:-1] + "2.34")  # a value that may have had more digits
    assert resume(run) == 0
    assert [line.split(",")[0] for line in path.read_text().splitlines()] == ["step", *"0123467"]


# ---- two processes and one run ----

HOLDING = """
import sys, time
from pathlib import Path
import torch
from onepass.train.layout import ParallelLayout
from onepass.train.run_lock import locked
with locked(Path(sys.argv[1]), ParallelLayout(torch.device("cpu")), print):
    print("locked", flush=True)
    time.sleep(100)
"""


def test_a_run_is_one_process_at_a_time(run, corpus, capsys):
    """The other one is killed, and leaves its lock."""
    before = content(run)
    with subprocess.Popen([sys.executable, "-c", HOLDING, str(run)], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "locked\n"
        assert resume(run) == train(corpus, run) == 2
        owner = f"process {other.pid} on {socket.gethostname()}"
        said = f"onepass train: {run} must have one run at a time, but {owner} trains there: wait for it\n"
        assert capsys.readouterr().err == 2 * said
        assert {path: data for path, data in content(run).items() if path.name != ".lock"} == before
        other.kill()
    assert (run / ".lock").exists()
    assert resume(run) == 0
    assert not (run / ".lock").exists()


def test_new_runs_in_one_folder_are_one_at_a_time(tmp_path, corpus, capsys):
    alone = ParallelLayout(torch.device("cpu"))
    with locked(tmp_path / "a" / "run", alone, print):
        assert train(corpus, tmp_path / "a" / "run") == 2
        assert "/a/run must have one run at a time, but process" in capsys.readouterr().err
        other = ParallelLayout(torch.device("cpu"), rank=1)
        with locked(tmp_path / "a" / "run", other, print):  # another rank of the same run locks nothing
            pass
    assert not (tmp_path / "a").exists()


def test_a_lock_that_goes_while_another_process_opens_it_is_none(tmp_path, monkeypatch):
    alone, flock, removed = ParallelLayout(torch.device("cpu")), fcntl.flock, []

    def late(number, how):
        if not removed:
            removed.append((tmp_path / ".lock").unlink())  # as its owner does at its end
        flock(number, how)

    monkeypatch.setattr(run_lock.fcntl, "flock", late)
    with locked(tmp_path, alone, print):
        assert (tmp_path / ".lock").read_text() == f"process {os.getpid()} on {socket.gethostname()}\n"
        with pytest.raises(CommandError, match="must have one run at a time"), locked(tmp_path, alone, print):
            pass


def test_a_filesystem_on_which_no_file_is_itself_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock.os.path, "samestat", lambda one, other: next(asked))
    asked = iter([False] * 1000)  # a StopIteration after
    run = tmp_path / "run"
    with pytest.raises(CommandError) as refused, locked(run, ParallelLayout(torch.device("cpu")), print):
        pass
    assert str(refused.value).startswith(f"{run}/.lock must be the file that was opened, but is another one each time: ")
    assert "give --run-dir a folder on another one" in str(refused.value)


def test_a_filesystem_without_locks_is_said(tmp_path, monkeypatch):
    def refuse(number, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(run_lock.fcntl, "flock", refuse)
    said = []
    with locked(tmp_path, ParallelLayout(torch.device("cpu")), said.append):
        pass
    assert said == [f"warning: {tmp_path} can't be locked (No locks available): a second run in it would not be refused"]
    assert list(tmp_path.iterdir()) == []


# ---- a run among its texts ----


def test_a_run_does_not_read_its_own_files(tmp_path, corpus, monkeypatch):
    monkeypatch.chdir(tmp_path)
    texts = [tmp_path / "text.txt", tmp_path / "tokens" / "config.yaml"]
    texts[1].parent.mkdir()
    shutil.copy(corpus, texts[0])
    texts[1].write_text("a text, in a folder of no run\n")
    assert train(".", tmp_path / "a" / "run", "--samples", 1, "--sample-tokens", 2, "--compare") == 0
    written = {path.name for path in (tmp_path / "a" / "run").iterdir()}
    assert written > {"config.yaml", "log.csv", "loss.png", "samples.txt", "tokens", "checkpoints", "reference"}
    assert [tmp_path / path for path in text.find_files(["."])] == texts
    (tmp_path / "a" / "run" / "own.txt").write_text("not the run's")
    assert [tmp_path / path for path in text.find_files(["."])] == [tmp_path / "a" / "run" / "own.txt", *texts]
    (tmp_path / "a" / "run" / "own.txt").unlink()
    tokens = content(tmp_path / "a" / "run" / "tokens")
    assert resume("a/run") == 0
    assert content(tmp_path / "a" / "run" / "tokens") == tokens


def test_brackets_in_a_name_are_a_name(tmp_path, corpus, capsys):
    assert train(corpus, tmp_path / "x[/b] :smile:") == 0
    assert "x[/b] :smile: has log.csv" in capsys.readouterr().out


# ---- several ranks ----


CASES = {  # more arguments of each of two ranks, and what the run says
    "empty text": ((), (), "the text is empty: 1 files hold no characters"),
    "layers": (
        ("--num-layers", "1"), ("--num-layers", "2"),
        "num_layers must be the same on all ranks, but is 1 on rank 0 and 2 on rank 1",
    ),
    "type": (
        ("--params-dtype", "fp32"), ("--params-dtype", "bf16"),
        "params_dtype must be the same on all ranks, but is 'fp32' on rank 0 and 'bf16' on rank 1",
    ),
    "microbatches": (
        ("--global-batch-size", "64"), ("--global-batch-size", "96"),
        "global_batch_size must be the same on all ranks, but is 64 on rank 0 and 96 on rank 1",
    ),
    "text": (
        ("--data", "one.txt"), ("--data", "other.txt"),
        "data must be the same on all ranks, but is ('one.txt',) on rank 0 and ('other.txt',) on rank 1",
    ),
    "folder": (
        ("--run-dir", "one"), ("--run-dir", "other"),
        "run_dir must be the same on all ranks, but is 'one' on rank 0 and 'other' on rank 1",
    ),
    "comparison": ((), ("--compare",), "compare must be the same on all ranks, but is False on rank 0 and True on rank 1"),
}  # fmt: skip


def run_cases(rank, ranks, folder, backend):
    """A rank of runs whose text is empty, or whose ranks were given different settings."""
    torch.set_num_threads(1)
    folder = Path(folder)
    launched(rank, ranks, backend)
    layout._TURN_S = 0.0
    loop.MatrixPeak = lambda *args: None
    os.chdir(folder)
    for name in ("empty.txt", "one.txt", "other.txt"):
        Path(name).touch()
    device = ["--device", "cuda" if backend == "nccl" else "cpu"]
    arguments = [*device, "--data", "empty.txt", "--run-dir", "run", "--num-layers", "1"]
    found = {}
    for case, (*more, _) in CASES.items():
        meet_at(folder / case, rank, ranks)
        said = io.StringIO()
        with onepass.use_backend("torch"), contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            status = main(["train", *arguments, *more[rank]])
        dist.destroy_process_group()  # a run that fails keeps it until its process ends
        found[case] = status, said.getvalue()
    torch.save(found, folder / f"{rank}.pt")


@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="this PyTorch has no gloo")
@pytest.mark.parametrize("world", worlds.PAIRS)
def test_what_the_first_rank_refuses_and_what_ranks_differ_in_ends_all(world, tmp_path):
    for found in worlds.found_by(run_cases, world, tmp_path):
        assert found == {case: (2, f"onepass train: {said}\n") for case, (*_, said) in CASES.items()}
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("error", "waited", "said", "status"),
    [
        (CommandError("no"), (0.0, 5.0), "no", 2),
        (CommandError("nan", status=1), (0.0, 5.0), "nan", 1),
        (RuntimeError("lost\na peer"), (5.0, 10.0), "rank {}: RuntimeError: lost a peer", 1),
    ],
)
def test_ranks_take_turns_to_say_what_is_wrong(error, waited, said, status, monkeypatch, tmp_path):
    slept, file = [], tmp_path / "error.json"
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    monkeypatch.setattr("onepass.train.layout.time.sleep", slept.append)
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        with pytest.raises(CommandError) as raised, one_line_of_all_ranks():
            raise error
        assert str(raised.value) == said.format(rank) and raised.value.status == status
    assert tuple(slept) == waited
    assert file.exists() == (type(error) is RuntimeError)


def test_one_rank_has_its_traceback():
    with pytest.raises(RuntimeError, match="a bug"), one_line_of_all_ranks():
        raise RuntimeError("a bug")
