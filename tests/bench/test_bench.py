"""`onepass bench` on a CPU: it runs, writes what it found, and gives no speed to what is wrong."""

from __future__ import annotations

import importlib
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bench.benching import bench, changed, made, only
from torch import Tensor

from onepass.bench import accuracy, bias_activation, command, options, record, registry, runner
from onepass.bench.define import as_written
from onepass.bench.model import BenchCase, CaseResult, Contender, Measured
from onepass.runtime import ceilings
from onepass.runtime.cpu_threads import CpuThreads
from onepass.runtime.errors import CommandError


@pytest.fixture(autouse=True)
def _one_tiny_case(monkeypatch: pytest.MonkeyPatch, one_round: None) -> None:
    case = bias_activation.BENCH.case("swiglu", (33, 40), torch.bfloat16)
    monkeypatch.setattr(bias_activation, "BENCH", changed(bias_activation.BENCH, cases=lambda *_: [case]))


def with_contenders(monkeypatch: pytest.MonkeyPatch, *more: Contender) -> None:
    ours = bias_activation.BENCH.contenders
    one_more = changed(bias_activation.BENCH, contenders=lambda case: [*ours(case), *more])
    monkeypatch.setattr(bias_activation, "BENCH", one_more)


def rows_of(path: Path) -> dict[str, dict[str, Any]]:
    return {row["contender"]: row for row in json.loads(path.read_text())["rows"]}


def test_a_run_writes_what_it_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    data, picture = tmp_path / "new" / "run.json", tmp_path / "run.png"
    assert bench("bias_activation", "--json", str(data), "--plot", str(picture)) == 0
    found = json.loads(data.read_text())
    assert found["schema"] == 1
    assert found["ceilings"]["copy_gbs"] > 0
    assert found["versions"]["torch"] == torch.__version__
    assert set(found["cpu_time"][0]["references"]) == {"F.rms_norm(x)", "F.gelu(x + bias)"}
    rows = rows_of(data)
    assert {"copy", "onepass", "eager"} <= set(rows)
    assert "torch.compile" not in rows  # left out of --quick
    assert len({row["case"] for row in found["rows"]}) == 1
    ours = rows["onepass"]
    assert ours["status"] == "ok"
    assert set(ours["errors"]) == {"y", "dx", "dbias"}
    for key in ("forward_ms", "backward_ms", "forward_of_copy", "backward_of_copy", "cpu_forward_us", "cpu_both_us"):
        assert ours[key] > 0, key
    assert ours["forward_graph_us"] is None  # a GPU's
    assert ours["kept_mib"] == 0.0 < rows["eager"]["kept_mib"]  # x and the bias are inputs; eager keeps an activation too
    assert 2 * (33 * 40 + 33 * 80) / 2**20 <= ours["peak_mib"] < 1.0  # y and dx at least
    assert ours["reference"] is ours["both_of_reference"] is None  # a copy is what it is set against
    assert picture.read_bytes().startswith(b"\x89PNG")
    said = capsys.readouterr()
    assert "swiglu 33 x 40" in said.out
    assert "> onepass" in said.out
    steps = said.err.splitlines()  # no bar where no terminal is, but a line a step
    assert [step.split()[0] for step in steps] == [f"{at}/{len(steps)}" for at in range(1, len(steps) + 1)]
    assert any("swiglu 33x40: onepass, checking" in step for step in steps), steps


