"""What only a GPU shows of gated_rms_norm: real tiles, sizes past 32 bits, counters of programs that meet, graphs, memory."""

import gc

import pytest
import torch
from gpu.calls import captured, compilations, launched, memory_goes_back, needs_60_gib, nobody_waits, other_stream, taken
from ops.calls import equal
from ops.gated_norm_oracle import Case, judge_case

import onepass
import onepass.ops.norm.gated_norm as module
from onepass.kernels import scratch
from onepass.ops.norm import gated_kernels

__all__ = ["memory_goes_back"]
pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"), other_stream]
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
WIDTHS = (1, 7, 64, 96, 128, 256, 1000, 1024, 2048, 3001, 4096, 5120, 8192)
norm_first_or_not = pytest.mark.parametrize("norm_first", (True, False))


def inputs(M, H, dtype=BF16, seed=0):
    """x, z, weight and dy."""
    generator = torch.Generator("cuda").manual_seed(seed)
    return [torch.randn(*size, H, device="cuda", dtype=dtype, generator=generator) for size in ((M,), (M,), (), (M,))]


def step(x, z, weight, dy, **options):
    """y and all gradients, on leaves of the current stream."""
    leaves = [t.detach().requires_grad_() for t in (x, z, weight)]
    y = onepass.gated_rms_norm(*leaves, backend="triton", **options)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


@norm_first_or_not
@pytest.mark.parametrize("dtype", (BF16, FP16, FP32), ids=("bf16", "fp16", "fp32"))
@pytest.mark.parametrize("H", WIDTHS)
def test_every_width_of_few_and_of_many_rows(H, dtype, norm_first):
    for rows in (1, 37, (1 << 22) // max(H, 64) + 3):
        report = judge_case(module, Case(lead=(rows,), H=H, dtype=dtype, weight=dtype, norm_before_gate=norm_first, eps=0.1))
        assert report, report


@pytest.mark.parametrize("groups", (2, 8, 64))
def test_groups(groups):
    for rows in (1, 5, 3000):
        report = judge_case(module, Case(lead=(rows,), H=groups * 128, group_size=128, dtype=BF16, norm_before_gate=False))
        assert report, report


def test_heads_of_a_projection_take_no_copy():
    projection = torch.randn(4, 1024, 2 * 32 * 128 + 64, device="cuda", dtype=BF16)
    x, z = (projection[..., at:][..., : 32 * 128].unflatten(-1, (32, 128)) for at in (64, 64 + 32 * 128))
    _, _, weight, _ = inputs(1, 128)
    onepass.gated_rms_norm(x, z, weight)
    used, y = taken(lambda: onepass.gated_rms_norm(x, z, weight))
    assert used == y.nbytes and torch.equal(y, onepass.gated_rms_norm(x.clone(), z.clone(), weight))


@needs_60_gib
@pytest.mark.parametrize("H", (128, 4096))
def test_more_elements_than_31_bits(H):
    gc.collect()
    torch.cuda.empty_cache()
    M = 2**31 // H + 5
    x, z, weight, dy = inputs(M, H)
    y, dx, dz, _ = step(x, z, weight, dy)
    for row in (0, M // 2, M - 1):
        expected = step(x[row, None], z[row, None], weight, dy[row, None])[:3]
        assert equal([t[row, None] for t in (y, dx, dz)], expected)


@norm_first_or_not
def test_a_hundred_calls_are_bitwise_equal(norm_first):
    given = inputs(20_000, 128)
    first = step(*given, norm_before_gate=norm_first)
    assert all(equal(first, step(*given, norm_before_gate=norm_first)) for _ in range(100))
    assert not any(counters.any() for _, counters in scratch._kept.values())


def test_nobody_waits_and_one_kernel_each_way():
    given = inputs(4096, 128)
    step(*given)
    with nobody_waits():
        step(*given)
    names = launched(lambda: step(*given))
    assert len(names) == 2, names


def test_in_a_graph():
    x, z, weight, dy = inputs(4096, 128)
    results, graph = captured(lambda: step(x, z, weight, dy))
    x.normal_()
    graph.replay()
    assert equal(results, step(x, z, weight, dy))


def test_a_new_number_of_rows_compiles_nothing():
    kernels = gated_kernels._gated_forward_kernel, gated_kernels._gated_backward_kernel
    step(*inputs(64, 192))
    before = compilations(*kernels)
    for M in (1, 2, 3, 16, 33, 40_000):
        step(*inputs(M, 192))
    assert compilations(*kernels) == before > 0


def test_compiled():
    torch._dynamo.reset()
    x, z, weight, dy = inputs(1024, 256)
    leaves = [t.requires_grad_() for t in (x, z, weight)]
    call = torch.compile(lambda *ts: onepass.gated_rms_norm(*ts) * 1, fullgraph=True)
    y = call(*leaves)
    assert equal([y.detach(), *torch.autograd.grad(y, leaves, dy)], step(x, z, weight, dy))
