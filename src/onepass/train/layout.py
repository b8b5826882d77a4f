"""The layout of ranks. Tensor-parallel ranks are adjacent; data-parallel ranks come next, and pipeline stages last."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from onepass.gpt.config import Config
from onepass.runtime.errors import CommandError
from onepass.train.options import Options

T = TypeVar("T")
_PATIENCE = timedelta(minutes=10)  # timeout of collectives
_TURN_S = 5.0  # in which torchrun has ended all ranks after the first one ended


@dataclass(frozen=True)
class RankGroup:
    """This rank's group along one dimension of the layout. `group` is None if it has one rank."""

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
        """Whether this rank prints and writes files."""
        return self.rank == 0

    def average(self, value: torch.Tensor) -> torch.Tensor:
        """Return a scalar tensor's mean over the data-parallel ranks."""
        if self.data.group is None:
            return value
        value = value.clone()
        dist.all_reduce(value, group=self.data.group)
        return value / self.data.size

    def on_first(self, act: Callable[[], T]) -> T:
        """Call act on the first rank. On all ranks return what it returns, which is pickled, or raise what it raises."""
        done: list[Any] = [None, None]
        if self.first:
            try:
                done[0] = act()
            except Exception as error:  # of any type: the other ranks wait for it
                done[1] = error
        if self.ranks > 1:
            dist.broadcast_object_list(done, 0, device=torch.device("cpu"))
        if done[1] is not None:
            raise done[1]
        return done[0]  # type: ignore[no-any-return]

    def wait_for_all(self) -> None:
        if self.ranks > 1:
            dist.barrier()


def ranks_there() -> int:
    """Return the number of ranks that torchrun started, or 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


@contextmanager
def one_line_of_all_ranks() -> Iterator[None]:
    """Raise an error of a rank as a CommandError, at a time when torchrun lets one rank only print it.

    torchrun ends all ranks when one ends. A mistake that all ranks have found is the first one's to say, at once. Other errors
    wait: theirs may be a rank's that has lost another one, which is still there to say why. torchrun gets the traceback.
    """
    try:
        yield
    except Exception as error:
        if ranks_there() == 1:
            raise
        rank, expected = int(os.environ.get("RANK", "0")), isinstance(error, CommandError)
        time.sleep(_TURN_S * ((rank > 0) + (not expected)))
        if expected:
            raise
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(error)
        message = " ".join(str(error).split())
        raise CommandError(f"rank {rank}: {type(error).__name__}: {message}", status=1) from None


def check(config: Config, ranks: int) -> None:
    """Raise CommandError if `ranks` cannot be divided into the configuration's groups."""
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
def started(
    config: Config, options: Options, device: torch.device, others: Mapping[str, Any] | None = None
) -> Iterator[ParallelLayout]:
    """Create this rank's process groups, and destroy them at the end of the block. Ranks must agree on all settings.

    A rank whose block raises keeps them until it ends, so that the others don't fail before it has said why.

    Args:
        others: what else must be the same on all ranks, by name.
    """
    ranks = ranks_there()
    check(config, ranks)
    if ranks == 1:
        yield ParallelLayout(device)
        return
    on_gpu = device.type == "cuda"
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=_PATIENCE, device_id=device if on_gpu else None)
    _check_agreement({**config.to_dict(), **options.to_dict(), **(others or {})})
    yield _groups(config, device)
    dist.destroy_process_group()


def _check_agreement(mine: dict[str, Any]) -> None:
    """Raise CommandError on every rank if a setting differs."""
    all_of_them = [mine] * dist.get_world_size()
    dist.all_gather_object(all_of_them, mine)
    first = all_of_them[0]
    for rank, theirs in enumerate(all_of_them):
        for name in first:
            if theirs[name] != first[name]:
                raise CommandError(
                    f"{name} must be the same on all ranks, but is {first[name]!r} on rank 0 and {theirs[name]!r} on rank {rank}"
                )


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
    """Return this rank's group. Every rank creates the groups of all rows, because new_group is collective."""
    own = RankGroup()
    for row in rows.tolist():
        made = dist.new_group(row) if len(row) > 1 else None
        if rank in row:
            own = RankGroup(row.index(rank), len(row), made)
    return own


def device_of_this_rank() -> torch.device:
    """Select and return the GPU of torchrun's LOCAL_RANK, or return the CPU if there is no GPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    index, there = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if index >= there:
        raise CommandError(f"rank {index} of this machine has no GPU: there are {there}")
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device
