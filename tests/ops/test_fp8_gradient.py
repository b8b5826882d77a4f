"""Gradients that an activation hands over in eight bits to the product before it: where they are, and what others see of them."""

import pytest
import torch
from ops.calls import backends
from ops.fp8_calls import DEVICE, decibels

import onepass
from onepass.ops.activation import activation_linear as module
from onepass.ops.activation import activation_rows
from onepass.ops.activation.activation_rows import ActivationRows
from onepass.product.fp8 import gradient as fp8_gradient
from onepass.product.fp8.gradient import FP8Gradient
from onepass.testing.mutants import mutate


class Layers:
    """A product and an activation with its product, after a step: by then the first gradient's scale is known."""

    def __init__(self, backend, activation="swiglu", recipe="fp8", function=onepass.activation_linear):
        generator = torch.Generator().manual_seed(3)
        parts = 2 if "glu" in activation else 1

        def drawn(*shape, size=1.0):
            return (torch.randn(shape, generator=generator) * size).to(DEVICE, torch.bfloat16)

        self.x, self.dy = drawn(2, 37, 64).requires_grad_(), drawn(2, 37, 48)
        self.up = torch.nn.Parameter(drawn(96 * parts, 64, size=0.125))
        self.bias = torch.nn.Parameter(drawn(96 * parts))
        self.scale = torch.nn.Parameter(drawn(2, 37).float().abs() + 0.5)
        self.down = torch.nn.Parameter(drawn(48, 96, size=0.1))
        self.activation, self.recipe, self.backend, self.function = activation, recipe, backend, function

    def leaves(self):
        return self.x, self.up, self.bias, self.scale, self.down

    def hidden(self, precision="recipe"):
        return onepass.linear(self.x, self.up, precision=self.recipe if precision else None)

    def rest(self, h, precision="recipe"):
        return self.function(
            h, self.down, None, self.activation, activation_bias=self.bias, token_weight=self.scale, backend=self.backend,
            precision=self.recipe if precision else None,
        )  # fmt: skip

    def run(self):
        return self.rest(self.hidden())

    def exact(self):
        wide = [leaf.detach().double().requires_grad_() for leaf in self.leaves()]
        x, up, bias, scale, down = wide
        y = onepass.activation_linear(
            onepass.linear(x, up), down, None, self.activation, activation_bias=bias, token_weight=scale, backend="torch"
        )
        return torch.autograd.grad(y, wide, self.dy.double())


@pytest.fixture
def handed(monkeypatch):
    """Counts gradients that are handed over, and those that are converted for others."""
    counts = {"handed": 0, "converted": 0}
    backward, converted = ActivationRows._backward_in_codes, FP8Gradient.converted

    def count(name, function):
        def run(*args):
            counts[name] += 1
            return function(*args)

        return run

    monkeypatch.setattr(ActivationRows, "_backward_in_codes", count("handed", backward))
    monkeypatch.setattr(FP8Gradient, "converted", count("converted", converted))
    return counts


@backends
@pytest.mark.parametrize("activation", ("swiglu", "gelu"))
def test_gradients_are_near_fp64(backend, activation, handed):
    layers = Layers(backend, activation)
    layers.run().backward(layers.dy)
    assert handed == {"handed": 1, "converted": 0}
    for leaf, exact in zip(layers.leaves(), layers.exact(), strict=True):
        assert decibels(leaf.grad, exact) > 18


@backends
def test_whoever_else_looks_sees_the_gradient(backend, handed):
    layers = Layers(backend)
    h = layers.hidden()
    h.retain_grad()
    seen = []
    h.register_hook(lambda grad: seen.append(grad * 2))
    layers.rest(h).backward(layers.dy)
    wide = layers.hidden(None).detach().requires_grad_()
    layers.rest(wide, None).backward(layers.dy)
    assert decibels(h.grad.double(), wide.grad) > 18 and decibels(seen[0], 2 * wide.grad) > 18
    assert handed["handed"] == 1 and handed["converted"] >= 1
    once = layers.x.grad.clone()
    layers.x.grad = None
    h = layers.hidden()
    (layers.rest(h) * layers.dy).sum().add(h.float().sum()).backward()  # two users: a sum
    twice = layers.x.grad - once
    other = torch.autograd.grad(layers.hidden(None).float().sum(), layers.x)[0]
    assert decibels(twice, other) > 15


