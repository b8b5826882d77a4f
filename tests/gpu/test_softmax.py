"""What only a GPU shows of softmax: real sizes, past 32 bits; NaN in the maximum; masks in place; graphs, streams, memory."""

import gc

import pytest
import torch
from gpu.calls import captured, compilations, launched, memory_goes_back, needs_60_gib, nobody_waits, other_stream, taken
from ops.calls import equal
from ops.softmax_oracle import MASKS, Case, judge_case

import onepass
import onepass.ops.softmax.softmax as module
from onepass.ops.softmax import kernels

__all__ = ["memory_goes_back"]
pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"), other_stream]
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
INF, NAN = float("inf"), float("nan")
WIDTHS = (1, 7, 16, 64, 100, 777, 1000, 1024, 1025, 2000, 2048, 3001, 4096, 5000, 8192, 10000, 16384)


def step(x, dy, **options):
    """y and dx, on a leaf of the current stream."""
    x = x.detach().requires_grad_()
    y = onepass.softmax(x, backend="triton", **options)
    return [y.detach(), *torch.autograd.grad(y, x, dy)]


def inputs(*shape, dtype=BF16, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    return [torch.randn(shape, device="cuda", dtype=dtype, generator=generator) for _ in range(2)]


def left_out(*shape, seed=1):
    return torch.rand(shape, device="cuda", generator=torch.Generator("cuda").manual_seed(seed)) < 0.3


# ---- right ----


@pytest.mark.parametrize("dtype", (BF16, FP16, FP32), ids=("bf16", "fp16", "fp32"))
@pytest.mark.parametrize("C", WIDTHS)
def test_every_width(C, dtype):
    for causal in (False, True):
        for mask in ("", "heads", "full"):
            report = judge_case(module, Case((2, 3, 37, C), dtype, 0.5, mask, causal))
            assert report, report


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("shape", ((3, 4, 100, 256), (2, 3, 5, 2048), (2, 2, 3, 7, 5000)), ids=str)
def test_every_mask(shape, mask):
    for causal in (False, True):
        report = judge_case(module, Case(shape, BF16, 0.125, mask, causal))
        assert report, report


@pytest.mark.parametrize("C", (64, 1000, 2048, 16384))
def test_square_and_oblong_causal_matrices(C):
    for R in (C, C // 2 + 3, C + 5):
        report = judge_case(module, Case((1, 1, min(R, 4096), C), BF16, 0.125, causal=True))
        assert report, report


@pytest.mark.parametrize("C", (40, 1000, 2048, 5000, 16384))
@pytest.mark.parametrize("dtype", (BF16, FP32), ids=("bf16", "fp32"))
def test_nan_and_infinities_stay_in_their_rows(C, dtype):
    """A GPU's maximum takes no notice of NaN: it must come out all the same."""
    mask = torch.zeros(9, C, dtype=torch.bool, device="cuda")
    mask[:, C - 3 :] = True
    mask[7] = True
    for options in ({}, {"mask": mask}, {"causal": True}, {"mask": mask, "causal": True}):
        x, dy = inputs(9, C, dtype=dtype)
        x[2, 1], x[3, 0], x[4], x[5, 2], x[6, C - 1] = NAN, INF, -INF, -INF, NAN
        y, dx = step(x, dy, **options)
        expected = module.softmax_reference(x.double(), options.get("mask"), causal="causal" in options)
        assert torch.equal(y.isnan(), expected.isnan()) and torch.equal(dx.isnan(), expected.isnan()), options
        out = mask if "mask" in options else torch.zeros_like(mask)
        out = out | torch.ones_like(mask).triu(1) if "causal" in options else out
        assert not y[out].any() and not dx[out].any(), options
        torch.testing.assert_close(y.double(), expected, rtol=1e-2, atol=1e-5, equal_nan=True)


def test_what_causal_leaves_out_is_not_read():
    """Nothing that a NaN there could show, in y or in dx."""
    for C in (64, 1000, 2048, 4096):
        x, dy = inputs(2, C, C)
        clean = step(x, dy, causal=True)
        later = torch.ones(C, C, dtype=torch.bool, device="cuda").triu(1)
        assert equal(clean, step(x.masked_fill(later, NAN), dy.masked_fill(later, NAN), causal=True))


# ---- past 32 bits ----


@needs_60_gib
@pytest.mark.parametrize("C", (64, 2048, 16384))
@pytest.mark.parametrize("causal", (False, True))
def test_more_elements_than_31_bits(C, causal):
    gc.collect()
    torch.cuda.empty_cache()
    B = 2**31 // (C * C) + 3 if C > 64 else 2**31 // (C * 4096) + 3
    R = C if C > 64 else 4096
    x, dy = inputs(B, R, C)
    results = step(x, dy, scale=0.5, causal=causal)
    for matrix in (0, B // 2, B - 1):
        assert equal([t[matrix] for t in results], step(x[matrix], dy[matrix], scale=0.5, causal=causal))


@needs_60_gib
def test_scores_of_a_large_model():
    """32 x 32 x 2048 x 2048, 2**32 of them: x, y, dy and dx, and nothing else."""
    gc.collect()
    torch.cuda.empty_cache()
    shape = 32, 32, 2048, 2048
    x = torch.empty(shape, device="cuda", dtype=BF16).normal_()
    mask = left_out(32, 1, 2048, 2048)
    mask[3, 0, 5] = True
    onepass.softmax(x[:1, :1], mask=mask[:1])
    size = x.numel() * x.element_size()
    used, y = taken(lambda: onepass.softmax(x, scale=0.125, mask=mask))
    assert used == size
    for b, h in ((0, 0), (3, 17), (31, 31)):
        assert torch.equal(y[b, h], onepass.softmax(x[b, h], scale=0.125, mask=mask[b, 0]))
    assert not y[3, :, 5].any() and not y[31, 31][mask[31, 0]].any()
    options = kernels.SoftmaxOptions(0.125, False)
    used, dx = taken(lambda: kernels.softmax_backward(x, y, options))
    assert used == size
    for b, h in ((0, 0), (31, 31)):
        assert torch.equal(dx[b, h], kernels.softmax_backward(x[b, h], y[b, h], options))


@needs_60_gib
def test_a_row_stride_past_31_bits():
    gc.collect()
    torch.cuda.empty_cache()
    wide = torch.empty(3, 2**31 + 64 * 4096, device="cuda", dtype=BF16)
    for C in (256, 2048, 16384):
        x, dy = (wide[:, 1024 + 2 * i * C :][:, :C].normal_() for i in range(2))
        assert x.stride(0) > 2**31
        assert equal(step(x, dy, causal=True), step(x.clone(), dy.clone(), causal=True))


# ---- where it runs, and what it takes ----


def test_a_hundred_calls_are_bitwise_equal():
    x, dy = inputs(4, 16, 512, 512)
    mask = left_out(4, 1, 512, 512)
    first = step(x, dy, mask=mask, causal=True)
    assert all(equal(first, step(x, dy, mask=mask, causal=True)) for _ in range(100))


def test_nobody_waits_and_one_kernel_each_way():
    x, dy = inputs(2, 4, 512, 512)
    mask = left_out(2, 1, 512, 512)
    step(x, dy, mask=mask)
    with nobody_waits():
        step(x, dy, mask=mask)
    names = launched(lambda: step(x, dy, mask=mask))
    assert len(names) == 2, names


def test_in_a_graph():
    x, dy = inputs(2, 4, 256, 2048)
    mask = left_out(2, 1, 256, 2048)
    results, graph = captured(lambda: step(x, dy, mask=mask, causal=True))
    x.normal_()
    graph.replay()
    assert equal(results, step(x, dy, mask=mask, causal=True))


def test_a_new_number_of_rows_compiles_nothing():
    both = kernels._softmax_kernel, kernels._softmax_backward_kernel
    for causal in (False, True):
        step(*inputs(2, 64, 1152), causal=causal)
    before = compilations(*both)
    for M in (1, 2, 3, 16, 33, 4096):
        for causal in (False, True):
            step(*inputs(3, M, 1152), causal=causal)
    assert compilations(*both) == before > 0


def test_only_y_is_kept():
    x, _ = inputs(8, 16, 512, 512)
    x.requires_grad_()
    mask = left_out(512, 512)
    onepass.softmax(x, mask=mask)
    used, y = taken(lambda: onepass.softmax(x, mask=mask, causal=True))
    assert used == y.numel() * y.element_size()


def test_compiled():
    torch._dynamo.reset()
    x, dy = inputs(2, 4, 256, 256)
    mask = left_out(2, 1, 256, 256)
    call = torch.compile(lambda t: onepass.softmax(t, scale=0.125, mask=mask, causal=True) * 1, fullgraph=True)
    x.requires_grad_()
    y = call(x)
    assert equal([y.detach(), *torch.autograd.grad(y, x, dy)], step(x, dy, scale=0.125, mask=mask, causal=True))
