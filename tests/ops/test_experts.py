"""experts beside its formula in fp64: layouts of weights, uneven routing, LoRA, main_grad, what is kept, NaN, errors, mutants."""

from functools import partial

import pytest
import torch
from ops.calls import backends, equal, refused, relative
from ops.oracle import DEVICE

import onepass
from onepass.ops.experts import expert_bias
from onepass.ops.experts import experts as module
from onepass.ops.experts.experts import experts_reference
from onepass.product import grouped
from onepass.testing.interpreter_bounds import OutOfBoundsError
from onepass.testing.mutants import copy_package, mutate
from onepass.testing.poison import poisoned

E, T, H, INNER = 5, 37, 32, 48
FP32, BF16 = torch.float32, torch.bfloat16
GPT_OSS = {"activation": "quick_geglu", "clamp": 1.5, "linear_offset": 1.0, "interleaved": True, "transposed": True}


def numbers(*shape, seed=0, scale=1.0, dtype=FP32):
    drawn = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale
    return drawn.to(DEVICE, dtype).requires_grad_()


def routing(k=2, tokens=T, experts=E, kind="random"):
    """Return each token's experts and their weights. Of "uneven" ones nearly all tokens go to the first."""
    generator = torch.Generator().manual_seed(k)
    scores = torch.rand(tokens, experts, generator=generator)
    if kind == "uneven":
        scores[:-1, 0] += 2
        scores[:, 2] -= 2
    weights, chosen = scores.topk(k, 1)
    return chosen.to(DEVICE), (weights * (kind != "zero")).to(DEVICE).requires_grad_()


def call_of(name, dtype=FP32):
    """Return what a call takes: positional tensors, chosen experts, and options with tensors by their names."""
    options, k, tokens, experts, kind, more = CASES[name]
    parts = 1 if options.get("activation") == "gelu" else 2
    shapes = (H, parts * INNER), (INNER, H)
    if not options.get("transposed"):
        shapes = tuple((n, m) for m, n in shapes)
    up, down = (numbers(experts, *s, seed=i, scale=0.2, dtype=dtype) for i, s in enumerate(shapes, 1))
    named, of_lora = {}, {}
    if "bias" in more:
        named["up_bias"] = numbers(experts, parts * INNER, seed=5, dtype=dtype)
        named["down_bias"] = numbers(experts, H, seed=6, dtype=dtype)
    if "shared" in more:
        named["shared"] = numbers(tokens, H, seed=7, dtype=dtype)
    for i, (layer, (N, K)) in enumerate({"up": (parts * INNER, H), "down": (H, INNER)}.items()):
        if f"lora of {layer}" in more:
            rank = more[f"lora of {layer}"]
            of_lora[f"{layer}.a"] = numbers(experts, rank, K, seed=8 + i, scale=0.3)
            of_lora[f"{layer}.b"] = numbers(experts, N, rank, seed=10 + i, scale=more.get("b", 0.3))
    if of_lora:
        up.requires_grad_("trained" in more), down.requires_grad_("trained" in more)
    chosen, weights = routing(k, tokens, experts, kind)
    return {"x": numbers(tokens, H, dtype=dtype), "up": up, "down": down, "weights": weights, **named, **of_lora}, chosen, options


CASES = {
    "plain": ({}, 2, T, E, "random", {}),
    "ungated": ({"activation": "gelu"}, 2, T, E, "random", {}),
    "gpt-oss": (GPT_OSS, 2, T, E, "random", {"bias": 1}),
    "transposed": ({"transposed": True, "activation": "geglu"}, 3, T, E, "random", {}),
    "interleaved": ({"interleaved": True}, 1, T, E, "random", {"bias": 1, "shared": 1}),
    "one expert": ({}, 1, T, 1, "random", {"shared": 1}),
    "all experts": ({}, E, T, E, "random", {"bias": 1}),
    "one token": ({}, 2, 1, E, "random", {"bias": 1}),
    "uneven": ({}, 2, 1500, E, "uneven", {"bias": 1}),
    "weights of 0": ({}, 2, T, E, "zero", {"bias": 1}),
    "lora": ({}, 2, T, E, "random", {"lora of up": 4, "lora of down": 4}),
    "lora beside weights": (GPT_OSS, 2, T, E, "uneven", {"lora of up": 1, "lora of down": 17, "trained": 1, "bias": 1}),
    "lora of up alone, b of 0": ({}, 2, T, E, "random", {"lora of up": 8, "b": 0.0}),
    "lora of down alone": ({"activation": "gelu"}, 3, T, E, "random", {"lora of down": 3}),
}


