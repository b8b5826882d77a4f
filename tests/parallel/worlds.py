"""Start the ranks of a test. A world is a backend and a number of ranks."""

import os
import sys
from multiprocessing import forkserver
from unittest.mock import patch

import pytest
import torch
import torch.multiprocessing as mp


def _world(backend, ranks):
    too_few = pytest.mark.skipif(torch.cuda.device_count() < ranks, reason=f"needs {ranks} GPUs")
    return pytest.param((backend, ranks), id=f"{backend}-{ranks}", marks=[pytest.mark.gpu, too_few] if backend == "nccl" else [])


PAIRS = [_world("gloo", 2), _world("nccl", 2)]
WORLDS = [*PAIRS, _world("gloo", 4), _world("nccl", 4)]


def started(run, args, ranks, join=True):
    """Start processes that call `run`. They fork from a server process that has done what takes the most time: `preloaded.py`.

    The server is started at the first call, so all processes have the environment and the output streams of that time. By a
    CUDA build they are spawned: a fork can't use CUDA once its parent has counted the GPUs, nor autograd once that has run.
    """
    if torch.version.cuda is not None:
        return mp.start_processes(run, args, ranks, join=join, start_method="spawn")
    mp.set_forkserver_preload(["parallel.preloaded"])
    with patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):  # the server knows none of sys.path but this
        forkserver.ensure_running()
    return mp.start_processes(run, args, ranks, join=join, start_method="forkserver")


def found_by(run, world, folder, *more):
    """Run the ranks and return what each has saved. One start serves all tests of a file. `more`: their last arguments."""
    backend, ranks = world
    started(run, (ranks, str(folder), backend, *more), ranks)
    return [torch.load(folder / f"{rank}.pt", map_location="cpu") for rank in range(ranks)]
