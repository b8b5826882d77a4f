"""Ranks of tests/parallel/test_mlp.py: run a tensor-parallel MLP, and save the results for the tests.

All ranks make the whole x, scale and incoming gradient, and take their part of them. Their results are parts, which the test
concatenates.
"""

import copy
import os
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from parallel.meeting import join
from torch import nn

import onepass
from onepass.nn import MLP, linear, mlp, sharded_state_dict
from onepass.parallel import reduce_sequence_parallel_grads

S, B, K, F = 8, 2, 12, 16  # sequence, batch, hidden_size and ffn_hidden_size
MICROBATCHES = 2
OPTIONS = {  # case -> options of `case`
    "swiglu": {},
    "swiglu, sequence": {"sequence_parallel": True},
    "gelu": {"activation": "gelu"},
    "gelu, sequence": {"activation": "gelu", "sequence_parallel": True},
    "scaled": {"scaled": True},
    "scaled, sequence": {"scaled": True, "sequence_parallel": True},
    "scaled, no bias": {"scaled": True, "bias": False},
    "scaled column, sequence, no bias": {"scaled": True, "column": True, "bias": False, "sequence_parallel": True},
    "bias left": {"skip_bias_add": True},
    "bias left, scaled, sequence": {"skip_bias_add": True, "scaled": True, "sequence_parallel": True},
    "clamped": {"activation": "quick_geglu", "clamp": 1.0, "linear_offset": 0.5, "scaled": True, "sequence_parallel": True},
    "own start": {"init_method": lambda weight: nn.init.normal_(weight, 1.0, 3.0)},
    "main_grad": {"main_grad": True, "dtype": torch.float32},
    "main_grad, scaled, sequence": {"main_grad": True, "dtype": torch.float32, "scaled": True, "sequence_parallel": True},
    "in fp8": {"save": "fp8", "dtype": torch.float32, "sequence_parallel": True},
}


def run(rank, ranks, folder):
    join(rank, ranks, folder)
    world = dist.group.WORLD
    found = {name: case(world, **options) for name, options in OPTIONS.items()}
    found["errors"] = errors(world)
    found["no tokens"] = [no_tokens(world, sequence) for sequence in (False, True)]
    found["copied"] = copied(world)
    if ranks == 2:
        found["compiled"] = [compiled(world, sequence) for sequence in (False, True)]
        dcp.save(sharded_state_dict(model(world)), checkpoint_id=f"{folder}/saved by 2")
    else:
        groups = [dist.new_group(those) for those in ([0, 2], [1, 3])]
        mine = groups[rank % 2]
        found["apart"] = {name: case(mine, **OPTIONS[name]) for name in ("scaled", "scaled, sequence")}
        found["loaded"] = model(world, seed=9)
        dcp.load(sharded_state_dict(found["loaded"]), checkpoint_id=f"{folder}/saved by 2")
        found["loaded"] = found["loaded"].state_dict()
    if os.environ.get("TRITON_INTERPRET"):
        with onepass.use_backend("triton"):
            found["kernels"] = case(world, scaled=True, sequence_parallel=True, dtype=torch.float32)
    found["unequal"] = unequal(world)  # last: it raises, which may leave ranks inside a collective
    torch.save(found, f"{folder}/{ranks}-{rank}.pt")
    dist.destroy_process_group()


