"""benchmarks/tensor_parallel.py: its steps on two processes, and each collective waited for where it starts."""

import pytest
import torch.distributed as dist
from bench import tensor_parallel_ranks
from parallel.worlds import found_by


@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="this PyTorch has no gloo")
def test_each_collective_is_waited_for_where_it_starts(tmp_path):
    for found in found_by(tensor_parallel_ranks.run, ("gloo", 2), tmp_path):
        for name, collectives in (("backward_of", 3), ("flush_of", 4)):
            stock, waiting = found[name]
            assert waiting == ["start", "wait"] * collectives
            assert sorted(stock) == sorted(waiting) and stock != waiting
