"""What norm_linear is, what it keeps, where its weight's gradient goes, and how it behaves under whatever people do to an op."""

import itertools

import pytest
import torch
from ops.norm_oracle import BF16, DEVICE, FP16, FP32
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import onepass
import onepass.ops.norm_linear as room
from onepass.runtime.lang import triton
from onepass.testing.budget import compare, run
from onepass.testing.mutants import mutate
from onepass.testing.poison import saved_tensors, unchanged

needs_triton = pytest.mark.skipif(triton is None, reason="triton is not installed")
backends = pytest.mark.parametrize("backend", [pytest.param("triton", marks=needs_triton), "torch"])
kinds = pytest.mark.parametrize("layer", (True, False), ids=("layer", "rms"))
biases = pytest.mark.parametrize("with_bias", (True, False), ids=("bias", ""))
NAMES = ("x", "norm_weight", "weight", "bias", "norm_bias")
USES = ("y", "norm", "both")


def tensors(lead=(3, 5), K=40, N=24, dtype=FP32, layer=True, with_bias=True, params=None):
    """x, norm_weight, weight, bias and norm_bias, all of which ask for a gradient; `params` is the type of the norm's own."""
    x, norm_weight, bias = (torch.randn(*shape, device=DEVICE) for shape in ((*lead, K), (K,), (N,)))
    weight, norm_bias = torch.randn(N, K, device=DEVICE) / K**0.5, torch.randn(K, device=DEVICE)
    params = dtype if params is None else params
    some = x.to(dtype), norm_weight.to(params), weight.to(dtype), bias.to(dtype), norm_bias.to(params)
    kept = some[0], some[1], some[2], some[3] if with_bias else None, some[4] if layer else None
    return [t if t is None else t.detach().requires_grad_() for t in kept]


def op(layer=True, function=None, **options):
    def call(x, norm_weight, weight, bias=None, norm_bias=None):
        norm = "layer_norm" if layer else "rms_norm"
        return (function or onepass.norm_linear)(x, norm_weight, weight, bias, norm_bias=norm_bias, norm=norm, **options)

    return call


def outputs(returned):
    return (returned,) if isinstance(returned, torch.Tensor) else tuple(returned)


def gradients(function, inputs):
    """The outputs and the gradients of inputs that ask for one, on fresh leaves."""
    leaves = [None if t is None else t.detach().requires_grad_(t.requires_grad) for t in inputs]
    ys = outputs(function(*leaves))
    torch.autograd.backward(ys, [incoming(y, i) for i, y in enumerate(ys)])
    return [*(y.detach() for y in ys), *(t.grad for t in leaves if t is not None and t.requires_grad)]


def incoming(y, i=0):
    return torch.linspace(-1, 2 + i, y.numel(), device=y.device).view(y.shape).to(y.dtype)


def equal(first, second):
    return len(first) == len(second) and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def relative(got, exact):
    return ((got.double() - exact).norm() / exact.norm()).item()


# ---- what it computes ----


def used(call, uses):
    """The op with y, norm(x) or both as what is returned."""
    pick = {"y": slice(0, 1), "norm": slice(1, 2), "both": slice(0, 2)}[uses]
    return lambda *inputs: outputs(call(*inputs))[pick]


def report_of(function, dtype, layer, with_bias, centered, uses, params=None, lead=(3, 11), backend="torch"):
    """Ours against the formula in fp64; the baseline is the same formula in the inputs' own types."""
    given = dict(zip(NAMES, tensors(lead, 70, 48, dtype, layer, with_bias, params), strict=True))
    if uses == "norm":
        del given["weight"], given["bias"]  # no gradient reaches these
    plain = tensors(lead, 70, 48, dtype, layer, with_bias, params)[2:4]
    shapes = {"y": (*lead, 48), "norm": (*lead, 70)}
    dys = [torch.randn(shapes[name], device=DEVICE).to(dtype) for name in (("y", "norm") if uses == "both" else (uses,))]

    def of(f, **options):
        call = used(op(layer, f, zero_centered_gamma=centered, return_norm_output=True, eps=1e-5, **options), uses)
        if uses != "norm":
            return call
        return lambda x, nw, nb: call(x, nw, plain[0].to(x.dtype), plain[1] if with_bias is False else plain[1].to(x.dtype), nb)

    reference = of(room.norm_linear_reference)
    ours, exact = run(of(function, backend=backend), given, dys), run(reference, given, dys, torch.float64)
    if dtype is FP32:
        return {name: relative(ours[name], exact[name]) for name in exact}
    return compare([(ours, run(reference, given, dys), exact)], dtype)


