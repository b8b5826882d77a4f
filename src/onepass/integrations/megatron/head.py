"""The loss of a GPTModel or HybridModel from hidden states, without logits."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from onepass.gradients.deferred import DeferredWgrad
from onepass.integrations.megatron.attention import describe_fused
from onepass.integrations.megatron.wgrad import DEFERRED, drain_embedding_wgrad_compute
from onepass.ops.loss.linear_cross_entropy import linear_cross_entropy

_NAMES = ("forward", "compute_language_model_loss")  # that apply sets on a model; and "forward" on its output layer
_SCALE = "_scale_logits"  # too, where Megatron has it
_MARK = "_onepass_head"
_MTP, _COUNTS = "megatron.core.transformer.multi_token_prediction", "_compute_mtp_acceptance_counts"


def output_processor(
    *, hidden_states: Tensor, output_layer: Any, output_weight: Tensor | None, labels: Tensor | None,
    runtime_gather_output: bool | None = None, scale_logits: Any = None, config: Any = None, fp32_logits: bool = False, **_: Any,
) -> Tensor:  # fmt: skip
    """Pass this as GPTModel.forward(output_processor=...), from megatron-core 0.18 on. Without labels it returns logits.

    ``functools.partial(output_processor, fp32_logits=True)`` never rounds the logits that it doesn't keep.
    """
    if labels is not None:
        if config.mtp_num_layers:
            raise NotImplementedError(
                "mtp_num_layers must be None with output_processor, before which Megatron makes logits for it, but is "
                f"{config.mtp_num_layers}: apply(model) makes none"
            )
        return head_loss(hidden_states, output_layer, output_weight, labels, config, fp32_logits)[0]
    logits: Tensor = output_layer(hidden_states, weight=output_weight, runtime_gather_output=runtime_gather_output)[0]
    if scale_logits:
        logits = scale_logits(logits)
    return logits.transpose(0, 1).contiguous()


def head_loss(
    hidden: Tensor, layer: Any, weight: Tensor | None, labels: Tensor, config: Any, fp32_logits: bool = False,
    count: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Return each token's loss, ``[b, s]``, of hidden states ``[s, b, h]`` or this rank's part of s.

    With `count` also whether its label has the largest logit.
    """
    weight = layer.weight if weight is None else weight
    _keep_other_gradients(weight, config)
    group = layer.tp_group
    result: Any = linear_cross_entropy(
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
        return_stats=("correct",) if count else False,
    )
    loss, correct = (result[0], result[1].correct.transpose(0, 1)) if count else (result, None)
    return loss.transpose(0, 1).contiguous(), correct


def _keep_other_gradients(weight: Any, config: Any) -> None:
    """Let DistributedDataParallel add what comes by autograd, too, though the head adds its own gradient to main_grad.

    Without gradient_accumulation_fusion that is the gradient of logits; and that of the embedding of multi-token prediction, for
    which Megatron asks only without pipeline stages. The head's own placeholder is zeros.
    """
    if weight.requires_grad and (config.mtp_num_layers or not config.gradient_accumulation_fusion):
        weight.zero_out_wgrad = True


def _deferred(weight: Any, layer: Any, config: Any) -> DeferredWgrad | None:
    if not (config.defer_embedding_wgrad_compute and layer.training and weight.requires_grad):
        return None
    schedules = importlib.import_module("megatron.core.pipeline_parallel.schedules")
    if schedules.drain_embedding_wgrad_compute is not drain_embedding_wgrad_compute:
        raise RuntimeError("defer_embedding_wgrad_compute needs install(wgrad=True): stock's drain doesn't know this head")
    deferred: DeferredWgrad = vars(weight).setdefault(DEFERRED, DeferredWgrad(config.wgrad_deferral_limit))
    return deferred


