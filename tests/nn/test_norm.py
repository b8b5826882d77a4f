"""The norms hold what torch's hold, mark it where asked, and call the op with all they were given."""


import pytest
import torch
from torch import nn

import onepass
from onepass.nn import GatedRMSNorm, LayerNorm, RMSNorm

BOTH = pytest.mark.parametrize(("ours", "theirs"), [(LayerNorm, nn.LayerNorm), (RMSNorm, nn.RMSNorm)])
EACH = pytest.mark.parametrize("norm", [LayerNorm, RMSNorm])


def randomised(module):
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module


@BOTH
@pytest.mark.parametrize("affine", [True, False])
def test_it_is_torchs(ours, theirs, affine):
    layer, other = ours(12, 1e-4, elementwise_affine=affine), randomised(theirs(12, 1e-4, elementwise_affine=affine))
    layer.load_state_dict(other.state_dict())
    x = torch.randn(3, 5, 12)
    torch.testing.assert_close(layer(x), other(x))


@BOTH
def test_state_dicts_go_both_ways(ours, theirs):
    options = [{}, {"elementwise_affine": False}, {"dtype": torch.bfloat16}]
    options += [{"bias": False}] if ours is LayerNorm else []
    for given in options:
        mine, other = randomised(ours(6, **given)), randomised(theirs(6, **given))
        before = {name: value.clone() for name, value in mine.state_dict().items()}
        assert list(before) == list(other.state_dict())
        other.load_state_dict(mine.state_dict(), strict=True)
        randomised(mine).load_state_dict(other.state_dict(), strict=True)
        assert all(torch.equal(value, before[name]) for name, value in mine.state_dict().items())


@BOTH
def test_its_arguments_stand_where_torchs_do(ours, theirs):
    arguments = (6, 1e-3, True, *([False] if ours is LayerNorm else []), "cpu", torch.float64)
    mine, other = ours(*arguments), theirs(*arguments)
    assert (mine.normalized_shape, mine.eps, mine.weight.dtype) == (other.normalized_shape, other.eps, other.weight.dtype)
    assert list(mine.state_dict()) == list(other.state_dict())


@EACH
def test_the_residual_is_the_ops(norm):
    layer = randomised(norm(8))
    x, residual = torch.randn(4, 8), torch.randn(4, 8)
    y, h = layer(x, residual)
    assert torch.equal(h, x + residual)
    torch.testing.assert_close(y, layer(h))


@EACH
@pytest.mark.parametrize("memory_efficient", [False, True])
def test_the_op_gets_every_option(norm, memory_efficient, monkeypatch):
    name = "layer_norm" if norm is LayerNorm else "rms_norm"
    seen = []
    monkeypatch.setattr(f"onepass.nn.norm.{name}", lambda *args, **options: seen.append((args, options)))
    layer = norm(8, 1e-3, zero_centered_gamma=True, memory_efficient=memory_efficient, return_input=memory_efficient)
    x, residual = torch.randn(4, 8), torch.randn(4, 8)
    layer(x, residual)
    parameters = (layer.weight, layer.bias) if norm is LayerNorm else (layer.weight,)
    options = {"residual": residual, "zero_centered_gamma": True, "memory_efficient": memory_efficient}
    options["return_input"] = memory_efficient
    assert seen == [((x, *parameters, 1e-3), options)]


@EACH
@pytest.mark.parametrize("centered", [False, True])
def test_it_starts_as_one_that_changes_nothing_more(norm, centered):
    layer, x = norm(8, zero_centered_gamma=centered), torch.randn(4, 8)
    assert torch.equal(layer.weight, torch.full((8,), 0.0 if centered else 1.0))
    assert norm is RMSNorm or not layer.bias.any()
    torch.testing.assert_close(layer(x), norm(8, elementwise_affine=False)(x))


def test_the_gradients_arrive():
    layer = LayerNorm(8)
    layer(torch.randn(4, 8)).square().sum().backward()
    assert layer.weight.grad.shape == layer.bias.grad.shape == (8,)


def test_rms_norms_eps_is_1e_6_unless_it_is_given():
    assert RMSNorm(8).eps == 1e-6 and LayerNorm(8).eps == 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_eps_none_is_torchs(dtype):
    x = torch.randn(4, 8, dtype=dtype) * 1e-4  # so small that eps shows
    torch.testing.assert_close(RMSNorm(8, None, dtype=dtype)(x), nn.RMSNorm(8, dtype=dtype)(x))