@backends
@kinds
@biases
@pytest.mark.parametrize("uses", USES)
@pytest.mark.parametrize("centered", (False, True), ids=("", "centered"))
def test_values_and_gradients_in_fp32(backend, layer, with_bias, uses, centered):
    errors = report_of(None, FP32, layer, with_bias, centered, uses, backend=backend)
    assert all(error <= 1e-6 for error in errors.values()), errors


@backends
@kinds
@pytest.mark.parametrize("uses", USES)
@pytest.mark.parametrize("params", (BF16, FP32), ids=("", "wide norm"))
def test_values_and_gradients_in_bf16(backend, layer, uses, params):
    report = report_of(None, BF16, layer, uses != "y", uses == "both", uses, params, lead=(4, 64), backend=backend)
    assert report, report


@backends
@kinds
def test_values_and_gradients_in_fp16(backend, layer):
    report = report_of(None, FP16, layer, True, False, "both", lead=(4, 64), backend=backend)
    assert report, report


@backends
@kinds
def test_it_is_the_norm_and_the_linear(backend, layer):
    x, norm_weight, weight, bias, norm_bias = tensors(layer=layer)
    expected = F.layer_norm(x, (40,), norm_weight, norm_bias, 1e-6) if layer else F.rms_norm(x, (40,), norm_weight, 1e-6)
    y, normed = op(layer, backend=backend, return_norm_output=True)(x, norm_weight, weight, bias, norm_bias)
    torch.testing.assert_close(normed, expected)
    torch.testing.assert_close(y, F.linear(expected, weight, bias))
    bare = op(layer, backend=backend)(x, None, weight)
    expected = F.layer_norm(x, (40,), eps=1e-6) if layer else F.rms_norm(x, (40,), eps=1e-6)
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
@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8)])
def test_no_rows_give_nothing_and_zero_gradients(backend, layer, shape):
    inputs = tensors(shape[:-1], 8, 6, layer=layer)
    for returns in (False, True):
        results = gradients(op(layer, backend=backend, return_norm_output=returns), inputs)
        ys, grads = results[: 1 + returns], results[1 + returns :]
        assert [y.shape for y in ys] == [(*shape[:-1], 6), shape][: 1 + returns]
        assert [g.shape for g in grads] == [t.shape for t in inputs if t is not None]
        assert not any(g.any() for g in grads)
    inputs[2].main_grad = torch.ones_like(inputs[2])
    op(layer, backend=backend)(*inputs).sum().backward()
    assert torch.equal(inputs[2].main_grad, torch.ones_like(inputs[2])) and inputs[2].grad is None


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
        stock = room.norm_forward
        monkeypatch.setattr(room, "norm_forward", lambda *args: kept.append(args[-1]) or stock(*args))
    with torch.no_grad():
        y = op(layer, backend=backend)(*inputs)
    assert y.shape == (3, 5, 24) and not any(kept)


@pytest.mark.parametrize("backend", ["torch"])
def test_autocast_leaves_fp64_alone(backend):
    inputs = tensors(dtype=torch.float64, params=torch.float64)
    with torch.autocast(DEVICE, BF16):
        y = op(backend=backend)(*inputs)
    assert y.dtype == torch.float64


@backends
@kinds
def test_one_row_without_leading_dimensions(backend, layer):
    inputs = tensors((), layer=layer)
    one = gradients(op(layer, backend=backend), inputs)
    row = gradients(op(layer, backend=backend), [inputs[0].detach()[None].requires_grad_(), *inputs[1:]])
    for a, b in zip(one, row, strict=True):
        torch.testing.assert_close(a, b.view(a.shape))


