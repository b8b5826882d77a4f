"""Cross-entropy of given logits: the formula, for every type, and the options of both ops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onepass.ops.loss.targets import Targets, target_mass, weights_at

REDUCTIONS = ("none", "mean", "sum")
ROW_STATISTICS = ("logsumexp", "log_prob", "entropy", "correct", "log_sum_sq_probs", "mean_logit")  # fields of `RowLosses`
STATISTICS = (*ROW_STATISTICS, "z_loss")
USUAL_STATISTICS = STATISTICS[:4]
DIFFERENTIABLE_STATISTICS = STATISTICS[:3]
_STATISTICS_COLUMNS = 1 << 24  # the number of the largest column is kept in fp32


class LossTerms(NamedTuple):
    """The terms of a row's loss, for which the rows' kernels are bound: all that cross_entropy takes but its reduction."""

    ignore_index: int = -100
    smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float = 0.0  # 0: none
    scale: float = 1.0


class LossOptions(NamedTuple):
    """What linear_cross_entropy takes besides tensors: `LossTerms`, written out for registered ops, and the rest."""

    ignore_index: int
    smoothing: float
    z_loss: float
    softcap: float
    scale: float
    reduction: str
    wide: bool  # keep logits in fp32
    use_triton: bool
    product: torch.dtype  # type of the products' operands
    group: str  # name of a process group of several ranks, or ""
    sequence: bool
    grad_scale: float | None
    chunk_bytes: int | None
    stats: str  # names of the statistics that are computed too, in their order, with commas between
    lora_scale: float = 1.0

    @property
    def terms(self) -> LossTerms:
        return LossTerms(*self[:5])

    def statistics(self) -> tuple[str, ...]:
        return tuple(self.stats.split(",")) if self.stats else ()

    def differentiable(self) -> list[str]:
        """The differentiable ones of the statistics."""
        return [name for name in self.statistics() if name in DIFFERENTIABLE_STATISTICS]


class RowLosses(NamedTuple):
    """Each row's loss and `ROW_STATISTICS`, in fp32 or wider; `correct` is bool. Statistics that are not needed are None.

    A logsumexp that gradients are made of has `lse_type`.
    """

    loss: Tensor
    logsumexp: Tensor
    log_prob: Tensor | None = None
    entropy: Tensor | None = None
    correct: Tensor | None = None
    log_sum_sq_probs: Tensor | None = None
    mean_logit: Tensor | None = None
    mass: Tensor | None = None  # of the row's target, where it has masses: gradients are made of it

    def statistic(self, name: str, terms: LossTerms) -> Tensor:
        """One of `STATISTICS`. That of the z-loss is a number to be logged, without a gradient."""
        values: Tensor = terms.z_loss * self.logsumexp.detach().square() if name == "z_loss" else getattr(self, name)
        return values


def lse_type(logits: torch.dtype) -> torch.dtype:
    """Type of the logsumexp of such logits. Near several hundred, fp32 would round away digits that fp32 logits have."""
    return torch.float32 if logits.itemsize < 4 else torch.float64


def finished_logits(product: Tensor, terms: LossTerms) -> Tensor:
    """Scale the product, and cap it if there is a softcap: the softmax is of the result."""
    z = product * terms.scale
    return terms.softcap * torch.tanh(z / terms.softcap) if terms.softcap else z


def row_losses(
    product: Tensor, labels: Tensor, terms: LossTerms, stats: tuple[str, ...] = (), allowed: Tensor | None = None,
    targets: Targets | None = None,
) -> RowLosses:  # fmt: skip
    """Losses and statistics of rows [..., V].

    `allowed`: the columns that the distribution has, bools of the product's shape; None for all. `targets`: what rows' masses are
    made of, with probabilities of the product's shape; None if all of it is at the label.
    Ignored rows have zeros throughout; rows whose label is out of range have NaN as loss and log_prob. Neither is ever correct.
    """
    z = finished_logits(product.to(torch.promote_types(product.dtype, torch.float32)), terms)
    if allowed is not None:
        z = z.masked_fill(~allowed, -torch.inf)
    size = z.shape[-1]
    kept, sound = labels != terms.ignore_index, (labels >= 0) & (labels < size)
    here = torch.where(sound, labels, 0).long().unsqueeze(-1)
    lse = z.logsumexp(-1)
    log_prob = z.gather(-1, here).squeeze(-1) - lse if size else torch.zeros_like(lse)
    if targets is None:
        loss = -(1 - terms.smoothing) * log_prob
        if terms.smoothing:
            loss = loss + terms.smoothing * (lse - z.mean(-1))
    else:
        columns = torch.arange(size, device=z.device)
        mass = target_mass(targets, labels, terms.smoothing, columns, size, z.dtype)
        loss = -(mass * (z - lse.unsqueeze(-1))).sum(-1)
    if terms.z_loss:
        penalty = terms.z_loss * lse.square()
        by_label = None if targets is None else targets.label_weight
        if by_label is not None:
            penalty = penalty * torch.where(kept, weights_at(by_label, labels), 0.0).to(z.dtype)
        loss = loss + penalty
    statistics = {"log_prob": as_row_losses(log_prob, kept, sound)} if "log_prob" in stats else {}
    if "entropy" in stats:
        p = z.softmax(-1)
        statistics["entropy"] = torch.where(kept, lse - torch.where(p > 0, p * z.masked_fill(p == 0, 0.0), 0.0).sum(-1), 0.0)
    if "correct" in stats:
        statistics["correct"] = kept & sound & (z.argmax(-1) == labels) if size else torch.zeros_like(kept)
    if "log_sum_sq_probs" in stats:
        statistics["log_sum_sq_probs"] = torch.where(kept, (2 * z).logsumexp(-1) - 2 * lse, 0.0)
    if "mean_logit" in stats:
        statistics["mean_logit"] = torch.where(kept, z.mean(-1), 0.0)
    return RowLosses(as_row_losses(loss, kept, sound), torch.where(kept, lse, 0.0), **statistics)


def as_row_losses(value: Tensor, kept: Tensor, sound: Tensor) -> Tensor:
    """Put 0 in ignored rows and NaN, never a plausible number, in rows whose label is out of range."""
    return torch.where(kept, torch.where(sound, value, torch.nan), 0.0)


def kept_weight(labels: Tensor, ignore_index: int, token_weight: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The divisor of a mean: the number of rows that are kept, or the sum of their weights."""
    kept = labels != ignore_index
    return kept.sum().to(dtype) if token_weight is None else torch.where(kept, token_weight.to(dtype), 0.0).sum()


