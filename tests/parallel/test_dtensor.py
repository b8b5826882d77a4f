"""Every op on DTensors, placed in every way: results and gradients of the same call on plain tensors."""

import ast
import inspect
from functools import cache

import pytest
import torch
import torch.distributed as dist
from ops.calls import DELEGATED
from parallel.meeting import error_of, gather
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import onepass
from onepass import nn
from onepass.runtime.dispatch import TORCH
from onepass.runtime.op import OPS
from onepass.runtime.samples import weights_of
from onepass.testing.contract import subjects

SUM = "P(sum)" if TORCH >= (2, 10) else "P"  # the name of a placement
CLOSE = 2e-5  # of the largest number: sums are made in another order
LESS_CLOSE = {
    ("attention", "triton"): 2e-2,  # the sample is in 16 bits
    ("latent_attention", "triton"): 2e-2,
    ("softmax", "torch"): 2e-3,
    ("softmax", "compiled"): 2e-3,  # gradients are differences of numbers a thousand times as large
}
REFUSED = {  # op, tensor and placement -> what to do
    ("activation_linear", "weight", "S(1)"): "to Shard(0) or Replicate, as a gated activation needs whole rows",
    ("norm_linear", "weight", "S(1)"): "to Shard(0) or Replicate, as a norm needs whole rows",
    ("gated_norm_linear: rows", "weight", "S(1)"): "as each rank needs whole groups of x",
    ("gated_norm_linear: the gate first", "weight", "S(1)"): "as each rank needs whole groups of x",
    ("linear_cross_entropy", "weight", "S(1)"): "redistribute weight",
    ("linear_divergence", "student_weight", "S(1)"): "redistribute student_weight",
    ("linear_divergence", "teacher_weight", "S(1)"): "redistribute teacher_weight",
    ("embedding: a shard", "weight", "S(0)"): "vocab_size must be None",
}


@cache
def mesh():
    """Return all ranks. `attempts` has no default device, so the group's backend says where they are."""
    return init_device_mesh("cuda" if dist.get_backend() == "nccl" else "cpu", (dist.get_world_size(),))


def results(found):
    """Return the tensors of a result, those of nested records too."""
    if isinstance(found, torch.Tensor):
        return [found]
    return [t for member in found if member is not None for t in results(member)]


def placed(t, way):
    if way.is_partial():  # terms of a sum, of which the first is all
        term = t.detach() if dist.get_rank() == 0 else torch.zeros_like(t)
        return DTensor.from_local(term, mesh(), [way], run_check=False).requires_grad_(t.requires_grad)
    return distribute_tensor(t.detach(), mesh(), [way]).requires_grad_(t.requires_grad)


def error(found, expected):
    """Return the largest error, as a part of the largest number."""
    assert found.shape == expected.shape and found.dtype == expected.dtype, (found.shape, expected.shape)
    if not found.numel():
        return 0.0
    return float((found.double() - expected.double()).abs().max() / expected.double().abs().max().clamp(min=1e-30))


# ---- every op ----


def ways_of(subject):
    """Yield all placements of each tensor, beside others that are whole."""
    for argument, t in zip(subject.names(), subject.tensors(), strict=True):
        yield from ((argument, Shard(d)) for d in range(t.dim()))
        if t.is_floating_point():
            yield argument, Partial()


@cache
def attempts(name, by):
    """Return, by argument and placement, what a call gives. Kernels and the compiler have one placement each."""
    device = torch.get_default_device()
    torch.set_default_device(None)  # the compiler breaks graphs where there is one
    try:
        by_kernels = by == "triton" and not name.startswith(DELEGATED)
        subject = subjects("triton" if by_kernels else "torch", device)[name]
        one = subject.names()[: 1 + (by == "compiled")][-1], Shard(0)
        ways = ways_of(subject) if by == "torch" else [one]
        plain = subject.tensors()
        expected = results(subject.run(*plain))
        usual = plain, expected, subject.gradients(plain, expected)
        return {(argument, str(way)): attempt(subject, usual, argument, way, by == "compiled") for argument, way in ways}
    finally:
        torch.set_default_device(device)


def attempt(subject, usual, argument, way, compiled):
    """Return the errors of results and gradients, where both lie, and where the inputs do; or what was raised.

    `usual`: plain tensors, what the call makes of them, and its gradients.
    """
    plain, expected, grads = usual
    placements = [way if name == argument else Replicate() for name in subject.names()]
    given = [placed(t, placement) for t, placement in zip(plain, placements, strict=True)]
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


