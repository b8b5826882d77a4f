"""main_grad: sums of the right width whatever the types, the placeholder and the flag, and errors that name it."""

import pytest
import torch
from torch.nn import functional as F

from onepass.runtime import main_grad as room
from onepass.runtime.main_grad import add_weight_gradient, main_grad_of, weight_gradient
from onepass.testing.poison import unchanged

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
TYPES = (FP32, FP16, BF16)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def operands(dtype, M=96, N=24, K=40):
    return torch.randn(M, N, device=DEVICE).to(dtype), torch.randn(M, K, device=DEVICE).to(dtype)


def relative(got, exact):
    return ((got.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("main", TYPES, ids=lambda t: f"main {t}")
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_adds_with_wide_sums_and_one_rounding(dtype, main):
    dy, x = operands(dtype)
    main_grad = torch.randn(24, 40, device=DEVICE).to(main)
    exact = main_grad.double() + dy.double().T @ x.double()
    baseline = relative(exact.to(main), exact)  # rounded once
    place = main_grad.data_ptr()
    with unchanged(dy=dy, x=x):
        assert add_weight_gradient(main_grad, dy, x) is None
    assert main_grad.data_ptr() == place and main_grad.dtype == main
    assert relative(main_grad, exact) <= 1.25 * baseline + 1e-6


@pytest.mark.parametrize("main", TYPES, ids=lambda t: f"main {t}")
@pytest.mark.parametrize("dtype", (FP32, BF16), ids=str)
def test_rows_that_are_not_contiguous_and_no_rows(dtype, main):
    dy, x = operands(dtype)
    expected = torch.zeros(24, 40, device=DEVICE, dtype=main)
    add_weight_gradient(expected, dy, x)
    got = torch.zeros_like(expected)
    add_weight_gradient(got, dy.T.contiguous().T, torch.cat([x, x], 1)[:, :40])
    torch.testing.assert_close(got, expected)
    before = got.clone()
    add_weight_gradient(got, dy[:0], x[:0])
    assert torch.equal(got, before)


def test_fp32_sums_keep_what_bf16_would_lose():
    dy, x = torch.full((1, 1), 2.0**-6, device=DEVICE).bfloat16(), torch.full((1, 1), 2.0**-6, device=DEVICE).bfloat16()
    main_grad = torch.ones(1, 1, device=DEVICE)
    for _ in range(16):
        add_weight_gradient(main_grad, dy, x)
    assert main_grad.item() == 1 + 2.0**-8


def test_without_main_grad_the_gradient_is_autograds():
    dy, x = operands(FP32)
    weight = torch.randn(24, 40, device=DEVICE, requires_grad=True)
    (expected,) = torch.autograd.grad(F.linear(x, weight), weight, dy)
    assert main_grad_of(weight) is None
    torch.testing.assert_close(weight_gradient(dy, x, weight, None), expected)
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
    placeholder = weight_gradient(dy, x, weight, main_grad_of(weight))
    assert relative(weight.main_grad, dy.double().T @ x.double()) <= 1e-6
    if flag is None:
        assert placeholder is None and not hasattr(weight, "grad_added_to_main_grad")
    else:
        assert weight.grad_added_to_main_grad is True
        assert placeholder.shape == weight.shape and placeholder.dtype == BF16 and not placeholder.any()


def test_a_mode_sees_the_registered_op():
    from torch.utils._python_dispatch import TorchDispatchMode

    names = []

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            names.append(str(function))
            return function(*args, **(kwargs or {}))

    dy, x = operands(FP32)
    plain, seen = torch.zeros(24, 40, device=DEVICE), torch.zeros(24, 40, device=DEVICE)
    weight = torch.zeros_like(plain)
    weight_gradient(dy, x, weight, plain)
    with Names():
        weight_gradient(dy, x, weight, seen)
    assert torch.equal(plain, seen) and any("add_weight_gradient" in name for name in names)
    torch.library.opcheck(room._add_op, (torch.zeros_like(plain), dy, x), test_utils=("test_schema", "test_faketensor"))


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
