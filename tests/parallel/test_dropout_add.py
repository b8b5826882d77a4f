"""dropout_add of ranks with random states of their own: all drop what the first would alone. They run dropout_add_ranks.py."""

import pytest
import torch
import torch.distributed as dist
from ops.calls import relative
from parallel import dropout_add_ranks
from parallel.dropout_add_ranks import P, part
from parallel.worlds import PAIRS, found_by

import onepass
from onepass.ops.dropout.dropout_add import dropout_add_reference

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="this PyTorch has no gloo")
WORLDS = [*PAIRS, pytest.param(("gloo", 3), id="gloo-3")]


@pytest.fixture(scope="module", params=WORLDS)
def found(request, tmp_path_factory):
    """What each rank found."""
    return found_by(dropout_add_ranks.run, request.param, tmp_path_factory.mktemp("ranks"))


def ways(found):
    return [way for way in ("torch", "triton") if way in found[0]]


def first_alone(found):
    """What the group's first rank drops by itself, with no group: the same whatever the layout."""
    return found[0]["by itself"]


def test_a_whole_sequence_on_every_rank(found):
    for way in ways(found):
        for rank in found:
            for name, value in first_alone(found).items():
                torch.testing.assert_close(rank[way]["whole"][name], value, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("how", ["parts", "checkpointed"])
def test_parts_are_those_of_the_whole(found, how):
    expected = first_alone(found)
    for way in ways(found):
        mine = [rank[way][how] for rank in found]
        for name in ("y", "dx", "dresidual"):
            torch.testing.assert_close(torch.cat([each[name] for each in mine]), expected[name], rtol=1e-6, atol=1e-6)
        assert [len(each["y"]) for each in mine] == list(dropout_add_ranks.PARTS[len(found)])
        torch.testing.assert_close(sum(each["dbias"] for each in mine), expected["dbias"], rtol=1e-5, atol=1e-5)


def test_compiled_parts_drop_each_their_own(found):
    """By the compiler's random numbers, which need not be the eager ones: what is kept is right, no two rows drop the same."""
    x, residual, _, bias = dropout_add_ranks.whole()
    for way in ways(found):
        y = torch.cat([rank[way]["compiled"]["y"] for rank in found])
        dropped = y == residual
        torch.testing.assert_close(y, residual + torch.where(dropped, 0.0, (x + bias) * (65536 / (65536 - round(P * 65536)))))
        assert 0.15 < dropped.float().mean() < 0.45
        rows = dropped.view(-1, dropped.shape[-1])
        assert len(torch.unique(rows, dim=0)) == len(rows)


def test_nothing_is_dropped_and_nothing_sent(found):
    x, residual, _, bias = (t.double() for t in dropout_add_ranks.whole())
    expected = dropout_add_reference(x, bias, residual)
    for way in ways(found):
        for name in ("nothing dropped", "evaluation"):
            for rank, mine in enumerate(found):
                y = mine[way][name]["y"]
                assert y.numel() == 0 or relative(y, expected[part(len(found), rank)]) < 1e-6
    for rank in found:  # the seed and a number of rows; nothing; the seed
        assert rank["sent"] == [2, 1]


def test_groups(found):
    """A group of one is none; in a group of others than the first rank, that group's first counts."""
    for rank in found:
        assert torch.equal(rank["alone"]["y"], rank["by itself"]["y"])
    last = [rank["pair"]["y"] for rank in found if "pair" in rank]
    assert torch.equal(*last) and torch.equal(last[0], found[-2]["by itself"]["y"])
    assert not torch.equal(found[0]["by itself"]["y"], found[1]["by itself"]["y"])


def test_a_group_that_is_none_needs_no_torch_distributed():
    x = torch.ones(2, 8)
    torch.manual_seed(1)
    y = onepass.dropout_add(x, x, 0.5, sequence_parallel=True)
    torch.manual_seed(1)
    assert torch.equal(y, onepass.dropout_add(x, x, 0.5))
