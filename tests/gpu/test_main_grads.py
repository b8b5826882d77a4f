"""What only a GPU shows of MainGrads: gradients that are added on other streams than the hooks run on, and captures."""

import pytest
import torch
from gpu.calls import memory_goes_back, other_stream  # noqa: F401
from torch import nn
from torch.nn import functional as F

import onepass
from onepass.gradients.main_grads import MainGrads

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"), other_stream]
ROWS, SIZE = 8, 64


class _Late(torch.autograd.Function):
    """Backward keeps its stream busy for a good part of a second first."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        torch.cuda._sleep(500_000_000)
        return grad.clone()


class Left:
    """A weight of ones, and a graph that it was used in, on this stream: while that is there, so are the weight's hooks."""

    def __init__(self, by=onepass.linear):
        self.by, self.weight = by, nn.Parameter(torch.ones(SIZE, SIZE, device="cuda"))
        self.main_grads = MainGrads([self.weight])
        self.x, self.side = torch.ones(ROWS, SIZE, device="cuda"), torch.cuda.Stream()
        self.graph = by(self.x, self.weight)
        torch.cuda.synchronize()

    def late_loss(self):
        """On another stream, where its gradient comes late."""
        with torch.cuda.stream(self.side):
            return _Late.apply(self.by(self.x, self.weight)).sum()

    def found(self, times):
        """Whether that many gradients are there for who reads them now."""
        found = self.weight.main_grad.clone()
        torch.cuda.synchronize()
        return self.graph.requires_grad and torch.equal(found, torch.full_like(found, float(ROWS * times)))


@pytest.mark.parametrize("by", (onepass.linear, F.linear))
@pytest.mark.parametrize("microbatches", (1, 2))
def test_finish_waits_for_gradients_of_other_streams(by, microbatches):
    left = Left(by)
    with left.main_grads.accumulate():
        for _ in range(microbatches - 1):
            left.late_loss().backward()
    left.late_loss().backward()
    left.main_grads.finish()
    assert left.found(microbatches)


def test_what_follows_a_backward_has_its_gradients():
    """As PyTorch promises of .grad: without finish() too."""
    left = Left()
    with left.main_grads.accumulate():
        left.late_loss().backward()
    assert left.found(1)


def test_a_step_that_is_given_up_leaves_nothing_to_the_next():
    left = Left()
    left.late_loss().backward()
    left.main_grads.zero_()
    onepass.linear(left.x, left.weight).sum().backward()
    left.main_grads.finish()
    assert left.found(1)


def test_a_weight_of_two_ops_on_two_streams():
    """PyTorch's gradient is added by the hook, after the op's."""
    left = Left()
    late = left.late_loss()
    (F.linear(left.x, left.weight).sum() + late).backward()
    left.main_grads.finish()
    assert left.found(2)


def test_a_reduction_waits_for_what_a_graph_added(monkeypatch):
    """A replay calls nothing that could say where it is."""
    layer, other = onepass.nn.Linear(SIZE, SIZE, bias=False, device="cuda"), nn.Parameter(torch.ones(SIZE, SIZE, device="cuda"))
    main_grads = MainGrads([layer.weight, other])
    x, side, sent = torch.ones(ROWS, SIZE, device="cuda"), torch.cuda.Stream(), []
    with onepass.graphed(layer):
        graph = torch.cuda.make_graphed_callables(layer, (x,))
    main_grads.zero_()
    torch.cuda.synchronize()

    def start(bucket):
        bucket.wait_for_gradients()
        sent.append(bucket.flat.clone())

    monkeypatch.setattr(main_grads, "_start", start)
    early = onepass.linear(x, other).sum()
    with torch.cuda.stream(side):
        late = _Late.apply(graph(x)).sum()
    (early + late).backward()
    torch.cuda.synchronize()
    assert len(sent) == 1 and torch.equal(sent[0], main_grads.buffers[0]) and layer.weight.main_grad.all()


def test_finish_in_a_capture_after_a_backward_outside_of_it():
    weight = nn.Parameter(torch.ones(SIZE, SIZE, device="cuda"))
    main_grads, graph = MainGrads([weight]), torch.cuda.CUDAGraph()
    onepass.linear(torch.ones(ROWS, SIZE, device="cuda"), weight).sum().backward()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        main_grads.finish()
        norm = main_grads.norm()
    graph.replay()
    assert norm.item() == ROWS * SIZE


@pytest.mark.parametrize("columns", (1, SIZE))
def test_a_weight_of_fp64_adds_to_fp32(columns):
    x = torch.randn(ROWS, columns, device="cuda", dtype=torch.float64)
    weight = nn.Parameter(torch.randn(SIZE, columns, device="cuda", dtype=torch.float64))
    weight.main_grad = torch.ones(SIZE, columns, device="cuda")
    dy = torch.randn(ROWS, SIZE, device="cuda", dtype=torch.float64)
    onepass.linear(x, weight).backward(dy)
    torch.testing.assert_close(weight.main_grad.double(), 1 + dy.t() @ x, rtol=1e-5, atol=1e-5)
