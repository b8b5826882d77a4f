"""Products under batch_invariant() on a GPU: the bits of rows in parts of any size, by layout and type, and captured."""

import pytest
import torch
import torch.nn.functional as F
from gpu.calls import memory_goes_back, nobody_waits

import onepass
from onepass.kernels import invariant_product

__all__ = ["memory_goes_back"]
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

PARTS = (1, 2, 3, 7, 8, 16, 17, 33, 64, 65, 100, 128, 129, 200, 256, 300, 500, 512, 777, 1000, 1024, 2048, 3000, 4096, 8192)
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
SIZES = [
    (2048, 3072),
    (2048, 16384),
    (8192, 2048),
    (16384, 2048),
    (3072, 2048),
    (14336, 4096),
    (3072, 768),
    (768, 768),
    (768, 2304),
]
ODD = [(768, 50257), (99, 130), (1000, 776), (65, 1), (1, 65), (2048, 8)]


def drawn(*shape, dtype, seed=0):
    return torch.randn(shape, device="cuda", dtype=dtype, generator=torch.Generator("cuda").manual_seed(seed))


def check(call, x, *others):
    """Compare parts with the whole, at other places."""
    whole = call(x, *others)
    for size in (size for size in PARTS if size < len(x)):
        at = (len(x) - size) // 3
        part = call(*(each[at : at + size] for each in (x, *others)))
        assert torch.equal(part, whole[at : at + size]), size
    order = torch.randperm(len(x), device="cuda")
    assert torch.equal(call(*(each[order] for each in (x, *others))), whole[order])
    return whole


@pytest.mark.parametrize("by_rows", (False, True))
@pytest.mark.parametrize(("K", "N"), SIZES + ODD)
def test_sixteen_bits(K, N, by_rows):
    x, w = drawn(10000 if N < 20000 else 2100, K, dtype=BF16), drawn(N, K, dtype=BF16, seed=1)
    b = w.t().contiguous() if by_rows else w.t()
    with onepass.batch_invariant():
        y = check(lambda x: x @ b, x)
    torch.testing.assert_close(y, x @ b, rtol=2e-2, atol=2e-2 * K**0.5)


@pytest.mark.parametrize("dtype", (FP16, FP32, FP64))
@pytest.mark.parametrize(("K", "N"), [(2048, 768), (3072, 512), (99, 130)])
def test_other_types(K, N, dtype):
    x, w = drawn(1500, K, dtype=dtype), drawn(N, K, dtype=dtype, seed=1)
    with onepass.batch_invariant():
        y = check(lambda x: x @ w.t(), x)
        check(lambda x: x @ w.t().contiguous(), x)
    bound = {FP16: 1e-2, FP32: 1e-5, FP64: 1e-13}[dtype]
    torch.testing.assert_close(y.double(), x.double() @ w.double().t(), rtol=bound, atol=bound * K**0.5)


@pytest.mark.parametrize("dtype", (BF16, FP32))
@pytest.mark.parametrize(("K", "N"), [(2048, 768), (8192, 2048), (768, 129)])
def test_what_is_added(K, N, dtype):
    x, w, bias = drawn(1500, K, dtype=dtype), drawn(N, K, dtype=dtype, seed=1), drawn(N, dtype=dtype, seed=2)
    start = drawn(1500, N, dtype=dtype, seed=3)
    scale = 1e-5 if dtype is FP32 else 2e-2
    calls = {
        "bias": (lambda x, s: F.linear(x, w, bias), lambda x, s: x @ w.t() + bias),
        "bias of another place": (lambda x, s: F.linear(x, w, torch.cat([bias, bias])[1 : N + 1]), None),
        "bias, scaled": (lambda x, s: torch.addmm(bias, x, w.t(), beta=0.5, alpha=2), lambda x, s: 2 * (x @ w.t()) + bias / 2),
        "rows": (lambda x, s: torch.addmm(s, x, w.t(), beta=2), lambda x, s: x @ w.t() + 2 * s),
        "rows in place": (lambda x, s: s.clone().addmm_(x, w.t()), lambda x, s: x @ w.t() + s),
        "column": (lambda x, s: torch.addmm(s[:, :1], x, w.t()), lambda x, s: x @ w.t() + s[:, :1]),
        "into strided rows": (
            lambda x, s: torch.addmm(s, x, w.t(), out=x.new_empty(len(x), N + 3)[:, 1 : N + 1]), lambda x, s: x @ w.t() + s
        ),
    }  # fmt: skip
    for name, (call, formula) in calls.items():
        with onepass.batch_invariant():
            y = check(call, x, start)
        if formula is not None:
            torch.testing.assert_close(y, formula(x, start), rtol=scale, atol=2 * scale * K**0.5, msg=name)


