"""What only a GPU shows of CUDA graphs over main_grad: whole backwards, make_graphed_callables, flags, `MainGrads`, ties."""

from unittest import mock

import pytest
import torch
from gpu.calls import warmed
from torch import nn
from torch.nn import functional as F

import onepass
from onepass.gradients import main_grad as convention
from onepass.gradients.graphs import graphed
from onepass.gradients.main_grads import MainGrads

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    # PyTorch 2.11's own, where make_graphed_callables captures what was warmed up on another stream
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match"),
]
FP32, BF16 = torch.float32, torch.bfloat16
ROWS, SIZE, REPLAYS = 256, 512, 3


class Block(nn.Module):
    """Every op that adds to main_grad, and a layer of PyTorch's that does not."""

    def __init__(self):
        super().__init__()
        self.first = onepass.nn.NormLinear(SIZE, 2 * SIZE, norm="layer_norm")
        self.activation = onepass.nn.BiasActivation(2 * SIZE, "geglu")
        self.plain = nn.Linear(SIZE, SIZE, bias=False)
        self.norm = onepass.nn.RMSNorm(SIZE)
        self.second = onepass.nn.Linear(SIZE, 2 * SIZE)
        self.last = nn.Parameter(torch.empty(SIZE, SIZE))
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=SIZE**-0.5, generator=generator)

    def forward(self, x):
        h = x + self.plain(self.activation(self.first(x)))
        return h + onepass.activation_linear(self.second(self.norm(h)), self.last, activation="swiglu")

    def ours(self):
        return [parameter for name, parameter in self.named_parameters() if not name.startswith("plain")]


class Tied(nn.Module):
    """A weight that is PyTorch's first, and ours twice."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(1)) * SIZE**-0.5)

    def forward(self, x):
        return onepass.linear(onepass.linear(F.linear(x, self.weight).tanh(), self.weight).tanh(), self.weight)


def made(kind=Block):
    return kind().to("cuda", BF16)


def marked(parameters):
    for parameter in parameters:
        parameter.main_grad, parameter.grad_added_to_main_grad = torch.zeros_like(parameter, dtype=FP32), False


def batches(count=REPLAYS, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    return [torch.randn(ROWS, SIZE, device="cuda", dtype=BF16, generator=generator) for _ in range(count)]


def backward(model, x):
    """Of the parameters and of x, whose gradient comes back."""
    x = x.detach().requires_grad_()
    model(x).float().square().mean().backward()
    return x.grad


def snapshot(model):
    """main_grad, or .grad, of each parameter."""
    torch.cuda.synchronize()
    found = {}
    for name, parameter in model.named_parameters():
        main_grad = getattr(parameter, "main_grad", None)
        grad = parameter.grad if main_grad is None else main_grad
        found[name] = None if grad is None else grad.clone()
    return found


def same(found, expected):
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        assert grad is not None and grad.any(), name
        assert torch.equal(found[name], grad), name


def flags(parameters):
    return [parameter.grad_added_to_main_grad for parameter in parameters]


def eager(kind, xs):
    """main_grad of ours and .grad of the others after the microbatches."""
    model = made(kind)
    marked(model.ours() if kind is Block else model.parameters())
    for x in xs:
        backward(model, x)
    return snapshot(model)


def whole(model, x, capture):
    """A graph of forward and backward over x, a static input."""
    warmed(lambda: backward(model, x))
    for parameter in model.parameters():
        parameter.grad = None
        if hasattr(parameter, "grad_added_to_main_grad"):
            parameter.grad_added_to_main_grad = False
    graph = torch.cuda.CUDAGraph()
    with capture, torch.cuda.graph(graph):
        backward(model, x)
    return graph


# ---- a whole backward ----


def test_a_whole_backward_adds_at_each_replay_bit_for_bit():
    xs = batches()
    expected = [eager(Block, xs[: count + 1]) for count in range(REPLAYS)]
    model, static = made(), torch.zeros_like(xs[0])
    ours = model.ours()
    marked(ours)
    block = graphed(model)
    graph = whole(model, static, block)
    assert flags(ours) == [False] * len(ours)
    for parameter in ours:
        parameter.main_grad.zero_()
    total = torch.zeros_like(model.plain.weight)
    for x, summed in zip(xs, expected, strict=True):
        static.copy_(x)
        graph.replay()
        total += model.plain.weight.grad  # made by the graph anew each time
        same({**snapshot(model), "plain.weight": total.clone()}, summed)
        assert not any(parameter.grad.any() for parameter in ours)  # placeholders, of the graph's own
    assert flags(ours) == [False] * len(ours)


@pytest.mark.parametrize("before", (False, True))
def test_flags_are_as_before_and_as_captured_after_a_replay(before):
    model, static = made(), batches(1)[0]
    ours = model.ours()
    marked(ours)
    unused = nn.Parameter(torch.ones(3, device="cuda"))
    marked([unused])
    warmed(lambda: backward(model, static))
    for parameter in ours:
        parameter.grad_added_to_main_grad = before
    graph = torch.cuda.CUDAGraph()
    with graphed([*model.parameters(), unused]) as captured, torch.cuda.graph(graph):
        backward(model, static)
    assert flags(ours) == [before] * len(ours)
    graph.replay()
    assert flags(ours) == [before] * len(ours)
    captured.replayed()
    assert flags(ours) == [True] * len(ours) and unused.grad_added_to_main_grad is False


def test_capturing_changes_no_main_grad():
    model, static = made(), batches(1)[0]
    marked(model.ours())
    warmed(lambda: backward(model, static))
    before = snapshot(model)
    graph = torch.cuda.CUDAGraph()
    with graphed(model), torch.cuda.graph(graph):
        backward(model, static)
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "main_grad"):
            assert torch.equal(parameter.main_grad, before[name]), name


def test_a_tied_weight():
    """PyTorch's part comes as .grad, which the graph makes anew, ours are in main_grad."""
    xs = batches()
    expected = [eager(Tied, xs[: count + 1]) for count in range(REPLAYS)]
    plain = [eager_grad(xs[count]) for count in range(REPLAYS)]
    model, static = made(Tied), torch.zeros_like(xs[0])
    marked(model.parameters())
    graph = whole(model, static, graphed(model))
    model.weight.main_grad.zero_()
    for x, summed, grad in zip(xs, expected, plain, strict=True):
        static.copy_(x)
        graph.replay()
        same(snapshot(model), summed)
        assert grad.any() and torch.equal(model.weight.grad, grad)


