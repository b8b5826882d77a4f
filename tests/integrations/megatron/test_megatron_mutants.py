"""Each mutant is a small, plausible slip in what takes the places of Megatron-core's functions, and a test there must fail on it."""

import importlib
from contextlib import suppress

import pytest
import torch

pytest.importorskip("megatron.core", reason="megatron-core is not installed")
pytest.importorskip("triton")
from integrations.bindings import bindings_kept
from integrations.megatron import (
    test_experts,
    test_fusions,
    test_megatron,
    test_mixers,
    test_permute,
    test_self_attention,
    test_specs,
)

from onepass.integrations import megatron, seams
from onepass.testing.mutants import copy_package, mutate

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("on_cpu", "by_formula")]
ATTENTION, EXPERTS, FUSIONS, HEAD, INSTALL, MIXERS, MLP, NORMS, OPTIMIZER, PERMUTE, SPECS, WGRAD = (
    importlib.import_module(f"{megatron.__name__}.{name}")
    for name in (
        "attention",
        "experts",
        "fusions",
        "head",
        "install",
        "mixers",
        "mlp",
        "norms",
        "optimizer",
        "permute",
        "specs",
        "wgrad",
    )
)
GPT = (test_megatron.test_installed_and_by_spec_as_stock, "RMSNorm, swiglu", True)
UNDO = (test_megatron.test_undo_restores_and_twice_is_refused,)
ADAM = (test_megatron.test_adam_and_clipping_as_stock,)
WITHIN = test_megatron.test_the_activation_lies_within_the_product
HEADS = (test_megatron.test_apply_twice_undo_and_logits,)
QKV, SPLIT = test_self_attention.test_fused_as_stock, test_self_attention.test_split_as_stock
PLAIN, NORMED = test_self_attention.PLAIN, test_self_attention.NORMED
CALLS = test_self_attention.test_calls_that_are_split
PACKED = test_self_attention.test_packed_documents
PERMUTED = (test_permute.test_as_stock, test_permute.permuted, "top 2", True)
CHUNKS = (test_permute.test_chunks_as_stock, [4, 0, 7, 1, 3, 8], True, torch.float64)
BY_EXPERTS = (test_experts.test_as_stock, "swiglu", [3, 0, 5, 2])
DOCUMENTS, OTHER_DELTA = test_mixers.test_packed_documents_are_alone, test_mixers.test_other_gated_delta_nets_are_megatrons
PATCH = object()  # in the place of monkeypatch
DELTA = (test_mixers.test_a_gated_delta_net_is_as_stock, {}, {}, PATCH)
MAMBA = (test_mixers.test_a_mamba_mixer_is_as_stock, 2, PATCH)


CLAMPED = {
    "activation_func": torch.nn.functional.silu, "gated_linear_unit": True, "activation_func_clamp_value": 0.3, "glu_linear_offset": 0.5,
}  # fmt: skip


def as_stock(name):
    return test_fusions.test_as_stock, name, torch.float32


