"""norm_linear with a residual, or with its input given back: the sums of the residual stream in the norm's own passes."""

import pytest
import torch
from ops.calls import Operators, backends, equal, gradients, incoming, nearly_equal, needs_triton, relative
from ops.norm_linear_calls import RETURN, given, kinds, op, report_of, tensors
from ops.oracle import BF16, DEVICE, FP32

import onepass
import onepass.ops.norm.norm_linear as module
from onepass.ops.norm import norm_rows
from onepass.parallel import DeferredWgrad
from onepass.product import function
from onepass.runtime import backend as registry
from onepass.testing.mutants import mutate
from onepass.testing.poison import saved_tensors

ways = pytest.mark.parametrize("added", (True, False), ids=("residual", "input"))
USES = (("y",), ("h",), ("y", "h"), ("norm", "h"), RETURN)
uses = pytest.mark.parametrize("used", USES, ids=" and ".join)


def everything(layer=True, function=None, **options):
    return op(layer, function, return_norm_output=True, return_input=True, **options)


# ---- what it computes ----


@backends
@kinds
@ways
@uses
def test_values_and_gradients_in_fp32(backend, layer, added, used):
    errors = report_of(None, FP32, layer, used, added, backend=backend)
    assert all(error <= 1e-6 for error in errors.values()), errors


@backends
@kinds
@ways
@uses
def test_values_and_gradients_in_bf16(backend, layer, added, used):
    report = report_of(None, BF16, layer, used, added, (4, 64), backend)
    assert report, report


@backends
@pytest.mark.parametrize(("dtype", "residual_type"), ((FP32, BF16), (BF16, FP32)), ids=("wide x", "wide residual"))
def test_a_residual_of_another_type(backend, dtype, residual_type):
    report = report_of(None, dtype, True, RETURN, True, (4, 64), backend, residual_type)
    if dtype is FP32:  # but for the residual's gradient, rounded to its type
        assert report.pop("dresidual") <= 4e-3 and all(error <= 1e-6 for error in report.values()), report
    else:
        assert report, report


@backends
@kinds
@pytest.mark.parametrize("dtype", (FP32, BF16))
def test_h_is_the_sum_and_y_is_of_it(backend, layer, dtype):
    inputs = given(dtype=dtype, layer=layer)
    y, normed, h = everything(layer, backend=backend)(*inputs)
    assert torch.equal(h, inputs[0] + inputs[5])
    again = everything(layer, backend=backend)(h, *inputs[1:5])
    assert equal([y, normed, h], again) and len(op(layer, backend=backend)(*inputs)) == 2


@backends
@kinds
def test_x_gets_the_residuals_gradient_too(backend, layer):
    inputs = given(layer=layer)
    *_, dx, _, _, _, dresidual = gradients(op(layer, backend=backend), [inputs[0], *inputs[1:4], None, inputs[5]])
    assert torch.equal(dx, dresidual) and dx.any()
    twice = gradients(lambda x, *rest: op(layer, backend=backend)(x, *rest, x), inputs[:5])
    once = gradients(lambda x, *rest: op(layer, backend=backend, return_input=True)(2 * x, *rest), inputs[:5])
    assert nearly_equal(twice, once)


@backends
@ways
def test_the_given_back_input_is_x_where_nothing_is_added(backend, added):
    inputs = given(added=added)
    h = everything(backend=backend)(*inputs)[-1]
    with torch.no_grad():
        bare = everything(backend=backend)(*inputs)[-1]
    for t in (h, bare):
        assert (t.data_ptr() == inputs[0].data_ptr()) != added
    assert len(op(backend=backend, return_input=False)(*inputs[:5]).shape) == 3  # and is not returned unless it is asked for


@pytest.mark.parametrize("backend", ["torch"])
@ways
def test_fp64(backend, added):
    inputs = [t if t is None else t.detach().double().requires_grad_() for t in given((2,), 4, 3, added=added)]
    asked = [t for t in inputs if t is not None]
    assert torch.autograd.gradcheck(lambda *t: everything(True, backend=backend, eps=0.1)(*t), asked)


# ---- which gradients are asked for ----


@backends
@ways
def test_h_asks_for_a_gradient_where_x_or_the_residual_does(backend, added):
    inputs = given(added=added)
    for x_asks, residual_asks in ((True, True), (True, False), (False, True), (False, False)):
        inputs[0].requires_grad_(x_asks)
        if added:
            inputs[5].requires_grad_(residual_asks)
        y, _, h = everything(backend=backend)(*inputs)
        assert y.requires_grad and h.requires_grad == (x_asks or (added and residual_asks))


# ---- what is kept, and what is written ----


@backends
@kinds
@ways
def test_keeps_h_and_nothing_else_of_its_size(backend, layer, added):
    inputs = given((9, 4), 100, 24, BF16, layer, added)
    with saved_tensors() as kept:
        h = everything(layer, backend=backend)(*inputs)[-1]
    assert {t.data_ptr() for t in kept if t.numel() >= h.numel()} == {h.data_ptr()}


@needs_triton
@kinds
@ways
def test_no_sum_is_an_operator_of_its_own(layer, added):
    inputs = given(layer=layer, added=added)

    def additions(call):
        with Operators() as seen:
            torch.autograd.backward(ys := call(*inputs), [incoming(y, i) for i, y in enumerate(ys)])
        return seen.additions

    def apart(*inputs):
        h = inputs[0] + inputs[5] if added else inputs[0] * 1
        return op(layer, backend="triton")(h, *inputs[1:5]), h

    for leaf in inputs:
        if leaf is not None:
            leaf.grad = torch.zeros_like(leaf)  # so that the leaves' own sums are as many either way
    leaves = sum(t is not None for t in inputs)
    assert additions(op(layer, backend="triton", return_input=True)) == leaves
    assert additions(apart) == leaves + 1 + added


