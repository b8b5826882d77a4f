"""An MLP divided over ranks, over gloo, against plain formulas of the undivided one in fp64. The processes run mlp_ranks.py."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ops.calls import needs_triton, relative
from parallel import mlp_ranks
from parallel.mlp_ranks import MICROBATCHES, OPTIONS, F, K, given, model, with_random_biases
from parallel.worlds import started
from torch.nn import functional

from onepass.nn import sharded_state_dict

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="this PyTorch has no gloo")
sizes = pytest.mark.parametrize("ranks", (2, 4))
NOT_OF_THE_MODULE = ("scaled", "column", "main_grad", "dtype", "sequence_parallel")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What each rank found and saved: two processes, and then four, for all tests."""
    folder = tmp_path_factory.mktemp("ranks")
    for ranks in (2, 4):
        started(mlp_ranks.run, (ranks, str(folder)), ranks)
    return folder


@pytest.fixture(scope="module")
def found(folder):
    return {ranks: [torch.load(folder / f"{ranks}-{rank}.pt") for rank in range(ranks)] for ranks in (2, 4)}


# ---- the undivided MLP ----


def activated(z, activation="swiglu", clamp=None, linear_offset=0.0):
    if activation == "gelu":
        return functional.gelu(z, approximate="tanh")
    gate, linear = z.chunk(2, -1)
    if clamp is not None:
        gate, linear = gate.clamp(max=clamp), linear.clamp(-clamp, clamp)
    factor = 1.702 if activation == "quick_geglu" else 1.0
    return gate * torch.sigmoid(factor * gate) * (linear + linear_offset)


def undivided(options, dtype=torch.float64):
    """The start and what two microbatches give, of the parameters that the module has on one rank."""
    block = model(None, dtype=dtype, **{name: value for name, value in options.items() if name not in NOT_OF_THE_MODULE})
    start = {"random state": torch.get_rng_state(), "start": {name: t.clone() for name, t in block.state_dict().items()}}
    w = {name: t.detach().double().requires_grad_() for name, t in with_random_biases(block).named_parameters()}
    formula = {name: options[name] for name in ("activation", "clamp", "linear_offset") if name in options}
    for microbatch in range(MICROBATCHES):
        x, scale, dy = given(microbatch, options.get("column", False))
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
    """The whole parameter, or its gradient."""
    if name == "linear_fc2.weight":
        return torch.cat(parts, 1)
    if name == "linear_fc2.bias":
        return alike(parts)
    blocks = [part.chunk(2 if gated else 1) for part in parts]
    return torch.cat([torch.cat(each) for each in zip(*blocks, strict=True)])


def compare(parts, options, bound=1e-14):
    expected = undivided(options, options.get("dtype", torch.float64))
    gated = options.get("activation") != "gelu"
    assert torch.equal(alike([one["random state"] for one in parts]), expected["random state"])
    for name, t in expected["start"].items():
        assert torch.equal(together(name, [one["start"][name] for one in parts], gated), t), name
    whole = torch.cat if options.get("sequence_parallel") else alike
    for name in ("y", "dx", "dscale"):
        if expected[name] is None:
            assert parts[0][name] is None
        else:
            assert relative(whole([one[name] for one in parts]), expected[name]) <= bound, name
    assert list(parts[0]["grads"]) == list(expected["grads"])
    for name, t in expected["grads"].items():
        assert relative(together(name, [one["grads"][name] for one in parts], gated), t) <= bound, name


@sizes
@pytest.mark.parametrize("name", OPTIONS)
def test_as_undivided(found, name, ranks):
    options = OPTIONS[name]
    bound = 0.1 if "save" in options else 1e-14 if "dtype" not in options else 1e-6
    compare([rank[name] for rank in found[ranks]], options, bound)
    leaves = bool(options.get("skip_bias_add")) and not options.get("scaled")
    assert all(rank[name]["left"] is leaves for rank in found[ranks])


@sizes
@needs_triton
def test_by_kernels(found, ranks):
    parts = [rank["kernels"] for rank in found[ranks] if "kernels" in rank]
    if not parts:
        pytest.skip("the kernels run on a GPU here")
    compare(parts, {"scaled": True, "sequence_parallel": True, "dtype": torch.float32}, 1e-6)


@pytest.mark.parametrize("name", ("scaled", "scaled, sequence"))
def test_in_groups_whose_ranks_are_apart(found, name):
    for group in (found[4][::2], found[4][1::2]):
        compare([rank["apart"][name] for rank in group], OPTIONS[name])


def test_compiled_without_a_break(found):
    for rank in found[2]:
        for compiled, eager in rank["compiled"]:
            for got, expected in zip(compiled, eager, strict=True):
                torch.testing.assert_close(got, expected)


@sizes
def test_no_tokens(found, ranks):
    for rank in found[ranks]:
        for y, *grads in rank["no tokens"]:
            assert y.shape == (0, 2, K) and not any(grad.any() for grad in grads)


@sizes
def test_a_copy_has_the_same_group(found, ranks):
    assert all(rank["copied"] for rank in found[ranks])


@sizes
def test_errors_say_what_to_do_before_anything_is_sent(found, ranks):
    for rank in found[ranks]:
        size, width, scale, part_of_scale, group, said = rank["errors"]
        assert size == f"ffn_hidden_size must be a multiple of {ranks}, the size of tp_group, but is {ranks * 4 + 1}"
        assert width == f"x's last dimension must be {K}, hidden_size, but x has shape (8, 2, {K - 1})"
        assert scale == "per_token_scale must have shape (8, 2) or (8, 2, 1), one number a token, but has (9, 2)"
        assert part_of_scale.startswith(f"per_token_scale must have shape ({8 // ranks}, 2) or ({8 // ranks}, 2, 1), one")
        assert group.startswith("tp_group must be None or a torch.distributed.ProcessGroup that has this rank, but is ")
        options = f"bias=True, tp={ranks}"
        assert said.splitlines()[1:4] == [
            f"  {K}, {F}, activation='swiglu'",
            f"  (linear_fc1): ColumnParallelLinear({K}, {2 * F}, {options}, skip_bias_add=True, sequence_parallel=True)",
            f"  (linear_fc2): ActivationRowParallelLinear({F}, {K}, {options}, sequence_parallel=True)",
        ]


@sizes
def test_a_sequence_that_does_not_divide_is_said_on_every_rank(found, ranks):
    for rank in found[ranks]:
        assert rank["unequal"].startswith("x must be the same on all ranks of group, but is of shape (3, 2, 12)")


# ---- checkpoints ----


def test_what_two_ranks_saved_four_have_loaded(found):
    whole = model(None).state_dict()
    for name, t in whole.items():
        assert torch.equal(together(name, [rank["loaded"][name] for rank in found[4]], True), t), name


@pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")
def test_what_two_ranks_saved_one_loads(folder):
    one = model(None, seed=9)
    dcp.load(sharded_state_dict(one), checkpoint_id=str(folder / "saved by 2"), no_dist=True)
    assert all(torch.equal(one.state_dict()[name], t) for name, t in model(None).state_dict().items())
