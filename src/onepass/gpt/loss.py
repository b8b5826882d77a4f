"""The loss of materialised logits: vocabulary-parallel (cross_entropy_fusion_impl native), or by PyTorch (no fusion); and which
tokens have a loss."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass.gpt.block import sequences
from onepass.gpt.config import Config
from onepass.nn.linear_cross_entropy import LinearCrossEntropy
from onepass.ops.loss.cross_entropy import cross_entropy
from onepass.ops.loss.kept_rows import KeptRows, kept_rows


def rows_with_loss(labels: Tensor, head: LinearCrossEntropy, config: Config) -> KeptRows | None:
    """Ask which tokens have a loss, before the blocks run: the head computes no others. None stands for all."""
    if not config.loss_without_logits:
        return None
    return kept_rows(labels, head.ignore_index, tp_group=head.tp_group, sequence_parallel=head.sequence_parallel)


def loss_of_logits(
    head: LinearCrossEntropy,
    h: Tensor,
    weight: Tensor | None,
    labels: Tensor,
    loss_mask: Tensor | None,
    reduction: str,
    config: Config,
) -> Tensor:
    """Return the loss with the reductions of `onepass.linear_cross_entropy`. A mean with loss_mask divides by the mask's sum."""
    rows = "none" if loss_mask is not None else reduction
    if config.cross_entropy_loss_fusion:
        logits = sequences(head.logits(h, weight, gather=False), config)
        smoothing, z_loss = config.label_smoothing, config.z_loss
        loss: Tensor = cross_entropy(logits, labels, head.tp_group, rows, label_smoothing=smoothing, z_loss=z_loss)
    else:
        loss = _plain(sequences(head.logits(h, weight), config), labels, rows, config)
    if loss_mask is None or reduction == "none":
        return loss if loss_mask is None else loss * loss_mask
    total = (loss * loss_mask).sum()
    return (
        total if reduction == "sum" else total / (loss_mask * (labels != -100)).sum().clamp(min=torch.finfo(torch.float32).tiny)
    )


def kept_tokens(labels: Tensor, loss_mask: Tensor | None, reduction: str) -> Tensor | float:
    """Return the factor that adds a loss common to all tokens to the reduced loss, as if each kept token had it.

    It is 1 for a mean, the (masked) number of tokens for a sum, and each token's mask without a reduction.
    """
    if reduction == "mean":
        return 1.0
    kept = labels != -100 if loss_mask is None else loss_mask * (labels != -100)
    return kept.float() if reduction == "none" else kept.sum()


def _plain(logits: Tensor, labels: Tensor, reduction: str, config: Config) -> Tensor:
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, -2)
    flat = labels.flatten()
    loss = F.cross_entropy(wide, flat, reduction=reduction, label_smoothing=config.label_smoothing)
    if config.z_loss:
        kept = flat != -100
        extra = torch.where(kept, config.z_loss * wide.logsumexp(-1).square(), 0.0)
        loss = loss + (extra if reduction == "none" else extra.sum() / (kept.sum() if reduction == "mean" else 1))
    return loss.view_as(labels) if reduction == "none" else loss
