"""A linear layer's product in eight bits: how far it is from fp64, who gets which gradient, and when codes are made anew."""

import math

import pytest
import torch
import torch.nn.functional as F
from ops.fp8_calls import LINEAR, decibels, fp8_names
from torch.utils.checkpoint import checkpoint

import onepass
from onepass.kernels.language import triton
from onepass.parallel import DeferredWgrad, MainGrads
from onepass.product import function
from onepass.product.fp8 import product as module
from onepass.product.fp8 import weight as fp8_weight
from onepass.product.fp8.weight import FP8Weight
from onepass.product.precision import unfit_for_fp8
from onepass.runtime.fp8_recipe import FP8Recipe
from onepass.testing.mutants import mutate

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
RECIPES = {
    "delayed": FP8Recipe(),
    "delayed, e4m3": FP8Recipe(format="e4m3"),
    "current": FP8Recipe(scaling="current"),
    "by row": FP8Recipe(scaling="row"),
    "16-bit wgrad": FP8Recipe(wgrad=False),
}
recipes = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)


def drawn(tokens=75, K=64, N=96, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(1)
    weight = torch.nn.Parameter((torch.randn(N, K, generator=generator) / 8).to(DEVICE, dtype))
    bias = torch.nn.Parameter(torch.randn(N, generator=generator).to(DEVICE, dtype))
    x, dy = (torch.randn(3, tokens // 3, width, generator=generator).to(DEVICE, dtype) for width in (K, N))
    return x.requires_grad_(), weight, bias, dy


def exact_results(x, weight, bias, dy):
    leaves = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    y = F.linear(*leaves)
    y.backward(dy.double())
    return y.detach(), *(t.grad for t in leaves)


def fp8_product(x, weight, bias, state, layout=None, deferred=None, library=LINEAR):
    return library.multiply_rows(x, weight, bias, fp8_names(library)["FP8Product"](state, layout, deferred), x.dtype)


def results(x, weight, bias, dy, state):
    y = fp8_product(x, weight, bias, state)
    return y.detach(), *torch.autograd.grad(y, (x, weight, bias), dy)


@recipes
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)
def test_results_are_near_fp64(recipe, dtype):
    x, weight, bias, dy = drawn(dtype=dtype)
    for ours, exact, least in zip(
        results(x, weight, bias, dy, FP8Weight(weight, recipe)), exact_results(x, weight, bias, dy), (28, 22, 22, 40), strict=True
    ):
        assert decibels(ours, exact) > least
        assert ours.dtype == dtype


@recipes
def test_magnitudes_of_any_size_keep_their_precision(recipe):
    x, weight, bias, dy = drawn(dtype=torch.float32)
    bias.data.zero_()
    sizes = 1e-12, 1e6, 1e9
    with torch.no_grad():
        x, weight.data, dy = x * sizes[0], weight * sizes[1], dy * sizes[2]
    x.requires_grad_()
    for ours, exact in zip(
        results(x, weight, bias, dy, FP8Weight(weight, recipe))[:3], exact_results(x, weight, bias, dy)[:3], strict=True
    ):
        assert decibels(ours, exact) > 20


@recipes
def test_main_grad_takes_each_microbatch(recipe):
    x, weight, bias, dy = drawn()
    weight.main_grad = torch.ones(weight.shape, device=DEVICE)
    bias.main_grad = torch.ones(bias.shape, device=DEVICE)
    state = FP8Weight(weight, recipe)
    for _ in range(3):
        fp8_product(x, weight, bias, state).backward(dy)
    _, dx, dweight, dbias = exact_results(x, weight, bias, dy)
    assert weight.grad is None and bias.grad is None
    assert decibels(weight.main_grad - 1, 3 * dweight) > 22
    assert decibels(bias.main_grad - 1, 3 * dbias) > 40
    assert decibels(x.grad, 3 * dx) > 22


def accumulated(recipe, later=None):
    """Return main_grad after two microbatches of unlike sizes, and a step with other scales before the flush."""
    x, weight, _, dy = drawn()
    weight.main_grad = torch.zeros(weight.shape, device=DEVICE)
    weight.grad_added_to_main_grad = False
    state = FP8Weight(weight, recipe)
    for size in (1, 0.25):
        fp8_product(x.detach() * size, weight, None, state, None, later).backward(dy * size)
    assert weight.grad_added_to_main_grad and not weight.grad.any()
    kept = weight.main_grad.clone()
    for size in (64, 4096):
        with torch.no_grad():
            weight.mul_(2)
        y = fp8_product((x.detach() * size).requires_grad_(), weight.detach(), None, state)
        y.backward(dy * size)
    if later is not None:
        later.flush()
    return kept, weight.main_grad


@recipes
def test_a_deferred_gradient_is_the_one_that_backward_makes(recipe):
    """It keeps a byte a number where its product is in eight bits, and the scales of its own step."""
    _, at_once = accumulated(recipe)
    later = DeferredWgrad()
    flush, sizes = later.flush, []
    later.flush = lambda: (sizes.append(later.nbytes), flush())
    kept, flushed = accumulated(recipe, later)
    assert not kept.any() and at_once.any() and flushed.equal(at_once)
    assert sizes[0] <= 2 * (80 * (64 + 96) + 64) if recipe.has_wgrad else sizes[0] == 2 * 2 * 75 * (64 + 96)


@recipes
def test_a_limit_defers_the_first_and_autograd_grad_takes_its_own(recipe):
    x, weight, bias, dy = drawn()
    weight.main_grad = torch.zeros(weight.shape, device=DEVICE)
    state, later = FP8Weight(weight, recipe), DeferredWgrad(limit=1)
    for _ in range(2):
        fp8_product(x, weight, bias, state, None, later).backward(dy)
    once = weight.main_grad.clone()
    assert len(later) == 1 and once.any()
    later.flush()
    assert weight.main_grad.equal(2 * once)
    y = fp8_product(x, weight, bias, state, None, later)
    (grad,) = torch.autograd.grad(y, weight, dy)
    assert not len(later) and decibels(grad, once) > 40


@pytest.mark.parametrize("put_off", (False, True))
@pytest.mark.parametrize("release", (False, True))
@pytest.mark.parametrize("kind", (torch.float32, torch.bfloat16), ids=str)
def test_main_grads_of_any_kind(kind, release, put_off):
    """A step's first gradient is written by the product where main_grad's memory comes with it."""
    x, weight, _, dy = drawn()
    main_grads = MainGrads([weight], dtype=kind, release=release)
    state, later = FP8Weight(weight, FP8Recipe()), DeferredWgrad() if put_off else None
    for _ in range(2):
        main_grads.zero_()
        with main_grads.accumulate():
            fp8_product(x, weight, None, state, None, later).backward(dy)
        fp8_product(x, weight, None, state, None, later).backward(dy)
        if later is not None:
            later.flush()
        main_grads.finish()
        exact = 2 * exact_results(x, weight, torch.zeros(96, device=DEVICE), dy)[2]
        assert decibels(weight.main_grad, exact) > 22


@recipes
def test_who_asks_for_nothing_costs_nothing(recipe):
    x, weight, bias, dy = drawn()
    whole = results(x, weight, bias, dy, FP8Weight(weight, recipe))
    frozen = weight.detach()
    y = fp8_product(x, frozen, bias.detach(), FP8Weight(frozen, recipe))
    assert y.equal(whole[0])
    assert torch.autograd.grad(y, x, dy)[0].equal(whole[1])
    y = fp8_product(x.detach(), weight, None, FP8Weight(weight, recipe))
    assert torch.autograd.grad(y, weight, dy)[0].equal(whole[2])


@recipes
def test_equal_calls_give_equal_bits_also_under_checkpointing(recipe):
    x, weight, bias, dy = drawn()
    first, second = (results(x, weight, bias, dy, FP8Weight(weight, recipe)) for _ in range(2))
    again = FP8Weight(weight, recipe)
    y = checkpoint(fp8_product, x, weight, bias, again, use_reentrant=False)
    third = y.detach(), *torch.autograd.grad(y, (x, weight, bias), dy)
    for a, b, c in zip(first, second, third, strict=True):
        assert a.equal(b) and a.equal(c)


def test_delayed_scales_follow_after_an_update():
    x, weight, bias, dy = drawn()
    state = FP8Weight(weight, FP8Recipe(amax_history_len=1))
    results(x, weight, bias, dy, state)
    with torch.no_grad():
        weight.mul_(2)
    results(x.detach().mul(100).requires_grad_(), weight, bias, dy, state)
    assert state.scales.counts()[0, 0] > 0  # the scale is that of the first
    before = state.scales.factors[:, 0].clone()
    with torch.no_grad():
        weight.mul_(2)
    large = x.detach().mul(100).requires_grad_()
    found = results(large, weight, bias, dy, state)
    assert (state.scales.factors[:, 0] < before).tolist() == [True, False, False]
    assert decibels(found[0], exact_results(large, weight, bias, dy)[0]) > 28


def test_results_can_be_written_in_place():
    x, *_ = drawn()
    square = torch.nn.Parameter(torch.eye(64, device=DEVICE, dtype=x.dtype))
    for product in (
        onepass.linear,
        lambda x, weight, bias, **how: onepass.norm_linear(x, None, weight, bias, **how),
        lambda x, weight, bias, **how: onepass.activation_linear(x, weight, bias, "gelu", **how),
    ):
        y = product(x, square, None, precision="fp8")
        y.add_(1).sum().backward()


def test_an_update_between_forward_and_backward_raises():
    x, weight, bias, dy = drawn()
    state = FP8Weight(weight, FP8Recipe())
    y = fp8_product(x, weight, bias, state)
    with torch.no_grad():
        weight.mul_(2)
    fp8_product(x, weight, bias, state)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation|must not be updated"):
        y.backward(dy)


@recipes
def test_nan_and_infinities_never_become_numbers(recipe):
    x, weight, bias, dy = drawn()
    x.data[0, 3, 5], x.data[1, 2, 7] = math.inf, math.nan
    y, dx, dweight, _ = results(x, weight, bias, dy, FP8Weight(weight, recipe))
    lost = torch.zeros(x.shape[:2], dtype=torch.bool, device=DEVICE)
    lost[0, 3] = lost[1, 2] = True
    assert (~y[lost].isfinite()).all() and y[~lost].isfinite().all() and dx.isfinite().all()
    assert (~dweight[:, [5, 7]].isfinite()).all()


def test_sizes_that_no_eight_bit_product_takes_are_named():
    x, weight, *_ = drawn(K=72)
    assert unfit_for_fp8(x, weight) == "the weight's sizes, 96 x 72, are not multiples of 16"
    x, weight, *_ = drawn()
    assert unfit_for_fp8(x, weight) is None
    assert unfit_for_fp8(x[:0], weight) == "there is nothing to do"


def test_a_forward_without_gradients_leaves_no_trace():
    x, weight, bias, dy = drawn()
    state = FP8Weight(weight, FP8Recipe())
    before = results(x, weight, bias, dy, state)[0]
    noted = {name: tensor.clone() for name, tensor in state.scales.state_dict().items()}
    with torch.no_grad():
        assert fp8_product(x, weight, bias, state).equal(before)
        fp8_product(x * 100, weight, bias, state)
    assert all(tensor.equal(noted[name]) for name, tensor in state.scales.state_dict().items())


MUTANTS = {
    "the scale of an old weight": (
        fp8_weight, "FP8Weight.rows", "codes, _ =", 'factors = self.__dict__.setdefault("old", factors)\n        codes, _ ='
    ),
    "gradients without their scale": (fp8_weight, "_operands", "FP8Operand(across, inverse)", "FP8Operand(across, inverse / 3)"),
    "x's codes at another scale": (module, "start_transposed", "(kept, target), inverse", "(kept, target), 2 * inverse"),
    "the bias twice": (module, "FP8Product.forward", "y.add_(bias)", "y.add_(bias, alpha=2)"),
    "main_grad is not used": (function, "_put", "rows, weight, weight_place,", "rows, weight, None,"),
}


def is_right(library):
    x, weight, bias, dy = drawn()
    weight.main_grad = torch.zeros(weight.shape, device=DEVICE)
    state = fp8_names(library)["fp8_weight"](weight, FP8Recipe(amax_history_len=1))
    found = []
    for _ in range(3):
        x.grad = None
        y = fp8_product(x, weight, bias, state, library=library)
        y.backward(dy)
        exact = exact_results(x, weight, bias, dy)
        found += [decibels(y.detach(), exact[0]) > 28, decibels(x.grad, exact[1]) > 22]
        found.append(decibels(weight.main_grad, exact[2]) > 22)
        weight.main_grad.zero_()
        with torch.no_grad():
            weight.mul_(-16)
    return all(found)


@pytest.mark.skipif(triton is None, reason="triton is not installed")
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_found(name):
    assert is_right(LINEAR) and not is_right(mutate(*MUTANTS[name], entry=LINEAR))
