"""An MLP divided over ranks, against plain formulas of the undivided one in fp64."""

import copy
import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ops.calls import needs_triton, relative
from parallel.meeting import error_of, every_other_rank
from parallel.worlds import FOURS, PAIRS, World
from torch import nn
from torch.nn import functional

import onepass
from onepass.nn import MLP, linear, mlp, sharded_state_dict
from onepass.parallel import reduce_sequence_parallel_grads

WORLDS = [PAIRS[0], FOURS[0]]
of_two = pytest.mark.parametrize("world", PAIRS[:1], indirect=True, scope="module")
of_four = pytest.mark.parametrize("world", FOURS[:1], indirect=True, scope="module")
S, B, K, F = 8, 2, 12, 16  # sequence, batch, hidden_size and ffn_hidden_size
MICROBATCHES = 2
OPTIONS = {  # case -> options of `train`
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
    "by kernels": {"scaled": True, "sequence_parallel": True, "dtype": torch.float32},
}
NOT_OF_THE_MODULE = ("scaled", "column", "main_grad", "dtype", "sequence_parallel")


def numbers(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def tokens(microbatch, column=False):
    """Return x, a scale for each token, and the gradient of y, which are the same on all ranks."""
    scale = 0.5 + numbers(10 + microbatch, S, B, *((1,) if column else ())).square()
    return numbers(microbatch, S, B, K), scale, numbers(20 + microbatch, S, B, K) + 0.5


def part(t, sequence, group, dtype):
    """Return this rank's part of the sequence if it is divided, else all of it."""
    return (t.chunk(group.size())[group.rank()] if sequence else t).to(dtype).clone()


def model(group, seed=5, **options):
    torch.manual_seed(seed)
    return MLP(K, F, tp_group=group, **options)


def with_random_biases(block):
    """Set biases to a rank's part of random vectors. Initial biases are zeros, which would hide whether they are used."""
    for layer, seed in ((block.linear_fc1, 31), (block.linear_fc2, 32)):
        if layer.bias is not None:
            layer.start("bias", lambda bias, seed=seed: bias.copy_(numbers(seed, *bias.shape)))
    return block


# ---- one rank's part, and the undivided MLP ----


def train(group, scaled=False, column=False, main_grad=False, dtype=torch.float64, **options):
    """Return the initial state, and the results of two microbatches.

    The gradients of x and scale are the last microbatch's; the parameters' are sums over both.
    """
    block, sequence = model(group, dtype=dtype, **options), options.get("sequence_parallel", False)
    results = {"random state": torch.get_rng_state(), "start": {name: t.clone() for name, t in block.state_dict().items()}}
    with_random_biases(block)
    if main_grad:
        for parameter in block.parameters():
            parameter.main_grad, parameter.grad_added_to_main_grad = torch.zeros_like(parameter), False
    for microbatch in range(MICROBATCHES):
        x, scale, dy = (part(t, sequence, group, dtype) for t in tokens(microbatch, column))
        x.requires_grad_()
        scale = scale.requires_grad_() if scaled else None
        y = block(x, scale)
        left = None
        if options.get("skip_bias_add"):
            y, left = y
        y = y if left is None else y + left
        y.backward(dy)
    assert (left is not None) == (bool(options.get("skip_bias_add")) and not scaled)
    assert not main_grad or not any(t.grad.any() or not t.grad_added_to_main_grad for t in block.parameters())
    reduce_sequence_parallel_grads(block, group)
    results |= {"y": y.detach(), "dx": x.grad, "dscale": None if scale is None else scale.grad}
    return results | {"grads": {name: t.main_grad if main_grad else t.grad for name, t in block.named_parameters()}}


def case(world, name):
    with onepass.use_backend("triton" if name == "by kernels" else "auto"):
        return train(world, **OPTIONS[name])


def case_of_every_other_rank(world, name):
    return train(every_other_rank(), **OPTIONS[name])


def activated(z, activation="swiglu", clamp=None, linear_offset=0.0):
    if activation == "gelu":
        return functional.gelu(z, approximate="tanh")
    gate, linear = z.chunk(2, -1)
    if clamp is not None:
        gate, linear = gate.clamp(max=clamp), linear.clamp(-clamp, clamp)
    factor = 1.702 if activation == "quick_geglu" else 1.0
    return gate * torch.sigmoid(factor * gate) * (linear + linear_offset)


def undivided(options):
    """Return the start and the results of two microbatches, of the parameters that the module has on one rank."""
    own = {name: value for name, value in options.items() if name not in NOT_OF_THE_MODULE}
    block = model(None, dtype=options.get("dtype", torch.float64), **own)
    start = {"random state": torch.get_rng_state(), "start": {name: t.clone() for name, t in block.state_dict().items()}}
    w = {name: t.detach().double().requires_grad_() for name, t in with_random_biases(block).named_parameters()}
    formula = {name: options[name] for name in ("activation", "clamp", "linear_offset") if name in options}
    for microbatch in range(MICROBATCHES):
        x, scale, dy = tokens(microbatch, options.get("column", False))
        x.requires_grad_()
        scale = scale.requires_grad_() if options.get("scaled") else None
        h = functional.linear(x, w["linear_fc1.weight"], w.get("linear_fc1.bias"))
        y = functional.linear(activated(h, **formula), w["linear_fc2.weight"], w.get("linear_fc2.bias"))
        y = y if scale is None else y * scale.view(*y.shape[:-1], 1)
        y.backward(dy)
    grads = {name: t.grad for name, t in w.items()}
    return start | {"y": y.detach(), "dx": x.grad, "dscale": None if scale is None else scale.grad, "grads": grads}


# ---- the ranks' parts together ----


def alike(parts):
    assert all(torch.equal(one, parts[0]) for one in parts)
    return parts[0]


def together(name, parts, gated):
    """Return the whole parameter, or its gradient."""
    if name == "linear_fc2.weight":
        return torch.cat(parts, 1)
    if name == "linear_fc2.bias":
        return alike(parts)
    blocks = [part.chunk(2 if gated else 1) for part in parts]
    return torch.cat([torch.cat(each) for each in zip(*blocks, strict=True)])


def compare(parts, name):
    options = OPTIONS[name]
    bound = 0.1 if "save" in options else 1e-14 if "dtype" not in options else 1e-6
    expected, gated = undivided(options), options.get("activation") != "gelu"
    assert torch.equal(alike([one["random state"] for one in parts]), expected["random state"])
    for key, t in expected["start"].items():
        assert torch.equal(together(key, [one["start"][key] for one in parts], gated), t), key
    whole = torch.cat if options.get("sequence_parallel") else alike
    for key in ("y", "dx", "dscale"):
        if expected[key] is None:
            assert parts[0][key] is None
        else:
            assert relative(whole([one[key] for one in parts]), expected[key]) <= bound, key
    assert list(parts[0]["grads"]) == list(expected["grads"])
    for key, t in expected["grads"].items():
        assert relative(together(key, [one["grads"][key] for one in parts], gated), t) <= bound, key


@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "by kernels"])
def test_as_undivided(world, name):
    compare(world.run(case, name), name)


