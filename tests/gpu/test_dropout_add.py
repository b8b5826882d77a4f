"""What only a GPU shows of dropout: seeds with no launch, graphs that draw anew, memory, compilations, sizes past 32 bits."""

import pytest
import torch
from gpu.calls import (
    captured,
    compilations,
    deterministic_algorithms,
    launched,
    memory_goes_back,
    needs_60_gib,
    nobody_waits,
    other_stream,
    taken,
)
from ops.calls import equal
from torch.utils.checkpoint import checkpoint

import onepass
from onepass.kernels.philox import draw_seed, keep_mask_formula
from onepass.ops.dropout import kernels

__all__ = ["memory_goes_back"]
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
P, THRESHOLD = 0.25, 16384


def inputs(M, H, dtype=torch.bfloat16):
    x, residual, dy = (torch.randn(M, H, device="cuda", dtype=dtype) for _ in range(3))
    return x.requires_grad_(), residual.requires_grad_(), torch.randn(H, device="cuda", dtype=dtype, requires_grad=True), dy


def grads(x, residual, bias, dy, p=P, **options):
    x, residual, bias = (t.detach().requires_grad_() for t in (x, residual, bias))  # leaves of the current stream
    y = onepass.dropout_add(x, residual, p, bias=bias, **options)
    return (y, *torch.autograd.grad(y, (x, residual, bias), dy))


def gone(x, **options):
    """Which elements a call drops."""
    return onepass.dropout_add(torch.ones_like(x), torch.zeros_like(x), P, **options) == 0


# ---- random numbers ----


def test_eager_calls_launch_nothing_for_their_seed():
    x, residual, bias, dy = inputs(512, 1024)
    grads(x, residual, bias, dy)
    names = launched(lambda: onepass.dropout_add(x, residual, P, bias=bias))
    assert len(names) == 1, names
    assert isinstance(draw_seed(x), int)


def test_the_mask_is_the_formulas():
    for shape in ((64, 1024), (777, 5000), (3, 9), (5000, 64)):
        x = torch.ones(shape, device="cuda")
        torch.manual_seed(9)
        seed = draw_seed(x)
        expected = ~keep_mask_formula(seed, torch.arange(shape[0], device="cuda"), shape[1], THRESHOLD)
        for backend in ("triton", "torch"):
            torch.manual_seed(9)
            assert torch.equal(gone(x, backend=backend), expected)
        assert torch.equal(expected.cpu(), ~keep_mask_formula(seed, torch.arange(shape[0]), shape[1], THRESHOLD))


def test_seeds_repeat_with_manual_seed_saved_states_and_checkpoints():
    x, residual, bias, dy = inputs(256, 512)
    torch.manual_seed(1)
    first, state = gone(x), torch.cuda.get_rng_state()
    second = gone(x)
    torch.cuda.set_rng_state(state)
    assert torch.equal(gone(x), second) and not torch.equal(first, second)
    torch.manual_seed(1)
    assert torch.equal(gone(x), first)
    for reentrant in (True, False):
        torch.manual_seed(2)
        plain = torch.autograd.grad(onepass.dropout_add(x * 1, residual, P, bias=bias), (x, bias), dy)
        torch.manual_seed(2)
        leaves = [t.detach().requires_grad_() for t in (x, residual, bias)]
        checkpoint(lambda a, b, c: onepass.dropout_add(a * 1, b, P, bias=c), *leaves, use_reentrant=reentrant).backward(dy)
        assert equal(plain, (leaves[0].grad, leaves[2].grad))


def test_pytorchs_own_random_numbers_are_others_and_go_on():
    x = torch.ones(64, 64, device="cuda")
    torch.manual_seed(1)
    a, _, b = torch.rand(8, device="cuda"), gone(x), torch.rand(8, device="cuda")
    torch.manual_seed(1)
    assert torch.equal(torch.rand(8, device="cuda"), a) and not torch.equal(a, b)


