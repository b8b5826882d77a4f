"""What only a GPU shows of ragged_norm: real tiles, lanes that end at the same time, streams, graphs, tables, sizes."""

import pytest
import torch
from fusion.ragged_norm_oracle import Case, draw, exact, run
from gpu.calls import memory_goes_back, needs_60_gib, nobody_waits, warmed  # noqa: F401

from onepass.kernels import device_tables as tables
from onepass.ops.norm.ragged import kernels
from onepass.ops.norm.ragged import lanes as ragged_lanes
from onepass.ops.norm.ragged import ragged_norm as module
from onepass.testing.budget import compare

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
forward, backward = torch.ops.onepass.ragged_norm_forward, torch.ops.onepass.ragged_norm_backward
MIXED = (32, 64, 96, 128, 192, 256, 384, 512) * 8
kinds = pytest.mark.parametrize("layer", (True, False), ids=("layer", "rms"))


def within(case, given=None):
    given = given or draw(case)
    ours = run(module, case, *given)
    report = compare([(ours, exact(case, *given, FP32), exact(case, *given, torch.float64))], case.dtype)
    assert report, f"{case}\n{report}"
    return ours


def both(case, xs, weights, biases, dys):
    y, mean, rstd = forward(xs, weights, biases, case.norm, case.eps, case.packed)
    asked = len(weights) > 0, case.layer
    return [y, mean, rstd, *backward(dys, xs, weights, mean, rstd, case.norm, case.packed, *asked)]


def equal(a, b):
    return len(a) == len(b) and all(torch.equal(p, q) for p, q in zip(a, b, strict=True))


# ---- real tiles ----


@kinds
@pytest.mark.parametrize("dtype", (BF16, FP32, FP16), ids=("bf16", "fp32", "fp16"))
@pytest.mark.parametrize("slices", (False, True), ids=("separate", "slices"))
def test_lanes_of_all_kinds(slices, dtype, layer):
    widths = (16, 24, 40, 64, 128, 200, 256, 512, 1000, 1024, 1536, 2048, 2056, 5000, 16384)
    for lead in ((1,), (3,), (5, 61), (1025,)):
        within(Case(widths, lead, layer, dtype, vectors=dtype, slices=slices, packed=lead != (3,), tile=0))


@kinds
@pytest.mark.parametrize("dtype", (BF16, FP32), ids=("bf16", "fp32"))
def test_odd_lanes(dtype, layer):
    for widths in ((1, 3, 17, 33, 63, 65, 129, 255, 257, 511, 1023, 2047, 2049, 4097), (40, 41), (31,)):
        within(Case(widths, (333,), layer, dtype, packed=False, tile=0, eps=0.25))  # of one number little but eps is left


@kinds
def test_64_lanes_of_which_many_end_at_the_same_time(layer):
    case = Case(MIXED, (2048,), layer, BF16, slices=True, tile=0)
    given = draw(case)
    first = run(module, case, *given)
    within(case, given)
    for _ in range(20):
        assert equal(list(run(module, case, *given).values()), list(first.values()))


@pytest.mark.parametrize("count", (1, 2, 132, 1000))
def test_few_lanes_and_many(count):
    within(Case((128,) * count, (4096 if count < 3 else 200,), True, BF16, slices=True, tile=0))


def test_few_wide_lanes_whose_last_sums_are_shared():
    case = Case((2048, 1024), (20_000,), True, BF16, tile=0)
    given = draw(case)
    first = within(case, given)
    for _ in range(10):
        assert equal(list(run(module, case, *given).values()), list(first.values()))


@pytest.mark.parametrize("layout", ("strided", "sliced", "transposed", "swapped", "expanded", "unaligned", "mixed"))
def test_layouts(layout):
    within(Case((64, 128, 40), (6, 70), dtype=BF16, layout=layout, dy_layout=layout, tile=0))


def test_nan_stays_in_its_row_and_lane():
    case = Case((64, 512, 3000), (50,), True, FP32, tile=0)
    xs, weights, biases, dys = draw(case)
    for lane in range(3):
        spoilt = [x.clone() for x in xs]
        spoilt[lane][20, 5] = float("nan")
        y, _, _, dx, *_ = both(case, spoilt, weights, biases, dys)
        for whole in (y, dx):
            for i, part in enumerate(whole.split(case.widths, -1)):
                assert part[20].isnan().all() if i == lane else part.isfinite().all()
                assert part.isfinite().all(-1).sum() == (49 if i == lane else 50)


