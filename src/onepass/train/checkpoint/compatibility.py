"""Check that a checkpoint is of this model. Only settings that decide shapes and formula count, not ops or layout."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
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
_RECIPE = ("fp8_format", "fp8_recipe", "fp8_margin", "fp8_amax_history_len", "fp8_amax_compute_algo")
_BLOCK = re.compile(r"fp8\.history\.layers\.(\d{1,9})\.")  # a tensor of scales (scales.py)
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
    names += ["mtp_num_layers", "mtp_use_repeated_layer"] if config.mtp_num_layers else []
    facts = {name: getattr(config, name) for name in names}
    facts |= {"num_query_groups": config.query_groups, "kv_channels": config.head_size, "add_qkv_bias": config.qkv_bias}
    facts |= {"moe_ffn_hidden_size": config.expert_size} if config.num_moe_experts else {"ffn_hidden_size": config.ffn_size}
    return facts


def check_compatible(path: Path, theirs: Mapping[str, Any], config: Config) -> None:
    ours = facts_of(config)
    apart = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    if apart:
        differences = ", ".join(f"{name} is {theirs.get(name)!r} there and {ours.get(name)!r} here" for name in apart[:_SHOWN])
        more = f", and {len(apart) - _SHOWN} more" if len(apart) > _SHOWN else ""
        raise CommandError(f"the checkpoint {path} must be of this model, but is of another: {differences}{more}")


def check_same_adapters(path: Path, theirs: Any, ours: Mapping[str, Any] | None) -> None:
    """Raise CommandError unless the checkpoint is of this run's adapters of the same frozen weights, or both runs have none."""
    if theirs == ours:
        return
    if not isinstance(theirs, dict):
        raise CommandError(f"the checkpoint {path} must be of LoRA adapters, as lora_rank is given, but is of all weights")
    if ours is None:
        raise CommandError(f"the checkpoint {path} must be of all weights, as lora_rank is None, but is of LoRA adapters")
    apart = [name for name in ours if name != "frozen" and theirs.get(name) != ours[name]]
    if apart:
        differences = ", ".join(f"lora_{name} is {theirs.get(name)!r:.100} there and {ours[name]!r} here" for name in apart)
        raise CommandError(f"the checkpoint {path} must be of these adapters, but is of others: {differences}")
    raise CommandError(
        f"the checkpoint {path} must be of adapters of these frozen weights, but is of others': --load-hf, or without it --seed, "
        "and --params-dtype must be as they were"
    )


# ---- eight bits ----


def check_recipe(path: Path, theirs: object, config: Config) -> None:
    """Raise CommandError where the checkpoint's scales are of another recipe. `theirs`: the settings that it was saved with.

    A run in 16 bits takes any checkpoint, and a run in eight bits takes one of 16 bits.
    """
    if config.fp8_format is None or not isinstance(theirs, dict) or theirs.get("fp8_format") is None:
        return
    apart = [name for name in _RECIPE if theirs.get(name) != getattr(config, name)]
    if apart:
        differences = ", ".join(
            f"--{name.replace('_', '-')} is {theirs.get(name)!s:.30} there and {getattr(config, name)} here" for name in apart
        )
        raise CommandError(f"the checkpoint {path} must be of this run's eight-bit recipe, but is of another: {differences}")


def scales_there(tensors: Iterable[str], config: Config) -> str | None:
    """Return what a run says where a checkpoint with these tensors doesn't have the scales that it takes, or None."""
    there = {int(found[1]) for name in tensors if (found := _BLOCK.match(name))}
    if config.fp8_format is None:
        return "the checkpoint's eight-bit scales are left out: this run has none" if there else None
    taken = [layer for layer in range(config.num_layers) if config.precision(layer) is not None]
    new = [str(layer + 1) for layer in taken if layer not in there]
    if config.fp8_recipe != "delayed" or not new:
        return None
    if not there:
        return "the checkpoint has no scales of eight-bit products: they start anew"
    return f"the checkpoint has no scales for {'block' if len(new) == 1 else 'blocks'} {', '.join(new)}: they start anew"
