"""Modules of linear layers take adapters with each call."""

import pytest
import torch
from torch.nn import functional as F

import onepass
from onepass import LoRA

K, N, M = 24, 40, 6


def adapter(outer, inner, seed):
    generator = torch.Generator().manual_seed(seed)
    a, b = torch.randn(3, inner, generator=generator), torch.randn(outer, 3, generator=generator)
    return LoRA(a.double().requires_grad_(), b.double().requires_grad_(), 0.7)


def merged(weight, lora):
    return weight + lora.scale * lora.b @ lora.a


def rows():
    return torch.randn(M, K, generator=torch.Generator().manual_seed(9)).double().requires_grad_()


LAYERS = {
    "Linear": (onepass.nn.Linear, F.linear),
    "ColumnParallelLinear": (onepass.nn.ColumnParallelLinear, F.linear),
    "RowParallelLinear": (onepass.nn.RowParallelLinear, F.linear),
    "NormLinear": (onepass.nn.NormLinear, lambda x, weight, bias: F.linear(F.rms_norm(x, (K,), eps=1e-6), weight, bias)),
}


@pytest.mark.parametrize("frozen", (True, False))
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_with_an_adapter_is_one_of_another_weight(name, frozen):
    make, formula = LAYERS[name]
    layer, x, lora = make(K, N, dtype=torch.float64), rows(), adapter(N, K, 1)
    layer.requires_grad_(not frozen)
    y = layer(x, lora=lora)
    y = y[0] if isinstance(y, tuple) else y
    expected = formula(x, merged(layer.weight, lora), layer.bias)
    torch.testing.assert_close(y, expected)
    asked = [x, lora.a, lora.b, *([] if frozen else [layer.weight, layer.bias])]
    for mine, other in zip(torch.autograd.grad(y.sum(), asked), torch.autograd.grad(expected.sum(), asked), strict=True):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("both", (True, False))
def test_an_mlp_with_adapters(both):
    mlp, x = onepass.nn.MLP(K, N, "swiglu", dtype=torch.float64), rows()
    up, down = adapter(2 * N, K, 1), adapter(K, N, 2)
    y = mlp(x, fc1_lora=up, fc2_lora=down if both else None)
    h = F.linear(x, merged(mlp.linear_fc1.weight, up), mlp.linear_fc1.bias)
    gate, linear = h.chunk(2, -1)
    weight = merged(mlp.linear_fc2.weight, down) if both else mlp.linear_fc2.weight
    expected = F.linear(F.silu(gate) * linear, weight, mlp.linear_fc2.bias)
    torch.testing.assert_close(y, expected)
    asked = [x, up.a, up.b, *([down.a, down.b] if both else [])]
    for mine, other in zip(torch.autograd.grad(y.sum(), asked), torch.autograd.grad(expected.sum(), asked), strict=True):
        torch.testing.assert_close(mine, other)
