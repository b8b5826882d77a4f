"""Layers of several kinds: HybridModel's, and GPT models of which some layers have experts."""

import dataclasses
import sys

import pytest
import torch
import torch.nn.functional as F
from integrations.megatron.test_megatron import KINDS, config_of, local_spec, model_of, step

from onepass.integrations import megatron

pytest.importorskip("megatron.core", reason="megatron-core is not installed")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("on_cpu", "by_formula")]

PLAIN, EXPERTS = KINDS["RMSNorm, swiglu"], KINDS["experts"]


def hybrid_model(config, pattern, spec=None):
    hybrid = pytest.importorskip("megatron.core.models.hybrid.hybrid_model", reason="megatron-core 0.17 has no HybridModel")
    torch.manual_seed(0)
    spec = megatron.hybrid_stack_spec(config) if spec is None else spec
    return hybrid.HybridModel(config, spec, 64, 16, hybrid_layer_pattern=pattern, position_embedding_type="rope")


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


# ---- Mamba, whose kernels need a GPU and mamba-ssm ----


def scan(zxbcdt, weight, bias, dt_bias, A, D, headdim, ngroups, **_):
    """Mamba 2's convolution, scan and gate, with one matrix of weights between tokens."""
    (heads,), wide, taps = A.shape, *weight.shape
    inner = heads * headdim
    z, xbc, dt = zxbcdt.split([inner, wide, heads], -1)
    xbc = F.silu(F.conv1d(F.pad(xbc.mT, (taps - 1, 0)), weight[:, None], bias, groups=wide)).mT
    x, *pair = xbc.split([inner, (wide - inner) // 2, (wide - inner) // 2], -1)
    x, dt = x.unflatten(-1, (heads, headdim)), F.softplus(dt + dt_bias)
    B, C = (each.unflatten(-1, (ngroups, -1)).repeat_interleave(heads // ngroups, 2) for each in pair)
    log_decay = (dt * A).cumsum(1)
    future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)[..., None]
    decay = (log_decay[:, :, None] - log_decay[:, None]).masked_fill(future, -torch.inf).exp()
    y = torch.einsum("bthn, bshn, btsh, bsh, bshp -> bthp", C, B, decay, dt, x) + D[:, None] * x
    return y.flatten(2) * F.silu(z)


class GatedNorm(torch.nn.RMSNorm):
    def __init__(self, width, eps, group_size, norm_before_gate, device, dtype):
        super().__init__(width, eps, device=device, dtype=dtype)
        self.group_size = group_size

    def forward(self, x):
        groups = x.unflatten(-1, (-1, self.group_size))
        return F.rms_norm(groups, groups.shape[-1:], None, self.eps).flatten(-2) * self.weight


def without_mamba_ssm(patch):
    """Let Megatron's mixer run by formulas in place of mamba-ssm's kernels."""
    mixer = pytest.importorskip("megatron.core.ssm.mamba_mixer")
    patch.setattr(mixer, "HAVE_MAMBA_SSM", True)
    for module in (mixer, sys.modules[mixer.MambaContextParallel.__module__]):
        patch.setattr(module, "HAVE_EINOPS", True)

    def rearrange(x, pattern):
        return x.squeeze(1) if pattern == "d 1 w -> d w" else x.transpose(0, 1)

    for name, stand_in in (("rearrange", rearrange), ("mamba_split_conv1d_scan_combined", scan), ("ExtendedRMSNorm", GatedNorm)):
        patch.setattr(mixer, name, stand_in, raising=False)
    return mixer


@pytest.fixture
def mamba(on_cpu, monkeypatch):
    return without_mamba_ssm(monkeypatch)


def local_stack_spec(config):
    """Megatron's own layers without Transformer Engine."""
    from megatron.core.models.hybrid import hybrid_block
    from megatron.core.ssm import mamba_layer, mamba_mixer, mlp_layer
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer import transformer_layer
    from megatron.core.transformer.spec_utils import ModuleSpec

    local = local_spec(config).submodules
    products = mamba_mixer.MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear)
    mixes = mamba_layer.MambaLayerSubmodules(
        norm=local.input_layernorm, mixer=ModuleSpec(mamba_mixer.MambaMixer, submodules=products), mamba_bda=local.mlp_bda
    )
    names = {"attention_layer": ("input_layernorm", "self_attention", "self_attn_bda")}
    names["mlp_layer"] = "pre_mlp_layernorm", "mlp", "mlp_bda"
    attends, feeds = (
        transformer_layer.TransformerLayerSubmodules(**{name: getattr(local, name) for name in each}) for each in names.values()
    )
    layers = hybrid_block.HybridStackSubmodules(
        mamba_layer=ModuleSpec(mamba_layer.MambaLayer, submodules=mixes),
        attention_layer=ModuleSpec(transformer_layer.TransformerLayer, submodules=attends),
        mlp_layer=ModuleSpec(mlp_layer.MLPLayer, submodules=feeds),
    )
    return ModuleSpec(hybrid_block.HybridStack, submodules=layers)


MAMBA = {"mamba_head_dim": 8, "mamba_num_groups": 1, "mamba_state_dim": 4}


@pytest.mark.parametrize("kind", ("RMSNorm, swiglu", "LayerNorm, gelu"))
def test_a_stack_with_mamba_is_as_stock(kind, mamba, monkeypatch):
    config = config_of(**KINDS[kind], **MAMBA, num_layers=4)
    hybrid_block = pytest.importorskip("megatron.core.models.hybrid.hybrid_block")
    with monkeypatch.context() as patched:
        patched.setattr(hybrid_block, "TENorm", local_spec(config).submodules.input_layernorm, raising=False)
        stock = step(hybrid_model(config, "M*M-", local_stack_spec(config)))
    installed = megatron.install()
    try:
        model = hybrid_model(config, "M*M-")
        megatron.apply(model)
        assert step(model) == pytest.approx(stock, rel=2e-6)
        mixer = model.decoder.layers[0].mixer
        assert isinstance(mixer, mamba.MambaMixer) and mixer.in_proj.layer_norm_weight.grad.norm() > 0
    finally:
        installed.undo()


def test_mamba_is_asked_for_by_name(installed):
    mixer = pytest.importorskip("megatron.core.ssm.mamba_mixer")
    if mixer.HAVE_MAMBA_SSM:
        pytest.skip("mamba-ssm is installed")
    with pytest.raises(ImportError, match="mamba-ssm"):
        hybrid_model(config_of(**PLAIN, **MAMBA), "M")


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
