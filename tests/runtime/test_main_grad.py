"""main_grad: sums of the right width whatever the types, who asks for a gradient, the placeholder and the flag, errors."""

import pytest
import torch
from ops.calls import Operators
from torch.nn import functional as F

from onepass.gradients import main_grad as module
from onepass.gradients.main_grad import GradRequest, add_gradient, main_grad_of, placeholder, vector_gradient, weight_gradient
from onepass.product.function import multiply_rows
from onepass.product.product import PlainProduct
from onepass.testing.poison import unchanged

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
TYPES = (FP32, FP16, BF16)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def linear_product(x, weight, bias):
    return multiply_rows(x, weight, bias, PlainProduct(), x.dtype)


def operands(dtype, M=96, N=24, K=40):
    return torch.randn(M, N, device=DEVICE).to(dtype), torch.randn(M, K, device=DEVICE).to(dtype)


def relative(got, exact):
    return ((got.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("main", TYPES, ids=lambda t: f"main {t}")
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_adds_with_wide_sums_and_the_fewest_roundings(dtype, main):
    dy, x = operands(dtype)
    main_grad = torch.randn(24, 40, device=DEVICE).to(main)
    product = dy.double().T @ x.double()
    exact = main_grad.double() + product
    once = exact.to(main)
    if main_grad.is_cuda and main is dtype:  # cuBLAS rounds the product, and then the sum
        once = main_grad + product.to(main)
    baseline = relative(once, exact)
    place = main_grad.data_ptr()
    with unchanged(dy=dy, x=x):
        assert add_gradient(main_grad, dy, x) is None
    assert main_grad.data_ptr() == place and main_grad.dtype == main
    assert relative(main_grad, exact) <= 1.25 * baseline + 1e-6


@pytest.mark.parametrize("main", TYPES, ids=lambda t: f"main {t}")
@pytest.mark.parametrize("dtype", (FP32, BF16), ids=str)
def test_rows_that_are_not_contiguous_and_no_rows(dtype, main):
    dy, x = operands(dtype)
    expected = torch.zeros(24, 40, device=DEVICE, dtype=main)
    add_gradient(expected, dy, x)
    got = torch.zeros_like(expected)
    add_gradient(got, dy.T.contiguous().T, torch.cat([x, x], 1)[:, :40])
    torch.testing.assert_close(got, expected)
    before = got.clone()
    add_gradient(got, dy[:0], x[:0])
    assert torch.equal(got, before)


def test_fp32_sums_keep_what_bf16_would_lose():
    dy, x = torch.full((1, 1), 2.0**-6, device=DEVICE).bfloat16(), torch.full((1, 1), 2.0**-6, device=DEVICE).bfloat16()
    main_grad = torch.ones(1, 1, device=DEVICE)
    for _ in range(16):
        add_gradient(main_grad, dy, x)
    assert main_grad.item() == 1 + 2.0**-8


def test_without_main_grad_the_gradient_is_autograds():
    dy, x = operands(FP32)
    weight = torch.randn(24, 40, device=DEVICE, requires_grad=True)
    (expected,) = torch.autograd.grad(F.linear(x, weight), weight, dy)
    assert main_grad_of(weight) is None
    torch.testing.assert_close(weight_gradient(dy, x, weight, None, GradRequest.ACCUMULATE), expected)
    weight.main_grad = None  # as Megatron leaves it between steps
    assert main_grad_of(weight) is None


@pytest.mark.parametrize("flag", (False, True, None))
def test_the_flag_and_the_placeholder(flag):
    dy, x = operands(BF16)
    weight = torch.nn.Parameter(torch.randn(24, 40, device=DEVICE).bfloat16())
    weight.main_grad = torch.zeros(24, 40, device=DEVICE)
    if flag is not None:
        weight.grad_added_to_main_grad = flag
    assert main_grad_of(weight) is weight.main_grad
    placeholder = weight_gradient(dy, x, weight, main_grad_of(weight), GradRequest.ACCUMULATE)
    assert relative(weight.main_grad, dy.double().T @ x.double()) <= 1e-6
    if flag is None:
        assert placeholder is None and not hasattr(weight, "grad_added_to_main_grad")
    else:
        assert weight.grad_added_to_main_grad is True
        assert placeholder.shape == weight.shape and placeholder.dtype == BF16 and not placeholder.any()


def test_a_mode_sees_the_registered_op():
    dy, x = operands(FP32)
    plain, seen = torch.zeros(24, 40, device=DEVICE), torch.zeros(24, 40, device=DEVICE)
    weight = torch.zeros_like(plain)
    weight_gradient(dy, x, weight, plain, GradRequest.ACCUMULATE)
    with Operators() as mode:
        weight_gradient(dy, x, weight, seen, GradRequest.ACCUMULATE)
    assert torch.equal(plain, seen) and any("add_gradient" in name for name in mode.names)
    for second in (x, None):
        first = dy if second is not None else torch.ones_like(plain)
        args = torch.zeros_like(plain), first, second, weight
        torch.library.opcheck(module._add_op, args, test_utils=("test_schema", "test_faketensor"))


# ---- sums that are there already: biases, norms' weights ----


@pytest.mark.parametrize("main", TYPES, ids=lambda t: f"main {t}")
def test_a_vectors_sums_are_added_in_fp32_and_rounded_once(main):
    vector = torch.nn.Parameter(torch.ones(300, device=DEVICE).to(BF16))
    vector.main_grad = torch.randn(300, device=DEVICE).to(main)
    vector.grad_added_to_main_grad = False
    sums = torch.randn(300, device=DEVICE) * 2**-6
    exact = vector.main_grad.double() + sums.double()
    given = vector_gradient(sums, vector, vector.main_grad, GradRequest.ACCUMULATE)
    assert torch.equal(vector.main_grad, exact.to(main)) or main is FP32
    assert relative(vector.main_grad, exact) <= 1.25 * relative(exact.to(main), exact) + 1e-6
    assert vector.grad_added_to_main_grad is True and given.dtype is BF16 and not given.any()
    assert torch.equal(vector_gradient(sums, vector, None, GradRequest.ACCUMULATE), sums.bfloat16())


# ---- who asks ----


def linear(M=5, N=6, K=7, main=FP32):
    x, weight, bias = torch.randn(M, K, device=DEVICE), torch.randn(N, K, device=DEVICE), torch.randn(N, device=DEVICE)
    weight, bias = torch.nn.Parameter(weight), torch.nn.Parameter(bias)
    if main is not None:
        for parameter in (weight, bias):
            parameter.main_grad = torch.zeros_like(parameter, dtype=main)
    return x.requires_grad_(), weight, bias


def test_dgrad_then_wgrad_as_zero_bubble_schedules_do(monkeypatch):
    """The first pass computes no gradient of the weight, the second none of x, and the gradient is the second's result."""
    x, weight, bias = linear()
    expected = torch.autograd.grad(F.linear(x, weight, bias).sum(), (x, weight, bias))
    h = x * 1
    y = linear_product(h, weight, bias).sum()
    products = []
    real = module.weight_gradient
    monkeypatch.setattr("onepass.product.product.weight_gradient", lambda *args: products.append(1) or real(*args))
    (dx,) = torch.autograd.grad(y, h, retain_graph=True)
    assert not products
    dweight, dbias = torch.autograd.grad(y, (weight, bias))
    torch.testing.assert_close((dx, dweight, dbias), expected)
    assert len(products) == 1 and not weight.main_grad.any() and not bias.main_grad.any()


@pytest.mark.parametrize("frozen", ("x", "weight", "bias"))
def test_what_is_frozen_costs_nothing_and_loses_nobody_elses(frozen):
    x, weight, bias = linear()
    named = {"x": x, "weight": weight, "bias": bias}
    named[frozen].requires_grad_(False)
    expected = torch.autograd.grad(F.linear(x, weight, bias).sum(), [t for name, t in named.items() if name != frozen])
    y = linear_product(x, weight, bias)
    kept = [t for t in y.grad_fn.saved_tensors if t is not None]
    assert len(kept) == (1 if frozen in ("x", "weight") else 2)
    y.sum().backward()
    got = {"x": x.grad, "weight": weight.main_grad, "bias": bias.main_grad}
    torch.testing.assert_close([t for name, t in got.items() if name != frozen], list(expected))
    assert frozen == "x" or not got[frozen].any()


def test_without_main_grad_a_product_is_f_linear():
    _, weight, bias = linear(main=None)
    dy = torch.randn(2, 5, 6, device=DEVICE).transpose(0, 1)
    x3 = torch.randn(5, 2, 7, device=DEVICE, requires_grad=True)
    for given in (x3, x3[:0]):
        for some in (bias, None):
            asked = [t for t in (x3, weight, some) if t is not None]
            got, expected = (
                torch.autograd.grad(f(given, weight, some), asked, dy[: len(given)]) for f in (linear_product, F.linear)
            )
            torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("main", (None, FP32), ids=("", "main_grad"))
def test_a_bias_in_bf16_is_summed_in_fp32(main):
    """To a sum that bf16 does not hold."""
    x = torch.zeros(1001, 7, device=DEVICE, dtype=BF16)
    weight, bias = torch.zeros(6, 7, device=DEVICE, dtype=BF16), torch.nn.Parameter(torch.zeros(6, device=DEVICE, dtype=BF16))
    if main is not None:
        bias.main_grad = torch.zeros(6, device=DEVICE)
    linear_product(x, weight, bias).backward(torch.ones(1001, 6, device=DEVICE, dtype=BF16))
    got, exact = (bias.grad, 1000.0) if main is None else (bias.main_grad, 1001.0)
    assert torch.equal(got.float(), torch.full((6,), exact, device=DEVICE))


# ---- placeholders ----


def waiting(*shape):
    parameter = torch.nn.Parameter(torch.randn(*shape, device=DEVICE))
    parameter.main_grad, parameter.grad_added_to_main_grad = torch.zeros(*shape, device=DEVICE), False
    return parameter


def test_a_placeholder_is_handed_out_again_while_it_is_zeros_and_nobodys():
    module._zeros.clear()
    weight = waiting(6, 7)
    first = placeholder(weight)
    place = first.data_ptr()
    assert placeholder(weight).data_ptr() != place  # somebody has it
    del first
    place = placeholder(weight).data_ptr()
    assert placeholder(weight).data_ptr() == place
    placeholder(weight).add_(1)  # and lets it go
    again = placeholder(weight)
    assert again.data_ptr() != place and not again.any()
    del weight.grad_added_to_main_grad
    assert placeholder(weight) is None


@pytest.mark.parametrize("compiled", (False, True), ids=("eager", "compiled"))
def test_no_placeholder_turns_up_in_another_weights_grad(compiled):
    """Two weights of one shape, the first of them tied to an embedding, over microbatches, `.grad` left where it is."""
    tied, other = waiting(7, 7), waiting(7, 7)
    plain = [t.detach().clone().requires_grad_() for t in (tied, other)]
    tokens = torch.tensor([1, 3, 3, 6], device=DEVICE)

    def model(tied, other, product):
        h = F.embedding(tokens, tied)
        return product(product(h, other, None).tanh(), tied, None).square().sum()

    def ours(tied, other):
        return model(tied, other, linear_product)

    run = torch.compile(ours, fullgraph=True, backend="aot_eager") if compiled else ours
    for step in range(1, 4):
        run(tied, other).backward()
        model(*plain, F.linear).backward()
        torch.testing.assert_close(tied.main_grad + tied.grad, plain[0].grad)  # the embedding's is autograd's
        torch.testing.assert_close(other.main_grad, plain[1].grad)
        assert not other.grad.any() and tied.grad.any(), step


@pytest.mark.parametrize("flag", (False, True), ids=("", "flag"))
@pytest.mark.parametrize("backend", ("aot_eager", "inductor"))
def test_compiled(backend, flag):
    """The same sums, flags and placeholders; a pass that asks for something else raises and writes nothing."""
    x, weight, bias = linear()
    if flag:
        weight.grad_added_to_main_grad = bias.grad_added_to_main_grad = False
    expected = torch.autograd.grad(F.linear(x * 2, weight, bias).sin().sum(), (x, weight, bias))
    torch._dynamo.reset()
    compiled = torch.compile(lambda: linear_product(x * 2, weight, bias).sin().sum(), fullgraph=True, backend=backend)
    for step in (1, 2):
        compiled().backward()
        torch.testing.assert_close((weight.main_grad, bias.main_grad), (step * expected[1], step * expected[2]))
    torch.testing.assert_close(x.grad, 2 * expected[0])
    for parameter in (weight, bias):
        assert getattr(parameter, "grad_added_to_main_grad", None) is (True if flag else None)
        assert not parameter.grad.any() if flag else parameter.grad is None
    for somebody in (x, weight):
        with unchanged(weight=weight.main_grad, bias=bias.main_grad), pytest.raises(RuntimeError, match="main_grad must be"):
            torch.autograd.grad(compiled(), somebody)


# ---- errors ----

WRONG = {
    "shape": (torch.zeros(40, 24), ValueError, ("(24, 40)", "(40, 24)")),
    "a row too many": (torch.zeros(25, 40), ValueError, ("(24, 40)", "(25, 40)")),
    "fp64": (torch.zeros(24, 40, dtype=torch.float64), TypeError, ("fp32", "float64")),
    "integer": (torch.zeros(24, 40, dtype=torch.int32), TypeError, ("fp32", "int32")),
    "device": (torch.zeros(24, 40, device="meta"), ValueError, ("cpu", "meta")),
    "a number": (0.0, TypeError, ("tensor", "float")),
    "True": (True, TypeError, ("tensor", "bool")),
}


@pytest.mark.parametrize("what", WRONG)
def test_errors_name_main_grad(what):
    wrong, error, words = WRONG[what]
    weight = torch.nn.Parameter(torch.ones(24, 40))
    weight.main_grad = wrong
    with pytest.raises(error, match="main_grad") as raised:
        main_grad_of(weight)
    assert all(word in str(raised.value) for word in words), raised.value
