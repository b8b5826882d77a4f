"""Ranks of tests/parallel/test_dtensor.py: every op on DTensors, placed in every way, against the same call on plain tensors."""


import torch
import torch.distributed as dist
from parallel.meeting import join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import onepass
from onepass import nn
from onepass.runtime.samples import weights_of
from onepass.testing.contract import subjects


def run(rank, ranks, folder, backend="gloo"):
    """Run every sample of every op, in the same order on all ranks. The kernels and the compiler have one placement each."""
    join(rank, ranks, folder, backend)
    device = torch.get_default_device()
    torch.set_default_device(None)  # the compiler breaks graphs where there is one
    mesh = init_device_mesh(device.type, (ranks,))
    found = {}
    for name, subject in subjects("torch", device).items():
        found[name, "torch"] = attempts(subject, mesh, ways_of(subject))
        if ":" not in name:
            found[name, "compiled"] = attempts(subject, mesh, divided(subject, 1), compiled=True)
    for name, subject in subjects("triton", device).items():
        if ":" not in name:
            found[name, "triton"] = attempts(subject, mesh, divided(subject, 0))
    torch.set_default_device(device)
    found["dropout"] = dropout(rank, mesh)
    found["plans"] = plans(mesh)
    found["modules"] = modules(mesh)
    found["two dimensions"] = two_dimensions()
    found["said"] = said(mesh)
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def ways_of(subject):
    """All placements of each tensor, beside others that are whole."""
    for argument, t in zip(subject.names(), subject.tensors(), strict=True):
        yield from ((argument, Shard(d)) for d in range(t.dim()))
        if t.is_floating_point():
            yield argument, Partial()


def divided(subject, place):
    """One tensor, or the last before it, divided along its first dimension."""
    yield (subject.names()[: place + 1][-1], Shard(0))


def attempts(subject, mesh, ways, **how):
    return {(argument, str(way)): attempt(subject, mesh, argument, way, **how) for argument, way in ways}


def attempt(subject, mesh, argument, way, compiled=False):
    """Return the errors of results and gradients, where both lie, and where the inputs do; or what was raised."""
    plain = subject.tensors()
    expected = results(subject.run(*plain))
    grads = subject.gradients(plain, expected)
    placements = [way if name == argument else Replicate() for name in subject.names()]
    given = [placed(t, mesh, placement) for t, placement in zip(plain, placements, strict=True)]
    call = torch.compile(subject.run, fullgraph=True, backend="aot_eager") if compiled else subject.run
    try:
        ys = results(call(*given))
    except ValueError as refused:
        return str(refused)
    finally:
        torch._dynamo.reset()
    asked = [(y, e) for y, e in zip(ys, expected, strict=True) if e.requires_grad]
    loss = sum((y.full_tensor().float() * weights_of(e).float()).sum() for y, e in asked)
    leaves = [t for t in given if t.requires_grad]
    mine = torch.autograd.grad(loss, leaves)
    return {
        "results": [error(y.full_tensor(), e) for y, e in zip(ys, expected, strict=True)],
        "gradients": [error(g.full_tensor(), e) for g, e in zip(mine, grads, strict=True)],
        "results lie": [str(y.placements[0]) for y in ys],
        "gradients lie": [str(g.placements[0]) for g in mine],
        "leaves lie": [str(t.placements[0]) for t in leaves],
    }


def dropout(rank, mesh):
    """Return how many elements of dropout_add differ from those of one rank, by the dimension that is divided, and the bias's
    gradient."""
    x, residual = torch.ones(2, 6, 5, 8)
    bias = torch.zeros(8, requires_grad=True)
    found = {}
    for way in (Replicate(), Shard(0), Shard(1)):
        torch.manual_seed(3)
        expected = onepass.dropout_add(x, residual, 0.4, bias=bias)
        grad = torch.autograd.grad(expected.sum(), bias)[0]
        torch.manual_seed(3 + rank)  # the first rank's decides
        placed_bias = placed(bias, mesh, Replicate())
        y = onepass.dropout_add(placed(x, mesh, way), placed(residual, mesh, way), 0.4, bias=placed_bias)
        mine = torch.autograd.grad(y.sum().full_tensor(), placed_bias)[0].full_tensor()
        whole = y.full_tensor()
        alike = torch.equal(whole[:, :2], whole[:, 3:])  # the first rank's rows and the second's, under Shard(1)
        found[str(way)] = int((whole != expected).sum()), error(mine, (whole - 1).sum((0, 1))), error(mine, grad), alike
    return found


