"""Mixers of hybrid stacks beside Megatron's own on a CPU, in fp32. Where those call packages' kernels, formulas stand in."""

import sys
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from integrations.megatron.test_megatron import KINDS, config_of, step
from integrations.megatron.test_self_attention import packed
from integrations.megatron.test_specs import hybrid_model, without_mamba_ssm

from onepass.integrations import megatron

pytest.importorskip("megatron.core.models.hybrid.hybrid_model", reason="megatron-core 0.17 has no HybridModel")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("on_cpu", "by_formula")]

LINEAR = {  # of gated delta nets
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 4, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "layernorm_epsilon": 1e-2, "deterministic_mode": True,
}  # fmt: skip
DELTA = KINDS["RMSNorm, swiglu"] | LINEAR
MAMBA = KINDS["RMSNorm, swiglu"] | {"mamba_head_dim": 8, "mamba_num_groups": 2, "mamba_state_dim": 4}


def without_fla(patch):
    """Let Megatron's mixer run without the package whose kernels it takes by default: its own formula of the rule needs none."""
    from megatron.core.ssm import gated_delta_net as gdn

    for module in {sys.modules[each.__module__] for each in gdn.GatedDeltaNet.__mro__}:
        if "HAVE_FLA" in vars(module):
            patch.setattr(module, "HAVE_FLA", True)
            patch.setattr(module, "l2norm", lambda x: x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt())


def delta_layers(config, **params):
    """Return a layer of ours and of Megatron's, which has a norm of its own, with the same parameters."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.spec_utils import build_module

    specs = [megatron.hybrid_stack_spec(config) for _ in range(2)]
    layers = [spec.submodules.gdn_layer.submodules for spec in specs]
    for layer in layers:
        layer.self_attention.params = params
    mixer = layers[1].self_attention
    mixer.module, mixer.submodules.out_proj = GatedDeltaNet, RowParallelLinear
    mixer.submodules.in_proj, layers[1].input_layernorm = ColumnParallelLinear, mixer.submodules.out_norm
    given = {"config": config, "layer_number": 1, "pg_collection": ProcessGroupCollection.use_mpu_process_groups()}
    ours, stock = (build_module(spec.submodules.gdn_layer, **given) for spec in specs)
    generator = torch.Generator().manual_seed(2)
    for parameter in ours.parameters():
        parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)
    stock.load_state_dict({as_stocks(name): each for name, each in ours.state_dict().items()})
    return ours, stock


def as_stocks(name):
    return name.replace("self_attention.in_proj.layer_norm_", "input_layernorm.")


def delta_sections(name):
    """Return the sizes of what a parameter of all heads has one after another."""
    return {"in_proj.weight": (16, 16, 16, 16, 4, 4), "conv1d.weight": (16, 16, 16)}.get(name)


def their_delta_net():
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet

    return GatedDeltaNet


def delta_spec(stack):
    return stack.submodules.gdn_layer.submodules.self_attention


def mamba_spec(stack):
    return stack.submodules.mamba_layer.submodules.mixer


def their_mamba():
    from megatron.core.ssm.mamba_mixer import MambaMixer

    return MambaMixer


def mamba_sections(name):
    return (64, 64, 8, 8, 8) if name == "in_proj.weight" else (64, 8, 8) if name.startswith("conv1d") else None


KINDS_OF_MIXERS = {  # for mixers_worker.py: options, stand-ins, the mixer's spec, Megatron's class, sizes of parameters
    "delta": (DELTA, without_fla, delta_spec, their_delta_net, delta_sections),
    "mamba": (MAMBA, without_mamba_ssm, mamba_spec, their_mamba, mamba_sections),
}


def run(layer, **given):
    """Return a result and what it gives to the input and to parameters, by stock's names."""
    x, dy = (torch.randn(13, 2 if not given else 1, 32, generator=torch.Generator().manual_seed(i)) for i in (1, 2))
    result, *_ = layer(x.requires_grad_(), None, **given)
    result.backward(dy)
    return {"y": result, "x": x.grad} | {as_stocks(name): each.grad for name, each in layer.named_parameters()}


