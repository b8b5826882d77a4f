"""Ranks of tests/parallel/test_deferred_ranks.py: deferred gradients in a group and in pipeline schedules. Results are saved."""

from unittest import mock

import torch
import torch.distributed as dist
from parallel.meeting import drawn, join
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble

import onepass
from onepass.gradients import deferred
from onepass.parallel import DeferredWgrad, MainGrads
from onepass.parallel import tensor_parallel as product
from onepass.parallel.collectives import Pending
from onepass.runtime.dispatch import TORCH

S, B, K, N = 8, 2, 12, 20
MICROBATCHES, WIDTH, ROWS = 6, 16, 4


def run(rank, ranks, folder, backend):
    join(rank, ranks, folder, backend)
    onepass.use_backend("torch")
    world = dist.group.WORLD
    found = {name: {put_off: layer(name, world, put_off) for put_off in (False, True)} for name in CALLS}
    found["order"] = {name: order(name, world) for name in CALLS}
    if ranks == 2:
        found["schedules"] = {(name, way): scheduled(name, way, rank, ranks) for name, way in RUNS}
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


# ---- sequence parallel ----

# name -> the call, and whether it is row-parallel
CALLS = {
    "column": (lambda x, p, **more: onepass.linear(x, p["weight"], p["bias"], sequence_parallel=True, **more), False),
    "row": (
        lambda x, p, **more: onepass.linear(x, p["weight"], p["bias"], sequence_parallel=True, reduce_output=True, **more),
        True,
    ),
    "norm": (
        lambda x, p, **more: onepass.norm_linear(x, p["vector"], p["weight"], p["bias"], sequence_parallel=True, **more),
        False,
    ),
    "activation": (
        lambda x, p, **more: onepass.activation_linear(x, p["weight"], p["bias"], "gelu", sequence_parallel=True, **more),
        True,
    ),
}  # fmt: skip


def tensors(name, group):
    """Return this rank's parameters, and x and dy of three microbatches."""
    rank, ranks, by_row = group.rank(), group.size(), CALLS[name][1]
    seeds = torch.Generator().manual_seed(5)
    weight = drawn(torch.randn, N, K, generator=seeds).chunk(ranks, 1 if by_row else 0)[rank]
    bias = drawn(torch.randn, N, generator=seeds)
    parameters = {"weight": weight, "bias": bias if by_row else bias.chunk(ranks)[rank], "vector": torch.ones(K)}
    parameters = {key: nn.Parameter(t.clone()) for key, t in parameters.items()}
    for parameter in parameters.values():
        parameter.main_grad, parameter.grad_added_to_main_grad = torch.zeros_like(parameter), False
    microbatches = []
    for _ in range(3):
        x, dy = drawn(torch.randn, S, B, K, generator=seeds), drawn(torch.randn, S, B, N, generator=seeds)
        x = x.chunk(ranks, -1 if by_row else 0)[rank].clone().requires_grad_()
        microbatches.append((x, dy.chunk(ranks, 0 if by_row else -1)[rank].clone()))
    return parameters, microbatches


def layer(name, group, put_off):
    parameters, microbatches = tensors(name, group)
    more = {"deferred": DeferredWgrad()} if put_off else {}
    for x, dy in microbatches:
        CALLS[name][0](x, parameters, tp_group=group, **more).backward(dy)
    found = {"before": parameters["weight"].main_grad.clone()}
    if put_off:
        found["bytes"] = more["deferred"].nbytes
        more["deferred"].flush()
    return found | {"main_grads": [t.main_grad for t in parameters.values()], "x": [x.grad for x, _ in microbatches]}


def order(name, group):
    """Return what flush does, in order: "start" and "wait" of collectives, and "product"."""
    parameters, microbatches = tensors(name, group)
    put_off = DeferredWgrad()
    for x, dy in microbatches:
        CALLS[name][0](x, parameters, tp_group=group, deferred=put_off).backward(dy)
    happened = []

    def said(what, function):
        def call(*args):
            happened.append(what)
            return function(*args)

        return call

    wait = Pending.wait

    def waited(pending):
        if pending._finish is not None:
            happened.append("wait")
        return wait(pending)

    with (
        mock.patch.object(product, "start_all_gather", said("start", product.start_all_gather)),
        mock.patch.object(deferred, "add_gradient", said("product", deferred.add_gradient)),
        mock.patch.object(Pending, "wait", waited),
    ):
        put_off.flush()
    return happened


