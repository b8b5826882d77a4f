"""What only a GPU shows of layer_norm and rms_norm: real tiles, programs that wait for each other, streams, graphs, sizes."""

import gc

import pytest
import torch
from gpu.calls import compilations, nobody_waits, replays_on_any_stream, taken

import onepass
from onepass.kernels import scratch
from onepass.ops.norm import backward as norm_backward
from onepass.ops.norm import few_rows
from onepass.ops.norm import forward as norm_forward
from onepass.ops.norm import norm as module
from onepass.runtime.sizes import processors
from onepass.testing.budget import judge

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
SIZES = (64, 128, 1000, 1024, 3072, 4096, 5000, 8192, 12288, 16384, 32768, 65536, 131072, 262144)
SHARED = (16384, 32768, 53248, 262144)  # rows of which are shared by programs that wait for each other
needs_60_gib = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_properties(0).total_memory < 60 * 2**30, reason="needs 60 GiB"
)
kinds = pytest.mark.parametrize("layer", (True, False), ids=("layer", "rms"))


def inputs(M, H, layer=False, residual=False, dtype=BF16, seed=0):
    """x, weight, bias and residual that ask for gradients, and the gradients of y and h."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def randn(*shape):
        return torch.randn(shape, device="cuda", dtype=dtype, generator=generator)

    leaves = [randn(M, H), randn(H), randn(H) if layer else None, randn(M, H) if residual else None]
    return [t if t is None else t.requires_grad_() for t in leaves], [randn(M, H) for _ in range(1 + residual)]


def norm(layer, **options):
    def call(x, weight, bias, residual):
        if layer:
            return onepass.layer_norm(x, weight, bias, residual=residual, backend="triton", **options)
        return onepass.rms_norm(x, weight, residual=residual, backend="triton", **options)

    return call


def reference(layer, stored):
    def call(x, weight, bias, residual):
        if layer:
            return module.layer_norm_reference(x, weight, bias, residual, stored=stored)
        return module.rms_norm_reference(x, weight, residual, stored=stored)

    return call


def grads(layer, leaves, dys, **options):
    """The outputs and all gradients, on leaves of the current stream."""
    leaves = [t if t is None else t.detach().requires_grad_() for t in leaves]
    ys = norm(layer, **options)(*leaves)
    ys = (ys,) if isinstance(ys, torch.Tensor) else ys
    return (*(y.detach() for y in ys), *torch.autograd.grad(ys, [t for t in leaves if t is not None], dys))


def equal(a, b):
    return len(a) == len(b) and all(torch.equal(p, q) for p, q in zip(a, b, strict=True))


def variant(H, layer=False, dtype=BF16):
    name = "layer_norm" if layer else "rms_norm"
    return onepass.explain(name, torch.empty(1, H, device="cuda", dtype=dtype)).variant


# ---- real tiles ----


@kinds
@pytest.mark.parametrize("dtype", (BF16, FP32, FP16), ids=("bf16", "fp32", "fp16"))
@pytest.mark.parametrize("H", SIZES)
def test_every_size_of_few_and_of_many_rows(H, dtype, layer):
    if dtype is FP16 and not layer:
        pytest.skip("twice as many kernels to compile, and nothing that bf16 does not show")
    residual = dtype is BF16
    for M in (1, 3, max(300, min(2000, 2**26 // H))):
        leaves, dys = inputs(M, H, layer, residual, dtype)
        given = dict(zip(("x", "weight", "bias", "residual"), leaves, strict=True))
        report = judge(norm(layer), reference(layer, dtype), given, dys)
        assert report, f"{M} rows\n{report}"
        if M == 3:
            report = judge(norm(layer, memory_efficient=True), reference(layer, dtype), given, dys)
            assert report, f"memory_efficient\n{report}"


@kinds
@pytest.mark.parametrize("H", (1, 2, 3, 24, 63, 65, 511, 513, 1025, 1408, 2047, 4097, 8200, 12296, 13001, 53248, 65537, 100003))
def test_odd_sizes_and_alignments(H, layer):
    leaves, dys = inputs(37, H, layer, True)
    if H > 3:  # of rows of so few there is no spread
        report = judge(norm(layer), reference(layer, BF16), dict(zip("xwbr", leaves, strict=True)), dys)
        assert report, report
    shifted = [None if t is None else torch.empty(t.numel() + 1, device="cuda", dtype=BF16)[1:].view(t.shape) for t in leaves]
    for t, s in zip(leaves, shifted, strict=True):
        _ = None if t is None else s.copy_(t.detach())
    if H > 3:  # the order of sums may be another, the budget is not
        report = judge(norm(layer), reference(layer, BF16), dict(zip("xwbr", shifted, strict=True)), dys)
        assert report, report
    else:
        grads(layer, shifted, dys)


@pytest.mark.parametrize("H", (1000, 8192, 12288, 32768, 131072))
def test_a_large_mean(H):
    x = (torch.randn(40, H, device="cuda") + 100).requires_grad_()
    weight, bias = (torch.randn(H, device="cuda", requires_grad=True) for _ in range(2))
    given = {"x": x, "weight": weight, "bias": bias, "residual": None}
    for memory_efficient in (False, True):
        report = judge(norm(True, memory_efficient=memory_efficient), reference(True, FP32), given, torch.randn_like(x))
        assert report, report


@kinds
@pytest.mark.parametrize("H", (512, 4096, 32768))
def test_nan_and_infinities_stay_in_their_rows(H, layer):
    for value in (float("nan"), float("inf")):
        leaves, dys = inputs(9, H, layer)
        with torch.no_grad():
            leaves[0][4, 3] = value
        for memory_efficient in (False, True):
            y, dx, *_ = grads(layer, leaves, dys, memory_efficient=memory_efficient)
            for t in (y, dx):
                assert t.isfinite().all(-1).tolist() == [row != 4 for row in range(9)]


# ---- sizes past what 32 bits and a grid hold ----


@kinds
@pytest.mark.parametrize("H", (8, 1024))
def test_more_rows_than_a_grid_dimension(H, layer):
    leaves, dys = inputs(70001 if H > 8 else 2**21 + 5, H, layer, True)
    report = judge(norm(layer), reference(layer, BF16), dict(zip("xwbr", leaves, strict=True)), dys)
    assert report, report


def test_more_rows_than_31_bits():
    M = 2**31 + 1000
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("needs 40 GiB")
    x, weight = torch.ones(M, 1, device="cuda", dtype=BF16), torch.ones(1, device="cuda", requires_grad=True)
    y = onepass.rms_norm(x, weight)
    y.backward(torch.ones_like(y))
    assert y[-1] == 1 and abs(weight.grad.item() / M - 1) < 1e-3


@needs_60_gib
@kinds
@pytest.mark.parametrize("H", (256, 4096, 65536))
def test_more_elements_than_31_bits(H, layer):
    gc.collect()
    torch.cuda.empty_cache()
    M = 2**31 // H + 1000
    leaves, dys = inputs(M, H, layer)
    results = grads(layer, leaves, dys)
    for rows in (slice(0, 5), slice(M // 2, M // 2 + 5), slice(M - 5, M)):
        some = [leaves[0][rows], *leaves[1:]]
        expected = grads(layer, some, [dys[0][rows]])
        assert torch.equal(results[0][rows], expected[0])
        torch.testing.assert_close(results[1][rows], expected[1], rtol=1e-2, atol=1e-4)
    sums = [torch.zeros(H, device="cuda", dtype=torch.float64) for _ in results[2:]]
    block = 2**26 // H
    for first in range(0, M, block):
        x, dy = (t[first : first + block].detach().double() for t in (leaves[0], dys[0]))
        x = x - x.mean(-1, keepdim=True) if layer else x
        eps = 1e-5 if layer else 1e-6
        sums[0] += (dy * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)).sum(0)
        if layer:
            sums[1] += dy.sum(0)
    for got, exact in zip(results[2:], sums, strict=True):
        assert (got.double() - exact).norm() <= 4e-3 * exact.norm()


@needs_60_gib
@kinds
@pytest.mark.parametrize("H", (256, 3072, 32768))
def test_a_row_stride_past_31_bits(H, layer):
    gc.collect()
    torch.cuda.empty_cache()
    wide = torch.empty(3, 2**31 + 64 * H, device="cuda", dtype=BF16)
    x, residual, dy, dh = (wide[:, 1024 + 2 * i * H :][:, :H].normal_() for i in range(4))
    assert x.stride(0) > 2**31 and not x.is_contiguous()
    leaves, _ = inputs(3, H, layer)
    strided = grads(layer, [x, *leaves[1:3], residual], [dy, dh])
    dense = grads(layer, [x.clone(), *leaves[1:3], residual.clone()], [dy.clone(), dh.clone()])
    assert equal(strided, dense)


# ---- the same, every time and everywhere ----


@kinds
@pytest.mark.parametrize("H", (32768, 53248))
def test_programs_that_share_rows_give_the_same_every_time(H, layer):
    leaves, dys = inputs(777, H, layer, True)
    assert "programs a row" in variant(H, layer)
    first = grads(layer, leaves, dys)
    report = judge(norm(layer), reference(layer, BF16), dict(zip("xwbr", leaves, strict=True)), dys)
    assert report, report
    for _ in range(200):
        assert equal(first, grads(layer, leaves, dys))


@kinds
@pytest.mark.parametrize("H", (1024, 4096))
def test_repeated_calls_are_bitwise_equal(H, layer):
    leaves, dys = inputs(4096, H, layer)
    first = grads(layer, leaves, dys)
    assert all(equal(first, grads(layer, leaves, dys)) for _ in range(200))


@kinds
@pytest.mark.parametrize("residual", (True, False), ids=("residual", ""))
@pytest.mark.parametrize(("M", "H"), [*((3000, H) for H in (64, 777, 2048, 4096, 5000, 8192, 12288)), (300, 5000), (500, 40960)])
def test_what_is_frozen_leaves_what_flows_on_its_bits(M, H, layer, residual):
    """A compiler may fuse products and sums otherwise where it leaves something out."""
    leaves, dys = inputs(M, H, layer, residual)
    found = grads(layer, leaves, dys)[1 + residual :]
    wanted = {0: found[0]} | ({3: found[-1]} if residual else {})
    for asking in ([0], [3], [0, 3]) if residual else ([0],):
        given = [leaf if leaf is None or i in asking else leaf.detach() for i, leaf in enumerate(leaves)]
        y = norm(layer)(*given)
        gradients = torch.autograd.grad(y, [given[i] for i in asking], dys if residual else dys[0])
        assert all(torch.equal(wanted[i], gradient) for i, gradient in zip(asking, gradients, strict=True)), asking


@kinds
@pytest.mark.parametrize("dtype", (BF16, FP32), ids=("bf16", "fp32"))
@pytest.mark.parametrize("residual", (True, False), ids=("residual", ""))
@pytest.mark.parametrize("H", (64, 777, 1024, 4096, 8192, 12288, 20000, 65536, 131072))
def test_no_grad_leaves_y_its_bits(H, residual, dtype, layer):
    """Log-probabilities of a policy are found without a graph, and compared with those of a training step."""
    leaves, _ = inputs(300, H, layer, residual, dtype)
    with_graph = norm(layer)(*leaves)
    with torch.no_grad():
        alone = norm(layer)(*leaves)
    assert equal(with_graph, alone) if residual else torch.equal(with_graph, alone)


@kinds
def test_kernels_of_two_kinds_use_the_same_scratch_in_turn(layer):
    cases = [inputs(129, H, layer, seed=H) for H in (32768, 1024, 262144, 5000, 16384, 53248)]
    first = [grads(layer, *case) for case in cases]
    for _ in range(5):
        assert all(equal(a, grads(layer, *case)) for a, case in zip(first, cases, strict=True))
    for _, counters in scratch._kept.values():
        assert not counters.any()


@kinds
@pytest.mark.parametrize("H", (1024, 32768))
def test_streams_at_the_same_time_finish_and_are_right(H, layer):
    cases = [inputs(1000, H, layer, seed=seed) for seed in range(2)]
    alone = [grads(layer, *case) for case in cases]
    streams = [torch.cuda.Stream() for _ in cases]
    torch.cuda.synchronize()
    for _ in range(30):
        together = []
        for stream, case in zip(streams, cases, strict=True):
            with torch.cuda.stream(stream):
                together.append(grads(layer, *case))
        torch.cuda.synchronize()
        assert all(equal(a, b) for a, b in zip(alone, together, strict=True))


@pytest.mark.parametrize("H", SHARED)
def test_a_busy_gpu_does_not_hold_up_programs_that_wait(H):
    """Another stream's kernels take the multiprocessors meanwhile."""
    leaves, dys = inputs(500, H)
    alone = grads(False, leaves, dys)
    other, a = torch.cuda.Stream(), torch.randn(4096, 4096, device="cuda", dtype=BF16)
    torch.cuda.synchronize()
    with torch.cuda.stream(other):
        for _ in range(100):
            a @ a
    for _ in range(20):
        again = grads(False, leaves, dys)
    torch.cuda.synchronize()
    assert equal(alone, again)