def numbers(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def given(microbatch, column=False):
    """Return x, a scale for each token, and the gradient of y."""
    scale = 0.5 + numbers(10 + microbatch, S, B, *((1,) if column else ())).square()
    return numbers(microbatch, S, B, K), scale, numbers(20 + microbatch, S, B, K) + 0.5


def model(group, seed=5, **options):
    torch.manual_seed(seed)
    return MLP(K, F, tp_group=group, **options)


def with_random_biases(block):
    """Set biases to a rank's part of random vectors. Initial biases are zeros, which would hide whether they are used."""
    for layer, seed in ((block.linear_fc1, 31), (block.linear_fc2, 32)):
        if layer.bias is not None:
            layer.start("bias", lambda bias, seed=seed: bias.copy_(numbers(seed, *bias.shape)))
    return block


def part(t, sequence, group, dtype):
    """Return this rank's part of the sequence if it is divided, else all of it."""
    return (t.chunk(group.size())[group.rank()] if sequence else t).to(dtype).clone()


def case(group, scaled=False, column=False, main_grad=False, dtype=torch.float64, **options):
    """Return the initial state, and the results of two microbatches.

    The gradients of x and scale are the last microbatch's; the parameters' are sums over both.
    """
    block, sequence = model(group, dtype=dtype, **options), options.get("sequence_parallel", False)
    found = {"random state": torch.get_rng_state(), "start": {name: t.clone() for name, t in block.state_dict().items()}}
    with_random_biases(block)
    if main_grad:
        for parameter in block.parameters():
            parameter.main_grad, parameter.grad_added_to_main_grad = torch.zeros_like(parameter), False
    for microbatch in range(MICROBATCHES):
        x, scale, dy = (part(t, sequence, group, dtype) for t in given(microbatch, column))
        x.requires_grad_()
        scale = scale.requires_grad_() if scaled else None
        y = block(x, scale)
        left = None
        if options.get("skip_bias_add"):
            y, left = y
        (y if left is None else y + left).backward(dy)
    found["left"] = left is not None
    assert not main_grad or not any(t.grad.any() or not t.grad_added_to_main_grad for t in block.parameters())
    reduce_sequence_parallel_grads(block, group)
    found |= {"y": (y if left is None else y + left).detach(), "dx": x.grad, "dscale": None if scale is None else scale.grad}
    return found | {"grads": {name: t.main_grad if main_grad else t.grad for name, t in block.named_parameters()}}


def compiled(group, sequence):
    """Return y, dx, dscale and the parameters' gradients, with and without torch.compile."""

    def results(compiling):
        block = model(group, sequence_parallel=sequence)
        block.linear_fc1.weight.main_grad = torch.zeros_like(block.linear_fc1.weight)
        x, scale, dy = (part(t, sequence, group, torch.float32).requires_grad_() for t in given(0))
        function = torch.compile(block, backend="aot_eager", fullgraph=True) if compiling else block
        y = function(x, scale)
        y.backward(dy.detach())
        grads = [t.grad for name, t in block.named_parameters() if name != "linear_fc1.weight"]
        return [y.detach(), x.grad, scale.grad, block.linear_fc1.weight.main_grad, *grads]

    return results(True), results(False)


def no_tokens(group, sequence):
    """Return y and the gradients for an input without tokens, such as an expert's."""
    block, x, scale = model(group, sequence_parallel=sequence), torch.ones(0, B, K), torch.ones(0, B, requires_grad=True)
    y = block(x, scale)
    y.sum().backward()
    return [y.detach(), scale.grad, *(t.grad for t in block.parameters())]


def copied(group):
    """Whether a deep copy computes the same. Assert that it keeps the group and the parameters' attributes."""
    block = model(group, sequence_parallel=True)
    other = copy.deepcopy(nn.Sequential(block))[0]
    assert other.tp_group is group and other.linear_fc2.tp_group is group and other.linear_fc2.bias.sequence_parallel is True
    x = part(given(0)[0], True, group, torch.float32)
    return torch.equal(other(x), block(x))


def said_of(function):
    try:
        function()
    except (ValueError, TypeError, RuntimeError) as error:
        return str(error)
    return "nothing"


def errors(group):
    ranks, x = group.size(), torch.ones(S, B, K)
    block, divided = model(group), model(group, sequence_parallel=True)
    sent = AssertionError("something was sent")
    with (
        mock.patch.object(linear, "linear", side_effect=sent),
        mock.patch.object(mlp, "gather_sequence", side_effect=sent),
        mock.patch.object(mlp, "activation_linear", side_effect=sent),
    ):
        said = [
            said_of(lambda: MLP(K, ranks * 4 + 1, tp_group=group)),
            said_of(lambda: block(x[..., :-1])),
            said_of(lambda: block(x, torch.ones(S + 1, B))),
            said_of(lambda: divided(x[: S // ranks], torch.ones(S, B))),
            said_of(lambda: MLP(K, F, tp_group=dist.GroupMember.NON_GROUP_MEMBER)),
        ]
    return [*said, repr(divided)]


def unequal(group):
    """Return the error of a sequence that doesn't divide evenly: one rank has more rows."""
    rows = 3 if group.rank() == 0 else 2
    with onepass.validate():
        return said_of(lambda: model(group, sequence_parallel=True)(torch.ones(rows, B, K)))