@backends
@kinds
def test_x_that_is_not_contiguous(backend, layer):
    inputs = tensors((6, 5), layer=layer)
    x = inputs[0].detach()
    wide = torch.randn(6, 5, 80, device=DEVICE)
    wide[..., ::2] = x
    expected = gradients(op(layer, backend=backend, return_norm_output=True), inputs)
    for other in (x.transpose(0, 1).contiguous().transpose(0, 1), wide[..., ::2], wide.clone()[..., ::2]):
        assert not other.is_contiguous() and torch.equal(other, x)
        leaf = other.requires_grad_()
        ys = op(layer, backend=backend, return_norm_output=True)(leaf, *inputs[1:])
        asked = [leaf, *(t for t in inputs[1:] if t is not None)]
        got = [*ys, *torch.autograd.grad(ys, asked, [incoming(y, i) for i, y in enumerate(ys)])]
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b)


@backends
@kinds
def test_incoming_gradients_that_are_not_contiguous(backend, layer):
    inputs = tensors((6, 5), layer=layer)
    ys = op(layer, backend=backend, return_norm_output=True)(*inputs)
    dys = [torch.randn_like(y) for y in ys]
    turned = [dy.transpose(0, 1).contiguous().transpose(0, 1) for dy in dys]
    ones = [torch.ones((), device=DEVICE).expand(y.shape) for y in ys]
    asked = [t for t in inputs if t is not None]
    for given, plain in ((turned, dys), (ones, [torch.ones_like(y) for y in ys])):
        for i in (slice(0, 2), slice(1, 2)):
            first, second = (
                torch.autograd.grad(ys[i], asked, some[i], retain_graph=True, allow_unused=True) for some in (given, plain)
            )
            for a, b in zip(first, second, strict=True):
                assert (a is None) == (b is None)
                if a is not None:
                    torch.testing.assert_close(a, b)


# ---- which gradients are asked for ----


@backends
@kinds
@pytest.mark.parametrize("uses", USES)
def test_every_choice_of_what_is_frozen(backend, layer, uses):
    inputs = tensors((3, 2), 20, 12, layer=layer)
    call = used(op(layer, backend=backend, return_norm_output=True), uses)
    here = [i for i, t in enumerate(inputs) if t is not None]
    leaves = [t if t is None else t.detach().requires_grad_() for t in inputs]
    ys = call(*leaves)
    dys = [incoming(y, i) for i, y in enumerate(ys)]
    full = torch.autograd.grad(ys, [leaves[i] for i in here], dys, allow_unused=True)
    expected = dict(zip(here, full, strict=True))
    for count in (1, len(here) - 1):
        for asking in itertools.combinations(here, count):
            some = [t if t is None else t.detach().requires_grad_(i in asking) for i, t in enumerate(inputs)]
            given = call(*some)
            got = torch.autograd.grad(given, [some[i] for i in asking], dys, allow_unused=True)
            for i, grad in zip(asking, got, strict=True):
                assert (grad is None) == (expected[i] is None), (NAMES[i], asking)
                if grad is not None:
                    torch.testing.assert_close(grad, expected[i], msg=lambda said, i=i: f"{NAMES[i]}: {said}")


@backends
@kinds
def test_nothing_is_kept_where_nothing_asks(backend, layer):
    inputs = tensors(layer=layer)
    with saved_tensors() as kept, torch.no_grad():
        first = op(layer, backend=backend)(*inputs)
    frozen = op(layer, backend=backend)(*(t if t is None else t.detach() for t in inputs))
    assert not kept and torch.equal(first, frozen) and not frozen.requires_grad


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


@needs_triton
@kinds
def test_norm_and_linear_apart_keep_one_more(layer):
    x, norm_weight, weight, bias, norm_bias = tensors((9, 4), 100, 24, BF16, layer)
    with saved_tensors() as kept:
        norm = onepass.layer_norm if layer else onepass.rms_norm
        F.linear(norm(x, norm_weight, *([norm_bias] if layer else []), backend="triton"), weight, bias)
    assert len({t.data_ptr() for t in kept if t.numel() == x.numel()}) == 2