@other_stream
def test_a_graphs_replays_draw_anew_and_backward_knows_what_forward_dropped():
    x, residual, bias, dy = inputs(256, 512)
    for call in (
        lambda: grads(x, residual, bias, dy),
        lambda: _activation_grads(x, bias, dy),
    ):
        results, graph = captured(call)
        masks = []
        for _ in range(3):
            graph.replay()
            torch.cuda.synchronize()
            y, dx = results[0], results[1]
            masks.append((dx == 0).clone())
            dropped = (y == residual) if len(results) == 4 else (y == 0)
            assert 0.24 < masks[-1].float().mean() < 0.26 and (dropped | ~masks[-1]).all()
        assert not torch.equal(masks[0], masks[1]) and not torch.equal(masks[1], masks[2])


def _activation_grads(x, bias, dy):
    x, bias = (t.detach().requires_grad_() for t in (x, bias))
    y = onepass.bias_gelu(x, bias, dropout=P)
    return (y, *torch.autograd.grad(y, (x, bias), dy))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")  # PyTorch's own, which holds its pool with one
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled(mode):
    torch._dynamo.reset()
    x, residual, bias, dy = inputs(256, 512)
    call = torch.compile(lambda a, b, c: onepass.dropout_add(a, b, P, bias=c) * 1, fullgraph=True, mode=mode)
    masks = []
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        y = call(x, residual, bias)
        dx, dbias = torch.autograd.grad(y, (x, bias), dy)
        masks.append((dx == 0).clone())
        assert 0.24 < masks[-1].float().mean() < 0.26
        torch.testing.assert_close(dbias.float(), torch.where(masks[-1], 0.0, dy.float() / (1 - P)).sum(0), rtol=1e-2, atol=0.2)
    assert not torch.equal(masks[-1], masks[-2])


# ---- right and the same, every time and everywhere ----


def test_nobody_waits():
    x, residual, bias, dy = inputs(256, 512)
    grads(x, residual, bias, dy)
    with nobody_waits():
        grads(x, residual, bias, dy)
        grads(x, residual, bias, dy, 0.0)


def test_a_hundred_calls_from_one_state_are_bitwise_equal():
    args = inputs(4096, 2048)

    def call():
        torch.manual_seed(4)
        return grads(*args)

    first = call()
    with deterministic_algorithms():
        assert all(equal(first, call()) for _ in range(100))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(16384, 4096), (777, 5000), (60000, 64), (37, 1), (4096, 96)])
def test_close_to_the_formula(shape, dtype):
    args = inputs(*shape, dtype)
    torch.manual_seed(5)
    found = grads(*args)
    torch.manual_seed(5)
    exact = grads(*(t.double() for t in args))
    for got, expected in zip(found, exact, strict=True):
        assert (got.double() - expected).norm() <= (4e-3 if dtype != torch.float32 else 1e-6) * expected.norm()


def test_a_new_number_of_rows_or_probability_compiles_little():
    both = kernels._dropout_kernel, kernels._dropout_backward_kernel
    grads(*inputs(64, 1152))
    before = compilations(*both)
    for M in (1, 2, 3, 16, 33, 4096, 5000):
        grads(*inputs(M, 1152))
    assert compilations(*both) == before > 0
    for p in (0.1, 0.2, 0.3, 0.5, 0.7):
        grads(*inputs(64, 1152), p)
    assert compilations(*both) <= before + 2  # thresholds that 16 divides are another kind


def test_no_mask_is_kept():
    x, residual, _, _ = inputs(8192, 4096)
    onepass.dropout_add(x, residual, P)
    used, y = taken(lambda: onepass.dropout_add(x, residual, P))
    assert used == y.numel() * y.element_size()


@needs_60_gib
def test_rows_past_32_bits():
    M, H = 70_000, 32_768  # 2.3e9 elements
    x = torch.ones(M, H, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    torch.manual_seed(6)
    seed = draw_seed(x)
    torch.manual_seed(6)
    y = onepass.dropout_add(x, torch.zeros_like(x), P)
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(x))
    last = torch.arange(M - 8, M, device="cuda")
    expected = keep_mask_formula(seed, last, H, THRESHOLD)
    assert torch.equal(y[-8:] != 0, expected) and torch.equal(dx[-8:] != 0, expected)
