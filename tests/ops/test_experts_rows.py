"""Products of experts that gather their rows, and that make their activation: the bits of the ops apart, and what is kept."""

import pytest
import torch
from ops.calls import backends
from ops.oracle import DEVICE

import onepass
from onepass.gpt import moe as blocks
from onepass.ops.activation import grouped as activation_grouped
from onepass.ops.activation.grouped import activation_grouped_linear
from onepass.ops.linear.grouped import gathered_grouped_linear, grouped_linear
from onepass.ops.linear.routing import gather_tokens, scatter_tokens, sort_rows
from onepass.product import gathered_rows
from onepass.product.grouped import GroupedOptions
from onepass.testing.mutants import copy_package, mutate

EXPERTS, K, INNER, TOKENS = 5, 32, 48, 23
BF16, FP32 = torch.bfloat16, torch.float32
types = pytest.mark.parametrize("dtype", (BF16, FP32), ids=str)


def numbers(*shape, seed=0, dtype=FP32):
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)
    return x.requires_grad_()


def routes_of(k, invalid=False):
    scores = torch.rand(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(k))
    scores[:, 2] = -1  # nobody goes there
    weights, chosen = scores.topk(k, 1)
    if invalid:
        chosen[3, 0] = EXPERTS + 1
    weights = weights.to(DEVICE).requires_grad_()
    return weights, sort_rows(weights, chosen.to(DEVICE), EXPERTS)


def kept_by(function):
    """Return the result, and how many bytes backward's tensors take."""
    sizes = {}

    def note(t):
        sizes[t.data_ptr()] = t.nbytes
        return t

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        return function(), sizes


@types
@pytest.mark.parametrize("k", (1, 3))
@pytest.mark.parametrize("precision", (None, "fp8"))
def test_gathered_rows(k, dtype, precision):
    x, weight = numbers(TOKENS, K, seed=1, dtype=dtype), numbers(EXPERTS, INNER, K, seed=2, dtype=dtype)
    _, routes = routes_of(k)
    dy = numbers(TOKENS * k, INNER, seed=3, dtype=dtype).detach()
    found, kept = kept_by(lambda: gathered_grouped_linear(x, weight, routes, GroupedOptions(precision)))
    expected = grouped_linear(scatter_tokens(x, routes), weight, routes.ends, precision)
    for asked in ((x, weight), (x,), (weight,)):
        both = [torch.autograd.grad(y, asked, dy, retain_graph=True) for y in (found, expected)]
        assert all(torch.equal(*pair) for pair in zip(*both, strict=True))
    assert torch.equal(found, expected)
    assert sum(kept.values()) <= x.nbytes + weight.nbytes + routes.tokens.nbytes + routes.rows.nbytes + routes.ends.nbytes


def block(module, dtype=FP32, k=2):
    """Whether a block of experts has the values and gradients of a loop over tokens in fp64."""
    x, (weights, routes) = numbers(TOKENS, K, seed=1, dtype=dtype), routes_of(k)
    up, down = numbers(EXPERTS, 2 * INNER, K, seed=2, dtype=dtype), numbers(EXPERTS, K, INNER, seed=3, dtype=dtype)
    dy = numbers(TOKENS, K, seed=4, dtype=dtype).detach()
    h = module.gathered_grouped_linear(x, up, routes, GroupedOptions())
    y = gather_tokens(module.activation_grouped_linear(h, down, routes.ends, "swiglu", token_weight=routes.weights), routes)
    found = [y.detach(), *torch.autograd.grad(y, (x, up, down, weights), dy)]
    wide = [t.detach().double().requires_grad_() for t in (x, up, down, weights)]
    expert = torch.searchsorted(routes.ends, torch.arange(TOKENS * k, device=DEVICE, dtype=torch.int32), right=True)
    total = torch.zeros(TOKENS, K, dtype=torch.float64, device=DEVICE)
    for row, token in enumerate(routes.tokens.tolist()):
        (j,) = (routes.rows[token] == row).nonzero()[0].tolist()
        gate, linear = (wide[1][expert[row]] @ wide[0][token]).chunk(2)
        part = wide[2][expert[row]] @ (torch.nn.functional.silu(gate) * linear) * wide[3][token, j]
        total = total.index_add(0, torch.tensor([token], device=DEVICE), part[None])
    exact = [total.detach(), *torch.autograd.grad(total, wide, dy.double())]
    errors = [((a.double() - b).norm() / b.norm()).item() for a, b in zip(found, exact, strict=True)]
    return max(errors) < (2e-2 if dtype is BF16 else 2e-6)


@backends
@types
def test_a_block(dtype, backend):
    with onepass.use_backend(backend):
        assert block(blocks, dtype)


@backends
def test_the_activation_is_made_again(backend):
    """What is kept is h, the token's weights and the layer's."""
    _, routes = routes_of(2)
    h, down = numbers(TOKENS * 2, 2 * INNER, seed=1, dtype=BF16), numbers(EXPERTS, K, INNER, seed=3, dtype=BF16)
    by_row = numbers(TOKENS * 2, seed=5)
    with onepass.use_backend(backend):
        _, kept = kept_by(lambda: activation_grouped_linear(h, down, routes.ends, "swiglu", token_weight=by_row))
    assert set(kept) == {t.data_ptr() for t in (h, down, by_row, routes.ends)}


def test_an_expert_that_there_is_not():
    """A token that goes there is NaN, and no other is touched."""
    x, up = numbers(TOKENS, K, seed=1), numbers(EXPERTS, K, K, seed=2)
    (weights, routes), (_, valid) = routes_of(2, invalid=True), routes_of(2)
    found, expected = (gather_tokens(gathered_grouped_linear(x, up, each, GroupedOptions()), each) for each in (routes, valid))
    assert found[3].isnan().all()
    others = [token for token in range(TOKENS) if token != 3]
    torch.testing.assert_close(found[others], expected[others])
    (grad,) = torch.autograd.grad(routes.weights.sum(), weights)
    assert grad[3, 0].isnan()
    assert grad.isnan().sum() == 1


MUTANTS = {
    "backward takes x's first rows": (gathered_rows, "GatheredRows.rows_again", "self._gathered(*kept)", "kept[0]"),
    "dx of one row a token": (gathered_rows, "GatheredRows.backward", "(drows, kept[2], None)", "(drows, kept[2][:, :1], None)"),
    "the token's weight left out": (activation_grouped, "multiply_activated_rows", "if token_weight is None", "if True"),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_found(name):
    try:
        right = block(mutate(*MUTANTS[name], entry=blocks))
    except RuntimeError:  # shapes that no product takes
        return
    assert not right


def test_a_copy_without_a_change_passes():
    assert block(copy_package(blocks))