@kinds
@pytest.mark.parametrize("H", (512, 4096, 32768))
def test_graphs_replay_on_any_stream(H, layer):
    leaves, dys = inputs(512, H, layer, True)
    assert replays_on_any_stream(lambda: grads(layer, leaves, dys), replays=2)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@kinds
@pytest.mark.parametrize("H", (512, 32768))
def test_a_device_that_is_not_the_current_one(H, layer):
    leaves, dys = inputs(64, H, layer)
    assert torch.cuda.current_device() == 0
    there = [t if t is None else t.detach().to("cuda:1") for t in leaves], [dy.to("cuda:1") for dy in dys]
    assert equal(grads(layer, leaves, dys), [t.to("cuda:0") for t in grads(layer, *there)])


@kinds
@pytest.mark.parametrize("H", (512, 4096, 32768))
def test_no_call_waits_for_the_gpu(H, layer):
    for memory_efficient in (False, True):
        leaves, dys = inputs(256, H, layer, True)
        grads(layer, leaves, dys, memory_efficient=memory_efficient)  # compiled, scratch made
        with nobody_waits():
            grads(layer, leaves, dys, memory_efficient=memory_efficient)


# ---- compilations ----


def compiled():
    """How many kernels of this op Triton has compiled or loaded so far in this process."""
    return compilations(
        norm_forward._short_kernel, norm_forward._long_kernel,
        norm_backward._rows_kernel, norm_backward._shared_kernel, few_rows._few_rows_kernel,
    )  # fmt: skip


