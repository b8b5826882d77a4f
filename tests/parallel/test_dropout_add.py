"""dropout_add on ranks with random states of their own: all drop what the group's first rank would alone."""

from functools import cache
from itertools import accumulate

import pytest
import torch
import torch.distributed as dist
from ops.calls import relative
from parallel.meeting import SentSizes, drawn, ways
from parallel.worlds import PAIRS
from torch.utils.checkpoint import checkpoint

import onepass
from onepass.ops.dropout.dropout_add import dropout_add_reference

WORLDS = [*PAIRS, pytest.param(("gloo", 3), id="gloo-3")]
SEQUENCE, BATCH, H, P = 11, 3, 40, 0.3
PARTS = {2: (7, 4), 3: (2, 0, 9)}  # ranks -> tokens of each rank: uneven, and one rank may have none


def part(rank, ranks):
    first = [0, *accumulate(PARTS[ranks])][rank]
    return slice(first, first + PARTS[ranks][rank])


def whole():
    """Return x, residual, the gradient of y and the bias. They are the same on all ranks."""
    seeds = torch.Generator().manual_seed(5)
    x, residual, dy = (drawn(torch.randn, (SEQUENCE, BATCH, H), generator=seeds) for _ in range(3))
    return x, residual, dy, drawn(torch.randn, (H,), generator=seeds)


def leaves(group, sequence):
    """Return x, residual, bias and y's gradient, whole or this rank's part. Seed each rank differently, as Megatron does."""
    x, residual, dy, bias = whole()
    rows = part(group.rank(), group.size()) if sequence else slice(None)
    torch.manual_seed(100 + dist.get_rank())
    return [*(t.clone().requires_grad_() for t in (x[rows], residual[rows], bias)), dy[rows]]


def call(group, p=P, sequence_parallel=False, tp_group=True, by=None, **options):
    """Return y and the gradients of dropout_add, which `by` compiles or checkpoints."""
    x, residual, bias, dy = leaves(group, sequence_parallel)

    def function(x, residual, bias):
        return onepass.dropout_add(
            x, residual, p, bias=bias, tp_group=group if tp_group else None, sequence_parallel=sequence_parallel, **options
        )

    if by == "checkpoint":
        y = checkpoint(lambda x, *more: function(x * 1, *more), x, residual, bias, use_reentrant=False)
    elif by == "compile":
        torch._dynamo.reset()
        y = torch.compile(lambda *t: function(*t) * 1, backend="aot_eager", fullgraph=True)(x, residual, bias)
    else:
        y = function(x, residual, bias)
    y.backward(dy)
    return {"y": y.detach(), "dx": x.grad, "dresidual": residual.grad, "dbias": bias.grad}


def first_alone(world):
    """Return what the group's first rank drops by itself, with no group: the same whatever the layout."""
    return world.run(call, tp_group=False)[0]


def test_a_whole_sequence_on_every_rank(world):
    for way in ways(world.backend):
        for rank in world.run(call, backend=way):
            for name, value in first_alone(world).items():
                torch.testing.assert_close(rank[name], value, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("by", (None, "checkpoint"))
def test_parts_are_those_of_the_whole(world, by):
    expected = first_alone(world)
    for way in ways(world.backend):
        parts = world.run(call, sequence_parallel=True, backend=way, by=by)
        for name in ("y", "dx", "dresidual"):
            torch.testing.assert_close(torch.cat([each[name] for each in parts]), expected[name], rtol=1e-6, atol=1e-6)
        assert [len(each["y"]) for each in parts] == list(PARTS[len(world)])
        torch.testing.assert_close(sum(each["dbias"] for each in parts), expected["dbias"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("world", WORLDS[1:], indirect=True, scope="module")  # of three ranks one has no rows
def test_compiled_parts_drop_each_their_own(world):
    """By the compiler's random numbers, which need not be the eager ones: what is kept is right, no two rows drop the same."""
    x, residual, _, bias = whole()
    for way in ways(world.backend):
        y = torch.cat([rank["y"] for rank in world.run(call, sequence_parallel=True, backend=way, by="compile")])
        dropped = y == residual
        torch.testing.assert_close(y, residual + torch.where(dropped, 0.0, (x + bias) * (65536 / (65536 - round(P * 65536)))))
        assert 0.15 < dropped.float().mean() < 0.45
        rows = dropped.view(-1, dropped.shape[-1])
        assert len(torch.unique(rows, dim=0)) == len(rows)


@pytest.mark.parametrize("options", ({"p": 0.0}, {"training": False}), ids=str)
def test_nothing_is_dropped(world, options):
    x, residual, _, bias = (t.double() for t in whole())
    expected = dropout_add_reference(x, bias, residual)
    for way in ways(world.backend):
        for rank, mine in enumerate(world.run(call, sequence_parallel=True, backend=way, **options)):
            assert mine["y"].numel() == 0 or relative(mine["y"], expected[part(rank, len(world))]) < 1e-6


def test_a_seed_and_a_number_of_rows_are_sent(group):
    x, residual, bias, dy = leaves(group, True)
    with SentSizes() as sent:
        for p in (P, 0.0):
            onepass.dropout_add(x, residual, p, bias=bias, tp_group=group, sequence_parallel=True).backward(dy)
        onepass.dropout_add(x, residual, P, tp_group=group)
    assert sent.sizes == [2, 1]  # both, where the sequence is divided; nothing, where nothing is dropped; the seed


@cache
def groups_of(rank, ranks):
    """Return the group of this rank alone, and that of the last two, or None."""
    alone = [dist.new_group([each]) for each in range(ranks)][rank]
    last = dist.new_group([ranks - 2, ranks - 1])
    return alone, last if rank >= ranks - 2 else None


def in_groups(world):
    alone, last = groups_of(world.rank(), world.size())
    return [None if group is None else call(group)["y"] for group in (alone, last)], call(world, tp_group=False)["y"]


def test_groups(world):
    """A group of one is none; in a group of others than the first rank, that group's first counts."""
    found = world.run(in_groups)
    for (alone, _), without in found:
        assert torch.equal(alone, without)
    first, second = (last for (_, last), _ in found[-2:])
    assert torch.equal(first, second) and torch.equal(first, found[-2][1])
    assert not torch.equal(found[0][1], found[1][1])


def test_a_group_that_is_none_needs_no_torch_distributed():
    x = torch.ones(2, 8)
    torch.manual_seed(1)
    y = onepass.dropout_add(x, x, 0.5, sequence_parallel=True)
    torch.manual_seed(1)
    assert torch.equal(y, onepass.dropout_add(x, x, 0.5))