@pytest.mark.parametrize("by", ("torch", "triton", "compiled"))
@pytest.mark.parametrize("op", sorted(OPS))
def test_results_and_gradients_are_those_of_plain_tensors(group, op, by):
    names = [name for name in subjects("torch", torch.get_default_device()) if name.partition(":")[0] == op]
    cases = {(name, *way): case for name in (names if by == "torch" else [op]) for way, case in attempts(name, by).items()}
    assert cases
    for (name, argument, way), case in cases.items():
        expected = REFUSED.get((name, argument, way)) or REFUSED.get((op, argument, way))
        if name in ("activation_linear: lora", "experts: lora", "norm_linear: lora"):
            expected = "lora must be left out where tensors are DTensors"
        if name == "lora_linear: documents":
            expected = "ends must be left out where tensors are DTensors"
        if expected:
            assert isinstance(case, str) and expected in case, (name, argument, way, case)
            continue
        assert not isinstance(case, str), (name, argument, way, case)
        limit = LESS_CLOSE.get((op, by), CLOSE)
        assert max(case["results"] + case["gradients"]) <= limit, (name, argument, way, case)
        for grad, leaf in zip(case["gradients lie"], case["leaves lie"], strict=True):
            assert grad == leaf or ("P" in leaf and grad == "R"), (name, argument, way, case)


@pytest.mark.parametrize(
    ("name", "argument", "way", "lie"),
    [
        ("rms_norm", "x", "S(0)", ["S(0)"]),
        ("rms_norm", "x", "S(1)", ["R"]),
        ("rms_norm", "x", SUM, ["R"]),
        ("rms_norm: residual", "residual", "S(0)", ["S(0)", "S(0)"]),
        ("rms_norm: post_residual", "post_residual", "S(0)", ["S(0)"]),
        ("gated_rms_norm", "z", "S(1)", ["S(1)"]),
        ("gated_rms_norm: the gate first", "x", "S(1)", ["R"]),
        ("gated_norm_linear", "weight", "S(0)", ["S(2)"]),
        ("gated_norm_linear", "weight", "S(1)", [SUM]),
        ("gated_norm_linear", "z", "S(0)", ["S(0)"]),
        ("softmax", "x", "S(0)", ["S(0)"]),
        ("causal_conv1d", "x", "S(0)", ["S(0)"]),
        ("causal_conv1d", "x", "S(1)", ["R"]),
        ("causal_conv1d: pieces", "x", "S(0)", ["S(0)", "S(0)", "S(0)"]),
        ("delta_gates", "a", "S(1)", ["S(1)", "S(1)"]),
        ("delta_gates", "b", "S(2)", ["S(2)", "S(2)"]),
        ("delta_gates: groups", "a", "S(2)", ["S(2)", "S(2)"]),
        ("gated_delta_rule", "v", "S(0)", ["S(0)"]),
        ("gated_delta_rule", "q", "S(1)", ["R"]),
        ("gated_delta_rule", "g", "S(2)", ["S(2)"]),
        ("gated_delta_rule: documents", "g", "S(2)", ["R", "R"]),
        ("mamba_chunk_scan", "x", "S(0)", ["S(0)"]),
        ("mamba_chunk_scan", "dt", "S(1)", ["R"]),
        ("mamba_chunk_scan", "B", "S(2)", ["S(2)"]),
        ("mamba_chunk_scan", "A", "S(0)", ["S(2)"]),
        ("mamba_chunk_scan: documents", "D", "S(0)", ["R", "R"]),
        ("linear", "weight", "S(0)", ["S(2)"]),
        ("linear", "weight", "S(1)", [SUM]),
        ("linear", "x", "S(0)", ["S(0)"]),
        ("norm_linear: all outputs", "weight", "S(0)", ["S(2)", "R", "R"]),
        ("norm_linear: all outputs", "x", "S(0)", ["S(0)", "S(0)", "S(0)"]),
        ("activation_linear", "weight", "S(0)", ["S(2)"]),
        ("bias_activation", "x", "S(1)", ["R"]),
        ("bias_activation: linear", "x", "S(0)", ["S(0)"]),
        ("bias_activation: linear", "x", "S(1)", ["S(1)"]),
        ("bias_activation: linear", "linear", "S(0)", ["S(0)"]),
        ("bias_activation: linear", "linear", "S(1)", ["S(1)"]),
        ("embedding", "weight", "S(0)", [SUM]),
        ("embedding", "weight", "S(1)", ["S(2)"]),
        ("attention", "qkv", "S(0)", ["S(0)"]),
        ("attention", "qkv", "S(1)", ["R"]),
        ("attention", "qkv", "S(2)", ["S(2)"]),
        ("attention: gated", "qkv", "S(2)", ["S(2)"]),
        ("latent_attention", "q", "S(0)", ["S(0)"]),
        ("latent_attention", "kv", "S(1)", ["R"]),
        ("latent_attention", "q", "S(2)", ["R"]),
        ("rope", "q", "S(0)", ["S(0)", "S(0)"]),
        ("rope", "q", "S(1)", ["S(1)", "S(1)"]),
        ("rope", "q", "S(2)", ["S(2)", "R"]),
        ("linear_cross_entropy", "weight", "S(0)", ["R"]),
        ("cross_entropy", "logits", "S(1)", ["R"]),
    ],
)
def test_results_are_divided_by_the_rule(group, name, argument, way, lie):
    assert attempts(name, "torch")[argument, way]["results lie"] == lie


