"""Two ranks (gloo) beside stock: tensor and sequence parallelism, and two pipeline stages."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

EXPERTS = ("experts allgather", "experts alltoall", "padded alltoall", "tensors allgather", "tensors alltoall")


@pytest.mark.parametrize(
    ("worker", "kind"),
    [
        *(("parallel", kind) for kind in ("rms", "layer", "heads", "few", "foretold")),
        ("pipeline", "rms"),
        ("mixers", "delta"),
        ("mixers", "mamba"),
        *(("experts", kind) for kind in EXPERTS),
    ],
)
def test_two_ranks(worker, kind, tmp_path):
    if worker == "mixers":
        pytest.importorskip("megatron.core.models.hybrid.hybrid_model", reason="megatron-core 0.17 has no HybridModel")
    script = Path(__file__).with_name(f"{worker}_worker.py")
    commands = [[sys.executable, "-W", "ignore", str(script), str(rank), str(tmp_path / "store"), kind] for rank in range(2)]
    ranks = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)
        for command in commands
    ]
    try:
        said = [rank.communicate(timeout=300)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(said)
