"""A vocabulary divided over a tensor-parallel group: each rank's range of tokens, and the gathering of row statistics."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from onepass.parallel.collectives import Pending, start_all_gather


def vocab_range(columns: int, group: dist.ProcessGroup, device: torch.device) -> Tensor:
    """Return [2] int64 on the device: this rank's first token, and the number of all tokens. The CPU does not wait.

    Each rank has `columns` tokens of its own; the group has several ranks.
    """
    sizes = start_all_gather(torch.full((1,), columns, dtype=torch.int64, device=device), group).wait()
    return torch.stack([sizes[: group.rank()].sum(), sizes.sum()])


def start_gather_parts(parts: Tensor, group: dist.ProcessGroup) -> Pending:
    """Gather each rank's [1, PLANES, rows] into [ranks, PLANES, rows]: all statistics in one message."""
    return start_all_gather(parts, group)
