"""linear: the formula's values and gradients, sums in main_grad, what it keeps, autocast, errors.

Over ranks: tests/parallel/test_products.py. main_grad in each kind of pass, checkpointed and compiled:
test_main_grad.py.
"""

import pytest
import torch
from ops.calls import backends, equal, gradients, relative
from ops.oracle import BF16, DEVICE, FP16, FP32
from torch import nn
from torch.nn import functional as F

import onepass
from onepass.ops.linear.linear import linear_reference

SHAPES = [((3, 5), 40, 24), ((), 7, 3), ((1,), 1, 1), ((0, 4), 8, 6), ((6,), 8, 0), ((5,), 0, 4)]


def tensors(lead=(3, 5), K=40, N=24, dtype=FP32, with_bias=True, main=None):
    """x, weight and bias, all of which ask for a gradient; `main`: the type of the parameters' main_grads."""
    x = torch.randn(*lead, K, device=DEVICE).to(dtype).requires_grad_()
    weight = nn.Parameter((torch.randn(N, K, device=DEVICE) / max(K, 1) ** 0.5).to(dtype))
    bias = nn.Parameter(torch.randn(N, device=DEVICE).to(dtype)) if with_bias else None
    for parameter in (weight, bias):
        if main is not None and parameter is not None:
            parameter.main_grad = torch.zeros(parameter.shape, device=DEVICE, dtype=main)
    return x, weight, bias


@backends
@pytest.mark.parametrize("dtype", (FP32, BF16, FP16), ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_as_pytorch_where_nothing_is_asked_of_it(shape, dtype, backend):
    x, weight, bias = tensors(*shape, dtype)
    for some in ((x, weight, bias), (x, weight, None)):
        assert equal(gradients(lambda *t: onepass.linear(*t, backend=backend), some), gradients(F.linear, some))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("main", (FP32, BF16), ids=lambda t: f"main {t}")
@pytest.mark.parametrize("dtype", (FP32, BF16), ids=str)
def test_main_grad_gathers_over_microbatches(dtype, main, shape):
    x, weight, bias = tensors(*shape, dtype, main=main)
    exact = [0, 0]
    for _ in range(4):
        x = torch.randn_like(x).requires_grad_()
        y = onepass.linear(x, weight, bias)
        dy = torch.randn_like(y)
        y.backward(dy)
        wide = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
        dx, *grads = torch.autograd.grad(linear_reference(*wide), wide, dy.double())
        exact = [a + b for a, b in zip(exact, grads, strict=True)]
        torch.testing.assert_close(y.double(), linear_reference(*wide), rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(x.grad.double(), dx, rtol=2e-2, atol=2e-2)
    assert weight.grad is None and bias.grad is None
    for parameter, grad in zip((weight, bias), exact, strict=True):
        if grad.numel() and grad.any():
            assert relative(parameter.main_grad, grad) < (1e-5 if main is FP32 else 1e-2)


def test_a_layer_used_twice_and_a_weight_that_two_share():
    """Sums are exact; a use that knows nothing of main_grad puts its gradient in .grad."""
    x, weight, _ = tensors(K=24, N=24, with_bias=False, main=FP32)
    onepass.linear(onepass.linear(x, weight), weight).sum().backward()
    wide = weight.detach().double().requires_grad_()
    F.linear(F.linear(x.double(), wide), wide).sum().backward()
    torch.testing.assert_close(weight.main_grad.double(), wide.grad, rtol=1e-5, atol=1e-4)
    weight.main_grad.zero_()
    ids = torch.arange(12, device=DEVICE)
    onepass.linear(F.embedding(ids, weight), weight).sum().backward()
    wide.grad = None
    F.linear(F.embedding(ids, wide), wide).sum().backward()
    torch.testing.assert_close((weight.main_grad + weight.grad).double(), wide.grad, rtol=1e-5, atol=1e-4)


def test_keeps_x_and_the_weight_and_allocates_no_gradient():
    x, weight, _ = tensors(with_bias=False, main=FP32)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = onepass.linear(x, weight)
    assert [t.data_ptr() for t in kept] == [x.data_ptr(), weight.data_ptr()]
    place = weight.main_grad.data_ptr()
    y.sum().backward()
    assert weight.grad is None and weight.main_grad.data_ptr() == place


@pytest.mark.parametrize("dtype", (BF16, FP16), ids=str)
def test_under_autocast(dtype):
    x, weight, bias = tensors(main=FP32)
    plain = [t.detach().requires_grad_() for t in (x, weight, bias)]
    with torch.autocast(DEVICE, dtype):
        y, expected = onepass.linear(x, weight, bias), F.linear(*plain)
    assert y.dtype is dtype
    torch.testing.assert_close(y, expected, rtol=1e-2, atol=1e-2)
    dy = torch.randn_like(y)
    y.backward(dy)
    expected.backward(dy)
    torch.testing.assert_close([x.grad, weight.main_grad, bias.main_grad], [t.grad for t in plain], rtol=2e-2, atol=5e-2)


def test_not_differentiable_twice_with_a_main_grad():
    x, weight, _ = tensors(with_bias=False, main=FP32)
    with pytest.raises(RuntimeError, match="differentiable once"):
        torch.autograd.grad(onepass.linear(x, weight).square().sum(), x, create_graph=True)


X, W = torch.zeros(2, 8), torch.zeros(3, 8)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: onepass.linear(X, W.t()), ValueError, r"weight must have shape \(N, 8\), with x's last .*, but has \(8, 3\)"),
        (lambda: onepass.linear(X, W.bfloat16()), TypeError, "weight must have x's type torch.float32, but is torch.bfloat16"),
        (lambda: onepass.linear(X, W, W[:, 0].half()), TypeError, "bias must have x's type torch.float32, but is torch.float16"),
        (lambda: onepass.linear(X, W, backend="apex"), RuntimeError, "'apex' is not registered for linear"),
    ],
)
def test_errors_name_the_argument(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_explain_says_where_gradients_go():
    x, weight, bias = tensors()
    assert "gradients to autograd" in str(onepass.explain(onepass.linear, x, weight, bias))
    weight.main_grad = torch.zeros_like(weight)
    assert "gradients into main_grad" in str(onepass.explain(onepass.linear, x, weight, bias))
