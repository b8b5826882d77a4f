"""use_copy_engines: bits of a model under FSDP2 are those by the backend's own collectives. On CPUs memory is shared by files."""

from contextlib import contextmanager
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from parallel.worlds import PAIRS_OF_GPUS
from torch import nn
from torch.distributed import _symmetric_memory
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from onepass.gradients import copy_engines
from onepass.parallel import use_copy_engines

WORLDS = PAIRS_OF_GPUS


class SharedFile:
    """A handle of a buffer of which each rank's is a file that the others map. The journal says what happened to which."""

    numbers = count()

    def __init__(self, buffer, name, journal):
        self.name, self.journal = name, journal
        self.files = [f"/dev/shm/{name}-{rank}" for rank in range(dist.get_world_size())]
        self.mine = torch.from_file(self.files[dist.get_rank()], shared=True, size=buffer.numel(), dtype=torch.uint8)
        buffer.set_(self.mine.untyped_storage())
        dist.barrier()  # all files are there

    def get_buffer(self, rank, sizes, dtype, offset):
        self.journal.append(("read", self.name))
        size = dtype.itemsize * (offset + sizes[0])
        return torch.from_file(self.files[rank], shared=True, size=size, dtype=torch.uint8).view(dtype)[offset:]

    def barrier(self, channel, timeout_ms):
        dist.barrier()
        self.journal.append(("barrier", self.name))


class Buffers(copy_engines._Buffers):
    made = []

    def __init__(self, group):
        super().__init__(group)
        self.made.append(self)

    def take(self, *kind):
        tensor = super().take(*kind)
        handle = self._taken.handle
        handle.journal.append(("taken", handle.name))
        return tensor

    def sizes(self):
        return sorted(slot.buffer.numel() for slots in self._slots.values() for slot in slots)


@contextmanager
def shared_memory(group):
    """Files in place of GPUs' memory that peers map. Yield a journal; an event is a place in it."""
    journal = []
    if torch.get_default_device().type == "cuda":
        yield journal
        return
    names = [f"onepass-{torch.seed()}" if group.rank() == 0 else ""]
    dist.broadcast_object_list(names)
    name = names[0]
    stream = SimpleNamespace(wait_event=lambda event: journal.append(("wait", event)), record_event=lambda: len(journal))
    of_file = lambda buffer, group: SharedFile(buffer, f"{name}-{next(SharedFile.numbers)}", journal)  # noqa: E731
    Buffers.made.clear()
    with (
        patch.object(_symmetric_memory, "empty", lambda size, dtype, device: torch.empty(size, dtype=dtype)),
        patch.object(_symmetric_memory, "rendezvous", of_file),
        patch.object(torch.cuda, "current_stream", lambda: stream),
        patch.object(torch.cuda, "synchronize", lambda device: None),
        patch.object(copy_engines, "_check_reach", lambda group: None),
        patch.object(copy_engines, "_Buffers", Buffers),
    ):
        yield journal
    dist.barrier()
    for file in Path("/dev/shm").glob(f"{name}-*-{dist.get_rank()}"):
        file.unlink()


def check_order(journal):
    """Peers read after a barrier, which comes after the reads of the collective before. A buffer is taken again when the stream
    waits for a barrier that comes after reads of it."""
    unordered = 0
    for buffer in {name for what, name in journal if what == "taken"}:
        last = {"taken": -1, "barrier": -1, "read": -1}
        for place in [place for place, (_, name) in enumerate(journal) if name == buffer]:
            what, (before, event) = journal[place][0], journal[place - 1]
            if what == "read":
                assert last["barrier"] > last["taken"], "memory of peers is read before a barrier"
            elif what == "barrier":
                unordered += before != "wait" or journal[event - 1][0] != "read"
            elif last["read"] >= 0:
                later = next(at for at in range(last["read"], place) if journal[at][0] == "barrier")
                assert before == "wait" and event > later, "a buffer is written while peers read it"
            last[what] = place
    assert unordered <= 2, "a barrier comes before reads of another stream"  # the first gather's and the first reduction's do


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
    for dtype, policy in KINDS.values():
        expected = trained(group, None, dtype, policy)
        for how in ({}, {"reduce": False}):
            with shared_memory(group) as journal:
                found = trained(group, how, dtype, policy)
                made = [each.sizes() for each in Buffers.made]
            check_order(journal)
            assert all(map(torch.equal, found, expected))
            if journal:
                block, last = 1984, 200  # numbers, padded; gathered twice on end, the last layer has two buffers
                gathers, reductions = [last] * 2 + [block] * 3, [last] + [block] * 3
                gathers = [(policy.param_dtype or dtype).itemsize * size for size in gathers]
                reductions = [(policy.reduce_dtype or dtype).itemsize * size for size in reductions] if not how else []
                assert made == [gathers, reductions]


def test_a_step_that_failed_leaves_no_trace(group):
    kind = {"dtype": torch.float32, "device": torch.device(torch.get_default_device())}
    with shared_memory(group) as journal:
        scatter = copy_engines.CopyEngineReduceScatter(group)
        for _ in range(5):
            scatter.allocate((8,), **kind)  # there is no memory for the result
        for step in range(5):
            given = scatter.allocate((8,), **kind).fill_(step + group.rank())
            result = scatter.allocate((4,), **kind)
            with pytest.raises(RuntimeError, match="must be given the tensor that they allocated last"):
                scatter(result, torch.ones(8), group, dist.ReduceOp.SUM)
            scatter(result, given, group, dist.ReduceOp.SUM)
            assert result.tolist() == [2 * step + 1.0] * 4
            del given
    check_order(journal)


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
    with patch.object(copy_engines, "_check_reach", lambda group: None):
        model.set_custom_reduce_scatter(copy_engines.CopyEngineReduceScatter(group))
        with pytest.raises(ValueError, match="must be FSDP2's own, but CopyEngineReduceScatter has replaced them"):
            use_copy_engines(model)
        use_copy_engines(model, reduce=False)
        with pytest.raises(ValueError, match="must be FSDP2's own, but CopyEngineAllGather has replaced them"):
            use_copy_engines(model, reduce=False)
