"""reduce_sequence_parallel_grads over two ranks: marked gradients are summed, and others are left alone."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from parallel.meeting import drawn, error_of, own_group
from torch import nn

import onepass
from onepass.nn import LayerNorm
from onepass.parallel import reduce_sequence_parallel_grads

rank_context = partial(onepass.use_backend, "torch")


def whole_sequence():
    """Return a layer norm with a linear layer, a sequence, and the gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    block = nn.Sequential(LayerNorm(16, sequence_parallel=True), nn.Linear(16, 16))
    for parameter in block.parameters():
        parameter.data = drawn(torch.randn, parameter.shape, generator=generator)
    return block, *drawn(torch.randn, 2, 10, 3, 16, generator=generator)


def test_a_split_sequence_gives_the_whole_ones_gradient(group):
    """Of two microbatches, with parts of unequal length."""
    (block, x, dy), (whole, _, _) = whole_sequence(), whole_sequence()
    part = slice(0, 4) if group.rank() == 0 else slice(4, 10)
    for _ in range(2):
        block(x[part]).backward(dy[part])
        whole(x).backward(dy)
    before = block[1].weight.grad.clone()
    reduce_sequence_parallel_grads(block)
    torch.testing.assert_close([p.grad for p in block[0].parameters()], [p.grad for p in whole[0].parameters()])
    assert torch.equal(block[1].weight.grad, before)
    for parameter in block[0].parameters():
        first = parameter.grad.clone()
        dist.broadcast(first, 0)
        assert torch.equal(parameter.grad, first)


def marked(grad, **attributes):
    parameter = nn.Parameter(torch.zeros(grad.shape, dtype=grad.dtype))
    parameter.grad, parameter.sequence_parallel = grad, True
    parameter.__dict__.update(attributes)
    return parameter


class counted:
    """Record the number of elements of each all-reduce in the block."""

    def __enter__(self):
        self.real, calls = dist.all_reduce, []

        def all_reduce(tensor, *args, **options):
            calls.append(tensor.numel())
            return self.real(tensor, *args, **options)

        dist.all_reduce = all_reduce
        return calls

    def __exit__(self, *exception):
        dist.all_reduce = self.real


def test_one_all_reduce_for_each_type_in_the_order_of_the_parameters(group):
    """Of gradients that are strided, tied, and None."""
    rank = group.rank()
    grads = [torch.full((5,), rank + 1.0), torch.full((2, 3), rank + 10.0).bfloat16(), torch.full((4, 3), rank + 100.0).t()]
    grads += [torch.full((2,), rank + 0.25).bfloat16(), torch.full((1,), rank + 7.0).double()]
    parameters = [marked(grad) for grad in grads]
    without = nn.Parameter(torch.zeros(3))
    without.sequence_parallel = True
    kept = [parameter.grad for parameter in parameters]
    with counted() as calls:
        reduce_sequence_parallel_grads(iter([*parameters, without, parameters[0]]))
    same = all(was is parameter.grad for was, parameter in zip(kept, parameters, strict=True))
    assert calls == [5 + 12, 6 + 2, 1]
    assert same and without.grad is None
    for grad, expected in zip(kept, [3.0, 21.0, 201.0, 0.25 + 1.25, 15.0], strict=True):
        assert torch.equal(grad, torch.full_like(grad, expected))


def test_main_grad_goes_before_grad(group):
    mine = torch.full((3,), group.rank() + 1.0)
    with_one, with_none = marked(torch.ones(3), main_grad=mine.clone()), marked(mine, main_grad=None)
    reduce_sequence_parallel_grads([with_one, with_none])
    assert with_one.main_grad.tolist() == [3.0] * 3 and with_one.grad.tolist() == [1.0] * 3
    assert with_none.grad.tolist() == [3.0] * 3


def test_a_group_of_one_does_nothing(group):
    parameter, mine = marked(torch.full((3,), group.rank() + 1.0)), own_group()
    with counted() as calls:
        reduce_sequence_parallel_grads([parameter], mine)
    assert calls == [] and parameter.grad.tolist() == [group.rank() + 1.0] * 3
    reduce_sequence_parallel_grads([parameter], group)
    assert parameter.grad.tolist() == [3.0] * 3


def test_under_validate_ranks_that_differ_are_told(group):
    one, two = marked(torch.ones(3)), marked(torch.ones(2))
    if group.rank() == 1:
        two.grad = None
    with onepass.validate():
        said = error_of(reduce_sequence_parallel_grads, [one, two])
        assert "parameter 1 has one of shape (2,) and torch.float32 on its rank 0 and none on its rank 1" in said
        assert "but two has" in error_of(reduce_sequence_parallel_grads, nn.ParameterDict({"one": one, "two": two}))
        said = error_of(reduce_sequence_parallel_grads, [marked(torch.ones(3 + group.rank()))])
        assert "one of shape (3,) and torch.float32 on its rank 0 and one of shape (4,)" in said
        assert torch.equal(one.grad, torch.ones(3))
        reduce_sequence_parallel_grads([one])
    assert one.grad.tolist() == [2.0] * 3


def test_without_torch_distributed_it_does_nothing():
    parameter = marked(torch.ones(3))
    assert reduce_sequence_parallel_grads([parameter]) is None
    assert reduce_sequence_parallel_grads(nn.Linear(2, 2)) is None
    assert parameter.grad.tolist() == [1.0] * 3


@pytest.mark.parametrize(
    ("params", "words"), [(torch.ones(3), "one tensor: put it in a list"), ([nn.Linear(2, 2)], "parameter 0 is a Linear")]
)
def test_what_are_no_parameters_is_named(params, words):
    with pytest.raises(TypeError, match=f"params must be a module or parameters, but .*{words}"):
        reduce_sequence_parallel_grads(params)
