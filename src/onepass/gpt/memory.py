"""The bytes that a block keeps for backward and allocates in it, by arithmetic. `tests/gpt/test_memory.py` compares with a model.

    tensor                  elements a token                    kept by
    residual stream         2 hidden, and each norm's sums      norm_linear, which makes the normalised rows again
    queries, keys, values   (heads + 2 groups) head             attention, which rotates queries and keys in place
    attention's output      heads head, and a sum a head        attention, and linear_proj as its input
    MLP                     2 ffn of a gated one, else ffn      activation_linear, which makes the activation again
    experts                 the same of topk rows a token, the normalised rows, and what routes them

Tensor-parallel ranks share all but the stream, which sequence_parallel divides too. With recompute_granularity "selective" a
block keeps neither queries, keys and values nor the MLP's input, and with "full" nothing but its own input.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from onepass.gpt.config import Config
from onepass.runtime.saved import FP8_RUN
from onepass.runtime.sizes import ceil_div

_FP32 = 4  # bytes
_QKV = "queries, keys, values"


class BlockMemory(NamedTuple):
    """Bytes of one block on one rank.

    kept: for backward, by tensor. A recomputed block keeps its input.
    again: what backward of this block computes again.
    backward: gradients and other tensors of backward beside these, at most.
    """

    kept: dict[str, int]
    again: int
    backward: int


def rank_config(config: Config) -> Config:
    """Return the configuration of the part of a model that one tensor-parallel rank has."""
    ranks = config.tensor_model_parallel_size
    return config.replace(
        tensor_model_parallel_size=1,
        sequence_parallel=False,
        kv_channels=config.head_size,
        num_attention_heads=config.num_attention_heads // ranks,
        num_query_groups=config.query_groups // ranks,
        ffn_hidden_size=max(1, config.ffn_size // ranks),
        moe_ffn_hidden_size=config.expert_size // ranks if config.num_moe_experts else None,
        vocab_size=ceil_div(config.vocab_size, ranks),
    )


def uncounted(config: Config) -> Iterator[str]:
    """Yield settings whose memory is not counted, each with the value that is."""
    wanted = {
        "norm_fusion": True,
        "memory_efficient_layer_norm": False,
        "attention_fusion": True,
        "attention_dropout": 0.0,
        "bias_activation_fusion": True,
        "cross_entropy_loss_fusion": True,
        "cross_entropy_fusion_impl": "linear",
        "gradient_accumulation_fusion": True,
        "cpu_offloading": False,
        "mtp_num_layers": None,
        "pipeline_model_parallel_size": 1,
    }
    if config.position_embedding_type == "rope":
        wanted["apply_rope_fusion"] = True
    if config.add_bias_linear or config.hidden_dropout:
        wanted["bias_dropout_fusion"] = True
    if config.qk_layernorm:
        wanted |= {"position_embedding_type": "rope", "normalization": "RMSNorm"}
    for name, value in wanted.items():
        if getattr(config, name) != value:
            yield f"{name} must be {value}, but is {getattr(config, name)}"


def block_memory(config: Config, tokens: int, layer: int = 0) -> BlockMemory:
    """Return the memory of block `layer` for a micro batch of so many tokens."""
    kept, again = _kept(config, tokens), _kept_of_products(config, tokens)
    mlp, attention = _mlp_backward(config, tokens), _attention_backward(config, tokens)
    if config.recompute_granularity is None or layer >= (config.recompute_num_layers or config.num_layers):
        return BlockMemory(kept, 0, max(mlp, attention))
    if config.recompute_granularity == "full":
        stream = stream_bytes(config, tokens)
        return BlockMemory({"input": stream}, sum(kept.values()) - stream, max(mlp, attention))
    left = {name: size - again.get(name, 0) for name, size in kept.items()}
    backward = max(mlp + sum(again.values()) - again[_QKV], attention + again[_QKV])
    return BlockMemory({name: size for name, size in left.items() if size}, 0, backward)


def _kept_of_products(config: Config, tokens: int) -> dict[str, int]:
    """Return what a block keeps of the products that selective recomputation makes again."""
    own, width = rank_config(config), config.dtype.itemsize
    stored = own.activation_func_fp8_input_store
    rows, size = (tokens * own.moe_router_topk, own.expert_size) if own.num_moe_experts else (tokens, own.ffn_size)
    name = "experts" if own.num_moe_experts else "MLP"
    return {_QKV: tokens * _sizes(config)[1] * width, name: 0 if stored else _activation_kept(own, rows, size)}


def recomputed_share(config: Config, sequence: float) -> float:
    """Return the FLOPs of what backward computes again, over those of a step. A block's last product is not computed again."""
    if config.recompute_granularity is None:
        return 0.0
    experts, hidden = config.moe_router_topk if config.num_moe_experts else 1, config.hidden_size
    size = experts * (config.expert_size if config.num_moe_experts else config.ffn_size)
    if config.recompute_granularity == "selective":
        up = 0 if config.activation_func_fp8_input_store else (2 if config.gated_linear_unit else 1) * size
        qkv = (config.num_attention_heads + 2 * config.query_groups) * config.head_size
        again = 2.0 * hidden * (qkv + up)
    else:
        two, one = (config.replace(num_layers=layers, recompute_num_layers=None) for layers in (2, 1))
        again = (two.flops_per_token(sequence) - one.flops_per_token(sequence)) / 3 - 2 * hidden * size
    return (config.recompute_num_layers or config.num_layers) * again / config.flops_per_token(sequence)


