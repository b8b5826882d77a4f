"""Ranks of tests/parallel/test_dropout_add.py: dropout_add on ranks with different random states. Results are saved."""

import os
from itertools import accumulate

import torch
import torch.distributed as dist
from parallel.meeting import drawn, join

import onepass
from onepass.kernels.language import triton

SEQUENCE, BATCH, H, P = 11, 3, 40, 0.3
PARTS = {2: (7, 4), 3: (2, 0, 9), 4: (2, 0, 8, 1)}  # ranks -> tokens of each rank: uneven, and one rank may have none


def run(rank, ranks, folder, backend):
    join(rank, ranks, folder, backend)
    world = dist.group.WORLD
    ways = ["torch", *(["triton"] if triton is not None and (backend == "nccl" or os.environ.get("TRITON_INTERPRET")) else [])]
    found = {}
    for way in ways:
        found[way] = {
            "whole": called(slice(None), tp_group=world, backend=way),
            "parts": called(part(ranks, rank), tp_group=world, sequence_parallel=True, backend=way),
            "nothing dropped": called(part(ranks, rank), 0.0, tp_group=world, sequence_parallel=True, backend=way),
            "evaluation": called(part(ranks, rank), training=False, tp_group=world, sequence_parallel=True, backend=way),
            "checkpointed": checkpointed(part(ranks, rank), world, way),
            "compiled": compiled(part(ranks, rank), world, way),
        }
    found["alone"] = called(slice(None), tp_group=dist.new_group([rank], use_local_synchronization=True))
    found["by itself"] = called(slice(None))
    last = dist.new_group([ranks - 2, ranks - 1])
    if rank >= ranks - 2:
        found["pair"] = called(slice(None), tp_group=last)
    found["sent"] = sent(part(ranks, rank), world)
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def part(ranks, rank):
    first = [0, *accumulate(PARTS[ranks])][rank]
    return slice(first, first + PARTS[ranks][rank])


def whole():
    """Return x, residual, the gradient of y and the bias. They are the same on all ranks."""
    seeds = torch.Generator().manual_seed(5)
    x, residual, dy = (drawn(torch.randn, (SEQUENCE, BATCH, H), generator=seeds) for _ in range(3))
    return x, residual, dy, drawn(torch.randn, (H,), generator=seeds)


def leaves(rows):
    x, residual, dy, bias = whole()
    return [*(t.clone().requires_grad_() for t in (x[rows], residual[rows], bias)), dy[rows]]


def seeded():
    """Seed each rank differently, as Megatron does."""
    torch.manual_seed(100 + dist.get_rank())


def results(y, x, residual, bias, dy):
    y.backward(dy)
    return {"y": y.detach(), "dx": x.grad, "dresidual": residual.grad, "dbias": bias.grad}


def called(rows, p=P, **options):
    x, residual, bias, dy = leaves(rows)
    seeded()
    return results(onepass.dropout_add(x, residual, p, bias=bias, **options), x, residual, bias, dy)


def checkpointed(rows, group, way):
    from torch.utils.checkpoint import checkpoint

    x, residual, bias, dy = leaves(rows)
    seeded()

    def layer(x, residual, bias):
        return onepass.dropout_add(x * 1, residual, P, bias=bias, tp_group=group, sequence_parallel=True, backend=way)

    return results(checkpoint(layer, x, residual, bias, use_reentrant=False), x, residual, bias, dy)


def compiled(rows, group, way):
    x, residual, bias, dy = leaves(rows)
    torch._dynamo.reset()
    function = torch.compile(
        lambda *t: onepass.dropout_add(t[0], t[1], P, bias=t[2], tp_group=group, sequence_parallel=True, backend=way) * 1,
        backend="aot_eager",
        fullgraph=True,
    )
    seeded()
    return results(function(x, residual, bias), x, residual, bias, dy)


def sent(rows, group):
    """Return the number of elements of each collective, forward and backward."""
    x, residual, bias, dy = leaves(rows)
    sizes = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if "c10d_functional" in str(function) and "wait" not in str(function):
                sizes.append(args[0].numel())
            return function(*args, **(kwargs or {}))

    with Watch():
        for p in (P, 0.0):
            onepass.dropout_add(x, residual, p, bias=bias, tp_group=group, sequence_parallel=True).backward(dy)
        onepass.dropout_add(x, residual, P, tp_group=group)
    return sizes