@pytest.mark.parametrize("op", registry.known_ops())
def test_a_run_of_each_op(op: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a tiny input: what needs no other package is right, and has its times."""
    module = importlib.import_module(f"onepass.bench.{op}")
    case = module.BENCH.tiny(module.BENCH.cases(torch.device("cpu"), torch.bfloat16, False)[0])
    here = [each.name for each in module.BENCH.contenders(case) if not (each.package or each.slow_start or each.lacks)]
    only(monkeypatch, module, case)
    assert bench(op, "--json", str(tmp_path / "run.json")) == 0
    rows = rows_of(tmp_path / "run.json")
    assert rows.keys() >= {"copy", *here}
    reference = module.BENCH.reference_of(case)
    for name in here:
        assert rows[name]["status"] == "ok", rows[name]["message"]
        assert rows[name]["forward_ms"] > 0 and (rows[name]["backward_ms"] is None) is (case.backward_bytes == 0)
        assert rows[name]["reference"] == reference and (rows[name]["both_of_reference"] is None) is (reference is None)


def _another_formula(case: BenchCase) -> Callable[..., Tensor]:
    def call(x: Tensor, bias: Tensor) -> Tensor:
        gate, linear = (x + bias).chunk(2, -1)
        return torch.nn.functional.silu(gate * 1.05) * linear

    return call


def _not_here(case: BenchCase) -> Callable[..., Tensor]:
    raise ImportError("no module named nowhere\nand more lines")


def test_what_is_wrong_or_raises_has_no_speed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with_contenders(monkeypatch, Contender("a bit off", _another_formula), Contender("broken", _not_here))
    assert bench("bias_activation", "--json", str(tmp_path / "run.json")) == 0  # peers' faults are no fault of ours
    rows = rows_of(tmp_path / "run.json")
    assert rows["a bit off"]["status"] == "wrong"
    assert rows["broken"]["status"] == "error"
    assert rows["broken"]["message"] == "ImportError: no module named nowhere"
    for name in ("a bit off", "broken"):
        assert all(rows[name][key] is None for key in ("forward_ms", "backward_ms", "forward_of_copy", "cpu_forward_us"))
    assert rows["onepass"]["forward_ms"] > 0
    said = capsys.readouterr().out
    assert "a bit off: y is" in said
    assert "is allowed" in said


def test_who_has_no_row_is_named_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "find_peers", lambda: {"Liger": "0.8.5"})
    with_contenders(
        monkeypatch,
        Contender("old", _not_here, lacks="PyTorch 2.9 has none"),
        Contender("Liger, new", _not_here, "Liger", lacks="why"),
        Contender("quacks", _not_here, "QuACK"),
        Contender("CCE", _not_here, "CCE", lacks="no matter"),
    )
    named = ("--peer", "old", "--peer", "new", "--peer", "quack")
    assert bench("bias_activation", "--json", str(tmp_path / "run.json"), *named) == 0
    found = json.loads((tmp_path / "run.json").read_text())
    assert {"old", "Liger, new", "quacks", "CCE"}.isdisjoint(rows_of(tmp_path / "run.json"))
    reasons = {entry["contender"]: entry["reason"] for entry in found["left_out"]}
    assert reasons == {"old": "PyTorch 2.9 has none", "Liger, new": "why", "quacks": "not installed"}
    assert {(entry["op"], entry["case"]) for entry in found["left_out"]} == {("bias_activation", "swiglu 33x40")}
    assert found["versions"]["peers"] == {"Liger": "0.8.5"}
    said = " ".join(capsys.readouterr().out.split())
    assert "without old (PyTorch 2.9 has none); Liger, new (why); quacks (not installed)" in said
    assert "peers Liger 0.8.5; not installed: CCE (cut-cross-entropy)" in said


def test_ours_being_wrong_is_a_failure(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Eager rounds its intermediates: fine for a peer, not for us."""
    eager = Contender("onepass", as_written(bias_activation._eager), ours=True)
    monkeypatch.setattr(bias_activation, "BENCH", changed(bias_activation.BENCH, contenders=lambda case: [eager]))
    assert bench("bias_activation") == 1
    assert "onepass is wrong, or raised, in swiglu 33x40" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nonsense"], "unknown op 'nonsense'; known are activation_linear, attention, bias_activation"),
        (["--case", "gelu 3x3"], "swiglu 33x40"),
        (["--peer", "nobody"], "eager, torch.compile, QuACK, torchao tensorwise, torchao rowwise, rope + SDPA"),
        (["--plot", "run.jpeg2000"], "must end in .png"),
        (["--json", "."], "is a folder"),
    ],
)
def test_what_cannot_be_done_is_said_at_once(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(*arguments) == 2
    assert words in capsys.readouterr().err


def test_a_missing_matplotlib_is_said_before_measuring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "matplotlib" else find(name, *rest))
    monkeypatch.setattr(command, "measure_ceilings", lambda *_: pytest.fail("measured first"))
    assert bench("--plot", str(tmp_path / "run.png")) == 2
    assert "pip install '.[bench]' in a clone of onepass" in capsys.readouterr().err