@needs_60_gib
def test_more_than_31_bits_of_values():
    width, rows = 1024, 2_100_000
    x = torch.randn(rows, 2 * width, device="cuda", dtype=BF16)
    xs = [x[:, :width], x[:, width:]]
    for packed in (True, False):
        y, _, rstd = forward(xs, [], [], "rms_norm", 1e-6, packed)
        dx, *_ = backward(xs, xs, [], torch.empty(0, device="cuda"), rstd, "rms_norm", packed, False, True)
        for whole in (y, dx):
            last = whole[-1, width:] if packed else whole[-width:]
            assert last.isfinite().all()
        expected = module.ragged_norm_reference([xs[1][-1:]], [], [], norm="rms_norm", eps=1e-6)[0][0]
        torch.testing.assert_close(y[-1, width:] if packed else y[-width:], expected)
        del y, dx


def test_more_rows_than_one_dimension_of_a_grid():
    xs = [torch.randn(70_000, 4096, device="cuda", dtype=BF16)]
    y, *_ = forward(xs, [], [], "rms_norm", 1e-6, True)
    torch.testing.assert_close(y[-3:], module.ragged_norm_reference([xs[0][-3:]], [], [], norm="rms_norm", eps=1e-6)[0])


# ---- nobody waits, nothing compiles again ----


def test_nobody_waits_and_nothing_is_sent_again(monkeypatch):
    case = Case(MIXED, (100,), dtype=BF16, slices=True, tile=0)
    given = draw(case)
    both(case, *given)
    monkeypatch.setattr(tables, "_sent", None)
    with nobody_waits():
        both(case, *given)


def test_new_addresses_wait_for_nobody():
    case = Case((64, 128), (100,), dtype=BF16, tile=0)
    both(case, *draw(case))
    again = draw(case, 1)
    kept = [[torch.cat([t, t])[: len(t)] for t in group] for group in again]
    with nobody_waits():
        found = both(case, *kept)
    assert equal(found, both(case, *again))


def test_another_number_of_rows_compiles_nothing():
    given = {}
    for rows in (50, 51, 4000):
        case = Case((64, 100, 512), (rows,), dtype=BF16, slices=True, tile=0)
        given[rows] = case, draw(case)
    both(given[50][0], *given[50][1])
    jits = [kernel.jit for kernel in (kernels._lanes_forward_kernel, kernels._lanes_backward_kernel)]
    before = [sum(len(cache[0]) for cache in jit.device_caches.values()) for jit in jits]
    for rows in (51, 4000):
        both(given[rows][0], *given[rows][1])
    assert [sum(len(cache[0]) for cache in jit.device_caches.values()) for jit in jits] == before


# ---- streams and graphs ----


def test_two_streams_at_once():
    cases = [Case((64, 512, 96) * 8, (2000,), dtype=BF16, slices=True, tile=0) for _ in range(2)]
    given = [draw(case, seed) for seed, case in enumerate(cases)]
    expected = [both(case, *each) for case, each in zip(cases, given, strict=True)]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in cases]
    found = [[], []]
    for _ in range(20):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                found[i].append(both(cases[i], *given[i]))
    torch.cuda.synchronize()
    for i in range(2):
        assert all(equal(each, expected[i]) for each in found[i])


@pytest.mark.parametrize("warm", (True, False), ids=("warm", "new lanes"))
def test_replays_of_a_graph(warm):
    """Of addresses that were there before the capture, and of some that only the graph has seen."""
    case = Case((64, 512, 96), (300,), dtype=BF16, tile=0)
    given = draw(case)
    expected = both(case, *given)  # compiles
    static = given if warm else [[t.clone() for t in group] for group in given]
    if warm:
        warmed(lambda: both(case, *static))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = both(case, *static)
    ragged_lanes._plans.clear()  # what else is kept may go: the graph has its own
    tables._kept.clear()
    junk = [torch.full((1 << 16,), -1, dtype=torch.int64, device="cuda") for _ in range(20)]
    for seed in range(3):
        new = draw(case, seed)
        for group, fresh in zip(static, new, strict=True):
            for t, value in zip(group, fresh, strict=True):
                t.copy_(value)
        graph.replay()
        replayed = [t.clone() for t in found]
        assert equal(replayed, both(case, *new))
    assert equal(expected[:1], both(case, *draw(case))[:1]) and junk


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")  # PyTorch's own, which holds its pool with one
def test_cudagraph_trees_of_inductor():
    case = Case((64, 512, 96), (300,), dtype=BF16, slices=True, tile=0)
    torch._dynamo.reset()
    compiled = torch.compile(lambda *groups: [t * 1 for t in both(case, *groups)], fullgraph=True, mode="reduce-overhead")
    for seed in range(5):
        given = draw(case, seed)
        torch.compiler.cudagraph_mark_step_begin()
        assert equal([t.clone() for t in compiled(*given)], both(case, *given))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_on_a_gpu_that_is_not_the_current_one():
    case = Case((64, 100), (50,), dtype=BF16, tile=0)
    given = draw(case)
    there = [[t.to("cuda:1") for t in group] for group in given]
    assert equal([t.to("cuda:0") for t in both(case, *there)], both(case, *given))
