"""benchmarks/rates.py runs on two processes without GPUs, and its record has what benchmarks/planned.py reads."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SECTIONS = "copies", "products", "sustained", "collectives", "overlap"


def test_two_ranks_measure_and_the_first_writes(tmp_path):
    path = tmp_path / "rates.json"
    asked = [word for section in SECTIONS for word in ("--section", section)]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "rates.py", "--small"]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--json", str(path), *asked],
        cwd=ROOT / "benchmarks",
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(path.read_text())
    assert found["ranks"] == 2 and set(found["sections"]) == set(SECTIONS)
    kept = json.loads((ROOT / "benchmarks" / "results" / "h200" / "scripts" / "rates.json").read_text())["sections"]
    for section, rows in found["sections"].items():
        kinds = {frozenset(row) for row in kept[section].values()}
        assert rows and all(frozenset(row) in kinds for row in rows.values()), section
        assert all(value > 0 for row in rows.values() for value in row.values())