CONTEXT = test_fusions.test_rope_of_documents_over_context_parallel_ranks, False
MUTANTS = {  # name: module, function, what is there, what stands there instead, the test that must fail
    "the clamp forgotten": (FUSIONS, "bias_swiglu_impl", "clamp=clamp_value", "clamp=None", (test_fusions.test_fp8_store_and_clamp_after_the_bias,)),
    "fp8 and offload both": (FUSIONS, "_save", "if fp8 and offload", "if not fp8 and offload", (test_fusions.test_fp8_store_and_clamp_after_the_bias,)),
    "tokens of one weight": (FUSIONS, "weighted_bias_swiglu_impl", "token_weight=weights", "token_weight=None", as_stock("swiglu of experts")),
    "the linear offset forgotten": (FUSIONS, "weighted_bias_quick_geglu_impl", "float(linear_offset)", "0.0", as_stock("quick_geglu")),
    "gelu by erf": (FUSIONS, "bias_gelu_impl", '"gelu"', '"gelu_exact"', as_stock("gelu")),
    "geglu without its bias": (FUSIONS, "bias_geglu_impl", "input, bias,", "input, None,", as_stock("geglu")),
    "relu not squared": (FUSIONS, "weighted_squared_relu_impl", '"squared_relu"', '"relu"', as_stock("squared_relu")),
    "halves for neighbours": (FUSIONS, "fused_apply_rotary_pos_emb", "interleaved=interleaved)", "interleaved=False)", as_stock("rope, neighbours")),
    "cosines for sines": (FUSIONS, "table_pair", "angles.cos(), angles.sin()", "angles.sin(), angles.cos()", as_stock("rope")),
    "positions go on over documents": (FUSIONS, "fused_apply_rotary_pos_emb_thd", "cu_seqlens=ends", "cu_seqlens=None", as_stock("rope of documents")),
    "a rank's parts side by side": (FUSIONS, "_positions_of_parts", "2 * cp_size - 2 - cp_rank", "cp_rank", CONTEXT),
    "positions of other documents": (FUSIONS, "_positions_of_parts", "cp_rank, None if ends.is_inference() else ends._version", "cp_rank", CONTEXT),
    "old positions in inference": (FUSIONS, "_positions_of_parts", "not ends.is_inference() and ", "", CONTEXT),
    "lengths without mirror images": (FUSIONS, "fused_apply_rotary_pos_emb_thd", ".masked_fill(wrong, torch.nan)", "", CONTEXT),
    "heads turned lie by sequence": (FUSIONS, "fused_apply_rotary_pos_emb", "else rotated", "else rotated.transpose(0, 1).contiguous().transpose(0, 1)", as_stock("rope")),
    "start_positions ignored": (FUSIONS, "fused_apply_rotary_pos_emb", "start_positions is not None", "False", (test_fusions.test_what_rope_refuses,)),
    "dropout without the bias": (FUSIONS, "bias_dropout_add", "bias=bias, training", "bias=None, training", as_stock("dropout")),
    "no bias without gradients": (FUSIONS, "bias_dropout_add", "x.add_(bias)", "x.add_(0)", (test_fusions.test_dropout_adds_in_xs_memory_without_gradients,)),
    "operands of the weight's gradient swapped": (WGRAD, "_accumulate", "dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])", "x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])", as_stock("main_grad")),
    "the first microbatch not drained": (WGRAD, "drain_embedding_wgrad_compute", "in zip(inputs, grads,", "in zip(inputs[1:], grads[1:],", (test_megatron.test_drain, 3, PATCH)),
    "drained buffers keep": (WGRAD, "drain_embedding_wgrad_compute", "inputs.clear()", "pass", (test_megatron.test_drain, 3, PATCH)),
    "the head's own gradients not drained": (WGRAD, "drain_embedding_wgrad_compute", "deferred.flush()", "pass", (test_megatron.test_deferred_head,)),
    "weights of 16 bits only": (WGRAD, "wgrad_gemm_accum_fp32", "is not torch.float32", "is torch.float32", (test_megatron.test_gradient_accumulation_fusion,)),
    "labels as they lie": (HEAD, "head_loss", "labels.transpose(0, 1)", "labels.reshape(labels.shape[::-1])", GPT),
    "a tied head's weight not taken": (HEAD, "head_loss", "layer.weight if weight is None else weight", "layer.weight", GPT),
    "no logits without labels": (HEAD, "apply", "labels is not None and", "labels is None and", HEADS),
    "the output layer keeps ours": (HEAD, "AppliedHead.undo", 'del vars(self.model.output_layer)["forward"]', "pass", HEADS),
    "mu-P's scale twice": (HEAD, "apply", 'logits if call["wanted"] else their_scale(logits)', "their_scale(logits)", (test_megatron.test_mup_scales_logits_once,)),
    "deferral without our drain": (HEAD, "_deferred", "is not drain_embedding_wgrad_compute", "is None", (test_megatron.test_deferred_head,)),
    "fc1's bias forgotten": (MLP, "activation_row_parallel_linear", "activation_bias=activation_bias", "activation_bias=None", (test_megatron.test_installed_and_by_spec_as_stock, "LayerNorm, gelu", True)),
    "gelu that isn't fused by tanh": (MLP, "_tanh_gelu", "config.bias_activation_fusion and ", "", (WITHIN, test_megatron.KINDS["LayerNorm, gelu"], "gelu_exact")),
    "a dense MLP's clamp forgotten": (MLP, "activation_row_parallel_linear", '"clamp": self.config.activation_func_clamp_value', '"clamp": None', (WITHIN, CLAMPED, "swiglu")),
    "a fused quick_geglu's clamp forgotten": (MLP, "activation_row_parallel_linear", 'not fused or self.activation == "quick_geglu"', "not fused", (test_megatron.test_quick_geglu_of_a_dense_mlp,)),
    "fc2 not called as a module": (MLP, "activation_mlp", "return self.linear_fc2(", "return self.linear_fc2.forward(", (WITHIN, test_megatron.KINDS["RMSNorm, swiglu"], "swiglu")),
    "documents that see each other": (ATTENTION, "fused_qkv_self_attention", 'options["cu_seqlens"] = packed_seq_params.cu_seqlens_q.to(torch.int32)', "pass", (test_megatron.test_packed_documents_are_alone,)),
    "documents that see each other in core attention": (ATTENTION, "core_attention", "cu_seqlens=documents, ", "", (test_self_attention.test_core_attention_of_documents,)),
    "queries, keys and values one after another": (ATTENTION, "fused_qkv_self_attention", "by_group=True", "by_group=False", (QKV, PLAIN, {})),
    "heads of all ranks": (ATTENTION, "fused_qkv_self_attention", "self.num_query_groups_per_partition", "self.num_attention_heads_per_partition", (QKV, PLAIN, {})),
    "sequences for tokens": (ATTENTION, "fused_qkv_self_attention", "mixed_qkv.transpose(0, 1)", "mixed_qkv.reshape(*mixed_qkv.shape[1::-1], -1)", (QKV, PLAIN, {})),
    "scores of the fused path not scaled": (ATTENTION, "fused_qkv_self_attention", "self.core_attention.softmax_scale", "None", (QKV, PLAIN | {"add_qkv_bias": True, "softmax_scale": 0.2}, {})),
    "no rotation": (ATTENTION, "fused_qkv_self_attention", 'options["cos"], options["sin"] = ', "_ = ", (QKV, PLAIN, {})),
    "halves for neighbours in attention": (ATTENTION, "fused_qkv_self_attention", 'options["interleaved"] = self.config.rotary_interleaved', "pass", (QKV, PLAIN | {"rotary_interleaved": True}, {})),
    "angles of neighbours": (ATTENTION, "fused_qkv_self_attention", "(freqs, self.config.rotary_interleaved, rows)", "(freqs, False, rows)", (QKV, PLAIN | {"rotary_interleaved": True}, {})),
    "layers without rope turned": (ATTENTION, "_skips_rope", "layer.layer_number - 1", "layer.layer_number - 2", (QKV, PLAIN | {"no_rope_freq": [1, 0]}, {})),
    "k's weight for q's": (ATTENTION, "fused_qkv_self_attention", '"q_weight": self.q_layernorm(None)', '"q_weight": self.k_layernorm(None)', (QKV, NORMED, {})),
    "heads' norm with an epsilon of its own": (ATTENTION, "fused_qkv_self_attention", '("eps", "zero_centered_gamma")', '("zero_centered_gamma",)', (QKV, NORMED | {"layernorm_zero_centered_gamma": True, "layernorm_epsilon": 1e-2}, {"rotary_percent": 0.5})),
    "heads' weights not centred": (ATTENTION, "fused_qkv_self_attention", '("eps", "zero_centered_gamma")', '("eps",)', (QKV, NORMED | {"layernorm_zero_centered_gamma": True, "layernorm_epsilon": 1e-2}, {"rotary_percent": 0.5})),
    "the norms of heads not called": (ATTENTION, "fused_qkv_self_attention", '"k_weight": self.k_layernorm(None)', '"k_weight": self.k_layernorm.weight', (test_self_attention.test_modules_and_keys_are_stocks, NORMED)),
    "linear_qkv not called as a module": (ATTENTION, "fused_qkv_self_attention", "self.linear_qkv(hidden", "self.linear_qkv.forward(hidden", (test_self_attention.test_modules_and_keys_are_stocks, PLAIN)),
    "core attention not recomputed": (ATTENTION, "fused_qkv_self_attention", "self.checkpoint_core_attention and self.training", "False", (test_self_attention.test_core_attention_recomputed, PLAIN, PATCH)),
    "an inference's cache ignored": (ATTENTION, "fused_qkv_self_attention", "not args and all(value is None for value in others.values())", "True", (test_self_attention.test_inference_is_megatrons,)),
    "k not turned where q alone is": (ATTENTION, "fused_qkv_self_attention", " and freqs[0] is freqs[1]", "", (CALLS, "angles for q alone")),
    "a pair of angles split": (ATTENTION, "fused_qkv_self_attention", "freqs[0] is freqs[1]", "False", (CALLS, "angles for q alone")),
    "angles of the first sequence": (ATTENTION, "_are_plain", " or freqs.shape[1:3] != (1, 1)", "", (CALLS, "angles for each sequence")),
    "angles of all tokens taken for documents'": (ATTENTION, "_are_plain", "not several or freqs.shape[0] != tokens", "True", (PACKED, PLAIN, (5, 1, 7), 13)),
    "one document split": (ATTENTION, "_are_plain", "shape[0] > 2", "shape[0] > 1", (PACKED, PLAIN, (13,), 13)),
    "padding between documents ignored": (ATTENTION, "_are_plain", " or packed.cu_seqlens_q_padded is not None", "", (test_self_attention.test_packed_with_padding_is_refused_as_before,)),
    "dropout ignored": (ATTENTION, "why_split", "core.attention_dropout.p and layer.training", "False", (SPLIT, PLAIN | {"attention_dropout": 0.1}, "attention_dropout is 0.1", PATCH)),
    "dropout outside of training": (ATTENTION, "why_split", " and layer.training", "", (test_self_attention.test_dropout_splits_in_training_alone,)),
    "options ignored": (ATTENTION, "why_split", "_PLAIN.items()", "()", (SPLIT, PLAIN | {"attention_output_gate": True}, "attention_output_gate is True", PATCH)),
    "LayerNorm of heads taken for RMSNorm": (ATTENTION, "why_split", "config.qk_layernorm and not", "False and not", (SPLIT, test_megatron.KINDS["qk norm, geglu, GQA"], "q_layernorm is LayerNorm", PATCH)),
    "no account of attention": (HEAD, "_account", "*describe_fused(model)", "", (test_self_attention.test_the_account,)),
    "no residual given back": (NORMS, "ResidualNorm.__new__", "has_residual=True", "has_residual=False", (test_megatron.test_a_norm_gives_back_the_residual,)),
    "Adam as it was": (OPTIMIZER, "with_fused_adam", "fused=True", "fused=False", ADAM),
    "the report names Megatron's": (OPTIMIZER, "with_fused_adam", ', assigned=("__doc__",)', "", ADAM),
    "a norm of squares": (OPTIMIZER, "multi_tensor_l2_norm", ".norm().view(1)", ".sum().view(1)", ADAM),
    "gradients not scaled in place": (OPTIMIZER, "multi_tensor_scale", "torch._foreach_mul_(target, scale)", "pass", ADAM),
    "gradients not scaled elsewhere": (OPTIMIZER, "multi_tensor_scale", "a * scale if scale != 1.0 else a", "a", ADAM),
    "an epsilon of its own": (NORMS, "MegatronNorm.__new__", "hidden_size, eps, device", "hidden_size, 1e-2, device", GPT),
    "every norm a LayerNorm": (NORMS, "MegatronNorm", "cls.kinds[config.normalization](", 'cls.kinds["LayerNorm"](', GPT),
    "Apex's norm left": (INSTALL, "_rebind_norms", '"FusedLayerNorm", FusedLayerNorm', '"HAVE_FUSED_LAYER_NORM", True', (test_fusions.test_a_norm_by_apexs_name,)),
    "Apex's norm is the other": (NORMS, "FusedLayerNorm", '{"LayerNorm": LayerNorm}', '{"LayerNorm": RMSNorm, "RMSNorm": RMSNorm}', as_stock("Apex's norm")),
    "scores not scaled": (ATTENTION, "core_attention", '"scale": self.softmax_scale', '"scale": 1.0', (SPLIT, test_megatron.KINDS["qk norm, geglu, GQA"], "q_layernorm is LayerNorm", PATCH)),
    "the product's norm has an epsilon of its own": (SPECS, "norm_column_parallel_linear", "eps=self.config.layernorm_epsilon", "eps=1e-2", GPT),
    "a flag ignored": (SPECS, "_refuse", "if getattr(config, name, None)", "if getattr(config, name, None) and False", (test_megatron.test_flags_that_specs_refuse, "fused_residual_rmsnorm")),
    "experts in every layer": (SPECS, "_moe_pattern", "int(layer % every == 0)", "1", (test_specs.test_some_layers_have_experts, 2, False)),
    "each stage has the first layers": (SPECS, "_layers_of_stage", "range(first, first + ", "range(0, ", (test_specs.test_a_stage_has_its_own_layers,)),
    "an expert's rows end where they begin": (EXPERTS, "grouped_sequential_mlp", "cumsum(0, dtype=torch.int32)", "roll(1, 0).to(torch.int32).cumsum(0, dtype=torch.int32)", BY_EXPERTS),
    "rows of one weight": (EXPERTS, "grouped_sequential_mlp", "self.options, probs, how", "self.options, None, how", BY_EXPERTS),
    "a bias without its row's weight": (EXPERTS, "grouped_sequential_mlp", "bias, ends, probs,", "bias, ends, None,", (test_experts.test_as_stock, "biases", [3, 0, 5, 2])),
    "experts' layers not called as modules": (EXPERTS, "grouped_sequential_mlp", "self.linear_fc1()", "self.linear_fc1.forward()", (test_experts.test_inputs_are_kept_and_not_activations,)),
    "weights of the input twice": (EXPERTS, "grouped_sequential_mlp", "(x.dtype), None", "(x.dtype), probs", (test_experts.test_as_stock, "weights of the input", [3, 0, 5, 2])),
    "experts' clamp forgotten": (EXPERTS, "grouped_sequential_mlp", "gate = config.activation_func_clamp_value,", "gate = None,", (test_experts.test_as_stock, "clamp and offset", [3, 0, 5, 2])),
    "experts' offset forgotten": (EXPERTS, "grouped_sequential_mlp", "float(config.glu_linear_offset) or None", "None", (test_experts.test_as_stock, "clamp and offset", [3, 0, 5, 2])),
    "stacked experts without Megatron's marks": (EXPERTS, "StackedLinear.__init__", "vars(stacked).update(vars(first))", "pass", (test_experts.test_a_models_experts, True)),
    "the divided dimension as it was": (EXPERTS, "StackedLinear.__init__", "first.partition_dim + 1", "first.partition_dim", (test_experts.test_a_models_experts, True)),
    "grouped without being asked": (EXPERTS, "with_grouped_experts", "if moe_use_grouped_gemm else sequential", "", (test_experts.test_a_models_experts, False)),
    "activations that nobody has": (EXPERTS, "build_experts", "fused_activation(config) is None or ", "", (test_experts.test_other_activations_are_megatrons,)),
    "the next expert's state": (EXPERTS, "_split_state", "stacked[name][e]", "stacked[name][e - 1]", (test_experts.test_a_state_dict_is_stocks,)),
    "experts that are missing": (EXPERTS, "_stack_state", "all(key in state for key in keys)", "keys[0] in state", (test_experts.test_a_state_dict_is_stocks,)),
    "shards of the first expert's": (EXPERTS, "_stacked_shards", "data=own", "data=t.detach()[0]", (test_experts.test_shards_are_stocks, {})),
    "shards by the model's key": (EXPERTS, "_stacked_shards", "key=head + tail", "key=root + tail", (test_experts.test_shards_are_stocks, {})),
    "one key of all experts": (EXPERTS, "_stacked_shards", "key=head + tail", "key=key", (test_experts.test_shards_are_stocks, {"singleton_local_shards": True})),
    "shards of no parameter": (EXPERTS, "_stacked_shards", "root + name, parameter,", "root + name, parameter.detach(),", (test_experts.test_shards_are_stocks, {})),
    "local experts left": (INSTALL, "_rebind_experts", 'f"LocalSpecProvider.{name}", with_grouped_experts(stock)', 'f"LocalSpecProvider.{name}", stock', (test_experts.test_a_models_experts, True)),
    "one of Megatron's two quick_gelu": (MLP, "fused_activation", "quick_gelu_of_geglu: \"quick_geglu\"", "", (test_experts.test_as_stock, "quick_geglu, fused", [3, 0, 5, 2])),
    "a for b": (MIXERS, "fused_gated_delta_net", "qkv, gate, b, a = made", "qkv, gate, a, b = made", DELTA),
    "documents of a delta net see each other": (MIXERS, "fused_gated_delta_net", "documents_of(packed_seq_params, made)", "None", (DOCUMENTS, False, PATCH)),
    "padding between documents is of none": (MIXERS, "documents_of", "packed.cu_seqlens_q if padded is None else padded", "packed.cu_seqlens_q", (DOCUMENTS, True, PATCH)),
    "rows after the last document are of none": (MIXERS, "documents_of", "torch.cat([ends, ends.new_full((1,), rows.shape[0])])", "ends", (DOCUMENTS, False, PATCH)),
    "every packing is of documents": (MIXERS, "documents_of", ' or packed.qkv_format != "thd"', "", (DOCUMENTS, False, PATCH)),
    "a gated norm with an epsilon of its own": (MIXERS, "fused_gated_delta_net", '("eps", "zero_centered_gamma")', '("zero_centered_gamma",)', DELTA),
    "a gated norm not centred": (MIXERS, "fused_gated_delta_net", '("eps", "zero_centered_gamma")', '("eps",)', (test_mixers.test_a_gated_delta_net_is_as_stock, {"layernorm_zero_centered_gamma": True}, {}, PATCH)),
    "q and k always of length one": (MIXERS, "fused_gated_delta_net", ", self.use_qk_l2norm", "", (test_mixers.test_a_gated_delta_net_is_as_stock, {}, {"use_qk_l2norm": False}, PATCH)),
    "a convolution without its bias": (MIXERS, "fused_gated_delta_net", "self.conv1d.bias", "None", (test_mixers.test_a_gated_delta_net_is_as_stock, {}, {"conv_bias": True}, PATCH)),
    "a mixer's sequences for tokens": (MIXERS, "fused_gated_delta_net", "y.flatten(2).transpose(0, 1)", "y.flatten(2).reshape(*made.shape[:2], -1)", DELTA),
    "an adapter passed by": (MIXERS, "_why_left", "type(out_proj) is not gated_norm_row_parallel_linear()", "False", (test_mixers.test_an_adapter_around_out_proj_gets_its_input, PATCH)),
    "SiLU for every activation": (MIXERS, "fused_gated_delta_net", "self.act_fn is not F.silu", "False", (OTHER_DELTA, {"activation_func": torch.nn.functional.relu}, "activation_func is relu", PATCH)),
    "any convolution": (MIXERS, "_why_left", "width not in WIDTHS", "False", (OTHER_DELTA, {"linear_conv_kernel_dim": 9}, "the convolution's width is 9", PATCH)),
    "out_proj not called as a module": (MIXERS, "fused_gated_delta_net", "self.out_proj(", "self.out_proj.forward(", (test_mixers.test_modules_are_called, PATCH)),
    "Megatron's inference not asked": (MIXERS, "fused_gated_delta_net", "inference_context is not None or ", "", (test_mixers.test_inference_of_a_gated_delta_net_is_megatrons, PATCH)),
    "documents of Mamba see each other": (MIXERS, "fused_mamba_mixer", "documents = documents_of(packed_seq_params, made)", "documents = None", (test_mixers.test_packed_documents_of_mamba_are_alone, PATCH)),
    "states that pass to the next document": (MIXERS, "fused_mamba_mixer", "dt_softplus=True, cu_seqlens=documents,", "dt_softplus=True,", (test_mixers.test_packed_documents_of_mamba_are_alone, PATCH)),
    "B for C": (MIXERS, "fused_mamba_mixer", "x, B, C = causal", "x, C, B = causal", MAMBA),
    "z that is convolved": (MIXERS, "fused_mamba_mixer", "(inner, inner + 2 * states, heads)", "(heads, inner + 2 * states, inner)", MAMBA),
    "steps as they are": (MIXERS, "fused_mamba_mixer", "dt_softplus=True", "dt_softplus=False", MAMBA),
    "nothing passed by the scan": (MIXERS, "fused_mamba_mixer", "D=self.D,", "", MAMBA),
    "the gate after the norm": (MIXERS, "fused_mamba_mixer", '"norm_before_gate": False', '"norm_before_gate": True', MAMBA),
    "one group of the norm": (MIXERS, "fused_mamba_mixer", "self.norm.group_size", "None", MAMBA),
    "Mamba's inference not asked": (MIXERS, "fused_mamba_mixer", "inference_params is not None or ", "", (test_mixers.test_inference_of_a_mamba_mixer_is_megatrons, PATCH)),
    "a Mamba without a norm": (MIXERS, "fused_mamba_mixer", " or not self.rmsnorm", "", (test_mixers.test_other_mamba_mixers_are_megatrons, "rmsnorm", False, "rmsnorm False", PATCH)),
    "weights of rows that aren't sorted": (PERMUTE, "_weights_of_rows", "row_map[: rows.shape[0]]", "row_map[: rows.shape[0]].sort().values", PERMUTED),
    "rows multiplied by the next one's weight": (PERMUTE, "_weights_of_rows", "row_map[: rows.shape[0]]", "row_map[: rows.shape[0]].roll(1)", (test_permute.test_as_stock, test_permute.unpermuted, "top 2", True)),
    "sums of the product's type": (PERMUTE, "fused_unpermute", ".to(permuted_tokens.dtype)", "", (test_permute.test_sixteen_bits_are_rounded_once, test_permute.unpermuted, True)),
    "any number of rows": (PERMUTE, "fused_permute", "int(num_out_tokens) < 0", "False", (test_permute.test_the_number_of_rows_is_asked_for, -1)),
    "chunks that come from where they go": (PERMUTE, "_chunk_routes", "_rows_of(sizes, order, moved, x.shape[0])", "_rows_of(moved, order.argsort(), sizes, x.shape[0])", CHUNKS),
    "chunks that go where they come from": (PERMUTE, "_chunk_routes", "_rows_of(moved, order.argsort(), sizes, x.shape[0])", "_rows_of(sizes, order, moved, x.shape[0])", CHUNKS),
    "chunks that begin at their end": (PERMUTE, "_rows_of", "(sizes.cumsum(0) - sizes)[order]", "sizes.cumsum(0)[order]", CHUNKS),
    "Transformer Engine still asked for": (INSTALL, "_rebind_permute", '"HAVE_TE", True', '"HAVE_TE", False', PERMUTED),
    "Transformer Engine's permutations replaced": (INSTALL, "_rebind_permute", "theirs.fused_permute is not None", "False", (test_permute.test_transformer_engines_are_left, PATCH)),
    "activations left": (INSTALL, "_rebind_fusions", "seams.rebind(module, function.__name__, function)", "pass", UNDO),
    "logits of the config's name rounded": (INSTALL, "_with_linear_head", "fp32_logits=True", "fp32_logits=False", (test_megatron.test_linear_cross_entropy_rounds_no_logits,)),
    "gradient accumulation still off": (INSTALL, "_rebind_wgrad", '"_grad_accum_fusion_available", True', '"_grad_accum_fusion_available", False', (test_megatron.test_gradient_accumulation_fusion,)),
    "the drain left": (INSTALL, "_rebind_wgrad", '"drain_embedding_wgrad_compute", drain', '"drain_embedding_wgrad", drain', (test_megatron.test_drain, 1, PATCH)),
    "copies left": (seams, "Seams._bind", "copies and isinstance", "False and isinstance", UNDO),
    "an installed package's version alone": (seams, "_version", 'getattr(importlib.import_module(root), "__version__", None)', "None", (test_megatron.test_without_metadata, PATCH)),
    "undo leaves copies": (seams, "Seams._restore", "setattr(copy, name, binding.before)", "pass", UNDO),
    "undo leaves modules": (seams, "Binding.assign", "self.owner.pop(self.name, None)", "pass", (test_megatron.test_gradient_accumulation_fusion,)),
}  # fmt: skip


