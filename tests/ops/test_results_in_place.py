"""What an op returns can be written to in place, also where a formula is a user's, or runs over blocks of rows."""

import pytest
import torch
from torch import nn

import onepass
from onepass.ops.activation import activations

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
K = 4


@pytest.mark.parametrize("residual", (False, True))
def test_results_of_blocks_of_rows_can_be_written(residual):
    x = torch.ones(4, 1024, 1024, requires_grad=True)  # from this size on a CPU takes blocks
    y = onepass.rms_norm(x, residual=x * 1 if residual else None, backend="torch")
    (y[0] if residual else y).add_(1)


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