def with_lora(tensors, record=onepass.LoRA):
    plain = {name: t for name, t in tensors.items() if "." not in name}
    pair = [record(tensors[f"{n}.a"], tensors[f"{n}.b"], 0.5) if f"{n}.a" in tensors else None for n in ("up", "down")]
    return plain | ({"lora": tuple(pair)} if any(pair) else {})


def incoming(y):
    return torch.linspace(-1, 1.5, y.numel(), device=DEVICE, dtype=torch.float64).view(y.shape).to(y.dtype)


def results(function, tensors, chosen, options, record=onepass.LoRA):
    """Return y and the gradients, by name."""
    y = function(chosen=chosen, **with_lora(tensors, record), **options)
    asked = {name: t for name, t in tensors.items() if t.requires_grad}
    return {"y": y.detach()} | dict(zip(asked, torch.autograd.grad(y, tuple(asked.values()), incoming(y)), strict=True))


def is_right(by, name, dtype=FP32, **more):
    """Whether no result is further from the formula in fp64 than 1.25 times the formula in this type."""
    tensors, chosen, options = call_of(name, dtype)
    wide = {n: t.detach().double().requires_grad_(t.requires_grad) for n, t in tensors.items()}
    exact = results(experts_reference, wide, chosen, options)
    by_formula = results(experts_reference, tensors, chosen, options)
    found = results(partial(by.experts, **more), tensors, chosen, options, by.LoRA)
    floor, bad = 5e-3 if dtype is BF16 else 5e-7, {}
    for n, truth in exact.items():
        if not truth.any():
            bad |= {n: "not 0"} if found[n].any() else {}
            continue
        error = relative(found[n], truth)
        if not error <= max(1.25 * relative(by_formula[n], truth), floor):
            bad[n] = error, relative(by_formula[n], truth)
    assert not bad or by is not module, bad
    return not bad


@backends
@pytest.mark.parametrize("dtype", (FP32, BF16), ids=str)
@pytest.mark.parametrize("name", CASES)
def test_within_the_budget(name, dtype, backend):
    assert is_right(module, name, dtype, backend=backend)


@pytest.mark.parametrize("name", ("plain", "gpt-oss", "lora"))
def test_recomputed_it_has_the_same_bits_and_keeps_x(name):
    tensors, chosen, options = call_of(name, BF16)
    kept = {}
    found = []
    for recompute in (False, True):
        sizes = {}
        with torch.autograd.graph.saved_tensors_hooks(lambda t, s=sizes: s.update({t.data_ptr(): t.nbytes}) or t, lambda t: t):
            onepass.experts(chosen=chosen, recompute=recompute, **with_lora(tensors), **options)
        kept[recompute] = sum(sizes.values()) - sum(t.nbytes for t in tensors.values() if t.data_ptr() in sizes)
        found.append(results(partial(onepass.experts, recompute=recompute), tensors, chosen, options))
    assert equal(*(list(each.values()) for each in found))
    of_h = 2 * 2 * T * 2 * INNER  # bytes of up's result
    assert kept[False] >= of_h > 2 * kept[True]


