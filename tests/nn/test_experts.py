"""Experts: the module of onepass.experts, its start, main_grad and eight bits."""

import math

import pytest
import torch
import torch.nn.functional as F
from ops.oracle import DEVICE

import onepass
from onepass.nn import Experts, Router
from onepass.nn.precision import fp8_layers

H, SIZE, E, K = 16, 32, 4, 2


def made(*more, **options):
    torch.manual_seed(0)
    return Experts(H, SIZE, E, *more, device=DEVICE, **options)


def tokens(*shape, seed=1):
    return torch.randn(*shape or (11, H), generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def routed(x):
    return onepass.route(tokens(*x.shape[:-1], E, seed=2), K)


def one_by_one(module, x, routing):
    """Return each token's sum over its experts, of an MLP whose gates come first and whose weights are as torch.nn.Linear's."""
    y = torch.zeros_like(x)
    for e in range(E):
        up, down = module.up[e], module.down[e]
        up, down = (up.t(), down.t()) if module.options.transposed else (up, down)
        h = F.linear(x, up, None if module.up_bias is None else module.up_bias[e])
        if module.options.activation == "relu":
            a = h.relu()
        else:
            gate, linear = (h[..., ::2], h[..., 1::2]) if module.options.interleaved else h.chunk(2, -1)
            if module.options.clamp is not None:
                gate, linear = gate.clamp(max=module.options.clamp), linear.clamp(-module.options.clamp, module.options.clamp)
            a = F.silu(gate) * (linear + module.options.linear_offset)
        of_expert = F.linear(a, down, None if module.down_bias is None else module.down_bias[e])
        y = y + of_expert * (routing.weights * (routing.chosen == e)).sum(-1, keepdim=True)
    return y


OPTIONS = {
    "plain": {},
    "not gated": {"activation": "relu"},
    "gpt-oss": {"bias": True, "clamp": 0.5, "linear_offset": 1.0, "interleaved": True, "transposed": True},
    "recompute": {"recompute": True, "bias": True},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_it_is_each_tokens_experts_one_by_one(name):
    module = made(**OPTIONS[name])
    x = tokens(2, 5, H).requires_grad_()
    routing, shared = routed(x), tokens(2, 5, H, seed=3)
    y = module(x, routing, shared)
    expected = one_by_one(module, x, routing) + shared
    torch.testing.assert_close(y, expected)
    dy = tokens(2, 5, H, seed=4)
    wanted = [x, *module.parameters()]
    for found, right in zip(torch.autograd.grad(y, wanted, dy), torch.autograd.grad(expected, wanted, dy), strict=True):
        torch.testing.assert_close(found, right)
    assert torch.equal(module(x, (routing.weights, routing.chosen)) + shared, module(x, routing) + shared)


def test_a_block_trains_its_router():
    router, module, x = Router(H, E, K, aux=0.01, device=DEVICE), made(), tokens(2, 5, H)
    routing = router(x)
    (module(x, routing).square().sum() + routing.aux_loss).backward()
    assert router.weight.grad.any() and module.up.grad.any() and module.down.grad.any()


@pytest.mark.parametrize("transposed", (False, True))
def test_it_starts_as_the_linear_layers_of_each_expert(transposed):
    torch.manual_seed(0)
    module = Experts(64, 256, 8, bias=True, transposed=transposed)
    for weight, bias, inputs, outputs in ((module.up, module.up_bias, 64, 512), (module.down, module.down_bias, 256, 64)):
        assert weight.shape == (8, *((inputs, outputs) if transposed else (outputs, inputs)))
        assert bias.shape == (8, outputs)
        for each in (weight, bias):  # uniform in 1 / sqrt(inputs), of each expert
            scaled = each.detach().flatten(1) * math.sqrt(inputs)
            assert (scaled.abs().amax(1) > 0.9).all() and scaled.abs().max() <= 1
            assert (scaled.std(1) * math.sqrt(3) - 1).abs().max() < 0.15


def test_recompute_keeps_no_rows_of_experts():
    x = tokens()
    routing, kept = routed(x), {}
    for recompute in (False, True):
        shapes = kept[recompute] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, s=shapes: s.append(tuple(t.shape)) or t, lambda t: t):
            made(recompute=recompute)(x, routing)
    of_up = K * len(x), 2 * SIZE
    assert of_up in kept[False] and of_up not in kept[True]


def test_main_grad_has_the_gradients():
    module, x = made(bias=True), tokens()
    routing, dy = routed(x), tokens(seed=4)
    plain = torch.autograd.grad(module(x, routing), list(module.parameters()), dy)
    for parameter in module.parameters():
        parameter.main_grad = torch.ones_like(parameter, dtype=torch.float32)
    module(x, routing).backward(dy)
    for parameter, grad in zip(module.parameters(), plain, strict=True):
        assert parameter.grad is None
        torch.testing.assert_close(parameter.main_grad, grad + 1)


def test_it_is_one_layer_of_eight_bits():
    module, x = made(), tokens()
    routing = routed(x)
    wide = module(x, routing)
    assert onepass.nn.set_precision(torch.nn.Sequential(module), "fp8") == 1
    assert [layer.name for layer in fp8_layers(module)] == ["up", "down"]
    narrow = module(x, routing)
    error = ((narrow - wide).norm() / wide.norm()).item()
    assert 0.01 < error < 0.1
    assert torch.equal(made(precision="fp8")(x, routing), narrow)
    assert not onepass.nn.fp8_state_dict(module)


def test_adapters_of_each_expert():
    module, x = made(), tokens()
    routing, r = routed(x), 8
    up = onepass.LoRA(tokens(E, r, H, seed=7) / 8, tokens(E, 2 * SIZE, r, seed=8) / 8, 0.5)
    down = onepass.LoRA(tokens(E, r, SIZE, seed=9) / 8, tokens(E, H, r, seed=6) / 8, 2.0)
    merged = made()
    with torch.no_grad():
        merged.up += 0.5 * up.b @ up.a
        merged.down += 2.0 * down.b @ down.a
    torch.testing.assert_close(module(x, routing, lora=(up, down)), merged(x, routing))


def test_what_is_wrong_is_said():
    with pytest.raises(ValueError, match="interleaved needs a gated activation, but activation is 'relu'"):
        made("relu", interleaved=True)
    with pytest.raises(ValueError, match="clamp"):
        made("relu", clamp=7.0)
    with pytest.raises(TypeError, match="transpose"):
        made(transpose=True)
    with pytest.raises(ValueError, match="num_experts must be a size of at least 1, but is 0"):
        Experts(H, SIZE, 0)
    with pytest.raises(ValueError, match="precision"):
        made(precision="fp7")
    with pytest.raises(ValueError, match="hidden_size"):
        made()(tokens(3, H + 1), routed(tokens(3, H + 1)))


def test_it_says_what_it_is():
    assert str(made()) == "Experts(16, 32, 4, activation='swiglu')"
    options = {"bias": True, "clamp": 7.0, "transposed": True, "precision": "fp8"}
    assert str(made(**options)) == (
        "Experts(16, 32, 4, activation='swiglu', bias=True, clamp=7.0, transposed=True, precision='fp8')"
    )  # fmt: skip