# ---- pipeline schedules ----

SCHEDULES = {"1f1b": Schedule1F1B, "zero bubble": ScheduleInterleavedZeroBubble, "zbv": ScheduleZBVZeroBubble}
WAYS = ("plain", "main_grad", "deferred")  # .grad; MainGrads alone; MainGrads and dw_builder
# PyTorch 2.11's zero-bubble backward fails on any autograd.Function. In its ZBV ranks send to themselves, which gloo can't.
# PyTorch 2.9's stages start by sending eight bytes to who expects four, which ends the process.
WITHOUT = {("1f1b", way) for way in WAYS} | {("zero bubble", "deferred")} if TORCH >= (2, 10) else set()
RUNS = [(name, way) for name in SCHEDULES for way in WAYS if TORCH >= (2, 13) or (name, way) in WITHOUT]


class Block(nn.Module):
    """A norm_linear, a linear and an activation_linear layer."""

    def __init__(self, seed):
        super().__init__()
        seeds = torch.Generator().manual_seed(seed)
        self.first, self.second = onepass.nn.NormLinear(WIDTH, WIDTH), onepass.nn.Linear(WIDTH, WIDTH)
        self.act_bias = nn.Parameter(torch.zeros(WIDTH))
        self.down = nn.Parameter(torch.empty(WIDTH, WIDTH))
        self.deferred = None
        for parameter in self.parameters():
            parameter.data.copy_(drawn(torch.randn, parameter.shape, generator=seeds) * WIDTH**-0.5)

    def forward(self, x):
        h = self.second(self.first(x))
        return x + onepass.activation_linear(h, self.down, None, "gelu", activation_bias=self.act_bias, deferred=self.deferred)


def stages_of(name, rank, ranks):
    """Return the indices of this rank's stages."""
    return [rank] if name == "1f1b" else [rank, rank + ranks] if name == "zero bubble" else [rank, 2 * ranks - 1 - rank]


def data():
    seeds = torch.Generator().manual_seed(9)
    return [drawn(torch.randn, MICROBATCHES * ROWS, WIDTH, generator=seeds) for _ in range(2)]


def loss(y, target):
    return ((y - target) ** 2).sum()


def scheduled(name, way, rank, ranks):
    """Train two steps under a schedule. Return the gradients of this rank's blocks by stage, and when products were deferred.

    kept: how many products each dw_builder call found. made: how many were left as each was run. left: how many at the end.
    """
    mine = stages_of(name, rank, ranks)
    count = ranks if name == "1f1b" else 2 * ranks
    blocks = {stage: Block(stage) for stage in mine}
    main_grads = None if way == "plain" else MainGrads(nn.ModuleList(blocks.values()), group=own_group(rank, ranks))
    put_off, kept, made = DeferredWgrad(), [], []
    if way == "deferred":
        for block in blocks.values():
            put_off.attach(block)
    device = torch.get_default_device()

    def builder():
        kept.append(len(put_off._kept))
        runner = put_off.dw_builder()
        return lambda: (made.append(len(put_off)), runner())

    stages = [
        PipelineStage(block, stage, count, device, dw_builder=builder if way == "deferred" else None)
        for stage, block in blocks.items()
    ]
    schedule = SCHEDULES[name](stages[0] if name == "1f1b" else stages, MICROBATCHES, loss_fn=loss, scale_grads=False)
    x, target = data()
    for _ in range(2):
        if main_grads is not None:
            main_grads.zero_()
        else:
            for block in blocks.values():
                block.zero_grad()
        args, more = ((x,) if 0 in mine else ()), ({"target": target} if count - 1 in mine else {})
        if main_grads is None:
            schedule.step(*args, **more)
            continue
        with main_grads.accumulate():
            schedule.step(*args, **more)
        main_grads.finish()
    attribute = "grad" if main_grads is None else "main_grad"
    grads = {
        stage: {key: getattr(t, attribute).clone() for key, t in block.named_parameters()} for stage, block in blocks.items()
    }
    return {"grads": grads, "kept": kept, "made": made, "left": len(put_off)}


def own_group(rank, ranks):
    """Return this rank's data-parallel group, which has one rank."""
    return [dist.new_group([each]) for each in range(ranks)][rank]
