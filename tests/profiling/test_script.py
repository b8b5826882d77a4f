"""`onepass profile script.py` as it is typed: what it prints, on which stream, and its exit status."""

import json
import subprocess
import sys

import pytest
import torch

from onepass import cli
from onepass.profiling.limits import Limits

SCRIPT = """
import sys, time
import torch
import beside

class Trainer:
    def step(self, x):
        return (x @ x).tanh()

def train_step(x, depth=2):
    if depth:
        return train_step(x, depth - 1)
    return Trainer().step(x)

def main(calls):
    x = torch.randn(16, 16)
    for _ in range(calls):
        train_step(x)

if __name__ == "__main__":
    print("given", sys.argv[1:], __file__ == sys.argv[0], beside.FACT)
    main(int(sys.argv[1]))
    if "fail" in sys.argv:
        raise ValueError("as told")
    if "exit" in sys.argv:
        sys.exit(int(sys.argv[-1]))
    if "interrupt" in sys.argv:
        raise KeyboardInterrupt
    if "sleep" in sys.argv:
        for _ in range(1000):
            try:
                time.sleep(0.01); torch.ones(3)
            except Exception:
                print("swallowed")
    print("to its end")
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    (tmp_path / "beside.py").write_text("FACT = 42\n")
    yield str(path)
    sys.modules.pop("beside", None)


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr("onepass.profiling.record.limits_of", lambda *_: Limits(100.0, {"float32": 1.0}))


def run(capsys, *argv):
    """Exit status, stdout, stderr."""
    before = list(sys.argv), list(sys.path), sys.modules["__main__"]
    try:
        status = cli.main(["profile", *map(str, argv)])
    except SystemExit as stopped:  # argparse's own way out
        status = stopped.code or 0
    assert (sys.argv, sys.path, sys.modules["__main__"]) == before
    out, err = capsys.readouterr()
    return status, out, err


def test_a_whole_script(script, capsys):
    status, out, err = run(capsys, script, 20, "--lr", "3")
    assert status == 0
    lines = out.splitlines()
    assert lines[0] == "given ['20', '--lr', '3'] True 42"
    assert lines[1] == "to its end"
    assert "one recorded" in lines[2]
    assert "with the profiler, which slows the CPU" in lines[3]
    assert next(line for line in lines if line.startswith("aten::mm")).split()[1] == "20"
    assert "-bound: " in out or "mixed: " in out
    assert all(line.startswith("onepass profile: ") for line in err.splitlines() if "USDT" not in line)


@pytest.mark.parametrize("name", ["train_step", "Trainer.step"])
def test_one_function(name, script, capsys):
    status, out, err = run(capsys, "--function", name, "--skip", 2, "--steps", 3, script, 50)
    assert status == 0
    assert "to its end" not in out
    assert "3 steps recorded" in out
    assert "more" not in out
    assert next(line for line in out.splitlines() if line.startswith("aten::mm")).split()[1] == "1"
    assert f"recording the next 3 calls of {name}" in err
    assert "the script ended here" in err


def test_a_function_that_is_compiled_later(tmp_path, capsys):
    """What counts and times the calls is not compiled with it, so that nothing is compiled again."""
    path = tmp_path / "compiled.py"
    path.write_text("""
import torch
from torch._dynamo.utils import counters

torch._dynamo.reset()
counters.clear()

def train_step(x):
    assert torch.compiler.is_compiling()
    return x.sin() + 1

step = torch.compile(train_step, backend="eager", fullgraph=True)
other = torch.compile(lambda x: x.cos(), backend="eager")
try:
    for _ in range(20):
        step(other(torch.ones(3)))
finally:
    print("graphs", counters["stats"]["unique_graphs"])
