"""benchmarks/gpt_parallel.py: each kind of row on two processes, what a trace is read as, and a row that fails by itself."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

ROWS = (  # each way to divide a model, and each of a pipeline's options
    "one, 4", "one, 8", "one, 8 x 1", "dp, sharded", "tp + sp, strong", "pp, 8 later",
    "pp, uneven, interleaved",
)  # fmt: skip
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="this PyTorch has no gloo")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import gpt_parallel

    return gpt_parallel


# ---- the whole ----


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What --small writes of ROWS; traces beside it."""
    folder = tmp_path_factory.mktemp("small")
    kept = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    kept.setdefault("ONEPASS_COMMIT", "unknown")  # of a copy that is no checkout
    script = [sys.executable, str(BENCHMARKS / "gpt_parallel.py"), "--small", *(word for row in ROWS for word in ("--row", row))]
    done = subprocess.run(
        [*script, "--json", str(folder / "found.json"), "--traces", str(folder / "traces")],
        env=kept, capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    traces = sorted(path.name for path in (folder / "traces").iterdir())
    return json.loads((folder / "found.json").read_text()) | {"shown": done.stdout, "traces": traces}


@pytest.mark.slow
def test_rows_are_measured(bench: Any, record: dict[str, Any]) -> None:
    rows = [row for row in bench.all_rows(bench.SMALL, 2) if row.name in ROWS]
    assert list(record["rows"]) == [row.name for row in rows] == list(ROWS) and {row.case for row in rows} == set(bench.CASES)
    assert record["commit"] and record["gpu"] and record["versions"] and record["size"]["length"] == bench.SMALL.length
    for row in rows:
        found = record["rows"][row.name]
        assert all(math.isfinite(found[key]) and found[key] > 0 for key in ("ms", "host_ms", "tokens_per_s", "loss", "norm"))
        assert found["ms_range"][0] <= found["ms"] <= found["ms_range"][1]
        assert (row.beside is not None) == ("scaling" in found) and f"{row.name}: {found['ms']:.1f} ms" in record["shown"]
        if row.beside is not None:
            others = record["rows"][row.beside]["tokens_per_s"]
            assert found["scaling"] == pytest.approx(found["tokens_per_s"] / others / row.ranks)


@pytest.mark.slow
def test_the_same_model_and_sequences_give_the_same_loss(record: dict[str, Any]) -> None:
    rows = record["rows"]
    assert {name for name, row in rows.items() if "apart" not in row} == {"one, 4", "one, 8", "one, 8 x 1"}
    for row in rows.values():
        assert row.get("apart", 0) < 1e-4 and row.get("norm_apart", 0) < 1e-3
    assert rows["one, 8"]["loss"] != pytest.approx(rows["one, 8 x 1"]["loss"], abs=1e-3)  # another model


@pytest.mark.slow
def test_a_pipelines_step_is_told_from_its_traces(record: dict[str, Any]) -> None:
    pipelines = {name: row["pipeline"] for name, row in record["rows"].items() if "pipeline" in row}
    assert len(pipelines) == 2 and len(record["traces"]) == 2 * len(pipelines)
    for name, found in pipelines.items():
        assert 0 <= found["flush_idle_ms"] <= found["flush_ms"] < found["traced_ms"] and found["drain_ms"] < found["traced_ms"]
        assert all(0 < idle < found["traced_ms"] for idle in found["idle_ms"])
        works = "later" in name or "zero" in name  # in the flush
        assert (found["flush_idle_ms"] < 0.999 * found["flush_ms"]) == works, name


def test_every_row_is_a_model_and_a_run(bench: Any) -> None:
    for size in (bench.SMALL, bench.REAL):
        rows = bench.all_rows(size, 2)
        assert len({row.name for row in rows}) == len(rows) == 30
        for row in rows:
            config, options = row.config(size), row.options(size)
            assert config.pipeline_model_parallel_size == (2 if row.case == "pp" else 1)
            assert options.global_batch_size % options.micro_batch_size == 0
            assert row.beside is None or row.beside in {each.name for each in rows}


def test_graphs_have_their_own_size(bench: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    rows = bench.all_rows(bench.REAL, 2)
    graphs = [row for row in rows if row.case == bench.GRAPHS]
    sizes = [bench.size_of(*given) for given in ((graphs, False), (rows, False), (graphs, True))]
    assert sizes == [bench.SHORT, bench.REAL, bench.SMALL]
    monkeypatch.setattr(sys, "argv", ["gpt_parallel.py", "--small", "--case", bench.GRAPHS])
    with pytest.raises(SystemExit):
        bench.main()
    assert "without --small" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "multiple", "layers"),
    [({}, 1, 6), ({}, 2, 6), ({"num_layers": 17}, 1, 6), ({"vocab_size": 32000}, 1, 7), ({"num_layers": 4}, 2, 2)],
)
def test_the_head_takes_the_place_of_layers(bench: Any, changes: dict[str, int], multiple: int, layers: int) -> None:
    assert bench.layers_beside_head(bench.preset("1B", **changes), multiple) == layers


