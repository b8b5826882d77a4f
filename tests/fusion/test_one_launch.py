"""Lanes that a compiler writes into one tensor: what inductor is told to make one kernel of."""

import pytest
import torch
import torch.nn.functional as F

import onepass
from onepass.fusion import foreach_cat as one_launch

pytestmark = [pytest.mark.usefixtures("machine"), pytest.mark.slow]
WIDTHS = range(3, 12)  # of fewer than nine lanes inductor makes one kernel of itself


@pytest.fixture
def lists(monkeypatch):
    """For each cat that inductor was handed, the operations that write it. A CPU has no lists: there it isn't told."""
    found = []
    monkeypatch.setattr(one_launch, "_list", lambda made: found.append(list(one_launch._writers(made))))
    return found


def inputs(times=1):
    torch.manual_seed(0)
    return [torch.randn(4, times * width, requires_grad=True) for width in WIDTHS]


def agree(fn, xs):
    fused = onepass.fuse(fn, compiler="inductor")
    found, wanted = fused(*xs), fn(*xs)
    gradients = [torch.randn_like(y) for y in wanted]
    for a, b in zip(
        [*found, *torch.autograd.grad(found, xs, gradients)], [*wanted, *torch.autograd.grad(wanted, xs, gradients)], strict=True
    ):
        torch.testing.assert_close(a, b)


def test_gates(lists):
    agree(lambda *xs: [F.silu(a) * b for a, b in (x.chunk(2, -1) for x in xs)], inputs(2))
    assert {len(set(names)) for names in lists} == {len(WIDTHS)}
    assert 2 <= len(lists) <= 5  # forward; in backward what of forward is made again, and the gradients


def test_a_cat_of_the_program_s_own(lists):
    agree(lambda *xs: [torch.cat([torch.tanh(x) for x in xs], 1)], inputs())
    assert len(WIDTHS) in map(len, lists)


def test_what_is_no_chain_of_lanes_is_not_handed_over(lists):
    agree(lambda *xs: [torch.cat([xs[0], xs[1].sin(), xs[2]], 1)], inputs()[:3])
    assert lists == []
