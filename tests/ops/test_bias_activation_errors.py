"""Bad input: an error that names the argument, what it was and what it must be; and nothing changed. And own activations."""

import pytest
import torch
from ops.bias_activation_oracle import cubed, cubed_derivative, small_tiles
from ops.calls import needs_triton, refused
from ops.oracle import DEVICE

import onepass
import onepass.ops.activation.bias_activation as module
from onepass.kernels.language import triton
from onepass.ops.activation import activations

x, bias = torch.ones(2, 6), torch.ones(6)

BAD = {  # the call's arguments, its error, what is said: the argument, what it was, what it must be
    "bool x": ((x.bool(),), {}, TypeError, ("x must be", "floating-point", "torch.bool")),
    "complex x": ((x + 0j,), {}, TypeError, ("x must be", "floating-point", "complex64")),
    "odd width": ((torch.ones(2, 5), None, "swiglu"), {}, ValueError, ("x must", "even", "'swiglu'", "5")),
    "bias of one": ((x, bias[:1]), {}, ValueError, ("bias must have shape (6,)", "(1,)")),
    "half a bias": ((x, bias[:3], "swiglu"), {}, ValueError, ("bias must have shape (6,)", "(3,)")),
    "weight a column": ((x,), {"token_weight": torch.ones(6)}, ValueError, ("token_weight must have shape (2,)", "(6,)")),
    "weight of x's shape": ((x,), {"token_weight": torch.ones(2, 6)}, ValueError, ("token_weight must have shape", "(2, 6)")),
    "weight to broadcast": ((x,), {"token_weight": torch.ones(1, 1)}, ValueError, ("token_weight must have shape", "(1, 1)")),
    "weight flattened": ((torch.ones(2, 3, 6),), {"token_weight": torch.ones(6)}, ValueError, ("must have shape (2, 3)", "(6,)")),
    "unknown activation": ((x, bias, "tanh"), {}, ValueError, ("activation must be one of gelu, gelu_exact", "reglu", "'tanh'")),
    "activation a function": ((x, bias, torch.tanh), {}, (ValueError, TypeError), ("activation must be", "tanh")),
    "activation a list": ((x, bias, ["gelu"]), {}, (ValueError, TypeError), ("activation must be", "gelu")),
    "clamp without a gate": ((x, bias, "gelu"), {"clamp": 1.0}, ValueError, ("clamp", "gated", "'gelu'")),
    "clamp of zero": ((x, bias, "swiglu"), {"clamp": 0.0}, ValueError, ("clamp must be", "positive", "0.0")),
    "clamp below zero": ((x, bias, "swiglu"), {"clamp": -1}, ValueError, ("clamp must be", "positive", "-1")),
    "clamp NaN": ((x, bias, "swiglu"), {"clamp": float("nan")}, ValueError, ("clamp must be", "positive", "nan")),
    "clamp a word": ((x, bias, "swiglu"), {"clamp": "7"}, (ValueError, TypeError), ("clamp must be", "str")),
    "offset without a gate": ((x, bias, "relu"), {"linear_offset": 1.0}, ValueError, ("linear_offset", "gated", "'relu'")),
    "offset a word": ((x, bias, "swiglu"), {"linear_offset": "a"}, (ValueError, TypeError), ("linear_offset must be", "str")),
    "offset nothing": ((x, bias, "swiglu"), {"linear_offset": None}, (ValueError, TypeError), ("linear_offset must be", "None")),
    "linear without a gate": ((x, None, "gelu"), {"linear": x}, ValueError, ("linear must be None", "not gated", "'gelu'")),
    "linear of another shape": ((x, None, "swiglu"), {"linear": x[:1]}, ValueError, ("linear must have x's shape", "(1, 6)")),
    "linear of another type": ((x, None, "swiglu"), {"linear": x.half()}, TypeError, ("linear must have x's type", "float16")),
    "linear with a bias": ((x, bias, "swiglu"), {"linear": x}, ValueError, ("bias must be None with linear",)),
    "linear and codes saved": ((x, None, "swiglu"), {"linear": x, "save": "fp8"}, ValueError, ("save must be 'input'", "'fp8'")),
    "linear and codes": ((x, None, "swiglu"), {"linear": x, "out": "fp8"}, ValueError, ("linear must be None with out='fp8'",)),
    "unknown store": ((x, bias), {"save": "disk"}, ValueError, ("save must be one of input, fp8, offload", "'disk'")),
}  # fmt: skip


