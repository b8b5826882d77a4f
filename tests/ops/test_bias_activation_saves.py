"""How x is kept for backward: the bytes, the error, and that the kernels and the formula keep the very same codes."""

import math
from functools import partial

import pytest
import torch
from ops.bias_activation_oracle import small_tiles
from ops.calls import backends, needs_triton
from ops.oracle import BF16, DEVICE, FP16, FP32

import onepass
import onepass.ops.activation.bias_activation as module
from onepass.ops.activation import kernels
from onepass.ops.activation.formula import ActivationOptions
from onepass.runtime import saved
from onepass.testing.poison import bytes_kept, saved_tensors

INF, NAN = float("inf"), float("nan")


@pytest.fixture(autouse=True)
def _small():
    with small_tiles(module):
        yield


def hard_rows(columns, dtype=FP32):
    """Rows of every scale, the edges of e4m3's steps, subnormals, infinities and NaN of both signs."""
    x = torch.randn(20, columns)
    for row, scale in enumerate((1e-30, 1e30, 1e-38, 3e37, 1e-42, 0.0, -0.0)):
        x[row] *= scale
    x[7] = 448 * 2.0 ** torch.arange(columns).remainder(20).neg()  # largest a power of two times 1.75: no step to spare
    x[8] = x[7] * (1 + 2**-20)  # just over it
    x[9] = torch.arange(columns).float() - columns // 2  # halfway cases: rounded to even
    x[10] = torch.linspace(-(2**-6), 2**-6, columns)
    x[10, 0] = 448  # e4m3's own subnormals
    x[11, ::7], x[12, ::5], x[13, ::3] = NAN, INF, -INF
    x[14] = -INF
    x[15] = NAN
    x[16, ::4] = -torch.tensor(NAN)
    x[17, 0] = 0.9 * torch.finfo(FP32).max
    x[18] = 2.0 ** torch.arange(columns).remainder(60).neg()
    return x.to(dtype).to(DEVICE)


@needs_triton
@pytest.mark.parametrize("dtype", [FP32, FP16, BF16])
@pytest.mark.parametrize("columns", [64, 130, 200, 2])
@pytest.mark.parametrize("activation", ["relu", "reglu"])
def test_kernel_and_formula_keep_the_same_codes(activation, columns, dtype):
    x, parts = hard_rows(columns, dtype), 2 if activation == "reglu" else 1
    options = ActivationOptions(activation, None, None)
    _, codes, exponents = kernels.activation_forward_fp8(x, None, None, None, options, dtype)
    expected = saved.fp8_quantise(x, parts)
    wrong = (codes != expected[0]).nonzero()
    assert not len(wrong), [(x[tuple(i)].item(), codes[tuple(i)].item(), expected[0][tuple(i)].item()) for i in wrong[:5]]
    assert torch.equal(exponents, expected[1])


