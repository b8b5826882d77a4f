"""onepass.profile and onepass.compare as they are called, on a CPU; and what their tables say, GPU's included."""

import gzip
import json
import subprocess
import sys
import time
from functools import partial

import pytest
import torch
from profiling.made import CEILINGS, launch_bound, matrix_products
from torch import nn
from torch.nn import functional as F

import onepass
from onepass.profiling import limits, record
from onepass.profiling import suggestions as applies
from onepass.profiling.limits import Limits
from onepass.runtime.ceilings import Ceilings
from onepass.runtime.op import OPS


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.setattr(record, "_RUN_US", 1e3)
    monkeypatch.setattr(record, "_TIMING_US", 2e4)


def profile(fn, *args, **options):
    return onepass.profile(fn, *args, **{"warmup": 1, "steps": 2, "ceilings": CEILINGS, **options})


def test_a_training_step():
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    x = torch.randn(32, 64)

    def step():
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    found = profile(step)
    rows = {row.name: row for row in found.rows}
    assert not found.on_gpu
    assert found.steps == 2
    assert found.timed
    assert found.same_steps
    assert rows["aten::addmm"].calls == 2
    assert rows["aten::mm"].calls == 3  # no gradient of x
    assert rows["aten::addmm"].flops == 2 * 32 * (64 * 128 + 128 * 8)
    assert rows["aten::native_layer_norm_backward"].calls == 1
    assert {row.name for row in found.rows} >= {"aten::gelu", "aten::gelu_backward"}
    assert sum(row.share for row in found.rows) == pytest.approx(1)
    assert 0 < found.busy_us <= found.traced_us
    assert found.wall_range[0] <= found.wall_us <= found.wall_range[1]
    assert {suggestion.call for suggestion in found.suggestions} >= {'onepass.bias_activation(x, bias, "gelu")'}
    assert all("faster on a GPU only" in s.saw for s in found.suggestions if "activation" in s.call or "norm" in s.call)


def test_a_module_with_its_arguments():
    found = profile(nn.Linear(4, 5), torch.randn(3, 4))
    assert found.rows[0].calls == 1
    assert "aten::addmm" in found.kernel_names()


def test_keywords_reach_the_function():
    seen = []
    profile(lambda a, *, b: seen.append((a, b)), 1, b=2)
    assert set(seen) == {(1, 2)}


def test_how_often_it_is_called():
    calls = []

    def slow():
        calls.append(1)
        time.sleep(0.02)

    record.profile(slow, warmup=2, steps=3, ceilings=CEILINGS)
    # Warm-up, one to see how long it takes, three runs, one under the profiler, and the steps.
    assert len(calls) == 2 + 1 + 3 * 3 + 1 + 3


def test_the_wall_time_is_that_without_the_profiler(monkeypatch):
    """Where the profiler is on, this takes longer."""

    def slowed():
        time.sleep(0.2 if torch.autograd._profiler_enabled() else 0.002)

    found = profile(slowed, steps=1)
    assert found.wall_us < 50e3 < 200e3 <= found.traced_us
    assert found.reasons[-1].startswith("the recorded steps took ")
    assert "unsure" not in profile(time.sleep, 0.01).words()


def test_the_median_of_several_runs(monkeypatch):
    walls = iter([(1.0, 1.0), (7.0, 1.0), (5.0, 2.0), (900.0, 3.0)])
    monkeypatch.setattr(record, "_TIMING_US", 0.0)
    monkeypatch.setattr(record, "run", lambda call, calls: next(walls))
    found = profile(lambda: torch.ones(3))
    assert (found.wall_us, found.wall_range, found.host_us) == (7.0, (5.0, 900.0), 2.0)


