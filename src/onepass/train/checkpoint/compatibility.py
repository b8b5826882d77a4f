"""Check that a checkpoint is of this model. Only settings that decide shapes and formula count, not ops or layout."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onepass.gpt import Config
from onepass.runtime.errors import CommandError

_SHOWN = 3
_FIELDS = (
    "num_layers", "hidden_size", "num_attention_heads", "vocab_size", "position_embedding_type", "normalization",
    "layernorm_epsilon", "layernorm_zero_centered_gamma", "qk_layernorm", "add_bias_linear", "gated_linear_unit",
    "activation_func", "glu_linear_offset", "activation_func_clamp_value", "untie_embeddings_and_output_weights",
    "final_logit_softcapping", "num_moe_experts",
)  # fmt: skip
_ROTARY = ("rotary_base", "rotary_percent", "rotary_interleaved", "use_rope_scaling")
_SCALING = (
    "rope_scaling_factor", "rope_scaling_low_freq_factor", "rope_scaling_high_freq_factor",
    "rope_scaling_original_max_position_embeddings",
)  # fmt: skip


def facts_of(config: Config) -> dict[str, Any]:
    """Return the settings to compare, by field name. Omit fields without effect in this model; resolve defaults."""
    rope, learned = config.position_embedding_type == "rope", config.position_embedding_type == "learned_absolute"
    names = [*_FIELDS, *(_ROTARY if rope else ()), *(_SCALING if rope and config.use_rope_scaling else ())]
    names += ["max_position_embeddings"] if learned else []
    names += ["moe_router_topk"] if config.num_moe_experts else []
    facts = {name: getattr(config, name) for name in names}
    facts |= {"num_query_groups": config.query_groups, "kv_channels": config.head_size, "add_qkv_bias": config.qkv_bias}
    facts |= {"moe_ffn_hidden_size": config.expert_size} if config.num_moe_experts else {"ffn_hidden_size": config.ffn_size}
    return facts


def check_compatible(path: Path, theirs: Mapping[str, Any], config: Config) -> None:
    ours = facts_of(config)
    apart = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    if apart:
        said = ", ".join(f"{name} is {theirs.get(name)!r} there and {ours.get(name)!r} here" for name in apart[:_SHOWN])
        more = f", and {len(apart) - _SHOWN} more" if len(apart) > _SHOWN else ""
        raise CommandError(f"the checkpoint {path} must be of this model, but is of another: {said}{more}")
