"""Conversion between Hugging Face's config.json of GPT-2 and Llama models and Config. Settings that one lacks raise."""

from __future__ import annotations

from typing import Any

from onepass.gpt.config import Config

_ACTIVATIONS = {
    "gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu_fast": "gelu", "gelu": "gelu_exact", "silu": "silu", "swish": "silu",
    "quick_gelu": "quick_gelu", "relu": "relu", "relu2": "squared_relu",
}  # fmt: skip
_THEIR_ACTIVATIONS = {
    "gelu": "gelu_pytorch_tanh", "gelu_exact": "gelu", "silu": "silu", "quick_gelu": "quick_gelu", "relu": "relu",
    "squared_relu": "relu2",
}  # fmt: skip
_TYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_THEIR_TYPES = {ours: theirs for theirs, ours in _TYPES.items()}


def config_of(theirs: dict[str, Any]) -> Config:
    """Return the Config for the contents of a config.json. Raise ValueError for settings that Config cannot express."""
    kind = theirs.get("model_type")
    if kind not in ("gpt2", "llama"):
        raise ValueError(f"model_type must be 'gpt2' or 'llama', but is {kind!r}")
    dtype: Any = theirs.get("dtype") or theirs.get("torch_dtype") or "float32"
    if not isinstance(dtype, str) or dtype not in _TYPES:
        raise ValueError(f"dtype must be one of {', '.join(_TYPES)}, but is {dtype!r}")
    try:
        fields = _of_gpt2(theirs) if kind == "gpt2" else _of_llama(theirs)
    except KeyError as missing:
        raise ValueError(f"config.json of a {kind} must have {missing}, but has not") from None
    return Config.from_dict(fields | {"params_dtype": _TYPES[dtype]})


def _of_gpt2(theirs: dict[str, Any]) -> dict[str, Any]:
    _must_be(theirs, "scale_attn_weights", True)
    _must_be(theirs, "scale_attn_by_inverse_layer_idx", False)
    _must_be(theirs, "add_cross_attention", False)
    dropout = theirs.get("resid_pdrop", 0.1)
    _must_be(theirs, "embd_pdrop", dropout, 0.1)
    return {
        "num_layers": theirs["n_layer"],
        "hidden_size": theirs["n_embd"],
        "ffn_hidden_size": theirs.get("n_inner"),
        "num_attention_heads": theirs["n_head"],
        "vocab_size": theirs["vocab_size"],
        "max_position_embeddings": theirs["n_positions"],
        "position_embedding_type": "learned_absolute",
        "normalization": "LayerNorm",
        "layernorm_epsilon": theirs.get("layer_norm_epsilon", 1e-5),
        "add_bias_linear": True,
        "gated_linear_unit": False,
        "activation_func": _activation(theirs.get("activation_function", "gelu_new"), "activation_function"),
        "untie_embeddings_and_output_weights": not theirs.get("tie_word_embeddings", True),
        "hidden_dropout": dropout,
        "attention_dropout": theirs.get("attn_pdrop", 0.1),
        "init_method_std": theirs.get("initializer_range", 0.02),
    }


def _of_llama(theirs: dict[str, Any]) -> dict[str, Any]:
    bias = theirs.get("attention_bias", False)
    _must_be(theirs, "mlp_bias", bias, False)
    rope: Any = theirs.get("rope_parameters") or theirs.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise ValueError(f"rope_parameters must be an object, but is {rope!r}")
    rope = dict(rope)
    fields = {
        "num_layers": theirs["num_hidden_layers"],
        "hidden_size": theirs["hidden_size"],
        "ffn_hidden_size": theirs["intermediate_size"],
        "num_attention_heads": theirs["num_attention_heads"],
        "num_query_groups": theirs.get("num_key_value_heads"),
        "kv_channels": theirs.get("head_dim"),
        "vocab_size": theirs["vocab_size"],
        "max_position_embeddings": theirs["max_position_embeddings"],
        "rotary_base": rope.pop("rope_theta", theirs.get("rope_theta", 10000.0)),
        "layernorm_epsilon": theirs.get("rms_norm_eps", 1e-6),
        "add_bias_linear": bias,
        "activation_func": _activation(theirs.get("hidden_act", "silu"), "hidden_act"),
        "untie_embeddings_and_output_weights": not theirs.get("tie_word_embeddings", False),
        "attention_dropout": theirs.get("attention_dropout", 0.0),
        "init_method_std": theirs.get("initializer_range", 0.02),
    }
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "llama3":
        fields |= {"use_rope_scaling": True, "rope_scaling_factor": rope["factor"]}
        for name in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"):
            fields[f"rope_scaling_{name}"] = rope[name]
    elif kind != "default":
        raise ValueError(f"rope_type must be 'default' or 'llama3', but is {kind!r}")
    return fields