@kinds
@pytest.mark.parametrize("H", (384, 2304, 20480))
def test_a_new_number_of_rows_compiles_nothing(H, layer):
    for M in (64, 1025):  # few rows have a kernel of their own
        grads(layer, *inputs(M, H, layer))
    before = compiled()
    for M in (1, 2, 3, 16, 33, 1000, 4096, 5000):
        grads(layer, *inputs(M, H, layer))
    assert compiled() == before > 0


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")  # torch's own, made empty to open a memory pool
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@kinds
@pytest.mark.parametrize("H", (256, 32768))
def test_compiled_is_the_same(H, layer, mode):
    leaves, dys = inputs(64, H, layer, True)
    torch._dynamo.reset()
    fused = torch.compile(lambda x, *rest: norm(layer)(x * 1, *rest), fullgraph=True, mode=mode)
    expected = grads(layer, leaves, dys)
    for _ in range(3):
        ys = fused(*leaves)
        got = (*ys, *torch.autograd.grad(ys, [t for t in leaves if t is not None], dys))
        assert equal([t.detach().clone() for t in got], expected)


# ---- memory ----


@kinds
@pytest.mark.parametrize("H", (512, 4096, 12288, 32768, 65536, 262144))
def test_scratch_stays_small(H, layer):
    leaves, dys = inputs(1024, H, layer)
    grads(layer, leaves, dys)
    scratch._kept.clear()
    peak, results = taken(lambda: grads(layer, leaves, dys))
    kept = sum(a.nbytes + b.nbytes for a, b in scratch._kept.values())
    allowed = (2 if layer else 1) * (processors(leaves[0].device) * H * 16 + 2**20)
    assert kept <= allowed
    statistics = 1024 * 4 * (2 if layer else 1)
    more = peak - sum(t.nbytes for t in results) - statistics
    assert more <= allowed + 8192


@kinds
def test_a_step_allocates_its_results_and_nothing_else(layer):
    leaves, dys = inputs(4096, 4096, layer, True)
    grads(layer, leaves, dys)
    peak, results = taken(lambda: grads(layer, leaves, dys))
    # x and residual have one gradient, which both are given
    distinct = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in results}
    statistics = 4096 * 4 * (2 if layer else 1)
    assert peak <= sum(distinct.values()) + statistics + 8192
