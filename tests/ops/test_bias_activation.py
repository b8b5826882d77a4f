"""What bias_activation is, and how it behaves under autograd, the compiler and whatever else people do to an op."""

import math

import pytest
import torch
from ops.bias_activation_oracle import GATED, PLAIN, cubed, cubed_derivative, small_tiles
from ops.calls import backends, equal, gradients, needs_triton
from ops.oracle import BF16, DEVICE, FP32, laid_out
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import onepass
import onepass.ops.activation.bias_activation as module
from onepass.kernels.language import device_function
from onepass.ops.activation import activations, kernels
from onepass.ops.activation.formula import ActivationOptions
from onepass.runtime.saved import SAVES
from onepass.testing.poison import saved_tensors

saves = pytest.mark.parametrize("save", SAVES)


@pytest.fixture(autouse=True)
def _small():
    with small_tiles(module):
        yield


def tensors(gated=False, lead=(5, 3), H=40, dtype=FP32):
    W = 2 * H if gated else H
    x, bias = torch.randn(*lead, W, device=DEVICE, dtype=dtype), torch.randn(W, device=DEVICE, dtype=dtype)
    weight = torch.rand(lead, device=DEVICE)
    return [t.requires_grad_() for t in (x, bias, weight)]


def op(activation="swiglu", **options):
    return lambda x, bias=None, weight=None: onepass.bias_activation(x, bias, activation, token_weight=weight, **options)


@device_function
def squared(z):
    return z * z


@device_function
def twice(z):
    return 2.0 * z


# ---- what it computes ----

BY_HAND = {
    "gelu": lambda z: 0.5 * z * (1 + math.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))),
    "gelu_exact": lambda z: 0.5 * z * (1 + math.erf(z / math.sqrt(2))),
    "quick_gelu": lambda z: z / (1 + math.exp(-1.702 * z)),
    "silu": lambda z: z / (1 + math.exp(-z)),
    "relu": lambda z: max(z, 0.0),
    "squared_relu": lambda z: max(z, 0.0) ** 2,
}
GATES = dict(zip(GATED, ("silu", "gelu", "gelu_exact", "quick_gelu", "relu"), strict=True))


@backends
@pytest.mark.parametrize("activation", (*PLAIN, *GATED))
def test_the_formula_by_hand(activation, backend):
    gated, clamp, offset, weight = activation in GATED, 1.5, 0.25, 0.5
    x, bias = [-3.0, -0.5, 0.0, 1.0, 2.5, 4.0], [0.5, 0.0, -0.25, 1.0, -1.0, 0.0]
    z = [a + b for a, b in zip(x, bias, strict=True)]
    if gated:
        act = BY_HAND[GATES[activation]]
        expected = [
            weight * act(min(a, clamp)) * (max(-clamp, min(b, clamp)) + offset) for a, b in zip(z[:3], z[3:], strict=True)
        ]
        options = {"clamp": clamp, "linear_offset": offset}
    else:
        expected, options = [weight * BY_HAND[activation](a) for a in z], {}
    x, bias, weight = (torch.tensor(t, device=DEVICE) for t in ([x], bias, [weight]))
    y = onepass.bias_activation(x, bias, activation, token_weight=weight, backend=backend, **options)
    torch.testing.assert_close(y, torch.tensor([expected], device=DEVICE), rtol=1e-5, atol=1e-6)


@backends
def test_the_clamps_boundary_passes_gradient(backend):
    """PyTorch's own clamp does so before 2.14 alone."""
    gate, linear = [2.0, 1.0, -2.0, math.nan, 0.5, 0.5, 0.5, 0.5], [0.5, 0.5, 0.5, 0.5, 1.0, -1.0, 2.0, math.nan]
    x = torch.tensor([gate, linear], device=DEVICE).view(1, -1).requires_grad_()
    onepass.bias_activation(x, activation="swiglu", clamp=1.0, backend=backend).backward(torch.ones(1, 8, device=DEVICE))
    passes = (x.grad != 0).view(2, -1).tolist()  # NaN is not 0
    assert passes[0][:4] == [False, True, True, False] and passes[1][4:] == [True, True, False, False]


