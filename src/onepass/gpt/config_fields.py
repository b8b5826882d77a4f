"""ConfigFields: the fields of a GPT's configuration, and the values that follow from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from onepass.gpt.settings import Settings, setting
from onepass.ops.activation.activations import GATES
from onepass.runtime.fp8_recipe import FP8Recipe

_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_GATED = {gate: name for name, gate in GATES.items()}
_SCALINGS = {"delayed": "delayed", "tensorwise": "current", "rowwise": "row"}  # of an FP8Recipe
_MULTIPLE = 256  # the default ffn_hidden_size of a gated MLP is rounded up to it


@dataclass(frozen=True, kw_only=True)
class ConfigFields(Settings):
    """The fields of `Config`, which adds checks, counts, variants and files."""

    # ---- shape ----
    num_layers: int = setting(4, "transformer blocks")
    hidden_size: int = setting(128, "size of the residual stream")
    ffn_hidden_size: int | None = setting(
        None, "size of the MLP's activation; 4 x hidden_size, or 8/3 of it with gated_linear_unit"
    )
    num_attention_heads: int = setting(4, "heads of the queries")
    num_query_groups: int | None = setting(None, "heads of keys and values, each shared by several queries; one a query")
    kv_channels: int | None = setting(None, "size of a head; hidden_size / num_attention_heads")
    vocab_size: int = setting(2048, "tokens of the vocabulary")
    max_position_embeddings: int = setting(1024, "longest sequence")
    position_embedding_type: Literal["rope", "learned_absolute", "none"] = setting("rope", "how positions are told apart")
    rotary_base: float = setting(10000.0, "base of the rotation's wavelengths")
    rotary_percent: float = setting(1.0, "part of each head that is rotated")
    rotary_interleaved: bool = setting(False, "rotate neighbours rather than the two halves")
    use_rope_scaling: bool = setting(False, "stretch long wavelengths, as Llama 3 does for long sequences")
    rope_scaling_factor: float = setting(8.0, "by which the longest wavelengths are stretched")
    rope_scaling_low_freq_factor: float = setting(
        1.0, "waves that many times in the original length, or less, are stretched fully"
    )
    rope_scaling_high_freq_factor: float = setting(4.0, "waves that many times in the original length, or more, are left alone")
    rope_scaling_original_max_position_embeddings: int = setting(8192, "longest sequence before the stretching")
    untie_embeddings_and_output_weights: bool = setting(False, "give the head a weight of its own, not the embedding's")
    add_bias_linear: bool = setting(False, "give linear layers a bias")
    add_qkv_bias: bool = setting(False, "give the linear layer of queries, keys and values a bias, whatever add_bias_linear says")
    qk_layernorm: bool = setting(False, "normalise each head's queries and keys")
    final_logit_softcapping: float | None = setting(None, "cap of the logits' size")
    init_method_std: float = setting(
        0.02, "spread of the weights' start; of those that end a block divided by sqrt(2 num_layers)"
    )
    params_dtype: Literal["fp32", "bf16", "fp16"] = setting("fp32", "type of the parameters")

    # ---- norms ----
    normalization: Literal["RMSNorm", "LayerNorm"] = setting("RMSNorm", "the norms")
    layernorm_epsilon: float = setting(1e-5, "their epsilon")
    layernorm_zero_centered_gamma: bool = setting(False, "keep their weights as the distance from 1")
    fp32_norm_weights: bool = setting(
        True, "norms' parameters in fp32, whatever params_dtype says: in bf16 a weight of 1 moves in steps of .004 to .008"
    )
    norm_fusion: bool = setting(True, "norms by onepass, with the residual added in the same pass; otherwise PyTorch's")
    persist_layer_norm: bool = setting(
        True, "Megatron's choice between two kernels of Apex. onepass has one for every hidden size, whatever this says"
    )
    memory_efficient_layer_norm: bool = setting(False, "keep no statistics of a norm for backward")
    norm_linear_fusion: bool = setting(True, "a norm and the linear layer after it as one op, which keeps the norm's input only")

    # ---- MLP ----
    gated_linear_unit: bool = setting(True, "gate the MLP: SwiGLU where activation_func is silu")
    activation_func: Literal["gelu", "gelu_exact", "silu", "quick_gelu", "relu", "squared_relu"] = setting(
        "silu", "the MLP's activation; gelu is the tanh form"
    )
    activation_func_clamp_value: float | None = setting(None, "cap of a gate, and of the size of what it gates")
    glu_linear_offset: float = setting(0.0, "added to what a gate gates")
    bias_activation_fusion: bool = setting(True, "the MLP's bias, activation and second linear layer as one op")
    activation_func_fp8_input_store: bool = setting(False, "keep the activation's input for backward in 8 bits")
    cpu_offloading: bool = setting(False, "keep the activation's input for backward in the host's memory")
    cpu_offloading_activations: bool = setting(True, "what cpu_offloading moves; there is nothing else it could")

    # ---- eight bits ----
    fp8_format: Literal["hybrid", "e4m3"] | None = setting(
        None, "run the blocks' products in eight bits: hybrid has e4m3 forward and e5m2 for gradients"
    )
    fp8_recipe: Literal["delayed", "tensorwise", "rowwise"] = setting(
        "delayed", "where scales come from: the steps before, the tensor itself, or each row (then weight gradients in 16 bits)"
    )
    fp8_margin: int = setting(0, "powers of two that scales leave free")
    fp8_amax_history_len: int = setting(16, "steps that delayed scales come from")
    fp8_amax_compute_algo: Literal["max", "most_recent"] = setting("max", "what delayed scales take of those steps")
    fp8_wgrad: bool = setting(True, "run the products for weight gradients in eight bits too")
    first_last_layers_bf16: bool = setting(False, "keep blocks at the start and the end in 16 bits")
    num_layers_at_start_in_bf16: int = setting(1, "how many first_last_layers_bf16 keeps at the start")
    num_layers_at_end_in_bf16: int = setting(1, "how many at the end")

    # ---- mixture of experts ----
    num_moe_experts: int | None = setting(None, "experts in place of each MLP")
    moe_router_topk: int = setting(2, "experts that see a token")
    moe_ffn_hidden_size: int | None = setting(None, "size of an expert's activation; the MLP's")
    moe_aux_loss_coeff: float = setting(0.0, "weight of the loss that spreads tokens evenly over the experts")

    # ---- dropout, positions, residual ----
    hidden_dropout: float = setting(0.0, "part of each block's output, and of the embedding, that is dropped")
    attention_dropout: float = setting(0.0, "part of the attention's weights that is dropped")
    bias_dropout_fusion: bool = setting(True, "bias, dropout and residual in one pass")
    apply_rope_fusion: bool = setting(True, "rotate queries and keys in one kernel")
    attention_fusion: bool = setting(
        True, "rotation and attention as one op, deterministic by construction; PyTorch's where it can't, or is slower"
    )

    # ---- loss ----
    cross_entropy_loss_fusion: bool = setting(True, "the loss by onepass; otherwise PyTorch's, of all logits in fp32")
    cross_entropy_fusion_impl: Literal["native", "linear"] = setting(
        "linear", "linear: head and loss as one op, without a tensor of all logits; native: a loss of logits"
    )
    fp32_logits: bool = setting(False, "do not round the head's logits to params_dtype, in the loss")
    label_smoothing: float = setting(0.0, "part of each target that is spread over the vocabulary")
    z_loss: float = setting(0.0, "weight of the squared logsumexp in the loss")
    mtp_num_layers: int | None = setting(None, "depths of multi-token prediction: tokens that are foretold beside the next one")
    mtp_loss_scaling_factor: float = setting(0.1, "weight of their average loss")
    mtp_use_repeated_layer: bool = setting(False, "give all depths one layer's weights")

    # ---- gradients and memory ----
    gradient_accumulation_fusion: bool = setting(True, "add gradients to main_grad in the op that makes them")
    defer_embedding_wgrad_compute: bool = setting(False, "make the head's weight gradient in the pipeline's flush")
    wgrad_deferral_limit: int = setting(0, "microbatches whose gradient is put off so; 0 is all")
    recompute_granularity: Literal["selective", "full"] | None = setting(
        None, "what backward computes again: selective the products before attention and activation, full whole blocks"
    )
    recompute_num_layers: int | None = setting(None, "the first blocks of each pipeline stage, for which it does; all")

    # ---- parallel ----
    tensor_model_parallel_size: int = setting(1, "ranks that share each layer")
    sequence_parallel: bool = setting(False, "divide what these ranks would have alike along the sequence")
    pipeline_model_parallel_size: int = setting(1, "ranks that have one stage of the layers each")
    num_layers_in_first_pipeline_stage: int | None = setting(
        None, "blocks of the first of these ranks; those that are left are divided evenly over the others"
    )
    num_layers_in_last_pipeline_stage: int | None = setting(
        None, "blocks of the last of them, which has the head; those that are left are divided evenly over the others"
    )
    virtual_pipeline_model_parallel_size: int | None = setting(None, "stages of a rank, each with as many of its blocks; one")
    num_layers_per_virtual_pipeline_stage: int | None = setting(
        None, "blocks of a stage, where a rank has several stages: another way to say how many"
    )

    # ---- derived values ----

    def precision(self, layer: int) -> FP8Recipe | None:
        """Return how the products of a block run in eight bits, or None where they don't."""
        if self.fp8_format is None:
            return None
        if self.first_last_layers_bf16:
            first, end = self.num_layers_at_start_in_bf16, self.num_layers - self.num_layers_at_end_in_bf16
            if not first <= layer < end:
                return None
        return FP8Recipe(
            scaling=_SCALINGS[self.fp8_recipe],
            format=self.fp8_format,
            margin=self.fp8_margin,
            amax_history_len=self.fp8_amax_history_len,
            amax_compute_algo=self.fp8_amax_compute_algo,
            wgrad=self.fp8_wgrad,
        )

    @property
    def norms_in_attention(self) -> bool:
        """Whether the norms of q's and k's heads are ones that `attention` has with its rotation."""
        rotates = self.position_embedding_type == "rope" and self.apply_rope_fusion
        return self.qk_layernorm and self.normalization == "RMSNorm" and self.norm_fusion and rotates

    @property
    def ffn_size(self) -> int:
        """ffn_hidden_size, or its default: 4 x hidden_size, or for a gated MLP 8/3 of it, rounded up to a multiple of 256."""
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        if not self.gated_linear_unit:
            return 4 * self.hidden_size
        return -(-8 * self.hidden_size // (3 * _MULTIPLE)) * _MULTIPLE

    @property
    def expert_size(self) -> int:
        """moe_ffn_hidden_size, or its default: the MLP's size."""
        return self.ffn_size if self.moe_ffn_hidden_size is None else self.moe_ffn_hidden_size

    @property
    def query_groups(self) -> int:
        """num_query_groups, or its default: a group for each query head."""
        return self.num_attention_heads if self.num_query_groups is None else self.num_query_groups

    @property
    def head_size(self) -> int:
        """kv_channels, or its default: hidden_size / num_attention_heads."""
        return self.hidden_size // self.num_attention_heads if self.kv_channels is None else self.kv_channels

    @property
    def rotary_size(self) -> int:
        """How many elements of each head are rotated."""
        return int(self.head_size * self.rotary_percent)

    @property
    def qkv_bias(self) -> bool:
        return self.add_bias_linear or self.add_qkv_bias

    @property
    def sequence_ranks(self) -> int:
        """How many ranks share each sequence."""
        return self.tensor_model_parallel_size if self.sequence_parallel else 1

    @property
    def stages_per_rank(self) -> int:
        """virtual_pipeline_model_parallel_size, or its default: what num_layers_per_virtual_pipeline_stage implies, else 1."""
        if self.virtual_pipeline_model_parallel_size is not None:
            return self.virtual_pipeline_model_parallel_size
        each = self.num_layers_per_virtual_pipeline_stage
        return 1 if each is None else self.num_layers // (self.pipeline_model_parallel_size * each)

    @property
    def loss_without_logits(self) -> bool:
        """Whether the head computes the loss from hidden states."""
        return self.cross_entropy_loss_fusion and self.cross_entropy_fusion_impl == "linear"

    @property
    def mtp_layers(self) -> int:
        """How many layers the depths of multi-token prediction have."""
        return min(self.mtp_num_layers or 0, 1) if self.mtp_use_repeated_layer else self.mtp_num_layers or 0

    @property
    def tied(self) -> bool:
        """Whether the output layer shares the embedding's weight."""
        return not self.untie_embeddings_and_output_weights

    @property
    def activation(self) -> str:
        """The activation's name in `onepass.bias_activation`."""
        return _GATED[self.activation_func] if self.gated_linear_unit else self.activation_func

    @property
    def activation_save(self) -> str:
        """How `onepass.bias_activation` saves its input for backward."""
        return "fp8" if self.activation_func_fp8_input_store else "offload" if self.cpu_offloading else "input"

    @property
    def dtype(self) -> torch.dtype:
        return _TYPES[self.params_dtype]

    @property
    def norm_dtype(self) -> torch.dtype:
        return torch.float32 if self.fp32_norm_weights else self.dtype
