"""Replace the ranks of benchmarks/gpt_parallel.py: a rank fails or hangs as its row is named. It imports what it needs only."""

import json
import os
import signal
import time
from pathlib import Path


def run(rank, rows, small, folder, traces):
    for at, row in enumerate(rows):
        if row.name == "killed" and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if row.name == "raises" and rank == 1:
            raise ValueError("that was wrong")
        if row.name in ("killed", "raises", "waits"):
            time.sleep(600)
        Path(folder, f"{at}-{rank}.json").write_text(json.dumps({"rank": rank, "row": row.name}))
