"""What only a GPU shows of embedding: programs that wait and meet, real sizes, past 32 bits; graphs, streams, memory, time."""

import gc

import pytest
import torch
from gpu.calls import (
    at_the_side,
    captured,
    compilations,
    launched,
    memory_goes_back,
    needs_60_gib,
    nobody_waits,
    other_stream,
    taken,
)
from ops.calls import equal
from ops.embedding_oracle import BF16, FP16, FP32, Case, judge_case

import onepass
import onepass.ops.embedding.embedding as module
from onepass.ops.embedding import backward, forward

__all__ = ["memory_goes_back"]
pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"), other_stream]
KINDS = ("uniform", "zipf", "alike", "halves", "sorted")


def inputs(M=4096, rows=1000, H=512, dtype=BF16, kind="zipf", seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    drawn = torch.rand(M, device="cuda", generator=generator)
    ids = torch.full((M,), rows - 1, device="cuda") if kind == "alike" else (rows * drawn ** (6 if kind == "zipf" else 1)).long()
    weight, dy = (torch.randn(n, H, device="cuda", dtype=dtype, generator=generator) for n in (rows, M))
    return ids, weight, dy


def step(ids, weight, dy, **options):
    """y and the gradient, on a leaf of the current stream."""
    weight = weight.detach().requires_grad_()
    y = onepass.embedding(ids, weight, backend="triton", **options)
    return [y.detach(), *torch.autograd.grad(y, weight, dy)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("M", "rows", "H"), [(16384, 32000, 2048), (16384, 128256, 256), (4096, 248320, 64), (70000, 50257, 33), (30000, 1, 8)]
)
def test_real_sizes(M, rows, H, kind):
    report = judge_case(module, Case(M, rows, H, BF16, FP32, kind))
    assert report, report


@pytest.mark.parametrize("H", (1, 7, 16, 64, 100, 777, 1024, 1025, 2048, 3001, 8192))
def test_every_width(H):
    for main in (None, FP32):
        report = judge_case(module, Case(700, 90, H, BF16, main, "zipf"))
        assert report, report


@pytest.mark.parametrize("H", (64, 777, 2048))
@pytest.mark.parametrize("dtype", (FP16, FP32), ids=str)
def test_other_types(H, dtype):
    for main in (None, dtype):
        report = judge_case(module, Case(700, 90, H, dtype, main, "zipf"))
        assert report, report


@pytest.mark.parametrize("kind", ("uniform", "zipf", "alike"))
def test_the_order_is_that_of_a_stable_sort(kind):
    for M in (1, 2047, 2048, 2049, 16384, 65536):
        for rows in (1, 3, 255, 32000, 128256, 248320, (1 << 20) - 1):
            ids, weight, _ = inputs(M, rows, 1, kind=kind)
            options = forward.EmbeddingOptions(-1, 0, rows)
            assert forward.orders_in_kernel(M, rows, 1)
            expected = ids.sort(stable=True)
            for _ in range(3):
                _, order = forward.look_up(ids, weight, options, True)
                assert torch.equal(order >> 32, expected.values) and torch.equal(order & 0xFFFFFFFF, expected.indices)


def test_a_thousand_orders_and_sums_are_bitwise_equal():
    """Programs wait for each other in the order, and the last of a run to arrive sums its parts: whoever that is."""
    for kind in ("zipf", "alike", "uniform"):
        given = inputs(kind=kind)
        first = step(*given)
        assert all(equal(first, step(*given)) for _ in range(300))


def test_beside_another_stream():
    """Another stream's kernels take the multiprocessors that programs wait for, and each stream has counters of its own."""
    given, other = inputs(16384, 32000, 512), inputs(16384, 32000, 512, kind="alike")
    first, second = step(*given), step(*other)
    for _ in range(50):
        with at_the_side():
            found = step(*other)
        again = step(*given)
        torch.cuda.synchronize()
        assert equal(first, again) and equal(second, found)


def test_nobody_waits_and_one_kernel_each_way():
    ids, weight, dy = inputs()
    weight.requires_grad_()
    weight.main_grad = torch.zeros_like(weight, dtype=FP32)
    onepass.embedding(ids, weight).backward(dy)
    with nobody_waits():
        onepass.embedding(ids, weight).backward(dy)
    names = launched(lambda: onepass.embedding(ids, weight).backward(dy))
    assert len(names) == 2, names


def test_in_a_graph():
    given = inputs()
    results, graph = captured(lambda: step(*given))
    given[0].copy_(given[0].flip(0))
    given[2].normal_()
    graph.replay()
    graph.replay()
    assert equal(results, step(*given))


def test_a_new_number_of_tokens_compiles_nothing():
    kernels = forward._embedding_kernel, backward._embedding_backward_kernel
    for M in (640, 66000):  # the second has its tokens ordered by PyTorch: the look-up alone is another kernel
        assert forward.orders_in_kernel(M, 333, 1152) == (M == 640)
        step(*inputs(M, 333, 1152))
    before = compilations(*kernels)
    for M in (1, 2, 3, 16, 33, 4096, 65536, 70000):
        step(*inputs(M, 333, 1152))
    assert compilations(*kernels) == before > 0


def test_what_is_kept_and_taken():
    ids, weight, dy = inputs(16384, 32000, 2048)
    weight.requires_grad_()
    weight.main_grad = torch.zeros_like(weight, dtype=FP32)
    onepass.embedding(ids, weight).backward(dy)
    before = torch.cuda.memory_allocated()
    y = onepass.embedding(ids, weight)
    kept = torch.cuda.memory_allocated() - before - y.numel() * 2
    assert kept <= 8 * 16384 + 1024
    used, _ = taken(lambda: y.backward(dy))
    assert used <= 2 * (16384 // 64) * 2048 * 4 + 1024


def test_strange_ids_are_nan_and_train_nothing():
    ids, weight, dy = inputs(300, 40, 64)
    ids[::3], ids[1::3] = 40, -1
    y, grad = step(ids, weight, torch.where(torch.arange(300, device="cuda").unsqueeze(-1) % 3 == 2, dy, torch.nan))
    assert y[::3].isnan().all() and y[1::3].isnan().all() and torch.equal(y[2::3], weight[ids[2::3]])
    assert grad.isfinite().all()


@needs_60_gib
def test_more_elements_than_31_bits():
    gc.collect()
    torch.cuda.empty_cache()
    rows, H = 600_000, 4096
    weight = torch.empty(rows, H, device="cuda", dtype=BF16).normal_()
    ids = torch.tensor([0, rows - 1, rows // 2, rows - 1], device="cuda")
    dy = torch.randn(4, H, device="cuda", dtype=BF16)
    y, grad = step(ids, weight, dy)
    assert torch.equal(y, weight[ids])
    assert torch.equal(grad[rows - 1], (dy[1].float() + dy[3].float()).to(BF16)) and torch.equal(grad[rows // 2], dy[2])
    del grad, y
    ids = torch.zeros(600_000, dtype=torch.long, device="cuda")
    ids[-1] = 1
    dy = torch.ones(600_000, H, device="cuda", dtype=BF16)
    y, grad = step(ids, weight[:2], dy)
    assert torch.equal(y[-1], weight[1]) and (grad[0] == torch.tensor(599_999.0).to(BF16).item()).all() and (grad[1] == 1).all()


def test_compiled():
    torch._dynamo.reset()
    ids, weight, dy = inputs()
    weight.requires_grad_()
    y = torch.compile(lambda i, w: onepass.embedding(i, w) * 1, fullgraph=True)(ids, weight)
    assert equal([y.detach(), *torch.autograd.grad(y, weight, dy)], step(ids, weight, dy))
