"""LoRA of layers that are spread over ranks, against the whole layer in fp64."""

import pytest
import torch
import torch.distributed as dist
from parallel.meeting import drawn
from parallel.worlds import FOURS, PAIRS
from torch import nn

import onepass
from onepass import LoRA

WORLDS = [*PAIRS, *FOURS]
S, B, K, N, R = 8, 2, 24, 40, 3


def lora_linear(**options):
    def call(x, weight, a, b, group):
        return onepass.lora_linear(x, weight, a, b, scale=0.7, tp_group=group, **options)

    return call


def norm_linear(**options):
    def call(x, weight, a, b, group):
        return onepass.norm_linear(x, None, weight, lora=LoRA(a, b, 0.7), tp_group=group, **options)

    return call


def activation_linear(**options):
    def call(x, weight, a, b, group):
        return onepass.activation_linear(x, weight, None, "gelu", lora=LoRA(a, b, 0.7), tp_group=group, **options)

    return call


# name -> the call, whether it is row-parallel, whether the sequence is divided
CASES = {
    "column": (lora_linear(allreduce_dgrad=True), False, False),
    "column, sequence": (lora_linear(sequence_parallel=True), False, True),
    "row": (lora_linear(reduce_output=True), True, False),
    "row, sequence": (lora_linear(reduce_output=True, sequence_parallel=True), True, True),
    "norm, sequence": (norm_linear(sequence_parallel=True), False, True),
    "norm": (norm_linear(), False, False),
    "activation": (activation_linear(), True, False),
    "activation, sequence": (activation_linear(sequence_parallel=True), True, True),
    "column, sequence, fp8": (lora_linear(sequence_parallel=True, precision="fp8"), False, True),
    "row, sequence, fp8": (lora_linear(reduce_output=True, sequence_parallel=True, precision="fp8"), True, True),
}


def whole(dtype, K, N):
    seeds = torch.Generator().manual_seed(3)
    shapes = (S, B, K), (N, K), (R, K), (N, R), (S, B, N)
    return [drawn(torch.randn, shape, generator=seeds).to(dtype) for shape in shapes]


def part(t, dim, group):
    return t.chunk(group.size(), dim)[group.rank()].contiguous()


def results(call, x, weight, a, b, dy, group):
    x, weight, a, b = x.requires_grad_(), nn.Parameter(weight), nn.Parameter(a), nn.Parameter(b)
    y = call(x, weight, a, b, group)
    found = torch.autograd.grad(y, (x, weight, a, b), dy, retain_graph=True)
    again = torch.autograd.grad(y, (a, b), dy)
    assert all(map(torch.equal, found[2:], again)), "a second backward has other bits"
    return y.detach(), *found


@pytest.mark.parametrize("name", CASES)
def test_parts_are_those_of_the_whole(group, name):
    """The adapter's whole matrix has its whole gradient on every rank."""
    call, by_row, divided = CASES[name]
    fp8 = name.endswith("fp8")
    dtype, sizes = (torch.bfloat16, (64 * group.size(), 64 * group.size())) if fp8 else (torch.float32, (K, N))
    x, weight, a, b, dy = whole(dtype, *sizes)
    layer = CASES[name][0] if not fp8 else lora_linear()
    exact = results(layer, *(t.double() for t in (x, weight, a, b, dy)), None)
    dims = {"y": 0 if by_row and divided else None if by_row else -1, "x": -1 if by_row else 0 if divided else None}
    dims |= {"weight": 1 if by_row else 0, "a": 1 if by_row else None, "b": None if by_row else 0}
    own = [
        t if dims[name] is None else part(t, dims[name], group)
        for name, t in (("x", x), ("weight", weight), ("a", a), ("b", b), ("y", dy))
    ]
    found = results(call, *own, group)
    for name, mine, true in zip(("y", "x", "weight", "a", "b"), found, exact, strict=True):
        true = true if dims[name] is None else part(true, dims[name], group)
        assert mine.shape == true.shape
        error = (mine.double() - true).norm() / true.norm()
        assert error < (0.08 if fp8 else 2e-6), (name, error)
        if dims[name] is None:
            first = mine.clone()
            dist.broadcast(first, 0, group)
            assert torch.equal(first, mine), f"{name} has other bits on another rank"