def test_shorthands():
    x, bias, _ = tensors()
    for name in ("gelu", "swiglu", "geglu", "quick_geglu"):
        shorthand = getattr(onepass, f"bias_{name}")
        assert torch.equal(shorthand(x, bias), onepass.bias_activation(x, bias, name))
        assert torch.equal(
            shorthand(x, token_weight=x[..., 0]), onepass.bias_activation(x, activation=name, token_weight=x[..., 0])
        )
        assert onepass.explain(shorthand, x, bias).op == "bias_activation"


@backends
@saves
@pytest.mark.parametrize("activation", ("gelu", "swiglu"))
@pytest.mark.parametrize("shape", [(0,), (0, 4), (3, 0), (0, 0), (2, 0, 8)])
def test_nothing_in_nothing_out(shape, activation, save, backend):
    x, bias = torch.randn(shape, device=DEVICE), torch.randn(shape[-1], device=DEVICE)
    weight = torch.rand((*shape[:-1], 1), device=DEVICE)
    inputs = [t.requires_grad_() for t in (x, bias, weight)]
    y, dx, dbias, dweight = gradients(op(activation, save=save, backend=backend), inputs)
    assert y.shape == (*shape[:-1], shape[-1] // 2 if activation == "swiglu" else shape[-1])
    assert (dx.shape, dbias.shape, dweight.shape) == (x.shape, bias.shape, weight.shape)
    assert not dbias.any() and not dweight.any()


@backends
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("activation", (*PLAIN, *GATED))
def test_nan_and_infinities_reach_the_result(activation, value, backend):
    W = 80 if activation in GATED else 40
    x = torch.ones(6, W, device=DEVICE)
    x[2, 3] = value  # the gate's half
    x[5, W - 1] = value  # the linear one's, in the last row
    y, dx, dbias = gradients(
        op(activation, backend=backend), [x.requires_grad_(), torch.zeros(W, device=DEVICE, requires_grad=True)]
    )
    exact = module.bias_activation_reference(x.detach().double(), activation=activation)
    if value != value or activation != "gelu_exact":  # PyTorch's own erf GELU makes NaN of infinity
        assert torch.equal(y.isnan(), exact.isnan()) and torch.equal(y.isinf(), exact.isinf())
    last = (5, W - 1) if activation not in GATED else (5, 39)
    assert y.isfinite().sum() >= y.numel() - 2 and y[0].isfinite().all() and dx[0].isfinite().all()
    if value != value:
        assert y[2, 3].isnan() and y[last].isnan() and dbias.isfinite().sum() >= W - 4
        if activation not in ("relu", "squared_relu", "reglu"):
            assert dx[2, 3].isnan()


# ---- autograd ----


@backends
def test_it_keeps_its_inputs_and_nothing_else(backend):
    x, bias, weight = tensors(gated=True)
    with saved_tensors() as kept:
        op(backend=backend)(x, bias, weight)
    assert {t.data_ptr() for t in kept} == {t.data_ptr() for t in (x, bias, weight)}
    with saved_tensors() as kept:
        op("gelu", backend=backend)(x)
    assert [t.data_ptr() for t in kept] == [x.data_ptr()]
    x = x[..., 2:42]  # a view is kept as the view it is
    with saved_tensors() as kept:
        op("gelu", backend=backend)(x)
    assert [t.untyped_storage().data_ptr() for t in kept] == [x.untyped_storage().data_ptr()]


def test_the_torch_backend_refuses_a_second_derivative_of_codes():
    x = torch.randn(4, 8, requires_grad=True)
    y = op("gelu", save="fp8", backend="torch")(x)
    with pytest.raises(RuntimeError, match="once"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


@backends
def test_an_activation_registered_again_leaves_older_graphs_alone(backend):
    x = torch.full((2, 8), 3.0, device=DEVICE, requires_grad=True)
    activations.register_activation("power", torch.square, squared, twice)
    y = onepass.bias_activation(x, activation="power", backend=backend)
    activations.register_activation("power", lambda z: z**3, cubed, cubed_derivative, gated=True)
    try:
        assert torch.equal(torch.autograd.grad(y.sum(), x)[0], torch.full_like(x, 6.0))
        assert torch.equal(onepass.bias_activation(x, activation="power", backend=backend), torch.full_like(x, 81.0)[:, :4])
    finally:
        del activations.ACTIVATIONS["power"]


# ---- what people wrap around it ----


@backends
@pytest.mark.parametrize("save", ("fp8", "offload"))
@pytest.mark.parametrize("activation", ("gelu", "swiglu"))
def test_stores_hold_what_the_contract_says_of_input(activation, save, backend):
    inputs = tensors(activation in GATED)
    call = op(activation, save=save, backend=backend, **({"clamp": 1.5, "linear_offset": 0.5} if activation in GATED else {}))

    def block(x, *rest):
        return call(x * 2, *rest) * 2

    y = block(*inputs)
    dy = torch.randn_like(y)
    first = torch.autograd.grad(y, inputs, dy, retain_graph=True)
    assert equal(first, torch.autograd.grad(y, inputs, dy))
    plain = gradients(block, inputs)
    for reentrant in (True, False):
        assert equal(plain, gradients(lambda *t, again=reentrant: checkpoint(block, *t, use_reentrant=again), inputs))
    torch._dynamo.reset()
    assert equal(plain, gradients(torch.compile(block, fullgraph=True, backend="aot_eager"), inputs))


@needs_triton
def test_compiling_for_any_number_of_rows():
    torch._dynamo.reset()
    compiled = torch.compile(op(backend="triton", save="fp8"), fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (3, 7):
        inputs = tensors(gated=True, lead=(rows, 2))
        assert equal(gradients(op(backend="triton", save="fp8"), inputs), gradients(compiled, inputs))


@needs_triton
@pytest.mark.parametrize(
    ("lead", "H", "layout"),
    [
        ((5, 3), 40, "contiguous"),
        ((5, 3), 40, "sliced"),
        ((5, 3), 40, "transposed"),
        ((2, 1), 66, "expanded"),
        ((1, 1), 1, "strided"),
    ],
)
def test_registered_ops_are_what_they_say(lead, H, layout):
    x, bias, weight = (t.detach() for t in tensors(True, lead, H))
    x = laid_out(x, layout)
    dy = laid_out(torch.randn(*lead, H, device=DEVICE), layout)
    tests = ("test_schema", "test_faketensor")  # the contract has the rest
    seed = torch.tensor([7], device=DEVICE)
    for options, drawn in ((ActivationOptions("swiglu", 1.0, 0.5), None), (ActivationOptions("swiglu", 1.0, 0.5, 2000), seed)):
        torch.library.opcheck(kernels.forward.op, (x, bias, weight, drawn, None, *options, FP32), test_utils=tests)
        torch.library.opcheck(kernels.forward_fp8.op, (x, bias, None, drawn, *options, BF16), test_utils=tests)
        _, codes, exponents = kernels.forward_fp8(x, bias, weight, drawn, options, FP32)
        for needs in ((True, True, True), (False, True, False), (True, False, True)):
            given = dy, x, None, bias, weight, drawn, None, *options, *needs, False, FP32, None
            torch.library.opcheck(kernels.backward.op, given, test_utils=tests)
        given = dy, codes, exponents, bias, weight, drawn, None, *options, True, True, True, False, FP32, None
        torch.library.opcheck(kernels.backward.op, given, test_utils=tests)
        pair = laid_out(x[..., :H], layout), laid_out(x[..., H:], "sliced")
        torch.library.opcheck(kernels.forward.op, (pair[0], None, weight, drawn, pair[1], *options, FP32), test_utils=tests)
        for need_gate, need_linear in ((True, True), (True, False), (False, True)):
            needs = need_gate, False, True, need_linear
            given = dy, pair[0], None, None, weight, drawn, pair[1], *options, *needs, FP32, None
            torch.library.opcheck(kernels.backward.op, given, test_utils=tests)
    given = x, None, None, None, None, *ActivationOptions("gelu", None, None), FP32
    torch.library.opcheck(kernels.forward.op, given, test_utils=tests)


@backends
def test_under_autocast(backend):
    inputs = tensors(gated=True)
    plain = gradients(op(backend=backend), inputs)
    with torch.autocast(DEVICE, BF16):
        assert equal(plain, gradients(op(backend=backend), inputs))
        hidden = F.linear(inputs[0], torch.ones(80, 80, device=DEVICE))
        y = op(backend=backend)(hidden, inputs[1])
    assert hidden.dtype == y.dtype == BF16
    y.sum().backward()