@pytest.mark.parametrize("name", ("plain", "gpt-oss", "lora beside weights"))
def test_main_grads_take_the_gradients(name):
    tensors, chosen, options = call_of(name)
    expected = results(onepass.experts, tensors, chosen, options)
    for t in tensors.values():
        t.main_grad = torch.full_like(t, 3.0, dtype=FP32, requires_grad=False)
        t.grad_added_to_main_grad = False
    y = onepass.experts(chosen=chosen, **with_lora(tensors), **options)
    y.backward(incoming(y))
    for n, t in tensors.items():
        if n in ("x", "weights", "shared"):
            torch.testing.assert_close(t.grad, expected[n])
        else:
            assert t.grad_added_to_main_grad
            torch.testing.assert_close(t.main_grad, expected[n] + 3, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", ("plain", "gpt-oss", "lora"))
def test_eight_bits_are_near(name):
    tensors, chosen, options = call_of(name, BF16)
    near = results(partial(onepass.experts, precision="fp8"), tensors, chosen, options)
    plain = results(onepass.experts, tensors, chosen, options)
    assert all(relative(near[n], plain[n].double()) < 0.2 for n in plain)
    assert DEVICE == "cuda" or not equal([near["y"]], [plain["y"]])  # on a GPU sizes this small stay in 16 bits


def test_int32_and_a_second_call_have_the_same_bits():
    tensors, chosen, options = call_of("gpt-oss", BF16)
    first = results(onepass.experts, tensors, chosen, options)
    with poisoned():
        assert equal(list(first.values()), list(results(onepass.experts, tensors, chosen.int(), options).values()))


def test_an_expert_that_comes_twice_counts_twice():
    tensors, chosen, options = call_of("gpt-oss")
    chosen[:, 1] = chosen[:, 0]
    once = onepass.experts(**tensors | {"weights": tensors["weights"].sum(1, keepdim=True)}, chosen=chosen[:, :1], **options)
    torch.testing.assert_close(onepass.experts(**tensors, chosen=chosen, **options), once)


@pytest.mark.parametrize("name", ("gpt-oss", "lora", "interleaved"))
def test_nan_of_a_token_stays_its_own(name):
    tensors, chosen, options = call_of(name)
    plain = results(onepass.experts, tensors, chosen, options)
    with torch.no_grad():
        tensors["x"][3] = torch.nan
    found = results(onepass.experts, tensors, chosen, options)
    others = [t for t in range(T) if t != 3]
    assert found["y"][3].isnan().all()
    for n in ("y", "x", "weights"):
        assert equal([found[n][others]], [plain[n][others]])


def test_a_single_token_without_a_dimension_of_tokens():
    tensors, chosen, options = call_of("one token")
    expected = results(onepass.experts, tensors, chosen, options)
    tensors |= {name: tensors[name].detach()[0].requires_grad_() for name in ("x", "weights")}
    found = results(onepass.experts, tensors, chosen[0], options)
    assert equal([t.flatten() for t in found.values()], [t.flatten() for t in expected.values()])


def test_no_tokens():
    tensors, _, options = call_of("gpt-oss")
    tensors |= {"x": numbers(0, H), "weights": numbers(0, 2)}
    chosen = torch.empty(0, 2, dtype=torch.int64, device=DEVICE)
    found = results(onepass.experts, tensors, chosen, options)
    assert found["y"].shape == (0, H)
    assert not any(found[n].any() for n in ("up", "down", "up_bias", "down_bias"))


def test_an_expert_that_there_is_not():
    tensors, chosen, options = call_of("gpt-oss")
    chosen[4, 1] = E
    call = partial(onepass.experts, chosen=chosen, **tensors, **options)
    if DEVICE == "cuda":
        y = call()
        assert y[4].isnan().all()
        assert y.isnan().sum() == H
    with onepass.validate(), pytest.raises(ValueError, match=f"chosen must be from 0 to 4, of 5 experts, but there is {E}"):
        call()
    chosen[4, 1] = -1
    with onepass.validate(), pytest.raises(ValueError, match="but there is -1"):
        call()


def test_errors():
    tensors, chosen, _ = call_of("plain")
    x, up, down, weights = tensors.values()
    given = x, up, down, chosen, weights
    lora = onepass.LoRA(numbers(E, 2, H), numbers(E, 2 * INNER, 2))
    for options, error, words in (
        ({"interleaved": True, "activation": "gelu"}, ValueError, "interleaved must be False for 'gelu'"),
        ({"transposed": True}, ValueError, "up must have shape (E, hidden size, inner size) of x's hidden size 32"),
        ({"up_bias": numbers(2 * INNER)}, ValueError, "up_bias must have shape (5, 96), but has (96,)"),
        ({"shared": numbers(T, 3)}, ValueError, "shared must have shape (37, 32), but has (37, 3)"),
        ({"lora": lora}, TypeError, "lora must be None or a pair, of up and of down"),
        ({"lora": (None, lora)}, ValueError, "lora's down.a must have shape (5, 2, 48), but has (5, 2, 32)"),
        ({"lora": (lora._replace(dropout=0.1), None)}, ValueError, "lora's up.dropout must be left out of experts"),
        ({"lora": (3, None)}, TypeError, "lora's up must be an onepass.LoRA or None, but is a int"),
        ({"precision": "fp4"}, ValueError, "precision must be"),
    ):
        refused(onepass.experts, given, options, error, [words])
    for given, error, words in (
        ((x, up, down, chosen.float(), weights), TypeError, "chosen must be a tensor of torch.int32 or torch.int64"),
        ((x, up, down, chosen[:3], weights[:3]), ValueError, "chosen must have shape (37, 'k'), as x's tokens"),
        ((x, up, down, chosen, weights[:, :1]), ValueError, "weights must have chosen's shape (37, 2)"),
        ((x, up[:, :3], down, chosen, weights), ValueError, "up must have an even inner size for 'swiglu'"),
        ((x, up, down[:3], chosen, weights), ValueError, "down must have shape (5, 32, 48)"),
    ):
        refused(onepass.experts, given, {}, error, [words])


BIAS, LAYER, MULTIPLY = (
    (expert_bias, "_ExpertBias.backward"), (grouped, "_GroupedLinear.backward"), (grouped, "_forward")
)  # fmt: skip
MUTANTS = {
    "down's bias without its weight": (module, "_run", "cast(weights, y.dtype), chosen,", "torch.ones_like(weights), chosen,"),
    "up's adapter for down": (module, "_run", "how._replace(lora=of_down", "how._replace(lora=of_up"),
    "no shared expert": (module, "_run", "routes, start, written", "routes, None, written"),
    "no weights": (module, "_run", "_options(given), by_row,", "_options(given), None,"),
    "halves for pairs": (module, "_options", 'interleaved=given["interleaved"]', "interleaved=False"),
    "a bias's gradient without the weight": (*BIAS, "lora_gradient(factors,", "lora_gradient(factors.sign(),"),
    "a bias of tokens, its gradient as of rows": (*BIAS, "None, ends is not None, NO", "None, True, NO"),
    "a bias of the first experts": (expert_bias, "add_weighted_bias", "chosen[..., None] ==", "chosen[:, :1, None] =="),
    "no gradient of weights by a bias": (*BIAS, "if column is not None", "if False"),
    "a transposed weight's gradient as of others": (*LAYER, "if product.transposed else (dy, rows)", "if False else (dy, rows)"),
    "x's gradient without LoRA": (*LAYER, "if u is not None:", "if False:"),
    "LoRA's scale left out of backward": (*LAYER, "b, ends, product)", "b, ends, product._replace(scale=1.0))"),
    "LoRA's scale left out": (*MULTIPLY, "a.mT, ends, product)", "a.mT, ends, product._replace(scale=1.0))"),
}
SEARCHED = "gpt-oss", "interleaved", "lora", "lora of down alone", "transposed"


@pytest.mark.skipif(DEVICE == "cuda", reason="a kernel that reads elsewhere would end a GPU's process")
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_found(name):
    mutant = mutate(*MUTANTS[name], entry=module)
    try:
        right = all(is_right(mutant, case) for case in SEARCHED)
    except (OutOfBoundsError, RuntimeError, ValueError):  # shapes that no product takes, and no gradient
        return
    assert not right


def test_a_copy_without_a_change_passes():
    copy = copy_package(module)
    assert all(is_right(copy, case) for case in SEARCHED)