@pytest.fixture
def judge(monkeypatch):
    """Runs a test with another package in the place of onepass's, and binds Megatron's names again."""
    monkeypatch.setenv("ONEPASS_BACKEND", "torch")  # a mutant has a use_backend of its own

    def run(package, test, *given):
        models = [importlib.import_module("megatron.core.models.gpt").GPTModel]  # their __init__ is bound too
        with suppress(ImportError):  # 0.17
            models.append(importlib.import_module("megatron.core.models.hybrid.hybrid_model").HybridModel)
        with bindings_kept("megatron.core", *models), monkeypatch.context() as patch:
            patch.setattr(test_megatron, "megatron", package)
            patch.setattr(test_megatron, "SeamError", package.install.__globals__["Seams"].undo.__globals__["SeamError"])
            patch.setattr(test_self_attention, "megatron", package)
            patch.setattr(test_fusions, "megatron", package)
            patch.setattr(test_specs, "megatron", package)
            patch.setattr(test_experts, "megatron", package)
            patch.setattr(test_permute, "megatron", package)
            patch.setattr(test_mixers, "megatron", package)
            test(*(patch if each is PATCH else each for each in given))

    return run


def test_the_package_passes(judge):
    copy = copy_package(megatron)
    for call in {repr(call): call for *_, call in MUTANTS.values()}.values():
        judge(copy, *call)


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants(name, judge):
    module, function, old, new, call = MUTANTS[name]
    mutant = mutate(module, function, old, new, entry=megatron)
    with pytest.raises((Exception, pytest.fail.Exception)):
        judge(mutant, *call)
