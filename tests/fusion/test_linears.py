"""Linear layers of one input as one product: what is found, and that its error is no larger than the layers' own."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import onepass
import onepass.fusion.backend
from onepass.fusion.cost import LaunchCost
from onepass.testing.budget import compare

ONE, WEIGHTS, INPUT = "linear", "linear's weight gradient", "linear's input gradient"


pytestmark = pytest.mark.usefixtures("machine")


class Layers(nn.Module):
    def __init__(self, widths=(48, 16, 24), bias=False, dtype=torch.float32):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, width, bias=bias, dtype=dtype) for width in widths)

    def forward(self, x):
        return [torch.sin(layer(x)) for layer in self.layers]


def both(module, x, seed=1):
    outputs = module(x)
    torch.manual_seed(seed)
    wanted = [x, *(p for p in module.parameters() if p.requires_grad)]
    return [
        *outputs,
        *torch.autograd.grad(outputs, wanted, [torch.randn_like(y, dtype=torch.float64).to(y.dtype) for y in outputs]),
    ]


def found(fused):
    return [(one.operator, one.lanes) for one in fused.report().found if one.operator.startswith("linear")]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_within_the_error_budget(bias, dtype):
    """Against fp64: outputs, the input's gradient (a sum of products in one) and the weights', beside the layers one by one."""
    torch.manual_seed(0)
    module = Layers(bias=bias, dtype=dtype)
    x = torch.randn(5, 7, 64).to(dtype).requires_grad_()
    fused = onepass.fuse(module, compiler="none")
    ours, baseline = both(fused, x), both(module, x)
    exact = Layers(bias=bias, dtype=torch.float64)
    exact.load_state_dict(module.state_dict())
    oracle = both(exact, x.detach().double().requires_grad_())
    named = {f"{i}": tensor for i, tensor in enumerate(ours)}
    report = compare([(named, dict(zip(named, baseline, strict=True)), dict(zip(named, oracle, strict=True)))], dtype)
    assert report, report
    assert found(fused) == [(ONE, 3), (WEIGHTS, 3), (INPUT, 3)]


def test_a_layer_called_twice_on_one_input_has_both_terms():
    """Its products are one by then, which the sum of the input's gradient has twice."""

    class Twice(Layers):
        def forward(self, x):
            u = torch.tanh(x)
            other = self.layers[1](u)
            return [(self.layers[0](u) * self.layers[0](u)).sum(), other.square().sum()]

    module, x = Twice(), torch.randn(16, 64, requires_grad=True)
    fused = onepass.fuse(module, compiler="none")
    (expected,), (ours,) = (torch.autograd.grad(sum(each(x)), x) for each in (module, fused))
    torch.testing.assert_close(ours, expected)


def test_a_frozen_layer_leaves_forward_merged():
    module = Layers()
    module.layers[1].weight.requires_grad_(False)
    x = torch.randn(5, 64, requires_grad=True)
    fused = onepass.fuse(module, compiler="none")
    torch.testing.assert_close(both(fused, x), both(module, x))
    assert (ONE, 3) in found(fused)
    assert (INPUT, 3) in found(fused)


def test_an_input_without_gradient():
    module, x = Layers(), torch.randn(5, 64)
    fused = onepass.fuse(module, compiler="none")
    gradients = [torch.autograd.grad(sum(y.sum() for y in fn(x)), list(module.parameters())) for fn in (fused, module)]
    torch.testing.assert_close(*gradients)
    assert found(fused) == [(ONE, 3), (WEIGHTS, 3)]


def test_no_gradients_no_backward():
    module, x = Layers(), torch.randn(5, 64)
    fused = onepass.fuse(module, compiler="none")
    with torch.no_grad():
        torch.testing.assert_close(fused(x), module(x))
    assert found(fused) == [(ONE, 3)]


@pytest.mark.parametrize("bias", [False, True])
def test_under_autocast(bias):
    """Parameters in fp32, products in bf16: the cast is of the whole."""
    module = Layers(bias=bias)
    fused = onepass.fuse(module, compiler="none")
    x = torch.randn(5, 64, requires_grad=True)

    def cast(fn):
        with torch.autocast("cpu", torch.bfloat16):
            return both(fn, x)

    ours, theirs = cast(fused), cast(module)
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a.float(), b.float(), rtol=2e-2, atol=2e-2)
    assert bias or found(fused) == [(ONE, 3), (WEIGHTS, 3), (INPUT, 3)]


def test_the_casts_of_many_layers_stay_where_they_are():
    """Together they would hold every layer's weight from the beginning on."""
    module = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(6)))
    fused, x = onepass.fuse(module, compiler="none"), torch.randn(3, 512)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        torch.testing.assert_close(fused(x), module(x))
    assert not fused.report().found
    assert any("of weights alone" in refused.why for refused in fused.report().refused)


def test_layers_one_behind_another_stay():
    """The second's input comes of the first: nothing is common."""
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    fused, x = onepass.fuse(module, compiler="none"), torch.randn(3, 8)
    torch.testing.assert_close(fused(x), module(x))
    assert fused.report().graphs
    assert not found(fused)


def test_a_layer_that_needs_another_of_its_input():
    """gate's gradient waits for up's output, not for up's gradient; merged they make no circle."""

    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.up = nn.Linear(16, 32, bias=False), nn.Linear(16, 32, bias=False)

        def forward(self, x):
            return [F.silu(self.gate(x)) * self.up(x)]

    module, x = Gated(), torch.randn(6, 16, requires_grad=True)
    fused = onepass.fuse(module, compiler="none")
    torch.testing.assert_close(both(fused, x), both(module, x))
    assert found(fused) == [(ONE, 2), (WEIGHTS, 2), (INPUT, 2)]


def test_a_copy_that_costs_more_than_it_saves_is_not_made(monkeypatch):
    monkeypatch.setattr(onepass.fusion.backend, "machine_of", lambda device: LaunchCost(bytes_per_us=1e-3, launch_us=1.0))

    class Cumulated(Layers):
        def forward(self, x):
            return [layer(x).cumsum(-1) for layer in self.layers]  # whose gradient is no element-wise kernel's

    module, x = Cumulated(), torch.randn(5, 64, requires_grad=True)
    fused = onepass.fuse(module, compiler="none")
    torch.testing.assert_close(both(fused, x), both(module, x))
    assert found(fused) == [(ONE, 3)]
    assert any("costs more than it saves" in refused.why for refused in fused.report().refused)
