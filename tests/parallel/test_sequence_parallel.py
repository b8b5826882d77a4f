"""Two processes: the marked gradients are summed, the others are left alone. What they do is in two_ranks.py."""

import pytest
import torch
import torch.distributed as dist
from parallel import two_ranks
from parallel.worlds import PAIRS, found_by
from torch import nn

import onepass
from onepass.parallel import reduce_sequence_parallel_grads

needs_gloo = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="this PyTorch has no gloo")


@pytest.fixture(scope="module", params=PAIRS)
def found(request, tmp_path_factory):
    """What each rank found."""
    return found_by(two_ranks.run, request.param, tmp_path_factory.mktemp("ranks"))


@needs_gloo
def test_a_split_sequence_gives_the_whole_ones_gradient(found):
    block, x, dy = two_ranks.whole_sequence()
    with onepass.use_backend("torch"):
        for _ in range(2):
            block(x).backward(dy)
    for rank in found:
        torch.testing.assert_close(rank["split_sequence"]["norm"], [p.grad for p in block[0].parameters()])
        after, before = rank["split_sequence"]["linear"]
        assert torch.equal(after, before)
    first, second = (rank["split_sequence"]["norm"] for rank in found)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(first, second, strict=True))


@needs_gloo
def test_one_all_reduce_for_each_type_in_the_order_of_the_parameters(found):
    for rank in found:
        assert rank["kinds"]["calls"] == [5 + 12, 6 + 2, 1]
        assert rank["kinds"]["same"] and rank["kinds"]["without"] is None
        sums = [3.0, 21.0, 201.0, 0.25 + 1.25, 15.0]
        for grad, expected in zip(rank["kinds"]["grads"], sums, strict=True):
            assert torch.equal(grad, torch.full_like(grad, expected))


@needs_gloo
def test_main_grad_goes_before_grad(found):
    for rank in found:
        main_grad, grad, without = rank["main_grads"]
        assert main_grad.tolist() == [3.0] * 3 and grad.tolist() == [1.0] * 3 and without.tolist() == [3.0] * 3


@needs_gloo
def test_a_group_of_one_does_nothing(found):
    for index, rank in enumerate(found):
        assert rank["groups"]["calls"] == [] and rank["groups"]["alone"].tolist() == [index + 1.0] * 3
        assert rank["groups"]["together"].tolist() == [3.0] * 3


@needs_gloo
def test_under_validate_ranks_that_differ_are_told(found):
    for rank in found:
        listed, by_name, by_shape = rank["agreement"]["said"]
        assert "parameter 1 has one of shape (2,) and torch.float32 on its rank 0 and none on its rank 1" in listed
        assert "but two has" in by_name
        assert "one of shape (3,) and torch.float32 on its rank 0 and one of shape (4,)" in by_shape
        assert not rank["agreement"]["changed"] and rank["agreement"]["agreeing"].tolist() == [2.0] * 3


def test_without_torch_distributed_it_does_nothing():
    parameter = two_ranks.marked(torch.ones(3))
    assert reduce_sequence_parallel_grads([parameter]) is None
    assert reduce_sequence_parallel_grads(nn.Linear(2, 2)) is None
    assert parameter.grad.tolist() == [1.0] * 3


@pytest.mark.parametrize(
    ("params", "words"), [(torch.ones(3), "one tensor: put it in a list"), ([nn.Linear(2, 2)], "parameter 0 is a Linear")]
)
def test_what_are_no_parameters_is_named(params, words):
    with pytest.raises(TypeError, match=f"params must be a module or parameters, but .*{words}"):
        reduce_sequence_parallel_grads(params)
