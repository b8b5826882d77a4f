"""What activation_linear is, what it keeps, and how it behaves under whatever people do to an op."""

import itertools

import pytest
import torch
from ops.activation_linear_calls import NAMES, op, tensors
from ops.bias_activation_oracle import GATED, PLAIN, small_tiles
from ops.calls import backends, equal, gradients, incoming, needs_triton, relative
from ops.oracle import BF16, DEVICE, FP16, FP32
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import onepass
import onepass.ops.activation.activation_linear as module
from onepass.ops.activation import kernels
from onepass.ops.activation.formula import ActivationOptions
from onepass.product import product
from onepass.runtime.saved import SAVES, fp8_dequantise, fp8_quantise
from onepass.testing.budget import compare, run
from onepass.testing.poison import bytes_kept, poisoned, saved_tensors, unchanged

saves = pytest.mark.parametrize("save", SAVES)
kinds = pytest.mark.parametrize("activation", ("swiglu", "gelu"))
CLAMPED = {"clamp": 1.0, "linear_offset": 0.5}


@pytest.fixture(autouse=True)
def _small():
    with small_tiles(module):
        yield


# ---- what it computes ----


def as_kept(x, save, activation):
    """x as backward sees it."""
    parts = 2 if activation in GATED else 1
    return fp8_dequantise(*fp8_quantise(x, parts), x.dtype, parts) if save == "fp8" else x


def results(call, given, dy, kept, dtype=None):
    """y at x, and the gradients at the x that is kept."""
    return run(call, given | {"x": kept}, dy, dtype) | {"y": run(call, given, None, dtype)["y"]}


def report_of(function, dtype, activation, save="input", backend="torch", lead=(3, 11), without=(), vector=None, **options):
    """Ours against the formula in fp64; the baseline is the same formula in the inputs' own types."""
    some = zip(NAMES, tensors(activation, lead, 70, 48, dtype, vector, without), strict=True)
    given = {name: t if t is None else t.detach() for name, t in some}
    dy = torch.randn(*lead, 48, device=DEVICE).to(dtype)
    reference = op(activation, module.activation_linear_reference, **options)
    kept = as_kept(given["x"], save, activation)
    with poisoned(), unchanged(**given, dy=dy):
        ours = run(op(activation, function, save=save, backend=backend, **options), given, dy)
    exact = results(reference, given, dy, kept, torch.float64)
    if dtype is FP32:
        return {name: relative(ours[name], exact[name]) for name in exact}
    return compare([(ours, results(reference, given, dy, kept), exact)], dtype)


@backends
@saves
@pytest.mark.parametrize("activation", (*PLAIN, *GATED))
def test_values_and_gradients_in_fp32(activation, save, backend):
    for options in ({}, CLAMPED) if activation in GATED else ({},):
        errors = report_of(None, FP32, activation, save, backend, **options)
        assert all(error <= 1e-6 for error in errors.values()), errors


@backends
@saves
@pytest.mark.parametrize("dtype", (BF16, FP16))
@pytest.mark.parametrize("activation", ("swiglu", "gelu", "relu"))
def test_values_and_gradients_in_16_bits(activation, dtype, save, backend):
    for vector in (dtype, FP32):
        report = report_of(None, dtype, activation, save, backend, (4, 16), vector=vector)
        assert report, report


@backends
@kinds
def test_with_and_without_each_tensor(activation, backend):
    for count in (1, 2, 3):
        for without in itertools.combinations(NAMES[2:], count):
            errors = report_of(None, FP32, activation, backend=backend, without=without)
            assert all(error <= 1e-6 for error in errors.values()), (without, errors)


@backends
def test_fp64(backend):
    inputs = [t.detach().double().requires_grad_() for t in tensors(lead=(2,), K=3, N=4)]
    if backend == "triton":
        with pytest.raises(RuntimeError, match="float64"):
            op(backend="triton")(*inputs)
        return
    assert torch.autograd.gradcheck(op(backend=backend, **CLAMPED), inputs)


@backends
@saves
@kinds
@pytest.mark.parametrize(("lead", "K", "N"), [((0,), 8, 6), ((2, 0), 8, 6), ((3,), 0, 6), ((3, 2), 8, 0), ((0,), 0, 0)])
def test_zero_sizes(lead, K, N, activation, save, backend):
    inputs = tensors(activation, lead, K or 1, N)
    if not K:
        inputs = [t if i in (2, 4) else t.detach()[..., :0].requires_grad_() for i, t in enumerate(inputs)]
    y, *grads = gradients(op(activation, save=save, backend=backend), inputs)
    assert y.shape == (*lead, N) and [g.shape for g in grads] == [t.shape for t in inputs]
    assert K == 0 or not any(g.any() for g in grads)
    if not K and N:
        assert torch.equal(y, inputs[2].detach().expand(y.shape))