def assert_alike(ours, stock):
    found, expected = run(ours), run(stock)
    assert found.keys() == expected.keys()
    for name, each in found.items():
        torch.testing.assert_close(each, expected[name], rtol=1e-4, atol=2e-5, msg=lambda why, name=name: f"{name}: {why}")


@contextmanager
def forward_counted(of):
    """Count calls of a class's own forward."""
    calls, stock = [], of.forward
    of.forward = lambda *given, **options: calls.append(1) or stock(*given, **options)
    try:
        yield calls
    finally:
        of.forward = stock


@pytest.mark.parametrize(
    ("options", "params"),
    [
        ({}, {}),
        ({"layernorm_zero_centered_gamma": True, "linear_num_value_heads": 2}, {"conv_bias": True}),
        ({"linear_conv_kernel_dim": 2}, {"use_qk_l2norm": False}),
    ],
)
def test_a_gated_delta_net_is_as_stock(options, params, monkeypatch):
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet

    without_fla(monkeypatch)
    ours, stock = delta_layers(config_of(**DELTA | options), **params)
    assert isinstance(ours.self_attention, GatedDeltaNet)
    with forward_counted(GatedDeltaNet) as calls:
        run(ours)
        assert not calls
    ours.zero_grad()
    assert_alike(ours, stock)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"activation_func": F.relu}, "activation_func is relu"),
        ({"normalization": "LayerNorm"}, "out_norm is LayerNorm"),
        ({"linear_conv_kernel_dim": 9}, "the convolution's width is 9"),
    ],
)
def test_other_gated_delta_nets_are_megatrons(options, reason, monkeypatch):
    without_fla(monkeypatch)
    ours, stock = delta_layers(config_of(**DELTA | options))
    assert ours.self_attention.why_left() == reason
    assert_alike(ours, stock)


