"""Linear layers spread over ranks, against the unsharded layer in fp64."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from parallel.meeting import drawn, error_of, every_other_rank
from parallel.worlds import FOURS, PAIRS

import onepass
from onepass.distributed import tensor_parallel as product

WORLDS = [*PAIRS, *FOURS]
of_two = pytest.mark.parametrize("world", PAIRS, indirect=True, scope="module")
S, B, K, N = 8, 2, 12, 20  # sequence, batch, and the features of x and of y


def linear(**options):
    def call(x, parameters, group):
        return onepass.linear(x, parameters["weight"], parameters["bias"], tp_group=group, **options)

    return call


def norm_linear(norm, **options):
    def call(x, parameters, group):
        return onepass.norm_linear(
            x, parameters["norm_weight"], parameters["weight"], parameters["bias"], norm=norm,
            norm_bias=parameters["norm_bias"] if norm == "layer_norm" else None, tp_group=group, **options,
        )  # fmt: skip

    return call


def activation_linear(**options):
    def call(x, parameters, group):
        return onepass.activation_linear(x, parameters["weight"], parameters["bias"], "gelu", tp_group=group, **options)

    return call


# name -> the call, whether it is row-parallel, whether the sequence is divided
CASES = {
    "column": (linear(allreduce_dgrad=True), False, False),
    "column, sequence": (linear(sequence_parallel=True), False, True),
    "row": (linear(reduce_output=True), True, False),
    "row, sequence": (linear(reduce_output=True, sequence_parallel=True), True, True),
    "rms_norm": (norm_linear("rms_norm"), False, False),
    "rms_norm, sequence": (norm_linear("rms_norm", sequence_parallel=True), False, True),
    "activation": (activation_linear(), True, False),
    "activation, sequence": (activation_linear(sequence_parallel=True), True, True),
    "layer_norm, sequence": (norm_linear("layer_norm", sequence_parallel=True), False, True),
}
cases = pytest.mark.parametrize("name", CASES)


def whole(dtype=torch.float32, sequence=S):
    """Return the unsharded x, parameters and incoming gradient. They are the same on all ranks."""
    seeds = torch.Generator().manual_seed(3)

    def numbers(*shape):
        return drawn(torch.randn, shape, generator=seeds).to(dtype)

    parameters = {"weight": numbers(N, K), "bias": numbers(N), "norm_weight": numbers(K), "norm_bias": numbers(K)}
    return numbers(sequence, B, K), parameters, numbers(sequence, B, N)


def part(t, dim, rank, ranks):
    return t.chunk(ranks, dim)[rank].contiguous() if t.shape[dim] else t


def shard(name, group, dtype=torch.float32, sequence=S):
    """Return this rank's x, parameters and incoming gradient."""
    _, by_row, divided = CASES[name]
    rank, ranks = group.rank(), group.size()
    x, parameters, dy = whole(dtype, sequence)
    if by_row:
        x, parameters["weight"] = part(x, -1, rank, ranks), part(parameters["weight"], 1, rank, ranks)
        dy = part(dy, 0, rank, ranks) if divided else dy
    else:
        x = part(x, 0, rank, ranks) if divided else x
        parameters |= {key: part(parameters[key], 0, rank, ranks) for key in ("weight", "bias")}
        dy = part(dy, -1, rank, ranks)
    return x.requires_grad_(), {key: torch.nn.Parameter(t) for key, t in parameters.items()}, dy


def grads_of(x, parameters):
    return {"x": x.grad, **{key: t.grad for key, t in parameters.items()}}


def results(name, group, dtype=torch.float32, sequence=S):
    x, parameters, dy = shard(name, group, dtype, sequence)
    before = [t.detach().clone() for t in (x, dy)]
    y = CASES[name][0](x, parameters, group)
    y.backward(dy, retain_graph=True)
    assert torch.equal(torch.autograd.grad(y, x, dy)[0], x.grad), "a second backward has other bits"
    assert all(map(torch.equal, before, (x, dy)))
    return {"y": y.detach(), **grads_of(x, parameters)}


def unsharded(name, dtype=torch.float32):
    """Return y and all gradients of the layer in one piece, of the same numbers in fp64."""
    x, parameters, dy = whole(dtype)
    x = x.double().requires_grad_()
    parameters = {key: torch.nn.Parameter(t.double()) for key, t in parameters.items()}
    y = CASES[name][0](x, parameters, None)
    y.backward(dy.double())
    return {"y": y.detach(), **grads_of(x, parameters)}


def compare(mine, name, group, dtype=torch.float32):
    """Compare this rank's parts with the whole's. What is a part of a sum over the group is summed first."""
    _, by_row, divided = CASES[name]
    parts = {"weight": 1, "x": -1} if by_row else {"weight": 0, "bias": 0, "y": -1}
    if divided:
        parts["y" if by_row else "x"] = 0
    summed = {"bias"} if by_row and divided else {"norm_weight", "norm_bias"} if divided else set()
    tight = {"rtol": 1e-5, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 3e-2, "atol": 0.3}
    exact = unsharded(name, dtype)
    for key, got in mine.items():
        if exact[key] is None:
            assert got is None
            continue
        assert got.dtype == dtype
        wanted = part(exact[key], parts[key], group.rank(), group.size()) if key in parts else exact[key]
        got = got.double()
        if key in summed:
            dist.all_reduce(got, group=group)
        torch.testing.assert_close(got, wanted, **tight)


@cases
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_as_unsharded(group, name, dtype):
    compare(results(name, group, dtype), name, group, dtype)


@cases
def test_a_group_of_every_other_rank(group, name):
    others = every_other_rank()  # a group of one is as none, but for what is divided already
    compare(results(name, others), name, others)


