"""Conversion between Hugging Face's config.json of GPT-2 and Llama models and Config. Settings that one lacks raise."""

from __future__ import annotations

from typing import Any

from onepass.gpt.config import Config

_ACTIVATIONS = {  # of several names for ours, the last is what we write
    "gelu_new": "gelu", "gelu_fast": "gelu", "gelu_pytorch_tanh": "gelu", "gelu": "gelu_exact", "swish": "silu", "silu": "silu",
    "quick_gelu": "quick_gelu", "relu": "relu", "relu2": "squared_relu",
}  # fmt: skip
_THEIR_ACTIVATIONS = {ours: theirs for theirs, ours in _ACTIVATIONS.items()}
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


# The settings of each kind that both have: ours, theirs, and what theirs is where a config.json leaves it out.
_REQUIRED = object()
_GPT2_SETTINGS: dict[str, tuple[str, object]] = {
    "num_layers": ("n_layer", _REQUIRED),
    "hidden_size": ("n_embd", _REQUIRED),
    "ffn_hidden_size": ("n_inner", None),
    "num_attention_heads": ("n_head", _REQUIRED),
    "vocab_size": ("vocab_size", _REQUIRED),
    "max_position_embeddings": ("n_positions", _REQUIRED),
    "layernorm_epsilon": ("layer_norm_epsilon", 1e-5),
    "activation_func": ("activation_function", "gelu_new"),
    "tied": ("tie_word_embeddings", True),
    "hidden_dropout": ("resid_pdrop", 0.1),
    "attention_dropout": ("attn_pdrop", 0.1),
    "init_method_std": ("initializer_range", 0.02),
}
_LLAMA_SETTINGS: dict[str, tuple[str, object]] = {
    "num_layers": ("num_hidden_layers", _REQUIRED),
    "hidden_size": ("hidden_size", _REQUIRED),
    "ffn_hidden_size": ("intermediate_size", _REQUIRED),
    "num_attention_heads": ("num_attention_heads", _REQUIRED),
    "num_query_groups": ("num_key_value_heads", None),
    "kv_channels": ("head_dim", None),
    "vocab_size": ("vocab_size", _REQUIRED),
    "max_position_embeddings": ("max_position_embeddings", _REQUIRED),
    "rotary_base": ("rope_theta", 10000.0),
    "layernorm_epsilon": ("rms_norm_eps", 1e-6),
    "add_bias_linear": ("attention_bias", False),
    "activation_func": ("hidden_act", "silu"),
    "tied": ("tie_word_embeddings", False),
    "attention_dropout": ("attention_dropout", 0.0),
    "init_method_std": ("initializer_range", 0.02),
}
_SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")  # of rope_scaling


def _fields(theirs: dict[str, Any], settings: dict[str, tuple[str, object]]) -> dict[str, Any]:
    """Return Config's fields of a config.json. Raise KeyError for what it must have."""
    fields = {}
    for ours, (name, default) in settings.items():
        fields[ours] = theirs[name] if default is _REQUIRED else theirs.get(name, default)
    fields["activation_func"] = _activation(fields["activation_func"], settings["activation_func"][0])
    fields["untie_embeddings_and_output_weights"] = not fields.pop("tied")
    return fields


def _of_gpt2(theirs: dict[str, Any]) -> dict[str, Any]:
    _must_be(theirs, "scale_attn_weights", True)
    _must_be(theirs, "scale_attn_by_inverse_layer_idx", False)
    _must_be(theirs, "add_cross_attention", False)
    _must_be(theirs, "embd_pdrop", theirs.get("resid_pdrop", 0.1), 0.1)
    learned = {"position_embedding_type": "learned_absolute", "normalization": "LayerNorm"}
    return _fields(theirs, _GPT2_SETTINGS) | learned | {"add_bias_linear": True, "gated_linear_unit": False}


def _of_llama(theirs: dict[str, Any]) -> dict[str, Any]:
    _must_be(theirs, "mlp_bias", theirs.get("attention_bias", False), False)
    rope: Any = theirs.get("rope_parameters") or theirs.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise ValueError(f"rope_parameters must be an object, but is {rope!r}")
    base = {"rope_theta": rope["rope_theta"]} if "rope_theta" in rope else {}
    fields = _fields(theirs | base, _LLAMA_SETTINGS)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "llama3":
        fields |= {"use_rope_scaling": True, **{f"rope_scaling_{name}": rope[name] for name in _SCALING}}
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
    theirs = _settings(config, _GPT2_SETTINGS)
    return {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", **theirs, "embd_pdrop": config.hidden_dropout}


def _llama(config: Config) -> dict[str, Any]:
    theirs = _settings(config, _LLAMA_SETTINGS)
    theirs |= {"intermediate_size": config.ffn_size, "num_key_value_heads": config.query_groups, "head_dim": config.head_size}
    scaling = {"rope_type": "llama3", **{name: getattr(config, f"rope_scaling_{name}") for name in _SCALING}}
    theirs |= {"rope_scaling": scaling if config.use_rope_scaling else None, "mlp_bias": config.add_bias_linear}
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **theirs}


def _settings(config: Config, settings: dict[str, tuple[str, object]]) -> dict[str, Any]:
    theirs = {name: getattr(config, ours) for ours, (name, _) in settings.items()}
    theirs[settings["activation_func"][0]] = _THEIR_ACTIVATIONS[config.activation_func]
    return theirs | {"torch_dtype": _THEIR_TYPES[config.params_dtype]}
