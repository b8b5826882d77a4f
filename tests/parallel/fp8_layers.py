"""Tensor-parallel layers in eight bits, run by formulas or by kernels, for test_fp8_ranks.py and its mutants."""

from contextlib import ExitStack, contextmanager
from functools import partial
from unittest.mock import patch

import torch
import torch.distributed as dist
from parallel.meeting import drawn

import onepass
from onepass.kernels import fp8_cast, fp8_transpose
from onepass.parallel import DeferredWgrad
from onepass.product.fp8 import scales as fp8_scales

S, B, K, N = 12, 3, 64, 128  # 36 rows, which are no multiple of 16, and neither is a rank's part
STEPS = 4
RECIPES = {
    "delayed": onepass.FP8Recipe(amax_history_len=2),
    "current, e4m3": onepass.FP8Recipe(scaling="current", format="e4m3"),
    "row": onepass.FP8Recipe(scaling="row"),
    "16-bit wgrad": onepass.FP8Recipe(wgrad=False),
}
_UNSUPPORTED = {module: module.triton_unsupported for module in (fp8_cast, fp8_transpose, fp8_scales)}


@contextmanager
def running(by):
    """Run "formulas" or "kernels" on CPUs: the interpreter would take a minute for all of it. GPUs run kernels."""
    formulas = by == "formulas" and dist.get_backend() == "gloo"
    with ExitStack() as stack:
        stack.enter_context(onepass.use_backend("torch" if formulas else "auto"))
        for module, unsupported in _UNSUPPORTED.items():
            wanted = (lambda x: "the formula is wanted") if formulas else unsupported
            stack.enter_context(patch.object(module, "triton_unsupported", wanted))
        yield


def linear(x, p, function=onepass.linear, **options):
    return function(x, p["weight"], p["bias"], **options)


def norm_linear(x, p, **options):
    return onepass.norm_linear(x, p["norm_weight"], p["weight"], p["bias"], **options)


def after_residual(x, p, **options):
    y, _ = norm_linear(x, p, residual=x * 0.5, norm="layer_norm", **options)
    return y


def after_norm(x, p, **options):
    y, _ = norm_linear(x, p, return_norm_output=True, **options)
    return y


def activation_linear(x, p, **options):
    return onepass.activation_linear(x, p["weight"], p["bias"], "gelu", **options)


# name -> the call, whether it is row-parallel, whether the sequence is divided
CASES = {
    "column": (partial(linear, allreduce_dgrad=True), False, False),
    "column, sequence": (partial(linear, sequence_parallel=True), False, True),
    "row": (partial(linear, reduce_output=True), True, False),
    "row, sequence": (partial(linear, reduce_output=True, sequence_parallel=True), True, True),
    "norm": (norm_linear, False, False),
    "norm, sequence": (partial(norm_linear, sequence_parallel=True), False, True),
    "norm of a sum, sequence": (partial(after_residual, sequence_parallel=True), False, True),
    "norm returned, sequence": (partial(after_norm, sequence_parallel=True), False, True),
    "activation": (activation_linear, True, False),
    "activation, sequence": (partial(activation_linear, sequence_parallel=True), True, True),
}


def whole(sequence=S, step=0):
    """Return the unsharded x, parameters and incoming gradient. Later rows are larger: no rank knows the largest of all."""
    seeds = torch.Generator().manual_seed(3 + step)

    def numbers(*shape):
        return drawn(torch.randn, shape, generator=seeds).bfloat16()

    parameters = {"weight": numbers(N, K) / 8, "bias": numbers(N), "norm_weight": numbers(K)}
    sizes = drawn(lambda device: (torch.arange(sequence, device=device) * 2.0 / max(1, sequence)).exp2().bfloat16())
    sizes = sizes.view(-1, 1, 1)
    return numbers(sequence, B, K) * sizes, parameters, numbers(sequence, B, N) * sizes


def part(t, dim, rank, ranks):
    return t.chunk(ranks, dim)[rank].clone(memory_format=torch.contiguous_format) if t.shape[dim] else t


def shard(name, group, sequence=S, step=0, divide=True):
    """Return this rank's x, parameters and incoming gradient. divide=False: all rows of them, as without sequence parallelism."""
    _, by_row, divided = CASES[name]
    rank, ranks = group.rank(), group.size()
    x, parameters, dy = whole(sequence, step)
    if by_row:
        x, parameters["weight"] = part(x, -1, rank, ranks), part(parameters["weight"], 1, rank, ranks)
        dy = part(dy, 0, rank, ranks) if divided and divide else dy
    else:
        x = part(x, 0, rank, ranks) if divided and divide else x
        parameters |= {key: part(parameters[key], 0, rank, ranks) for key in ("weight", "bias")}
        dy = part(dy, -1, rank, ranks)
    return x.requires_grad_(), {key: torch.nn.Parameter(t) for key, t in parameters.items()}, dy


def used(name, parameters):
    return {key: t for key, t in parameters.items() if key != "norm_weight" or "norm" in name}


def with_main_grad(parameters):
    for parameter in parameters.values():
        parameter.main_grad, parameter.grad_added_to_main_grad = torch.zeros(parameter.shape), False


def flushed(name, kind, group, function=None, deferred=DeferredWgrad, recipe=None):
    """Return the weight's main_grad without and with a deferred product, which is made after the scales have changed."""
    call, found = CASES[name][0], {}
    for later in (None, deferred()):
        more = {} if function is None else {"function": function}
        more |= {"tp_group": group, "precision": recipe or RECIPES[kind]}
        x, parameters, dy = shard(name, group)
        end_step(partial(call, **more), x.detach().requires_grad_(), parameters, dy)
        with_main_grad(parameters)
        for each in (x, x.detach().mul(0.5).requires_grad_()):
            call(each, parameters, deferred=later, **more).backward(dy)
        main_grad = parameters["weight"].main_grad
        if later is not None:
            found |= {"before": main_grad.clone(), "bytes": later.nbytes, "kept": len(later)}
        for _ in range(2):  # the second has other scales
            with torch.no_grad():
                parameters["weight"].mul_(64)
            there = main_grad.clone()
            call(x.detach().mul(64).requires_grad_(), parameters, **more).backward(dy.mul(64))
            main_grad.copy_(there)
        if later is not None:
            later.flush()
        found["at once" if later is None else "later"] = main_grad
        found["x"] = x.grad
    return found


def end_step(call, x, parameters, dy):
    """Let a history set the scales."""
    call(x, parameters).backward(dy)
    with torch.no_grad():
        parameters["weight"].mul_(1)
        call(x, parameters)
    if x.is_cuda:
        torch.cuda.synchronize()  # so that the host knows which scales come from a history


def trained(name, group, function=None, recipe=None, divide=True):
    """Train some steps with delayed scales. Return the outputs, and the state of the scales. divide=False: without the group."""
    _, parameters, _ = shard(name, group)
    options = {"tp_group": group if divide else None, "precision": recipe or RECIPES["delayed"]}
    options |= {} if function is None else {"function": function}
    outputs = []
    for step in range(STEPS):
        x, _, dy = shard(name, group, step=step, divide=divide)
        x.data.mul_((0.25, 1, 30, 2)[step])
        dy.mul_((1, 1000, 1e-3, 5)[step])
        for _ in range(2):
            y = CASES[name][0](x, parameters if divide else parameters | {"bias": None}, **options)
            y.backward(dy)
            outputs.append(y.detach())
        with torch.no_grad():
            parameters["weight"].mul_(-1.5)
    return {"y": outputs, "scales": parameters["weight"].fp8.scales.state_dict()}
