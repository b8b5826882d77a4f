"""Modules whose gradient_accumulation_fusion is off: no op writes main_grad, and the same gradients come as .grad."""

import pytest
import torch

import onepass
from onepass.nn import (
    MLP,
    ColumnParallelLinear,
    LayerNorm,
    LinearCrossEntropy,
    NormLinear,
    RMSNorm,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from onepass.nn.norm import MarkedParameters

X = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
IDS = torch.tensor([3, 1, 4, 1, 5, 0])


def first(y):
    return y[0] if isinstance(y, tuple) else y


def added(y, bias):
    """The bias that was left to the caller, by an op that knows main_grad."""
    return onepass.dropout_add(y, torch.zeros_like(y), 0.0, bias=bias)


CALLS = {
    "layer norm": (lambda: LayerNorm(8), lambda module: module(X)),
    "rms norm": (lambda: RMSNorm(8), lambda module: first(module(X, X))),
    "norm and linear": (lambda: NormLinear(8, 5, norm="layer_norm"), lambda module: module(X)),
    "column": (lambda: ColumnParallelLinear(8, 5), lambda module: first(module(X))),
    "column, bias left": (lambda: ColumnParallelLinear(8, 5, skip_bias_add=True), lambda module: added(*module(X))),
    "row": (lambda: RowParallelLinear(8, 5), lambda module: first(module(X))),
    "row, bias left": (lambda: RowParallelLinear(8, 5, skip_bias_add=True), lambda module: added(*module(X))),
    "MLP": (lambda: MLP(8, 12), lambda module: module(X)),
    "MLP, scaled": (lambda: MLP(8, 12), lambda module: module(X, X[:, 0])),
    "MLP, bias left": (lambda: MLP(8, 12, skip_bias_add=True), lambda module: added(*module(X))),
    "MLP, halves": (lambda: MLP(8, 12), lambda module: module.rest(*module.linear_fc1(X))),
    "embedding": (lambda: VocabParallelEmbedding(7, 8), lambda module: module(IDS)),
    "head": (lambda: LinearCrossEntropy(8, 7, bias=True), lambda module: module(X, IDS)),
    "head's logits": (lambda: LinearCrossEntropy(8, 7, bias=True), lambda module: module.logits(X, gather=False)),
}


@pytest.mark.parametrize("name", CALLS)
def test_gradients_come_as_grad(name):
    make, call = CALLS[name]
    found = {}
    for fused in (True, False):
        torch.manual_seed(2)
        module = make()
        for part in module.modules():
            if isinstance(part, MarkedParameters):
                part.gradient_accumulation_fusion = fused
        for parameter in module.parameters():
            parameter.main_grad = torch.zeros_like(parameter)
        y = call(module)
        (y * torch.linspace(1, 2, y.numel()).view(y.shape)).sum().backward()
        found[fused] = list(module.parameters())
    for ours, theirs in zip(found[True], found[False], strict=True):
        assert ours.grad is None and ours.main_grad.any()
        assert not theirs.main_grad.any() and theirs.grad.any()
        torch.testing.assert_close(ours.main_grad, theirs.grad, rtol=1e-5, atol=1e-6)


def test_by_default_ops_write_main_grad_and_get_the_parameter_itself():
    norm = RMSNorm(8)
    assert norm.given(norm.weight) is norm.weight and norm.given(None) is None
    norm.gradient_accumulation_fusion = False
    assert norm.given(norm.weight) is not norm.weight and norm.given(None) is None
    assert norm.given(norm.weight).data_ptr() == norm.weight.data_ptr()


def test_a_heads_reduction_may_come_with_the_call():
    head = LinearCrossEntropy(8, 7)
    rows = head(X, IDS, reduction="none")
    assert rows.shape == (6,)
    torch.testing.assert_close(head(X, IDS, reduction="sum"), rows.sum())
    torch.testing.assert_close(head(X, IDS), rows.mean())
