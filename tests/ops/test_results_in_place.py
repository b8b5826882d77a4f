"""What an op returns can be written to in place, as what PyTorch returns can, and what it is given is not written."""

import pytest
import torch
from ops.calls import backends
from torch import nn

import onepass
from onepass.ops.activation import activations

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
N, K = 5, 4


def with_main_grad(*shape):
    parameter = nn.Parameter(torch.randn(*shape, device=DEVICE))
    parameter.main_grad = torch.zeros_like(parameter)
    return parameter


def calls(backend):
    weight, bias, norm_weight = (nn.Parameter(torch.randn(*shape, device=DEVICE)) for shape in ((N, K), (N,), (K,)))
    return {
        "linear": lambda x: onepass.linear(x, with_main_grad(N, K), bias, backend=backend),
        "norm_linear": lambda x: onepass.norm_linear(x, norm_weight, weight, bias, backend=backend),
        "norm_linear, all": lambda x: onepass.norm_linear(
            x, norm_weight, weight, bias, residual=x * 2, return_norm_output=True, backend=backend
        ),
        "activation_linear": lambda x: onepass.activation_linear(x, weight, bias, "gelu", backend=backend),
        "rms_norm": lambda x: onepass.rms_norm(x, norm_weight, residual=x * 2, backend=backend),
        "bias_activation": lambda x: onepass.bias_activation(x, norm_weight, "gelu", backend=backend),
        "dropout_add": lambda x: onepass.dropout_add(x, x * 2, 0.0, bias=norm_weight, backend=backend),
        "cross_entropy": lambda x: onepass.cross_entropy(
            x, torch.zeros(2, 3, dtype=torch.long, device=DEVICE), reduction="none", backend=backend
        ),
    }


@backends
@pytest.mark.parametrize("name", calls("torch"))
def test_results_can_be_written(name, backend):
    call = calls(backend)[name]
    x = torch.randn(2, 3, K, device=DEVICE, requires_grad=True)
    y = call(x)
    y = y[0] if isinstance(y, tuple) else y  # h is kept for backward
    expected = torch.autograd.grad(y.square().sum(), x, retain_graph=True)
    before = y.detach().clone()
    y += 1
    assert torch.equal(y, before + 1)
    torch.testing.assert_close(torch.autograd.grad((y - 1).square().sum(), x), expected)


@pytest.mark.parametrize("gated", (False, True), ids=("", "gated"))
@pytest.mark.parametrize("formula", (nn.ReLU(inplace=True), lambda z: z), ids=("in place", "its argument"))
@pytest.mark.parametrize("linear", (False, True), ids=("alone", "linear"))
def test_a_registered_formula_may_work_in_place(monkeypatch, formula, gated, linear):
    monkeypatch.setattr(activations, "ACTIVATIONS", dict(activations.ACTIVATIONS))
    onepass.register_activation("mine", formula, gated=gated)
    leaf = torch.randn(3, 2 * K, device=DEVICE, requires_grad=True)
    weight = torch.eye(K if gated else 2 * K, device=DEVICE)

    def mine(x):
        return onepass.activation_linear(x, weight, None, "mine") if linear else onepass.bias_activation(x, None, "mine")

    def plain(x):
        function = torch.relu if isinstance(formula, nn.ReLU) else formula
        return function(x[:, :K]) * x[:, K:] if gated else function(x)

    x = leaf * 1
    before = x.detach().clone()
    with torch.no_grad():
        mine(x).add_(1)
    y = mine(x)
    assert torch.equal(x, before)
    torch.testing.assert_close(y, plain(leaf))
    torch.testing.assert_close(torch.autograd.grad(y.sum(), leaf), torch.autograd.grad(plain(leaf).sum(), leaf))
