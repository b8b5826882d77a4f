"""What only a GPU shows of norm_linear: cuBLAS's sums, the memory that is kept, and graphs."""

import gc

import pytest
import torch
from gpu.calls import captured, launched
from torch.nn import functional as F

import onepass
from onepass.ops.norm.norm_linear import norm_linear_reference
from onepass.testing.budget import compare, run

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
FP32, BF16 = torch.float32, torch.bfloat16
M, K, N = 512, 4096, 6144
kinds = pytest.mark.parametrize("layer", (True, False), ids=("layer", "rms"))


def inputs(layer, rows=M, seed=0):
    """x, norm_weight, weight, bias and norm_bias, and the gradients of y and of norm(x)."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def randn(*shape, scale=1.0):
        return (scale * torch.randn(shape, device="cuda", generator=generator)).to(BF16)

    leaves = randn(rows, K), randn(K), randn(N, K, scale=K**-0.5), randn(N), randn(K) if layer else None
    return [t if t is None else t.requires_grad_() for t in leaves], [randn(rows, N), randn(rows, K)]


def op(layer, function=onepass.norm_linear, **options):
    def call(x, norm_weight, weight, bias, norm_bias):
        norm = "layer_norm" if layer else "rms_norm"
        return function(x, norm_weight, weight, bias, norm_bias=norm_bias, norm=norm, **options)

    return call


def equal(a, b):
    return len(a) == len(b) and all(torch.equal(p, q) for p, q in zip(a, b, strict=True))


@kinds
@pytest.mark.parametrize("returns", (False, True), ids=("", "norm too"))
def test_within_the_budget(layer, returns):
    leaves, dys = inputs(layer)
    given = dict(zip(("x", "norm_weight", "weight", "bias", "norm_bias"), leaves, strict=True))
    dys = dys[: 1 + returns]
    reference = op(layer, norm_linear_reference, return_norm_output=returns)
    ours = run(op(layer, backend="triton", return_norm_output=returns), given, dys)
    report = compare([(ours, run(reference, given, dys), run(reference, given, dys, torch.float64))], BF16)
    assert report, report


def with_h(layer, seed=0):
    """The inputs and a residual, and the gradients of y and of h."""
    leaves, dys = inputs(layer, seed=seed)
    generator = torch.Generator("cuda").manual_seed(seed + 1)
    return [*leaves, torch.randn(M, K, device="cuda", generator=generator).to(BF16).requires_grad_()], dys


@kinds
@pytest.mark.parametrize("added", (True, False), ids=("residual", "input"))
def test_with_h_within_the_budget(layer, added):
    leaves, dys = with_h(layer)
    names = ("x", "norm_weight", "weight", "bias", "norm_bias", "residual")
    given = dict(zip(names, leaves if added else [*leaves[:5], None], strict=True))

    def of(function, **options):
        return lambda *t: op(layer, function, residual=t[5], return_input=True, **options)(*t[:5])

    reference = of(norm_linear_reference, stored=BF16)
    ours, exact = run(of(onepass.norm_linear, backend="triton"), given, dys), run(reference, given, dys, torch.float64)
    report = compare([(ours, run(reference, given, dys), exact)], BF16)
    assert report, report
    again = run(of(onepass.norm_linear, backend="triton"), given, dys)
    assert equal(list(ours.values()), list(again.values()))


@kinds
def test_no_kernel_but_the_norms_adds(layer):
    leaves, dys = with_h(layer)
    asked = [t for t in leaves if t is not None]

    def additions(call):
        return sum("Functor_add" in name for name in launched(call))

    def together():
        ys = op(layer, residual=leaves[5], backend="triton")(*leaves[:5])
        torch.autograd.grad(ys, asked, dys)

    def apart():
        h = leaves[0] + leaves[5]
        torch.autograd.grad([op(layer, backend="triton")(h, *leaves[1:5]), h * 1], asked, dys)

    assert additions(apart) == additions(together) + 2


@kinds
def test_graphs_replay_with_a_residual(layer):
    leaves, dys = with_h(layer)

    def step():
        fresh = [t if t is None else t.detach().requires_grad_() for t in leaves]
        ys = op(layer, residual=fresh[5], backend="triton")(*fresh[:5])
        return [*(y.detach() for y in ys), *torch.autograd.grad(ys, [t for t in fresh if t is not None], dys)]

    expected = [t.clone() for t in step()]
    results, graph = captured(step)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(results[1], expected[1])  # h
    for a, b in zip(results, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2 * b.abs().max().item())  # cuBLAS may choose anew


@kinds
@pytest.mark.parametrize("main", (FP32, BF16))
def test_main_grad_over_two_microbatches(layer, main):
    leaves, dys = inputs(layer)
    weight = leaves[2]
    weight.main_grad, weight.grad_added_to_main_grad = torch.zeros_like(weight, dtype=main), False
    exact = torch.zeros_like(weight, dtype=torch.float64)
    for _ in range(2):
        weight.grad = None
        y, normed = op(layer, backend="triton", return_norm_output=True)(*leaves)
        y.backward(dys[0])
        exact += dys[0].double().T @ normed.detach().double()
        error = ((weight.main_grad.double() - exact).norm() / exact.norm()).item()
        assert error <= (1e-4 if main is FP32 else 4e-3), error  # norm(x), rebuilt, may round otherwise here and there
        assert weight.grad_added_to_main_grad is True and not weight.grad.any()


@kinds
def test_graphs_replay(layer):
    leaves, dys = inputs(layer)

    def step():
        fresh = [t if t is None else t.detach().requires_grad_() for t in leaves]
        ys = op(layer, backend="triton", return_norm_output=True)(*fresh)
        return [*(y.detach() for y in ys), *torch.autograd.grad(ys, [t for t in fresh if t is not None], dys)]

    expected = [t.clone() for t in step()]
    results, graph = captured(step)
    for _ in range(2):
        for t in results:
            t.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        for a, b in zip(results, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2 * b.abs().max().item())  # cuBLAS may choose anew
    first = [t.clone() for t in results]
    graph.replay()
    torch.cuda.synchronize()
    assert equal(results, first)


def test_graphs_add_to_main_grad_at_each_replay():
    leaves, dys = inputs(False)
    main_grad = torch.zeros_like(leaves[2], dtype=FP32)

    def step():
        fresh = [t if t is None else t.detach().requires_grad_() for t in leaves]
        fresh[2].main_grad = main_grad
        op(False, backend="triton")(*fresh).backward(dys[0])
        return fresh[2].grad

    dweight, graph = captured(step)
    assert dweight is None
    main_grad.zero_()
    graph.replay()
    torch.cuda.synchronize()
    once = main_grad.clone()
    graph.replay()
    torch.cuda.synchronize()
    assert once.any()
    torch.testing.assert_close(main_grad, 2 * once, rtol=1e-5, atol=1e-5 * once.abs().max().item())


@kinds
def test_keeps_one_activation_less(layer):
    leaves, dys = inputs(layer, rows=4096)
    x, norm_weight, weight, bias, norm_bias = leaves

    def separate():
        if layer:
            normed = onepass.layer_norm(x, norm_weight, norm_bias, backend="triton")
        else:
            normed = onepass.rms_norm(x, norm_weight, backend="triton")
        return F.linear(normed, weight, bias)

    def kept(forward):
        y = forward()  # workspaces and scratch made
        torch.autograd.grad(y, [t for t in leaves if t is not None], dys[0])
        del y
        gc.collect()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        y = forward()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated() - before - y.numel() * y.element_size()

    ours, theirs = kept(lambda: op(layer, backend="triton")(*leaves)), kept(separate)
    size = x.numel() * x.element_size()
    assert ours <= 2 * 4096 * 4 + 4096  # the rows' statistics
    assert abs(theirs - ours - size) <= 64 * 1024, (ours, theirs, size)
