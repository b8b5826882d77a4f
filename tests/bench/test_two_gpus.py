"""benchmarks/two_gpus.py: its cases made small over two processes, and what it reads from a trace."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

pytest.importorskip("transformers", minversion="5")
pytest.importorskip("peft")

FOLDER = Path(__file__).parents[2] / "benchmarks"


def test_a_run(tmp_path):
    """Both ranks have the same model: together they begin with the mean of the losses that they have alone."""
    path = tmp_path / "two.json"
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=localhost:0",
    ]
    command += [str(FOLDER / "two_gpus.py"), "--small", "--layers=1", "--warm=2", "--rounds=1", "--steps=1", f"--json={path}"]
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--case=8b_backward", "--case=lora_ddp", "--way=keep,bucket"],
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("keep,bucket") == 2 and done.stdout.count("scaling") == 2
    found = json.loads(path.read_text())
    assert {"commit", "gpu", "versions"} < found.keys() and found["ranks"] == 2
    for name in ("8b_backward", "lora_ddp"):
        row = found["rows"][name]
        alone, of_ranks = row["alone"], row["together"]["keep,bucket"]
        together = of_ranks[0]
        assert together["losses"][0] == pytest.approx(sum(each["losses"][0] for each in alone) / 2, rel=1e-4)
        assert alone[0]["losses"][0] != alone[1]["losses"][0] and together["losses"][1] != together["losses"][0]
        assert len(set(together["losses_of_one_batch"])) == 1
        slowest = max(each["ms"] for each in of_ranks)
        assert row["scaling"]["keep,bucket"] == pytest.approx(2 * 64 / slowest / sum(64 / each["ms"] for each in alone))


def test_a_trace():
    with mock.patch.object(sys, "path", [str(FOLDER), *sys.path]):
        bench = importlib.import_module("two_gpus")
    traced = [("gemm", (0.0, 2.0)), ("ncclDevKernel_AllGather", (1.0, 5.0)), ("Memcpy DtoD", (4.0, 4.5)), ("other", (6.0, 7.0))]
    traced.append(("FSDP::all_gather (layers.0)", (0.0, 7.0)))  # the profiler's range
    found = bench.summary(traced)
    assert found["kinds"] == {"products": 2.0, "NCCL": 4.0, "FSDP2's copies": 0.5, "rest": 1.0}
    assert found["nccl_alone"] == pytest.approx(2.5) and found["idle"] == pytest.approx(1.0)
