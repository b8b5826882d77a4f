"""Products under torch.utils.checkpoint: the last of a block is not computed again, and gradients have their bits."""

from __future__ import annotations

import gc
import weakref
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode

import onepass
from onepass.product import grouped

ROWS, HIDDEN, RANK = 16, 32, 4


def _new(*shape):
    return torch.nn.Parameter(torch.randn(*shape) / shape[-1] ** 0.5)


def _linear(x, weight, bias, **options):
    return onepass.linear(x, weight, bias, **options)


def _norm_linear(x, weight, bias):
    return onepass.norm_linear(x, torch.ones_like(x[0]), weight, bias=bias)


def _activation_linear(x, weight, bias):
    return onepass.activation_linear(x, weight, bias, activation="gelu")


def _lora_linear(x, weight, bias, a, b, **options):
    return onepass.lora_linear(x, weight, a, b, scale=2.0, bias=bias, **options)


def _frozen(x, weight, bias):
    return onepass.linear(x, onepass.freeze_weight(weight.detach(), "fp8"), bias)


LAYERS = {
    "norm_linear": _norm_linear,
    "activation_linear": _activation_linear,
    "lora": _lora_linear,
    "lora, dropout": partial(_lora_linear, dropout=0.5),
    "eight bits": partial(_linear, precision="fp8"),
    "lora, eight bits": partial(_lora_linear, precision="fp8"),
    "frozen": _frozen,
}


def _gradients(function, parameters, x, checkpointed, passes=1):
    torch.manual_seed(1)

    def block(x):
        for own in parameters:
            x = function(x, *own)
        return x

    leaves = [x.detach().requires_grad_(), *[tensor.detach().requires_grad_() for own in parameters for tensor in own]]
    count = len(parameters[0])
    parameters = [leaves[1 + count * layer : 1 + count * (layer + 1)] for layer in range(len(parameters))]
    y = checkpoint(block, leaves[0], use_reentrant=False) if checkpointed else block(leaves[0])
    for left in reversed(range(passes)):
        y.backward(torch.ones_like(y), retain_graph=left > 0)
    return [tensor.grad for tensor in leaves]


def _of_addmm(start, a, b, out_shape=None, **_):
    return 2 * a[0] * a[1] * b[1]


def _operations(*case):
    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: _of_addmm}) as counter:
        grads = _gradients(*case, True)
    return grads, counter.get_total_flops()


def _case(name):
    torch.manual_seed(0)
    adapters = [(RANK, HIDDEN), (HIDDEN, RANK)] if "lora" in name else []
    parameters = [[_new(*shape) for shape in ((HIDDEN, HIDDEN), (HIDDEN,), *adapters)] for _ in range(2)]
    return LAYERS[name], parameters, torch.randn(ROWS, HIDDEN)


@pytest.mark.parametrize("name", LAYERS)
def test_the_last_product_is_not_computed_again(name):
    case = _case(name)
    wanted = _gradients(*case, False)
    with set_checkpoint_early_stop(False):
        whole, of_whole = _operations(*case)
    got, of_got = _operations(*case)
    of_adapters = RANK if "lora" in name else 0
    assert of_whole - of_got == 2 * ROWS * HIDDEN * (HIDDEN + of_adapters)
    for a, b, c in zip(wanted, whole, got, strict=True):
        assert torch.equal(a, c) and torch.equal(b, c) if a is not None else c is None


@pytest.mark.parametrize("name", ["norm_linear", "lora, dropout"])
def test_passes(name):
    case = _case(name)
    wanted, got = _gradients(*case, False, passes=2), _gradients(*case, True, passes=2)
    assert all(torch.equal(a, b) for a, b in zip(wanted, got, strict=True))


@pytest.mark.parametrize("early_stop", [True, False])
def test_a_gradient_within_the_block(early_stop):
    """What a recomputation has saved early is there for a backward of its own."""
    layer, ((weight, bias), _), x = _case("norm_linear")

    def block(x):
        y = layer(x, weight, bias)
        (dx,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        return y * dx.detach()

    x = x.requires_grad_()
    with set_checkpoint_early_stop(early_stop):
        grads = [torch.autograd.grad(f(x).sum(), (x, weight)) for f in (block, partial(checkpoint, block, use_reentrant=False))]
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("how", ["recompute", "checkpoint"])
@pytest.mark.parametrize("name", ["plain", "lora", "eight bits", "shared"])
def test_the_experts_last_product_is_not_computed_again(name, how, monkeypatch):
    torch.manual_seed(0)
    E, k = 4, 2
    made, counted = [], ("grouped_product", "_scaled_product")
    for function in counted:
        by = getattr(grouped, function)
        monkeypatch.setattr(grouped, function, lambda *args, by=by: (made.append(1), by(*args))[1])
    x, up, down = torch.randn(ROWS, HIDDEN), torch.randn(E, 2 * HIDDEN, HIDDEN) / 8, torch.randn(E, HIDDEN, HIDDEN) / 8
    adapters = [torch.randn(E, *shape) / 8 for shape in ((RANK, HIDDEN), (HIDDEN, RANK))] if name == "lora" else []
    weights, chosen = torch.rand(ROWS, E).topk(k)
    precision = "fp8" if name == "eight bits" else None

    def gradients(how):
        leaves = [tensor.clone().requires_grad_() for tensor in (x, up, down, weights, *adapters)]

        def block(x, up, down, weights, *adapters):
            lora = (None, onepass.LoRA(*adapters)) if adapters else None
            return onepass.experts(
                x, up, down, chosen, weights, shared=x * 2 if name == "shared" else None, lora=lora, precision=precision,
                recompute=how == "recompute",
            )  # fmt: skip

        y = checkpoint(block, *leaves, use_reentrant=False) if how == "checkpoint" else block(*leaves)
        made.clear()
        return torch.autograd.grad(y.square().sum(), leaves), len(made)

    wanted, of_backward = gradients(None)
    with set_checkpoint_early_stop(False):
        whole, of_whole = gradients(how)
    got, of_got = gradients(how)
    assert (of_whole, of_got) == (of_backward + 2, of_backward + 1)
    assert all(torch.equal(a, c) and torch.equal(b, c) for a, b, c in zip(wanted, whole, got, strict=True))


def test_nothing_of_a_recomputation_stays():
    """Its function keeps h, which it returns, too."""
    _, ((weight, bias), _), x = _case("norm_linear")
    made = []

    def block(x):
        y, h = onepass.norm_linear(x, torch.ones_like(x[0]), weight, bias, residual=x)
        made.append(weakref.ref(h))
        return onepass.activation_linear(y + h, weight, bias, activation="gelu")

    gc.disable()
    try:
        checkpoint(block, x.requires_grad_(), use_reentrant=False).sum().backward()
        assert [ref() is None for ref in made] == [True, True]
    finally:
        gc.enable()
