"""QuACK's grouped products, of rows and of weights' gradients: beside fp64, and what lies outside of a group."""

import pytest
import torch
import torch.nn.functional as F
from gpu.calls import captured, memory_goes_back, nobody_waits, other_stream
from ops.calls import equal, relative

from onepass.kernels import quack_product
from onepass.kernels.grouped_product import grouped_gradient, grouped_product
from onepass.kernels.quack_product import add_by_quack, multiply_by_quack, quack_adds, quack_multiplies

__all__ = ["memory_goes_back"]
BF16 = torch.bfloat16
SIZES = ((0, 1, 63, 0, 64, 65, 1000, 0), (7,), (0, 0, 4096))
pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"), other_stream]


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    monkeypatch.setattr(quack_product, "_LEAST_ADDED", 0)
    monkeypatch.setattr(quack_product, "_LEAST_MULTIPLIED", 0)
    found = quack_product.quack_functions()
    if isinstance(found, str):
        pytest.skip(found)


def drawn(sizes, N, K, more=0):
    """dy, x, ends and main_grad. `more` rows follow the last group's."""
    generator = torch.Generator("cuda").manual_seed(0)
    rows = sum(sizes) + more
    dy, x = (torch.randn(rows, width, device="cuda", generator=generator).to(BF16) for width in (N, K))
    ends = torch.tensor(sizes, device="cuda").cumsum(0).int()
    return dy, x, ends, torch.randn(len(sizes), N, K, device="cuda", generator=generator)


def oracle(dy, x, ends, main_grad=None):
    start, products = 0, []
    for end in ends.tolist():
        products.append(dy[start:end].double().t() @ x[start:end].double())
        start = end
    return torch.stack(products) + (0 if main_grad is None else main_grad.double())


@pytest.mark.parametrize("keep", (True, False))
@pytest.mark.parametrize(("N", "K"), ((1536, 2048), (2048, 768), (8, 8), (2880, 136)))
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_beside_fp64(sizes, N, K, keep):
    dy, x, ends, main_grad = drawn(sizes, N, K)
    exact = oracle(dy, x, ends, main_grad if keep else None)
    if not keep:
        main_grad.fill_(torch.nan)
    assert quack_adds(dy, main_grad)
    with nobody_waits():
        add_by_quack(main_grad, dy, x, ends, keep)
    assert relative(main_grad, exact) < 2e-5
    empty = [g for g, size in enumerate(sizes) if not size]
    assert equal(main_grad[empty].double(), exact[empty])


@pytest.mark.parametrize("transposed", (False, True))
@pytest.mark.parametrize(("N", "K"), ((1536, 2048), (2048, 768), (8, 8), (2880, 136)))
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_rows_beside_fp64(sizes, N, K, transposed):
    dy, x, ends, _ = drawn(sizes, N, K)
    weight = torch.randn(len(sizes), *((K, N) if transposed else (N, K)), device="cuda").to(BF16)
    if transposed:
        weight = weight.mT
    for a, b in ((x, weight), (dy, weight.mT)):  # forward, and the rows' gradient
        assert quack_multiplies(a, b, 1)
        with nobody_waits():
            y = grouped_product(a, b, ends)
        groups = zip(a.split(list(sizes)), b, strict=True)
        assert relative(y, torch.cat([rows.double() @ w.double().t() for rows, w in groups])) < 3e-3
    assert relative(grouped_gradient(dy, x, ends), oracle(dy, x, ends)) < 3e-3


def test_another_group_s_rows_are_not_read_and_a_hundred_calls_are_bitwise_equal():
    _, x, ends, _ = drawn((100, 30, 70), 8, 512, more=50)
    weight = torch.randn(3, 256, 512, device="cuda").to(BF16)
    first = multiply_by_quack(x, weight, ends)[:200]
    for _ in range(100):
        assert equal(multiply_by_quack(x, weight, ends)[:200], first)
    x[100:130], x[200:], weight[1] = torch.nan, torch.nan, torch.nan
    y = multiply_by_quack(x, weight, ends)[:200]
    assert equal(y[:100], first[:100]) and equal(y[130:], first[130:]) and y[100:130].isnan().all()
    (result,), graph = captured(lambda: [multiply_by_quack(x, weight, ends)])
    x.fill_(1.0)
    graph.replay()
    assert equal(result[:100], multiply_by_quack(x, weight, ends)[:100]) and not equal(result[:100], first[:100])


def test_another_group_s_nan_and_rows_after_the_last():
    dy, x, ends, main_grad = drawn((100, 30, 70), 256, 512, more=50)
    alone = main_grad.clone()
    add_by_quack(alone, dy, x, ends, True)
    dy[100:130], x[200:] = torch.nan, torch.nan
    add_by_quack(main_grad, dy, x, ends, True)
    assert equal(main_grad[[0, 2]], alone[[0, 2]]) and main_grad[1].isnan().all()


def test_a_hundred_calls_are_bitwise_equal_and_a_graph_too():
    dy, x, ends, main_grad = drawn((500, 1, 2000, 77), 1536, 2048)
    first = torch.empty_like(main_grad)
    add_by_quack(first, dy, x, ends, False)
    for _ in range(100):
        again = torch.zeros_like(main_grad)
        add_by_quack(again, dy, x, ends, True)
        assert equal(again, first)
    (result,), graph = captured(lambda: [_written(dy, x, ends)])
    x.normal_()
    graph.replay()
    assert equal(result, _written(dy, x, ends)) and not equal(result, first)


def _written(dy, x, ends):
    out = torch.empty(ends.shape[0], dy.shape[1], x.shape[1], device="cuda")
    add_by_quack(out, dy, x, ends, False)
    return out


def test_beside_pytorch_s():
    dy, x, ends, _ = drawn((500, 1, 2000, 77), 1536, 2048)
    ours = relative(_written(dy, x, ends), oracle(dy, x, ends))
    assert ours < relative(F.grouped_mm(dy.t(), x, offs=ends).float(), oracle(dy, x, ends))
