"""The layout of ranks. Tensor-parallel ranks are adjacent; data-parallel ranks come next, and pipeline stages last.

Ranks of several nodes may share a disk or not (`disks.py`): what each disk needs is written by the first rank that sees it.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from onepass.gpt.config import Config
from onepass.runtime.errors import CommandError
from onepass.train.options import Options

T = TypeVar("T")
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
    hosts: tuple[str, ...] = ()  # the name of each rank's node
    disks: tuple[tuple[int, ...], ...] = ()  # the ranks that see each disk with the run's folder; empty where all see one

    @property
    def first(self) -> bool:
        """Whether this rank prints and writes files."""
        return self.rank == 0

    @property
    def nodes(self) -> int:
        return max(1, len(set(self.hosts)))

    @property
    def first_of_nodes(self) -> list[int]:
        """The first rank of each node."""
        return sorted({host: rank for rank, host in reversed([*enumerate(self.hosts)])}.values()) or [0]

    @property
    def sharers(self) -> Sequence[int]:
        """The ranks that see this rank's disk."""
        return next((disk for disk in self.disks if self.rank in disk), range(self.ranks))

    def place(self, rank: int) -> str:
        return f"rank {rank} on {self.hosts[rank]}" if self.nodes > 1 else f"rank {rank}"

    def average(self, value: torch.Tensor) -> torch.Tensor:
        """Return a scalar tensor's mean over the data-parallel ranks."""
        if self.data.group is None:
            return value
        value = value.clone()
        dist.all_reduce(value, group=self.data.group)
        return value / self.data.size

    def on_first(self, act: Callable[[], T]) -> T:
        """Call act on the first rank. On all ranks return what it returns, which is pickled, or raise what it raises."""
        return self.on_rank(0, act)

    def on_rank(self, source: int, act: Callable[[], T]) -> T:
        done: list[Any] = [None, None]
        if self.rank == source:
            try:
                done[0] = act()
            except Exception as error:  # of any type: the other ranks wait for it
                done[1] = error
        if self.ranks > 1:
            dist.broadcast_object_list(done, source, device=torch.device("cpu"))
        if done[1] is not None:
            raise done[1]
        return done[0]  # type: ignore[no-any-return]

    def on_all(self, act: Callable[[], T]) -> list[T]:
        """Call act on all ranks. On all ranks return what each returned, by rank, or raise the first one's error."""
        done: list[Any] = [None, None]
        try:
            done[0] = act()
        except Exception as error:  # of any type: the other ranks wait for it
            done[1] = error
        everyone: list[Any] = [done]
        if self.ranks > 1:
            everyone = [None] * self.ranks
            dist.all_gather_object(everyone, done)
        for _, failure in everyone:
            if failure is not None:
                raise failure
        return [result for result, _ in everyone]

    def agree(self, act: Callable[[], T]) -> T:
        """Call act on all ranks and return this rank's result. If it raises on any rank, raise on all."""
        results: list[T] = []
        self.on_all(lambda: results.append(act()))
        return results[0]

    def on_each_disk(self, act: Callable[[], T]) -> list[T]:
        """Call act on the first rank of each disk. On all ranks return what those returned, by disk, or raise the first error."""
        if not self.disks:
            return [self.on_first(act)]
        results: list[Any] = self.on_all(lambda: act() if self.rank == self.sharers[0] else None)
        return [results[disk[0]] for disk in self.disks]

    def wait_for_all(self) -> None:
        if self.ranks > 1:
            dist.barrier()