@backends
@kinds
def test_one_row_without_leading_dimensions_and_a_column_of_token_weights(activation, backend):
    inputs = tensors(activation, ())
    inputs[4] = inputs[4].detach().view(1).requires_grad_()
    one = gradients(op(activation, backend=backend), inputs)
    row = [inputs[0].detach()[None].requires_grad_(), *inputs[1:4], inputs[4].detach()[None].requires_grad_()]
    for a, b in zip(one, gradients(op(activation, backend=backend), row), strict=True):
        torch.testing.assert_close(a, b.view(a.shape))


# ---- the kernel that rebuilds ----


@needs_triton
@pytest.mark.parametrize("dtype", (FP32, BF16))
@pytest.mark.parametrize("fp8", (False, True), ids=("", "fp8"))
@pytest.mark.parametrize("activation", (*PLAIN, *GATED))
def test_backward_rebuilds_what_forward_wrote(activation, fp8, dtype):
    x, _, _, bias, token_weight = (t.detach() for t in tensors(activation, (21,), 72, dtype=dtype))
    options = ActivationOptions(activation, *((1.0, 0.5) if activation in GATED else (None, None)))
    kept, exponents = fp8_quantise(x, 2 if activation in GATED else 1) if fp8 else (x, None)
    seen = as_kept(x, "fp8" if fp8 else "input", activation)
    dy = torch.randn(21, 72, device=DEVICE).to(dtype)
    expected = kernels.activation_forward(seen, bias, token_weight, None, None, options, dtype)
    rest = kept, exponents, bias, token_weight, None, None, options, True, True, True, False, dtype
    grads = kernels.activation_backward(dy, *rest, None)
    assert grads[3] is None
    for into_dy in (False, True):
        given = dy.clone()
        with poisoned():
            found = kernels.activation_backward(given, *rest, dtype, into_dy=into_dy)
        torch.testing.assert_close(found[3], expected, rtol=1e-6 if dtype is FP32 else 1e-2, atol=1e-6)
        if DEVICE == "cpu":  # a compiler may contract differently
            assert torch.equal(found[3], expected)
        assert equal(found[:3], grads[:3])
        assert (found[3].data_ptr() == given.data_ptr()) is into_dy and (into_dy or torch.equal(given, dy))
    again = kernels.rebuild_activation(kept, exponents, bias, token_weight, options, dtype)
    torch.testing.assert_close(again, expected, rtol=1e-6 if dtype is FP32 else 1e-2, atol=1e-6)


@needs_triton
def test_y_takes_no_place_of_which_two_threads_read():
    dy, x = torch.randn(6, 1, device=DEVICE), torch.randn(6, 1, device=DEVICE)
    given = dy, x, None, None, None, None, None, ActivationOptions("silu", None, None), True, False, False, False, FP32, FP32
    y = kernels.activation_backward(*given, into_dy=True)[3]
    assert y.data_ptr() != dy.data_ptr()  # a block of 4 numbers and 128 threads
    torch.testing.assert_close(y, F.silu(x))


@needs_triton
def test_registered_backward_that_rebuilds_is_what_it_says():
    x, _, _, bias, token_weight = (t.detach() for t in tensors())
    dy, options = torch.randn(5, 3, 40, device=DEVICE), ActivationOptions("swiglu", 1.0, 0.5)
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    for needs in ((True, True, True), (False, True, False), (False, False, False)):
        for dx_type, y_type in ((FP32, FP32), (BF16, FP32)):
            given = dy, x, None, bias, token_weight, None, None, *options, *needs, False, dx_type, y_type
            torch.library.opcheck(kernels.backward.op, given, test_utils=tests)


# ---- which gradients are asked for ----


