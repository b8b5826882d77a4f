"""Written weights and scales of eight bits on a GPU: in graphs, and where the host learns of a history later than the device."""

import pytest
import torch

import onepass
from onepass import FP8Recipe
from onepass.product.fp8.scales import FP8Scales

if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9):
    pytest.skip("needs a GPU with products in eight bits", allow_module_level=True)

BF16, TOKENS, K, N = torch.bfloat16, 256, 512, 1024
RECIPES = {"delayed": FP8Recipe(), "current": FP8Recipe(scaling="current"), "row": FP8Recipe(scaling="row")}


def layer_of(recipe, weight):
    layer = onepass.nn.Linear(K, N, bias=False, precision=recipe, device="cuda", dtype=BF16)
    with torch.no_grad():
        layer.weight.copy_(weight)
    return layer


def drawn(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to("cuda", BF16)


def microbatch(layer, x, dy):
    layer.weight.grad = None
    y = layer(x)
    (dx,) = torch.autograd.grad(y, x, dy, retain_graph=True)
    y.backward(dy, inputs=[layer.weight])
    return y.detach(), dx, layer.weight.grad


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_a_replay_sees_what_was_written_through_data(recipe):
    """Thirty times as large, too: nothing but the replay runs between the write and the result."""
    x, dy, old, new = drawn(1, TOKENS, K).requires_grad_(), drawn(2, TOKENS, N), drawn(3, N, K) / 16, drawn(4, N, K) * 2
    layer = layer_of(recipe, old)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            microbatch(layer, x, dy)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = microbatch(layer, x, dy)
    for weight in (old, new, old):
        layer.weight.data.copy_(weight)
        graph.replay()
        expected = microbatch(layer_of(recipe, weight), x, dy)
        assert all(map(torch.equal, found, expected))


def test_a_host_that_learns_late_changes_no_bit():
    """Without a wait some calls measure that needn't, which the device passes over."""
    results = []
    for knows in (False, True):
        layer, found = layer_of(RECIPES["delayed"], drawn(3, N, K) / 16), []
        for step in range(4):
            x, dy = (drawn(5 + step, TOKENS, K) * 3**step).requires_grad_(), drawn(9, TOKENS, N) * 2.0**-step
            found += microbatch(layer, x, dy)
            if knows:
                torch.cuda.synchronize()
            with torch.no_grad():
                layer.weight.mul_(0.9)
        results.append(found)
        torch.cuda.synchronize()
        assert all(layer.weight.fp8.scales.stands(role) for role in ("input", "gradient"))
    assert all(map(torch.equal, *results))


def test_a_step_with_a_history_measures_the_weight_alone(monkeypatch):
    measured, stock = [], FP8Scales.measure
    monkeypatch.setattr(FP8Scales, "measure", lambda scales, role, run: measured.append(role) or stock(scales, role, run))
    layer, x, dy = layer_of(RECIPES["delayed"], drawn(3, N, K)), drawn(1, TOKENS, K).requires_grad_(), drawn(2, TOKENS, N)
    for _ in range(3):
        measured.clear()
        layer(x).backward(dy)
        torch.cuda.synchronize()
        with torch.no_grad():
            layer.weight.mul_(0.9)
    assert measured == ["weight"]


def test_underflows_are_counted():
    layer, x, dy = layer_of(RECIPES["delayed"], drawn(3, N, K)), drawn(1, TOKENS, K), drawn(2, TOKENS, N)
    for _ in range(2):
        layer(x).backward(dy)
        with torch.no_grad():
            layer.weight.mul_(1)
    with torch.no_grad():
        layer(x)
        assert onepass.nn.fp8_underflows(layer)["weight"]["input"] == 0
        layer(x * 2.0**-19)
    assert onepass.nn.fp8_underflows(layer)["weight"]["input"] > 0.9 * x.numel() / 2
    assert onepass.nn.fp8_saturations(layer)["weight"]["input"] == 0


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("width", (512, 4096, 16384, 32768))
def test_a_norm_and_an_activation_in_front_of_a_first_call(recipe, width):
    """Until there is a history a pass measures the rows alone: a variant of each kernel that no later step launches."""
    tokens, outputs = 64, 128
    x, gated, norm_weight = drawn(1, tokens, width), drawn(2, tokens, 2 * width), torch.ones(width, device="cuda", dtype=BF16)
    for call, operand in (
        (lambda weight, **how: onepass.norm_linear(x, norm_weight, weight, **how), x),
        (lambda weight, **how: onepass.activation_linear(gated, weight, **how), gated),
    ):
        weight = torch.nn.Parameter(drawn(3, outputs, width) / width**0.5)
        for _ in range(2):
            operand.requires_grad_().grad = None
            y = call(weight, precision=recipe)
            y.backward(drawn(4, tokens, outputs))
            assert (y - call(weight)).norm() < 0.06 * y.norm()


def test_a_default_device():
    """What the host reads later is copied into its own memory."""
    x = drawn(1, TOKENS, K)
    torch.set_default_device("cuda")
    try:
        layer = onepass.nn.Linear(K, N, precision="fp8", dtype=BF16)
        for _ in range(3):
            layer(x).sum().backward()
            with torch.no_grad():
                layer.weight.mul_(1)  # ends a step
    finally:
        torch.set_default_device(None)
    torch.cuda.synchronize()
    assert layer.weight.fp8.scales.stands("input")
