"""The statistics that both ops return beside their loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from onepass.ops.loss.formula import STATISTICS, USUAL_STATISTICS

STATISTICS_COLUMNS = 1 << 24  # the number of the largest column is kept in fp32


class Stats(NamedTuple):
    """Statistics of each token, of labels' shape, in fp32. Those of an ignored token are 0."""

    logsumexp: Tensor
    log_prob: Tensor  # of the label
    entropy: Tensor
    correct: Tensor  # bool: the label has the largest logit, the first of equals


class NamedStats(NamedTuple):
    """As `Stats`, of the statistics that were asked for by name; the others are None."""

    logsumexp: Tensor | None
    log_prob: Tensor | None
    entropy: Tensor | None
    correct: Tensor | None
    log_sum_sq_probs: Tensor | None  # log of the sum of squared probabilities
    mean_logit: Tensor | None  # mean over the vocabulary
    z_loss: Tensor | None  # z_loss times logsumexp squared, before weights; without a gradient


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
    if "correct" in names and columns > STATISTICS_COLUMNS:
        raise ValueError(f"return_stats knows correct's columns up to {STATISTICS_COLUMNS}, but the vocabulary has {columns}")
    return names


def make_stats(return_stats: bool | Sequence[str], values: Sequence[Tensor]) -> Stats | NamedStats:
    """Return the record of the statistics asked for, given in the order of `check_statistics`."""
    if return_stats is True:
        return Stats(*values)
    by_name = dict(zip(check_statistics(return_stats), values, strict=True))
    return NamedStats(*[by_name.get(name) for name in STATISTICS])