def test_interrupting_keeps_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "_measure_case", interrupted)
    assert bench("bias_activation", "--json", str(tmp_path / "run.json")) == 130
    found = json.loads((tmp_path / "run.json").read_text())
    assert found["cpu_time"]
    assert found["rows"] == []


@pytest.mark.parametrize("op", registry.known_ops())
@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_case_file_fits_the_runner(op: str, device: str, quick: bool) -> None:
    found = registry.load(op)
    cases = found.cases(torch.device(device), torch.bfloat16, quick)
    assert found.op == op
    assert len({case.name for case in cases}) == len(cases) > 0
    for case in cases:
        assert case.forward_bytes > 0
        if case.backward_bytes:  # passes that write codes have none, nor calls without gradients
            # y's own is a gradient; a teacher twice as wide has none; one row alone is looked up many times, and written once
            most = {"dropout_add": 1.5, "linear_divergence": 1.5, "embedding": 2}.get(op, 1)
            assert case.forward_bytes <= case.backward_bytes * most
        mine = [contender.name for contender in found.contenders(case) if contender.ours]
        assert mine[0] == "onepass"
        assert len(mine) == (4 if case.fp8 and op != "fp8_passes" else {"experts": 2}.get(op, 1))


def test_a_row_nobody_wrote_is_seen() -> None:
    """One row of many, left as it was handed out: too small a part for a root mean square, but it was NaN."""
    case = bias_activation.BENCH.case("gelu", (4000, 64), torch.bfloat16)
    inputs = bias_activation.BENCH.inputs(case, torch.device("cpu"), torch.Generator())
    got = accuracy.outputs(made(bias_activation, case), inputs)
    formula = bias_activation.BENCH.formula_of(case)
    right, baseline = accuracy.errors(formula, inputs, got, with_baseline=True)
    assert not accuracy.too_far(right, {name: 1.25 * error + 1e-6 for name, error in baseline.items()})
    got["dx"][17] = float("nan")
    wrong, _ = accuracy.errors(formula, inputs, got, with_baseline=False)
    assert accuracy.too_far(wrong, dict.fromkeys(wrong, 3e-2)) == ["dx"]


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    case = bias_activation.BENCH.case("geglu", (50, 8), torch.float32)
    inputs = bias_activation.BENCH.inputs(case, torch.device("cpu"), torch.Generator())
    got = accuracy.outputs(made(bias_activation, case, "eager"), inputs)
    whole, _ = accuracy.errors(bias_activation.BENCH.formula_of(case), inputs, got, with_baseline=True)
    monkeypatch.setitem(accuracy._CHUNK, "cpu", 16 * 7)  # seven rows at a time, and one left over
    parts, _ = accuracy.errors(bias_activation.BENCH.formula_of(case), inputs, got, with_baseline=True)
    assert parts == pytest.approx(whole, rel=1e-9)
    assert max(parts.values()) < 1e-6


def test_a_busy_machine_is_measured_with_the_threads_that_are_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    class Chosen(Exception):
        pass

    def choose(threads: CpuThreads) -> None:
        raise Chosen(threads.who)

    monkeypatch.setattr(CpuThreads, "choose", choose)
    with pytest.raises(Chosen, match="bench"):
        bench("softmax")