def reduce_losses(
    losses: Tensor, labels: Tensor, ignore_index: int, token_weight: Tensor | None, reduction: str, of_mean: Tensor | None = None
) -> Tensor:
    """Weight the rows' losses, then return them, their sum, or their mean, which is 0 if no row is kept.

    of_mean: weights by whose sum a mean divides, if they aren't the losses'.
    """
    if token_weight is not None:
        losses = torch.where(labels != ignore_index, losses * token_weight.to(losses.dtype), 0.0)
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    divisor = token_weight if of_mean is None else of_mean
    return losses.sum() * inverse_count(kept_weight(labels, ignore_index, divisor, losses.dtype))


def inverse_count(weight: Tensor) -> Tensor:
    """Return 1 / weight, and 0 for a weight of 0: the mean of no rows."""
    return torch.where(weight == 0, 0.0, 1 / weight)


# ---- the statistics that are returned beside a loss ----


class Stats(NamedTuple):
    """Statistics of each token, of labels' shape, in fp32. Those of an ignored token are 0."""

    logsumexp: Tensor
    log_prob: Tensor  # of the label
    entropy: Tensor
    correct: Tensor  # bool: the label has the largest logit, the first of equals


class NamedStats(NamedTuple):
    """As `Stats`, of the statistics that were asked for by name; the others are None. Type checkers let who asked use them."""

    logsumexp: Tensor | Any
    log_prob: Tensor | Any
    entropy: Tensor | Any
    correct: Tensor | Any
    log_sum_sq_probs: Tensor | Any  # log of the sum of squared probabilities
    mean_logit: Tensor | Any  # mean over the vocabulary
    z_loss: Tensor | Any  # z_loss times logsumexp squared, before weights; without a gradient


def check_statistics(return_stats: bool | Sequence[str], probabilities: bool = False, columns: int = 0) -> tuple[str, ...]:
    """Return the names of the statistics that are asked for, in the order of `STATISTICS`."""
    names: tuple[str, ...]
    if isinstance(return_stats, bool):
        names = USUAL_STATISTICS if return_stats else ()
    elif isinstance(return_stats, str) or not isinstance(return_stats, Sequence):
        raise TypeError(f"return_stats must be a bool or a sequence of names, but is {return_stats!r}")
    else:
        unknown = [name for name in return_stats if name not in STATISTICS]
        if unknown:
            raise ValueError(f"return_stats must name some of {', '.join(STATISTICS)}, but has {unknown[0]!r}")
        names = tuple(name for name in STATISTICS if name in return_stats)
    of_label = [name for name in ("log_prob", "correct") if name in names]
    if probabilities and of_label:
        raise ValueError(f"return_stats can't have {of_label[0]}, a label's, where labels are probabilities: name the others")
    if "correct" in names and columns > _STATISTICS_COLUMNS:
        raise ValueError(f"return_stats knows correct's columns up to {_STATISTICS_COLUMNS}, but the vocabulary has {columns}")
    return names


def make_stats(return_stats: bool | Sequence[str], values: Sequence[Tensor]) -> Stats | NamedStats:
    """Return the record of the statistics asked for, given in the order of `check_statistics`."""
    if return_stats is True:
        return Stats(*values)
    by_name = dict(zip(check_statistics(return_stats), values, strict=True))
    return NamedStats(*[by_name.get(name) for name in STATISTICS])
