"""What norm_linear is, what it keeps, and how it behaves under whatever people do to an op."""

import pytest
import torch
from ops.calls import backends, gradients, needs_triton
from ops.norm_linear_calls import kinds, op, report_of, tensors
from ops.oracle import BF16, FP16, FP32
from torch.nn import functional as F

import onepass
import onepass.ops.norm.norm_linear as module
from onepass.ops.norm import few_rows, kernels, norm_rows
from onepass.product import function, product
from onepass.testing.mutants import mutate
from onepass.testing.poison import saved_tensors, unchanged

uses = pytest.mark.parametrize("used", (("y",), ("norm",), ("y", "norm")), ids=" and ".join)
biases = pytest.mark.parametrize("with_bias", (True, False), ids=("bias", ""))


# ---- what it computes ----


@backends
@kinds
@biases
@uses
@pytest.mark.parametrize("centered", (False, True), ids=("", "centered"))
def test_values_and_gradients_in_fp32(backend, layer, with_bias, used, centered):
    errors = report_of(None, FP32, layer, used, backend=backend, centered=centered, with_bias=with_bias)
    assert all(error <= 1e-6 for error in errors.values()), errors


@backends
@kinds
@uses
@pytest.mark.parametrize("params", (BF16, FP32), ids=("", "wide norm"))
def test_values_and_gradients_in_bf16(backend, layer, used, params):
    some = {"with_bias": used != ("y",), "centered": len(used) == 2, "params": params}
    report = report_of(None, BF16, layer, used, lead=(4, 64), backend=backend, **some)
    assert report, report


@backends
@kinds
def test_values_and_gradients_in_fp16(backend, layer):
    report = report_of(None, FP16, layer, ("y", "norm"), lead=(4, 64), backend=backend)
    assert report, report


@backends
@kinds
def test_it_is_the_norm_and_the_linear(backend, layer):
    x, norm_weight, weight, bias, norm_bias = tensors(layer=layer)
    x = x * 1e-3  # which makes its square that of eps
    expected = F.layer_norm(x, (40,), norm_weight, norm_bias) if layer else onepass.rms_norm(x, norm_weight, backend="torch")
    y, normed = op(layer, backend=backend, return_norm_output=True)(x, norm_weight, weight, bias, norm_bias)
    torch.testing.assert_close(normed, expected)
    torch.testing.assert_close(y, F.linear(expected, weight, bias))
    bare = op(layer, backend=backend)(x, None, weight)
    expected = F.layer_norm(x, (40,)) if layer else F.rms_norm(x, (40,), eps=1e-6)
    torch.testing.assert_close(bare, F.linear(expected, weight))


@backends
def test_fp64(backend):
    if backend == "triton":
        with pytest.raises((ValueError, TypeError, RuntimeError), match="float64"):
            onepass.norm_linear(torch.ones(2, 4).double(), None, torch.ones(3, 4).double(), backend="triton")
        return
    inputs = [t.detach().double().requires_grad_() for t in tensors((2,), 4, 3)]
    assert torch.autograd.gradcheck(op(True, backend=backend, return_norm_output=True, eps=0.1), inputs)


@backends
@kinds
def test_no_outputs_give_zero_gradients(backend, layer):
    x, norm_weight, weight, bias, norm_bias = tensors(N=0, layer=layer)
    y, *grads = gradients(op(layer, backend=backend), [x, norm_weight, weight, bias, norm_bias])
    assert y.shape == (3, 5, 0) and all(not t.any() for t in grads)


@backends
@kinds
def test_evaluation_keeps_nothing_and_looks_at_no_main_grad(backend, layer, monkeypatch):
    inputs = tensors(layer=layer)
    inputs[2].main_grad = torch.zeros(1)  # of a wrong shape
    kept = []
    if backend == "triton":
        stock = kernels.forward
        monkeypatch.setattr(kernels, "forward", lambda *args: kept.append(args[-1]) or stock(*args))
    with torch.no_grad():
        y = op(layer, backend=backend)(*inputs)
    assert y.shape == (3, 5, 24) and not any(kept)


# ---- what is kept, and what is written ----


@backends
@kinds
@pytest.mark.parametrize("dtype", (FP32, BF16))
def test_keeps_x_and_nothing_else_of_its_size(backend, layer, dtype):
    x, norm_weight, weight, bias, norm_bias = tensors((9, 4), 100, 24, dtype, layer)

    def of_its_size(call):
        with saved_tensors() as kept:
            call()
        return {t.data_ptr() for t in kept if t.numel() >= x.numel()}

    for returns in (False, True):
        ours = op(layer, backend=backend, return_norm_output=returns)
        assert of_its_size(lambda ours=ours: ours(x, norm_weight, weight, bias, norm_bias)) == {x.data_ptr()}

    def separate():
        if layer:
            return F.linear(onepass.layer_norm(x, norm_weight, norm_bias), weight, bias)
        return F.linear(onepass.rms_norm(x, norm_weight), weight, bias)

    assert len(of_its_size(separate)) >= 2


# ---- what people wrap around it ----


@backends
def test_main_grad_is_left_alone_where_the_norms_output_is_used_alone(backend):
    inputs = tensors()
    weight = inputs[2]
    weight.main_grad, weight.grad_added_to_main_grad = torch.ones_like(weight), False
    call = op(backend=backend, return_norm_output=True)
    with unchanged(main_grad=weight.main_grad):
        call(*inputs)[1].sum().backward()  # norm(x) alone
        weight.requires_grad_(False)
        call(*inputs)[0].sum().backward()
    assert weight.grad is None and weight.grad_added_to_main_grad is False and inputs[0].grad.any()


# ---- what is said of a call ----


@needs_triton
@kinds
def test_explain(layer):
    x, norm_weight, weight, bias, norm_bias = (t if t is None else t.detach() for t in tensors(layer=layer))
    norm = "layer_norm" if layer else "rms_norm"
    said = onepass.explain("norm_linear", x, norm_weight, weight, bias, norm=norm, norm_bias=norm_bias, backend="triton")
    assert all(word in said.variant for word in ("forward with", "products by PyTorch", "rebuilt in backward")), said.variant


# ---- broken copies, which a check above must catch ----

MUTANTS = {
    "no norm_bias": (norm_rows, "NormRows.rows", "residual, norm_weight, norm_bias,", "residual, norm_weight, None,", "values"),
    "the weight's gradient of x itself": (product, "PlainProduct.start_input", "rows = made.rows", "rows = kept[0]", "values"),
    "d norm(x) forgotten": (
        product, "PlainProduct.output_gradient",
        "add_matmul(started, rows, weight) if ours else started.addmm(rows, weight)", "rows @ weight", "values",
    ),
    "dx over the caller's gradient": (function, "_alone", "ours=dy is not None", "ours=True", "writes"),
    "few rows' y without its bias": (few_rows, "_row_gradient", "load_vector(bias_ptr, columns, columns < H)", "0.0", "values"),
    "norm(x) kept in the place of x": (norm_rows, "NormRows.rows", "x if h is None else h,", "normed,", "values"),
}


@needs_triton
@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_copy_is_caught(name):
    *change, by = MUTANTS[name]
    broken = mutate(*change, entry=module).norm_linear
    if by == "values":
        errors = report_of(broken, FP32, True, ("y", "norm"), backend="triton")
        assert any(error > 1e-6 for error in errors.values())
        return
    y = op(True, broken, backend="triton", return_norm_output=True)(*tensors((1025,)))[1]  # of fewer rows dy is never written
    dy = torch.randn_like(y)
    with pytest.raises(AssertionError, match="dy"), unchanged(dy=dy):
        y.backward(dy)