@backends
@saves
def test_what_nobody_asks_for_is_not_computed(save, backend, monkeypatch):
    inputs = tensors()
    did = []

    def spy(where, name, note):
        stock = getattr(where, name)
        monkeypatch.setattr(where, name, lambda *args, **more: did.append(note(args)) or stock(*args, **more))

    spy(product, "row_gradients", lambda args: "d activation" if args[1] is not None else "")
    spy(product, "weight_gradient", lambda _: "weight")
    if backend == "triton":
        spy(kernels, "backward_into", lambda args: "and y" if args[-1] is not None else "no y")
        spy(kernels, "rebuild_activation", lambda _: "y alone")

    def of(*asking):
        y = op(save=save, backend=backend)(*inputs)
        did.clear()
        torch.autograd.grad(y.sum(), [inputs[NAMES.index(name)] for name in asking])
        return [what for what in did if what]

    def kernel(what):
        return [what] if backend == "triton" else []

    assert of("x") == ["d activation", *kernel("no y")]
    assert of("activation_bias", "token_weight") == ["d activation", *kernel("no y")]
    assert of("x", "weight") == ["d activation", *kernel("and y"), "weight"]
    assert of("weight") == [*kernel("y alone"), "weight"]
    assert of("bias") == []


@backends
@saves
def test_the_bias_alone_needs_nothing_of_x(save, backend):
    inputs = [t.detach() for t in tensors()]
    inputs[1].main_grad = torch.zeros(1)  # of a wrong shape: nobody looks
    inputs[2].requires_grad_()
    with saved_tensors() as kept:
        op(save=save, backend=backend)(*inputs)
    assert not any(t.numel() >= inputs[0].numel() for t in kept)


# ---- what is kept, and what is written ----


@backends
@saves
@kinds
@pytest.mark.parametrize("dtype", (FP32, BF16))
def test_keeps_x_only_in_its_store(activation, dtype, save, backend):
    K = 128
    x, weight, *_ = tensors(activation, (9, 4), K, 24, dtype)
    with saved_tensors() as kept:
        op(activation, save=save, backend=backend)(x, weight)
    if save == "fp8":
        assert bytes_kept(kept, weight) == x.numel() + x.numel() // 64
    else:
        assert bytes_kept([t for t in kept if t.device == x.device], weight, x) == 0

    def separate():
        return F.linear(onepass.bias_activation(x, None, activation, backend=backend), weight)

    with saved_tensors() as kept:
        separate()
    assert bytes_kept(kept, weight, x) == 9 * 4 * K * dtype.itemsize


# ---- what people wrap around it ----


@backends
@pytest.mark.parametrize("save", ("fp8", "offload"))
def test_stores_hold_what_the_contract_says_of_input(save, backend):
    inputs, call = tensors(), op(save=save, backend=backend)

    def block(x, *rest):
        return call(x * 2, *rest)

    y = block(*inputs)
    first = torch.autograd.grad(y, inputs, incoming(y), retain_graph=True)
    assert equal(first, torch.autograd.grad(y, inputs, incoming(y)))
    plain = gradients(block, inputs)
    for reentrant in (True, False):
        assert equal(plain, gradients(lambda *t, again=reentrant: checkpoint(block, *t, use_reentrant=again), inputs))
    torch._dynamo.reset()
    for a, b in zip(plain, gradients(torch.compile(block, fullgraph=True, backend="aot_eager"), inputs), strict=True):
        if backend == "triton":
            assert torch.equal(a, b)
        else:  # the compiler sees the formula; fp8: its weight gets the gradient of the exact activation
            torch.testing.assert_close(a, b, rtol=1e-4, atol=(6e-2 if save == "fp8" else 1e-4) * a.abs().max().item())


@backends
@saves
@pytest.mark.parametrize("dtype", (FP32, BF16))
def test_autocast_rounds_the_operands_of_the_product(dtype, save, backend):
    x, weight, bias, activation_bias, token_weight = tensors(lead=(7,), K=64)
    x = x.detach().to(dtype).requires_grad_()
    weight.main_grad = torch.zeros_like(weight)
    with torch.autocast(DEVICE, BF16):
        y = op(save=save, backend=backend)(x, weight, bias, activation_bias, token_weight)
    assert y.dtype is BF16
    dy = torch.randn_like(y)
    y.backward(dy)
    exact = [t.detach().double().requires_grad_() for t in (x, weight, bias, activation_bias, token_weight)]
    exact[0] = as_kept(x.detach(), save, "swiglu").double().requires_grad_()
    op(function=module.activation_linear_reference)(*exact).backward(dy.double())
    got = x.grad, weight.main_grad, bias.grad, activation_bias.grad, token_weight.grad
    for grad, true in zip(got, exact, strict=True):
        assert relative(grad, true.grad) < 1e-2
    assert x.grad.dtype is dtype and bias.grad.dtype is FP32 and weight.grad is None
    inputs = [t.detach().double() for t in (x, weight, bias, activation_bias, token_weight)]
    with torch.autocast(DEVICE, BF16):
        assert op(backend="torch")(*inputs).dtype is torch.float64