def _local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def ranks_there() -> int:
    """Return the number of ranks that torchrun started, or 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


@contextmanager
def one_line_of_all_ranks() -> Iterator[None]:
    """Raise an error of a rank as a CommandError, at a time when torchrun lets one rank of each node only print it.

    torchrun ends a node's ranks when one ends. A mistake that all ranks have found is the first one's to say, at once. Other
    errors wait: theirs may be a rank's that has lost another one, which is still there to say why. A node's only rank doesn't
    wait: torchrun ends no rank of other nodes. torchrun gets the traceback.
    """
    try:
        yield
    except Exception as error:
        if ranks_there() == 1:
            raise
        rank, expected = int(os.environ.get("RANK", "0")), isinstance(error, CommandError)
        others = int(os.environ.get("LOCAL_WORLD_SIZE", "2")) > 1
        time.sleep(_TURN_S * others * ((_local_rank() > 0) + (not expected)))
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
def started(device: torch.device, timeout: timedelta) -> Iterator[ParallelLayout]:
    """Create the process group of all ranks, and destroy it at the end of the block.

    A rank whose block raises keeps it until it ends, so that the others don't fail before it has said why.
    """
    if ranks_there() == 1:
        yield ParallelLayout(device)
        return
    on_gpu = device.type == "cuda"
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=timeout, device_id=device if on_gpu else None)
    layout = ParallelLayout(device, rank=dist.get_rank(), ranks=dist.get_world_size())
    yield replace(layout, hosts=_hosts(layout))
    dist.destroy_process_group()


def divided(layout: ParallelLayout, config: Config, options: Options, timeout: timedelta) -> ParallelLayout:
    """Return the layout with the groups of a configuration. Ranks must agree on all settings."""
    check(config, layout.ranks)
    if layout.ranks == 1:
        return layout
    check_agreement({**config.to_dict(), **options.to_dict()}, layout)
    return replace(_groups(config, layout.device, timeout), hosts=layout.hosts, disks=layout.disks)


def _hosts(layout: ParallelLayout) -> tuple[str, ...]:
    """Return the name of each rank's node. Nodes of one name are told apart by torchrun's numbers."""
    own = socket.gethostname(), int(os.environ.get("GROUP_RANK", "0"))
    places = layout.on_all(lambda: own)
    nodes = {host: {number for name, number in places if name == host} for host, _ in places}
    return tuple(host if len(nodes[host]) == 1 else f"{host} (node {number})" for host, number in places)


def check_agreement(mine: Mapping[str, Any], layout: ParallelLayout) -> None:
    """Raise CommandError on every rank if a setting differs."""
    all_of_them = layout.on_all(lambda: mine)
    first = all_of_them[0]
    for rank, theirs in enumerate(all_of_them):
        for name, value in first.items():
            if theirs[name] != value:
                shown, other = (str(each) if isinstance(each, Path) else each for each in (value, theirs[name]))
                where, there = layout.place(0), layout.place(rank)
                raise CommandError(f"{name} must be the same on all ranks, but is {shown!r} on {where} and {other!r} on {there}")


def _groups(config: Config, device: torch.device, timeout: timedelta | None = None) -> ParallelLayout:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    tensor, pipeline = config.tensor_model_parallel_size, config.pipeline_model_parallel_size
    data = ranks // (tensor * pipeline)
    numbers = torch.arange(ranks).view(pipeline, data, tensor)
    return ParallelLayout(
        device,
        _group(numbers.reshape(-1, tensor), rank, timeout),
        _group(numbers.transpose(1, 2).reshape(-1, data), rank, timeout),
        _group(numbers.permute(1, 2, 0).reshape(-1, pipeline), rank, timeout),
        rank,
        ranks,
    )


def _group(rows: torch.Tensor, rank: int, timeout: timedelta | None) -> RankGroup:
    """Return this rank's group. Every rank creates the groups of all rows, because new_group is collective."""
    own = RankGroup()
    for row in rows.tolist():
        made = dist.new_group(row, timeout=timeout) if len(row) > 1 else None
        if rank in row:
            own = RankGroup(row.index(rank), len(row), made)
    return own


def device_of_this_rank() -> torch.device:
    """Select and return the GPU of torchrun's LOCAL_RANK, or return the CPU if there is no GPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    index, there = _local_rank(), torch.cuda.device_count()
    if index >= there:
        raise CommandError(f"rank {index} of this machine has no GPU: there are {there}")
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device
