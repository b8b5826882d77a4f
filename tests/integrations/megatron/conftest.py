"""Megatron-core in one process on a CPU: gloo, and CUDA's current device answered by "cpu"."""

import os
import warnings

import pytest
import torch
import torch.distributed as dist


@pytest.fixture(scope="session")
def one_rank(tmp_path_factory):
    from megatron.core import parallel_state

    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path_factory.mktemp('gloo')}/store", rank=0, world_size=1)
    parallel_state.initialize_model_parallel(1, 1)
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


@pytest.fixture
def on_cpu(one_rank, monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    from megatron.core.tensor_parallel import random

    tracker = random.get_cuda_rng_tracker()
    monkeypatch.setattr(type(tracker), "fork", lambda self, name="": torch.random.fork_rng(devices=[]))
    with warnings.catch_warnings(), torch.compiler.set_stance("force_eager"):  # theirs are compiled, which takes seconds
        warnings.simplefilter("ignore")
        yield


os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


@pytest.fixture
def installed(on_cpu):
    """HybridStack's last norm is Transformer Engine's, or ours."""
    from onepass.integrations import megatron

    seams = megatron.install()
    yield seams
    seams.undo()
