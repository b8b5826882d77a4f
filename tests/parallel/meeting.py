"""Set up the process group in a spawned rank: gloo on the CPU, or NCCL with one GPU for each rank."""

import faulthandler
import os
from datetime import timedelta

import torch
import torch.distributed as dist

if os.environ.get("TRITON_INTERPRET"):  # a spawned process doesn't import conftest
    import onepass.testing.interpreter  # noqa: F401


def join(rank, ranks, folder, backend="gloo"):
    """Join the process group. Use one thread, as there are more ranks than cores. With NCCL, make the rank's GPU the default."""
    faulthandler.enable()  # a crash prints a traceback
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
    """Draw on the CPU, where all ranks and the test get the same numbers, and move the tensor to the default device."""
    return draw(*args, device="cpu", **options).to(torch.get_default_device())
