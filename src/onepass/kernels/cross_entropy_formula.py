"""Cross-entropy of given logits: the formula, for every type, and what is asked of it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

REDUCTIONS = ("none", "mean", "sum")


class Terms(NamedTuple):
    """What a row's loss is made of."""

    ignore_index: int = -100
    smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float = 0.0  # 0: none
    scale: float = 1.0


class RowLosses(NamedTuple):
    """Each row's loss and what else is known of it, in fp32 or wider; `correct` is bool. What was not asked for is None.

    logsumexp, where gradients are to be made of it, is of `lse_type`."""

    loss: Tensor
    logsumexp: Tensor
    log_prob: Tensor | None = None
    entropy: Tensor | None = None
    correct: Tensor | None = None


def lse_type(logits: torch.dtype) -> torch.dtype:
    """What the logsumexp of such logits is kept in: of several hundreds, fp32 would round away what fp32 logits still tell."""
    return torch.float32 if logits.itemsize < 4 else torch.float64


def finished_logits(product: Tensor, terms: Terms) -> Tensor:
    """What the softmax is taken of: the product scaled, and capped where a cap is asked for."""
    z = product * terms.scale
    return terms.softcap * torch.tanh(z / terms.softcap) if terms.softcap else z


def row_losses(product: Tensor, labels: Tensor, terms: Terms) -> RowLosses:
    """Of rows [..., V], with all that is known of them. Rows that are ignored have no loss, and a log_prob of 0; rows with a
    label out of range have NaN in both. Neither is ever right."""
    z = finished_logits(product.to(torch.promote_types(product.dtype, torch.float32)), terms)
    size = z.shape[-1]
    kept, sound = labels != terms.ignore_index, (labels >= 0) & (labels < size)
    here = torch.where(sound, labels, 0).long().unsqueeze(-1)
    lse = z.logsumexp(-1)
    log_prob = z.gather(-1, here).squeeze(-1) - lse if size else torch.zeros_like(lse)
    loss = -(1 - terms.smoothing) * log_prob
    if terms.smoothing:
        loss = loss + terms.smoothing * (lse - z.mean(-1))
    if terms.z_loss:
        loss = loss + terms.z_loss * lse.square()
    p = z.softmax(-1)
    entropy = lse - torch.where(p > 0, p * z, 0.0).sum(-1)
    correct = kept & sound & (z.argmax(-1) == labels) if size else torch.zeros_like(kept)
    return RowLosses(told(loss, kept, sound), lse, told(log_prob, kept, sound), entropy, correct)


def told(value: Tensor, kept: Tensor, sound: Tensor) -> Tensor:
    """0 of rows that are ignored, and NaN, never a plausible number, of those with a label that is no token's."""
    return torch.where(kept, torch.where(sound, value, torch.nan), 0.0)


def kept_weight(labels: Tensor, terms: Terms, token_weight: Tensor | None, like: torch.dtype) -> Tensor:
    """What a mean divides by: the rows that are kept, or the sum of their weights."""
    kept = labels != terms.ignore_index
    return kept.sum().to(like) if token_weight is None else torch.where(kept, token_weight.to(like), 0.0).sum()


def reduced(losses: Tensor, labels: Tensor, terms: Terms, token_weight: Tensor | None, reduction: str) -> Tensor:
    """The losses of rows, weighted; their sum; or their mean, which is 0 where nothing is kept."""
    if token_weight is not None:
        losses = torch.where(labels != terms.ignore_index, losses * token_weight.to(losses.dtype), 0.0)
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    return losses.sum() * inverse(kept_weight(labels, terms, token_weight, losses.dtype))


def inverse(weight: Tensor) -> Tensor:
    """1 / weight, but 0 where it is 0: a mean over nothing."""
    return torch.where(weight == 0, 0.0, 1 / weight)