@backends
@kinds
@pytest.mark.parametrize("uses", USES)
def test_incoming_gradients_and_inputs_are_not_written(backend, layer, uses):
    inputs = tensors(layer=layer)
    ys = used(op(layer, backend=backend, return_norm_output=True), uses)(*inputs)
    given = {f"dy{i}": torch.randn_like(y) for i, y in enumerate(ys)}
    named = dict(zip(NAMES, inputs, strict=True)) | {f"y{i}": y for i, y in enumerate(ys)}
    with unchanged(**given, **named):
        torch.autograd.backward(ys, list(given.values()))
    grads = [t.grad for t in inputs if t is not None and t.grad is not None]
    places = [t.untyped_storage().data_ptr() for t in (*grads, *given.values())]
    assert len(set(places)) == len(places)


@backends
@kinds
def test_twice_over_a_retained_graph_and_called_again(backend, layer):
    inputs = tensors(layer=layer)
    asked = [t for t in inputs if t is not None]
    call = op(layer, backend=backend, return_norm_output=True)
    ys = call(*inputs)
    dys = [torch.randn_like(y) for y in ys]
    first = torch.autograd.grad(ys, asked, dys, retain_graph=True)
    again = torch.autograd.grad(ys, asked, dys)
    assert equal(first, again) and equal(first, torch.autograd.grad(call(*inputs), asked, dys))


# ---- main_grad ----


@backends
@kinds
@pytest.mark.parametrize("dtype", (FP32, BF16))
@pytest.mark.parametrize("main", (FP32, BF16))
@pytest.mark.parametrize("flag", (True, False), ids=("flag", ""))
def test_main_grad_over_two_microbatches(backend, layer, dtype, main, flag):
    inputs = tensors((6, 8), dtype=dtype, layer=layer)
    weight = inputs[2]
    start = torch.randn_like(weight, dtype=main)
    weight.main_grad = start.clone()
    plain = [t if t is None else t.detach().requires_grad_() for t in inputs]
    exact = start.double()
    for step in range(2):
        if flag:
            weight.grad_added_to_main_grad = False
        weight.grad = None
        x = torch.randn_like(inputs[0]).requires_grad_()
        y, normed = op(layer, backend=backend, return_norm_output=True)(x, *inputs[1:])
        dy = torch.randn_like(y)
        other = op(layer, backend=backend)(x, *plain[1:])
        asked = [x, *(t for t in (inputs[1], *inputs[3:]) if t is not None)]
        expected = torch.autograd.grad(other, [x, *(t for t in (plain[1], *plain[3:]) if t is not None)], dy)
        place = weight.main_grad.data_ptr()
        for t in asked:
            t.grad = None
        y.backward(dy)
        assert equal([t.grad for t in asked], expected)  # everyone else's gradient is as ever
        exact += dy.double().flatten(0, -2).T @ normed.detach().double().flatten(0, -2)
        error = relative(weight.main_grad, exact)
        assert error <= (1e-6 if main is FP32 else 4e-3), (step, error)
        assert weight.main_grad.data_ptr() == place and weight.main_grad.dtype == main
        if flag:  # a placeholder, so that hooks run
            assert weight.grad_added_to_main_grad is True
            assert weight.grad.shape == weight.shape and weight.grad.dtype == dtype and not weight.grad.any()
        else:
            assert weight.grad is None and not hasattr(weight, "grad_added_to_main_grad")


@backends
def test_main_grad_of_a_parameter_that_runs_hooks(backend):
    x, norm_weight, weight, *_ = tensors(layer=False)
    weight = torch.nn.Parameter(weight.detach())
    weight.main_grad, weight.grad_added_to_main_grad = torch.zeros_like(weight), False
    seen = []
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.main_grad.any().item()))
    onepass.norm_linear(x, norm_weight, weight, backend=backend).sum().backward()
    assert seen == [True] and not weight.grad.any()


