"""use_copy_engines: bits of a model under FSDP2 are those by the backend's own collectives. On CPUs memory is shared by files."""

from contextlib import contextmanager
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from parallel.worlds import PAIRS
from torch import nn
from torch.distributed import _symmetric_memory
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from onepass.gradients import copy_engines
from onepass.parallel import use_copy_engines

WORLDS = PAIRS


class SharedFile:
    """A handle of a buffer of which each rank's is a file that the others map."""

    numbers = count()

    def __init__(self, buffer, name):
        self.files = [f"/dev/shm/{name}-{rank}" for rank in range(dist.get_world_size())]
        self.mine = torch.from_file(self.files[dist.get_rank()], shared=True, size=buffer.numel(), dtype=torch.uint8)
        buffer.set_(self.mine.untyped_storage())

    def get_buffer(self, rank, sizes, dtype, offset):
        dist.barrier()
        size = dtype.itemsize * (offset + sizes[0])
        return torch.from_file(self.files[rank], shared=True, size=size, dtype=torch.uint8).view(dtype)[offset:]

    def barrier(self, channel, timeout_ms):
        dist.barrier()


@contextmanager
def shared_memory(name):
    """Files in place of GPUs' memory that peers map, and streams that wait for nothing."""
    if torch.get_default_device().type == "cuda":
        yield
        return
    stream = SimpleNamespace(wait_event=lambda event: None, record_event=lambda: "event")
    with (
        patch.object(_symmetric_memory, "empty", lambda size, dtype, device: torch.empty(size, dtype=dtype)),
        patch.object(_symmetric_memory, "rendezvous", lambda x, group: SharedFile(x, f"{name}-{next(SharedFile.numbers)}")),
        patch.object(torch.cuda, "current_stream", lambda: stream),
        patch.object(torch.cuda, "synchronize", lambda device: None),
        patch.object(copy_engines, "_check_reach", lambda group: None),
    ):
        yield
    dist.barrier()
    for file in Path("/dev/shm").glob(f"{name}-*-{dist.get_rank()}"):
        file.unlink()


def model_of(dtype):
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(24, 40), nn.GELU(), nn.Linear(40, 24)) for _ in range(5)]
    return nn.Sequential(*layers, nn.Linear(24, 7)).to(dtype)


def trained(group, how, dtype, policy):
    model = model_of(dtype)
    mesh = init_device_mesh(torch.get_default_device().type, (group.size(),))
    for each in (*model, model):
        fully_shard(each, mesh=mesh, mp_policy=policy)
    if how is not None:
        use_copy_engines(model, **how)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        x = torch.randn(4, 24, generator=torch.Generator("cpu").manual_seed(10 * step + group.rank()), device="cpu")
        model(x.to(torch.get_default_device(), dtype)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().full_tensor() for parameter in model.parameters()]


KINDS = {
    "fp32": (torch.float32, MixedPrecisionPolicy()),
    "bf16": (torch.bfloat16, MixedPrecisionPolicy()),
    "bf16 of fp32": (torch.float32, MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)),
}


def test_weights_have_the_bits_of_the_backends_collectives(group):
    names = [f"onepass-{torch.seed()}" if group.rank() == 0 else ""]
    dist.broadcast_object_list(names)
    for dtype, policy in KINDS.values():
        expected = trained(group, None, dtype, policy)
        for how in ({}, {"reduce": False}):
            with shared_memory(names[0]):
                found = trained(group, how, dtype, policy)
            assert all(map(torch.equal, found, expected))


def test_what_it_refuses(group):
    with pytest.raises(ValueError, match="model must be sharded by fully_shard"):
        use_copy_engines(nn.Linear(2, 2))
    model = nn.Linear(4, 4)
    device = torch.get_default_device().type
    fully_shard(model, mesh=init_device_mesh(device, (group.size(),)))
    with patch.object(torch.cuda, "device_count", lambda: 1):
        error = "but is on cpu" if device == "cpu" else "it has 2 and this host 1 GPUs"
        with pytest.raises(ValueError, match=error):
            use_copy_engines(model)