def eager_grad(x):
    model = made(Tied)
    marked(model.parameters())
    backward(model, x)
    return model.weight.grad.clone()


# ---- MainGrads ----


def eager_main_grads(kind, xs):
    model = made(kind)
    main_grads = MainGrads(model)
    for x in xs:
        with main_grads.accumulate():
            backward(model, x)
    main_grads.finish()
    return snapshot(model)


@pytest.mark.parametrize("kind", (Block, Tied))
def test_replays_are_microbatches_of_main_grads(kind):
    xs = batches()
    expected = eager_main_grads(kind, xs)
    model, static = made(kind), torch.zeros_like(xs[0])
    main_grads = MainGrads(model)
    with main_grads.accumulate():
        graph = whole(model, static, graphed(model))
    for _ in range(2):  # steps
        main_grads.zero_()
        for x in xs:
            static.copy_(x)
            graph.replay()
        main_grads.finish()
        same(snapshot(model), expected)
    main_grads.zero_()
    for x in xs[:-1]:
        static.copy_(x)
        graph.replay()
    backward(model, xs[-1])  # the last as it always is, with its hooks
    main_grads.finish()
    same(snapshot(model), expected)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(flags(model.parameters()))


def test_a_capture_outside_of_accumulate_raises():
    model, static = made(Tied), batches(1)[0]
    main_grads = MainGrads(model)
    with main_grads.accumulate():
        warmed(lambda: backward(model, static))
    with pytest.raises(RuntimeError, match=r"weight's gradient must be captured in .*accumulate\(\)"):
        whole_outside(model, static)
    torch.cuda.synchronize()
    main_grads.zero_()
    backward(model, static)  # nothing is left of it
    main_grads.finish()
    assert model.weight.main_grad.any()


def whole_outside(model, static):
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        backward(model, static)


def test_under_main_grads_a_graph_neither_makes_nor_adds_placeholders():
    model = layers()
    main_grads = MainGrads(model)
    x = batches(1)[0]
    with main_grads.accumulate():
        warmed(lambda: backward(model, x))
        written = main_grads.buffers[0]._version
        with torch.cuda.graph(torch.cuda.CUDAGraph()), mock.patch.object(torch, "zeros_like") as made_zeros:
            backward(model, x)
    assert not made_zeros.called
    assert main_grads.buffers[0]._version - written == len(model)  # the products
    assert not any(kept.any() for kept in convention._zeros.values())


def layers():
    return nn.Sequential(*(onepass.nn.Linear(SIZE, SIZE, bias=False) for _ in range(3))).to("cuda", BF16)


# ---- make_graphed_callables ----


def graphed_callable(model, x):
    return torch.cuda.make_graphed_callables(model, (x.clone().requires_grad_(),))


