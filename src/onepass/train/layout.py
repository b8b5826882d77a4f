"""Which rank does what: tensor-parallel ranks next to each other, then data-parallel ones, then the stages of the pipeline."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from onepass.gpt.config import Config
from onepass.runtime.errors import CommandError

_PATIENCE = timedelta(minutes=10)  # with a rank that doesn't come


@dataclass(frozen=True)
class RankGroup:
    """The ranks along one dimension that this one is of; `group` is None where it is alone."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None


@dataclass(frozen=True)
class ParallelLayout:
    device: torch.device
    tensor: RankGroup = RankGroup()
    data: RankGroup = RankGroup()
    pipeline: RankGroup = RankGroup()
    rank: int = 0
    ranks: int = 1

    @property
    def first(self) -> bool:
        """Whether this rank is the one that speaks and writes."""
        return self.rank == 0

    def average(self, value: torch.Tensor) -> torch.Tensor:
        """A number's mean over the data-parallel ranks."""
        if self.data.group is None:
            return value
        value = value.clone()
        dist.all_reduce(value, group=self.data.group)
        return value / self.data.size

    def wait_for_all(self) -> None:
        if self.ranks > 1:
            dist.barrier()


def ranks_there() -> int:
    """As torchrun says."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def check(config: Config, ranks: int) -> None:
    """Refuse what so many ranks can't be divided into."""
    model = config.tensor_model_parallel_size * config.pipeline_model_parallel_size
    sizes = (
        f"tensor_model_parallel_size {config.tensor_model_parallel_size} x pipeline_model_parallel_size "
        f"{config.pipeline_model_parallel_size}"
    )
    if model > ranks:
        how = f": start it by torchrun --nproc-per-node {model} -m onepass train ..." if ranks == 1 else ""
        raise CommandError(f"{sizes} needs {model} ranks, but there are {ranks}{how}")
    if ranks % model:
        raise CommandError(f"the {ranks} ranks must be a multiple of {sizes}, {model}")


@contextmanager
def started(config: Config, device: torch.device) -> Iterator[ParallelLayout]:
    """The process groups of this rank, for as long as the block runs."""
    ranks = ranks_there()
    check(config, ranks)
    if ranks == 1:
        yield ParallelLayout(device)
        return
    on_gpu = device.type == "cuda"
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=_PATIENCE, device_id=device if on_gpu else None)
    try:
        yield _groups(config, device)
    finally:
        dist.destroy_process_group()


def _groups(config: Config, device: torch.device) -> ParallelLayout:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    tensor, pipeline = config.tensor_model_parallel_size, config.pipeline_model_parallel_size
    data = ranks // (tensor * pipeline)
    numbers = torch.arange(ranks).view(pipeline, data, tensor)
    return ParallelLayout(
        device,
        _group(numbers.reshape(-1, tensor), rank),
        _group(numbers.transpose(1, 2).reshape(-1, data), rank),
        _group(numbers.permute(1, 2, 0).reshape(-1, pipeline), rank),
        rank,
        ranks,
    )


def _group(rows: torch.Tensor, rank: int) -> RankGroup:
    """Of all rows, which are all made by all ranks, the one that this rank is in."""
    found = RankGroup()
    for row in rows.tolist():
        made = dist.new_group(row) if len(row) > 1 else None
        if rank in row:
            found = RankGroup(row.index(rank), len(row), made)
    return found


def device_of_this_rank() -> torch.device:
    """The GPU with the number that torchrun gives, or the CPU where there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    index, there = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if index >= there:
        raise CommandError(f"rank {index} of this machine has no GPU: there are {there}")
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device
