"""`install` rebinds functions of megatron.core to onepass's."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from copy import copy
from typing import Any, Literal

from onepass.integrations.megatron import fusions as ours
from onepass.integrations.megatron.experts import refusing_stacks, with_grouped_experts
from onepass.integrations.megatron.head import apply
from onepass.integrations.megatron.norms import FusedLayerNorm, MegatronNorm, WrappedTorchNorm
from onepass.integrations.megatron.optimizer import multi_tensor_l2_norm, multi_tensor_scale, with_fused_adam
from onepass.integrations.megatron.permute import PERMUTATIONS
from onepass.integrations.megatron.specs import spec_provider
from onepass.integrations.megatron.wgrad import MODULE, drain_embedding_wgrad_compute, wgrad_module
from onepass.integrations.seams import Seams
from onepass.integrations.tested import TESTED

_CORE = "megatron.core."


def install(
    *, wgrad: bool = True, fusions: bool = True, experts: bool = True, permute: bool = True, norms: bool = True,
    dropout: bool = True, rope: bool = True, loss: bool = True, optimizer: bool = True, batch_invariant: bool = False,
) -> Seams:  # fmt: skip
    """Rebind functions of megatron.core, in every module that has them. Call it before models are built.

    Args:
        wgrad: fused_weight_gradient_mlp_cuda, so that gradient_accumulation_fusion runs without Apex, and the drain of deferred
            embedding gradients. An Apex that is installed is left alone.
        fusions: the bias + activation functions behind bias_activation_fusion.
        experts: those of local specs with moe_grouped_gemm, by grouped products.
        permute: the functions behind moe_permute_fusion. Those of Transformer Engine are left alone.
        norms: RMSNorm and LayerNorm in local specs, also with sequence_parallel, zero-centred or persistent.
        dropout: bias, dropout and residual.
        rope: rotary positions behind apply_rope_fusion.
        loss: cross-entropy behind cross_entropy_loss_fusion; cross_entropy_fusion_impl="linear" makes no logits.
        optimizer: Adam and clipping in one pass each. Those of Transformer Engine and Apex are left alone.
        batch_invariant: turn `onepass.batch_invariant()` on, for the whole process, until `undo`. Attention must be onepass's
            (`gpt_layer_spec`), and Transformer Engine's layers are not.

    Returns:
        Seams: `str` says what was replaced, and what was left and why; `undo` restores every binding.

    Raises:
        SeamError: a name has moved in this version, or is onepass's already. Megatron is then as it was.
    """
    seams = Seams("megatron-core", TESTED["megatron-core"][-1], "megatron.core")
    with seams.all_or_nothing():
        for wanted, rebind in (
            (wgrad, _rebind_wgrad), (fusions, _rebind_fusions), (experts, _rebind_experts), (permute, _rebind_permute),
            (norms, _rebind_norms), (dropout, _rebind_dropout), (rope, _rebind_rope), (loss, _rebind_loss),
            (optimizer, _rebind_optimizer),
        ):  # fmt: skip
            if wanted:
                rebind(seams)
        if batch_invariant:
            seams.make_invariant()
    return seams


def _rebind_wgrad(seams: Seams) -> None:
    layers = importlib.import_module(_CORE + "tensor_parallel.layers")
    if layers._grad_accum_fusion_available:
        seams.leave(MODULE, "Apex's is there")
    else:
        module = wgrad_module()
        seams.rebind_item(sys.modules, MODULE, module, MODULE)
        seams.rebind(layers.__name__, MODULE, module, create=True)
        seams.rebind(layers.__name__, "_grad_accum_fusion_available", True)
    seams.rebind(_CORE + "utils", "drain_embedding_wgrad_compute", drain_embedding_wgrad_compute)


def _rebind_fusions(seams: Seams) -> None:
    for module, functions in ours.ACTIVATIONS.items():
        for function in functions:
            seams.rebind(module, function.__name__, function)


def _rebind_experts(seams: Seams) -> None:
    backends, name = importlib.import_module(_CORE + "models.backends"), "grouped_mlp_modules"
    stock = getattr(backends.LocalSpecProvider, name)
    seams.rebind(backends.__name__, f"LocalSpecProvider.{name}", with_grouped_experts(stock))
    optimizers, name = importlib.import_module(_CORE + "optimizer"), "_get_megatron_emerging_optimizer"
    if not hasattr(optimizers, name):  # in 0.17
        optimizers, name = importlib.import_module(_CORE + "optimizer.muon"), "get_megatron_muon_optimizer"
    seams.rebind(optimizers.__name__, name, refusing_stacks(getattr(optimizers, name)))


def _rebind_permute(seams: Seams) -> None:
    theirs = importlib.import_module(_CORE + "transformer.moe.moe_utils")
    if theirs.fused_permute is not None:
        seams.leave("moe_permute_fusion", "Transformer Engine's is there")
        return
    seams.rebind(theirs.__name__, "HAVE_TE", True)  # asked for before a function is called; others are still None
    for function in PERMUTATIONS:
        seams.rebind(theirs.__name__, function.__name__, function)


def _rebind_norms(seams: Seams) -> None:
    for module, name in (
        ("transformer.transformer_block", "LayerNormImpl"),
        ("models.gpt.gpt_layer_specs", "LNImpl"),
        ("models.backends", "LNImpl"),
    ):
        seams.rebind(_CORE + module, name, MegatronNorm, copies=False)
    seams.rebind(_CORE + "fusions.fused_layer_norm", "FusedLayerNorm", FusedLayerNorm)
    seams.rebind(_CORE + "transformer.torch_norm", "WrappedTorchNorm", WrappedTorchNorm)
    seams.rebind(_CORE + "models.backends", "LocalSpecProvider", spec_provider(fuse_norms=False))
    from megatron.core.extensions.transformer_engine import HAVE_TE

    if HAVE_TE:
        seams.leave("Transformer Engine's norms", "specs of Transformer Engine keep them; gpt_layer_spec has none")
    else:  # HybridStack's last norm, without which it can't be built
        seams.rebind(_CORE + "models.hybrid.hybrid_block", "TENorm", MegatronNorm, optional=True, copies=False)


def _rebind_dropout(seams: Seams) -> None:
    for function in (ours.get_bias_dropout_add, ours.bias_dropout_add):
        name = "_bias_dropout_add_func" if function is ours.bias_dropout_add else function.__name__
        seams.rebind(_CORE + "fusions.fused_bias_dropout", name, function)


def _rebind_rope(seams: Seams) -> None:
    for function in (ours.fused_apply_rotary_pos_emb, ours.fused_apply_rotary_pos_emb_thd):
        seams.rebind(_CORE + "models.common.embeddings.rope_utils", function.__name__, function)


def _rebind_loss(seams: Seams) -> None:
    seams.rebind(_CORE + "fusions.fused_cross_entropy", "fused_vocab_parallel_cross_entropy",
                 ours.fused_vocab_parallel_cross_entropy)  # fmt: skip
    linear = importlib.util.find_spec(_CORE + "fusions.fused_linear_cross_entropy")
    if linear is not None:  # the version has this option itself
        seams.rebind(_CORE + "fusions.fused_linear_cross_entropy", "linear_cross_entropy", ours.linear_cross_entropy)
        return
    seams.leave("fusions.fused_linear_cross_entropy", f"not in {seams.version}: apply() stands in at the model's end")
    fields = importlib.import_module(_CORE + "transformer.transformer_config").TransformerConfig.__dataclass_fields__
    choices = copy(fields["cross_entropy_fusion_impl"])  # by which Megatron-LM's trainer parses --cross-entropy-fusion-impl
    choices.type = Literal["native", "te", "linear"]
    seams.rebind_item(fields, choices.name, choices, f"transformer.transformer_config.TransformerConfig.{choices.name}")
    for module, model in (("models.gpt.gpt_model", "GPTModel"), ("models.hybrid.hybrid_model", "HybridModel")):
        if importlib.util.find_spec(_CORE + module.rpartition(".")[0]) is None:
            seams.leave(f"{module}.{model}", f"not in {seams.version}")
        else:
            init = getattr(importlib.import_module(_CORE + module), model).__init__
            seams.rebind(_CORE + module, f"{model}.__init__", _with_linear_head(init))


def _rebind_optimizer(seams: Seams) -> None:
    theirs = importlib.import_module(_CORE + "optimizer")
    if not theirs.USING_PYTORCH_OPTIMIZER:
        seams.leave("optimizer", "Transformer Engine's or Apex's is there")
        return
    seams.rebind(theirs.__name__, "get_megatron_optimizer", with_fused_adam(theirs.get_megatron_optimizer))
    for name, value in (
        ("local_multi_tensor_l2_norm", multi_tensor_l2_norm), ("local_multi_tensor_scale", multi_tensor_scale),
    ):  # fmt: skip
        seams.rebind(_CORE + "utils", name, value)


def _with_linear_head(init: Any) -> Any:
    """Wrap a model's __init__: cross_entropy_fusion_impl="linear" applies the head without logits."""

    def __init__(self: Any, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        if self.config.cross_entropy_loss_fusion and self.config.cross_entropy_fusion_impl == "linear" and self.post_process:
            apply(self, fp32_logits=True)  # as the function of newer versions

    return __init__
