"""The module holds the bias and calls the op with all it was given."""

import pytest
import torch
from torch.nn import functional as F

import onepass
from onepass.nn import BiasActivation


def test_it_is_the_op_with_its_own_bias():
    torch.manual_seed(0)
    layer = BiasActivation(12, "swiglu", clamp=2.0, linear_offset=1.0)
    assert layer.bias is not None
    torch.nn.init.normal_(layer.bias)
    x, weight = torch.randn(3, 5, 12), torch.rand(3, 5)
    expected = onepass.bias_swiglu(x, layer.bias, token_weight=weight, clamp=2.0, linear_offset=1.0)
    assert torch.equal(layer(x, weight), expected) and expected.shape == (3, 5, 6)
    layer(x).sum().backward()
    assert layer.bias.grad is not None and layer.bias.grad.shape == (12,)


def test_its_state_is_one_bias_that_starts_at_zero():
    layer = BiasActivation(8, dtype=torch.bfloat16)
    assert list(layer.state_dict()) == ["bias"] and not layer.state_dict()["bias"].any()
    x = torch.randn(2, 8).bfloat16()
    torch.testing.assert_close(layer(x), F.gelu(x, approximate="tanh"))


def test_without_bias_it_has_no_parameters():
    layer = BiasActivation(8, "relu", bias=False)
    assert not list(layer.parameters()) and "bias=False" in repr(layer)
    x = torch.randn(2, 8)
    assert torch.equal(layer(x), x.relu())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [((8, "tanhh"), "activation must be one of"), ((7, "swiglu"), "features must be even")],
)
def test_bad_arguments_are_named_at_once(arguments, words):
    with pytest.raises(ValueError, match=words):
        BiasActivation(*arguments)


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        ((8, "gelu"), {"save": "disk"}, "save must be one of"),
        ((8, "gelu"), {"clamp": 1.0}, "clamp .* needs a gated"),
        ((8, "swiglu"), {"linear_offset": float("nan")}, "linear_offset must be a number"),
        ((-7, "gelu"), {}, "features must be a size"),
    ],
)
def test_bad_options_are_named_before_there_is_an_input(arguments, options, words):
    with pytest.raises(ValueError, match=words):
        BiasActivation(*arguments, **options)
