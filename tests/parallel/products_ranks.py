"""Ranks of tests/parallel/test_products.py: run tensor-parallel linear layers, and save the results for the tests."""

from unittest import mock

import torch
import torch.distributed as dist
from parallel.meeting import drawn, join

import onepass
from onepass.parallel import tensor_parallel as product

S, B, K, N = 8, 2, 12, 20  # sequence, batch, and the features of x and of y


def run(rank, ranks, folder, backend):
    join(rank, ranks, folder, backend)
    world = dist.group.WORLD
    found = {name: {dtype: layer(name, world, dtype) for dtype in (torch.float32, torch.bfloat16)} for name in CASES}
    found["no tokens"] = {name: layer(name, world, torch.float32, sequence=0) for name in CASES}
    found["frozen"] = {name: frozen(name, world) for name in CASES}
    found["main_grad"] = {name: gathered(name, world) for name in CASES}
    found["order"] = {name: order(name, world) for name in CASES}
    found["errors"] = errors(world)
    found["explained"] = explained(world)
    if ranks == 2:
        found["compiled"] = {name: compiled(name, world) for name in CASES}
        found["compiled without a bias"] = compiled("row", world, bias=False)
    pairs = [dist.new_group(those) for those in ([[0], [1]] if ranks == 2 else [[0, 2], [1, 3]])]
    found["strided"] = {name: layer(name, pairs[rank % 2], torch.float32) for name in CASES}
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


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


def whole(dtype=torch.float32, sequence=S):
    """Return the unsharded x, parameters and incoming gradient. They are the same on all ranks."""
    seeds = torch.Generator().manual_seed(3)

    def numbers(*shape):
        return drawn(torch.randn, shape, generator=seeds).to(dtype)

    parameters = {"weight": numbers(N, K), "bias": numbers(N), "norm_weight": numbers(K), "norm_bias": numbers(K)}
    return numbers(sequence, B, K), parameters, numbers(sequence, B, N)


def part(t, dim, rank, ranks):
    return t.chunk(ranks, dim)[rank].contiguous() if t.shape[dim] else t


def shard(name, rank, ranks, dtype=torch.float32, sequence=S):
    """Return this rank's x, parameters and incoming gradient."""
    _, by_row, divided = CASES[name]
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


def layer(name, group, dtype, sequence=S):
    x, parameters, dy = shard(name, group.rank(), group.size(), dtype, sequence)
    before = [t.detach().clone() for t in (x, dy)]
    y = CASES[name][0](x, parameters, group)
    y.backward(dy, retain_graph=True)
    found = {"y": y.detach(), **grads_of(x, parameters)}
    found["again"] = torch.equal(torch.autograd.grad(y, x, dy)[0], found["x"])
    found["unchanged"] = all(torch.equal(a, b) for a, b in zip(before, (x, dy), strict=True))
    return found


def frozen(name, group):
    """Return the gradients if only x, or only the weight, requires one."""
    found = {}
    for asked in ("x", "weight"):
        x, parameters, dy = shard(name, group.rank(), group.size())
        x.requires_grad_(asked == "x")
        for key, parameter in parameters.items():
            parameter.requires_grad_(key == asked)
        CASES[name][0](x, parameters, group).backward(dy)
        found[asked] = grads_of(x, parameters)
    return found


def gathered(name, group):
    """Return the main_grads after two microbatches."""
    x, parameters, dy = shard(name, group.rank(), group.size())
    for parameter in parameters.values():
        parameter.main_grad, parameter.grad_added_to_main_grad = torch.zeros_like(parameter), False
    for _ in range(2):
        CASES[name][0](x, parameters, group).backward(dy)
    return {key: t.main_grad for key, t in parameters.items()}


def order(name, group):
    """Return what backward does, in order: "start" and "wait" of collectives, and "product"."""
    x, parameters, dy = shard(name, group.rank(), group.size())
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
    return happened


def compiled(name, group, bias=True):
    x, parameters, dy = shard(name, group.rank(), group.size(), torch.bfloat16)
    if not bias:
        parameters["bias"] = None
    torch._dynamo.reset()
    function = torch.compile(lambda x: CASES[name][0](x * 1, parameters, group) * 1, backend="aot_eager", fullgraph=True)
    y = function(x)
    y.backward(dy)
    return {"y": y.detach(), **grads_of(x, {key: t for key, t in parameters.items() if t is not None})}


def errors(group):
    x, parameters, _ = shard("column", group.rank(), group.size())
    said = []
    odd = torch.ones(S + 1, B, K)

    def attempt(function):
        try:
            function()
        except (ValueError, TypeError) as error:
            said.append(str(error))

    weight, bias = parameters["weight"], parameters["bias"]
    with mock.patch.object(product, "start_all_gather", side_effect=AssertionError("something was sent")):
        attempt(lambda: onepass.linear(x, weight, bias, tp_group=group, allreduce_dgrad=True, sequence_parallel=True))
        attempt(lambda: onepass.linear(x, weight, bias, tp_group=group, allreduce_dgrad=True, reduce_output=True))
        attempt(lambda: onepass.linear(x[0, 0], weight, bias, tp_group=group, sequence_parallel=True))
        attempt(lambda: onepass.linear(odd, weight, bias, tp_group=group, reduce_output=True, sequence_parallel=True))
        attempt(lambda: onepass.linear(x, weight, bias, tp_group="tp", allreduce_dgrad=True))
        attempt(lambda: onepass.norm_linear(x, None, weight, tp_group="tp"))
        attempt(lambda: onepass.activation_linear(odd, weight, bias, "gelu", tp_group=group, sequence_parallel=True))
    return said


def explained(group):
    """Return explain's text for a call without an option, and with each option."""
    x, parameters, _ = shard("column", group.rank(), group.size())
    ways = ({}, {"allreduce_dgrad": True}, {"sequence_parallel": True}, {"reduce_output": True})
    return [str(onepass.explain(onepass.linear, x, parameters["weight"], tp_group=group, **way)) for way in ways]