def test_an_adapter_around_out_proj_gets_its_input(monkeypatch):
    class Adapter(torch.nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer = layer

        def forward(self, x, *given, **options):
            y, bias = self.layer(x, *given, **options)
            return y + x.sum(-1, keepdim=True), bias

    without_fla(monkeypatch)
    layers = delta_layers(config_of(**DELTA))
    for layer in layers:
        layer.self_attention.out_proj = Adapter(layer.self_attention.out_proj)
    assert_alike(*layers)


def test_the_account_of_mixers(installed, monkeypatch):
    without_fla(monkeypatch)
    said = str(megatron.apply(hybrid_model(config_of(**DELTA), "G-")))
    assert "  gated delta net of 1 layers: causal_conv1d, delta_gates, gated_delta_rule, gated_norm_linear" in said
    said = str(megatron.apply(hybrid_model(config_of(**DELTA | {"normalization": "LayerNorm"}), "G-")))
    assert "  left: gated delta net of 1 layers: out_norm is LayerNorm" in said


def test_inference_of_a_gated_delta_net_is_megatrons(monkeypatch):
    from megatron.core.inference.contexts import StaticInferenceContext

    without_fla(monkeypatch)
    layer, _ = delta_layers(config_of(**DELTA))
    with pytest.raises(NotImplementedError, match="inference"):
        layer.self_attention(torch.randn(3, 1, 32), None, StaticInferenceContext(1, 16))


@pytest.mark.parametrize("padded", [False, True])
def test_packed_documents_are_alone(padded, monkeypatch):
    """Documents' boundaries are those with padding where there are such; rows after the last document are one more."""
    without_fla(monkeypatch)
    layer, _ = delta_layers(config_of(**DELTA))
    lengths = (5, 6) if not padded else (6, 7)
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    given = packed((5, 6), cu_seqlens_q_padded=ends, cu_seqlens_kv_padded=ends) if padded else packed((5, 6))
    found = run(layer, packed_seq_params=given)
    x, dy = (torch.randn(13, 1, 32, generator=torch.Generator().manual_seed(i)) for i in (1, 2))
    layer.zero_grad()
    expected = []
    for rows, grads in zip(x.split((*lengths, *[2] * (not padded))), dy.split((*lengths, *[2] * (not padded))), strict=True):
        expected.append(layer(rows, None)[0])
        expected[-1].backward(grads)
    torch.testing.assert_close(found["y"], torch.cat(expected), rtol=1e-5, atol=1e-5)
    for name, each in layer.named_parameters():
        torch.testing.assert_close(found[as_stocks(name)], each.grad, rtol=1e-4, atol=2e-5)
    apart = given.__class__(qkv_format="sbhd", cu_seqlens_q=ends, cu_seqlens_kv=ends)
    torch.testing.assert_close(run(layer, packed_seq_params=apart)["y"], layer(x, None)[0])


def test_modules_are_called(monkeypatch):
    """Hooks that gather parameters run."""
    without_fla(monkeypatch)
    layer, _ = delta_layers(config_of(**DELTA))
    called = []
    for name in ("in_proj", "out_norm", "out_proj"):
        module = getattr(layer.self_attention, name)
        module.register_forward_pre_hook(lambda module, given, name=name: called.append(name))
    run(layer)
    assert sorted(called) == ["in_proj", "out_norm", "out_proj"]


@pytest.mark.parametrize("fused", [False, True])
def test_main_grad(fused, installed, monkeypatch):
    """Each microbatch adds to main_grad what stock's parameters have as their gradient."""
    without_fla(monkeypatch)
    config = config_of(**DELTA, gradient_accumulation_fusion=fused)
    ours, stock = delta_layers(config)
    for parameter in (*ours.parameters(), *(stock.parameters() if fused else ())):
        parameter.main_grad = torch.zeros_like(parameter)
        parameter.grad_added_to_main_grad = False
    for _ in range(2):
        run(ours), run(stock)
    of_stock = dict(stock.named_parameters())
    for name, each in ours.named_parameters():
        theirs = of_stock[as_stocks(name)]
        added, other = (p.main_grad if getattr(p, "grad_added_to_main_grad", False) else p.grad for p in (each, theirs))
        torch.testing.assert_close(added, other, rtol=1e-4, atol=5e-5, msg=lambda why, name=name: f"{name}: {why}")
    mixer = ours.self_attention
    assert mixer.conv1d.weight.grad_added_to_main_grad and mixer.out_norm.weight.grad_added_to_main_grad


def test_a_stack_of_them(installed, monkeypatch):
    without_fla(monkeypatch)
    config = config_of(**DELTA, num_layers=4)
    spec = megatron.hybrid_stack_spec(config)
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet

    spec.submodules.gdn_layer.submodules.self_attention.module = GatedDeltaNet
    models = [hybrid_model(config, "G*G-"), hybrid_model(config, "G*G-", spec)]
    ours, stock = (step(model) for model in models)
    assert ours == pytest.approx(stock, rel=2e-6)


# ---- Mamba 2, of 8 heads in 2 groups ----


def mamba_mixers(config, **params):
    """Return a mixer of ours and of Megatron's with the same parameters. Both have the norm inside of in_proj."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel import RowParallelLinear
    from megatron.core.transformer.spec_utils import build_module

    ours, theirs = (mamba_spec(megatron.hybrid_stack_spec(config)) for _ in range(2))
    theirs.module, theirs.submodules.out_proj = their_mamba(), RowParallelLinear
    given = {"d_model": 32, "layer_number": 1, "pg_collection": ProcessGroupCollection.use_mpu_process_groups(), **params}
    ours, stock = (build_module(each, config, **given) for each in (ours, theirs))
    generator = torch.Generator().manual_seed(2)
    for parameter in ours.parameters():
        parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)
    stock.load_state_dict(ours.state_dict())
    return ours, stock


def run_mamba(mixer, **given):
    x, dy = (torch.randn(13, 1 if given else 2, 32, generator=torch.Generator().manual_seed(i)) for i in (1, 2))
    y, _ = mixer(x.requires_grad_(), **given)
    y.backward(dy)
    return {"y": y, "x": x.grad} | {name: each.grad for name, each in mixer.named_parameters()}


@pytest.mark.parametrize("groups", [1, 2, 8])
def test_a_mamba_mixer_is_as_stock(groups, monkeypatch):
    without_mamba_ssm(monkeypatch)
    ours, stock = mamba_mixers(config_of(**MAMBA | {"mamba_num_groups": groups}))
    assert isinstance(ours, their_mamba()) and ours.why_left() is None
    with forward_counted(their_mamba()) as calls:
        found = run_mamba(ours)
        assert not calls
    for name, each in run_mamba(stock).items():
        torch.testing.assert_close(found[name], each, rtol=1e-4, atol=5e-5, msg=lambda why, name=name: f"{name}: {why}")


@pytest.mark.parametrize(
    ("attribute", "value", "reason"),
    [
        ("rmsnorm", False, "rmsnorm False"),
        ("D_has_hdim", True, "D_has_hdim is True"),
        ("d_conv", 9, "the convolution's width is 9"),
    ],
)
def test_other_mamba_mixers_are_megatrons(attribute, value, reason, monkeypatch):
    mixer = without_mamba_ssm(monkeypatch)
    ours, _ = mamba_mixers(config_of(**MAMBA))
    setattr(ours, attribute, value)
    monkeypatch.setattr(mixer.MambaMixer, "forward", lambda *given, **options: "Megatron's")
    assert reason in ours.why_left() and ours(torch.randn(3, 1, 32)) == "Megatron's"


def test_inference_of_a_mamba_mixer_is_megatrons(monkeypatch):
    mixer = without_mamba_ssm(monkeypatch)
    ours, _ = mamba_mixers(config_of(**MAMBA))
    monkeypatch.setattr(mixer.MambaMixer, "forward", lambda *given, **options: "Megatron's")
    for given in ({"inference_context": object()}, {"inference_params": object()}):
        assert ours(torch.randn(3, 1, 32), **given) == "Megatron's"


def test_packed_documents_of_mamba_are_alone(monkeypatch):
    """Where stock's mixer would want total_tokens too. Rows after the last document are one more."""
    without_mamba_ssm(monkeypatch)
    mixer, _ = mamba_mixers(config_of(**MAMBA))
    found = run_mamba(mixer, packed_seq_params=packed((5, 6)))
    mixer.zero_grad()
    x, dy = (torch.randn(13, 1, 32, generator=torch.Generator().manual_seed(i)) for i in (1, 2))
    expected = []
    for rows, grads in zip(x.split((5, 6, 2)), dy.split((5, 6, 2)), strict=True):
        expected.append(mixer(rows)[0])
        expected[-1].backward(grads)
    torch.testing.assert_close(found["y"], torch.cat(expected), rtol=1e-5, atol=1e-5)
    for name, each in mixer.named_parameters():
        torch.testing.assert_close(found[name], each.grad, rtol=1e-4, atol=5e-5, msg=lambda why, name=name: f"{name}: {why}")


def test_main_grad_of_mamba(monkeypatch):
    without_mamba_ssm(monkeypatch)
    ours, stock = mamba_mixers(config_of(**MAMBA))
    for parameter in ours.parameters():
        parameter.main_grad = torch.zeros_like(parameter)
        parameter.grad_added_to_main_grad = False
    for _ in range(2):
        run_mamba(ours), run_mamba(stock)
    of_stock = dict(stock.named_parameters())
    for name, each in ours.named_parameters():
        added = each.main_grad if each.grad_added_to_main_grad else each.grad
        torch.testing.assert_close(added, of_stock[name].grad, rtol=1e-4, atol=1e-4, msg=lambda why, name=name: f"{name}: {why}")
    assert ours.norm.weight.grad_added_to_main_grad and ours.cp.get_conv1d_bias().grad_added_to_main_grad