@backends
def test_main_grad_is_left_alone_where_no_gradient_is_due(backend):
    inputs = tensors()
    weight = inputs[2]
    weight.main_grad, weight.grad_added_to_main_grad = torch.ones_like(weight), False
    call = op(backend=backend, return_norm_output=True)
    with unchanged(main_grad=weight.main_grad):
        call(*inputs)[1].sum().backward()  # norm(x) alone
        weight.requires_grad_(False)
        call(*inputs)[0].sum().backward()
    assert weight.grad is None and weight.grad_added_to_main_grad is False and inputs[0].grad.any()


@backends
def test_main_grad_takes_each_backward_of_a_retained_graph(backend):
    inputs = tensors()
    weight = inputs[2]
    weight.main_grad = torch.zeros_like(weight)
    y = op(backend=backend)(*inputs)
    y.sum().backward(retain_graph=True)
    once = weight.main_grad.clone()
    y.sum().backward()
    torch.testing.assert_close(weight.main_grad, 2 * once)
    assert once.any()


BAD_MAIN = {
    "shape": (lambda w: torch.zeros(w.shape[1], w.shape[0]), ValueError, ("(24, 40)", "(40, 24)")),
    "flat": (lambda w: torch.zeros(w.numel()), ValueError, ("(24, 40)", "(960,)")),
    "fp64": (lambda w: torch.zeros(w.shape, dtype=torch.float64), TypeError, ("float64",)),
    "integer": (lambda w: torch.zeros(w.shape, dtype=torch.int32), TypeError, ("int32",)),
    "device": (lambda w: torch.zeros(w.shape, device="meta"), ValueError, ("meta",)),
    "no tensor": (lambda w: [0.0], TypeError, ("list",)),
}


@backends
@pytest.mark.parametrize("what", BAD_MAIN)
def test_a_wrong_main_grad_raises_before_anything_is_written(backend, what):
    inputs = tensors()
    make, error, words = BAD_MAIN[what]
    main = inputs[2].main_grad = make(inputs[2])
    if what not in ("device", "no tensor"):
        main = inputs[2].main_grad = main.to(DEVICE)
    inputs[2].grad_added_to_main_grad = False
    watched = main if isinstance(main, torch.Tensor) and main.device.type != "meta" else None
    with unchanged(main_grad=watched, **dict(zip(NAMES, inputs, strict=True))), pytest.raises(error, match="main_grad") as raised:
        op(backend=backend)(*inputs)
    assert all(word in str(raised.value) for word in words), raised.value
    assert inputs[2].grad_added_to_main_grad is False and inputs[2].grad is None


# ---- what people wrap around it ----


@backends
@kinds
@pytest.mark.parametrize("returns", (False, True), ids=("", "norm too"))
def test_compiling_gives_the_same(backend, layer, returns):
    inputs = tensors(dtype=BF16, layer=layer)
    call = op(layer, backend=backend, return_norm_output=returns)

    def block(x, *rest):
        return tuple(t * 2 for t in outputs(call(x * 1, *rest)))

    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    for some in (inputs, [*inputs[:3], None, None]):
        for a, b in zip(gradients(block, some), gradients(compiled, some), strict=True):
            if backend == "triton":
                assert torch.equal(a, b)
            else:  # the compiler sees the formula, and rounds where that does
                torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2 * b.abs().max().item())


@backends
@kinds
@pytest.mark.parametrize("reentrant", (True, False))
def test_checkpointing_gives_the_same(backend, layer, reentrant):
    inputs = tensors(layer=layer)

    def block(x, *rest):
        return op(layer, backend=backend, return_norm_output=True)(x * 2, *rest)

    assert equal(gradients(block, inputs), gradients(lambda *t: checkpoint(block, *t, use_reentrant=reentrant), inputs))


@backends
@pytest.mark.parametrize("reentrant", (True, False))
def test_checkpointing_adds_to_main_grad_once(backend, reentrant):
    x, norm_weight, weight, bias, norm_bias = tensors()
    expected = gradients(op(backend=backend), (x, norm_weight, weight, bias, norm_bias))[3]
    weight.main_grad = torch.zeros_like(weight)

    def block(x):
        return op(backend=backend)(x, norm_weight, weight, bias, norm_bias)

    y = checkpoint(block, x, use_reentrant=reentrant)
    y.backward(incoming(y))
    torch.testing.assert_close(weight.main_grad, expected)
    assert weight.grad is None