def _counts_logits(config: Any) -> bool:
    """Whether this Megatron counts, from logits, what multi-token prediction foretells. Raise where we don't know how it does."""
    if not config.mtp_num_layers:
        return False
    module = importlib.import_module(_MTP)
    if not hasattr(module, _COUNTS) and hasattr(module.MTPLossLoggingHelper, "save_metrics_to_tracker"):
        raise NotImplementedError(f"mtp_num_layers must be None, as this megatron-core has no {_MTP}.{_COUNTS}, but isn't")
    return hasattr(module, _COUNTS)


@contextmanager
def _counted_by_head(layer: Any, call: dict[str, Any]) -> Iterator[None]:
    """Let Megatron count from the head's statistic in this block, for this output layer."""
    module = importlib.import_module(_MTP)
    stock = getattr(module, _COUNTS)

    def counts(logits: Tensor, labels: Tensor, loss_mask: Tensor, output_layer: Any, *more: Any) -> Any:
        if output_layer is not layer:
            return stock(logits, labels, loss_mask, output_layer, *more)
        kept = loss_mask.bool()
        return (call["correct"] & kept).sum().float(), kept.sum().float()

    setattr(module, _COUNTS, counts)
    try:
        yield
    finally:
        setattr(module, _COUNTS, stock)


class AppliedHead:
    """A model whose loss makes no logits. `str` says so, and `undo` restores the model."""

    def __init__(self, model: Any, said: str) -> None:
        self.model, self._said = model, said

    def undo(self) -> None:
        """Restore the model's own head."""
        if _MARK not in vars(self.model):
            raise RuntimeError("there is nothing to undo: this model has its own head")
        for name in (*_NAMES, _SCALE, _MARK):
            vars(self.model).pop(name, None)
        del vars(self.model.output_layer)["forward"]

    def __str__(self) -> str:
        return self._said


def apply(model: Any, *, fp32_logits: bool = False) -> AppliedHead:
    """Make no logits in a built GPTModel's or HybridModel's forward with labels. Without labels it returns logits as before.

    So for each depth of multi-token prediction.

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
    counted = _counts_logits(model.config)
    if _MARK in vars(model):
        raise ValueError(f"the head without logits is applied to this {type(model).__name__} already: undo that first")
    layer, their_loss = model.output_layer, model.compute_language_model_loss
    their_forward, logits_forward = model.forward, layer.forward
    their_scale: Any = getattr(model, _SCALE, None)
    call: dict[str, Any] = {"wanted": False, "weight": None, "correct": None}

    def forward(*args: Any, labels: Tensor | None = None, **options: Any) -> Any:
        call["wanted"] = labels is not None and not options.get("runtime_gather_output") and not options.get("output_processor")
        counting = _counted_by_head(layer, call) if counted and call["wanted"] else nullcontext()
        try:
            with counting:
                return their_forward(*args, labels=labels, **options)
        finally:
            call.update(wanted=False, weight=None, correct=None)

    def hidden_as_logits(input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None) -> Any:
        if not call["wanted"]:
            return logits_forward(input_, weight=weight, runtime_gather_output=runtime_gather_output)
        call["weight"] = weight
        return input_, None

    def loss(labels: Tensor, logits: Tensor) -> Any:
        if not call["wanted"]:
            return their_loss(labels, logits)
        losses, call["correct"] = head_loss(
            logits, layer, call["weight"], labels, model.config, fp32_logits, counted and model.training
        )
        return losses

    def scale(logits: Tensor) -> Any:
        return logits if call["wanted"] else their_scale(logits)  # the head scales

    vars(model).update({"forward": forward, "compute_language_model_loss": loss, _MARK: True})
    if their_scale is not None:
        vars(model)[_SCALE] = scale
    vars(layer)["forward"] = hidden_as_logits
    how = "linear_cross_entropy of fp32 logits" if fp32_logits else "linear_cross_entropy"
    return AppliedHead(model, _account(model, f"output_layer and loss: {how}, with labels"))


def _account(model: Any, head: str) -> str:
    return "\n".join((f"onepass in {type(model).__name__}", f"  {head}", *describe_fused(model)))
