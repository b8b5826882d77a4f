"""Named configurations: GPT-2 and Llama sizes, and a small model for a CPU."""

from __future__ import annotations

from typing import Any

from onepass.gpt.config import Config
from onepass.gpt.settings import nearest

# GPT-2's architecture, so that its weights fit: LayerNorm, biases, GELU, learned positions. The vocabulary is padded to a
# multiple of 128 for the GEMMs.
_GPT2: dict[str, Any] = {
    "vocab_size": 50304,
    "max_position_embeddings": 1024,
    "position_embedding_type": "learned_absolute",
    "normalization": "LayerNorm",
    "add_bias_linear": True,
    "gated_linear_unit": False,
    "activation_func": "gelu",
}

PRESETS: dict[str, dict[str, Any]] = {
    # for a CPU: 1.1 million parameters
    "tiny": {"num_layers": 4, "hidden_size": 128, "ffn_hidden_size": 384, "num_attention_heads": 4, "vocab_size": 2048},
    # GPT-2 small and medium
    "124M": _GPT2 | {"num_layers": 12, "hidden_size": 768, "num_attention_heads": 12},
    "350M": _GPT2 | {"num_layers": 24, "hidden_size": 1024, "num_attention_heads": 16},
    # Llama 3.2 1B
    "1B": {
        "num_layers": 16,
        "hidden_size": 2048,
        "ffn_hidden_size": 8192,
        "num_attention_heads": 32,
        "num_query_groups": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rotary_base": 500000.0,
        "use_rope_scaling": True,
        "rope_scaling_factor": 32.0,
    },
    # Llama 2 7B
    "7B": {
        "num_layers": 32,
        "hidden_size": 4096,
        "ffn_hidden_size": 11008,
        "num_attention_heads": 32,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
        "untie_embeddings_and_output_weights": True,
    },
}


def preset(name: str, **changes: Any) -> Config:
    """Return the configuration `name`, one of PRESETS, with `changes` to its fields."""
    if name not in PRESETS:
        raise ValueError(f"preset must be one of {', '.join(PRESETS)}, but is {name!r}{nearest(name, PRESETS)}")
    return Config.from_dict(PRESETS[name] | changes)
