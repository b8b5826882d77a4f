"""Ranks of tests/parallel/test_killed_rank.py: the last one is killed during a collective. The others save their errors."""

import os
import signal
import traceback
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from parallel.meeting import join
from torch import nn

import onepass
from onepass.distributed import tensor_parallel as product
from onepass.parallel import MainGrads

SECONDS = 10  # the group's timeout


def run(rank, ranks, folder, backend, scenario):
    join(rank, ranks, folder, backend)
    group = dist.new_group(timeout=timedelta(seconds=SECONDS))
    dist.barrier(group)
    try:
        SCENARIOS[scenario](group, rank == ranks - 1)
        if backend == "nccl":
            torch.cuda.synchronize()  # the CPU runs ahead of the GPU until here, as within a training step
    except RuntimeError:
        Path(folder, f"{rank}.txt").write_text(traceback.format_exc())
        raise


def killed_in(owner, name):
    """Patch a function that starts a collective to kill this process instead.

    The collective is then under way on the other ranks only. Had this rank started it, all might be sent before the process ends.
    """

    def started(*args, **options):
        os.kill(os.getpid(), signal.SIGKILL)

    return mock.patch.object(owner, name, started)


def linear(group, killed):
    """Kill the rank in the second backward of a sequence-parallel layer, before dx is reduce-scattered.

    In the first, a GPU's kernels are loaded. That may wait for the GPU, which waits for the killed rank: nobody would be told.
    """
    x, weight = torch.randn(512, 4, 256, requires_grad=True), nn.Parameter(torch.randn(512, 256))
    onepass.linear(x, weight, tp_group=group, sequence_parallel=True).sum().backward()
    y = onepass.linear(x, weight, tp_group=group, sequence_parallel=True)
    with killed_in(product, "start_reduce_scatter") if killed else nullcontext():
        y.sum().backward()


def finish(group, killed):
    """Kill the rank before the first of several reductions that MainGrads.finish starts."""
    weights = [nn.Parameter(torch.randn(1 << 20)) for _ in range(3)]
    main_grads = MainGrads(weights, group=group, bucket_bytes=4)
    with main_grads.accumulate():
        sum(weight.sum() for weight in weights).backward()
    with killed_in(dist, "all_reduce") if killed else nullcontext():
        main_grads.finish()


SCENARIOS = {"linear": linear, "finish": finish}
