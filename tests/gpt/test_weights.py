"""Hugging Face's folders: what the test wrote is loaded and gives their formulas' logits; what is saved is the same again."""

import json
import math

import pytest
import torch
import torch.nn.functional as F
from ops.calls import relative

from onepass.gpt import Config, Model, load_huggingface, save_huggingface

safetensors = pytest.importorskip("safetensors.torch")

GPT2 = {
    "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": 2, "n_embd": 16, "n_head": 4, "n_inner": None,
    "vocab_size": 29, "n_positions": 12, "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new", "resid_pdrop": 0.0,
    "embd_pdrop": 0.0, "attn_pdrop": 0.0, "torch_dtype": "float32", "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "hidden_size": 16,
    "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 29, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6, "rope_theta": 500.0, "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "float32",
}  # fmt: skip
STRETCHED = {
    "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
}  # fmt: skip
KINDS = {
    "gpt2": GPT2,
    "gpt2, untied, exact": GPT2 | {"tie_word_embeddings": False, "activation_function": "gelu", "n_inner": 20},
    "llama": LLAMA,
    "llama, tied": LLAMA | {"tie_word_embeddings": True, "num_key_value_heads": 4},
    "llama, stretched": LLAMA | {"rope_scaling": STRETCHED, "head_dim": 8},
    "llama, of version 5": LLAMA | {"rope_parameters": {"rope_theta": 300.0, **STRETCHED}, "dtype": "float32"},
    "llama, biases": LLAMA | {"attention_bias": True, "mlp_bias": True},
}


# ---- their formulas, and files as they write them ----


def shapes(theirs):
    """Of all weights, by their names."""
    found = {}
    if theirs["model_type"] == "gpt2":
        n, v = theirs["n_embd"], theirs["vocab_size"]
        inner = theirs["n_inner"] or 4 * n
        found |= {"transformer.wte.weight": (v, n), "transformer.wpe.weight": (theirs["n_positions"], n)}
        for at in range(theirs["n_layer"]):
            sizes = {"ln_1": (n,), "ln_2": (n,), "attn.c_attn": (n, 3 * n), "attn.c_proj": (n, n), "mlp.c_fc": (n, inner)}
            for name, shape in (sizes | {"mlp.c_proj": (inner, n)}).items():
                found |= {f"transformer.h.{at}.{name}.weight": shape, f"transformer.h.{at}.{name}.bias": shape[-1:]}
        found |= {"transformer.ln_f.weight": (n,), "transformer.ln_f.bias": (n,)}
        return found | ({} if theirs.get("tie_word_embeddings", True) else {"lm_head.weight": (v, n)})
    n, size = theirs["hidden_size"], theirs.get("head_dim", 4)
    q, kv, inner = 4 * size, theirs["num_key_value_heads"] * size, theirs["intermediate_size"]
    found["model.embed_tokens.weight"] = (theirs["vocab_size"], n)
    for at in range(theirs["num_hidden_layers"]):
        linears = {"self_attn.q_proj": (q, n), "self_attn.k_proj": (kv, n), "self_attn.v_proj": (kv, n)}
        linears |= {"self_attn.o_proj": (n, q), "mlp.gate_proj": (inner, n), "mlp.up_proj": (inner, n)}
        for name, shape in (linears | {"mlp.down_proj": (n, inner)}).items():
            found[f"model.layers.{at}.{name}.weight"] = shape
            found |= {f"model.layers.{at}.{name}.bias": shape[:1]} if theirs.get("mlp_bias") else {}
        found |= {f"model.layers.{at}.{name}.weight": (n,) for name in ("input_layernorm", "post_attention_layernorm")}
    found["model.norm.weight"] = (n,)
    return found | ({} if theirs["tie_word_embeddings"] else {"lm_head.weight": (theirs["vocab_size"], n)})


def weights(theirs, dtype=torch.float32):
    generator = torch.Generator().manual_seed(4)
    return {name: (torch.randn(shape, generator=generator) * 0.4).to(dtype) for name, shape in shapes(theirs).items()}