def _named_in(record, names):
    """Return the arguments that a dictionary's display has, or a call of a NamedTuple, in whose order they must come."""
    if isinstance(record, ast.Dict):
        assert all(key.value == value.id for key, value in zip(record.keys, record.values, strict=True))
        return {key.value for key in record.keys}
    given = [arg.id for arg in record.args]
    assert given == list(names[record.func.id]._fields[: len(given)])
    return {*given} | {keyword.arg for keyword in record.keywords}


def test_calls_give_all_arguments():
    """What a public function forgot to hand to `run_on_shards` would silently be its default."""
    for name, op in OPS.items():
        function = ast.parse(inspect.getsource(op.function)).body[0]
        call = next(c for c in ast.walk(function) if isinstance(c, ast.Call) and getattr(c.func, "id", "") == "run_on_shards")
        given = {k.arg for k in call.keywords if k.arg}
        if any(k.arg is None for k in call.keywords):  # and those of the call's record
            record = next(n.value for n in function.body if isinstance(n, (ast.Assign, ast.AnnAssign)))
            given |= _named_in(record, op.function.__globals__)
        assert given == {*inspect.signature(op.function).parameters}, name


# ---- dropout, modules, meshes ----


def test_dropout_draws_by_the_first_rank_for_all(group):
    x, residual = torch.ones(2, 6, 5, 8)
    bias = torch.zeros(8, requires_grad=True)
    found = {}
    for way in (Replicate(), Shard(0), Shard(1)):
        torch.manual_seed(3)
        expected = onepass.dropout_add(x, residual, 0.4, bias=bias)
        grad = torch.autograd.grad(expected.sum(), bias)[0]
        torch.manual_seed(3 + group.rank())  # the first rank's decides
        placed_bias = placed(bias, Replicate())
        y = onepass.dropout_add(placed(x, way), placed(residual, way), 0.4, bias=placed_bias)
        mine = torch.autograd.grad(y.sum().full_tensor(), placed_bias)[0].full_tensor()
        whole = found[str(way)] = y.full_tensor()
        assert error(mine, (whole - 1).sum((0, 1))) < CLOSE
        if way == Shard(1):  # others than one rank's, and no two ranks drop the same
            assert not torch.equal(whole, expected) and not torch.equal(whole[:, :2], whole[:, 3:])
        else:  # the elements that one rank would drop
            assert torch.equal(whole, expected) and error(mine, grad) < CLOSE, way
    first, second = gather(group, found)
    assert all(torch.equal(whole, second[way]) for way, whole in first.items())


