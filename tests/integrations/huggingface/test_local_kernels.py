"""onepass's layers under transformers' `use_kernels`: each beside the layer it is for, and whole models."""

import copy
from types import MethodType

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers", minversion="5")

from integrations.huggingface.families import assert_alike, batch, made, step  # noqa: E402
from transformers import activations  # noqa: E402
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb  # noqa: E402
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm  # noqa: E402
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen3_5  # noqa: E402
from transformers.utils.import_utils import is_kernels_available  # noqa: E402

import onepass  # noqa: E402
from onepass.integrations import huggingface  # noqa: E402
from onepass.integrations.huggingface import local_kernels  # noqa: E402

with_kernels = pytest.mark.skipif(not is_kernels_available(), reason="needs a version of kernels that transformers takes")


@pytest.fixture(autouse=True)
def _by_pytorch():
    with onepass.use_backend("torch"):
        yield


class Rotation(nn.Module):
    """As `kernels` makes a module of the function."""

    def forward(self, *args, **options):
        return apply_rotary_pos_emb(*args, **options)


class AsModule(nn.Module):
    """A function as `kernels` makes a module of it."""

    def forward(self, *args, **options):
        return self.function(*args, **options)


class Convolution(AsModule):
    function = staticmethod(qwen3_5.causal_conv1d_fn)


class DeltaRule(AsModule):
    function = staticmethod(qwen3_5.torch_chunk_gated_delta_rule)


def replaced(module, name):
    """A copy with the layer's forward, bound as `kernels` binds it."""
    other, (repository, *_) = copy.deepcopy(module), huggingface.kernel_mapping()[name].values()
    other.forward = MethodType(repository.load().forward, other)
    return other


def found(module, tensors, **options):
    leaves = [t.clone().requires_grad_() for t in tensors]
    y = module(*leaves, **options)
    y = y if isinstance(y, tuple) else (y,)
    inputs = [t for t in (*leaves, *module.parameters())]
    dy = [torch.randn(t.shape, generator=torch.Generator().manual_seed(3)) for t in y]
    return y, torch.autograd.grad(y, inputs, dy, allow_unused=True)


def norm(kind):
    module = kind(16, eps=1e-3)
    nn.init.normal_(module.weight)
    return module


