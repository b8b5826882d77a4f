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


# ---- documents and dropout ----

ENDS = (3, 3, 9, 14)  # of 16 rows: two ranks meet in a document
MASKED = [name for name in CASES if "fp8" not in name and "norm" not in name and "activation" not in name]


def masked(name, p, ends):
    """The call of a case, with dropout or documents: it draws as it did when it is seeded alike."""
    options = {
        "column": {"allreduce_dgrad": True}, "column, sequence": {"sequence_parallel": True}, "row": {"reduce_output": True},
        "row, sequence": {"reduce_output": True, "sequence_parallel": True},
    }[name]  # fmt: skip

    def call(x, weight, a, b, group, seed=7):
        torch.manual_seed(seed)
        more = options if group is not None else {}
        return onepass.lora_linear(x, weight, a, b, scale=0.7, dropout=p, ends=ends, tp_group=group, **more)

    return call


def documents_of(t, by_rank):
    """An adapter's matrix for each document."""
    return torch.stack([t * (1 + e) + by_rank for e in range(len(ENDS))])


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64), ids=str)
@pytest.mark.parametrize("name", MASKED)
def test_documents_over_ranks(group, name, dtype):
    """Ends count all rows, also where a rank has some."""
    _, by_row, divided = CASES[name]
    x, weight, a, b, dy = whole(dtype, K, N)
    a, b = documents_of(a, 0.1), documents_of(b, 0.2)
    ends = torch.tensor(ENDS, device=x.device)
    call = masked(name, 0.0, ends)
    exact = results(call, *(t.double() for t in (x, weight, a, b, dy)), None)
    dims = {"y": 0 if by_row and divided else None if by_row else -1, "x": -1 if by_row else 0 if divided else None}
    dims |= {"weight": 1 if by_row else 0, "a": 2 if by_row else None, "b": None if by_row else 1}
    own = [
        t if dims[what] is None else part(t, dims[what], group)
        for what, t in (("x", x), ("weight", weight), ("a", a), ("b", b), ("y", dy))
    ]
    for what, mine, true in zip(("y", "x", "weight", "a", "b"), results(call, *own, group), exact, strict=True):
        true = true if dims[what] is None else part(true, dims[what], group)
        assert (mine.double() - true).norm() / true.norm() < 2e-6, what


@pytest.mark.parametrize("name", ("column", "column, sequence"))
def test_ranks_that_have_the_same_rows_drop_the_same(group, name):
    """Whatever their random states: results and gradients are those of one rank that has the first's."""
    _, _, divided = CASES[name]
    x, weight, a, b, dy = whole(torch.float64, K, N)
    call = masked(name, 0.4, None)
    expected = results(lambda *given: call(*given), x.clone(), weight, a, b, dy, None)
    own = part(x, 0, group) if divided else x, part(weight, 0, group), a, part(b, 0, group), part(dy, -1, group)
    # the whole's seed is that of the first rank; the others' random states are their own
    found = results(lambda *given: call(*given, seed=7 + group.rank()), *own, group)
    dims = {"y": -1, "x": 0 if divided else None, "weight": 0, "a": None, "b": 0}
    for (what, dim), mine, true in zip(dims.items(), found, expected, strict=True):
        torch.testing.assert_close(mine, true if dim is None else part(true, dim, group), msg=what)


@pytest.mark.parametrize("name", ("row", "row, sequence"))
def test_ranks_of_other_columns_drop_others(group, name):
    """With random states that are alike, as Megatron's are. Backward has each rank's own mask, too."""
    _, _, divided = CASES[name]
    n = 32
    x, nothing, eye = torch.ones(S, B, n), torch.zeros(n, n), torch.eye(n)
    a, call = torch.zeros(n, n * group.size()), masked(name, 0.5, None)
    a[:, n * group.rank() : n * (group.rank() + 1)] = eye  # y is the sum of all ranks' masked rows
    rows = x.clone().requires_grad_()
    y = call(rows, nothing, part(a, 1, group), eye, group)
    (dx,) = torch.autograd.grad(y, rows, torch.ones_like(y))
    masks = [torch.empty_like(dx) for _ in range(group.size())]
    dist.all_gather(masks, dx, group)
    assert not torch.equal(masks[0], masks[1])
    expected = torch.stack(masks).sum(0)
    torch.testing.assert_close(y, part(expected, 0, group) if divided else expected)


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
