"""The loss of a GPTModel or HybridModel from hidden states, without logits."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from onepass.gradients.deferred import DeferredWgrad
from onepass.integrations.megatron.attention import describe_attention
from onepass.integrations.megatron.wgrad import DEFERRED, drain_embedding_wgrad_compute
from onepass.ops.loss.linear_cross_entropy import linear_cross_entropy

_NAMES = ("forward", "compute_language_model_loss")  # that apply sets on a model; and "forward" on its output layer
_MARK = "_onepass_head"


def output_processor(
    *, hidden_states: Tensor, output_layer: Any, output_weight: Tensor | None, labels: Tensor | None,
    runtime_gather_output: bool | None = None, scale_logits: Any = None, config: Any = None, fp32_logits: bool = False, **_: Any,
) -> Tensor:  # fmt: skip
    """Pass this as GPTModel.forward(output_processor=...), from megatron-core 0.18 on. Without labels it returns logits.

    ``functools.partial(output_processor, fp32_logits=True)`` never rounds the logits that it doesn't keep.
    """
    if labels is not None:
        _refuse(config)
        return head_loss(hidden_states, output_layer, output_weight, labels, config, fp32_logits)
    logits: Tensor = output_layer(hidden_states, weight=output_weight, runtime_gather_output=runtime_gather_output)[0]
    if scale_logits:
        logits = scale_logits(logits)
    return logits.transpose(0, 1).contiguous()


def head_loss(
    hidden: Tensor, layer: Any, weight: Tensor | None, labels: Tensor, config: Any, fp32_logits: bool = False
) -> Tensor:
    """Return each token's loss, ``[b, s]``, of hidden states ``[s, b, h]`` or this rank's part of s."""
    weight = layer.weight if weight is None else weight
    group = layer.tp_group
    loss: Tensor = linear_cross_entropy(
        hidden,
        weight,
        labels.transpose(0, 1),
        group if group.size() > 1 else None,
        "none",
        sequence_parallel=layer.sequence_parallel,
        bias=None if layer.skip_bias_add else layer.bias,
        logit_scale=config.mup_output_mult if getattr(config, "use_mup", False) else 1.0,
        logits_dtype=torch.float32 if fp32_logits else None,
        deferred=_deferred(weight, layer, config),
    )
    return loss.transpose(0, 1).contiguous()


def _deferred(weight: Any, layer: Any, config: Any) -> DeferredWgrad | None:
    if not (config.defer_embedding_wgrad_compute and layer.training and weight.requires_grad):
        return None
    schedules = importlib.import_module("megatron.core.pipeline_parallel.schedules")
    if schedules.drain_embedding_wgrad_compute is not drain_embedding_wgrad_compute:
        raise RuntimeError("defer_embedding_wgrad_compute needs install(wgrad=True): stock's drain doesn't know this head")
    deferred: DeferredWgrad = vars(weight).setdefault(DEFERRED, DeferredWgrad(config.wgrad_deferral_limit))
    return deferred


def _refuse(config: Any) -> None:
    if config.mtp_num_layers:
        raise NotImplementedError(
            f"mtp_num_layers must be None for a head without logits, as multi-token prediction reads them, but is "
            f"{config.mtp_num_layers}"
        )


class AppliedHead:
    """A model whose loss makes no logits. `str` says so, and `undo` restores the model."""

    def __init__(self, model: Any, said: str) -> None:
        self.model, self._said = model, said

    def undo(self) -> None:
        """Restore the model's own head."""
        if _MARK not in vars(self.model):
            raise RuntimeError("there is nothing to undo: this model has its own head")
        for name in (*_NAMES, _MARK):
            del vars(self.model)[name]
        del vars(self.model.output_layer)["forward"]

    def __str__(self) -> str:
        return self._said


def apply(model: Any, *, fp32_logits: bool = False) -> AppliedHead:
    """Make no logits in a built GPTModel's or HybridModel's forward with labels. Without labels it returns logits as before.

    Args:
        model: also within DistributedDataParallel and Float16Module. A pipeline stage without a head is left.
        fp32_logits: compute the loss of logits that are never rounded, as ``cross_entropy_fusion_impl="linear"`` does.
            Otherwise they are rounded to the hidden states' type, as stock's are.
    """
    while hasattr(model, "module"):
        model = model.module
    if not hasattr(model, "compute_language_model_loss"):
        raise TypeError(f"model must be a GPTModel or a HybridModel, but is {type(model).__name__}")
    if not model.post_process:
        return AppliedHead(model, _account(model, "left: output_layer: this pipeline stage has none"))
    _refuse(model.config)
    if _MARK in vars(model):
        raise ValueError(f"the head without logits is applied to this {type(model).__name__} already: undo that first")
    layer, their_loss = model.output_layer, model.compute_language_model_loss
    their_forward, logits_forward = model.forward, layer.forward
    call: dict[str, Any] = {"wanted": False, "weight": None}

    def forward(*args: Any, labels: Tensor | None = None, **options: Any) -> Any:
        call["wanted"] = labels is not None and not options.get("runtime_gather_output") and not options.get("output_processor")
        try:
            return their_forward(*args, labels=labels, **options)
        finally:
            call.update(wanted=False, weight=None)

    def hidden_as_logits(input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None) -> Any:
        if not call["wanted"]:
            return logits_forward(input_, weight=weight, runtime_gather_output=runtime_gather_output)
        call["weight"] = weight
        return input_, None

    def loss(labels: Tensor, logits: Tensor) -> Any:
        if not call["wanted"]:
            return their_loss(labels, logits)
        return head_loss(logits, layer, call["weight"], labels, model.config, fp32_logits)

    vars(model).update({"forward": forward, "compute_language_model_loss": loss, _MARK: True})
    vars(layer)["forward"] = hidden_as_logits
    how = "linear_cross_entropy of fp32 logits" if fp32_logits else "linear_cross_entropy"
    return AppliedHead(model, _account(model, f"output_layer and loss: {how}, with labels"))


def _account(model: Any, head: str) -> str:
    return "\n".join((f"onepass in {type(model).__name__}", f"  {head}", *describe_attention(model)))
