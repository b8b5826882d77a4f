"""Loops in the code that PyTorch's compiler writes for a CPU, for the recommender of examples/recommender.py.

    python benchmarks/lookups.py

As written, fused, and by hand with one table: the outermost loops of forward's code and of backward's, the other layers and the
loss included. They don't depend on the machine's speed. It takes a minute or two, and writes them to
benchmarks/results/cpu/scripts/recommender.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch._inductor.utils import run_and_get_code

from onepass.bench.record import commit

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples"))
import recommender  # noqa: E402

OUT = ROOT / "benchmarks" / "results" / "cpu" / "scripts" / "recommender.json"
OUTERMOST = "for(int64_t x0="


def main() -> None:
    device, (batch, width, largest) = torch.device("cpu"), recommender.SMALL
    rows = [max(3, int(largest ** (1 - i / recommender.TABLES))) for i in range(recommender.TABLES)]
    dense, ids, clicked = recommender.clicks(device, rows, batch)
    found = {}
    for name, (_, call) in recommender.ways(device, False, rows, width).items():
        if name == "as written":  # which no compiler sees
            continue

        def step(call=call) -> None:
            F.binary_cross_entropy_with_logits(call(dense, ids), clicked).backward()

        _, (forward, backward) = run_and_get_code(step)
        found[name] = {"forward": forward.count(OUTERMOST), "backward": backward.count(OUTERMOST)}
        print(name, found[name])
    made = {"commit": commit(), "torch": torch.__version__, "tables": recommender.TABLES, "loops": found}
    OUT.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