@backends
@kinds
@pytest.mark.parametrize("constant", (True, False))
def test_a_second_derivative_raises(backend, layer, constant):
    inputs = tensors(layer=layer)
    y = op(layer, backend=backend)(*inputs)
    (dx,) = torch.autograd.grad(y, inputs[0], torch.ones_like(y, requires_grad=not constant), create_graph=True)
    with pytest.raises(RuntimeError, match="once"):
        dx.square().sum().backward()


@kinds
def test_transforms_take_the_formula(layer):
    inputs = [t if t is None else t.detach() for t in tensors((5,), layer=layer)]
    x, call = inputs[0], lambda t: op(layer)(t, *inputs[1:])
    reference = lambda t: op(layer, room.norm_linear_reference)(t, *inputs[1:])  # noqa: E731
    torch.testing.assert_close(torch.func.vmap(call)(x), reference(x))
    ours, theirs = (torch.func.grad(lambda t, f=f: f(t).square().sum())(x) for f in (call, reference))
    torch.testing.assert_close(ours, theirs)


@backends
def test_in_inference_mode_and_on_parameters(backend):
    inputs = tensors()
    with torch.inference_mode():
        y = op(backend=backend)(*inputs)
    again = op(backend=backend)(inputs[0], *(torch.nn.Parameter(t.detach()) for t in inputs[1:]))
    assert torch.equal(y, again)


# ---- what is said of a call ----


@needs_triton
@kinds
def test_explain(layer):
    x, norm_weight, weight, bias, norm_bias = (t if t is None else t.detach() for t in tensors(layer=layer))
    norm = "layer_norm" if layer else "rms_norm"
    said = onepass.explain("norm_linear", x, norm_weight, weight, bias, norm=norm, norm_bias=norm_bias, backend="triton")
    assert all(word in said.variant for word in ("forward with", "cuBLAS", "rebuilt in backward")), said.variant