@pytest.mark.parametrize("fused", (True, False), ids=("graphed", "without"))
def test_make_graphed_callables_under_main_grads(fused):
    xs = batches()
    expected = eager_main_grads(Block, xs)
    model = made()
    main_grads = MainGrads(model)
    if fused:
        with graphed(model):
            model = graphed_callable(model, xs[0])
    else:
        model = graphed_callable(model, xs[0])
    assert not any(buffer.any() for buffer in main_grads.buffers)  # also after its warm-up
    assert not any(flags(model.parameters()))
    for _ in range(2):  # steps
        main_grads.zero_()
        with main_grads.accumulate():
            for x in xs[:-1]:
                assert backward(model, x).any()
        backward(model, xs[-1])
        main_grads.finish()
        found = snapshot(model)
        if fused:
            same(found, expected)
        else:  # each microbatch's is rounded to bf16
            for name, grad in expected.items():
                torch.testing.assert_close(found[name], grad, rtol=0, atol=2e-2 * grad.abs().max().item())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_make_graphed_callables_in_the_block_adds_nothing_after_the_replay():
    model = layers()
    main_grads = MainGrads(model)
    x = batches(1)[0]
    with graphed(model):
        model = graphed_callable(model, x)
    for _ in range(2):
        main_grads.zero_()
        written = main_grads.buffers[0]._version
        backward(model, x)
        assert main_grads.buffers[0]._version == written  # the graph has
        main_grads.finish()
        assert all(parameter.main_grad.any() for parameter in model.parameters())


@pytest.mark.parametrize("flag", (True, False), ids=("flag", ""))
def test_make_graphed_callables_by_flags(flag):
    """Without MainGrads: main_grad gets it all, .grad zeros that are let go of between replays."""
    xs = batches()
    expected = eager(Block, xs)
    model = made()
    ours = model.ours()
    marked(ours)
    if not flag:
        for parameter in ours:
            del parameter.grad_added_to_main_grad
    with graphed(model) as captured:
        model = graphed_callable(model, xs[0])
    assert not any(parameter.main_grad.any() for parameter in ours)
    total = torch.zeros_like(model.plain.weight)
    for x in xs:
        backward(model, x)
        assert not flag or not any(flags(ours))
        captured.replayed()
        assert all(flags(ours)) if flag else not any(hasattr(p, "grad_added_to_main_grad") for p in ours)
        assert not any(parameter.grad.any() for parameter in ours)
        total += model.plain.weight.grad
        for parameter in model.parameters():
            parameter.grad = None
            if flag and hasattr(parameter, "main_grad"):
                parameter.grad_added_to_main_grad = False
    same({**snapshot(model), "plain.weight": total}, expected)


def test_make_graphed_callables_of_a_tied_weight():
    xs = batches()
    expected = eager_main_grads(Tied, xs)
    model = made(Tied)
    main_grads = MainGrads(model)
    with graphed(model):
        model = graphed_callable(model, xs[0])
    main_grads.zero_()
    with main_grads.accumulate():
        for x in xs:
            backward(model, x)
    main_grads.finish()
    same(snapshot(model), expected)


def test_make_graphed_callables_of_a_compiled_block():
    xs = batches()
    expected = eager_main_grads(Block, xs)
    model = made()
    main_grads = MainGrads(model)
    compiled = torch.compile(model, fullgraph=True)
    with graphed(model):
        compiled = graphed_callable(compiled, xs[0])
    assert not any(buffer.any() for buffer in main_grads.buffers)
    main_grads.zero_()
    with main_grads.accumulate():
        for x in xs:
            backward(compiled, x)
    main_grads.finish()
    for name, grad in snapshot(model).items():
        torch.testing.assert_close(grad, expected[name], rtol=0, atol=2e-2 * expected[name].abs().max().item())


# ---- eight bits ----


def eight_bits(recipe):
    torch.manual_seed(0)
    model = onepass.nn.MLP(SIZE, 2 * SIZE, precision=recipe, device="cuda", dtype=BF16)
    return model, torch.optim.SGD(model.parameters(), lr=1.0)


@pytest.mark.parametrize("scaling", ("delayed", "current", "row"))
def test_replays_see_updates_of_eight_bit_weights(scaling):
    recipe, xs = onepass.FP8Recipe(scaling), batches()
    expected, optimizer = eight_bits(recipe)
    model, other = eight_bits(recipe)
    static = xs[0].clone()
    for each in (expected, model):
        warmed(lambda each=each: backward(each, static))
        each.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        backward(model, static)
    for x in xs:
        optimizer.zero_grad()
        backward(expected, x)
        optimizer.step()
        static.copy_(x)
        graph.replay()
        other.step()
        for one, replayed in zip(expected.parameters(), model.parameters(), strict=True):
            assert torch.equal(one, replayed)
    with torch.no_grad():
        assert torch.equal(expected(xs[0]), model(xs[0]))


def test_a_capture_before_any_call_in_eight_bits_raises():
    model, _ = eight_bits("fp8")
    static = batches(1)[0]
    onepass.linear(static, torch.zeros(16, SIZE, device="cuda", dtype=BF16))  # cuBLAS is ready
    early = pytest.raises(RuntimeError, match="has no scale yet can't be captured: run forward and backward once")
    with early, torch.cuda.graph(torch.cuda.CUDAGraph()):
        static.clone()  # PyTorch warns of an empty graph
        backward(model, static)