# ---- where the weight's gradient goes ----


@backends
@ways
@pytest.mark.parametrize("late", (False, True), ids=("", "deferred"))
def test_main_grad(backend, added, late):
    inputs = given(added=added)
    call = everything(backend=backend)
    expected = gradients(call, inputs)[3:]
    weight = inputs[2]
    weight.main_grad = torch.zeros_like(weight)
    deferred = DeferredWgrad() if late else None
    ys = everything(backend=backend, deferred=deferred)(*inputs)
    torch.autograd.backward(ys, [incoming(y, i) for i, y in enumerate(ys)])
    if late:
        assert not weight.main_grad.any()
        deferred.flush()
    assert weight.grad is None
    assert nearly_equal([weight.main_grad if t is weight else t.grad for t in inputs if t is not None], expected)


# ---- what people wrap around it ----


@backends
def test_autocast_leaves_the_residual_stream_as_it_is(backend):
    """h of fp32 with what is late of bf16, as a block has them there."""
    inputs = tensors(layer=False)
    residual = torch.randn(3, 5, 40, device=DEVICE).bfloat16().requires_grad_()
    with torch.autocast(DEVICE, BF16):
        y, h = op(False, backend=backend)(*inputs, residual)
    assert (y.dtype, h.dtype) == (BF16, FP32) and torch.equal(h, inputs[0] + residual)
    torch.autograd.backward([y, h], [incoming(y), incoming(h, 1)])
    exact = [t if t is None else t.detach().double().requires_grad_() for t in (*inputs, residual)]
    ys = op(False, module.norm_linear_reference)(*exact)
    torch.autograd.backward(ys, [incoming(t, i).double() for i, t in enumerate((y, h))])
    for got, true in zip((*inputs, residual), exact, strict=True):
        if got is not None:
            assert relative(got.grad, true.grad) < 1e-2 and got.grad.dtype == got.dtype


# ---- what is said of a call, and who else runs it ----


@needs_triton
def test_explain():
    x, norm_weight, weight, *_ = (t if t is None else t.detach() for t in tensors())
    said = onepass.explain("norm_linear", x, norm_weight, weight, residual=x, backend="triton")
    assert all(word in said.variant for word in ("keeps h and its", "norm(h) is rebuilt in backward")), said.variant
    said = onepass.explain("norm_linear", x, norm_weight, weight, return_input=True, backend="triton")
    assert all(word in said.variant for word in ("keeps x and its", "norm(x) is rebuilt in backward")), said.variant


def test_another_backend_is_told(monkeypatch):
    monkeypatch.setattr(registry.OPS["norm_linear"], "others", {})
    seen = []
    registry.register_backend("norm_linear", "mine", lambda *args, **options: seen.append(options))
    inputs = given()
    for residual, asks in ((inputs[5], False), (None, True), (None, False)):
        op(backend="mine", return_input=asks)(*inputs[:5], residual)
    assert [{name: options[name] for name in ("residual", "return_input") if name in options} for options in seen] == [
        {"residual": inputs[5]}, {"return_input": True}, {},
    ]  # fmt: skip


# ---- broken copies, which a check above must catch ----

MUTANTS = {
    "h's gradient forgotten by the kernel": (
        norm_rows, "NormRows.backward", "vectors, drows, dh, *kept", "vectors, drows, None, *kept", ("y", "h"),
    ),
    "h's gradient forgotten where it is alone": (norm_rows, "NormRows.backward", "dx if of_h else None,", "None,", ("h",)),
    "h's gradient for norm(h)'s": (function, "_Linear.backward", "more[-1]", "more[0]", RETURN),
    "x normalised in the place of h": (
        norm_rows, "NormRows.rows",
        "return cast(normed,",
        "return cast(kernels.forward(x, None, norm_weight, norm_bias, None, self.options, False)[0],", ("y",),
    ),
    "x kept in the place of h": (function, "_Linear.forward", "early, *kept,", "early, inputs[0], *kept[1:],", ("y",)),
    "x for h": (norm_rows, "NormRows.rows", "x if h is None else h", "x", ("y", "h")),
    "no gradient of the residual": (norm_rows, "NormRows.backward", "dresidual = dh.to", "dresidual = 0 * dh.to", ("y",)),
    "dx over d norm(h) of another type": (
        norm_rows, "NormRows.backward", "ours and dh_type == self.dtype", "ours", "wide residual",
    ),
}  # fmt: skip


@needs_triton
@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_copy_is_caught(name):
    *change, used = MUTANTS[name]
    broken = mutate(*change, entry=module).norm_linear
    if used == "wide residual":
        report = report_of(broken, BF16, True, RETURN, True, (4, 260), "triton", FP32)  # of fewer rows it is never written
        assert not report
        return
    if used == ("h",):
        with pytest.raises(RuntimeError, match="not have been used"):
            report_of(broken, FP32, True, used, True, backend="triton")
        return
    errors = report_of(broken, FP32, True, used, True, backend="triton")
    assert any(not error <= 1e-6 for error in errors.values()), errors
