"""Two ranks (gloo): tensor and sequence parallelism beside stock's tensor parallelism."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed")
WORKER = Path(__file__).with_name("parallel_worker.py")


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_tensor_and_sequence_parallel(kind, tmp_path):
    commands = [[sys.executable, "-W", "ignore", str(WORKER), str(rank), str(tmp_path / "store"), kind] for rank in range(2)]
    ranks = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)
        for command in commands
    ]
    try:
        said = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(said)
