"""How spawned processes meet, over gloo."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist


def join(rank, ranks, folder):
    """One thread a process, as there are as many processes as cores and more."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    meeting = f"file://{folder}/meeting-{ranks}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