LAYERS = {
    "RMSNorm": norm(LlamaRMSNorm), "RMSNorm of another family": norm(Olmo2RMSNorm),
    "RMSNormZeroCentered": norm(qwen3_5.Qwen3_5RMSNorm),
    "NewGELU": activations.NewGELUActivation(), "FastGELU": activations.FastGELUActivation(),
    "QuickGELU": activations.QuickGELUActivation(),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_the_one_that_it_is_for(name):
    stock, x = LAYERS[name], torch.randn(2, 5, 16)
    torch.testing.assert_close(found(replaced(stock, name.partition(" ")[0]), [x]), found(stock, [x]), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("activation", ("silu", "sigmoid"))
def test_a_gated_norm(activation):
    stock, tensors = norm(qwen3_5.Qwen3_5RMSNormGated), [torch.randn(3, 16), torch.randn(3, 16)]
    stock.activation = activation
    torch.testing.assert_close(found(replaced(stock, "RMSNormGated"), tensors), found(stock, tensors), rtol=2e-6, atol=2e-6)


def test_functions_of_hybrids(monkeypatch):
    x, weight = torch.randn(2, 6, 9), torch.randn(6, 4)
    q, k, v, beta = torch.randn(2, 70, 1, 4), torch.randn(2, 70, 1, 4), torch.randn(2, 70, 2, 3), torch.rand(2, 70, 2)
    rule = {"use_qk_l2norm_in_kernel": True, "g": -torch.rand(2, 70, 2)}
    calls = {
        "causal_conv1d_fn": (Convolution, (x, weight), {"activation": "silu"}),
        "chunk_gated_delta_rule": (DeltaRule, (q, k, v), rule | {"beta": beta}),
    }
    for name, (kind, tensors, options) in calls.items():
        expected = found(kind(), tensors, **options) if name == "causal_conv1d_fn" else kind()(*tensors, **options)
        monkeypatch.setattr(kind, "function", None)  # it is onepass that runs
        other = replaced(kind(), name)
        y = found(other, tensors, **options) if name == "causal_conv1d_fn" else other(*tensors, **options)
        torch.testing.assert_close(y, expected, rtol=2e-5, atol=2e-5)
    row, boundaries = x[:1], torch.tensor([0, 4, 9])
    apart = [found(replaced(Convolution(), "causal_conv1d_fn"), [part, weight])[0][0] for part in row.split([4, 5], -1)]
    together = replaced(Convolution(), "causal_conv1d_fn")(row, weight, cu_seq_lens_q=boundaries)
    torch.testing.assert_close(together, torch.cat(apart, -1), rtol=0, atol=0)


@pytest.mark.parametrize("heads", (1, 2))
@pytest.mark.parametrize("rows", (1, 2))
def test_rotation(heads, rows, monkeypatch):
    q, k, angles = torch.randn(2, 4, 5, 16), torch.randn(2, 2, 5, 16), torch.randn(rows, 5, 8)
    cos, sin = angles.cos().repeat(1, 1, 2), angles.sin().repeat(1, 1, 2)
    q, k = (t.transpose(1, heads) for t in (q, k))
    options = {"cos": cos, "sin": sin, "unsqueeze_dim": heads}
    expected = found(Rotation(), [q, k], **options)
    monkeypatch.setattr(Rotation, "forward", None)  # it is onepass that runs
    torch.testing.assert_close(found(replaced(Rotation(), "rotary_pos_emb"), [q, k], **options), expected, rtol=2e-6, atol=2e-6)


def test_a_table_that_is_not_as_wide_as_a_head_is_left_to_the_model():
    asked = []

    class Half(nn.Module):
        def forward(self, *given):
            asked.append(given)
            return given[:2]

    q, k, cos = torch.randn(2, 4, 5, 16), torch.randn(2, 2, 5, 16), torch.randn(1, 5, 8)
    assert replaced(Half(), "rotary_pos_emb")(q, k, cos, cos) == (q, k) and asked == [(q, k, cos, cos, 1)]


def test_the_mapping_is_for_every_device_that_onepass_runs_on():
    for devices in huggingface.kernel_mapping().values():
        assert devices.keys() == {"cuda", "cpu"} and len(set(devices.values())) == 1
        layer = devices["cuda"].load()
        assert layer.__init__ is nn.Module.__init__ and layer.can_torch_compile and layer.has_backward
        assert layer.__name__ in str(devices["cuda"])


# ---- whole models, with the package ----

MAPPED = {
    "Llama": {"RMSNorm": 5, "rotary_pos_emb": 2}, "Qwen3": {"RMSNorm": 9, "rotary_pos_emb": 2}, "Olmo2": {"RMSNorm": 9},
    "GPT2": {"NewGELU": 2}, "GptOss": {"RMSNorm": 5}, "Lfm2": {"RMSNorm": 7, "rotary_pos_emb": 1, "causal_conv1d_fn": 1},
    "Qwen3_5Text": {"RMSNormZeroCentered": 7, "causal_conv1d_fn": 1, "chunk_gated_delta_rule": 1},
}  # fmt: skip


@pytest.fixture
def calls(monkeypatch):
    """How often each op ran."""
    asked = []
    for name in ("rms_norm", "bias_activation"):
        monkeypatch.setattr(local_kernels, name, counted(getattr(local_kernels, name), asked))
    return asked


def counted(op, asked):
    def call(*args, **options):
        asked.append(op.__name__)
        return op(*args, **options)

    return call


@with_kernels
@pytest.mark.parametrize("family", MAPPED)
def test_a_model(family, calls):
    model = made(family)
    before, (expected, _) = step(copy.deepcopy(model), **batch()), step(model, **batch())
    model.set_use_kernels(True, huggingface.OnepassKernels())
    assert_alike(step(model, **batch()), before)
    ops = sum(MAPPED[family].get(name, 0) for name in ("RMSNorm", "RMSNormZeroCentered", "NewGELU"))
    assert len(calls) == ops
    for name, layers in MAPPED[family].items():
        assert f"  {name}: onepass.integrations.huggingface.local_kernels." in str(model.kernel_config)
        assert f"({layers})" in str(model.kernel_config)
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(model(**batch()).loss, expected, rtol=1e-5, atol=0)
    assert len(calls) == 2 * ops
    config = model.kernel_config
    config.undo(model)
    assert_alike(step(model.train(), **batch()), before)
    assert len(calls) == 2 * ops and not [module for module in model.modules() if "forward" in vars(module)]
    assert huggingface.apply(model).replaced
    with pytest.raises(ValueError, match="must be the model's, but that has None"):
        config.undo(model)


@with_kernels
def test_what_is_left_is_said():
    model = made("GptOss")
    model.set_use_kernels(True, huggingface.OnepassKernels())
    assert "left: rotary_pos_emb: the model's tables of positions are none that onepass can read" in str(model.kernel_config)
    assert "left: MegaBlocksMoeMLP: onepass has no such layer" in str(model.kernel_config)
    with pytest.raises(ValueError, match="nothing to replace in this OPTForCausalLM"):
        made("OPT").set_use_kernels(True, huggingface.OnepassKernels())


@with_kernels
def test_a_model_that_is_loaded(tmp_path, calls):
    made("Llama").save_pretrained(tmp_path)
    config = huggingface.OnepassKernels()
    assert str(config).endswith("no model has it yet")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, use_kernels=True, kernel_config=config)
    model.train()
    model(**batch()).loss.backward()
    assert len(calls) == 5
    config.undo(model)


@with_kernels
def test_a_mapping_for_the_package_itself(calls):
    import kernels

    model = made("Llama")
    with kernels.use_kernel_mapping(huggingface.kernel_mapping()):
        kernels.kernelize(model, mode=kernels.Mode.TRAINING | kernels.Mode.TORCH_COMPILE, device="cpu")
    model(**batch())
    assert len(calls) == 5
    for layer in model.model.layers:  # the family's function
        layer.self_attn._kernel_funcs["rotary_pos_emb"].__dict__.pop("forward", None)


@with_kernels
@pytest.mark.slow
def test_compiled():
    model = made("Llama", num_hidden_layers=1)
    expected = step(copy.deepcopy(model), **batch())
    model.set_use_kernels(True, huggingface.OnepassKernels())
    assert_alike(step(torch.compile(model, fullgraph=True), **batch()), expected)
    model.kernel_config.undo(model)
