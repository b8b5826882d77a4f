"""Layers of several kinds: HybridModel's, and GPT models of which some layers have experts."""

import dataclasses
import sys

import pytest
import torch
from integrations.megatron.test_megatron import KINDS, config_of, model_of, step

from onepass.integrations import megatron

pytest.importorskip("megatron.core", reason="megatron-core is not installed")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("on_cpu", "by_formula")]

PLAIN, EXPERTS = KINDS["RMSNorm, swiglu"], KINDS["experts"]
LINEAR = {  # of gated delta nets
    "linear_conv_kernel_dim": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}  # fmt: skip


def hybrid_model(config, pattern, spec=None):
    hybrid = pytest.importorskip("megatron.core.models.hybrid.hybrid_model", reason="megatron-core 0.17 has no HybridModel")
    torch.manual_seed(0)
    spec = megatron.hybrid_stack_spec(config) if spec is None else spec
    return hybrid.HybridModel(config, spec, 64, 16, hybrid_layer_pattern=pattern, position_embedding_type="rope")


@pytest.fixture
def installed(on_cpu):
    """HybridStack's last norm is Transformer Engine's, or ours."""
    seams = megatron.install()
    yield seams
    seams.undo()


def test_hybrid_stack(installed):
    config = config_of(**PLAIN)
    logits = step(hybrid_model(config, "*-"))
    model = hybrid_model(config, "*-")
    megatron.apply(model)
    assert step(model) == pytest.approx(logits, rel=2e-6)


def test_a_hybrid_models_linear_cross_entropy(installed):
    """By the config's name, as a GPTModel's: stock has no loss for it."""
    stock = step(hybrid_model(config_of(**PLAIN), "*-"))
    linear = config_of(**PLAIN, cross_entropy_loss_fusion=True, cross_entropy_fusion_impl="linear")
    assert step(hybrid_model(linear, "*-")) == pytest.approx(stock, rel=2e-6)


def test_a_gated_delta_net_is_megatrons(installed, monkeypatch):
    """Beside the same mixer after a norm of its own, and without the package whose kernels it takes by default."""
    pytest.importorskip("megatron.core.models.hybrid.hybrid_model", reason="megatron-core 0.17 has no HybridModel")
    from megatron.core.ssm import gated_delta_net as gdn

    for module in {sys.modules[each.__module__] for each in gdn.GatedDeltaNet.__mro__}:
        if "HAVE_FLA" in vars(module):
            monkeypatch.setattr(module, "HAVE_FLA", True)
            monkeypatch.setattr(module, "l2norm", lambda x: torch.nn.functional.normalize(x, dim=-1))
    config = config_of(**PLAIN, **LINEAR, deterministic_mode=True)
    model = hybrid_model(config, "G-")
    assert isinstance(model.decoder.layers[0].self_attention, gdn.GatedDeltaNet)
    from megatron.core.tensor_parallel import ColumnParallelLinear

    spec = megatron.hybrid_stack_spec(config)
    layer = spec.submodules.gdn_layer.submodules
    mixer = layer.self_attention.submodules
    layer.input_layernorm, mixer.in_proj = mixer.out_norm, ColumnParallelLinear
    assert step(model) == pytest.approx(step(hybrid_model(config, "G-", spec)), rel=2e-6)


def test_mamba_is_megatrons(installed, monkeypatch):
    """Its kernels need a GPU and mamba-ssm, which Megatron asks for by name."""
    mixer = pytest.importorskip("megatron.core.ssm.mamba_mixer")
    config = config_of(**PLAIN, mamba_head_dim=8, mamba_num_groups=1, mamba_state_dim=4)
    if not mixer.HAVE_MAMBA_SSM:
        with pytest.raises(ImportError, match="mamba-ssm"):
            hybrid_model(config, "M")
    monkeypatch.setattr(mixer, "HAVE_MAMBA_SSM", True)
    for module in (mixer, sys.modules[mixer.MambaContextParallel.__module__]):
        monkeypatch.setattr(module, "HAVE_EINOPS", True)
    monkeypatch.setattr(mixer, "RMSNormGated", lambda *_, **__: torch.nn.Identity(), raising=False)
    layer = hybrid_model(config, "M*").decoder.layers[0]
    assert isinstance(layer.mixer, mixer.MambaMixer) and "layer_norm_weight" in dict(layer.mixer.in_proj.named_parameters())


@pytest.mark.parametrize(("pattern", "what"), [("D-", "D, sparse attention"), ("E-", "E, without num_moe_experts")])
def test_other_layers_are_refused(pattern, what, installed):
    config = config_of(**PLAIN)
    with pytest.raises(NotImplementedError, match=f"must have no layer of {what}"):
        hybrid_model(config, pattern)


def test_no_layer_is_an_identity(installed):
    pytest.importorskip("megatron.core.models.hybrid.hybrid_model", reason="megatron-core 0.17 has no HybridModel")
    from megatron.core.transformer.identity_op import IdentityOp

    layers = megatron.hybrid_stack_spec(config_of(**PLAIN)).submodules
    for field in dataclasses.fields(layers):
        assert getattr(layers, field.name) is not IdentityOp, field.name


@pytest.mark.parametrize("every", [2, [0, 1], [1, 1]])
@pytest.mark.parametrize("grouped", [False, True])
def test_some_layers_have_experts(every, grouped):
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    config = config_of(**EXPERTS, moe_layer_freq=every, moe_grouped_gemm=grouped)
    stock = model_of(config, get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm"))
    ours = model_of(config, megatron.gpt_layer_spec(config))
    kinds = [[type(layer.mlp).__name__ == "MoELayer" for layer in model.decoder.layers] for model in (stock, ours)]
    assert kinds[0] == kinds[1]
    assert step(ours) == pytest.approx(step(stock), rel=2e-6)


def test_a_stage_has_its_own_layers():
    stages = {"pipeline_model_parallel_size": 2, "pipeline_dtype": torch.float32}
    config = config_of(**EXPERTS, num_layers=4, moe_layer_freq=[0, 0, 1, 0], **stages)
    found = [megatron.gpt_layer_spec(config, pp_rank=rank).layer_specs for rank in range(2)]
    from megatron.core.transformer.identity_op import IdentityOp

    dense = [[layer.submodules.pre_mlp_layernorm is IdentityOp for layer in stage] for stage in found]
    assert dense == [[True, True], [False, True]]


@pytest.mark.parametrize("every", [[1], [1, 2]])
def test_an_odd_frequency_is_refused(every):
    config = config_of(**EXPERTS)
    config.moe_layer_freq = every
    with pytest.raises(ValueError, match="moe_layer_freq must be a number, or 0 or 1 for each of 2 layers"):
        megatron.gpt_layer_spec(config)