@pytest.mark.parametrize("backend", [None, "torch"])
@pytest.mark.parametrize("name", BAD)
def test_bad_input_says_what_and_why(name, backend):
    args, options, error, words = BAD[name]
    refused(onepass.bias_activation, args, {"backend": backend, **options}, error, words)


def test_the_list_of_known_activations_is_whole():
    with pytest.raises(ValueError, match="activation must be one of") as raised:
        onepass.bias_activation(x, bias, "unknown")
    assert all(name in str(raised.value) for name in activations.ACTIVATIONS)


def test_an_explicit_backend_never_falls_back():
    with pytest.raises(RuntimeError, match="float64"):
        onepass.bias_activation(x.double(), bias.double(), backend="triton")
    y = onepass.bias_activation(x.double(), bias.double())
    assert y.dtype == torch.float64 and torch.equal(y, onepass.bias_activation(x.double(), bias.double(), backend="torch"))


# ---- a user's own activation ----


@pytest.fixture
def _registry():
    before = dict(activations.ACTIVATIONS)
    with small_tiles(module):
        yield
    activations.ACTIVATIONS.clear()
    activations.ACTIVATIONS.update(before)


@pytest.mark.usefixtures("_registry")
@needs_triton
@pytest.mark.parametrize("gated", [False, True])
def test_a_registered_activation_runs_by_its_kernels(gated):
    onepass.register_activation("cube", lambda z: z**3, cubed, cubed_derivative, gated=gated)
    inputs = torch.randn(5, 80, device=DEVICE, requires_grad=True), torch.randn(80, device=DEVICE, requires_grad=True)
    results = []
    for backend in ("triton", "torch"):
        y = onepass.bias_activation(*inputs, "cube", backend=backend, **({"clamp": 1.0} if gated else {}))
        results.append((y, *torch.autograd.grad(y.sum(), inputs)))
    assert results[0][0].shape == (5, 40 if gated else 80)
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)
    assert onepass.explain(onepass.bias_activation, *inputs, "cube").backend == "triton"
    onepass.register_activation("cube", torch.tanh, gated=gated)  # again replaces it
    torch.testing.assert_close(
        onepass.bias_activation(inputs[0] * 0 + 1, None, "cube")[0, 0], torch.tensor(1.0, device=DEVICE).tanh()
    )


@pytest.mark.usefixtures("_registry")
def test_a_formula_alone_runs_by_pytorch_and_says_so():
    onepass.register_activation("mish", torch.nn.functional.mish)
    t = torch.randn(3, 4, device=DEVICE, requires_grad=True)
    y = onepass.bias_activation(t, None, "mish")
    torch.testing.assert_close(y, torch.nn.functional.mish(t))
    y.sum().backward()
    said = onepass.explain("bias_activation", t, None, "mish")
    assert said.backend == "torch" and "'mish' was registered without Triton functions" in str(said)
    with pytest.raises(RuntimeError, match="'mish' was registered without Triton functions"):
        onepass.bias_activation(t, None, "mish", backend="triton")


def test_registering_badly_says_what_and_why():
    with pytest.raises(ValueError, match=r"name must not be that of a built-in activation .* but is 'gelu'"):
        onepass.register_activation("gelu", torch.tanh)
    with pytest.raises(TypeError, match="formula must be a function of a tensor, but is str"):
        onepass.register_activation("mine", "tanh")
    with pytest.raises(ValueError, match="forward and derivative must be given together, but derivative is missing"):
        onepass.register_activation("mine", torch.tanh, forward=torch.tanh)
    if triton is not None:
        with pytest.raises(TypeError, match=r"forward must be a @triton.jit function, but is function"):
            onepass.register_activation("mine", torch.tanh, lambda z: z, lambda z: z)
    for name, words in ((5, "name must be a word"), ("", "name must be a word")):
        with pytest.raises(TypeError, match=words):
            onepass.register_activation(name, torch.tanh)
    with pytest.raises(TypeError, match="gated must be True or False"):
        onepass.register_activation("mine", torch.tanh, gated=1)
    assert "mine" not in activations.ACTIVATIONS