""")
    compile_before = torch.compile
    status, out, _ = run(capsys, "--function", "train_step", path)
    assert status == 0
    assert "graphs 2" in out
    assert "aten::sin" in out
    assert "aten::cos" not in out
    assert torch.compile is compile_before


def test_exactly_enough_calls(script, capsys):
    assert run(capsys, "--function", "train_step", "--skip", 2, "--steps", 3, script, 9)[0] == 0
    status, out, err = run(capsys, "--function", "train_step", "--skip", 2, "--steps", 3, script, 8)
    assert status == 2
    assert "to its end" in out
    assert "the script called train_step 8 times; --skip 2 --steps 3 needs 9" in err


def test_a_function_that_is_not_there(script, capsys):
    status, out, err = run(capsys, "--function", "step", script, 5)
    assert (status, out) == (2, "")
    assert "--function must name a function" in err
    assert "but is 'step'; there are: Trainer.step, train_step, main" in err


@pytest.mark.parametrize("options", [(), ("--function", "main", "--skip", "0", "--steps", "1")])
def test_a_script_that_fails(options, script, capsys):
    status, out, err = run(capsys, *options, script, 2, "fail")
    assert status == 1
    assert "aten::mm" not in out
    assert err.splitlines()[-1] == "ValueError: as told"
    assert 'raise ValueError("as told")' in err
    assert "onepass/profiling" not in err.replace("\\", "/")


def test_the_largest_rows(script, capsys):
    _, out, _ = run(capsys, "--top", 1, script, 5)
    rows = [line for line in out.splitlines() if line.startswith("aten::")]
    assert len(rows) == 1
    assert " more  " in out


@pytest.mark.parametrize(("code", "status"), [(0, 0), (3, 1)])
def test_a_script_that_leaves(code, status, script, capsys):
    found, out, err = run(capsys, script, 2, "exit", code)
    assert found == status
    assert ("aten::mm" in out) == (status == 0)
    assert ("the script ended with 3" in err) == (status == 1)


def test_an_interrupted_script_shows_what_there_is(script, capsys):
    status, out, _ = run(capsys, script, 2, "interrupt")
    assert status == 130
    assert "aten::mm" in out


def test_some_seconds_and_no_more(script, capsys):
    status, out, err = run(capsys, "--skip-first", 0.5, "--seconds", 0.3, script, 2, "sleep")
    assert status == 0
    assert "to its end" not in out
    assert "swallowed" not in out
    assert "aten::ones" in out
    assert "aten::mm" not in out
    assert "recording, for 0.3 s at most" in err


def test_all_of_it(script, capsys):
    assert "onepass profile: recording\n" in run(capsys, "--seconds", 0, script, 2)[2]


def test_a_script_that_is_over_too_soon(script, capsys):
    status, _, err = run(capsys, "--skip-first", 60, script, 2)
    assert status == 2
    assert "the script ended before --skip-first (60 s) was over" in err


def test_a_script_without_pytorch(tmp_path, capsys):
    path = tmp_path / "plain.py"
    path.write_text("print(1 + 1)")
    status, out, err = run(capsys, path)
    assert (status, out) == (2, "2\n")
    assert "nothing that PyTorch ran was seen" in err


def test_a_script_that_is_not_python(tmp_path, capsys):
    path = tmp_path / "broken.py"
    path.write_text("def broken(:\n")
    status, _, err = run(capsys, path)
    assert status == 1
    assert "SyntaxError" in err
    assert "broken.py" in err


def test_files(script, tmp_path, capsys):
    made = {name: tmp_path / "new" / f"run.{name}" for name in ("png", "json")}
    trace = tmp_path / "trace.json.gz"
    status, out, _ = run(capsys, "--picture", made["png"], "--trace", trace, "--json", made["json"], script, 5)
    assert status == 0
    assert all(path.stat().st_size > 500 for path in (*made.values(), trace))
    assert f"picture in {made['png']}" in out
    values = json.loads(made["json"].read_text())
    assert (values["schema"], values["args"], values["function"]) == (1, ["5"], None)
    assert "aten::mm" in {row["name"] for row in values["rows"]}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "required: SCRIPT"),
        (("nope.py",), "SCRIPT can't be read: "),
        (("--picture", "a.gif", "x.py"), "--picture must end in .png or .svg or .pdf, but is 'a.gif'"),
        (("--trace", "a.txt", "x.py"), "--trace must end in .json or .json.gz, but is 'a.txt'"),
        (("--json", "a.txt", "x.py"), "--json must end in .json, but is 'a.txt'"),
        (("--steps", "0", "x.py"), "argument --steps: invalid number of at least 1 value: '0'"),
        (("--skip", "-1", "x.py"), "argument --skip: invalid number value: '-1'"),
        (("--seconds", "inf", "x.py"), "argument --seconds: invalid number of seconds value: 'inf'"),
        (("--wrong", "x.py"), "unrecognized arguments: --wrong"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(options, message, capsys):
    status, out, err = run(capsys, *options)
    assert (status, out) == (2, "")
    assert message in err
    assert err.startswith("onepass")
    assert len(err.splitlines()) == 1


STEPS = """
import sys
import torch

