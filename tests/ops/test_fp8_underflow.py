"""Numbers that a scale of before rounds to zero are counted, by each pass that writes codes, where that can matter."""

import pytest
import torch
from ops.calls import backends
from ops.fp8_calls import BF16, DEVICE, FP32, decibels

import onepass
from onepass.kernels import fp8_cast
from onepass.kernels.fp8 import new_notes
from onepass.kernels.language import triton
from onepass.ops.activation.formula import ActivationOptions
from onepass.ops.activation.fp8 import activation_backward_codes, activation_codes
from onepass.ops.norm.formula import NormOptions
from onepass.ops.norm.fp8 import norm_codes, norm_codes_formula
from onepass.runtime.fp8 import E4M3, E5M2, FP8Target, underflowed
from onepass.testing.mutants import mutate

pytestmark = pytest.mark.skipif(triton is None, reason="counts of kernels and formulas are compared")
RMS = NormOptions(False, 1e-6, False)


def target(dtype, power):
    return FP8Target(dtype, torch.tensor(2.0**power, device=DEVICE), *new_notes(DEVICE))


def norm(x, to, kernel):
    return (norm_codes if kernel else norm_codes_formula)(x, None, None, None, RMS, to, False)


def activation(x, to, kernel):
    activation_codes(x, None, None, ActivationOptions("gelu", None, None), to, use_triton=kernel)


def gradient(x, to, kernel):
    options = ActivationOptions("swiglu", None, None)
    activation_backward_codes(x[:, : x.shape[1] // 2].contiguous(), x, None, None, options, to, None, use_triton=kernel)


@pytest.mark.parametrize("dtype", (E4M3, E5M2), ids=str)
@pytest.mark.parametrize(
    ("run", "width"),
    [(norm, 64), (norm, 5008), (activation, 96), (gradient, 128)],
    ids=("norm", "wide norm", "activation", "gradient"),
)
def test_kernels_count_as_formulas_do(run, width, dtype):
    x = torch.randn(21, width, device=DEVICE)
    zero_to = -17 if dtype is E5M2 else -10
    for power, some in ((zero_to, True), (zero_to - 6, True), (zero_to + 12, False)):
        counts = []
        for kernel in (True, False):
            to = target(dtype, power)
            run(x, to, kernel)
            counts.append(to.underflowed.sum().item())
        assert abs(counts[0] - counts[1]) <= 2 + 0.01 * counts[1]
        assert (counts[0] > 100) is some


@pytest.mark.parametrize("library", ("stock", *(mutants := {
    "none counts": ("is_low", "(largest > 0.0) & ", "(largest < 0.0) & "),
    "every tile counts": ("is_low", "(2.0**-5 if E5M2 else 4.0)", "(2.0**20 if E5M2 else 2.0**20)"),
    "zeros count": ("underflow_count", "(x != 0.0)", "(x == x)"),
    "half the bound": ("underflow_count", "2.0**-10", "2.0**-11"),
})))  # fmt: skip
@pytest.mark.parametrize("transposed", (False, True))
def test_casts_count_what_is_lost_and_no_more(transposed, library):
    from onepass.kernels import fp8

    code = fp8_cast if library == "stock" else mutate(fp8, *mutants[library], entry=fp8_cast)
    x = torch.randn(64, 128, device=DEVICE) * 2.0**-10
    x[3], x[5, 5], x[6, 6] = 0, 2.0**-10, -(2.0**-10)  # none, and numbers that round to even
    large = torch.cat([x, torch.full_like(x, 4.0)], 1)
    right = True
    for given, exact in ((x, underflowed(x, torch.ones((), device=DEVICE), E4M3).item()), (large, None)):
        to = target(E4M3, 0)
        codes, _ = code.cast_tensor(given, to, transposed=transposed)
        lost = ((codes.float() == 0) & (given != 0)).sum().item()
        right = right and to.underflowed.sum().item() == (lost if exact is not None or transposed else 0)
        assert exact is None or lost == exact > 1000
    assert right is (library == "stock") or library in ("every tile counts",)


@backends
@pytest.mark.parametrize("dtype", (BF16, FP32), ids=str)
def test_an_error_past_its_budget_is_counted(dtype, backend):
    """In evaluation after training, and in training: what is far from the history is lost, and says so."""
    x, dy = torch.randn(32, 64, device=DEVICE, dtype=dtype), torch.randn(32, 48, device=DEVICE, dtype=dtype)
    for size in (1e-7, 1e-5, 1e-3, 1.0, 30.0, 1e4):
        weight = (torch.randn(48, 64, device=DEVICE) / 8).to(dtype).requires_grad_()
        for _ in range(2):
            onepass.linear(x, weight, precision="fp8", backend=backend).backward(dy)
            with torch.no_grad():
                weight.mul_(1)
        with torch.no_grad():
            y = onepass.linear(x * size, weight, precision="fp8", backend=backend)
        counts = weight.fp8.scales.counts()[:, 0].tolist()
        good = decibels(y, (x * size).double() @ weight.detach().double().t()) > 20
        assert good or any(counts), size
        assert any(counts) is (size not in (1e-3, 1.0)) or size == 1e-3, (size, counts)
        weight.grad = None
        given = x.clone().requires_grad_()
        onepass.linear(given, weight, precision="fp8", backend=backend).backward(dy * size**3)
        exact = (dy * size**3).double() @ weight.detach().double()
        assert decibels(given.grad, exact) > 15 or weight.fp8.scales.counts()[:, 2].any(), size