# ---- what a trace is read as ----


def event(cat: str, name: str, start: float, end: float, correlation: int = 0) -> dict[str, Any]:
    args = {"correlation": correlation} if correlation else {}
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": end - start, "args": args}


def test_kernels_belong_to_the_part_that_launched_them(bench: Any) -> None:
    events = [
        event("user_annotation", "pp forward 0", 0, 40),  # of the step before
        event("user_annotation", bench.STEP, 50, 400),
        event("user_annotation", "pp forward 0", 60, 100),
        event("gpu_user_annotation", "pp forward 0", 60, 100),
        event("user_annotation", "pp backward 0", 110, 160),
        event("cuda_runtime", "cudaLaunchKernel", 30, 31, 1),
        event("cuda_runtime", "cudaLaunchKernel", 70, 71, 2),
        event("cuda_driver", "cuLaunchKernelEx", 120, 121, 3),
        event("cuda_runtime", "cudaLaunchKernel", 130, 131, 4),
        event("cuda_runtime", "cudaLaunchKernel", 170, 171, 5),
        event("kernel", "of the step before", 65, 68, 1),
        event("kernel", "gemm", 150, 170, 2),  # runs after its part has ended on the CPU
        event("kernel", "triton", 180, 200, 3),
        event("kernel", "ncclDevKernel_SendRecv", 200, 300, 4),
        event("kernel", "adamw", 300, 350, 5),
    ]
    trace = {"traceEvents": events, "baseTimeNanoseconds": 2_000_000}
    assert bench.work(trace, on_gpu=True) == [("forward", 2.15, 2.17), ("backward", 2.18, 2.2)]
    assert bench.work(trace, on_gpu=False) == [("forward", 2.06, 2.1), ("backward", 2.11, 2.16)]


def test_flush_drain_and_idle_are_what_the_top_says(bench: Any) -> None:
    first = [("forward", 10.0, 12.0), ("forward", 12.0, 14.0), ("backward", 20.0, 24.0), ("backward", 26.0, 30.0)]
    last = [("forward", 12.0, 15.0), ("backward", 15.0, 20.0), ("forward", 20.0, 22.0), ("backward", 21.0, 26.0)]
    found = bench.pipelined([first, last])
    assert found == {"traced_ms": 20, "idle_ms": [8, 6], "drain_ms": 16, "flush_ms": 4, "flush_idle_ms": 4}
    found = bench.pipelined([first, [*last, ("flush", 25.5, 27.0), ("flush", 28.0, 29.0)]])
    assert found == {"traced_ms": 20, "idle_ms": [8, 4], "drain_ms": 16, "flush_ms": 4, "flush_idle_ms": 2}


# ---- one row's failure is its own ----


@pytest.mark.slow
def test_the_rows_after_one_that_fails_have_new_ranks(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from bench import gpt_parallel_ranks

    monkeypatch.setattr(bench, "run", gpt_parallel_ranks.run)
    names, found = ("good", "raises", "killed", "better", "waits"), {}
    rows = [SimpleNamespace(name=name, ranks=2) for name in names]
    for row, answer in bench.results(rows, True, None):
        found[row.name] = answer
        monkeypatch.setattr(bench, "PATIENCE", 1 if row.name == "better" else 120)  # ranks that start take long on a busy machine
    assert list(found) == list(names)
    for name in ("good", "better"):
        assert found[name] == [{"rank": rank, "row": name} for rank in range(2)]
    assert "that was wrong" in found["raises"] and "SIGKILL" in found["killed"] and " 1 seconds" in found["waits"]


def test_a_failed_yardstick_leaves_scaling_away(bench: Any) -> None:
    one, two = bench.Row("one", "one", 1, 4, 4), bench.Row("two", "dp", 2, 4, 2, "one")
    told = {"one": {"error": "out of memory"}, "two": {"tokens_per_s": 8.0, "loss": 1.0, "norm": 1.0}}
    bench.compare(two, [one, two], told)
    assert told["two"] == {"tokens_per_s": 8.0, "loss": 1.0, "norm": 1.0}
    assert "out of memory" in bench.line(one, told["one"])
    told |= {"one": {"tokens_per_s": 5.0, "loss": 1.5, "norm": 2.0}, "longer": {"loss": 9.0, "norm": 9.0}}
    bench.compare(two, [bench.Row("longer", "one", 1, 8, 8), one, two], told)
    wanted = {"scaling": 0.8, "apart": 0.5, "norm_apart": 0.5, "apart_from": "one"}
    assert told["two"] == {"tokens_per_s": 8.0, "loss": 1.0, "norm": 1.0} | wanted
