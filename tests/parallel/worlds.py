"""The worlds in which tests of several processes run: a backend and a number of ranks."""

import os

import pytest
import torch
import torch.multiprocessing as mp


def _world(backend, ranks):
    too_few = pytest.mark.skipif(torch.cuda.device_count() < ranks, reason=f"needs {ranks} GPUs")
    return pytest.param((backend, ranks), id=f"{backend}-{ranks}", marks=[pytest.mark.gpu, too_few] if backend == "nccl" else [])


PAIRS = [_world("gloo", 2), _world("nccl", 2)]
WORLDS = [*PAIRS, _world("gloo", 4), _world("nccl", 4)]


def started(run, args, ranks, join=True):
    """So many processes that run it: forks of one that has done no more than import, as that is what takes the time.

    They have the environment, and write where this process wrote, of when the first of them was started.
    """
    needed = ["torch.distributed", "onepass"]
    if os.environ.get("TRITON_INTERPRET"):
        needed.insert(0, "onepass.testing.interpreter")
    if not torch.cuda.is_available():
        needed.append("torch._dynamo")  # which asks for GPUs, and no fork may use one after that
    mp.set_forkserver_preload(needed)
    return mp.start_processes(run, args, ranks, join=join, start_method="forkserver")


def found_by(run, world, folder):
    """What each rank's `run` has saved. One start for all of a file's tests."""
    backend, ranks = world
    started(run, (ranks, str(folder), backend), ranks)
    return [torch.load(folder / f"{rank}.pt", map_location="cpu") for rank in range(ranks)]
