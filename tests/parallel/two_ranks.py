"""Ranks of tests/parallel/test_sequence_parallel.py: each rank runs every scenario and saves its results for the tests."""

import torch
import torch.distributed as dist
from parallel.meeting import drawn, join
from torch import nn

import onepass
from onepass.nn import LayerNorm
from onepass.parallel import reduce_sequence_parallel_grads

_FOUND = {}


def run(rank, ranks, folder, backend):
    """Run every scenario, in the same order on all ranks."""
    join(rank, ranks, folder, backend)
    with onepass.use_backend("torch"):
        for scenario in (split_sequence, kinds, main_grads, groups, agreement):
            _FOUND[scenario.__name__] = scenario(rank)
    torch.save(_FOUND, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def whole_sequence():
    """Return a layer norm with a linear layer, a sequence, and the gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    block = nn.Sequential(LayerNorm(16, sequence_parallel=True), nn.Linear(16, 16))
    for parameter in block.parameters():
        parameter.data = drawn(torch.randn, parameter.shape, generator=generator)
    return block, *drawn(torch.randn, 2, 10, 3, 16, generator=generator)


def split_sequence(rank):
    """Train two microbatches, with sequence parts of unequal length."""
    block, x, dy = whole_sequence()
    part = slice(0, 4) if rank == 0 else slice(4, 10)
    for _ in range(2):
        block(x[part]).backward(dy[part])
    before = block[1].weight.grad.clone()
    reduce_sequence_parallel_grads(block)
    return {"norm": [p.grad for p in block[0].parameters()], "linear": [block[1].weight.grad, before]}


def marked(grad, **attributes):
    parameter = nn.Parameter(torch.zeros(grad.shape, dtype=grad.dtype))
    parameter.grad, parameter.sequence_parallel = grad, True
    parameter.__dict__.update(attributes)
    return parameter


def kinds(rank):
    """Reduce gradients of several dtypes and shapes: strided, tied, and None. Return the all-reduces and the results."""
    grads = [torch.full((5,), rank + 1.0), torch.full((2, 3), rank + 10.0).bfloat16(), torch.full((4, 3), rank + 100.0).t()]
    grads += [torch.full((2,), rank + 0.25).bfloat16(), torch.full((1,), rank + 7.0).double()]
    parameters = [marked(grad) for grad in grads]
    without = nn.Parameter(torch.zeros(3))
    without.sequence_parallel = True
    kept = [parameter.grad for parameter in parameters]
    with counted() as calls:
        reduce_sequence_parallel_grads(iter([*parameters, without, parameters[0]]))
    same = all(was is parameter.grad for was, parameter in zip(kept, parameters, strict=True))
    return {"grads": kept, "calls": calls, "same": same, "without": without.grad}


def main_grads(rank):
    """Reduce main_grad instead of .grad if it is a tensor."""
    with_one = marked(torch.ones(3), main_grad=torch.full((3,), rank + 1.0))
    with_none = marked(torch.full((3,), rank + 1.0), main_grad=None)
    reduce_sequence_parallel_grads([with_one, with_none])
    return [with_one.main_grad, with_one.grad, with_none.grad]


def groups(rank):
    """Reduce in a group of one, which does nothing, and in the group of all ranks."""
    alone = [dist.new_group([each]) for each in range(2)][rank]
    parameter = marked(torch.full((3,), rank + 1.0))
    with counted() as calls:
        reduce_sequence_parallel_grads([parameter], alone)
    was = parameter.grad.clone()
    reduce_sequence_parallel_grads([parameter], dist.group.WORLD)
    return {"calls": calls, "alone": was, "together": parameter.grad}


def agreement(rank):
    """Under validate(), all ranks raise if they differ, and gradients are unchanged."""
    said = []
    one, two = marked(torch.ones(3)), marked(torch.ones(2))
    if rank == 1:
        two.grad = None
    for params in ([one, two], nn.ParameterDict({"one": one, "two": two}), [marked(torch.ones(3 + rank))]):
        with onepass.validate():
            try:
                reduce_sequence_parallel_grads(params)
                said.append("")
            except RuntimeError as error:
                said.append(str(error))
    changed = not torch.equal(one.grad, torch.ones(3))
    with onepass.validate():
        reduce_sequence_parallel_grads([one])
    return {"said": said, "changed": changed, "agreeing": one.grad}


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
