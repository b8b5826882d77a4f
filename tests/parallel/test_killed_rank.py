"""One rank is killed in the middle of a collective: the others end with an error, and soon."""

import os
import signal
import time
import traceback
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from parallel.meeting import join
from parallel.worlds import WORLDS, started
from torch import nn

import onepass
from onepass.distributed import tensor_parallel as product
from onepass.parallel import MainGrads

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="this PyTorch has no gloo")
SECONDS = 10  # the group's timeout
START = 120  # seconds to import torch and meet, on a busy machine
WHERE = {"linear": "product/function.py", "finish": "main_grads.finish()"}  # what the traceback shows


def run(rank, ranks, folder, backend, scenario):
    """Run a scenario, in which the last rank is killed. The others save their errors."""
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


def end_of(world, scenario, folder, seconds=20):
    """The exit status of each rank, the killed one's last. They have so many seconds to end after the group's timeout."""
    backend, ranks = world
    args = ranks, str(folder), backend, scenario
    *others, killed = started(run, args, ranks, join=False).processes
    killed.join(START)
    limit = time.monotonic() + SECONDS + seconds
    for process in (*others, killed):
        process.join(max(0.0, limit - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()
            told = [path.read_text() for path in folder.glob("*.txt")]
            pytest.fail(f"a rank was waiting still after {SECONDS + seconds} seconds; told were {told}")
    return [process.exitcode for process in (*others, killed)]


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("world", WORLDS)
def test_the_others_are_told(world, scenario, tmp_path, monkeypatch):
    """Over NCCL only with TORCH_NCCL_BLOCKING_WAIT=1, where the CPU waits for every collective, and so can be told."""
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "1")
    ended = end_of(world, scenario, tmp_path, seconds=20 if world[0] == "gloo" else 90)  # NCCL takes its time to let go
    told = {rank: (tmp_path / f"{rank}.txt").read_text() for rank in range(world[1] - 1) if (tmp_path / f"{rank}.txt").exists()}
    assert ended == [1] * (world[1] - 1) + [-signal.SIGKILL], told
    assert all(WHERE[scenario] in text for text in told.values()), told


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("world", [world for world in WORLDS if "nccl" in world.id])
def test_as_nccl_is_the_watchdog_ends_the_others(world, scenario, tmp_path, capfd):
    """It says so in the log, and may take its time to write down what was under way."""
    *others, killed = end_of(world, scenario, tmp_path, seconds=120)
    assert killed == -signal.SIGKILL and all(others)
    assert "NCCL" in capfd.readouterr().err
