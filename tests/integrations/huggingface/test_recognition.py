"""What `apply` takes for what, in models that it has no test of otherwise, and in modules that nobody has heard of."""

import copy

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers", minversion="5")

from integrations.huggingface.families import SMALL, VOCABULARY, assert_alike, batch, both, step  # noqa: E402

import onepass  # noqa: E402
from onepass.integrations import huggingface  # noqa: E402


@pytest.fixture(autouse=True)
def _by_pytorch():
    with onepass.use_backend("torch"):
        yield


# ---- other families ----


OTHERS = {
    "Bloom": {"n_layer": 2, "n_head": 4},
    "Mpt": {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64},
    "CodeGen": {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4},
    "XGLM": {"d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 48, "dropout": 0.0, "attention_dropout": 0.0},
    "FalconMamba": {},
    "T5": {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "dropout_rate": 0, "decoder_start_token_id": 0},
    "Bert": {"intermediate_size": 48, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "is_decoder": True},
    "Olmo": {"clip_qkv": 0.05, "intermediate_size": 48},
    "Starcoder2": {"intermediate_size": 48, "num_key_value_heads": 2},
    "GptOss": {"intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 4},
    "Falcon": {},
    "Nemotron": {"intermediate_size": 48, "num_key_value_heads": 2},
}


@pytest.mark.parametrize("family", OTHERS)
def test_other_families_train_as_before(family):
    size = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 0}
    config = getattr(transformers, f"{family}Config")(**size | OTHERS[family])
    kind = transformers.AutoModelForSeq2SeqLM if family == "T5" else transformers.AutoModelForCausalLM
    model = kind.from_config(config).train()
    before = copy.deepcopy(model)
    huggingface.apply(model)
    assert_alike(step(model, **batch()), step(before, **batch()), 1e-4)


MLPS = {  # the sizes and the gate, and what runs the MLP
    "Llama": ({"hidden_act": "gelu"}, "activation_linear, geglu_exact"),
    "Mixtral": ({"hidden_act": "gelu", "intermediate_size": 32}, "grouped products, geglu_exact"),  # as the hidden size
    "Mistral": ({"intermediate_size": 32}, "activation_linear, swiglu"),
    "Phi3": ({"intermediate_size": 32}, "activation_linear, swiglu"),
    "Phi3, half": ({"intermediate_size": 16}, "activation_linear, swiglu"),  # gate and up are as wide as the hidden states
    "GPT2": ({"n_inner": 32}, "activation_linear, gelu"),
}


@pytest.mark.parametrize("family", MLPS)
def test_mlps_by_exact_gelu_and_as_wide_inside_as_outside(family):
    options, by = MLPS[family]
    model, before, applied = both(family.partition(",")[0], **options)
    assert {row.by for row in applied.replaced if row.part == "mlp" and not row.by.startswith("route: ")} == {by}
    assert_alike(step(model, **batch()), step(before, **batch()))


CLAMPS = {  # which small numbers don't show, and the part that is left
    "Olmo": ({"clip_qkv": 8.0, "intermediate_size": 48}, "self_attn", "linear"),
    "GPTNeoX": ({"hidden_act": "gelu_10", "intermediate_size": 48}, "mlp", None),
}


@pytest.mark.parametrize("family", CLAMPS)
def test_clamps_are_seen(family):
    options, part, by = CLAMPS[family]
    model, before, applied = both(family, **SMALL | options)
    assert {row.by for row in applied.rows if row.name.endswith(part) and row.part in ("mlp", "qkv")} == {by}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                parameter.copy_(before.get_parameter(name).mul_(50))
    assert_alike(step(model, **batch()), step(before, **batch()), 1e-4)


# ---- modules that nobody has heard of ----


class Scale(nn.Module):
    """RMSNorm under another name."""

    def __init__(self, size):
        super().__init__()
        self.weight, self.small = nn.Parameter(torch.rand(size)), 1e-5

    def forward(self, x):
        return x * (x.square().mean(-1, keepdim=True) + self.small).rsqrt() * self.weight


class Widen(nn.Module):
    """A gated MLP whose layers have other names, in another order."""

    def __init__(self, size, inner, act=nn.functional.silu):
        super().__init__()
        self.back, self.b, self.a, self.act = nn.Linear(inner, size), nn.Linear(size, inner), nn.Linear(size, inner), act

    def forward(self, x):
        return self.back(self.b(x) * self.act(self.a(x)))


class Dropping(Widen):
    """T5's: dropout within."""

    def __init__(self, size, inner):
        super().__init__(size, inner)
        self.back, self.dropout = nn.Linear(inner, size, bias=False), nn.Dropout(0.5)

    def forward(self, x):
        return self.back(self.dropout(self.b(x) * self.act(self.a(x))))


def test_norms_and_mlps_of_any_name():
    model = nn.Sequential(Scale(16), Widen(16, 24), Scale(16))
    before, x = copy.deepcopy(model), torch.randn(3, 16)
    applied = huggingface.apply(model)
    assert [row.by for row in applied.replaced] == ["rms_norm", "rms_norm", "activation_linear, swiglu"]
    torch.testing.assert_close(model(x), before(x))


def other_scale(forward):
    return lambda size: type("Other", (Scale,), {"forward": forward})(size)


def other_widen(forward):
    return lambda size: type("Other", (Widen,), {"forward": forward})(size, 24)


NEARLY = {
    "an epsilon outside": other_scale(lambda s, x: x / (x.square().mean(-1, keepdim=True).sqrt() + s.small) * s.weight),
    "a sum for a mean": other_scale(lambda s, x: x * (x.square().sum(-1, keepdim=True) + s.small).rsqrt() * s.weight),
    "of the first dimension": other_scale(lambda s, x: x * (x.square().mean(0, keepdim=True) + s.small).rsqrt() * s.weight),
    "no weight": other_scale(lambda s, x: x * (x.square().mean(-1, keepdim=True) + s.small).rsqrt()),
    "another activation": lambda size: Widen(size, 24, torch.tanh),
    "both halves through the activation": other_widen(lambda s, x: s.back(s.act(s.b(x)) * s.act(s.a(x)))),
    "dropout inside": other_widen(lambda s, x: s.back(nn.functional.dropout(s.b(x) * s.act(s.a(x)), 0.1, s.training))),
    "a gate that may come": other_scale(
        lambda s, x, gate=None: x * (x.square().mean(-1, keepdim=True) + s.small).rsqrt() * s.weight
    ),
    "a norm of groups": lambda size: nn.GroupNorm(1, size),
    "dropout before the last layer": lambda size: Dropping(size, 24),
    "a sum of its own": other_widen(lambda s, x: x + s.back(s.b(x) * s.act(s.a(x)))),
}


@pytest.mark.parametrize("what", NEARLY)
def test_what_is_nearly_one_is_left(what):
    model = nn.Sequential(NEARLY[what](16))
    keys = set(vars(model[0]))
    with pytest.raises(ValueError, match="there is nothing to replace"):
        huggingface.apply(model, loss=False)
    assert set(vars(model[0])) == keys
