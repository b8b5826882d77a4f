"""Config, the configuration of a GPT: a frozen dataclass with Megatron's names. Its constructor raises for contradictions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onepass.gpt.config_fields import ConfigFields
from onepass.gpt.settings import nearest, read_yaml, written_yaml
from onepass.gpt.validate_config import FP8_OPTIONS, validate_config


@dataclass(frozen=True, kw_only=True)
class Config(ConfigFields):
    """A GPT's shape and its fused ops. Field names are Megatron's. The defaults are a small Llama with all fusions.

        config = Config(num_layers=12, hidden_size=768, num_attention_heads=12)
        config = Config.from_yaml("config.yaml")
        plain = config.reference()              # the same model with PyTorch operators only

    Contradicting settings raise ValueError with the fields, their values and the values that they must have. Each field's help
    text (`Config.flags()`) says what it means; the trainer's command line shows it.
    """

    def contradictions(self) -> Iterable[str]:
        return validate_config(self)

    # ---- counts ----

    def parameters_count(self) -> int:
        """Return how many parameters the whole model has. A tied weight counts once."""
        blocks = self.num_layers * self._block_count(self.num_moe_experts or 1)
        head = 0 if self.tied else self.vocab_size * self.hidden_size
        depths = self.mtp_layers * self._depth_count(self.num_moe_experts or 1)
        return self._embedding_count() + blocks + depths + self._norm_count() + head

    def flops_per_token(self, sequence: float, *, frozen: bool = False) -> float:
        """Return a token's FLOPs in forward and backward: 6 per parameter in use, plus causal attention.

        `frozen`: the weights get no gradients, which leaves 4 per parameter. Adapters are not counted.

        `sequence` is how many tokens see each other. Where sequences or documents differ, it is the average over the tokens.

        Causal attention takes 6 x layers x heads x head size x sequence, half of full attention. Embedding tables that are only
        looked up (positions, and untied tokens) are not in use, nor are experts that do not see the token. Recomputation in
        backward is not counted.
        """
        experts, depths = self.moe_router_topk if self.num_moe_experts else 1, self.mtp_num_layers or 0
        in_use = self.num_layers * self._block_count(experts) + depths * self._depth_count(experts)
        in_use += self._norm_count() + (1 + depths) * self.vocab_size * self.hidden_size
        in_attention = (self.num_layers + depths) * self.num_attention_heads * self.head_size * sequence
        return (4.0 if frozen else 6.0) * in_use + 6.0 * in_attention

    def _embedding_count(self) -> int:
        positions = self.max_position_embeddings if self.position_embedding_type == "learned_absolute" else 0
        return (self.vocab_size + positions) * self.hidden_size

    def _block_count(self, experts: int) -> int:
        """Return the parameters of a block with that many experts. A dense MLP counts as one expert."""
        heads, groups, bias = self.num_attention_heads * self.head_size, self.query_groups * self.head_size, self.add_bias_linear
        qkv, norm = heads + 2 * groups, self._norm_count()
        attention = qkv * (self.hidden_size + self.qkv_bias) + self.hidden_size * (heads + bias)
        attention += 2 * self._norm_count(self.head_size) if self.qk_layernorm else 0
        size, parts = self.expert_size if self.num_moe_experts else self.ffn_size, 2 if self.gated_linear_unit else 1
        mlp = parts * size * (self.hidden_size + bias) + self.hidden_size * (size + bias)
        return 2 * norm + attention + experts * mlp + self.hidden_size * (self.num_moe_experts or 0)

    def _depth_count(self, experts: int) -> int:
        """Return the parameters of a depth of multi-token prediction, without the embedding and the head that it shares."""
        return self._block_count(experts) + 3 * self._norm_count() + 2 * self.hidden_size**2

    def _norm_count(self, size: int | None = None) -> int:
        return (self.hidden_size if size is None else size) * (2 if self.normalization == "LayerNorm" else 1)

    # ---- variants ----

    def reference(self) -> Config:
        """Return the configuration of the same model with every fusion off: PyTorch operators only."""
        return self.replace(**_REFERENCE)

    # ---- files and flags ----

    own_flags = {  # Megatron's, where they are not `--field-name` and `--no-field-name`
        "layernorm_epsilon": ("--norm-epsilon", None),
        "layernorm_zero_centered_gamma": ("--apply-layernorm-1p", "--no-apply-layernorm-1p"),
        "add_bias_linear": ("--add-bias-linear", "--disable-bias-linear"),
        "apply_rope_fusion": ("--rope-fusion", "--no-rope-fusion"),
        "num_moe_experts": ("--num-experts", None),
        "num_layers_in_first_pipeline_stage": ("--decoder-first-pipeline-num-layers", None),
        "num_layers_in_last_pipeline_stage": ("--decoder-last-pipeline-num-layers", None),
        "virtual_pipeline_model_parallel_size": ("--num-virtual-stages-per-pipeline-rank", None),
    }

    @classmethod
    def from_yaml(cls, path: str | Path) -> Config:
        return cls.from_dict(read_yaml(path, cls.flags()))

    def to_yaml(self) -> str:
        """Return all fields as YAML, in the order of their definition."""
        return written_yaml(self.to_dict())


_REFERENCE = {
    "norm_fusion": False, "memory_efficient_layer_norm": False, "norm_linear_fusion": False,
    "bias_activation_fusion": False, "activation_func_fp8_input_store": False, "cpu_offloading": False,
    "bias_dropout_fusion": False, "apply_rope_fusion": False, "attention_fusion": False, "cross_entropy_loss_fusion": False,
    "fp32_logits": False,
    "gradient_accumulation_fusion": False, "defer_embedding_wgrad_compute": False, "wgrad_deferral_limit": 0,
    "fp8_format": None, **{name: getattr(Config, name) for name in FP8_OPTIONS},
}  # fmt: skip


# ---- presets ----

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

_LLAMA3: dict[str, Any] = {
    "num_query_groups": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rotary_base": 500000.0,
    "untie_embeddings_and_output_weights": True,
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
    # Llama 3 8B, 70B and 405B
    "8B": _LLAMA3 | {"num_layers": 32, "hidden_size": 4096, "ffn_hidden_size": 14336, "num_attention_heads": 32},
    "70B": _LLAMA3 | {"num_layers": 80, "hidden_size": 8192, "ffn_hidden_size": 28672, "num_attention_heads": 64},
    "405B": _LLAMA3 | {"num_layers": 126, "hidden_size": 16384, "ffn_hidden_size": 53248, "num_attention_heads": 128},
}


def preset(name: str, **changes: Any) -> Config:
    """Return the configuration `name`, one of PRESETS, with `changes` to its fields."""
    if name not in PRESETS:
        raise ValueError(f"preset must be one of {', '.join(PRESETS)}, but is {name!r}{nearest(name, PRESETS)}")
    return Config.from_dict(PRESETS[name] | changes)