@backends
def test_transposed_codes_are_the_codes_transposed(backend):
    layers = Layers(backend)
    h = layers.hidden()
    found = []
    h.register_hook(lambda grad: found.append((grad, grad.codes.clone(), grad.transposed.clone())))
    layers.rest(h).backward(layers.dy)
    grad, codes, transposed = found[0]
    rows = codes.view(torch.uint8).reshape(-1, codes.shape[-1])
    assert transposed.view(torch.uint8)[:, : len(rows)].equal(rows.t()) and not transposed.view(torch.uint8)[:, len(rows) :].any()
    assert grad.shape == h.shape and grad.dtype == h.dtype


def test_views_changed_tensors_and_other_recipes_take_16_bits(handed):
    layers = Layers("torch")
    layers.rest(layers.hidden().view(2, 37, -1)).backward(layers.dy)
    layers.rest(layers.hidden().mul_(1)).backward(layers.dy)
    for recipe in (onepass.FP8Recipe(scaling="current"), onepass.FP8Recipe(scaling="row"), onepass.FP8Recipe(wgrad=False)):
        other = Layers("torch", recipe=recipe)
        other.run().backward(other.dy)
    assert handed["handed"] == 0


def test_a_write_in_place_says_what_to_do(handed):
    layers = Layers("torch")
    h = layers.hidden()
    h.register_hook(lambda grad: grad.mul_(2))
    with pytest.raises(RuntimeError, match=r"kept in eight bits and can't be written in place: clone it before"):
        layers.rest(h).backward(layers.dy)


@backends
def test_the_first_backward_has_the_bits_of_the_next(backend):
    """It finds its gradient's scale by a pass of its own, and then does what all do."""
    layers, found = Layers(backend), []
    for _ in range(2):
        found.append(torch.autograd.grad(layers.run(), layers.leaves(), layers.dy))
    assert all(a.equal(b) for a, b in zip(*found, strict=True))


@backends
def test_checkpoints_and_second_runs_have_the_same_bits(backend):
    found = []
    for again in (False, False, True):
        layers = Layers(backend)
        run = layers.run
        y = torch.utils.checkpoint.checkpoint(run, use_reentrant=False) if again else run()
        y.backward(layers.dy)
        found.append([leaf.grad for leaf in layers.leaves()])
    assert all(a.equal(b) and a.equal(c) for a, b, c in zip(*found, strict=True))


MUTANTS = {
    "the codes of another gradient": ("found.dx_transposed, inverse", "found.dx_transposed, 2 * inverse"),
    "a bias without its gradient": ("found.dbias, found.dtoken_weight", "None, found.dtoken_weight"),
    "token weights without theirs": ("found.dbias, found.dtoken_weight", "found.dbias, None"),
    "the activation's own scale": ("run(x_target, target,", "run(x_target, target._replace(scale=2 * target.scale),"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_found(name):
    broken = mutate(activation_rows, "ActivationRows._backward_in_codes", *MUTANTS[name], entry=module)
    layers = Layers("torch", function=broken.activation_linear)
    layers.run().backward(layers.dy)
    exact = layers.exact()
    grads = [leaf.grad for leaf in layers.leaves()]
    assert any(grad is None or decibels(grad, wide) < 18 for grad, wide in zip(grads, exact, strict=True))


def test_a_taker_is_the_one_that_made_the_tensor():
    layers = Layers("torch")
    h = layers.hidden()
    assert fp8_gradient.gradient_consumer(h) is layers.up.fp8
    assert fp8_gradient.gradient_consumer(h.detach()) is None and fp8_gradient.gradient_consumer(h[:1]) is None
    biased = onepass.linear(layers.x, layers.up, layers.bias, precision="fp8")
    assert fp8_gradient.gradient_consumer(biased) is None  # a bias's gradient is a sum of what was not rounded
