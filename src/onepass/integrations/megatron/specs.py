"""Layer specs of Megatron-core with onepass's modules. Checkpoints have Transformer Engine's keys."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from onepass.integrations.megatron.attention import core_attention, fused_qkv_self_attention
from onepass.integrations.megatron.experts import with_grouped_experts
from onepass.integrations.megatron.fusions import get_bias_dropout_add
from onepass.integrations.megatron.mixers import fused_gated_delta_net, fused_mamba_mixer, gated_norm_row_parallel_linear
from onepass.integrations.megatron.mlp import activation_mlp, activation_row_parallel_linear, fused_activation
from onepass.integrations.megatron.norms import MegatronHeadNorm, MegatronNorm, ResidualNorm
from onepass.ops.norm.norm_linear import norm_linear

_NORMS = {"RMSNorm": "rms_norm", "LayerNorm": "layer_norm"}


@cache
def norm_column_parallel_linear() -> Any:
    """Return the class that stands for Transformer Engine's LayerNormColumnParallelLinear: its keys, its arguments."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    class NormColumnParallelLinear(ColumnParallelLinear):  # type: ignore[misc]
        def __init__(self, input_size: int, output_size: int, **options: Any) -> None:
            for name in ("gather_output", "is_expert", "disable_grad_reduce"):
                if options.get(name):
                    raise NotImplementedError(f"{name} must be False for a norm within a product")
            super().__init__(input_size, output_size, **options)
            norm = MegatronNorm(self.config, input_size, self.config.layernorm_epsilon)
            self.layer_norm_weight = norm.weight
            self.layer_norm_bias = getattr(norm, "bias", None)

        def forward(self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None) -> Any:
            if runtime_gather_output:
                raise NotImplementedError("runtime_gather_output must be False for a norm within a product")
            y = norm_linear(
                input_,
                self.layer_norm_weight,
                self.weight if weight is None else weight,
                None if self.skip_bias_add else self.bias,
                norm=_NORMS[self.config.normalization],
                norm_bias=self.layer_norm_bias,
                eps=self.config.layernorm_epsilon,
                zero_centered_gamma=self.config.layernorm_zero_centered_gamma,
                tp_group=self.tp_group if self.tp_group.size() > 1 else None,
                sequence_parallel=self.sequence_parallel,
            )
            return y, self.bias if self.skip_bias_add else None

    return NormColumnParallelLinear


@cache
def spec_provider(fuse_norms: bool = True) -> Any:
    """Return a BackendSpecProvider: Megatron's LocalSpecProvider with our norms, and attention with the norms in products, and
    grouped experts."""
    from megatron.core.models.backends import LocalSpecProvider

    class OnepassSpecProvider(LocalSpecProvider):  # type: ignore[misc]
        def fuse_layernorm_and_linear(self) -> bool:
            return fuse_norms

        def column_parallel_layer_norm_linear(self) -> Any:
            return norm_column_parallel_linear() if fuse_norms else None

        def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False) -> Any:
            return ResidualNorm if has_residual else MegatronNorm

        def core_attention(self) -> Any:
            return core_attention() if fuse_norms else super().core_attention()

        if fuse_norms:
            grouped_mlp_modules = with_grouped_experts(LocalSpecProvider.grouped_mlp_modules)

    return OnepassSpecProvider


def gpt_layer_spec(config: Any, *, vp_stage: int | None = None, pp_rank: int | None = None) -> Any:
    """Return a TransformerLayer's ModuleSpec: norms and dense MLPs' activations inside of the products after them, attention
    of linear_qkv's output with the rotation in it, and without scores in memory.

    Where moe_layer_freq leaves layers dense it returns this stage's TransformerBlockSubmodules, as get_gpt_decoder_block_spec
    does, of which vp_stage and pp_rank are arguments.
    """
    _refuse(config)
    if config.num_moe_experts is None or config.moe_layer_freq == 1:
        return _gpt_layer(config, dense=config.num_moe_experts is None)
    dense, experts = (_gpt_layer(config, dense=each) for each in (True, False))
    layers = [experts if has_experts else dense for has_experts in _moe_pattern(config)]
    (block,) = _modules("transformer.transformer_block")
    here = [layers[each] for each in _layers_of_stage(config, vp_stage, pp_rank)]
    return block.TransformerBlockSubmodules(layer_specs=here, layer_norm=MegatronNorm)


