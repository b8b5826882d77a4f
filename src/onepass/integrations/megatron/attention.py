"""Megatron's self-attention: linear_qkv's output as it is, rotation and norms of heads inside of attention, and no scores.

Where Megatron takes queries, keys and values apart, joins and copies follow. `FusedQKVSelfAttention` does it in the plain case of
training; other cases go to Megatron's own forward, whose core attention is `CausalCoreAttention`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from onepass.integrations.megatron.fusions import table_pair
from onepass.integrations.megatron.norms import HeadNorm
from onepass.ops.attention.attention import attention


class Fused:
    """A layer of Megatron's that onepass computes, where there is no reason to run Megatron's own forward."""

    part: ClassVar[str]  # of a model, as an account of it says
    by: ClassVar[str]

    def why_left(self) -> str | None:
        """Why Megatron's own forward runs, or None."""
        raise NotImplementedError


@cache
def core_attention() -> Any:
    """Return a DotProductAttention without scores in memory where it is plain causal, and Megatron's own elsewhere.

    As in Transformer Engine, a causal layer doesn't read attention_mask.
    """
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    class CausalCoreAttention(DotProductAttention):  # type: ignore[misc]
        def forward(
            self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, attn_mask_type: Any = None,
            attention_bias: Tensor | None = None, packed_seq_params: Any = None,
        ) -> Tensor:  # fmt: skip
            plain = (
                (attn_mask_type or self.attn_mask_type) in (AttnMaskType.causal, AttnMaskType.padding_causal)
                and not (self.training and self.attention_dropout.p)
                and attention_bias is None
                and query.shape[0] == key.shape[0]
                and query.shape[-1] == value.shape[-1]
                and self.config.softmax_type == "vanilla"
                and self.config.window_size is None
                and not self.config.apply_query_key_layer_scaling
            )
            if packed_seq_params is None and (attn_mask_type or self.attn_mask_type) == AttnMaskType.padding_causal:
                plain = False  # its mask says more than causal
            if not plain:
                stock: Tensor = super().forward(
                    query, key, value, attention_mask, attn_mask_type, attention_bias, packed_seq_params
                )
                return stock
            options = {"scale": self.softmax_scale, "deterministic": self.config.deterministic_mode}
            heads, groups = query.shape[-2], key.shape[-2]
            if packed_seq_params is None:
                qkv = torch.cat([x.transpose(0, 1) for x in (query, key, value)], 2).flatten(2)
                return attention(qkv, heads, groups, **options).transpose(0, 1)  # attention keeps y: a copy would be kept too
            if getattr(packed_seq_params, "cu_seqlens_q_padded", None) is not None:
                raise NotImplementedError("cu_seqlens_q_padded must be None: documents are packed without padding between them")
            documents = packed_seq_params.cu_seqlens_q.to(torch.int32)
            qkv = torch.cat([query, key, value], 1).flatten(1)[None]
            return attention(qkv, heads, groups, cu_seqlens=documents, **options)[0]

    return CausalCoreAttention


@cache
def fused_qkv_self_attention() -> Any:
    """Return a SelfAttention that gives linear_qkv's output to `onepass.attention`. Its modules and checkpoints are stock's."""
    from megatron.core.tensor_parallel import checkpoint
    from megatron.core.transformer.attention import SelfAttention

    class FusedQKVSelfAttention(SelfAttention, Fused):  # type: ignore[misc]
        part, by = "self_attention", "attention of linear_qkv's output, rotation in it"

        def why_left(self) -> str | None:
            return why_split(self)

        def forward(
            self, hidden_states: Tensor, attention_mask: Tensor | None = None, *args: Any, rotary_pos_emb: Any = None,
            packed_seq_params: Any = None, **others: Any,
        ) -> Any:  # fmt: skip
            freqs = None if _skips_rope(self) else rotary_pos_emb
            if isinstance(freqs, tuple) and len(freqs) == 2 and freqs[0] is freqs[1]:
                freqs = freqs[0]
            plain = not args and all(value is None for value in others.values())
            if not plain or why_split(self) or not _are_plain(self, freqs, packed_seq_params, hidden_states):
                given = {"rotary_pos_emb": rotary_pos_emb, "packed_seq_params": packed_seq_params, **others}
                return super().forward(hidden_states, attention_mask, *args, **given)
            mixed_qkv, _ = self.linear_qkv(hidden_states)
            options = {"scale": self.core_attention.softmax_scale, "deterministic": self.config.deterministic_mode}
            options["interleaved"] = self.config.rotary_interleaved
            if packed_seq_params is not None:
                options["cu_seqlens"] = packed_seq_params.cu_seqlens_q.to(torch.int32)
            if freqs is not None:
                rows = mixed_qkv.shape[0] if packed_seq_params is None else freqs.shape[0]
                options["cos"], options["sin"] = table_pair(freqs, self.config.rotary_interleaved, rows)
            if isinstance(self.q_layernorm, HeadNorm):
                options |= {"q_weight": self.q_layernorm(None), "k_weight": self.k_layernorm(None)}
                options |= {name: getattr(self.q_layernorm, name) for name in ("eps", "zero_centered_gamma")}

            def attend(mixed_qkv: Tensor) -> Tensor:
                heads, groups = self.num_attention_heads_per_partition, self.num_query_groups_per_partition
                return attention(mixed_qkv.transpose(0, 1), heads, groups, by_group=True, **options)

            recomputes = self.checkpoint_core_attention and self.training
            y = checkpoint(attend, False, mixed_qkv) if recomputes else attend(mixed_qkv)
            return self.linear_proj(y.transpose(0, 1))

    return FusedQKVSelfAttention


