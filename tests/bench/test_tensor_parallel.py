"""benchmarks/tensor_parallel.py: its steps, made small, on two ranks, and each collective waited for where it starts."""

import importlib
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from parallel.worlds import PAIRS

from onepass.distributed import tensor_parallel
from onepass.distributed.collectives import Pending

WORLDS = PAIRS[:1]


def noted(events):
    """Patch collectives to note each that starts, and each that is waited for while it runs."""
    stock = Pending.wait

    def start(begin):
        return lambda *args: (events.append("start"), begin(*args))[1]

    def wait(self):
        if self._finish is not None:
            events.append("wait")
        return stock(self)

    names = ("start_all_gather", "start_reduce_scatter", "start_all_reduce")
    starts = {name: start(getattr(tensor_parallel, name)) for name in names}
    return mock.patch.multiple(tensor_parallel, **starts), mock.patch.object(Pending, "wait", wait)


@pytest.mark.parametrize(("made", "collectives"), [("backward_of", 3), ("flush_of", 4)])
def test_each_collective_is_waited_for_where_it_starts(group, made, collectives):
    with mock.patch.object(sys, "path", [str(Path(__file__).parents[2] / "benchmarks"), *sys.path]):
        bench = importlib.import_module("tensor_parallel")
    bench.TOKENS, bench.BATCH, bench.HIDDEN, bench.INNER, bench.VOCABULARY = 8, 1, 16, 32, 64
    stock, waiting = [], []
    step = getattr(bench, made)(group, torch.device("cpu"))
    starts, waits = noted(stock)
    with starts, waits:
        step()
    starts, waits = noted(waiting)
    with starts, waits, bench.waiting_for_each():
        step()
    assert waiting == ["start", "wait"] * collectives
    assert sorted(stock) == sorted(waiting) and stock != waiting