def test_an_error_comes_through_and_the_next_profile_works():
    class Broken(Exception):
        pass

    def broken():
        if torch.autograd._profiler_enabled():
            raise Broken
        torch.ones(3)

    with pytest.raises(Broken):
        profile(broken)
    assert profile(lambda: torch.ones(3)).rows


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"fn": 3}, TypeError, "fn must be callable, but is a int"),
        ({"warmup": -1}, ValueError, "warmup must be at least 0, but is -1"),
        ({"steps": 0}, ValueError, "steps must be at least 1, but is 0"),
        ({"steps": 2.5}, TypeError, "steps must be a whole number, but is 2.5, a float"),
        ({"ceilings": 4000}, TypeError, "ceilings must be a Ceilings, .* but is a int"),
    ],
)
def test_wrong_arguments(change, error, message):
    with pytest.raises(error, match=message):
        onepass.profile(**{"fn": lambda: None, **change})


def test_peak_memory_of_a_cpu():
    x = torch.randn(1000, 100)
    found = profile(lambda: (x + 1) * 2)  # two of 400 kB at once
    assert 800_000 <= found.peak_bytes < 801_000  # and what numbers take


def test_ceilings_are_measured_once_for_the_types_that_were_multiplied(monkeypatch):
    measured = []
    monkeypatch.setattr(limits, "measure_ceilings", lambda *_: measured.append("copy") or Ceilings(1000.0, 1, None))
    for cached in (limits._ceilings, limits._product_tflops):
        cached.cache_clear()
    a = torch.randn(8, 8)
    first, second = (profile(lambda: a @ a, ceilings=None) for _ in range(2))
    assert first.limits == second.limits
    assert list(first.limits.tflops) == ["float32"]
    assert first.limits.tflops["float32"] > 0
    assert measured == ["copy"]
    for cached in (limits._ceilings, limits._product_tflops):
        cached.cache_clear()