def _activation(name: object, field: str) -> str:
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise ValueError(f"{field} must be one of {', '.join(_ACTIVATIONS)}, but is {name!r}")
    return _ACTIVATIONS[name]


def _must_be(theirs: dict[str, Any], name: str, value: object, default: object = None) -> None:
    stated = theirs.get(name, value if default is None else default)
    if stated != value:
        raise ValueError(f"{name} must be {value!r}, but is {stated!r}: ours has no other")


# ---- from Config to config.json ----

_EVERY = {
    "qk_layernorm": False, "final_logit_softcapping": None, "num_moe_experts": None, "activation_func_clamp_value": None,
    "glu_linear_offset": 0.0, "mtp_num_layers": None,
}  # fmt: skip
_GPT2 = _EVERY | {
    "normalization": "LayerNorm", "position_embedding_type": "learned_absolute", "add_bias_linear": True,
    "gated_linear_unit": False,
}  # fmt: skip
_LLAMA = _EVERY | {
    "normalization": "RMSNorm", "position_embedding_type": "rope", "gated_linear_unit": True, "rotary_percent": 1.0,
    "rotary_interleaved": False, "hidden_dropout": 0.0,
}  # fmt: skip


def their_config(config: Config) -> dict[str, Any]:
    """Return the contents of a config.json: GPT-2's if positions are learned, else Llama's."""
    kind, wanted = ("GPT-2", _GPT2) if config.position_embedding_type == "learned_absolute" else ("Llama", _LLAMA)
    for name, value in wanted.items():
        if getattr(config, name) != value:
            raise ValueError(f"{name} must be {value!r} for a {kind} of Hugging Face's, but is {getattr(config, name)!r}")
    if kind == "GPT-2":
        _no_groups(config)
    elif config.add_qkv_bias and not config.add_bias_linear:
        raise ValueError("add_qkv_bias must be false without add_bias_linear for a Llama of Hugging Face's, but is true")
    return _gpt2(config) if kind == "GPT-2" else _llama(config)


def _no_groups(config: Config) -> None:
    heads = config.num_attention_heads
    if config.query_groups != heads:
        raise ValueError(f"num_query_groups must be {heads}, num_attention_heads, for a GPT-2, but is {config.query_groups}")
    if config.head_size * heads != config.hidden_size:
        raise ValueError(f"kv_channels must be {config.hidden_size / heads:g} for a GPT-2, but is {config.head_size}")


def _gpt2(config: Config) -> dict[str, Any]:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_layer": config.num_layers,
        "n_embd": config.hidden_size,
        "n_inner": config.ffn_hidden_size,
        "n_head": config.num_attention_heads,
        "vocab_size": config.vocab_size,
        "n_positions": config.max_position_embeddings,
        "layer_norm_epsilon": config.layernorm_epsilon,
        "activation_function": _THEIR_ACTIVATIONS[config.activation_func],
        "tie_word_embeddings": config.tied,
        "resid_pdrop": config.hidden_dropout,
        "embd_pdrop": config.hidden_dropout,
        "attn_pdrop": config.attention_dropout,
        "initializer_range": config.init_method_std,
        "torch_dtype": _THEIR_TYPES[config.params_dtype],
    }


def _llama(config: Config) -> dict[str, Any]:
    theirs = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.query_groups,
        "head_dim": config.head_size,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_theta": config.rotary_base,
        "rope_scaling": None,
        "rms_norm_eps": config.layernorm_epsilon,
        "attention_bias": config.add_bias_linear,
        "mlp_bias": config.add_bias_linear,
        "hidden_act": _THEIR_ACTIVATIONS[config.activation_func],
        "tie_word_embeddings": config.tied,
        "attention_dropout": config.attention_dropout,
        "initializer_range": config.init_method_std,
        "torch_dtype": _THEIR_TYPES[config.params_dtype],
    }
    if config.use_rope_scaling:
        theirs["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": config.rope_scaling_factor,
            "low_freq_factor": config.rope_scaling_low_freq_factor,
            "high_freq_factor": config.rope_scaling_high_freq_factor,
            "original_max_position_embeddings": config.rope_scaling_original_max_position_embeddings,
        }
    return theirs
