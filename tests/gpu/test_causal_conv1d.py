"""What only a GPU shows of causal_conv1d: real tiles, sizes past 32 bits, counters of programs that meet, graphs, boundaries."""

import gc

import pytest
import torch
from gpu.calls import captured, compilations, launched, memory_goes_back, needs_60_gib, nobody_waits, other_stream, taken
from ops.calls import equal
from ops.conv_oracle import Case, judge_case

import onepass
import onepass.ops.convolution.causal_conv1d as module
from onepass.kernels import scratch
from onepass.ops.convolution import kernels

__all__ = ["memory_goes_back"]
pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"), other_stream]
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
QWEN = {"split": (512, 512, 1024), "l2_norm": (128, 128, None)}


def inputs(*lead, C=2048, W=4, dtype=BF16, seed=0):
    """x, weight, bias and dy."""
    generator = torch.Generator("cuda").manual_seed(seed)
    shapes = (*lead, C), (C, W), (C,), (*lead, C)
    return [torch.randn(*shape, device="cuda", dtype=dtype, generator=generator) for shape in shapes]


def boundaries(S, count):
    ends = torch.randint(S + 1, (count,), generator=torch.Generator().manual_seed(0)).sort().values
    return torch.cat([ends.new_zeros(1), ends, ends.new_full((1,), S)]).int().cuda()


def step(x, weight, bias, dy, **options):
    """y and all gradients, on leaves of the current stream."""
    leaves = [t.detach().requires_grad_() for t in (x, weight, bias)]
    ys = onepass.causal_conv1d(*leaves, backend="triton", **options)
    y = ys if isinstance(ys, torch.Tensor) else torch.cat(ys, -1)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


@pytest.mark.parametrize("W", (2, 3, 4, 5, 8))
@pytest.mark.parametrize("dtype", (BF16, FP16, FP32), ids=("bf16", "fp16", "fp32"))
@pytest.mark.parametrize("C", (1, 7, 96, 1000, 4096))
def test_every_width_of_few_and_of_many_rows(C, dtype, W):
    for lead in ((1,), (3, 37), ((1 << 22) // max(C, 64) + 3,)):
        report = judge_case(module, Case(small=False, lead=lead, sizes=(C,), dtype=dtype, weight=dtype, W=W))
        assert report, report


@pytest.mark.parametrize("head", (16, 64, 96, 128, 256))
@pytest.mark.parametrize("dtype", (BF16, FP32), ids=("bf16", "fp32"))
def test_heads_of_documents(head, dtype):
    ends = tuple(boundaries(3000, 40)[1:].tolist())
    pieces = {"sizes": (2 * head, 4 * head, 300), "heads": (head, head, None), "ends": ends, "eps": 0.1}
    report = judge_case(module, Case(small=False, lead=(1, 3000), dtype=dtype, **pieces))
    assert report, report


def test_a_document_has_the_bits_that_it_has_alone():
    x, weight, bias, dy = inputs(1, 8192)
    ends = boundaries(8192, 100)
    y, dx, *_ = step(x, weight, bias, dy, cu_seqlens=ends, **QWEN)
    for first, end in zip(ends.tolist()[:-1], ends.tolist()[1:], strict=True):
        if first < end:
            found = step(x[:, first:end], weight, bias, dy[:, first:end], **QWEN)[:2]
            assert equal(found, [y[:, first:end], dx[:, first:end]]), (first, end)


def test_wrong_boundaries_make_nan():
    given = inputs(1, 300)
    for wrong in ((0, 200, 100, 300), (0, 200), (1, 300)):
        found = step(*given, cu_seqlens=torch.tensor(wrong, dtype=torch.int32, device="cuda"))
        assert all(t.isnan().all() for t in found), wrong


def test_pieces_take_no_copy():
    projection = torch.randn(4, 1024, 2048 + 64, device="cuda", dtype=BF16)
    _, weight, bias, _ = inputs(1)
    onepass.causal_conv1d(projection[..., :2048], weight, bias, **QWEN)
    used, ys = taken(lambda: onepass.causal_conv1d(projection[..., :2048], weight, bias, **QWEN))
    assert used == sum(y.nbytes for y in ys)


@needs_60_gib
def test_more_elements_than_31_bits():
    gc.collect()
    torch.cuda.empty_cache()
    S = 2**31 // 2048 + 5
    x, weight, bias, dy = inputs(1, S)
    y, dx, *_ = step(x, weight, bias, dy)
    last = step(x[:, -64:], weight, bias, dy[:, -64:])
    assert equal([y[:, -60:], dx[:, -60:]], [last[0][:, 4:], last[1][:, 4:]])


@pytest.mark.parametrize("documents", (False, True))
def test_a_hundred_calls_are_bitwise_equal(documents):
    given = inputs(1, 20_000)
    options = QWEN | ({"cu_seqlens": boundaries(20_000, 50)} if documents else {})
    first = step(*given, **options)
    assert all(equal(first, step(*given, **options)) for _ in range(100))
    assert not any(counters.any() for _, counters in scratch._kept.values())


def test_nobody_waits_and_one_kernel_each_way():
    given, ends = inputs(2, 2048), boundaries(2048, 3)
    step(*given)
    with nobody_waits():
        step(*given)
        step(*(t[:1] if t.dim() == 3 else t for t in given), cu_seqlens=ends)
    names = launched(lambda: step(*given))
    assert len(names) == 2, names


def test_in_a_graph():
    x, weight, bias, dy = inputs(1, 4096)
    options = QWEN | {"cu_seqlens": boundaries(4096, 5)}
    results, graph = captured(lambda: step(x, weight, bias, dy, **options))
    x.normal_()
    graph.replay()
    assert equal(results, step(x, weight, bias, dy, **options))


def test_a_new_number_of_rows_compiles_nothing():
    both = kernels._conv_forward_kernel, kernels._conv_backward_kernel
    step(*inputs(2, 64, C=192))
    before = compilations(*both)
    for lead in ((1, 1), (1, 2), (3, 3), (2, 16), (33,), (1, 40_000)):
        step(*inputs(*lead, C=192))
    assert compilations(*both) == before > 0


def test_compiled():
    torch._dynamo.reset()
    x, weight, bias, dy = inputs(2, 512)
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    call = torch.compile(lambda *ts: torch.cat([y * 1 for y in onepass.causal_conv1d(*ts, **QWEN)], -1), fullgraph=True)
    y = call(*leaves)
    assert equal([y.detach(), *torch.autograd.grad(y, leaves, dy)], step(x, weight, bias, dy, **QWEN))