x, norm, weight, bias = torch.ones(2, 6), torch.ones(6), torch.ones(3, 6), torch.ones(3)
LAYER = {"norm": "layer_norm"}
BAD = {  # the call's arguments, its error, what is said: the argument, what it was, what it must be
    "integer x": ((x.int(), norm, weight), {}, TypeError, ("x must be", "floating-point", "torch.int32")),
    "no tensor": (([1.0], norm, weight), {}, TypeError, ("x must be", "list")),
    "a scalar": ((torch.tensor(1.0), norm, weight), {}, ValueError, ("x must", "dimension", "()")),
    "hidden size 0": ((torch.ones(3, 0), torch.ones(0), torch.ones(3, 0)), {}, ValueError, ("x must", "(3, 0)")),
    "short norm_weight": ((x, norm[:4], weight), {}, ValueError, ("norm_weight must have shape (6,)", "(4,)")),
    "integer norm_weight": ((x, norm.int(), weight), {}, TypeError, ("norm_weight must be", "torch.int32")),
    "norm_weight elsewhere": ((x, norm.to("meta"), weight), {}, ValueError, ("norm_weight must be on cpu", "meta")),
    "zero-centred nothing": ((x, None, weight), {"zero_centered_gamma": True}, ValueError, ("zero_centered_gamma",)),
    "norm_bias of RMSNorm": ((x, norm, weight), {"norm_bias": norm}, ValueError, ("norm_bias", "layer_norm")),
    "short norm_bias": ((x, norm, weight), {"norm_bias": norm[:1]} | LAYER, ValueError, ("norm_bias must", "(6,)", "(1,)")),
    "weight turned": ((x, norm, weight.T), {}, ValueError, ("weight must have shape (N, 6)", "(6, 3)")),
    "weight a vector": ((x, norm, norm), {}, ValueError, ("weight must have shape (N, 6)", "(6,)")),
    "weight nothing": ((x, norm, None), {}, TypeError, ("weight must be", "NoneType")),
    "weight of another type": ((x, norm, weight.bfloat16()), {}, TypeError, ("weight must", "float32", "bfloat16")),
    "weight elsewhere": ((x, norm, weight.to("meta")), {}, ValueError, ("weight must be on cpu", "meta")),
    "short bias": ((x, norm, weight, bias[:2]), {}, ValueError, ("bias must have shape (3,)", "(2,)")),
    "bias of another type": ((x, norm, weight, bias.half()), {}, TypeError, ("bias must", "float32", "float16")),
    "bias a number": ((x, norm, weight, 1.0), {}, TypeError, ("bias must be", "float")),
    "bias elsewhere": ((x, norm, weight, bias.to("meta")), {}, ValueError, ("bias must be on cpu", "meta")),
    "another norm": ((x, norm, weight), {"norm": "batch_norm"}, ValueError, ("norm must be one of", "batch_norm")),
    "eps of zero": ((x, norm, weight), {"eps": 0.0}, ValueError, ("eps must be", "above 0", "0.0")),
    "eps a word": ((x, norm, weight), {"eps": "1e-5"}, TypeError, ("eps must be", "number", "'1e-5'")),
    "unknown backend": ((x, norm, weight), {"backend": "cuda"}, ValueError, ("backend must be one of auto", "'cuda'")),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_bad_input(what):
    args, options, error, words = BAD[what]
    with unchanged(x=x, norm=norm, weight=weight, bias=bias), pytest.raises(error) as raised:
        onepass.norm_linear(*args, **options)
    for word in words:
        assert word in str(raised.value), f"{word!r} is not in {str(raised.value)!r}"


# ---- broken copies, which a check above must catch ----

MUTANTS = {
    "no norm_bias": ("x, None, norm_weight, norm_bias, eps, layer", "x, None, norm_weight, None, eps, layer", "values"),
    "the weight's gradient of x itself": (
        "normed = normed.to(ctx.product).reshape(",
        "normed = x.to(ctx.product).reshape(",
        "values",
    ),
    "d norm(x) forgotten": (
        "torch.addmm(dnormed.reshape(rows.shape[0], weight.shape[1]), rows, weight)", "(rows @ weight)", "values"
    ),
    "dx over the caller's gradient": ("into_dy = rows is not None and x.dtype == ctx.product", "into_dy = True", "writes"),
    "norm(x) kept in the place of x": ("save_for_backward(x, norm_weight", "save_for_backward(normed, norm_weight", "values"),
}


@needs_triton
@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_copy_is_caught(name):
    old, new, by = MUTANTS[name]
    broken = mutate(room, old, new).norm_linear
    if by == "values":
        errors = report_of(broken, FP32, True, True, False, "both", backend="triton")
        assert any(error > 1e-6 for error in errors.values())
        return
    y = op(True, broken, backend="triton", return_norm_output=True)(*tensors())[1]
    dy = torch.randn_like(y)
    with pytest.raises(AssertionError, match="dy"), unchanged(dy=dy):
        y.backward(dy)


@backends
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_autocast_rounds_the_operands_of_the_product(backend, dtype):
    x = torch.randn(5, 16, device=DEVICE).to(dtype).requires_grad_()
    norm_weight, bias = (torch.randn(n, device=DEVICE, requires_grad=True) for n in (16, 8))
    weight = torch.nn.Parameter(torch.randn(8, 16, device=DEVICE))
    weight.main_grad = torch.zeros(8, 16, device=DEVICE)
    with torch.autocast(DEVICE, BF16):
        y = room.norm_linear(x, norm_weight, weight, bias, backend=backend)
    assert y.dtype is BF16
    dy = torch.randn_like(y)
    y.backward(dy)
    exact = [t.detach().double().requires_grad_() for t in (x, norm_weight, weight, bias)]
    room.norm_linear_reference(*exact).backward(dy.double())
    for got, true in zip((x.grad, norm_weight.grad, weight.main_grad, bias.grad), exact, strict=True):
        assert ((got.double() - true.grad).norm() / true.grad.norm()) < 1e-2
    assert x.grad.dtype is dtype
    assert bias.grad.dtype is torch.float32
