"""Grouped products of rows by Triton: beside fp64, at true tiles."""

import pytest
import torch
import torch.nn.functional as F
from gpu.calls import captured, memory_goes_back, nobody_waits, other_stream
from ops.calls import equal, relative

from onepass.kernels.grouped_kernels import multiply_rows, triton_multiplies
from onepass.kernels.grouped_product import grouped_product
from onepass.runtime.sizes import compute_capability

__all__ = ["memory_goes_back"]
BF16 = torch.bfloat16
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = ((0, 1, 63, 0, 64, 127, 1000, 0), (300,), (0, 0, 4096), (129, 128, 513, 700))
pytestmark = [
    pytest.mark.skipif(compute_capability(torch.device(DEVICE)) != (9, 0), reason="needs a GPU of Hopper"),
    other_stream,
]


def drawn(sizes, N, K, transposed, more=0):
    """x, weight and ends. `more` rows follow the last group's."""
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(sum(sizes) + more, K, device="cuda", generator=generator).to(BF16)
    weight = torch.randn(len(sizes), N, K, device="cuda", generator=generator).to(BF16)
    return x, weight.mT.contiguous().mT if transposed else weight, torch.tensor(sizes, device="cuda").cumsum(0).int()


@pytest.mark.parametrize("transposed", (False, True))
@pytest.mark.parametrize(("N", "K"), ((1536, 2048), (2048, 1408), (8, 8), (2880, 136)))
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_beside_fp64(sizes, N, K, transposed):
    x, weight, ends = drawn(sizes, N, K, transposed, more=5)
    x[sum(sizes) :] = torch.nan
    with nobody_waits():
        y = multiply_rows(x, weight, ends)
    exact = torch.cat([rows.double() @ w.double().T for rows, w in zip(x.split([*sizes, 5]), weight, strict=False)])
    assert relative(y[: len(exact)], exact) < 2e-3
    assert equal(y[: len(exact)], multiply_rows(x, weight, ends)[: len(exact)])


def test_large_products_are_taken():
    x, weight, ends = drawn((129, 128, 513, 700), 1536, 2048, False)
    assert triton_multiplies(x, weight, len(x)) and triton_multiplies(x, weight.mT.contiguous().mT, len(x))
    assert equal(grouped_product(x, weight, ends), multiply_rows(x, weight, ends))
    torch.testing.assert_close(multiply_rows(x, weight, ends), F.grouped_mm(x, weight.mT, offs=ends))


def test_in_a_graph():
    x, weight, ends = drawn((129, 128, 513, 700), 1536, 2048, False)
    expected = multiply_rows(x, weight, ends)
    y, graph = captured(lambda: multiply_rows(x, weight, ends))
    graph.replay()
    assert equal(y, expected)