def _gpt_layer(config: Any, dense: bool) -> Any:
    (layer,) = _modules("transformer.transformer_layer")
    identity, spec = _identity_and_spec()
    return spec(
        module=layer.TransformerLayer,
        submodules=layer.TransformerLayerSubmodules(
            self_attention=_self_attention(config),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=identity if dense else MegatronNorm,
            mlp=_mlp(config, dense),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def _moe_pattern(config: Any) -> list[int]:
    """Return for each layer whether it has experts, as Megatron reads moe_layer_freq."""
    every = config.moe_layer_freq
    pattern = [int(layer % every == 0) for layer in range(config.num_layers)] if isinstance(every, int) else list(every)
    if len(pattern) != config.num_layers or not set(pattern) <= {0, 1}:
        raise ValueError(f"moe_layer_freq must be a number, or 0 or 1 for each of {config.num_layers} layers, but is {every!r}")
    return pattern


def _layers_of_stage(config: Any, vp_stage: int | None, pp_rank: int | None) -> Iterable[int]:
    block, layer, enums = _modules("transformer.transformer_block", "transformer.transformer_layer", "transformer.enums")
    stage = {"vp_stage": vp_stage, "pp_rank": pp_rank}
    layout = config.pipeline_model_parallel_layout
    if layout is not None:
        ids: Iterable[int] = layout.get_layer_id_list(layer_type=enums.LayerType.decoder, **stage)
        return ids
    first = layer.get_transformer_layer_offset(config, **stage)
    return range(first, first + block.get_num_layers_to_build(config, **stage))


_WHY_NONE = {  # HybridStackSubmodules' layers that onepass doesn't build
    "dsa_layer": "D, sparse attention,", "mla_layer": "+, multi-latent attention,", "moe_layer": "E, without num_moe_experts,",
}  # fmt: skip


def hybrid_stack_spec(config: Any) -> Any:
    """Return a HybridModel's stack: attention (*), Mamba (M), gated delta net (G), MLP (-) and MoE (E) layers. Others raise where
    the model builds them."""
    block, layer, ssm = _modules("models.hybrid.hybrid_block", "transformer.transformer_layer", "ssm.mlp_layer")
    mamba, mixer, gdn = _modules("ssm.mamba_layer", "ssm.mamba_mixer", "ssm.gated_delta_net")
    _identity, spec = _identity_and_spec()
    _refuse(config)
    backend, dense = spec_provider()(), {"mlp_bda": get_bias_dropout_add}
    in_proj, out_proj = backend.column_parallel_layer_norm_linear(), gated_norm_row_parallel_linear()

    def mixes(mixing: Any) -> Any:
        submodules = layer.TransformerLayerSubmodules(self_attention=mixing, self_attn_bda=get_bias_dropout_add)
        return spec(module=layer.TransformerLayer, submodules=submodules)

    scan = mixer.MambaMixerSubmodules(in_proj=in_proj, out_proj=out_proj)
    delta = gdn.GatedDeltaNetSubmodules(in_proj=in_proj, out_norm=MegatronHeadNorm, out_proj=out_proj)
    layers = {
        "mamba_layer": spec(
            module=mamba.MambaLayer,
            submodules=mamba.MambaLayerSubmodules(
                mixer=spec(module=fused_mamba_mixer(), submodules=scan), mamba_bda=get_bias_dropout_add
            ),
        ),
        "gdn_layer": mixes(spec(module=fused_gated_delta_net(), submodules=delta)),
        "attention_layer": mixes(_self_attention(config)),
        "mlp_layer": spec(
            module=ssm.MLPLayer, submodules=layer.TransformerLayerSubmodules(mlp=_mlp(config, dense=True), **dense)
        ),
    }
    if config.num_moe_experts:
        experts = layer.TransformerLayerSubmodules(pre_mlp_layernorm=MegatronNorm, mlp=_mlp(config, dense=False), **dense)
        layers["moe_layer"] = spec(module=layer.MoETransformerLayer, submodules=experts)
    for field in dataclasses.fields(block.HybridStackSubmodules):
        if field.name.endswith("_layer") and field.name not in layers:  # Megatron would build IdentityOp
            layers[field.name] = _no_layer(_WHY_NONE.get(field.name, field.name))
    return spec(module=block.HybridStack, submodules=block.HybridStackSubmodules(**layers))


def _no_layer(what: str) -> type:
    class NoLayer:
        def __init__(self, *_: Any, **__: Any) -> None:
            raise NotImplementedError(f"hybrid_layer_pattern must have no layer of {what} for onepass's specs")

    return NoLayer


def _self_attention(config: Any) -> Any:
    theirs, enums = _modules("transformer.attention", "transformer.enums")
    identity, spec = _identity_and_spec()
    backend = spec_provider()()
    norm = MegatronHeadNorm if config.qk_layernorm else identity
    return spec(
        module=fused_qkv_self_attention(),
        params={"attn_mask_type": enums.AttnMaskType.causal},
        submodules=theirs.SelfAttentionSubmodules(
            linear_qkv=backend.column_parallel_layer_norm_linear(),
            core_attention=backend.core_attention(),
            linear_proj=backend.row_parallel_linear(),
            q_layernorm=norm,
            k_layernorm=norm,
        ),
    )


def _mlp(config: Any, dense: bool) -> Any:
    (theirs,) = _modules("models.gpt.gpt_layer_specs")
    experts = {} if dense else {"num_experts": config.num_moe_experts, "moe_grouped_gemm": config.moe_grouped_gemm}
    made = theirs.get_mlp_module_spec_for_backend(backend=spec_provider()(), **experts)
    if experts or fused_activation(config) is None:
        return made
    if isinstance(made, partial):  # from 0.18 on
        made.keywords["submodules"].linear_fc2 = activation_row_parallel_linear()
        return partial(activation_mlp().as_mlp_submodule, **made.keywords)
    made.submodules.linear_fc2 = activation_row_parallel_linear()
    made.module = activation_mlp()
    return made


def _modules(*names: str) -> list[Any]:
    return [importlib.import_module("megatron.core." + name) for name in names]


def _identity_and_spec() -> tuple[Any, Any]:
    identity, spec = _modules("transformer.identity_op", "transformer.spec_utils")
    return identity.IdentityOp, spec.ModuleSpec


def _refuse(config: Any) -> None:
    """Name the flags that stock would honour and these specs would not."""
    for name in (
        "multi_latent_attention", "qk_l2_norm", "fused_residual_rmsnorm", "use_te_activation_func",
        "experimental_attention_variant", "use_kitchen",
    ):  # fmt: skip
        if getattr(config, name, None):
            raise NotImplementedError(f"{name} must not be set for onepass's specs, but is {getattr(config, name)!r}")
    clamped = getattr(config, "activation_func_clamp_value", None) is not None
    if clamped and config.bias_activation_fusion and config.activation_func is torch.nn.functional.silu:
        raise NotImplementedError(
            "activation_func_clamp_value must be None with bias_activation_fusion: Megatron's MLP doesn't pass it to the SwiGLU"
        )
