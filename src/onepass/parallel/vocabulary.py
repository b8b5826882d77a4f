"""A vocabulary of which each rank of a tensor-parallel group has some: which, and what all ranks found of each row."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from onepass.parallel.collectives import Pending, start_all_gather


def vocab_place(columns: int, group: dist.ProcessGroup, device: torch.device) -> Tensor:
    """[2] int64 on the device: the number of this rank's first token, and of all there are. The CPU waits for nothing.

    Each rank has as many as it says; the group is one with others.
    """
    sizes = start_all_gather(torch.full((1,), columns, dtype=torch.int64, device=device), group).wait()
    return torch.stack([sizes[: group.rank()].sum(), sizes.sum()])


def gathered_parts(parts: Tensor, group: dist.ProcessGroup) -> Pending:
    """[ranks, PLANES, rows] of each rank's [1, PLANES, rows]: all statistics in one message."""
    return start_all_gather(parts, group)