def test_column_and_row_parallel_plans(group):
    """A block under PyTorch's plans: whole weights, then ColwiseParallel and RowwiseParallel."""

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = onepass.nn.RMSNorm(8)
            self.up, self.down = onepass.nn.Linear(8, 12), onepass.nn.Linear(12, 8)

        def forward(self, x):
            h = onepass.norm_linear(x, self.norm.weight, self.up.weight, self.up.bias)
            return x + onepass.activation_linear(h, self.down.weight, self.down.bias, "gelu")

    torch.manual_seed(5)
    block, x = Block(), torch.randn(2, 4, 8)
    block(x).square().sum().backward()
    expected = {name: p.grad.clone() for name, p in block.named_parameters()}
    block.zero_grad()
    plan = {"norm": SequenceParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(block, mesh(), plan)
    for way in (Replicate(), Shard(0), Shard(1)):
        block.zero_grad()
        y = block(placed(x, way))
        y.square().sum().full_tensor().backward()
        for name, p in block.named_parameters():
            assert error(p.grad.full_tensor(), expected[name]) < CLOSE, (way, name)
            assert p.grad.placements[0] == p.placements[0], (way, name)


def by_rows(t):
    return placed(t, Shard(0) if t.shape[0] == 2 else Replicate())


def test_modules(group):
    """With whole parameters, and inputs that are divided."""
    torch.manual_seed(7)
    x, teacher = torch.randn(2, 2, 5, 16)
    ids = torch.randint(30, (2, 5))
    made = {
        nn.BiasActivation(16): [x],
        nn.CausalConv1d(16): [x],
        nn.ColumnParallelLinear(16, 8): [x],
        nn.Experts(16, 8, 4): [x, (torch.rand(2, 5, 2), torch.randint(4, (2, 5, 2)))],
        nn.GatedRMSNorm(16): [x, teacher],
        nn.LayerNorm(16): [x],
        nn.Linear(16, 8): [x],
        nn.LinearCrossEntropy(16, 30): [x, ids],
        nn.LinearDivergence(16, 30): [x, teacher, torch.randn(30, 16)],
        nn.MLP(16, 32, "swiglu"): [x],
        nn.NormLinear(16, 8): [x],
        nn.RMSNorm(16): [x],
        nn.Router(16, 8, 2): [x],
        nn.RowParallelLinear(16, 8): [x],
        nn.VocabParallelEmbedding(30, 16): [ids],
    }
    assert {type(module).__name__ for module in made} == {name for name in nn.__all__ if name[0].isupper()}
    for module, inputs in made.items():
        expected, *_ = results(module(*inputs))
        grads = torch.autograd.grad(expected.sum(), [*module.parameters()])
        distribute_module(module, mesh())
        rows = [tuple(map(by_rows, t)) if isinstance(t, tuple) else by_rows(t) for t in inputs]
        y = results(module(*rows))[0].full_tensor()
        mine = torch.autograd.grad(y.sum(), [*module.parameters()])
        for a, b in zip((y, *(g.full_tensor() for g in mine)), (expected, *grads), strict=True):
            assert error(a, b) < CLOSE, module


@pytest.mark.parametrize("rows", ([Shard(0), Replicate()], [Shard(0), Shard(1)]), ids=str)
def test_a_mesh_of_two_dimensions(group, rows):
    """Rows along one dimension and the vocabulary along another; then rows along both."""
    mesh = init_device_mesh(torch.get_default_device().type, (group.size(), 1))
    torch.manual_seed(5)
    hidden, weight = torch.randn(2, 3, 8, requires_grad=True), torch.randn(11, 8, requires_grad=True)
    labels = torch.tensor([[1, 2, -100], [4, 10, 6]])
    expected = onepass.linear_cross_entropy(hidden, weight, labels)
    grads = torch.autograd.grad(expected, [hidden, weight])
    h = distribute_tensor(hidden.detach(), mesh, rows).requires_grad_()
    w = distribute_tensor(weight.detach(), mesh, [Replicate(), Shard(0)]).requires_grad_()
    loss = onepass.linear_cross_entropy(h, w, labels)
    mine = torch.autograd.grad(loss.full_tensor(), [h, w])
    for a, b in zip((loss, *mine), (expected, *grads), strict=True):
        assert error(a.full_tensor(), b) < CLOSE


def test_what_cannot_be_done_says_why(group):
    x, weight = (placed(torch.ones(4, 8), Shard(0)) for _ in range(2))
    said = error_of(onepass.linear, x, weight, tp_group=group, sequence_parallel=True)
    assert "tp_group must be left out where tensors are DTensors" in said
    other = init_device_mesh(mesh().device_type, (1, group.size()))
    said = error_of(onepass.linear, x, distribute_tensor(torch.ones(4, 8), other, [Replicate(), Replicate()]))
    assert "weight must be on x's mesh" in said
    said = error_of(onepass.attention, placed(torch.ones(1, 2, 3 * 3 * 16), Shard(2)), 3)
    assert "redistribute qkv" in said and "2 ranks can't share 3 groups" in said
    said = error_of(onepass.bias_activation, x, None, "gelu", dropout=0.5)
    assert "dropout must be 0 where tensors are DTensors" in said and "dropout_add" in said
    assert "weight must have shape (8,)" in error_of(onepass.rms_norm, x, placed(torch.ones(7), Replicate()))
    weight = torch.nn.Parameter(torch.ones(4, 8))
    weight.main_grad = torch.zeros_like(weight)
    said = error_of(onepass.linear, x, weight)
    assert "main_grad" in said and "weight is beside DTensors" in said
