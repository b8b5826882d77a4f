"""What only a GPU shows of delta_gates: real tiles, sizes past 32 bits, counters of programs that meet, graphs."""

import gc

import pytest
import torch
from gpu.calls import captured, compilations, launched, memory_goes_back, needs_60_gib, nobody_waits, other_stream, taken
from ops.calls import equal
from ops.gates_oracle import Case, judge_case

import onepass
import onepass.ops.delta.delta_gates as module
from onepass.kernels import scratch
from onepass.ops.delta import gate_kernels as kernels

__all__ = ["memory_goes_back"]
pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"), other_stream]
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16


def inputs(*lead, H=32, dtype=BF16, seed=0):
    """a, b, a_log and dt_bias, and dg and dbeta."""
    generator = torch.Generator("cuda").manual_seed(seed)
    shapes = [(*lead, H)] * 2 + [(H,)] * 2 + [(*lead, H)] * 2
    types = dtype, dtype, FP32, FP32, FP32, dtype
    return [torch.randn(*s, device="cuda", dtype=t, generator=generator) for s, t in zip(shapes, types, strict=True)]


def step(a, b, a_log, dt_bias, dg, dbeta):
    """g, beta and all gradients, on leaves of the current stream."""
    leaves = [t.detach().requires_grad_() for t in (a, b, a_log, dt_bias)]
    ys = onepass.delta_gates(*leaves, backend="triton")
    return [*(y.detach() for y in ys), *torch.autograd.grad(ys, leaves, (dg, dbeta))]


@pytest.mark.parametrize("dtype", (BF16, FP16, FP32), ids=("bf16", "fp16", "fp32"))
@pytest.mark.parametrize("H", (1, 7, 32, 48, 100, 1000, 4096))
def test_every_width_of_few_and_of_many_rows(H, dtype):
    for lead in ((1,), (3, 37), ((1 << 20) // H + 3,)):
        report = judge_case(module, Case(small=False, lead=lead, width=H, dtype=dtype, b=dtype))
        assert report, report


@pytest.mark.parametrize("layout", ("joined", "joined, followed"))
@pytest.mark.parametrize(("groups", "width"), ((16, 2), (8, 4), (5, 3), (64, 1)))
def test_groups_of_a_projection(groups, width, layout):
    case = Case(small=False, lead=(2, 3000), groups=groups, width=width, layout=layout, dtype=BF16, b=BF16)
    report = judge_case(module, case)
    assert report, report


def test_groups_take_no_copy():
    projected = torch.randn(4, 4096, 64 + 64, device="cuda", dtype=BF16)[..., :64]
    b, a = projected.unflatten(-1, (16, 4)).chunk(2, -1)
    vectors = inputs(1)[2:4]
    onepass.delta_gates(a, b, *vectors)
    used, ys = taken(lambda: onepass.delta_gates(a, b, *vectors))
    assert used == sum(y.nbytes for y in ys)


@needs_60_gib
def test_more_elements_than_31_bits():
    gc.collect()
    torch.cuda.empty_cache()
    M = 2**31 // 64 + 5
    a, b, *vectors = inputs(M, H=64)[:4]
    g, beta = onepass.delta_gates(a, b, *vectors)
    assert equal([g[-64:], beta[-64:]], onepass.delta_gates(a[-64:], b[-64:], *vectors))


def test_a_hundred_calls_are_bitwise_equal():
    given = inputs(20_000)
    first = step(*given)
    assert all(equal(first, step(*given)) for _ in range(100))
    assert not any(counters.any() for _, counters in scratch._kept.values())


def test_nobody_waits_and_one_kernel_each_way():
    given = inputs(2, 2048)
    step(*given)
    with nobody_waits():
        step(*given)
    names = launched(lambda: step(*given))
    assert len(names) == 2, names


def test_in_a_graph():
    given = inputs(1, 4096)
    results, graph = captured(lambda: step(*given))
    given[0].normal_()
    graph.replay()
    assert equal(results, step(*given))


def test_a_new_number_of_rows_compiles_nothing():
    both = kernels._gates_forward_kernel, kernels._gates_backward_kernel
    step(*inputs(2, 64, H=24))
    before = compilations(*both)
    for lead in ((1, 1), (1, 2), (3, 3), (2, 16), (33,), (1, 40_000)):
        step(*inputs(*lead, H=24))
    assert compilations(*both) == before > 0


def test_compiled():
    torch._dynamo.reset()
    *given, dg, dbeta = inputs(2, 512)
    leaves = [t.requires_grad_() for t in given]
    ys = torch.compile(lambda *ts: [y * 1 for y in onepass.delta_gates(*ts)], fullgraph=True)(*leaves)
    found = [*(y.detach() for y in ys), *torch.autograd.grad(ys, leaves, (dg, dbeta))]
    assert equal(found, step(*given, dg, dbeta))
