"""The module holds Transformer Engine's LayerNormLinear's parameters and calls the op with all it was given."""

from collections import OrderedDict
from inspect import signature

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import onepass
from onepass.nn import NormLinear

NORMS = pytest.mark.parametrize("norm", ["rms_norm", "layer_norm"])


def randomised(module):
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module


@NORMS
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("centered", [True, False])
def test_it_is_the_norm_and_then_the_linear_layer(norm, bias, centered):
    layer = randomised(NormLinear(12, 7, norm=norm, bias=bias, zero_centered_gamma=centered, return_norm_output=True))
    x = torch.randn(3, 5, 12)
    y, normalised = layer(x)
    parameters = [parameter for name, parameter in layer.named_parameters() if name.startswith("layer_norm")]
    expected = getattr(onepass, norm)(x, *parameters, eps=layer.eps, zero_centered_gamma=centered)
    torch.testing.assert_close(normalised, expected)
    torch.testing.assert_close(y, F.linear(expected, layer.weight, layer.bias))
    y.sum().backward()
    assert all(parameter.grad is not None for parameter in layer.parameters())


@NORMS
def test_with_a_residual_it_gives_the_sum_back(norm):
    layer, plain = (randomised(NormLinear(12, 7, norm=norm, return_norm_output=each)) for each in (True, False))
    x, residual = torch.randn(3, 5, 12), torch.randn(3, 5, 12)
    y, normalised, h = layer(x, residual)
    assert torch.equal(h, x + residual)
    torch.testing.assert_close((y, normalised), layer(h))
    torch.testing.assert_close(plain(x, residual), (plain(h), h))
    plain.return_input = True
    torch.testing.assert_close(plain(x), (plain(x)[0], x))


@NORMS
def test_the_op_gets_every_option(norm, monkeypatch):
    seen = []
    monkeypatch.setattr("onepass.nn.norm_linear.norm_linear", lambda *args, **options: seen.append((args, options)))
    told = {"eps": 1e-3, "zero_centered_gamma": True, "return_norm_output": True, "return_input": True}
    told["precision"] = "fp8"
    layer, x, residual = NormLinear(8, 4, norm=norm, **told), torch.randn(2, 8), torch.randn(2, 8)
    lora = onepass.LoRA(torch.randn(2, 8), torch.randn(4, 2))
    layer(x, residual, lora=lora)
    options = told | {"norm": norm, "norm_bias": layer.layer_norm_bias, "residual": residual, "deferred": None, "lora": lora}
    assert seen == [((x, layer.layer_norm_weight, layer.weight, layer.bias), options)]


KEYS = [
    ({"norm": "layer_norm"}, ["layer_norm_weight", "layer_norm_bias", "weight", "bias"]),
    ({"norm": "layer_norm", "norm_bias": False, "bias": False}, ["layer_norm_weight", "weight"]),
    ({"norm": "rms_norm"}, ["layer_norm_weight", "weight", "bias"]),
    ({"norm": "rms_norm", "bias": False}, ["layer_norm_weight", "weight"]),
]


@pytest.mark.parametrize(("options", "keys"), KEYS)
def test_the_keys_are_transformer_engines(options, keys):
    layer = NormLinear(8, 4, **options)
    assert sorted(layer.state_dict()) == sorted(keys)
    assert layer.weight.shape == (4, 8) and layer.layer_norm_weight.shape == (8,)


@pytest.mark.parametrize("extra", [torch.empty(0, dtype=torch.uint8), None])
@pytest.mark.parametrize("prefix", ["", "0."])
def test_transformer_engines_extra_state_is_passed_over(extra, prefix):
    source = randomised(NormLinear(8, 4, norm="layer_norm"))
    state = OrderedDict((prefix + name, value.clone()) for name, value in source.state_dict().items())
    state[prefix + "_extra_state"] = extra
    given = dict(state)
    layer = NormLinear(8, 4, norm="layer_norm")
    target = nn.Sequential(layer) if prefix else layer
    assert not any(target.load_state_dict(state, strict=True))
    assert all(torch.equal(value, source.state_dict()[name]) for name, value in layer.state_dict().items())
    assert list(state) == list(given)


def test_other_keys_too_many_or_too_few_are_still_seen():
    layer = NormLinear(8, 4)
    with pytest.raises(RuntimeError, match=r"Unexpected key.*scales"):
        layer.load_state_dict({**layer.state_dict(), "scales": torch.ones(1)})
    with pytest.raises(RuntimeError, match=r"Missing key.*layer_norm_weight"):
        layer.load_state_dict({"weight": layer.weight, "bias": layer.bias, "_extra_state": None})


def test_the_linear_layer_starts_as_torchs():
    torch.manual_seed(1)
    layer = NormLinear(8, 4, norm="layer_norm")
    torch.manual_seed(1)
    linear = nn.Linear(8, 4)
    assert torch.equal(layer.weight, linear.weight) and torch.equal(layer.bias, linear.bias)
    assert torch.equal(layer.layer_norm_weight, torch.ones(8)) and not layer.layer_norm_bias.any()
    assert not NormLinear(8, 4, zero_centered_gamma=True).layer_norm_weight.any()


def test_eps_is_each_norms_own_unless_it_is_given():
    for norm in ("rms_norm", "layer_norm"):
        assert NormLinear(8, 4, norm=norm).eps == signature(getattr(onepass, norm)).parameters["eps"].default
    assert NormLinear(8, 4, norm="layer_norm", eps=1e-6).eps == 1e-6


def test_the_norms_parameters_alone_are_marked():
    layer = NormLinear(8, 4, norm="layer_norm", sequence_parallel=True)
    found = {name for name, parameter in layer.named_parameters() if getattr(parameter, "sequence_parallel", False)}
    assert found == {name for name in layer.state_dict() if name.startswith("layer_norm")}
    assert NormLinear(8, 4).layer_norm_weight.sequence_parallel is False


def test_device_and_dtype():
    layer = NormLinear(8, 4, norm="layer_norm", dtype=torch.bfloat16, device="meta")
    assert {(parameter.dtype, parameter.is_meta) for parameter in layer.parameters()} == {(torch.bfloat16, True)}


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        ((8, 4), {"norm": "LayerNorm"}, "norm must be one of rms_norm, layer_norm, but is 'LayerNorm'"),
        ((0, 4), {}, "in_features must be a size of at least 1, but is 0"),
        ((8, -1), {}, "out_features must be a size of at least 1, but is -1"),
        ((8, 4), {"eps": -1.0}, "eps must be above 0"),
    ],
)
def test_bad_arguments_are_named_at_once(arguments, options, words):
    with pytest.raises(ValueError, match=words):
        NormLinear(*arguments, **options)


def test_repr():
    said = repr(NormLinear(8, 4, norm="layer_norm", norm_bias=False, return_input=True, sequence_parallel=True))
    options = "norm='layer_norm', bias=True, eps=1e-05, norm_bias=False, return_input=True, sequence_parallel=True"
    assert said == f"NormLinear(8, 4, {options})"