def plans(mesh):
    """Train a block under PyTorch's plans: whole weights, then ColwiseParallel and RowwiseParallel."""
    device = mesh.device_type

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = onepass.nn.RMSNorm(8)
            self.up, self.down = onepass.nn.Linear(8, 12), onepass.nn.Linear(12, 8)

        def forward(self, x):
            h = onepass.norm_linear(x, self.norm.weight, self.up.weight, self.up.bias)
            return x + onepass.activation_linear(h, self.down.weight, self.down.bias, "gelu")

    torch.manual_seed(5)
    block, x = Block(), torch.randn(2, 4, 8, device="cpu").to(device)
    block(x).square().sum().backward()
    expected = {name: p.grad.clone() for name, p in block.named_parameters()}
    block.zero_grad()
    plan = {"norm": SequenceParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(block, mesh, plan)
    found = {}
    for way in (Replicate(), Shard(0), Shard(1)):
        block.zero_grad()
        y = block(placed(x, mesh, way))
        y.square().sum().full_tensor().backward()
        found[str(way)] = {
            name: (error(p.grad.full_tensor(), expected[name]), str(p.grad.placements[0]), str(p.placements[0]))
            for name, p in block.named_parameters()
        }
    return found


def modules(mesh):
    """Return the largest error of each module's result and gradients, its parameters whole and its inputs divided."""
    torch.manual_seed(7)
    x, teacher = torch.randn(2, 2, 5, 16)
    ids = torch.randint(30, (2, 5))
    made = {
        nn.BiasActivation(16): [x],
        nn.ColumnParallelLinear(16, 8): [x],
        nn.GatedRMSNorm(16): [x, teacher],
        nn.LayerNorm(16): [x],
        nn.Linear(16, 8): [x],
        nn.LinearCrossEntropy(16, 30): [x, ids],
        nn.LinearDivergence(16, 30): [x, teacher, torch.randn(30, 16)],
        nn.MLP(16, 32, "swiglu"): [x],
        nn.NormLinear(16, 8): [x],
        nn.RMSNorm(16): [x],
        nn.RowParallelLinear(16, 8): [x],
        nn.VocabParallelEmbedding(30, 16): [ids],
    }
    found = {}
    for module, given in made.items():
        expected = first(module(*given))
        grads = torch.autograd.grad(expected.sum(), [*module.parameters()])
        distribute_module(module, mesh)
        rows = [placed(t, mesh, Shard(0) if t.shape[0] == 2 else Replicate()) for t in given]
        y = first(module(*rows)).full_tensor()
        mine = torch.autograd.grad(y.sum(), [*module.parameters()])
        pairs = zip((y, *(g.full_tensor() for g in mine)), (expected, *grads), strict=True)
        found[type(module).__name__] = max(error(a, b) for a, b in pairs)
    return found


def first(found):
    return found[0] if isinstance(found, tuple) else found


def two_dimensions():
    """Divide rows along one dimension of a mesh and the vocabulary along another; then rows along both."""
    mesh = init_device_mesh(torch.get_default_device().type, (dist.get_world_size(), 1))
    torch.manual_seed(5)
    hidden, weight = torch.randn(2, 3, 8, requires_grad=True), torch.randn(11, 8, requires_grad=True)
    labels = torch.tensor([[1, 2, -100], [4, 10, 6]])
    expected = onepass.linear_cross_entropy(hidden, weight, labels)
    grads = torch.autograd.grad(expected, [hidden, weight])
    found = []
    for rows in ([Shard(0), Replicate()], [Shard(0), Shard(1)]):
        h = distribute_tensor(hidden.detach(), mesh, rows).requires_grad_()
        w = distribute_tensor(weight.detach(), mesh, [Replicate(), Shard(0)]).requires_grad_()
        loss = onepass.linear_cross_entropy(h, w, labels)
        mine = torch.autograd.grad(loss.full_tensor(), [h, w])
        found.append([error(a.full_tensor(), e) for a, e in zip((loss, *mine), (expected, *grads), strict=True)])
    return found


def said(mesh):
    """Return the errors of calls that can't be done."""
    x, weight = (placed(torch.ones(4, 8), mesh, Shard(0)) for _ in range(2))
    other = init_device_mesh(mesh.device_type, (1, mesh.size()))
    qkv = placed(torch.ones(1, 2, 3 * 3 * 16), mesh, Shard(2))
    calls = {
        "group": lambda: onepass.linear(x, weight, tp_group=dist.group.WORLD, sequence_parallel=True),
        "mesh": lambda: onepass.linear(x, distribute_tensor(torch.ones(4, 8), other, [Replicate(), Replicate()])),
        "heads": lambda: onepass.attention(qkv, 3),
        "dropout": lambda: onepass.bias_activation(x, None, "gelu", dropout=0.5),
        "shape": lambda: onepass.rms_norm(x, placed(torch.ones(7), mesh, Replicate())),
        "main_grad": lambda: onepass.linear(x, with_main_grad(torch.nn.Parameter(torch.ones(4, 8)))),
    }
    found = {}
    for name, call in calls.items():
        try:
            call()
        except (TypeError, ValueError) as raised:
            found[name] = str(raised)
    return found


def with_main_grad(parameter):
    parameter.main_grad = torch.zeros_like(parameter)
    return parameter


def results(found):
    """The tensors of a result, those of nested records too."""
    if isinstance(found, torch.Tensor):
        return [found]
    return [t for member in found if member is not None for t in results(member)]


def placed(t, mesh, way):
    if way.is_partial():  # terms of a sum, of which the first is all
        term = t.detach() if mesh.get_rank() == 0 else torch.zeros_like(t)
        return DTensor.from_local(term, mesh, [way], run_check=False).requires_grad_(t.requires_grad)
    return distribute_tensor(t.detach(), mesh, [way]).requires_grad_(t.requires_grad)


def error(found, expected):
    """The largest error, as a part of the largest number."""
    assert found.shape == expected.shape and found.dtype == expected.dtype, (found.shape, expected.shape)
    if not found.numel():
        return 0.0
    return float((found.double() - expected.double()).abs().max() / expected.double().abs().max().clamp(min=1e-30))