def test_no_memory_for_the_ceilings(monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(limits, "_ceilings", full)
    found = profile(lambda: torch.ones(3) + 1, ceilings=None)
    assert found.limits == Limits()
    assert found.rows
    assert any("hand them in as ceilings=" in reason for reason in found.reasons)


def test_many_small_operators_on_a_cpu(monkeypatch):
    monkeypatch.setitem(applies._SMALL_US, False, 1e9)  # whatever else this machine does meanwhile
    x = torch.randn(8, 8)
    found = profile(lambda: [torch.tanh(F.layer_norm(x, (8,))) for _ in range(16)])
    assert "onepass.fuse(fn)" in [suggestion.call for suggestion in found.suggestions]


@pytest.mark.parametrize("given", (None, CEILINGS))
def test_threads_that_wait_for_each_other_are_named(given, monkeypatch):
    monkeypatch.setattr(limits, "_ceilings", lambda device: CEILINGS)
    monkeypatch.setattr(record, "slow_threads", lambda: ("the machine is busy", "set OMP_NUM_THREADS=1"))
    found = profile(lambda: torch.ones(4).sum(), ceilings=given)
    assert ("the machine is busy; set OMP_NUM_THREADS=1" in found.reasons) is (given is None)


def test_a_large_vocabulary_on_a_cpu_is_a_matter_of_memory():
    hidden, head = torch.randn(16, 8).requires_grad_(), torch.randn(8192, 8).requires_grad_()
    labels = torch.zeros(16, dtype=torch.long)
    found = profile(lambda: F.cross_entropy(F.linear(hidden, head), labels).backward())
    (loss,) = [s for s in found.suggestions if s.call == "onepass.linear_cross_entropy(hidden, weight, labels)"]
    assert "the logits are 16 x 8,192, made by a matrix product; on a CPU it saves the logits' memory, not time" in loss.saw
    assert "nll_loss_nd" not in loss.saw  # that only calls another


@pytest.mark.parametrize("trained", (True, False))
@pytest.mark.parametrize("op", sorted(OPS))
def test_an_op_of_onepass_is_not_advised_in_its_own_place(op, trained, monkeypatch):
    monkeypatch.setattr(applies, "_WORTH", 0.0)
    sample = OPS[op].samples.SAMPLES[op]
    tensors = [t.detach() for t in sample.tensors(torch.device("cpu"), torch.float32)]
    for t in tensors[: len(tensors) - sample.frozen] if trained else ():
        t.requires_grad_(t.is_floating_point())

    def step():
        results = sample.call(partial(OPS[op].function, backend="torch"), *tensors)
        results = (results,) if isinstance(results, torch.Tensor) else results
        ys = [y for y in results if y is not None and y.requires_grad]
        if ys:
            torch.autograd.grad(ys, [t for t in tensors if t.requires_grad], list(map(torch.ones_like, ys)), allow_unused=True)

    assert not profile(step, warmup=1, steps=1).suggestions


def test_a_compiled_function():
    compiled = torch.compile(lambda x: (x.sin() + 1).sum(), backend="eager")
    assert "aten::sin" in profile(compiled, torch.randn(64)).kernel_names()


# ---- what comes out ----


def test_the_trace_is_torchs(tmp_path):
    found = profile(lambda: torch.ones(3) + 1)
    found.trace(tmp_path / "new" / "a.json")
    found.trace(str(tmp_path / "a.json.gz"))
    plain = json.loads((tmp_path / "new" / "a.json").read_text())
    assert json.loads(gzip.decompress((tmp_path / "a.json.gz").read_bytes())) == plain
    assert "aten::add" in {event["name"] for event in plain["traceEvents"]}
    with pytest.raises(ValueError, match=r"path must end in .json or .json.gz, but is 'a.txt'"):
        found.trace("a.txt")


def test_as_json():
    values = json.loads(json.dumps(launch_bound().profile().as_dict()))
    assert values["verdict"] == "launch-bound"
    assert values["rows"][0]["name"] == "aten::tanh"
    assert values["suggestions"][0]["call"].startswith("onepass.fuse")
    assert "bars" not in values


def test_the_table_of_a_gpu():
    text = launch_bound().profile(wall=100.0, host=90.0, peak=3 << 20).table(width=160)
    lines = text.splitlines()
    assert lines[0] == "Some GPU; 2 steps recorded; all figures are for one"
    assert lines[1].startswith("wall 100 us (100 us to 100 us)")
    assert lines[2] == "GPU busy 10 us, idle 90 us (90%)"
    tanh = "vectorized_elementwise_kernel<tanh_kernel_c…"
    assert lines[3] == f"9.5 gaps, 536 us; the most between {tanh} and {tanh}: 9.5, 536 us"
    assert lines[4] == "10 kernels, 10 launches, 2 us each in the driver; the CPU takes 90 us to queue it (9 us a launch)"
    assert lines[5] == "at most 3 MiB allocated beyond what was before"
    assert lines[6] == "ceilings: copy 1,000 GB/s (read + write), bfloat16 product 100 TFLOP/s, float16 product 100 TFLOP/s"
    assert next(line for line in lines if line.startswith("aten::tanh")).split() == [
        "aten::tanh", "10", "10", "10.0", "100.0%", "0.0205", "2.05", "0.00",
    ]  # fmt: skip


def test_rows_beyond_the_top_are_summed():
    x = torch.randn(64, 64)
    found = profile(lambda: torch.tanh((x @ x).exp() + x.sin()))
    text = found.table(top=2)
    assert text.count("aten::") == 2 + 2  # and two that stand beside the longest gap
    rest = next(line for line in text.splitlines() if line.startswith(f"{len(found.rows) - 2} more"))
    assert rest.split()[3] == f"{sum(row.us for row in found.rows[2:]):,.1f}"
    assert "more" not in found.table(top=100)
    with pytest.raises(ValueError, match="top must be at least 1, but is 0"):
        found.table(top=0)


def test_what_is_unknown_has_a_question_mark():
    text = profile(lambda: torch.randn(9).sort()).table()
    assert next(line for line in text.splitlines() if line.startswith("aten::sort")).split()[-2:] == ["?", "?"]


def test_printing_says_table_and_words():
    found = launch_bound().profile(wall=100)
    assert "aten::tanh" in str(found)
    assert "launch-bound: the GPU is idle" in str(found)
    assert "of onepass would apply:\n  onepass.fuse(fn, cuda_graph=True)\n" in str(found)


# ---- two ----


def test_compare():
    before, after = launch_bound(kernels=10).profile(wall=100.0), matrix_products(us=10.0).profile(wall=25.0)
    found = onepass.compare(before, after)
    assert found.speedup == 4
    tanh = "vectorized_elementwise_kernel<tanh_kernel_cuda>"
    assert found.gone() == {tanh: 10}
    assert found.came() == {"nvjet_tst_128x256": 2}
    lines = {line.partition("  ")[0]: line.split()[-4:] for line in str(found).splitlines()}
    text = str(found)
    assert lines["wall"] == ["25", "us", "4.00", "x"]
    assert lines["kernels"] == ["10", "2", "5.00", "x"]
    assert lines["GPU time"] == ["20", "us", "0.50", "x"]
    assert f"kernels that went: 10\n      10  {tanh}" in text
    assert "kernels that came: 2\n       2  nvjet_tst_128x256" in text
    assert "launch-bound" in text
    assert "compute-bound" in text


def test_what_stays_neither_went_nor_came():
    found = onepass.compare(launch_bound(kernels=10).profile(), launch_bound(kernels=4).profile())
    assert list(found.gone().values()) == [6]
    assert found.came() == {}
    assert "came" not in str(found)


def test_compare_wants_profiles():
    found = launch_bound().profile()
    with pytest.raises(TypeError, match=r"after must be a Profile, as onepass.profile returns it, but is a int"):
        onepass.compare(found, 3)


_OLDER_MEMORY = """
import torch
from onepass.profiling import record
older = torch.ones(1000)
with record.recording():
    del older
    torch.ones(10)
assert record._set_log_level(1) == 1, "PyTorch's log is not as it was"
"""


@pytest.mark.skipif("torch.cuda.is_available()")  # where memory is not the profiler's
def test_memory_older_than_the_recording_is_no_warning():
    """It is PyTorch's, of C++, to the process's own stderr, and once in a process."""
    done = subprocess.run([sys.executable, "-c", _OLDER_MEMORY], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("ranks", "calls"), [(1, {1 + 15 * 200, 1 + 3 * 5}), (2, {1 + 3 * 5})])
def test_no_clock_decides_how_often_several_ranks_call(ranks, calls, monkeypatch):
    """Each would wait for the other's next collective. Slow calls and quick ones on this clock."""
    monkeypatch.setattr(record, "_has_several_ranks", lambda: ranks > 1)
    counts = set()
    for seconds in (1e-9, 1.0):
        now, called = [0.0], []

        def call(now=now, called=called, seconds=seconds):
            now[0] += seconds
            called.append(now[0])

        monkeypatch.setattr(record.time, "perf_counter", lambda now=now: now[0])
        record.timed(call, 5)
        counts.add(len(called))
    assert counts == calls


@pytest.mark.parametrize(("ranks", "done"), [(1, ["stop"]), (2, ["sleep", "stop"])])
def test_a_recording_of_several_ranks_outlives_their_collectives(ranks, done, monkeypatch):
    """The threads of gloo write to it until they have left the last one."""
    monkeypatch.setattr(record, "_has_several_ranks", lambda: ranks > 1)
    seen = []
    with record.recording() as recorded:
        stop = recorded._profiler.stop
        monkeypatch.setattr(recorded._profiler, "stop", lambda: (seen.append("stop"), stop()))
        monkeypatch.setattr(record.time, "sleep", lambda seconds: seen.append("sleep"))
    assert seen == done


def test_one_profiler_at_a_time():
    with torch.profiler.profile(), pytest.raises(record.ProfilerInUse, match="another profiler runs already"):
        onepass.profile(lambda: None, warmup=0, steps=1)


def test_a_recording_that_another_profiler_has_ended():
    with record.recording() as recorded, torch.profiler.profile():
        torch.ones(2)
    with pytest.raises(record.ProfilerInUse, match="another profiler ended this recording"):
        recorded.trace()
