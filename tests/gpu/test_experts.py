"""What only a GPU shows of experts: real sizes and PyTorch's grouped products; nobody waits; graphs; the compiler; main_grad."""

import pytest
import torch
from gpu.calls import captured, memory_goes_back, nobody_waits, other_stream
from ops.calls import equal, relative

import onepass
from onepass.ops.experts.experts import experts_reference

__all__ = ["memory_goes_back"]
pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"), other_stream]
BF16 = torch.bfloat16
GPT_OSS = {"activation": "quick_geglu", "clamp": 7.0, "linear_offset": 1.0, "interleaved": True, "transposed": True}
SIZES = {  # tokens, hidden and inner size, experts, of a token, options
    "qwen": (2048, 2048, 768, 128, 8, {}), "mixtral": (512, 1024, 3584, 8, 2, {}), "gpt-oss": (1024, 2880, 2880, 32, 4, GPT_OSS),
}  # fmt: skip
sizes = pytest.mark.parametrize("size", SIZES)


def numbers(*shape, scale=1.0, seed=0, dtype=BF16):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, device="cuda", generator=generator).mul_(scale).to(dtype).requires_grad_()


def inputs(size, lora=0):
    """Return tensors by name, chosen experts, options, and y's gradient."""
    T, H, inner, E, k, options = SIZES[size]
    shapes = ((E, H, 2 * inner), (E, inner, H)) if options else ((E, 2 * inner, H), (E, H, inner))
    weights, chosen = numbers(T, E, seed=1, dtype=torch.float32).detach().softmax(-1).topk(k)
    given = {"x": numbers(T, H), "weights": weights.requires_grad_()}
    for i, (name, shape) in enumerate(zip(("up", "down"), shapes, strict=True), 2):
        given[name] = numbers(*shape, scale=shape[1 if options else 2] ** -0.5, seed=i)
    if options:
        given |= {"up_bias": numbers(E, 2 * inner, seed=4), "down_bias": numbers(E, H, seed=5)}
    if lora:
        given["up"].requires_grad_(False), given["down"].requires_grad_(False)
        given |= {"up.a": numbers(E, lora, H, scale=0.02, seed=6), "up.b": numbers(E, 2 * inner, lora, scale=0.2, seed=7)}
        given |= {"down.a": numbers(E, lora, inner, scale=0.02, seed=8), "down.b": numbers(E, H, lora, scale=0.2, seed=9)}
    return given, chosen, options, numbers(T, H, seed=10).detach()


def call(function, given, chosen, options):
    plain = {name: t for name, t in given.items() if "." not in name}
    if "up.a" in given:
        plain["lora"] = tuple(onepass.LoRA(given[f"{n}.a"], given[f"{n}.b"], 2.0) for n in ("up", "down"))
    return function(chosen=chosen, **plain, **options)


def step(function, given, chosen, options, dy):
    y = call(function, given, chosen, options)
    return [y.detach(), *torch.autograd.grad(y, [t for t in given.values() if t.requires_grad], dy.to(y.dtype))]


def test_weights_that_begin_between_multiples_of_16_bytes():
    """As views of a larger tensor may: PyTorch's grouped product raises for them."""
    given, chosen, options, dy = inputs("mixtral")
    expected = step(onepass.experts, given, chosen, options, dy)
    for name in ("up", "down"):
        wide = given[name].new_zeros(*given[name].shape[:-1], given[name].shape[-1] + 3)
        given[name] = wide[..., 1:-2].copy_(given[name].detach()).requires_grad_()
    for found, one in zip(step(onepass.experts, given, chosen, options, dy), expected, strict=True):
        assert relative(found, one) < 1e-2


@pytest.mark.parametrize("lora", (0, 16))
@sizes
def test_within_the_budget(size, lora):
    """Of a part of the experts, whose formula in fp64 fits: tokens of others have weights of 0."""
    given, chosen, options, dy = inputs(size, lora)
    given["x"].data, given["weights"].data, chosen, dy = given["x"][:256], given["weights"][:256], chosen[:256], dy[:256]
    wide = {name: t.detach().double().requires_grad_(t.requires_grad) for name, t in given.items()}
    exact, formula, ours = (
        step(function, tensors, chosen, options, dy)
        for function, tensors in ((experts_reference, wide), (experts_reference, given), (onepass.experts, given))
    )
    for truth, eager, found in zip(exact, formula, ours, strict=True):
        assert relative(found, truth) <= max(1.25 * relative(eager, truth), 5e-3)


@sizes
def test_the_same_bits_and_nobody_waits(size):
    everything = inputs(size)
    first = step(onepass.experts, *everything)
    with nobody_waits():
        again = step(onepass.experts, *everything)
    assert equal(first, again)


@sizes
def test_in_a_graph(size):
    given, chosen, options, dy = inputs(size)
    results, graph = captured(lambda: step(onepass.experts, given, chosen, options, dy))
    with torch.no_grad():
        given["x"].copy_(given["x"].flip(0))
        chosen.copy_(chosen.flip(0))
    graph.replay()
    assert equal(results, step(onepass.experts, given, chosen, options, dy))


@sizes
def test_compiled(size):
    torch._dynamo.reset()
    everything = inputs(size)
    compiled = torch.compile(onepass.experts, fullgraph=True)
    found, expected = (step(function, *everything) for function in (compiled, onepass.experts))
    assert all(relative(*pair) < 1e-2 for pair in zip(found, [t.double() for t in expected], strict=True))


def test_an_expert_that_there_is_not_is_nan():
    given, chosen, options, _ = inputs("gpt-oss")
    chosen[5, 2] = 32
    y = call(onepass.experts, given, chosen, options)
    assert y[5].isnan().all()
    assert y.isnan().sum() == y.shape[1]


def test_main_grads_take_the_gradients():
    given, chosen, options, dy = inputs("gpt-oss")
    expected = dict(zip(given, step(onepass.experts, given, chosen, options, dy)[1:], strict=True))
    for t in given.values():
        t.main_grad = torch.ones_like(t, dtype=torch.float32, requires_grad=False)
    call(onepass.experts, given, chosen, options).backward(dy)
    for name in ("up", "down", "up_bias", "down_bias"):
        assert given[name].grad is None
        assert relative(given[name].main_grad - 1, expected[name].double()) < 5e-3
