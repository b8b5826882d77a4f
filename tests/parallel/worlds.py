"""The worlds in which tests of several processes run: a backend and a number of ranks."""

import pytest
import torch
import torch.multiprocessing as mp


def _world(backend, ranks):
    too_few = pytest.mark.skipif(torch.cuda.device_count() < ranks, reason=f"needs {ranks} GPUs")
    return pytest.param((backend, ranks), id=f"{backend}-{ranks}", marks=[pytest.mark.gpu, too_few] if backend == "nccl" else [])


PAIRS = [_world("gloo", 2), _world("nccl", 2)]
WORLDS = [*PAIRS, _world("gloo", 4), _world("nccl", 4)]


def found_by(run, world, folder):
    """What each rank's `run` has saved. One start for all of a file's tests, as importing torch is what takes the time."""
    backend, ranks = world
    mp.spawn(run, args=(ranks, str(folder), backend), nprocs=ranks)
    return [torch.load(folder / f"{rank}.pt", map_location="cpu") for rank in range(ranks)]