def _skips_rope(layer: Any) -> bool:
    every = layer.config.no_rope_freq
    return bool(every and every[layer.layer_number - 1])


def why_split(layer: Any) -> str | None:
    """Why this SelfAttention has to take queries, keys and values apart, or None."""
    from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import _yarn_get_concentration_factor_from_config
    from megatron.core.transformer.enums import AttnMaskType

    config, core = layer.config, layer.core_attention
    if not isinstance(core, core_attention()):
        return f"core_attention is {type(core).__name__}"
    if layer.attn_mask_type not in (AttnMaskType.causal, AttnMaskType.padding_causal):
        return f"attn_mask_type is {layer.attn_mask_type.name}"
    if config.num_query_groups < layer.world_size:
        return f"num_query_groups is {config.num_query_groups} for {layer.world_size} tensor-parallel ranks"
    if core.attention_dropout.p and layer.training:
        return f"attention_dropout is {core.attention_dropout.p}"
    for name, plain in _PLAIN.items():
        if (value := getattr(config, name, plain)) != plain:
            return f"{name} is {value!r}"
    if _yarn_get_concentration_factor_from_config(config) != 1.0:
        return "YaRN scales the rotation's tables"
    norms = layer.q_layernorm, layer.k_layernorm
    if config.qk_layernorm and not all(isinstance(norm, HeadNorm) for norm in norms):
        return f"q_layernorm is {type(layer.q_layernorm).__name__}"
    return None


_PLAIN = {  # options of the config, and what the fused path takes
    "softmax_type": "vanilla", "window_size": None, "apply_query_key_layer_scaling": False, "attention_output_gate": False,
    "qk_clip": False, "log_max_attention_logit": False, "fused_single_qkv_rope": False, "test_mode": False,
    "fine_grained_activation_offloading": False, "context_parallel_size": 1,
}  # fmt: skip


def _are_plain(layer: Any, freqs: Any, packed: Any, hidden: Tensor) -> bool:
    """Whether the fused path takes this call's angles and documents."""
    from megatron.core.transformer.enums import AttnMaskType

    if freqs is None:
        if isinstance(layer.q_layernorm, HeadNorm):
            return False
    elif not isinstance(freqs, Tensor) or freqs.dim() != 4 or freqs.shape[1:3] != (1, 1):
        return False
    if packed is None:
        return bool(layer.attn_mask_type == AttnMaskType.causal)  # the other's mask says more
    if packed.qkv_format != "thd" or packed.cu_seqlens_q_padded is not None or hidden.shape[1] != 1:
        return False
    # Megatron's unfused rope takes angles for all tokens, not for the longest document, where there are as many
    several = packed.cu_seqlens_q.shape[0] > 2
    tokens = hidden.shape[0] * (layer.world_size if layer.config.sequence_parallel else 1)
    return freqs is None or layer.config.apply_rope_fusion or not several or freqs.shape[0] != tokens


def describe_fused(model: Any) -> Iterator[str]:
    """Yield a line for each way in which the model's attention and mixers run: the layers, and why some are Megatron's own."""
    layers = [module for module in model.modules() if isinstance(module, Fused)]
    for (part, by, reason), count in Counter((each.part, each.by, each.why_left()) for each in layers).items():
        yield f"  {part} of {count} layers: {by}" if reason is None else f"  left: {part} of {count} layers: {reason}"