@pytest.mark.parametrize("by_rows", (False, True))
def test_fp32_of_sixteen_bits(by_rows):
    x, w = drawn(3000, 8192, dtype=BF16), drawn(1024, 8192, dtype=BF16, seed=1)
    b, start = w.t().contiguous() if by_rows else w.t(), drawn(3000, 1024, dtype=FP32, seed=2)
    with onepass.batch_invariant():
        y = check(lambda x: torch.mm(x, b, out_dtype=FP32), x)
        added = check(lambda x, s: torch.addmm(s, x, b, out_dtype=FP32), x, start)
        out = torch.empty_like(start)
        assert torch.equal(torch.mm(x, b, out_dtype=FP32, out=out), y)
        assert torch.equal(torch.addmm(start, x, b, out_dtype=FP32, out=out), added)
    torch.testing.assert_close(y, x.float() @ b.float(), rtol=1e-3, atol=2e-1)
    torch.testing.assert_close(added, y + start, rtol=1e-5, atol=1e-4)


def test_places_that_kernels_cant_read():
    x, w = drawn(500, 256, dtype=BF16), drawn(64, 256, dtype=BF16, seed=1)
    flat = torch.empty(500 * 256 + 1, device="cuda", dtype=BF16)
    moved = flat[1:].view(500, 256).copy_(x)
    wide = torch.empty(500, 259, device="cuda", dtype=BF16)[:, 3:].copy_(x)
    with onepass.batch_invariant():
        y = x @ w.t()
        assert torch.equal(moved @ w.t(), y) and torch.equal(wide @ w.t(), y)
        assert torch.equal(x @ torch.empty(64, 259, device="cuda", dtype=BF16)[:, 3:].copy_(w).t(), y)
        assert torch.equal(x @ w.t().contiguous()[:, ::2].contiguous(), y[:, ::2])


def test_a_weights_gradient_is_pytorchs_and_the_inputs_is_not():
    x, w, dy = drawn(3000, 8192, dtype=BF16), drawn(2048, 8192, dtype=BF16, seed=1), drawn(3000, 2048, dtype=BF16, seed=2)

    def gradients(rows):
        given, weight = x[rows].clone().requires_grad_(), w.clone().requires_grad_()
        return torch.autograd.grad(F.linear(given, weight), (given, weight), dy[rows])

    expected = gradients(slice(None))
    with onepass.batch_invariant():
        dx, dw = gradients(slice(None))
        for size in (1, 16, 100, 1000):
            assert torch.equal(gradients(slice(50, 50 + size))[0], dx[50 : 50 + size])
    assert torch.equal(dw, expected[1])


def test_captured_and_without_waiting():
    """Sizes that were not seen before take the reference; those that were wait for nobody."""
    x, w = drawn(40, 4096, dtype=BF16), drawn(1032, 4096, dtype=BF16, seed=1)
    with onepass.batch_invariant():
        torch.ones(8, 8, device="cuda", dtype=BF16) @ torch.ones(8, 8, device="cuda", dtype=BF16)
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.graph(graph, stream=side):
            captured = x @ w.t()
        graph.replay()
        y = x @ w.t()
        assert torch.equal(captured, y)
        with nobody_waits():
            again = x[:33] @ w.t()
        assert torch.equal(again, y[:33])


def test_few_rows_take_another_algorithm_and_a_wrong_one_is_found(monkeypatch):
    x, w = drawn(4096, 8192, dtype=BF16), drawn(2040, 8192, dtype=BF16, seed=1)
    with onepass.batch_invariant():
        whole = x @ w.t()
        assert torch.equal(x[:64] @ w.t(), whole[:64])
        kind = invariant_product._Kind(0, BF16, BF16, False, 2040, 8192, False, invariant_product._IN_FP32)
        products = invariant_product._products(kind)
        few, reference = (bytes(each.algorithm) for each in (products.algorithm(64), products.reference))
        assert few != reference
        monkeypatch.setattr(products, "_of_step", {})
        monkeypatch.setattr(torch, "equal", lambda a, b: len(a) == 1)
        with pytest.raises(RuntimeError, match="no algorithm whose rows don't depend on their number"):
            products.algorithm(64)


def test_rows_depend_on_their_number_without_it():
    x, w = drawn(8192, 8192, dtype=BF16), drawn(2048, 8192, dtype=BF16, seed=1)
    assert not torch.equal(x[:16] @ w.t(), (x @ w.t())[:16])


def test_compiled_by_inductor():
    x, w, bias = drawn(3000, 8192, dtype=BF16), drawn(2048, 8192, dtype=BF16, seed=1), drawn(2048, dtype=BF16, seed=2)
    linear = torch.compile(lambda x: F.linear(x, w, bias), fullgraph=True, dynamic=True)
    with onepass.batch_invariant():
        whole = F.linear(x, w, bias)
        for size in (16, 100, 1000):
            assert torch.equal(linear(x[:size]), whole[:size])