def stream_bytes(config: Config, tokens: int) -> int:
    """Return the bytes of the residual stream on one rank."""
    return tokens // config.sequence_ranks * config.hidden_size * config.dtype.itemsize


def ends_bytes(config: Config, tokens: int) -> int:
    """Return what is kept outside of blocks: the final norm's input and output, and a few numbers a token."""
    return 2 * stream_bytes(config, tokens) + _statistics(config, tokens) + tokens * (_FP32 + 2 * 8)


def _statistics(config: Config, tokens: int) -> int:
    return tokens // config.sequence_ranks * _FP32 * (2 if config.normalization == "LayerNorm" else 1)


def _sizes(config: Config) -> tuple[int, int]:
    """Return this rank's columns of attention's output and of queries, keys and values."""
    own = rank_config(config)
    heads = own.num_attention_heads * own.head_size
    return heads, heads + 2 * own.query_groups * own.head_size


def _kept(config: Config, tokens: int) -> dict[str, int]:
    """Return what a block keeps that is not recomputed."""
    own, width = rank_config(config), config.dtype.itemsize
    stream, statistics = stream_bytes(config, tokens), _statistics(config, tokens)
    heads, qkv = _sizes(config)
    apart = 0 if config.norm_linear_fusion else stream  # the normalised rows, a linear layer's input
    rotated = heads + own.query_groups * own.head_size if config.norms_in_attention else 0  # beside queries and keys as they came
    kept = {
        "residual stream": 2 * (stream + statistics) + apart + (0 if config.num_moe_experts else apart),
        _QKV: tokens * (qkv + rotated) * width,
        "attention's output": tokens * (heads * width + own.num_attention_heads * _FP32),
    }
    if config.num_moe_experts:
        return kept | {"experts": _experts_kept(own, tokens)}
    return kept | {"MLP": _activation_kept(own, tokens, own.ffn_size)}


def _activation_kept(own: Config, rows: int, size: int) -> int:
    parts = 2 if own.gated_linear_unit else 1
    if own.activation_func_fp8_input_store:
        return rows * parts * (size + ceil_div(size, FP8_RUN))
    return rows * parts * size * own.dtype.itemsize


def _experts_kept(own: Config, tokens: int) -> int:
    """Return what router and experts keep: rows sorted by expert, and the router's operands in fp32, but for bf16's."""
    assert own.num_moe_experts is not None
    experts, hidden, topk = own.num_moe_experts, own.hidden_size, own.moe_router_topk
    width = own.dtype.itemsize
    router = (tokens + experts) * hidden * _FP32 if own.params_dtype == "fp16" else 0
    routes = tokens * (experts * _FP32 + topk * (8 + 3 * _FP32)) + experts * _FP32
    return router + routes + tokens * hidden * width + _activation_kept(own, tokens * topk, own.expert_size)


def _mlp_backward(config: Config, tokens: int) -> int:
    """Return the bytes where the MLP's activation has its gradient: the stream's, the activation's and linear_fc1's output's."""
    own, width = rank_config(config), config.dtype.itemsize
    parts = 2 if config.gated_linear_unit else 1
    if config.num_moe_experts:
        row = (parts + 1) * own.expert_size + config.hidden_size
        return stream_bytes(config, tokens) + tokens * config.moe_router_topk * row * width
    return stream_bytes(config, tokens) + tokens * (parts + 1) * own.ffn_size * width


def _attention_backward(config: Config, tokens: int) -> int:
    """Return the bytes of attention's backward: the gradients of its output and input, and queries' sums in fp32."""
    heads, qkv = _sizes(config)
    return stream_bytes(config, tokens) + tokens * ((heads + qkv) * config.dtype.itemsize + heads * _FP32)