@cases
def test_ranks_without_tokens(group, name):
    mine = results(name, group, sequence=0)
    assert mine["y"].shape[0] == 0 and mine["x"].shape[0] == 0
    assert not mine["weight"].any() and not mine["bias"].any()


@cases
@pytest.mark.parametrize("asked", ("x", "weight"))
def test_what_is_frozen_has_no_gradient_and_disturbs_nobody(group, name, asked):
    x, parameters, dy = shard(name, group)
    x.requires_grad_(asked == "x")
    for key, parameter in parameters.items():
        parameter.requires_grad_(key == asked)
    CASES[name][0](x, parameters, group).backward(dy)
    grads = grads_of(x, parameters)
    compare({asked: grads.pop(asked)}, name, group)
    assert all(grad is None for grad in grads.values())


@cases
def test_main_grad_gathers_this_ranks_part(group, name):
    """Of two microbatches."""
    x, parameters, dy = shard(name, group)
    for parameter in parameters.values():
        parameter.main_grad, parameter.grad_added_to_main_grad = torch.zeros_like(parameter), False
    for _ in range(2):
        CASES[name][0](x, parameters, group).backward(dy)
    used = ("weight", "bias", "norm_weight") if "norm" in name else ("weight", "bias")
    compare({key: parameters[key].main_grad / 2 for key in used}, name, group)


@cases
def test_what_is_sent_is_under_way_during_a_product(group, name):
    x, parameters, dy = shard(name, group)
    y = CASES[name][0](x, parameters, group)
    happened = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            said = str(function)
            if "c10d_functional" in said:
                happened.append("wait" if "wait" in said else "start")
            elif ".mm" in said or ".addmm" in said or "add_gradient" in said:
                happened.append("product")
            return function(*args, **(kwargs or {}))

    with Watch():
        y.backward(dy)
    if CASES[name][1:] == (True, False):
        assert "start" not in happened  # each rank has its own dx
        return
    waits = [at for at, what in enumerate(happened) if what == "wait"]
    assert waits and happened.count("start") == len(waits)
    for at in waits:
        before = happened[:at]
        assert "product" in before[before.index("start") :], happened
    assert happened[-1] != "start"


@of_two
@pytest.mark.parametrize("names", (tuple(CASES), ("row",)), ids=("all in one graph", "without a bias"))
def test_compiled_without_a_break(group, names):
    """PyTorch 2.11's compiler lost gradients of a call without a bias, where what was summed came back in its own place."""
    given = {name: shard(name, group, torch.bfloat16) for name in names}
    if len(names) == 1:
        given["row"][1]["bias"] = None

    def call(xs):
        return [CASES[name][0](x * 1, given[name][1], group) * 1 for name, x in zip(names, xs, strict=True)]

    torch._dynamo.reset()
    ys = torch.compile(call, backend="aot_eager", fullgraph=True)([x for x, _, _ in given.values()])
    torch.autograd.backward(ys, [dy for _, _, dy in given.values()])
    for y, (name, (x, parameters, _)) in zip(ys, given.items(), strict=True):
        if parameters["bias"] is None:
            mine = {"x": x.grad, "weight": parameters["weight"].grad}
        else:
            mine = {"y": y.detach(), **grads_of(x, parameters)}
        compare(mine, name, group, torch.bfloat16)


def test_errors_say_what_to_do_before_anything_is_sent(group):
    x, parameters, _ = shard("column", group)
    weight, bias = parameters["weight"], parameters["bias"]
    odd, sequence = torch.ones(S + 1, B, K), {"tp_group": group, "sequence_parallel": True}
    with mock.patch.object(product, "start_all_gather", side_effect=AssertionError("something was sent")):
        said = error_of(onepass.linear, x, weight, bias, allreduce_dgrad=True, **sequence)
        assert said.startswith("allreduce_dgrad and sequence_parallel exclude each other")
        said = error_of(onepass.linear, x, weight, bias, tp_group=group, allreduce_dgrad=True, reduce_output=True)
        assert said.startswith("allreduce_dgrad and reduce_output exclude each other")
        said = error_of(onepass.linear, x[0, 0], weight, bias, **sequence)
        assert said.startswith("x must have a first dimension for sequence_parallel to divide")
        for said in (
            error_of(onepass.linear, odd, weight, bias, reduce_output=True, **sequence),
            error_of(onepass.activation_linear, odd, weight, bias, "gelu", **sequence),
        ):
            assert said.startswith(f"x's first dimension must be a multiple of {group.size()}, the size of tp_group")
        for said in (
            error_of(onepass.linear, x, weight, bias, tp_group="tp", allreduce_dgrad=True),
            error_of(onepass.norm_linear, x, None, weight, tp_group="tp"),
        ):
            assert said.startswith("group must be None or a torch.distributed.ProcessGroup")


def test_explain_says_what_is_sent(group):
    x, parameters, _ = shard("column", group)
    ways = ({}, {"allreduce_dgrad": True}, {"sequence_parallel": True}, {"reduce_output": True})
    nothing, column, sequence, row = (
        str(onepass.explain(onepass.linear, x, parameters["weight"], tp_group=group, **way)) for way in ways
    )
    assert "tp_group" not in nothing
    assert "dx summed over tp_group" in column and "divided" not in column
    assert "dx summed over tp_group" in sequence and "divided along the first dimension" in sequence
    assert "y summed over tp_group" in row


def test_without_a_group_nothing_is_asked_of_it():
    x, parameters, _ = whole()
    alone = CASES["column, sequence"][0](x, parameters, None)
    assert torch.equal(alone, torch.nn.functional.linear(x, parameters["weight"], parameters["bias"]))