def test_eps_none_is_that_of_the_arithmetic():
    x = (torch.randn(4, 8) * 1e-4).bfloat16()
    torch.testing.assert_close(RMSNorm(8, None)(x), onepass.rms_norm(x, torch.ones(8), torch.finfo(torch.float32).eps))


@EACH
@pytest.mark.parametrize("size", [8, (8,), [8], torch.Size([8])])
def test_a_shape_of_one_size_is_a_size(norm, size):
    assert norm(size).normalized_shape == (8,)


@EACH
@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((2, 3), "one size, the last dimension's, but is \\(2, 3\\)"),
        ((), "a size of at least 1"),
        (0, "a size of at least 1, but is 0"),
        (True, "a size of at least 1"),
        (8.0, "a size of at least 1, but is 8.0"),
        (("8",), "a size of at least 1"),
    ],
)
def test_other_shapes_are_named(norm, shape, words):
    with pytest.raises(ValueError, match=f"normalized_shape must be {words}"):
        norm(shape)


@EACH
def test_bad_options_are_named_before_there_is_an_input(norm):
    with pytest.raises(ValueError, match="eps must be above 0, but is 0"):
        norm(8, 0)
    with pytest.raises(TypeError, match="eps must be a number"):
        norm(8, "small")
    with pytest.raises(ValueError, match=r"zero_centered_gamma .* elementwise_affine=False"):
        norm(8, elementwise_affine=False, zero_centered_gamma=True)


def test_layer_norm_has_no_eps_none():
    with pytest.raises(TypeError, match="eps must be a number"):
        LayerNorm(8, None)


@EACH
@pytest.mark.parametrize("affine", [True, False])
def test_a_wrong_last_dimension_is_seen_without_a_weight_too(norm, affine):
    with pytest.raises(ValueError, match="7"):
        norm(8, elementwise_affine=affine)(torch.randn(4, 7))
    with pytest.raises(ValueError, match="shape"):
        norm(8, elementwise_affine=affine)(torch.randn(()))


# ---- the mark ----


@EACH
@pytest.mark.parametrize("asked", [False, True])
def test_the_parameters_say_whether_they_are_sequence_parallel(norm, asked):
    layer = norm(8, sequence_parallel=asked)
    assert [parameter.sequence_parallel for parameter in layer.parameters()] == [asked] * len(list(layer.parameters()))


def test_repr_says_what_differs_from_the_usual():
    assert repr(LayerNorm(8)) == "LayerNorm((8,), eps=1e-05, elementwise_affine=True)"
    assert repr(LayerNorm(8, bias=False)).endswith("elementwise_affine=True, bias=False)")
    assert repr(RMSNorm(8, None, memory_efficient=True)).endswith("eps=None, elementwise_affine=True, memory_efficient=True)")


# ---- the gated norm ----


def test_the_gated_norm_calls_the_op_with_all_that_it_was_given():
    x, z = torch.randn(3, 5, 12, requires_grad=True), torch.randn(3, 5, 12, requires_grad=True)
    options = {"activation": "sigmoid", "norm_before_gate": False, "group_size": 4, "zero_centered_gamma": True}
    layer = GatedRMSNorm(12, 0.1, **options)
    assert list(layer.state_dict()) == ["weight"] and not layer.weight.any()
    randomised(layer)
    assert torch.equal(layer(x, z), onepass.gated_rms_norm(x, z, layer.weight, 0.1, **options))
    plain = GatedRMSNorm(12, elementwise_affine=False)
    assert torch.equal(plain(x, z), onepass.gated_rms_norm(x, z))
    assert "activation=sigmoid, norm_before_gate=False, group_size=4" in repr(layer)
    assert GatedRMSNorm(12, sequence_parallel=True).weight.sequence_parallel is True
    for name in ("activation", "norm_before_gate", "group_size", "zero_centered_gamma"):
        other = GatedRMSNorm(12, 0.1, **{key: value for key, value in options.items() if key != name})
        other.load_state_dict(layer.state_dict())
        assert not torch.allclose(layer(x, z), other(x, z)), name


def test_what_the_gated_norm_can_not_be_is_named():
    with pytest.raises(ValueError, match="group_size must divide normalized_shape, 12, or be None, but is 5"):
        GatedRMSNorm(12, group_size=5)
    with pytest.raises(ValueError, match="activation must be one of silu, sigmoid, but is 'gelu'"):
        GatedRMSNorm(12, activation="gelu")
    with pytest.raises(ValueError, match="x's last dimension must be 12"):
        GatedRMSNorm(12, elementwise_affine=False)(torch.ones(2, 6), torch.ones(2, 6))
