"""Ranks of test_tensor_parallel.py: they note when collectives start and are waited for in the benchmark's steps, made small."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from parallel.meeting import join

from onepass.parallel import tensor_parallel
from onepass.parallel.collectives import Pending


def noted(events):
    """Note each collective that starts, and each that is waited for while it runs."""
    stock = Pending.wait

    def start(begin):
        return lambda *args: (events.append("start"), begin(*args))[1]

    def wait(self):
        if self._finish is not None:
            events.append("wait")
        return stock(self)

    for name in ("start_all_gather", "start_reduce_scatter", "start_all_reduce"):
        setattr(tensor_parallel, name, start(getattr(tensor_parallel, name)))
    Pending.wait = wait


def run(rank, ranks, folder, backend):
    join(rank, ranks, folder, backend)
    sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
    import tensor_parallel as bench

    bench.TOKENS, bench.BATCH, bench.HIDDEN, bench.INNER, bench.VOCABULARY = 8, 1, 16, 32, 64
    events, found = [], {}
    noted(events)
    for made in (bench.backward_of, bench.flush_of):
        step = made(dist.group.WORLD, torch.device("cpu"))
        events.clear()
        step()
        found[made.__name__] = [events.copy()]
        events.clear()
        with bench.waiting_for_each():
            step()
        found[made.__name__].append(events.copy())
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()
