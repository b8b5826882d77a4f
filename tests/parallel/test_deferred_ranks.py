"""Deferred gradients over ranks: sequence parallel, and torch.distributed.pipelining."""

from functools import partial
from unittest import mock

import pytest
import torch
from parallel.meeting import drawn, gather, own_group
from parallel.worlds import FOURS, PAIRS
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble

import onepass
from onepass.distributed import tensor_parallel as product
from onepass.distributed.collectives import Pending
from onepass.gradients import deferred
from onepass.parallel import DeferredWgrad, MainGrads
from onepass.runtime.dispatch import TORCH

WORLDS = [*PAIRS, *FOURS]
rank_context = partial(onepass.use_backend, "torch")
of_two = pytest.mark.parametrize("world", PAIRS, indirect=True, scope="module")
S, B, K, N = 8, 2, 12, 20
MICROBATCHES, WIDTH, ROWS = 6, 16, 4


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


def train(name, group, later=None):
    """Run three microbatches, of which `later` defers the weights' gradients. Return parameters, and gradients of x."""
    parameters, microbatches = tensors(name, group)
    more = {} if later is None else {"deferred": later}
    for x, dy in microbatches:
        CALLS[name][0](x, parameters, tp_group=group, **more).backward(dy)
    return parameters, [x.grad for x, _ in microbatches]


@pytest.mark.parametrize("name", CALLS)
def test_flush_adds_what_backward_would_have_added(group, name):
    """Of this rank's part alone are rows kept."""
    later = DeferredWgrad()
    (at_once, dxs), (put_off, dxs_too) = train(name, group), train(name, group, later)
    assert not put_off["weight"].main_grad.any() and at_once["weight"].main_grad.any()
    part = (S * B * N + S * B * K) // group.size()  # whichever way it is spread
    assert later.nbytes == 3 * part * 4
    later.flush()
    assert all(map(torch.equal, dxs, dxs_too))
    assert all(torch.equal(t.main_grad, put_off[key].main_grad) for key, t in at_once.items())


@pytest.mark.parametrize("name", CALLS)
def test_the_next_ones_rows_come_while_this_product_is_made(group, name):
    later, happened = DeferredWgrad(), []
    train(name, group, later)

    def told(what, function):
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
        mock.patch.object(product, "start_all_gather", told("start", product.start_all_gather)),
        mock.patch.object(deferred, "add_gradient", told("product", deferred.add_gradient)),
        mock.patch.object(Pending, "wait", waited),
    ):
        later.flush()
    assert happened == ["start", "start", "wait", "product", "start", "wait", "product", "wait", "product"]


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


def exact_grads(count):
    """Return the gradients of the stages one after the other, in fp64."""
    blocks = [Block(stage).double() for stage in range(count)]
    x, target = (t.double() for t in data())
    for block in blocks:
        x = block(x)
    loss(x, target).backward()
    return [{key: t.grad for key, t in block.named_parameters()} for block in blocks]


@of_two
@pytest.mark.parametrize(("name", "way"), RUNS)
def test_schedules_have_the_whole_gradient(group, name, way):
    """In the second of two steps. Deferred products are made where the schedule has them."""
    rank, ranks = group.rank(), group.size()
    mine, count = stages_of(name, rank, ranks), ranks if name == "1f1b" else 2 * ranks
    blocks = {stage: Block(stage) for stage in mine}
    main_grads = None if way == "plain" else MainGrads(nn.ModuleList(blocks.values()), group=own_group())
    later, kept, left = DeferredWgrad(), [], []  # how many products each builder found, and how many were left at each
    for block in blocks.values() if way == "deferred" else ():
        later.attach(block)

    def builder():
        kept.append(len(later._kept))
        runner = later.dw_builder()
        return lambda: (left.append(len(later)), runner())

    device, dw_builder = torch.get_default_device(), builder if way == "deferred" else None
    stages = [PipelineStage(block, stage, count, device, dw_builder=dw_builder) for stage, block in blocks.items()]
    schedule = SCHEDULES[name](stages[0] if name == "1f1b" else stages, MICROBATCHES, loss_fn=loss, scale_grads=False)
    x, target = data()
    args, more = ((x,) if 0 in mine else ()), ({"target": target} if count - 1 in mine else {})
    for _ in range(2):
        for block in blocks.values():
            block.zero_grad()
        if main_grads is None:
            schedule.step(*args, **more)
            continue
        main_grads.zero_()
        with main_grads.accumulate():
            schedule.step(*args, **more)
        main_grads.finish()
    exact, attribute = exact_grads(count), "grad" if main_grads is None else "main_grad"
    for stage, block in blocks.items():
        for key, t in block.named_parameters():
            torch.testing.assert_close(getattr(t, attribute).double(), exact[stage][key], rtol=1e-4, atol=1e-4)
    if way == "deferred":
        assert kept == [3] * (2 * MICROBATCHES * len(mine))  # two steps, three weights a stage
        assert len(left) == len(kept) and len(later) == 0
        waited = max(max(each) for each in gather(group, left)) > 3
        assert waited == (name != "1f1b")
