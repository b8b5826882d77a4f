"""Set up the process group in a rank's process, gloo on the CPU or NCCL with one GPU for each rank, and run functions there."""

import faulthandler
import importlib
import io
import os
import pickle
import traceback
from contextlib import nullcontext
from datetime import timedelta
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

if os.environ.get("TRITON_INTERPRET"):  # a spawned process doesn't import conftest
    import onepass.testing.interpreter
import onepass
from onepass.kernels.language import triton
from onepass.runtime.backend import current_backend

SECONDS = 300  # of a collective, which waits for ranks that a busy machine holds up

_start = getattr(dist, "init_process_group", None)  # a PyTorch without distributed has none
_functional = torch.library.Library("_c10d_functional", "IMPL")


def _gather_into(x, ranks, name):
    """Gather for DTensors and compiled graphs as `start_all_gather` does, which says why: gloo would crash at times."""
    whole = x.new_empty(ranks * x.shape[0], *x.shape[1:])
    return torch.ops._c10d_functional.all_gather_into_tensor_out(x, ranks, name, out=whole)


def find_gpu(rank, ranks):
    """Return the number of a rank's GPU. To NCCL ranks that share one are on machines of their own: on one it refuses that."""
    gpus = torch.cuda.device_count()
    if ranks > gpus:
        os.environ |= {"NCCL_HOSTID": str(rank), "NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo"}
    return rank % gpus


def meet_at(file, rank, ranks):
    """Let process groups that this process starts from now on meet at a file, which is each group's own."""
    place = {"init_method": f"file://{Path(file).resolve()}", "rank": rank, "world_size": ranks}
    dist.init_process_group = lambda *args, **options: _start(*args, **options, **place)


def launched(rank, ranks, backend="gloo"):
    """Set the environment as torchrun does for a rank. Its process group meets by `meet_at`."""
    gpu = find_gpu(rank, ranks) if backend == "nccl" else rank
    os.environ |= {"WORLD_SIZE": str(ranks), "RANK": str(rank), "LOCAL_RANK": str(gpu), "GLOO_SOCKET_IFNAME": "lo"}


def join(rank, ranks, folder, backend="gloo"):
    """Join the process group. Use one thread, as there are more ranks than cores. With NCCL, make the rank's GPU the default."""
    faulthandler.enable()  # a crash prints a traceback
    torch.set_num_threads(1)
    options = {}
    if backend == "nccl":
        options["device_id"] = torch.device("cuda", find_gpu(rank, ranks))
        torch.cuda.set_device(options["device_id"])
        torch.set_default_device(options["device_id"])
    else:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        _functional.impl("all_gather_into_tensor", _gather_into, "CPU")
    meeting = f"file://{folder}/meeting-{ranks}"
    timeout = timedelta(seconds=SECONDS)
    dist.init_process_group(backend, init_method=meeting, rank=rank, world_size=ranks, timeout=timeout, **options)


def serve(rank, ranks, folder, backend, pipe):
    """Run the functions that `World.run` sends. Answer with an error and a result, of which one is None."""

    def answer(error, result=None):
        saved = io.BytesIO()
        torch.save((error, result), saved)
        pipe.send_bytes(saved.getbuffer())

    try:
        join(rank, ranks, folder, backend)
        crash = open(f"{folder}/crash-{rank}.txt", "w")  # noqa: SIM115, as long as the process
        faulthandler.enable(crash)
        while call := pipe.recv_bytes():
            module, name, args, options = pickle.loads(call)
            torch.manual_seed(0)
            torch.use_deterministic_algorithms(False)
            with torch.device("cpu"):
                file = importlib.import_module(module)
            with getattr(file, "rank_context", nullcontext)():
                result = getattr(file, name)(dist.group.WORLD, *args, **options)
            assert current_backend() == "auto", f"{name} has left a backend chosen for the calls to come"
            answer(None, result)
        dist.destroy_process_group()
    except BaseException:
        answer(traceback.format_exc())
        pipe.poll(None)  # the end of this process would fail the others' collectives, which are not what went wrong


class SentSizes(TorchDispatchMode):
    """In the block collect how many numbers each collective sends."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "c10d_functional" in str(function) and "wait" not in str(function):
            self.sizes.append(args[0].numel())
        return function(*args, **(kwargs or {}))


def ways(backend=None):
    """Return the ways in which ranks of a backend, or these ranks, can run an op."""
    kernels = triton is not None and ((backend or dist.get_backend()) == "nccl" or os.environ.get("TRITON_INTERPRET"))
    return ("torch", "triton") if kernels else ("torch",)


def formulas_on_cpus():
    """Run formulas on CPUs, where the interpreter takes far longer, and kernels on GPUs."""
    return onepass.use_backend("triton" if dist.get_backend() == "nccl" else "torch")


@cache
def own_group():
    """Return the group of this rank alone."""
    return [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]


@cache
def every_other_rank():
    """Return this rank's group of every other rank, which of two ranks is this one alone."""
    ranks = range(dist.get_world_size())
    return [dist.new_group([*ranks[first::2]]) for first in range(2)][dist.get_rank() % 2]


@cache
def halves():
    """Return this of four ranks' group, of the first two or the last."""
    return [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])][dist.get_rank() // 2]


def gather(group, value):
    """Return what each rank has."""
    saved, values = io.BytesIO(), [None] * group.size()
    torch.save(value, saved)
    dist.all_gather_object(values, saved.getvalue(), group)
    here = {f"cuda:{rank}": str(torch.get_default_device()) for rank in range(dist.get_world_size())}
    return [torch.load(io.BytesIO(each), map_location=here, weights_only=False) for each in values]


def drawn(draw, *args, **options):
    """Draw on the CPU, where all ranks and the test get the same numbers, and move the tensor to the default device."""
    return draw(*args, device="cpu", **options).to(torch.get_default_device())


def error_of(function, *args, **options):
    """Return what the error of a call says."""
    with pytest.raises((IndexError, RuntimeError, TypeError, ValueError)) as raised:
        function(*args, **options)
    return str(raised.value)
