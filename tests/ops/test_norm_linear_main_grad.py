"""Where norm_linear's weight gradient goes when the weight carries main_grad."""

import pytest
import torch
from ops.calls import backends, equal, gradients, incoming, relative
from ops.norm_linear_calls import NAMES, kinds, op, tensors
from ops.norm_oracle import BF16, DEVICE, FP32
from torch.utils.checkpoint import checkpoint

import onepass
import onepass.ops.norm.norm_linear as module
from onepass.testing.poison import unchanged


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
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_autocast_rounds_the_operands_of_the_product(backend, dtype):
    x = torch.randn(5, 16, device=DEVICE).to(dtype).requires_grad_()
    norm_weight, bias = (torch.randn(n, device=DEVICE, requires_grad=True) for n in (16, 8))
    weight = torch.nn.Parameter(torch.randn(8, 16, device=DEVICE))
    weight.main_grad = torch.zeros(8, 16, device=DEVICE)
    with torch.autocast(DEVICE, BF16):
        y = module.norm_linear(x, norm_weight, weight, bias, backend=backend)
    assert y.dtype is BF16
    dy = torch.randn_like(y)
    y.backward(dy)
    exact = [t.detach().double().requires_grad_() for t in (x, norm_weight, weight, bias)]
    module.norm_linear_reference(*exact).backward(dy.double())
    for got, true in zip((x.grad, norm_weight.grad, weight.main_grad, bias.grad), exact, strict=True):
        assert ((got.double() - true.grad).norm() / true.grad.norm()) < 1e-2
    assert x.grad.dtype is dtype
    assert bias.grad.dtype is torch.float32


@backends
@kinds
@pytest.mark.parametrize("mode", ("eager", "aot_eager", "inductor"))
def test_weight_and_bias_in_every_pass(backend, layer, mode):
    """Gathered by backward, returned to who asks for them by name, left alone by the others; compiled, the first only."""
    inputs = tensors(layer=layer)
    x, _, weight, bias, _ = inputs
    call = op(layer, backend=backend)
    expected = torch.autograd.grad(call(*inputs).square().sum(), (x, weight, bias))
    parameters = [torch.nn.Parameter(t.detach()) for t in (weight, bias)]
    for parameter in parameters:
        parameter.main_grad, parameter.grad_added_to_main_grad = torch.zeros_like(parameter), False
    given = [x, inputs[1], *parameters, inputs[4]]

    def run(*given):
        return call(*given).square().sum()

    torch._dynamo.reset()
    loss = run if mode == "eager" else torch.compile(run, fullgraph=True, backend=mode)
    for step in (1, 2):
        loss(*given).backward()
        sums = [step * expected[1], step * expected[2]]
        torch.testing.assert_close([t.main_grad for t in parameters], sums, rtol=1e-5, atol=1e-4)
        assert all(t.grad_added_to_main_grad is True and not t.grad.any() for t in parameters)
    torch.testing.assert_close(x.grad, 2 * expected[0])
    with unchanged(weight=parameters[0].main_grad, bias=parameters[1].main_grad):
        for asked, what in (([x], expected[:1]), (parameters, expected[1:])):
            if mode == "eager":
                torch.testing.assert_close(torch.autograd.grad(loss(*given), asked), what)
            else:
                with pytest.raises(RuntimeError, match="main_grad must be gathered"):
                    torch.autograd.grad(loss(*given), asked)