def attended(q, k, v):
    """q [S, H, D], and k and v with as many heads or fewer."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = torch.einsum("shd,thd->hst", q, k) / math.sqrt(q.shape[-1])
    hidden = torch.ones(scores.shape[1:]).triu(1).bool()
    return torch.einsum("hst,thd->shd", scores.masked_fill(hidden, -math.inf).softmax(-1), v).flatten(1)


def gpt2_logits(theirs, w, row):
    w = {name.removeprefix("transformer."): t.double() for name, t in w.items()}
    n = theirs["n_embd"]
    gelu = {"gelu_new": lambda x: F.gelu(x, approximate="tanh"), "gelu": F.gelu}[theirs["activation_function"]]

    def linear(x, name):
        return x @ w[f"{name}.weight"] + w[f"{name}.bias"]

    def norm(x, name):
        return F.layer_norm(x, (n,), w[f"{name}.weight"], w[f"{name}.bias"], theirs["layer_norm_epsilon"])

    h = w["wte.weight"][row] + w["wpe.weight"][: len(row)]
    for at in range(theirs["n_layer"]):
        q, k, v = (t.view(len(row), 4, -1) for t in linear(norm(h, f"h.{at}.ln_1"), f"h.{at}.attn.c_attn").split(n, -1))
        h = h + linear(attended(q, k, v), f"h.{at}.attn.c_proj")
        h = h + linear(gelu(linear(norm(h, f"h.{at}.ln_2"), f"h.{at}.mlp.c_fc")), f"h.{at}.mlp.c_proj")
    return norm(h, "ln_f") @ w.get("lm_head.weight", w["wte.weight"]).t()


def llama_logits(theirs, w, row):
    w = {name.removeprefix("model."): t.double() for name, t in w.items()}
    size = theirs.get("head_dim", 4)
    rope = dict(theirs.get("rope_parameters") or theirs.get("rope_scaling") or {})
    turning = rope.get("rope_theta", theirs["rope_theta"]) ** (-torch.arange(0, size, 2).double() / size)
    if rope:  # as their code has it, by wavelengths
        length, old = 2 * math.pi / turning, 16
        low, high = old / 1.0, old / 4.0
        smooth = (old / length - 1.0) / (4.0 - 1.0)
        between = (1 - smooth) * turning / 4.0 + smooth * turning
        turning = torch.where(length > low, turning / 4.0, torch.where(length < high, turning, between))
    angles = torch.outer(torch.arange(len(row)).double(), turning).repeat(1, 2).unsqueeze(1)

    def linear(x, name):
        return x @ w[f"{name}.weight"].t() + w.get(f"{name}.bias", 0.0)

    def norm(x, name):
        return x * (x.square().mean(-1, keepdim=True) + theirs["rms_norm_eps"]).rsqrt() * w[f"{name}.weight"]

    def turned(x):
        first, second = x.chunk(2, -1)
        return x * angles.cos() + torch.cat((-second, first), -1) * angles.sin()

    h = w["embed_tokens.weight"][row]
    for at in range(theirs["num_hidden_layers"]):
        x = norm(h, f"layers.{at}.input_layernorm")
        q, k, v = (linear(x, f"layers.{at}.self_attn.{name}_proj").view(len(row), -1, size) for name in "qkv")
        h = h + linear(attended(turned(q), turned(k), v), f"layers.{at}.self_attn.o_proj")
        x = norm(h, f"layers.{at}.post_attention_layernorm")
        gated = F.silu(linear(x, f"layers.{at}.mlp.gate_proj")) * linear(x, f"layers.{at}.mlp.up_proj")
        h = h + linear(gated, f"layers.{at}.mlp.down_proj")
    return norm(h, "norm") @ w.get("lm_head.weight", w["embed_tokens.weight"]).t()


def written(folder, theirs, tensors, shards=1):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(theirs))
    names = list(tensors)
    if shards == 1:
        safetensors.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    places = {}
    for at in range(shards):
        file = f"model-{at + 1:05}-of-{shards:05}.safetensors"
        safetensors.save_file({name: tensors[name] for name in names[at::shards]}, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(names[at::shards], file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


def all_in(folder):
    return {name: t for path in sorted(folder.glob("*.safetensors")) for name, t in safetensors.load_file(path).items()}


# ---- load ----


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("reference", (False, True), ids=("fused", "reference"))
def test_logits_are_those_of_their_formula(name, reference, tmp_path):
    theirs, w = KINDS[name], weights(KINDS[name])
    config, model = load_huggingface(written(tmp_path, theirs, w))
    if reference:
        config, model = load_huggingface(tmp_path, **config.reference().to_dict())
    assert model.config == config and config.bias_activation_fusion is not reference
    tokens = torch.randint(29, (2, 11), generator=torch.Generator().manual_seed(0))
    formula = gpt2_logits if theirs["model_type"] == "gpt2" else llama_logits
    expected = torch.stack([formula(theirs, w, row) for row in tokens])
    assert relative(model.double()(tokens).detach(), expected) < 1e-6  # the tables of angles are fp32


def test_a_gpt2_without_prefix_and_with_buffers_in_shards(tmp_path):
    w = weights(GPT2)
    bare = {name.removeprefix("transformer."): t for name, t in w.items()}
    bare |= {f"h.{at}.attn.bias": torch.ones(1, 1, 12, 12) for at in range(2)} | {
        "lm_head.weight": w["transformer.wte.weight"].clone()
    }
    _, one = load_huggingface(written(tmp_path / "bare", GPT2, bare, shards=3))
    _, other = load_huggingface(written(tmp_path / "whole", GPT2, w))
    assert all(torch.equal(t, other.state_dict()[name]) for name, t in one.state_dict().items())


def test_changes_and_types(tmp_path):
    w = weights(LLAMA, torch.bfloat16)
    config, model = load_huggingface(written(tmp_path, LLAMA | {"torch_dtype": "bfloat16"}, w))
    assert config.params_dtype == "bf16"
    types = {name: t.dtype for name, t in model.named_parameters()}
    assert set(types.values()) == {torch.bfloat16, torch.float32}
    assert all(dtype is (torch.float32 if "norm" in name else torch.bfloat16) for name, dtype in types.items())
    _, model = load_huggingface(tmp_path, fp32_norm_weights=False)
    assert all(t.dtype is torch.bfloat16 for t in model.parameters())
    config, model = load_huggingface(tmp_path, params_dtype="fp32", layernorm_zero_centered_gamma=True, rope_scaling_factor=2.0)
    assert config.params_dtype == "fp32"
    norm = model.layers["1"].input_layernorm.weight
    assert torch.equal(norm + 1, w["model.layers.1.input_layernorm.weight"].float())
    assert torch.equal(model.rotary(3)[0][:, 0], torch.arange(3).double().cos().float())


# ---- save ----


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("shard_bytes", (5 << 30, 4000), ids=("one file", "shards"))
def test_what_is_saved_is_what_was_loaded(name, dtype, shard_bytes, tmp_path):
    theirs = KINDS[name] | {"torch_dtype": str(dtype).removeprefix("torch."), "dtype": str(dtype).removeprefix("torch.")}
    w = weights(theirs, dtype)
    config, model = load_huggingface(written(tmp_path / "theirs", theirs, w))
    save_huggingface(model, tmp_path / "ours", shard_bytes=shard_bytes)
    saved = all_in(tmp_path / "ours")
    assert saved.keys() == w.keys() and all(torch.equal(saved[key], t) and saved[key].dtype == dtype for key, t in w.items())
    files = list((tmp_path / "ours").glob("*.safetensors"))
    index = tmp_path / "ours" / "model.safetensors.index.json"
    assert index.exists() is (shard_bytes == 4000) and (len(files) > 2) is (shard_bytes == 4000)
    if index.exists():
        total = json.loads(index.read_text())["metadata"]["total_size"]
        assert total == sum(t.nbytes for t in w.values())
        assert all(path.stat().st_size < 4000 + 3000 for path in files)
    again, other = load_huggingface(tmp_path / "ours")
    assert again.replace(kv_channels=None) == config.replace(kv_channels=None, ffn_hidden_size=again.ffn_hidden_size)
    assert all(torch.equal(t, other.state_dict()[key]) for key, t in model.state_dict().items())


def test_one_file_takes_the_place_of_shards(tmp_path):
    config, model = load_huggingface(written(tmp_path, LLAMA, weights(LLAMA), shards=2))
    save_huggingface(model, tmp_path)
    assert not (tmp_path / "model.safetensors.index.json").exists()
    assert load_huggingface(tmp_path)[0] == config.replace(kv_channels=4)


def test_a_model_of_ours(tmp_path):
    """With zero-centred norms, too, the file has what they multiply by."""
    config = Config(num_layers=1, hidden_size=16, vocab_size=29, ffn_hidden_size=20, layernorm_zero_centered_gamma=True)
    model = Model(config, seed=0)
    save_huggingface(model, tmp_path / "new" / "folder")
    saved = all_in(tmp_path / "new" / "folder")
    assert torch.equal(saved["model.norm.weight"], torch.ones(16))
    assert torch.equal(saved["model.layers.0.mlp.up_proj.weight"], model.layers["0"].mlp.linear_fc1.weight[20:])
    theirs = json.loads((tmp_path / "new" / "folder" / "config.json").read_text())
    expected = llama_logits(theirs | {"head_dim": 4}, saved, torch.arange(9))
    assert relative(model.double()(torch.arange(9).unsqueeze(0)).detach()[0], expected) < 1e-6


# ---- theirs, where it is installed ----


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.filterwarnings("ignore")
def test_transformers_gives_the_same_logits(name, tmp_path):
    transformers = pytest.importorskip("transformers")
    _, model = load_huggingface(written(tmp_path / "theirs", KINDS[name], weights(KINDS[name])))
    save_huggingface(model, tmp_path / "ours", shard_bytes=4000)
    tokens = torch.randint(29, (2, 11), generator=torch.Generator().manual_seed(0))
    for folder in ("theirs", "ours"):
        other = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / folder, dtype=torch.float32).eval()
        with torch.no_grad():
            assert relative(model(tokens), other(tokens).logits.double()) < 1e-5, folder


# ---- errors ----


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        (GPT2 | {"model_type": "mamba"}, "model_type must be 'gpt2' or 'llama', but is 'mamba'"),
        (GPT2 | {"torch_dtype": "float64"}, "dtype must be one of float32, bfloat16, float16, but is 'float64'"),
        (GPT2 | {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx must be False, but is True"),
        (GPT2 | {"embd_pdrop": 0.2}, "embd_pdrop must be 0.0, but is 0.2"),
        (GPT2 | {"activation_function": "mish"}, "activation_function must be one of gelu_new, .*, but is 'mish'"),
        (LLAMA | {"mlp_bias": True}, "mlp_bias must be False, but is True"),
        (LLAMA | {"rope_scaling": {"type": "yarn"}}, "rope_type must be 'default' or 'llama3', but is 'yarn'"),
    ],
    ids=lambda each: each.get("model_type") if isinstance(each, dict) else each.split()[0],
)
def test_what_ours_does_not_have(theirs, said, tmp_path):
    with pytest.raises(ValueError, match=said):
        load_huggingface(written(tmp_path, theirs, {}))


def test_folders_with_too_little_or_too_much(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"folder must hold config.json, but .* does not"):
        load_huggingface(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match=r"folder must hold model.safetensors or model.safetensors.index.json, but"):
        load_huggingface(tmp_path)
    w = weights(LLAMA)
    written(tmp_path, LLAMA, {name: t for name, t in w.items() if name != "model.norm.weight"})
    with pytest.raises(ValueError, match=r"folder must hold the weight model.norm.weight, but does not"):
        load_huggingface(tmp_path)
    written(tmp_path, LLAMA, w | {"model.layers.0.self_attn.q_norm.weight": torch.ones(4)})
    with pytest.raises(
        ValueError, match=r"folder must hold a llama model's weights alone, but has model.layers.0.self_attn.q_norm"
    ):
        load_huggingface(tmp_path)
    written(tmp_path, LLAMA, w | {"model.norm.weight": torch.ones(15)})
    with pytest.raises(ValueError, match=r"model.norm.weight must make final_layernorm.weight \(16,\), but make \(15,\)"):
        load_huggingface(tmp_path)
    index = {"weight_map": {"model.norm.weight": "../elsewhere.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(FileNotFoundError, match=r"must name files beside it, but '../elsewhere.safetensors' is none"):
        load_huggingface(tmp_path)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"qk_layernorm": True}, "qk_layernorm must be False for a Llama of Hugging Face's, but is True"),
        ({"num_moe_experts": 2}, "num_moe_experts must be None for a Llama of Hugging Face's, but is 2"),
        ({"rotary_percent": 0.5}, "rotary_percent must be 1.0 for a Llama of Hugging Face's, but is 0.5"),
        ({"add_qkv_bias": True}, "add_qkv_bias must be false without add_bias_linear for a Llama of Hugging Face's, but is true"),
        (
            {"position_embedding_type": "learned_absolute"},
            "normalization must be 'LayerNorm' for a GPT-2 of Hugging Face's, but is 'RMSNorm'",
        ),
    ],
    ids=lambda each: "-".join(each) if isinstance(each, dict) else "",
)
def test_what_theirs_do_not_have(settings, said, tmp_path):
    with pytest.raises(ValueError) as error:
        save_huggingface(Model(Config(num_layers=1, **settings), seed=0), tmp_path / "made")
    assert str(error.value) == said and not (tmp_path / "made").exists()


def test_gpt2s_have_no_groups_and_models_are_whole(tmp_path):
    base = {"position_embedding_type": "learned_absolute", "normalization": "LayerNorm", "add_bias_linear": True}
    base |= {"gated_linear_unit": False, "activation_func": "gelu", "num_layers": 2}
    for settings, said in (
        ({"num_query_groups": 2}, "num_query_groups must be 4, num_attention_heads, for a GPT-2, but is 2"),
        ({"kv_channels": 8}, "kv_channels must be 32 for a GPT-2, but is 8"),
    ):
        with pytest.raises(ValueError, match=said):
            save_huggingface(Model(Config(**base, **settings), seed=0), tmp_path)
    stage = Model(Config(**base, untie_embeddings_and_output_weights=True), layers=range(1), last=False, seed=0)
    with pytest.raises(ValueError, match="model must be whole, but is divided over ranks or stages"):
        save_huggingface(stage, tmp_path)
