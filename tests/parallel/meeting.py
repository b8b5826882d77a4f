"""How spawned processes meet: over gloo on the CPU, or over NCCL with a GPU each."""

import faulthandler
import os
from datetime import timedelta

import torch
import torch.distributed as dist


def join(rank, ranks, folder, backend="gloo"):
    """One thread a process, as there are as many processes as cores and more. Over NCCL tensors are made on the rank's GPU."""
    faulthandler.enable()  # a crash says where
    torch.set_num_threads(1)
    options = {}
    if backend == "nccl":
        options["device_id"] = torch.device("cuda", rank)
        torch.cuda.set_device(rank)
        torch.set_default_device(options["device_id"])
    else:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    meeting = f"file://{folder}/meeting-{ranks}"
    timeout = timedelta(seconds=60)
    dist.init_process_group(backend, init_method=meeting, rank=rank, world_size=ranks, timeout=timeout, **options)


def drawn(draw, *args, **options):
    """What torch.randn or torch.randint gives on the CPU, where all ranks and the test get the same, where tensors are made."""
    return draw(*args, device="cpu", **options).to(torch.get_default_device())
