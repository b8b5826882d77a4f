"""onepass.fuse on a GPU: the kernels that run, the values, CUDA graphs, parameters side by side."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import onepass

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning"),  # PyTorch's own, which holds its pool with one
]
BF16 = torch.bfloat16
WIDTHS = [32, 40, 64, 96, 128, 200, 256, 512]


@pytest.fixture(autouse=True)
def anew():
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def kernels(call):
    """The names of the kernels of a call, which has run before."""
    torch.cuda.synchronize()
    profile = onepass.profile(call, warmup=1, steps=1)
    return round(profile.kernels), profile


def random(*shape, dtype=BF16, grad=True):
    return torch.randn(shape, device="cuda", dtype=dtype, requires_grad=grad)


def split_stack(x, weight):
    parts = torch.split(x, 128, dim=1)
    return F.relu(F.linear(torch.cat([torch.tanh(F.layer_norm(part, (128,))) for part in parts], 1), weight))


class Norms(nn.Module):
    def __init__(self, norm=nn.LayerNorm, together=True, widths=WIDTHS):
        super().__init__()
        self.norms = nn.ModuleList(norm(width, device="cuda", dtype=BF16) for width in widths)
        for parameter in self.parameters():
            nn.init.normal_(parameter)
        self.widths, self.together = widths, together

    def forward(self, *xs):
        parts = xs[0].split(self.widths, -1) if len(xs) == 1 else xs
        ys = [norm(part) for norm, part in zip(self.norms, parts, strict=True)]
        return [torch.cat(ys, -1)] if self.together else ys


def both(module, inputs, seed=0):
    """Outputs and all gradients."""
    wanted = [t for t in (*inputs, *(module.parameters() if isinstance(module, nn.Module) else ())) if t.requires_grad]
    outputs = module(*inputs)
    outputs = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
    torch.manual_seed(seed)
    gradients = torch.autograd.grad(outputs, wanted, [torch.randn_like(y) for y in outputs])
    return [t.detach().clone() for t in (*outputs, *gradients)]


def close(found, wanted, far=3e-2):
    for a, b in zip(found, wanted, strict=True):
        assert (a.float() - b.float()).abs().max() <= far * b.float().abs().max().clamp_min(1e-6)


def test_split_stack_is_three_kernels():
    x, weight = (random(512, 512, dtype=torch.float32) for _ in range(2))
    fused = onepass.fuse(split_stack)
    close(both(fused, (x, weight)), both(split_stack, (x, weight)), 1e-4)
    with torch.no_grad():
        fused(x, weight)
        count, _ = kernels(lambda: fused(x, weight))
    assert count <= 4


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
@pytest.mark.parametrize("sliced", [True, False])
def test_norms_of_different_widths_are_three_launches(norm, sliced):
    module = Norms(norm, together=sliced)
    inputs = [random(256, sum(WIDTHS))] if sliced else [random(256, width) for width in WIDTHS]
    fused = onepass.fuse(module)
    close(both(fused, inputs), both(module, inputs))
    outputs = module(*inputs)
    gradients = [torch.randn_like(y) for y in outputs]
    wanted = [*inputs, *module.parameters()]
    count, _ = kernels(lambda: torch.autograd.grad(fused(*inputs), wanted, gradients))
    assert count <= 3


@pytest.mark.parametrize("widths", [WIDTHS, [32 + 8 * i for i in range(24)]], ids=["8", "24"])
def test_gates_of_tensors_of_their_own_are_few_launches(widths):
    def gates(*xs):
        return [F.silu(a) * b for a, b in (x.chunk(2, -1) for x in xs)]

    inputs = [random(256, 2 * width) for width in widths]
    fused = onepass.fuse(gates)
    close(both(fused, inputs), both(gates, inputs))
    gradients = [torch.randn_like(y) for y in gates(*inputs)]
    count, profile = kernels(lambda: torch.autograd.grad(fused(*inputs), inputs, gradients))
    assert count <= 4, profile.rows  # one forward; in backward what it makes again, and the gradients: many arguments are two


@pytest.mark.parametrize("graph", [False, True])
def test_linears_of_one_input(graph):
    class Layers(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(256, n, bias=False, device="cuda", dtype=BF16) for n in (256, 64, 64))

        def forward(self, x):
            return [layer(x) for layer in (self.q, self.k, self.v)]

    module, x = Layers(), random(64, 256)
    fused = onepass.fuse(module, cuda_graph=graph)
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        close(both(fused, [x]), both(module, [x]))
    assert fused.q.weight is module.q.weight
    start = module.q.weight.data_ptr()
    assert module.k.weight.data_ptr() == start + 256 * 256 * 2
    with torch.no_grad():
        module.k.weight.mul_(2)
    torch.compiler.cudagraph_mark_step_begin()
    close(both(fused, [x]), both(module, [x]))
    module.k.weight.data = module.k.weight.data.clone() * 3  # other memory
    torch.compiler.cudagraph_mark_step_begin()
    close(both(fused, [x]), both(module, [x]))


def test_a_graph_reads_inputs_from_anywhere():
    fused = onepass.fuse(split_stack, cuda_graph=True)
    weight = random(512, 512, dtype=torch.float32, grad=False)
    inputs = [random(64, 512, dtype=torch.float32, grad=False) for _ in range(12)]  # more than are recorded
    for _ in range(3):
        for x in inputs:
            torch.compiler.cudagraph_mark_step_begin()
            close([fused(x, weight)], [split_stack(x, weight)], 1e-4)


@pytest.mark.parametrize("sliced", [True, False])
def test_ragged_norms_in_a_graph_train(sliced):
    module = Norms(together=sliced)
    fused = onepass.fuse(module, cuda_graph=True)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    for step in range(6):
        torch.compiler.cudagraph_mark_step_begin()
        inputs = [random(128, sum(WIDTHS))] if sliced else [random(128, width) for width in WIDTHS]
        found, wanted = both(fused, inputs, step), both(module, inputs, step)
        close(found, wanted)
        optimizer.zero_grad()
        for parameter, gradient in zip(module.parameters(), wanted[-2 * len(WIDTHS) :], strict=True):
            parameter.grad = gradient
        optimizer.step()


@pytest.mark.parametrize("op", ["layer_norm", "bias_activation"])
def test_kept_scratch_is_of_no_graph(op):
    """What ops keep between calls is first made while PyTorch warms up a graph."""
    weight, bias = random(4096), random(4096)

    def program(x):
        if op == "layer_norm":
            return onepass.layer_norm(x, weight, bias)
        return onepass.bias_activation(x, bias, "gelu")

    compiled = torch.compile(program, mode="reduce-overhead")
    stream = torch.cuda.Stream()  # one that has no scratch yet
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            x = random(64, 4096)
            close(both(compiled, [x]), both(program, [x]))


class Tables(nn.Module):
    def __init__(self, rows, width=64):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(count, width, padding_idx=0, device="cuda") for count in rows)

    def forward(self, ids):
        return [torch.cat([table(column) for table, column in zip(self.tables, ids.unbind(1), strict=True)], 1)]


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("rows", [[500] * 24, [10 + 97 * i for i in range(24)]], ids=["equal", "ragged"])
def test_24_tables_are_one_look_up(rows, graph):
    """Forward one kernel. Backward at most three: zeros, the sums of rows, and what a compiler splits off."""
    module = Tables(rows)
    ids = torch.stack([torch.randint(count, (2048,), device="cuda") for count in rows], 1)
    fused = onepass.fuse(module, cuda_graph=graph)
    for _ in range(3):
        torch.compiler.cudagraph_mark_step_begin()
        found = [tensor.clone() for tensor in both_of_tables(fused, ids)]
        close(found, both_of_tables(module, ids), 1e-5)
    if not graph:
        count, profile = kernels(lambda: both_of_tables(fused, ids))
        assert count <= 8, profile  # with randn, and what the test adds
        written, _ = kernels(lambda: both_of_tables(module, ids))
        assert count < written / 4


def both_of_tables(module, ids):
    (y,) = module(ids)
    torch.manual_seed(0)
    return [y, *torch.autograd.grad(y, list(module.parameters()), torch.randn_like(y))]
