"""Small random models of each family, and the replacements that onepass reports for them."""

import copy

import torch
import transformers

from onepass.integrations import huggingface

VOCABULARY = 97
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SMALL = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 64, **SPECIAL,
}  # fmt: skip
MOE = SMALL | {"output_router_logits": True, "router_aux_loss_coef": 0.5, "num_experts_per_tok": 2}
FAMILIES = {
    "Llama": SMALL | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "Qwen2": SMALL,
    "Qwen3": SMALL | {"head_dim": 16},
    "Mistral": SMALL | {"sliding_window": 5},
    "Gemma": SMALL | {"head_dim": 16},
    "Gemma2": SMALL | {"head_dim": 16, "sliding_window": 5},
    "Gemma3Text": SMALL | {"head_dim": 16, "sliding_window": 5},
    "Phi3": SMALL,
    "GPT2": {
        "vocab_size": VOCABULARY,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "resid_pdrop": 0,
        "embd_pdrop": 0,
        "attn_pdrop": 0,
    },
    "GPTNeoX": SMALL | {"rotary_pct": 0.5},
    "OPT": SMALL | {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0},
    "Mixtral": MOE | {"num_local_experts": 4},
    "Qwen3Moe": MOE | {"num_experts": 4, "moe_intermediate_size": 24, "head_dim": 16},
    "Granite": SMALL | {"residual_multiplier": 0.5, "logits_scaling": 3.0},
    "Cohere": SMALL,
    "StableLm": SMALL,
    "Olmo2": SMALL,
    "GptOss": MOE | {"num_local_experts": 4, "head_dim": 16, "sliding_window": 5},
}
FAMILIES_BESIDE = {"Starcoder2": SMALL | {"residual_dropout": 0.0}}

# stacks: what takes the place of transformers' masks
_BOTH = "documents for packed and padded masks"
_WINDOWS = f"{_BOTH}, windows of 5"

# family -> the expected replacements: norms, MLPs, rotary embeddings, QKV products and losses. All else is reported as left.
_LLAMA = {
    "norm": {"rms_norm", "norm_linear, with the residual's sums"}, "mlp": {"activation_linear, swiglu"}, "rope": {"rope"},
    "qkv": {"attention", _BOTH}, "loss": {"linear_cross_entropy"},
}  # fmt: skip
_GEMMA = _LLAMA | {
    "norm": {"rms_norm, zero-centred", "norm_linear, with the residual's sums"}, "mlp": {"activation_linear, geglu"}
}  # fmt: skip
_NORMED = "attention, q_norm and k_norm"
_LAYER_NORM = {"layer_norm", "norm_linear, with the residual's sums"}
REPLACED = {
    **dict.fromkeys(("Llama", "Qwen2", "Phi3"), _LLAMA),
    "Mistral": _LLAMA | {"qkv": {"attention", _WINDOWS}},
    "Qwen3": _LLAMA | {"qkv": {_NORMED, _BOTH}},
    "Gemma": _GEMMA,
    "Gemma2": _GEMMA | {"qkv": {"attention, softcap 50", _WINDOWS}, "loss": {"linear_cross_entropy, softcap 30"}},
    "Gemma3Text": _GEMMA | {"qkv": {_NORMED, _WINDOWS}},
    "GPT2": {"norm": _LAYER_NORM, "mlp": {"activation_linear, gelu"}, "qkv": {"attention"}, "loss": {"linear_cross_entropy"}},
    "GPTNeoX": _LLAMA | {"norm": _LAYER_NORM, "mlp": {"activation_linear, gelu_exact"}, "qkv": {"linear", _BOTH}},
    "OPT": {"norm": {"layer_norm"}, "qkv": {"linear"}, "loss": {"linear_cross_entropy"}},
    "Mixtral": _LLAMA | {"mlp": {"grouped products, swiglu"}},
    "Qwen3Moe": _LLAMA | {"mlp": {"grouped products, swiglu"}, "qkv": {_NORMED, _BOTH}},
    "Granite": _LLAMA | {"norm": {"rms_norm"}, "loss": {"linear_cross_entropy, logit_scale 0.333333"}},
    "Cohere": _LLAMA | {"norm": {"layer_norm"}, "loss": {"linear_cross_entropy, logit_scale 0.0625"}},
    "StableLm": _LLAMA | {"norm": _LAYER_NORM},
    "Olmo2": _LLAMA | {"norm": {"rms_norm"}, "qkv": {"linear", _BOTH}},
    "GptOss": {
        "norm": {"rms_norm"}, "qkv": {"linear", "documents for padded masks, windows of 5, sinks"},
        "mlp": {"grouped products, quick_geglu, clamped at 7, offset 1, interleaved"}, "loss": {"linear_cross_entropy"},
    },
}  # fmt: skip


def made(family="Llama", **options):
    """Return a model in training mode, with random norm weights and biases too."""
    config = getattr(transformers, f"{family}Config")(**SPECIAL | (FAMILIES | FAMILIES_BESIDE)[family] | options)
    model = transformers.AutoModelForCausalLM.from_config(config).train()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def both(family="Llama", *, main_grad=False, release_main_grad=False, precision=None, **options):
    """Return a model with onepass applied, its copy from before, and the report."""
    model = made(family, **options)
    before = copy.deepcopy(model)
    applied = huggingface.apply(model, main_grad=main_grad, release_main_grad=release_main_grad, precision=precision)
    return model, before, applied


def batch(masked=False, tokens=12):
    ids = torch.randint(3, VOCABULARY, (2, tokens), generator=torch.Generator().manual_seed(7))
    labels, mask = ids.clone(), torch.ones_like(ids)
    labels[:, :3] = -100
    if masked:
        mask[0, -4:] = 0
        labels[0, -4:] = -100
    return {"input_ids": ids, "labels": labels, **({"attention_mask": mask} if masked else {})}


def step(model, **given):
    """Return the loss and each parameter's gradient. torch.compile's prefix is removed from the names."""
    model.zero_grad()
    loss = model(**given).loss
    loss.backward()
    plain = {name.replace("_orig_mod.", ""): p.grad for name, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), {name: grad.clone() for name, grad in plain.items()}


def assert_alike(found, expected, tolerance=2e-5):
    """Assert that losses and gradients are close. Gradients of pure rounding, such as a key bias's, are not compared."""
    torch.testing.assert_close(found[0], expected[0], rtol=tolerance, atol=tolerance, check_dtype=False)
    assert found[1].keys() == expected[1].keys()
    largest = max(grad.norm() for grad in expected[1].values())
    for name, grad in expected[1].items():
        apart = (found[1][name].float() - grad.float()).norm()
        assert apart <= tolerance * grad.float().norm() + 1e-6 * largest, f"{name}: {apart / grad.norm():.1e}"
