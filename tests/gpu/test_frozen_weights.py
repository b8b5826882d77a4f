"""What only a GPU shows of frozen weights: kernels at real sizes, memory, streams, threads, graphs, and that nobody waits."""

import threading

import pytest
import torch
from gpu.calls import at_the_side, captured, memory_goes_back, nobody_waits, other_stream, taken
from ops.calls import relative
from ops.frozen_calls import BF16, FP16, FP32, four_bits, int8, numbers

import onepass
from onepass import FP8Recipe, LoRA
from onepass.kernels import decode
from onepass.product.frozen.four_bits import FourBitWeight

__all__ = ["memory_goes_back"]
pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"), other_stream]
MIB = 1 << 20
LAYERS = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))  # of Llama 8B


def drawn_four_bits(N, K, seed=0, dtype=BF16, nested=True):
    """Return a weight of random codes, doubly quantised or not: made in no time."""
    generator = torch.Generator("cuda").manual_seed(seed)
    blocks = -(-N * K // 64)
    codes = torch.randint(0, 256, (-(-N * K // 2),), dtype=torch.uint8, device="cuda", generator=generator)
    table = torch.randn(273, device="cuda", generator=generator)
    if nested:
        absmax = torch.randint(0, 256, (blocks,), dtype=torch.uint8, device="cuda", generator=generator)
        scales = {"absmax": absmax, "nested_scale": torch.rand(-(-blocks // 256), device="cuda", generator=generator) / K**0.5}
    else:
        scales = {"absmax": torch.rand(blocks, device="cuda", generator=generator) / K**0.5}
    return FourBitWeight((N, K), dtype, {"codes": codes, "table": table, **scales}, ("nf4", 64, 256 if nested else 1))


def by_formula(weight, first, count):
    """Return some of the weight's numbers in fp32, made on the CPU. `first`: a multiple of 64 * 256."""
    blocks = slice(first // 64, -(-(first + count) // 64))
    nested_scale = weight.tensors.get("nested_scale")
    scales = None if nested_scale is None else nested_scale[first // (64 * 256) : -(-(first + count) // (64 * 256))].cpu()
    codes = weight.codes[first // 2 : -(-(first + count) // 2)].cpu()
    return decode._four_bits_formula(codes, weight.table.cpu(), weight.absmax[blocks].cpu(), scales, count, *weight.options[1:])


@pytest.mark.parametrize("dtype", (BF16, FP16, FP32), ids=str)
@pytest.mark.parametrize("nested", (True, False))
@pytest.mark.parametrize("shape", (*LAYERS, (1001, 777), (1, 1)), ids=str)
def test_four_bits_have_the_bits_of_the_formula(shape, nested, dtype):
    weight = drawn_four_bits(*shape, nested=nested)
    count = shape[0] * shape[1]
    assert torch.equal(weight.decoded(dtype).cpu().flatten(), by_formula(weight, 0, count).to(dtype))


@pytest.mark.parametrize("dtype", (BF16, FP16, FP32), ids=str)
def test_int8_has_the_bits_of_the_formula(dtype):
    for shape in ((4096, 14336), (1001, 777)):
        weight = int8(*shape)
        exact = (weight.data.cpu() * weight.SCB.cpu()[:, None] * 7.874015718698502e-3).to(dtype)
        assert torch.equal(onepass.frozen_weight(weight, dtype=dtype).decoded(dtype).cpu(), exact)


def test_more_than_2_to_the_31_numbers():
    N, K = 65536, 32784
    weight = drawn_four_bits(N, K)
    out = weight.decoded(BF16).view(-1)
    for first in (0, (1 << 31) - 64 * 256, 1 << 31, N * K - 64 * 256):
        assert torch.equal(out[first : first + 64 * 256].cpu(), by_formula(weight, first, 64 * 256).to(BF16))


def step(weight, x, dy, lora=None):
    """Return y, dx and the gradients of an adapter."""
    x = x.detach().requires_grad_()
    y = onepass.linear(x, weight, lora=lora)
    return [y.detach(), *torch.autograd.grad(y, [x, *(lora[:2] if lora is not None else ())], dy)]


def inputs(N, K, M=256):
    lora = LoRA(numbers(16, K, seed=3, scale=K**-0.5).requires_grad_(), numbers(N, 16, seed=4).requires_grad_(), 2.0)
    return numbers(M, K, seed=1, dtype=BF16), numbers(M, N, seed=2, dtype=BF16), lora


@pytest.mark.parametrize("shape", LAYERS, ids=str)
def test_products_have_the_bits_of_the_decoded_weight(shape):
    weight = drawn_four_bits(*shape)
    for lora in (None, inputs(*shape)[2]):
        args = *inputs(*shape)[:2], lora
        assert all(map(torch.equal, step(weight, *args), step(weight.decoded(BF16), *args)))


def test_streams_share_no_memory():
    """Layers of one size on two streams at the same time: each decodes while the other multiplies."""
    N, K = 4096, 4096
    weights, (x, dy, lora) = [drawn_four_bits(N, K, seed) for seed in range(4)], inputs(N, K)
    expected = [step(weight, x, dy, lora) for weight in weights]
    streams, found = [torch.cuda.Stream() for _ in range(2)], {0: [], 1: []}
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    for _ in range(10):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                found[i].append([step(weight, x, dy, lora) for weight in weights[2 * i : 2 * i + 2]])
    torch.cuda.synchronize()
    for i, rounds in found.items():
        for results in rounds:
            for mine, exact in zip(results, expected[2 * i : 2 * i + 2], strict=True):
                assert all(map(torch.equal, mine, exact))


def test_threads_share_no_memory():
    N, K = 1024, 2048
    weights, (x, dy, lora) = [drawn_four_bits(N, K, seed) for seed in range(4)], inputs(N, K)
    expected, wrong = [step(weight, x, dy, lora) for weight in weights], []
    torch.cuda.synchronize()

    def run(i):
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(20):
                found = step(weights[i], x, dy, lora)
                wrong.extend(i for mine, exact in zip(found, expected[i], strict=True) if not mine.equal(exact))

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def kinds(N, K):
    """Return a weight of each kind."""
    plain = numbers(N, K, scale=K**-0.5, dtype=BF16)
    found = {"nf4": drawn_four_bits(N, K), "int8": onepass.frozen_weight(int8(N, K), dtype=BF16)}
    found["joined"] = onepass.frozen_weight(*(drawn_four_bits(N // 2, K, seed) for seed in range(2)))
    if torch.cuda.get_device_capability() >= (8, 9):
        found["fp8"], found["fp8, rows"] = onepass.freeze_weight(plain), onepass.freeze_weight(plain, layouts=1)
    return found


def test_nobody_waits():
    N, K = 1024, 2048
    x, dy, lora = inputs(N, K)
    for weight in kinds(N, K).values():
        step(weight, x, dy, lora)
        with nobody_waits():
            step(weight, x, dy, lora)


def test_graphs():
    """A replay decodes the codes that are there then, and is right on another stream."""
    N, K = 1024, 2048
    x, dy, lora = inputs(N, K)
    weights = kinds(N, K)
    for name, weight in weights.items():
        found, graph = captured(lambda weight=weight: step(weight, x, dy, lora))
        if name == "nf4":
            weight.codes.bitwise_xor_(129)
        expected = step(weight, x, dy, lora)
        for t in found:
            t.zero_()
        with at_the_side():
            graph.replay()
        torch.cuda.synchronize()
        assert all(map(torch.equal, found, expected)), name


def test_one_weight_at_a_time_is_decoded():
    """Of 8 layers in turn, forward and backward: less than two decoded weights beside what they keep."""
    N = K = 4096
    weights, whole = [drawn_four_bits(N, K, seed) for seed in range(8)], 2 * N * K
    x = numbers(64, K, dtype=BF16).requires_grad_()

    def run():
        y = x
        for weight in weights:
            y = onepass.linear(y, weight)
        return torch.autograd.grad(y.sum(), x)

    run()
    peak, _ = taken(run)
    assert whole < peak < whole + 12 * 2 * 64 * K + 4 * MIB


def test_another_device():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    weight, (x, dy, _) = drawn_four_bits(1024, 2048), inputs(1024, 2048)
    expected = step(weight, x, dy)
    found = step(weight.to("cuda:1"), x.to("cuda:1"), dy.to("cuda:1"))
    assert all(mine.cpu().equal(other.cpu()) for mine, other in zip(found, expected, strict=True))


def test_compiled():
    N, K = 256, 512
    weight, (x, dy, lora) = onepass.frozen_weight(four_bits(N, K, BF16), four_bits(N, K, BF16, seed=1)), inputs(2 * N, K)

    def call(x, weight):
        return onepass.norm_linear(x, None, weight, lora=lora)

    x, found = x.requires_grad_(), []
    for run in (torch.compile(call, fullgraph=True), call):
        y = run(x, weight)
        found.append((y, *torch.autograd.grad(y, x, dy)))
    for mine, other in zip(*found, strict=True):
        torch.testing.assert_close(mine, other, rtol=2e-2, atol=2e-2)


RECIPES = {"delayed": FP8Recipe(), "current": FP8Recipe(scaling="current"), "row": FP8Recipe(scaling="row")}


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="needs eight bits")
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("shape", LAYERS, ids=str)
def test_kept_codes_have_the_bits_of_a_cast_in_each_call(shape, recipe):
    plain = numbers(*shape, scale=shape[1] ** -0.5, dtype=BF16)
    x, dy, lora = inputs(*shape)
    for layouts in (2,) if recipe.scaling == "row" else (1, 2):
        frozen = onepass.freeze_weight(plain, recipe, layouts=layouts)
        other = plain.detach().clone()
        for scale in (1.0, 3.0):
            mine = step(frozen, scale * x, dy, lora)
            y = onepass.linear(leaf := (scale * x).requires_grad_(), other, precision=recipe, lora=lora)
            exact = [y.detach(), *torch.autograd.grad(y, [leaf, *lora[:2]], dy)]
            assert all(map(torch.equal, mine, exact)), layouts
            torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))]).step()


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="needs eight bits")
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_rows_of_one_weight(recipe):
    """q, k and v that are frozen together: alone, whose codes begin within a memory, and joined."""
    sizes = 4096, 1024, 1024
    layers = [torch.nn.Linear(4096, rows, bias=False, device="cuda", dtype=BF16).requires_grad_(False) for rows in sizes]
    plain = torch.cat([layer.weight for layer in layers])
    for layouts in (2,) if recipe.scaling == "row" else (1, 2):
        for layer, weight in zip(layers, plain.split(sizes), strict=True):
            layer.weight = torch.nn.Parameter(weight, requires_grad=False)
        onepass.freeze_weight(layers, recipe, layouts=layouts)
        joined, (x, dy, lora) = onepass.frozen_weight(*layers), inputs(6144, 4096)
        y = onepass.linear(leaf := x.detach().requires_grad_(), plain.clone(), precision=recipe, lora=lora)
        exact = [y.detach(), *torch.autograd.grad(y, [leaf, *lora[:2]], dy)]
        assert all(map(torch.equal, step(joined, x, dy, lora), exact))
        alone = [step(layer.weight, x, part) for layer, part in zip(layers, dy.split(sizes, 1), strict=True)]
        whole = step(joined, x, dy)
        assert relative(torch.cat([y for y, _ in alone], 1).float(), whole[0].float()) < 1e-2
        assert relative(sum(dx.float() for _, dx in alone), whole[1].float()) < 0.05