@needs_triton
@pytest.mark.skipif(not os.environ.get("TRITON_INTERPRET"), reason="the kernels run on a GPU here")
def test_by_kernels(world):
    compare(world.run(case, "by kernels"), "by kernels")


@of_four
@pytest.mark.parametrize("name", ("scaled", "scaled, sequence"))
def test_in_groups_whose_ranks_are_apart(world, name):
    parts = world.run(case_of_every_other_rank, name)
    compare(parts[::2], name)
    compare(parts[1::2], name)


@of_two
@pytest.mark.parametrize("sequence", (False, True))
def test_compiled_without_a_break(group, sequence):
    def results(compiling):
        block = model(group, sequence_parallel=sequence)
        block.linear_fc1.weight.main_grad = torch.zeros_like(block.linear_fc1.weight)
        x, scale, dy = (part(t, sequence, group, torch.float32).requires_grad_() for t in tokens(0))
        function = torch.compile(block, backend="aot_eager", fullgraph=True) if compiling else block
        y = function(x, scale)
        y.backward(dy.detach())
        grads = [t.grad for name, t in block.named_parameters() if name != "linear_fc1.weight"]
        return [y.detach(), x.grad, scale.grad, block.linear_fc1.weight.main_grad, *grads]

    for mine, eager in zip(results(True), results(False), strict=True):
        torch.testing.assert_close(mine, eager)


