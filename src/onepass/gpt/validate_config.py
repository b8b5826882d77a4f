"""Checks for contradicting model settings. Only what the ops or the model's shape cannot support is rejected."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from onepass.gpt.config_fields import ConfigFields
from onepass.runtime.fp8_recipe import LARGEST_MARGIN, LONGEST_HISTORY

_SIZES = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "vocab_size",
    "max_position_embeddings", "num_moe_experts", "moe_router_topk", "moe_ffn_hidden_size", "recompute_num_layers",
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage", "virtual_pipeline_model_parallel_size", "num_layers_per_virtual_pipeline_stage",
    "rope_scaling_original_max_position_embeddings", "mtp_num_layers",
)  # fmt: skip
_ABOVE_ZERO = (
    "layernorm_epsilon", "rotary_base", "rope_scaling_factor", "rope_scaling_low_freq_factor", "rope_scaling_high_freq_factor",
    "final_logit_softcapping", "activation_func_clamp_value",
)  # fmt: skip
_NOT_BELOW_ZERO = ("z_loss", "mtp_loss_scaling_factor", "moe_aux_loss_coeff", "init_method_std")
_FP32 = torch.finfo(torch.float32)
_ENDS = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
FP8_OPTIONS = (  # which change nothing without fp8_format
    "fp8_recipe", "fp8_margin", "fp8_amax_history_len", "fp8_amax_compute_algo", "fp8_wgrad", "first_last_layers_bf16",
    "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16",
)  # fmt: skip
_OF_DELAYED = ("fp8_amax_history_len", "fp8_amax_compute_algo")
_IN_BF16 = ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")
_VIRTUAL = ("virtual_pipeline_model_parallel_size", "num_layers_per_virtual_pipeline_stage")


def validate_config(config: ConfigFields) -> Iterator[str]:
    """Yield a message for each contradiction: fields, values, what they must be. Later checks assume that earlier ones pass."""
    for part in (
        _ranges, _heads, _positions, _norms, _mlp, _fp8, _experts, _loss, _gradients, _tensor_parallel, _pipeline, _recompute,
    ):  # fmt: skip
        yield from part(config)


def _ranges(c: ConfigFields) -> Iterator[str]:
    for name in _SIZES:
        value = getattr(c, name)
        if value is not None and value < 1:
            yield f"{name} must be at least 1, but is {value}"
    for name in _ABOVE_ZERO:
        value = getattr(c, name)
        if value is not None and not 0 < value < math.inf:
            yield f"{name} must be finite and above 0, but is {value}"
        elif value is not None and not _FP32.tiny <= value <= _FP32.max:
            yield f"{name} must be from {_FP32.tiny:.2g} to {_FP32.max:.2g}, which fp32 holds, but is {value}"
    for name in _NOT_BELOW_ZERO:
        if not 0 <= getattr(c, name) < math.inf:
            yield f"{name} must be finite and at least 0, but is {getattr(c, name)}"
    for name in ("hidden_dropout", "attention_dropout"):
        if not 0 <= getattr(c, name) < 1:
            yield f"{name} must be from 0 to below 1, but is {getattr(c, name)}"
    if not 0 <= c.label_smoothing <= 1:
        yield f"label_smoothing must be from 0 to 1, but is {c.label_smoothing}"
    if not math.isfinite(c.glu_linear_offset):
        yield f"glu_linear_offset must be finite, but is {c.glu_linear_offset}"
    if c.wgrad_deferral_limit < 0:
        yield f"wgrad_deferral_limit must be at least 0, where 0 is all microbatches, but is {c.wgrad_deferral_limit}"


def _heads(c: ConfigFields) -> Iterator[str]:
    if c.kv_channels is None and c.hidden_size % c.num_attention_heads:
        yield (
            f"hidden_size must be a multiple of num_attention_heads, {c.num_attention_heads}, where kv_channels is None, "
            f"but is {c.hidden_size}"
        )
    if c.num_attention_heads % c.query_groups:
        yield f"num_attention_heads must be a multiple of num_query_groups, {c.query_groups}, but is {c.num_attention_heads}"


def _positions(c: ConfigFields) -> Iterator[str]:
    rope = c.position_embedding_type == "rope"
    if not 0 < c.rotary_percent <= 1:
        yield f"rotary_percent must be above 0 and at most 1, but is {c.rotary_percent}"
    elif rope and (c.rotary_size % 2 or not c.rotary_size):
        yield (
            f"rotary_percent must leave an even number to rotate of a head's {c.head_size} (kv_channels), at least 2, "
            f"but is {c.rotary_percent}: that is {c.rotary_size}"
        )
    if c.use_rope_scaling and not rope:
        yield f"use_rope_scaling must be false without position_embedding_type 'rope', but that is {c.position_embedding_type!r}"
    if c.use_rope_scaling and c.rope_scaling_low_freq_factor >= c.rope_scaling_high_freq_factor:
        yield (
            f"rope_scaling_low_freq_factor must be below rope_scaling_high_freq_factor, {c.rope_scaling_high_freq_factor}, "
            f"but is {c.rope_scaling_low_freq_factor}"
        )


def _norms(c: ConfigFields) -> Iterator[str]:
    if c.memory_efficient_layer_norm and not c.norm_fusion:
        yield "memory_efficient_layer_norm must be false without norm_fusion, as PyTorch's norms can't do it, but is true"


def _mlp(c: ConfigFields) -> Iterator[str]:
    if c.gated_linear_unit and c.activation_func == "squared_relu":
        gates = "'gelu', 'gelu_exact', 'silu', 'quick_gelu' or 'relu'"
        yield f"activation_func must be {gates} with gated_linear_unit, but is 'squared_relu'"
    if not c.gated_linear_unit and c.activation_func_clamp_value is not None:
        yield f"activation_func_clamp_value must be None without gated_linear_unit, but is {c.activation_func_clamp_value}"
    if not c.gated_linear_unit and c.glu_linear_offset:
        yield f"glu_linear_offset must be 0 without gated_linear_unit, but is {c.glu_linear_offset}"
    for name in ("activation_func_fp8_input_store", "cpu_offloading"):
        if getattr(c, name) and not c.bias_activation_fusion:
            yield f"{name} must be false without bias_activation_fusion, which does it, but is true"
    if c.activation_func_fp8_input_store and c.cpu_offloading:
        yield (
            "activation_func_fp8_input_store and cpu_offloading are both true, but one must be false: the activation's input "
            "is kept in one way"
        )
    if c.cpu_offloading and not c.cpu_offloading_activations:
        yield "cpu_offloading_activations must be true with cpu_offloading, which moves nothing else, but is false"


def _fp8(c: ConfigFields) -> Iterator[str]:
    idle = dict.fromkeys(FP8_OPTIONS, "without fp8_format") if c.fp8_format is None else {}
    if c.fp8_format is not None:
        for name, most, least in (("fp8_margin", LARGEST_MARGIN, 0), ("fp8_amax_history_len", LONGEST_HISTORY, 1)):
            if not least <= getattr(c, name) <= most:
                yield f"{name} must be from {least} to {most}, but is {getattr(c, name)}"
        if c.fp8_recipe != "delayed":
            idle |= dict.fromkeys(_OF_DELAYED, f"with fp8_recipe {c.fp8_recipe!r}, whose scales come from no steps before")
        if c.fp8_recipe == "rowwise":
            idle["fp8_margin"] = "with fp8_recipe 'rowwise', whose scales leave nothing free"
        if not c.first_last_layers_bf16:
            idle |= dict.fromkeys(_IN_BF16, "without first_last_layers_bf16")
    for name, why in idle.items():
        value, default = getattr(c, name), getattr(type(c), name)
        if value != default:
            yield f"{name} must be {_said(default)} {why}, but is {_said(value)}"
    if c.first_last_layers_bf16:
        for name in _IN_BF16:
            if getattr(c, name) < 0:
                yield f"{name} must be at least 0, but is {getattr(c, name)}"
        start, end = (getattr(c, name) for name in _IN_BF16)
        if start + end >= c.num_layers:
            yield (
                f"num_layers_at_start_in_bf16 and num_layers_at_end_in_bf16 must be below num_layers, {c.num_layers}, together, "
                f"but are {start} and {end}: no block would run in eight bits"
            )


def _said(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _experts(c: ConfigFields) -> Iterator[str]:
    if c.num_moe_experts is None:
        if c.moe_ffn_hidden_size is not None:
            yield f"moe_ffn_hidden_size must be None without num_moe_experts, but is {c.moe_ffn_hidden_size}"
        if c.moe_aux_loss_coeff:
            yield f"moe_aux_loss_coeff must be 0 without num_moe_experts, but is {c.moe_aux_loss_coeff}"
        return
    if c.add_bias_linear:
        yield "add_bias_linear must be false with num_moe_experts, as one activation of all their rows has one bias, but is true"
    if c.moe_router_topk > c.num_moe_experts:
        yield f"moe_router_topk must be at most num_moe_experts, {c.num_moe_experts}, but is {c.moe_router_topk}"
    if c.moe_aux_loss_coeff and c.pipeline_model_parallel_size > 1:
        yield (
            f"moe_aux_loss_coeff must be 0 with pipeline_model_parallel_size {c.pipeline_model_parallel_size}, but is "
            f"{c.moe_aux_loss_coeff}: a stage hands on hidden states, and no loss"
        )


def _loss(c: ConfigFields) -> Iterator[str]:
    if c.fp32_logits and not c.loss_without_logits:
        yield (
            "fp32_logits must be false without cross_entropy_loss_fusion and cross_entropy_fusion_impl 'linear', which keep no "
            "logits, but is true"
        )
    if c.mtp_use_repeated_layer and c.mtp_num_layers is None:
        yield "mtp_use_repeated_layer must be false without mtp_num_layers, but is true"


def _gradients(c: ConfigFields) -> Iterator[str]:
    if not c.defer_embedding_wgrad_compute:
        if c.wgrad_deferral_limit:
            yield f"wgrad_deferral_limit must be 0 without defer_embedding_wgrad_compute, but is {c.wgrad_deferral_limit}"
        return
    if not c.gradient_accumulation_fusion:
        yield "gradient_accumulation_fusion must be true with defer_embedding_wgrad_compute, which adds to main_grad, but is not"
    if c.pipeline_model_parallel_size == 1:
        yield (
            "pipeline_model_parallel_size must be above 1 with defer_embedding_wgrad_compute, as there is no flush without a "
            "pipeline, but is 1"
        )


def _tensor_parallel(c: ConfigFields) -> Iterator[str]:
    ranks = c.tensor_model_parallel_size
    if c.sequence_parallel and ranks == 1:
        yield "sequence_parallel must be false with tensor_model_parallel_size 1: there are no ranks to divide a sequence over"
    sizes = {"num_attention_heads": c.num_attention_heads, "num_query_groups": c.query_groups}
    sizes |= {"moe_ffn_hidden_size": c.expert_size} if c.num_moe_experts else {"ffn_hidden_size": c.ffn_size}
    for name, size in sizes.items():
        if size % ranks:
            yield f"{name} must be a multiple of tensor_model_parallel_size, {ranks}, but is {size}"


def _pipeline(c: ConfigFields) -> Iterator[str]:
    ranks = c.pipeline_model_parallel_size
    if ranks > c.num_layers:
        yield f"pipeline_model_parallel_size must be at most num_layers, {c.num_layers}, but is {ranks}"
    if ranks > 1 and c.tied:
        yield (
            "untie_embeddings_and_output_weights must be true with pipeline_model_parallel_size above 1, but is false: the first "
            "stage and the last would each have the weight, and a part of its gradient"
        )
    stages = {name: getattr(c, name) for name in (*_ENDS, *_VIRTUAL) if getattr(c, name) is not None}
    if ranks == 1:
        for name, value in stages.items():
            yield f"{name} must be None with pipeline_model_parallel_size 1, where there are no stages, but is {value}"
        return
    ends = {name: stages[name] for name in _ENDS if name in stages}
    yield from _virtual_stages(c, next(iter(ends), None))
    yield from _uneven_stages(c, ends) if ends else _even_stages(c)


def _virtual_stages(c: ConfigFields, end: str | None) -> Iterator[str]:
    each, number = c.num_layers_per_virtual_pipeline_stage, c.virtual_pipeline_model_parallel_size
    if each is not None and number is not None:
        yield (
            f"num_layers_per_virtual_pipeline_stage must be None with virtual_pipeline_model_parallel_size {number}, "
            f"from which it follows, but is {each}"
        )
    if each is not None and end is not None:
        yield (
            f"num_layers_per_virtual_pipeline_stage must be None with {end}, but is {each}: ranks with more layers would have "
            "more stages; virtual_pipeline_model_parallel_size gives all ranks as many"
        )


def _even_stages(c: ConfigFields) -> Iterator[str]:
    for name in _VIRTUAL:
        multiple = c.pipeline_model_parallel_size * (getattr(c, name) or 0)
        if multiple and c.num_layers % multiple:
            yield f"num_layers must be a multiple of {multiple}, pipeline_model_parallel_size times {name}, but is {c.num_layers}"


def _uneven_stages(c: ConfigFields, ends: dict[str, int]) -> Iterator[str]:
    """Check that the other ranks get equally many layers, and that each rank's layers divide evenly into its stages."""
    others, left = c.pipeline_model_parallel_size - len(ends), c.num_layers - sum(ends.values())
    said = " and ".join(f"{name} {number}" for name, number in ends.items())
    if left and not others:
        yield f"{said} must be num_layers, {c.num_layers}, together: the pipeline has no other ranks"
    if others and (left < others or left % others):
        yield (
            f"{said} must leave each of the pipeline's other ranks, {others}, as many layers, and at least one, "
            f"but of num_layers {c.num_layers} there are {left} left"
        )
    middle = {f"what {said} leaves each of the pipeline's other ranks": left // others} if others else {}
    for name, number in (ends | middle).items():
        if number % c.stages_per_rank:
            yield f"{name} must be a multiple of virtual_pipeline_model_parallel_size, {c.stages_per_rank}, but is {number}"


def _recompute(c: ConfigFields) -> Iterator[str]:
    if c.recompute_num_layers is None:
        return
    if c.recompute_granularity is None:
        yield f"recompute_num_layers must be None without recompute_granularity, but is {c.recompute_num_layers}"
    elif c.recompute_num_layers > c.num_layers:
        yield f"recompute_num_layers must be at most num_layers, {c.num_layers}, but is {c.recompute_num_layers}"