@needs_triton
@pytest.mark.parametrize("activation", ["relu", "reglu"])
def test_kernel_and_formula_read_the_same_values(activation):
    x, parts = hard_rows(200), 2 if activation == "reglu" else 1
    codes, exponents = saved.fp8_quantise(x, parts)
    kept = saved.fp8_dequantise(codes, exponents, FP32, parts)
    dy = torch.ones(20, 200 // parts, device=DEVICE)
    rest = None, None, None, None, ActivationOptions(activation, None, None), True, False, False, False, FP32, None
    from_codes = kernels.activation_backward(dy, codes, exponents, *rest)[0]
    from_values = kernels.activation_backward(dy, kept, None, *rest)[0]
    assert torch.equal(from_codes.isnan(), from_values.isnan())
    assert torch.equal(from_codes.nan_to_num(), from_values.nan_to_num())


@pytest.mark.parametrize("parts", [1, 2])
def test_the_error_is_bounded_at_every_scale(parts):
    for exponent in range(-30, 31, 5):
        x = torch.randn(50, 256) * 10.0**exponent * 10 ** (3 * torch.rand(50, 1))
        kept = saved.fp8_dequantise(*saved.fp8_quantise(x, parts), FP32, parts)
        largest = x.unflatten(-1, (-1, 64)).abs().amax(-1, keepdim=True).expand(-1, -1, 64).flatten(-2)
        assert ((kept - x).abs() <= torch.maximum(x.abs() / 16, largest * 2**-17)).all(), exponent
        assert kept.isfinite().all() and (kept - x).norm() <= 0.03 * x.norm()


def test_nothing_saturates_and_nan_stays_nan():
    x = hard_rows(130)
    kept = saved.fp8_dequantise(*saved.fp8_quantise(x), FP32)
    finite = x.isfinite()
    assert torch.equal(kept.isfinite(), finite) and kept[~finite].isnan().all()
    assert (kept[17, 0] / x[17, 0] - 1).abs() <= 1 / 16
    assert torch.equal(torch.signbit(kept[6]), torch.signbit(x[6]))


@pytest.mark.parametrize("dtype", [FP32, FP16, BF16])
def test_the_largest_numbers_of_a_type_stay_finite(dtype):
    x = torch.tensor([[torch.finfo(dtype).max, 1.0]], dtype=dtype)
    assert saved.fp8_dequantise(*saved.fp8_quantise(x), dtype).isfinite().all()


@backends
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_gradients_from_codes_are_near_for_rows_of_any_scale(activation, backend):
    """A row's own scale is in dy: relative to each row, the gradient is as good as its codes."""
    W = 256 if activation == "swiglu" else 128
    bias = torch.zeros(W, device=DEVICE)

    def grads(save, x):
        x = x.detach().requires_grad_()
        y = onepass.bias_activation(x, bias, activation, save=save, backend=backend)
        y.backward(torch.ones_like(y))
        return y.detach(), x.grad

    x = torch.randn(8, W, device=DEVICE)
    for scale in (1e-30, 1e-3, 1.0, 1e3, 1e15):
        scales = torch.logspace(0, 2, 8, device=DEVICE)[:, None] * scale
        (y, dx), (y_fp8, dx_fp8) = grads("input", x * scales), grads("fp8", x * scales)
        assert torch.equal(y, y_fp8)
        assert ((dx_fp8 - dx).norm(dim=-1) <= 0.05 * dx.norm(dim=-1)).all(), scale


@backends
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_fp8_keeps_half_the_bytes(activation, dtype, backend):
    W = 512 if activation == "swiglu" else 256
    x, bias = torch.randn(32, W, device=DEVICE, dtype=dtype, requires_grad=True), torch.randn(W, device=DEVICE, dtype=dtype)
    with saved_tensors() as kept:
        onepass.bias_activation(x, bias, activation, save="fp8", backend=backend)
    assert 0.5 * x.nbytes <= bytes_kept(kept, bias) <= 0.52 * x.nbytes
    with saved_tensors() as kept:
        onepass.bias_activation(x, bias, activation, backend=backend)
    assert bytes_kept(kept, bias) == x.nbytes


@backends
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_offload_is_exact(dtype, backend):
    x, bias = torch.randn(9, 80, device=DEVICE, dtype=dtype), torch.randn(80, device=DEVICE, dtype=dtype)
    x = x[:, :40] if backend == "triton" else x[:, ::2]
    results = []
    for save in ("input", "offload"):
        leaves = [t.detach().requires_grad_() for t in (x, bias[:40])]
        y = onepass.bias_gelu(*leaves, save=save, backend=backend)
        y.backward(torch.ones_like(y))
        results.append((y, *(t.grad for t in leaves)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@backends
def test_a_layer_of_each_kind_in_one_graph(backend):
    x = torch.randn(6, 64, device=DEVICE, requires_grad=True)
    biases = [torch.randn(64, device=DEVICE, requires_grad=True) for _ in range(6)]

    def model(stores):
        h = x
        for bias, save in zip(biases, stores, strict=True):
            h = onepass.bias_gelu(h, bias, save=save, backend=backend) * 2
        return torch.autograd.grad(h.sum(), (x, *biases))

    plain = model(["input"] * 6)
    assert all(torch.equal(a, b) for a, b in zip(plain, model(["offload", "input"] * 3), strict=True))
    for a, b in zip(plain, model(["fp8", "offload"] * 3), strict=True):
        assert (a - b).norm() <= 0.2 * a.norm()


def test_validate_refuses_what_fp8_cannot_hold():
    x = torch.tensor([[1.0, INF]], device=DEVICE)
    with onepass.validate(), pytest.raises(ValueError, match="x must be finite for save='fp8'"):
        onepass.bias_gelu(x, save="fp8")
    assert math.isinf(onepass.bias_gelu(x, save="fp8")[0, 1].item())
    with onepass.validate():
        torch._dynamo.reset()
        compiled = torch.compile(lambda t: onepass.bias_gelu(t, save="fp8"), fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x[:, :1]), onepass.bias_gelu(x[:, :1]))


@backends
def test_a_gate_and_its_linear_half_share_no_scale(backend):
    x = torch.randn(6, 80, device=DEVICE)
    x[:, 40:] *= 1e6  # runs of 64 would cross from one half into the other
    dy = torch.randn(6, 40, device=DEVICE)
    dx = [
        torch.autograd.grad(onepass.bias_swiglu(t, save=save, backend=backend), t, dy)[0]
        for save in ("input", "fp8")
        for t in [x.clone().requires_grad_()]
    ]
    for half in (slice(40), slice(40, None)):
        assert (dx[0][:, half] - dx[1][:, half]).norm() <= 0.08 * dx[0][:, half].norm()


@pytest.mark.parametrize("op", ("bias_activation", "activation_linear"))
def test_fp8_under_transforms_is_that_of_a_call(op):
    x, weight = torch.randn(3, 64, device=DEVICE), torch.randn(3, 32, device=DEVICE)

    def loss(x, save="fp8"):
        if op == "activation_linear":
            return onepass.activation_linear(x, weight, None, "swiglu", save=save).square().sum()
        return onepass.bias_activation(x, None, "swiglu", save=save).square().sum()

    leaf = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss(leaf), leaf)
    assert not torch.equal(expected, torch.func.grad(partial(loss, save="input"))(x))
    torch.testing.assert_close(torch.func.grad(loss)(x), expected)
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(loss))(x), expected)