@pytest.mark.parametrize("sequence", (False, True))
def test_no_tokens(group, sequence):
    """Such an input is an expert's."""
    block, x, scale = model(group, sequence_parallel=sequence), torch.ones(0, B, K), torch.ones(0, B, requires_grad=True)
    y = block(x, scale)
    y.sum().backward()
    assert y.shape == (0, B, K) and not any(t.grad.any() for t in (scale, *block.parameters()))


def test_a_copy_has_the_same_group(group):
    block = model(group, sequence_parallel=True)
    other = copy.deepcopy(nn.Sequential(block))[0]
    assert other.tp_group is group and other.linear_fc2.tp_group is group and other.linear_fc2.bias.sequence_parallel is True
    x = part(tokens(0)[0], True, group, torch.float32)
    assert torch.equal(other(x), block(x))


# ---- errors ----


def test_errors_say_what_to_do_before_anything_is_sent(group):
    ranks, x = group.size(), torch.ones(S, B, K)
    block, divided = model(group), model(group, sequence_parallel=True)
    sent = AssertionError("something was sent")
    with (
        mock.patch.object(linear, "linear", side_effect=sent),
        mock.patch.object(mlp, "gather_sequence", side_effect=sent),
        mock.patch.object(mlp, "activation_linear", side_effect=sent),
    ):
        said = error_of(MLP, K, ranks * 4 + 1, tp_group=group)
        assert said == f"ffn_hidden_size must be a multiple of {ranks}, the size of tp_group, but is {ranks * 4 + 1}"
        said = error_of(block, x[..., :-1])
        assert said == f"x's last dimension must be {K}, hidden_size, but x has shape (8, 2, {K - 1})"
        said = error_of(block, x, torch.ones(S + 1, B))
        assert said == "per_token_scale must have shape (8, 2) or (8, 2, 1), one number a token, but has (9, 2)"
        said = error_of(divided, x[: S // ranks], torch.ones(S, B))
        assert said.startswith(f"per_token_scale must have shape ({8 // ranks}, 2) or ({8 // ranks}, 2, 1), one")
        said = error_of(MLP, K, F, tp_group=dist.GroupMember.NON_GROUP_MEMBER)
        assert said.startswith("tp_group must be None or a torch.distributed.ProcessGroup that has this rank, but is ")


def test_it_shows_its_layers_and_ranks(group):
    options = f"bias=True, tp={group.size()}"
    assert repr(model(group, sequence_parallel=True)).splitlines()[1:4] == [
        f"  {K}, {F}, activation='swiglu'",
        f"  (linear_fc1): ColumnParallelLinear({K}, {2 * F}, {options}, skip_bias_add=True, sequence_parallel=True)",
        f"  (linear_fc2): ActivationRowParallelLinear({F}, {K}, {options}, sequence_parallel=True)",
    ]


def test_a_sequence_that_does_not_divide_is_said_on_every_rank(group):
    with onepass.validate():
        said = error_of(model(group, sequence_parallel=True), torch.ones(3 if group.rank() == 0 else 2, B, K))
    assert said.startswith("x must be the same on all ranks of group, but is of shape (3, 2, 12)")


# ---- checkpoints ----


def save(group, folder):
    dcp.save(sharded_state_dict(model(group)), checkpoint_id=folder)


def load(group, folder):
    block = model(group, seed=9)
    dcp.load(sharded_state_dict(block), checkpoint_id=folder)
    return block.state_dict()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return the folder in which two ranks have saved the MLP."""
    folder, pair = str(tmp_path_factory.mktemp("checkpoint")), World("gloo", 2)
    pair.run(save, folder)
    pair.close()
    return folder


@of_four
def test_four_ranks_load_what_two_saved(world, saved):
    parts = world.run(load, saved)
    for name, t in model(None).state_dict().items():
        assert torch.equal(together(name, [state[name] for state in parts], True), t), name


@pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")
def test_one_rank_loads_what_two_saved(saved):
    one = model(None, seed=9)
    dcp.load(sharded_state_dict(one), checkpoint_id=saved, no_dist=True)
    assert all(torch.equal(one.state_dict()[name], t) for name, t in model(None).state_dict().items())