x = torch.nn.Parameter(torch.ones(4, 4))
optimizer = torch.optim.SGD([x])
for step in range(int(sys.argv[1])):
    (x @ x).sum().backward()
    try:
        optimizer.step()
    except Exception:
        print("swallowed")
    print("step", step)
"""


def test_one_of_several_ranks_counts_optimizer_steps(tmp_path, capsys, monkeypatch):
    """A clock would end each rank's script at another step, and the others would wait for it."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    path = tmp_path / "steps.py"
    path.write_text(STEPS)
    status, out, err = run(capsys, path, 50)
    assert status == 0
    assert "one of several ranks: recording optimizer steps 4 to 8 in place of seconds" in err
    assert "step 6\n" in out and "step 7\n" not in out and "swallowed" not in out
    assert next(line for line in out.splitlines() if line.startswith("aten::mm")).split()[1] == "15"  # forward, and two gradients
    assert "step 1\n" not in run(capsys, "--skip", 0, "--steps", 2, path, 50)[1]
    status, out, err = run(capsys, path, 2)
    assert status == 2 and "the script made 2 optimizer steps, and recording begins after --skip 3; --seconds 0" in err
    assert run(capsys, path, 4)[0] == 0  # less than was asked for, but something


def test_no_clock_ends_a_script_of_several_ranks(script, capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    status, out, err = run(capsys, "--seconds", 20, script, 5)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "--seconds must be 0 for one of 2 ranks, but is 20: " in err and "without it --steps counts optimizer steps" in err
    status, out, err = run(capsys, "--skip-first", 3, script, 5)
    assert (status, out) == (2, "") and "--skip-first needs --seconds 0 for one of 2 ranks" in err
    assert run(capsys, "--seconds", 0, script, 5)[0] == 0


def test_no_matplotlib(script, capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    status, _, err = run(capsys, "--picture", "a.png", script, 5)
    assert status == 2
    assert "--picture needs matplotlib: pip install '.[bench]' in a clone of onepass" in err


def test_help_says_where_options_stand(capsys):
    status, out, _ = run(capsys, "--help")
    assert status == 0
    assert "Options stand before the script" in " ".join(out.split())
    assert "usage: onepass profile" in out


def test_in_a_process_of_its_own(script):
    """Without anything of this one's: warnings are errors, and the ceilings are measured."""
    argv = [sys.executable, "-W", "error", "-m", "onepass.cli", "profile", "--function", "train_step", script, "14"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "ceilings: copy" in done.stdout


_INNER = """
import onepass, torch
x = torch.ones(8, 8)
x @ x
{}
x @ x
"""
_BY_TORCH = "with torch.profiler.profile(): x @ x"


@pytest.mark.parametrize(
    ("inner", "message"),
    [
        (_BY_TORCH, "another profiler ended this recording"),
        ("onepass.profile(lambda: x @ x, warmup=0, steps=1)", "another profiler runs already"),
    ],
)
def test_a_script_that_profiles_itself(inner, message, tmp_path):
    """In a process of its own, which PyTorch crashes where such a recording is read."""
    path = tmp_path / "inner.py"
    path.write_text(_INNER.format(inner))
    argv = [sys.executable, "-m", "onepass.cli", "profile", path]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines()[-1].startswith(
        f"onepass profile: SCRIPT must not profile itself while it is recorded: {message}"
    )


def test_a_script_that_profiles_itself_and_fails(tmp_path, capsys):
    path = tmp_path / "inner.py"
    path.write_text(_INNER.format(_BY_TORCH) + "raise RuntimeError('its own')")
    status, _, err = run(capsys, path)
    assert status == 1 and err.endswith("RuntimeError: its own\n")
