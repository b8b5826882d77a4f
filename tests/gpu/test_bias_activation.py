"""What only a GPU shows: compilations, streams, graphs, memory, races, sizes past 32 bits."""

import gc
import os
import pathlib
import subprocess
import sys

import pytest
import torch
from gpu.calls import compilations, nobody_waits, replays_on_any_stream, taken

import onepass
from onepass.kernels import column_reduce
from onepass.ops.activation import kernels as shared
from onepass.runtime import saved

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def inputs(M, H, gated=False, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    W = 2 * H if gated else H
    x = torch.randn(M, W, device="cuda", dtype=dtype, generator=generator).requires_grad_()
    bias = torch.randn(W, device="cuda", dtype=dtype, generator=generator).requires_grad_()
    return x, bias, torch.randn(M, H, device="cuda", dtype=dtype, generator=generator)


def grads(activation, x, bias, dy, **options):
    x, bias = x.detach().requires_grad_(), bias.detach().requires_grad_()  # leaves of the current stream
    y = onepass.bias_activation(x, bias, activation, **options)
    return (y, *torch.autograd.grad(y, (x, bias), dy))


def equal(a, b):
    return all(torch.equal(p, q) for p, q in zip(a, b, strict=True))


def close_to_formula(activation, x, bias, dy, **options):
    got = grads(activation, x, bias, dy, **options)
    exact = grads(activation, x.detach().double().requires_grad_(), bias.detach().double().requires_grad_(), dy.double())
    return all((a.double() - b).norm() <= 4e-3 * b.norm() for a, b in zip(got, exact, strict=True))


# ---- compilations ----


def compiled():
    """How many kernels of this op Triton has compiled or loaded so far in this process."""
    return compilations(shared._forward_kernel, shared._backward_kernel, column_reduce._column_sum_kernel)


def test_a_new_number_of_rows_compiles_nothing_and_a_new_width_once():
    for activation, gated in (("gelu", False), ("swiglu", True)):
        grads(activation, *inputs(64, 1152, gated))
        before = compiled()
        for M in (1, 2, 3, 16, 33, 4096, 5000, 70000):
            grads(activation, *inputs(M, 1152, gated))
        assert compiled() == before > 0
        for width in (1168, 2320, 4624, 5003):
            before = compiled()
            grads(activation, *inputs(32, width, gated))
            assert compiled() <= before + 2  # one forward, one backward


def test_token_weights_compile_nothing_for_a_new_number_of_rows_either():
    def run(M):
        x, bias, dy = inputs(M, 1152, True)
        onepass.bias_swiglu(x, bias, token_weight=torch.rand(M, device="cuda", requires_grad=True)).backward(dy)

    run(64)
    before = compiled()
    for M in (1, 17, 32, 999):
        run(M)
    assert compiled() == before > 0


SMALL = """
import torch, onepass
x = torch.randn(8, 96, device="cuda", requires_grad=True)
onepass.bias_gelu(x, torch.zeros(96, device="cuda", requires_grad=True)).sum().backward()
torch.cuda.synchronize()
"""


def test_a_later_process_finds_everything_compiled(tmp_path):
    def run():
        subprocess.run([sys.executable, "-c", SMALL], check=True, env=os.environ | {"TRITON_CACHE_DIR": str(tmp_path)})
        return {str(p) for p in pathlib.Path(tmp_path).rglob("*") if p.is_file()}

    first = run()
    assert first and run() == first


# ---- right and the same, every time and everywhere ----


def test_a_thousand_calls_are_bitwise_equal():
    args = inputs(4096, 2048)
    first = grads("gelu", *args)
    assert all(equal(first, grads("gelu", *args)) for _ in range(1000))


def test_streams_at_the_same_time_do_not_meet():
    cases = [inputs(2048, 2048, seed=seed) for seed in range(4)]
    alone = [grads("gelu", *case) for case in cases]
    streams = [torch.cuda.Stream() for _ in cases]
    torch.cuda.synchronize()
    for _ in range(50):
        together = []
        for stream, case in zip(streams, cases, strict=True):
            with torch.cuda.stream(stream):
                together.append(grads("gelu", *case))
        torch.cuda.synchronize()
        assert all(equal(a, b) for a, b in zip(alone, together, strict=True))


def test_graphs_replay_on_any_stream():
    x, bias, dy = inputs(512, 4096)
    assert replays_on_any_stream(lambda: grads("gelu", x, bias, dy))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")  # torch's own, made empty to open a memory pool
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_is_the_same(mode):
    x, bias, dy = inputs(64, 256, gated=True)
    fused = torch.compile(lambda x, bias: onepass.bias_swiglu(x * 1, bias), fullgraph=True, mode=mode)
    for _ in range(3):
        got = fused(x, bias)
        got = (got, *torch.autograd.grad(got, (x, bias), dy))
        assert equal([t.clone() for t in got], grads("swiglu", x, bias, dy))


def test_no_call_waits_for_the_gpu():
    x, bias, dy = inputs(256, 512)
    for save in saved.SAVES:
        grads("gelu", x, bias, dy, save=save)  # compiled, scratch and pinned memory made
        with nobody_waits():
            grads("gelu", x, bias, dy, save=save)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_device_that_is_not_the_current_one():
    args = inputs(64, 256)
    other = [t.detach().to("cuda:1").requires_grad_() for t in args]
    assert torch.cuda.current_device() == 0
    assert equal(grads("gelu", *args), [t.to("cuda:0") for t in grads("gelu", *other)])


# ---- sizes past what 32 bits and a grid hold ----


def test_offsets_past_31_bits():
    wide = torch.empty(70000, 32768, device="cuda", dtype=torch.bfloat16)
    x = wide[:, 128:256].normal_().requires_grad_()
    bias = torch.randn(128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    assert close_to_formula("gelu", x, bias, torch.randn(70000, 128, device="cuda", dtype=torch.bfloat16))


def test_more_blocks_of_rows_than_a_grid_dimension():
    rows = 65535 * 2048 + 4097
    x = torch.randn(rows, 1, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    bias = torch.ones(1, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    y, dx, _ = grads("relu", x, bias, torch.ones_like(x))
    assert torch.equal(y, (x.float() + 1).relu().bfloat16())
    assert torch.equal(dx, (x.float() + 1 > 0).bfloat16())


def test_every_width_and_alignment():
    for H in (1, 2, 3, 8, 24, 63, 64, 65, 100, 511, 512, 520, 1000, 1408, 5000):
        for activation, gated in (("gelu", False), ("swiglu", True)):
            x, bias, dy = inputs(131, H, gated)
            assert close_to_formula(activation, x, bias, dy), (activation, H)
            shifted = torch.empty(x.numel() + 1, device="cuda", dtype=x.dtype)[1:].view(x.shape).copy_(x.detach())
            assert equal(grads(activation, x, bias, dy), grads(activation, shifted.requires_grad_(), bias, dy)), (activation, H)


# ---- a gate and a linear part in two tensors ----


def pair(M, H, how="apart", dtype=torch.bfloat16, seed=0):
    """Return a gate, a linear part and dy: each by itself, the halves of one tensor, or from an address that no load likes."""
    x, _, dy = inputs(M, H, True, dtype, seed)
    halves = x.detach().split(H, -1)
    if how == "apart":
        halves = [t.contiguous() for t in halves]
    elif how == "unaligned":
        halves = [torch.empty(M * H + 1, device="cuda", dtype=dtype)[1:].view(M, H).copy_(t) for t in halves]
    return *(t.requires_grad_() for t in halves), dy


def pair_grads(gate, linear, dy, activation="swiglu", **options):
    gate, linear = (t.detach().requires_grad_() for t in (gate, linear))
    y = onepass.bias_activation(gate, None, activation, linear=linear, **options)
    return (y, *torch.autograd.grad(y, (gate, linear), dy))


def pair_close_to_formula(given, activation="swiglu", **options):
    found = pair_grads(*given, activation, backend="triton", **options)
    exact = pair_grads(*(t.double() for t in given), activation, **options)
    return all((ours.double() - right).norm() <= 4e-3 * right.norm() for ours, right in zip(found, exact, strict=True))


@pytest.mark.parametrize("how", ("apart", "halves", "unaligned"))
def test_two_tensors_of_every_width(how):
    for H in (1, 2, 3, 8, 24, 63, 64, 65, 100, 511, 512, 520, 1000, 1408, 5000):
        given = pair(131, H, how)
        assert pair_close_to_formula(given), H
        assert equal(pair_grads(*given), pair_grads(*pair(131, H))), H


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32))
@pytest.mark.parametrize("activation", ("swiglu", "geglu", "quick_geglu", "reglu"))
def test_two_tensors_of_every_activation(activation, dtype):
    for how, H in (("apart", 65), ("halves", 512)):
        given = pair(131, H, how, dtype)
        assert pair_close_to_formula(given, activation)
        assert pair_close_to_formula(given, activation, clamp=1.0, linear_offset=1.0)


def test_two_tensors_repeat_wait_for_nobody_and_allocate_their_results():
    given = pair(4096, 4096, "halves")
    first = pair_grads(*given)
    with nobody_waits():
        pair_grads(*given)
    assert all(equal(first, pair_grads(*given)) for _ in range(100))
    peak, results = taken(lambda: pair_grads(*given))
    assert peak <= sum(t.numel() * t.element_size() for t in results) + 4096


def test_two_tensors_compile_nothing_for_a_new_number_of_rows():
    pair_grads(*pair(64, 1152))
    before = compiled()
    for M in (1, 2, 3, 16, 33, 4096, 70000):
        pair_grads(*pair(M, 1152))
    assert compiled() == before > 0


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
def test_two_tensors_compiled_and_captured():
    given = pair(64, 256, "halves")
    expected = pair_grads(*given)
    fused = torch.compile(lambda gate, linear: onepass.bias_activation(gate * 1, None, "swiglu", linear=linear), fullgraph=True)
    gate, linear = (t.detach().requires_grad_() for t in given[:2])
    y = fused(gate, linear)
    assert equal((y, *torch.autograd.grad(y, (gate, linear), given[2])), expected)
    assert replays_on_any_stream(lambda: pair_grads(*given))


def test_two_tensors_with_offsets_past_31_bits():
    wide = torch.empty(70000, 32768, device="cuda", dtype=torch.bfloat16)
    gate, linear = wide[:, 128:256].normal_(), wide[:, -128:].normal_()
    dy = torch.randn(70000, 128, device="cuda", dtype=torch.bfloat16)
    assert pair_close_to_formula((gate, linear, dy))


# ---- memory ----


def kept(save, layers=8):
    """MiB that `layers` activations keep for backward, and the gradient."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    h = inputs(2048, 4096)[0]
    bias = torch.zeros(4096, device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    y = h * 1
    for _ in range(layers):
        y = onepass.bias_gelu(y, bias, save=save) * 1.5
    torch.cuda.synchronize()
    torch.empty(1, device="cuda")  # lets the allocator see what the side stream has finished with
    used = torch.cuda.memory_allocated() - before - y.numel() * y.element_size()  # y itself is the caller's
    (dh,) = torch.autograd.grad(y.float().sum(), h)
    return used / 2**20, dh


def test_offload_takes_the_bytes_away_and_brings_them_back_exactly():
    plain, expected = kept("input")
    away, dh = kept("offload")
    assert plain >= 128 and away <= 0.05 * plain
    assert torch.equal(dh, expected)


def test_offload_twice_over_a_retained_graph_and_out_of_order():
    x, bias, dy = inputs(256, 512)
    other = inputs(256, 512, seed=1)
    y, z = (onepass.bias_gelu(t[0], t[1], save="offload") for t in ((x, bias, dy), other))
    first = torch.autograd.grad(y, x, dy, retain_graph=True)  # the earlier one first
    expected = torch.autograd.grad(onepass.bias_gelu(*other[:2]), other[0], other[2])
    assert equal(torch.autograd.grad(z, other[0], other[2]), expected)
    assert equal(first, torch.autograd.grad(y, x, dy))
    assert equal(first, torch.autograd.grad(onepass.bias_gelu(x, bias), x, dy))


def test_offload_brings_back_one_ahead():
    x, bias, _ = inputs(256, 512)
    first = onepass.bias_gelu(x, bias, save="offload")
    between = first.detach().requires_grad_()
    onepass.bias_gelu(between, bias, save="offload").sum().backward()
    ahead = saved._offload_streams[x.device.index].ahead
    assert ahead is not None  # x, which the backward of `first` will want next
    torch.cuda.synchronize()
    assert torch.equal(ahead[1], x)


def test_what_was_brought_ahead_and_not_used_is_not_mistaken_for_a_later_step():
    for step in range(3):
        x, bias, dy = inputs(256, 512, seed=step)
        first = onepass.bias_gelu(x, bias, save="offload")
        between = first.detach().requires_grad_()
        y = onepass.bias_gelu(between, bias, save="offload")
        if step < 2:
            torch.autograd.grad(y, between, dy)  # stops above the first layer, whose x has been brought ahead
            del first, between, y
    assert equal(torch.autograd.grad(first, x, dy), torch.autograd.grad(onepass.bias_gelu(x, bias), x, dy))


def test_offload_refuses_to_be_captured():
    x, bias, _ = inputs(8, 64)
    onepass.bias_gelu(x, bias)
    with pytest.raises(RuntimeError, match="CUDA graph"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        onepass.bias_gelu(x, bias, save="offload")


def test_a_step_allocates_its_results_and_nothing_else():
    x, bias, dy = inputs(4096, 4096)
    grads("gelu", x, bias, dy)
    peak, results = taken(lambda: grads("gelu", x, bias, dy))
    assert peak <= sum(t.numel() * t.element_size() for t in results) + 4096