def test_a_lost_device_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    lost: list[str] = []

    def breaks(case: BenchCase) -> Callable[..., Tensor]:
        lost.append(case.name)
        raise RuntimeError("an illegal memory access was encountered")

    def synchronize(self: ceilings.Clock) -> None:
        if lost:
            raise RuntimeError("an illegal memory access was encountered")

    with_contenders(monkeypatch, Contender("broken", breaks))
    monkeypatch.setattr(ceilings.CpuClock, "synchronize", synchronize)
    assert bench("bias_activation", "--json", str(tmp_path / "run.json")) == 1
    assert "broken left cpu unusable" in capsys.readouterr().out
    assert (tmp_path / "run.json").exists()


def test_a_quick_run_is_of_ops_alone_unless_others_are_named() -> None:
    assert {"wgrad", "norm", "experts"} <= set(command._ops([], False))
    assert set(command._ops([], False)) - set(command._ops([], True)) == {"wgrad", "fp8_passes", "norm_mlp"}
    assert command._ops(["wgrad"], True) == ["wgrad"]


def test_importing_the_command_loads_no_peer_and_no_rich() -> None:
    unwanted = "{'rich', 'matplotlib', 'liger_kernel', 'megatron', 'quack', 'apex', 'transformer_engine', 'torchao'}"
    loaded = f"import sys, onepass.bench.command; print(sorted({unwanted} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_picture_marks_what_it_cuts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """1.39 and 2.08 can't be told apart by their bars: both are marked, and 1.02 is not."""
    pytest.importorskip("matplotlib")
    from onepass.bench import picture

    marked: list[float] = []
    cut = picture._cut
    monkeypatch.setattr(picture, "_cut", lambda axis, at, limit: (marked.append(at), cut(axis, at, limit)))
    rows = [Measured("onepass", ours=True, forward_of_copy=1.02, backward_of_copy=0.9)]
    result = CaseResult(bias_activation.BENCH.tiny(bias_activation.BENCH.cases(torch.device("cpu"), torch.bfloat16, True)[0]),
                        Measured("copy", forward_of_copy=1.39, backward_of_copy=2.08), rows)  # fmt: skip
    ran = record.BenchRun(torch.device("cpu"), torch.bfloat16, True, {}, ceilings.Ceilings(100.0, 1 << 20, None), cases=[result])
    picture.draw(ran, tmp_path / "run.png")
    assert [round(at) for at in marked] == [1, 1]


@pytest.mark.parametrize(("named", "pretend"), [("tpu", True), ("cuda:x", True), ("cuda:300", False), ("cuda:4", False)])
def test_a_device_that_is_not_here(named: str, pretend: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(CommandError, match="--device must be"):
        options.find_device(named, pretend)


def test_a_gpu_that_is_pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert options.find_device("cuda:3", pretend=True) == torch.device("cuda", 3)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert options.find_device("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(CommandError, match="one of the 2 GPUs here"):
        options.find_device("cuda:3", pretend=True)


def _replayed(monkeypatch: pytest.MonkeyPatch, *times: float | Exception) -> Measured:
    left = list(times)

    def replay(call: Callable[[], object], clock: ceilings.Clock) -> float:
        time = left.pop(0)
        if isinstance(time, Exception):
            raise time
        return time

    monkeypatch.setattr(runner, "replay_us", replay)
    row = Measured("onepass")
    case = bias_activation.BENCH.case("gelu", (4, 8), torch.bfloat16)
    inputs = bias_activation.BENCH.inputs(case, torch.device("cpu"), torch.Generator())
    lane = runner._lane("onepass", made(bias_activation, case, "eager"), inputs)
    runner._replay(row, lane, ceilings.clock_for(torch.device("cpu")))
    return row


def test_backward_in_a_graph_is_both_less_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    row = _replayed(monkeypatch, 16.0, 5.0)
    assert (row.forward_graph_us, row.backward_graph_us) == (5.0, 11.0)
    row = _replayed(monkeypatch, 16.0, RuntimeError("operation not permitted when stream is capturing"))
    assert row.forward_graph_us is row.backward_graph_us is None
    assert row.status == "ok"
