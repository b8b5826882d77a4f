"""Losses of logits that are there, and the gradient of these, by kernels or by PyTorch: of all columns, or of one rank's."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from onepass.kernels.layout import as_matrix
from onepass.ops.loss import row_formula, row_kernels
from onepass.ops.loss.formula import LossTerms, RowLosses
from onepass.ops.loss.row_functions import sums_of
from onepass.ops.loss.row_kernels import RowGradients
from onepass.ops.loss.targets import Targets, VocabColumns, as_targets

_ROWS: tuple[Any, Any] = row_formula, row_kernels


def _statistics(
    logits: Tensor, labels: Tensor, place: Tensor | None, targets: Targets | None, terms: LossTerms, stats: tuple[str, ...],
    use_triton: bool,
) -> Tensor:  # fmt: skip
    """[parts, planes, rows]."""
    x, _ = as_matrix(logits)
    V = 0 if place is not None else x.shape[1]
    return _ROWS[use_triton].row_statistics(x, labels, terms, stats, VocabColumns(0, V, place, None, targets))  # type: ignore[no-any-return]


def _targets(probabilities: Tensor | None, class_weight: Tensor | None) -> Targets | None:
    return as_targets(None if probabilities is None else as_matrix(probabilities)[0], class_weight)


def names_of(stats: str) -> tuple[str, ...]:
    return tuple(stats.split(",")) if stats else ()


def whole_losses(
    logits: Tensor, labels: Tensor, probabilities: Tensor | None, class_weight: Tensor | None, terms: LossTerms, stats: str,
    use_triton: bool,
) -> RowLosses:  # fmt: skip
    targets, names = _targets(probabilities, class_weight), names_of(stats)
    parts = _statistics(logits, labels, None, targets, terms, names, use_triton)
    columns = VocabColumns(0, logits.shape[-1], targets=targets)
    return _ROWS[use_triton].finish_losses(parts, labels, terms, names, logits.dtype, columns)  # type: ignore[no-any-return]


def partial_statistics(
    logits: Tensor, labels: Tensor, place: Tensor, probabilities: Tensor | None, class_weight: Tensor | None, terms: LossTerms,
    stats: str, use_triton: bool,
) -> Tensor:  # fmt: skip
    """[1, planes, rows], of this rank's columns."""
    targets, names = _targets(probabilities, class_weight), names_of(stats)
    parts = _statistics(logits, labels, place, targets, terms, names, use_triton)
    return row_kernels.merge_statistics(parts, terms, names) if use_triton else parts


def all_planes(
    logits: Tensor, labels: Tensor, place: Tensor, probabilities: Tensor | None, class_weight: Tensor | None, terms: LossTerms,
    stats: str, use_triton: bool,
) -> Tensor:  # fmt: skip
    """`partial_statistics` with zeros in unused planes: what a graph's op returns must be the same every time."""
    part = partial_statistics(logits, labels, place, probabilities, class_weight, terms, stats, use_triton)
    used = sums_of(terms, names_of(stats), part.shape[1])
    for plane in (plane for plane, needed in enumerate(used, 3) if not needed):
        part[:, plane].zero_()
    return part


def partial_losses(
    parts: Tensor, labels: Tensor, place: Tensor, class_weight: Tensor | None, logits: torch.dtype, masses: bool,
    terms: LossTerms, stats: str, use_triton: bool,
) -> RowLosses:  # fmt: skip
    """Losses from all ranks' statistics. class_weight: where rows' weights are their labels'."""
    targets = Targets(None, class_weight) if masses else None
    rows = _ROWS[use_triton]
    columns = VocabColumns(0, 0, place, targets=targets)
    return rows.finish_losses(parts, labels, terms, names_of(stats), logits, columns)  # type: ignore[no-any-return]


class LogitsKept(NamedTuple):
    """What backward reads of logits [..., V] and their rows, as `_forward` has it."""

    logits: Tensor
    labels: Tensor
    place: Tensor | None
    probabilities: Tensor | None
    class_weight: Tensor | None
    lse: Tensor
    entropies: Tensor | None


def logits_gradient(
    kept: LogitsKept, incoming: RowGradients, terms: LossTerms, use_triton: bool, in_place: bool = False
) -> Tensor:  # fmt: skip
    """Return the gradient, of the logits' shape: over the logits, over the copy that had to be made, or in new memory."""
    logits, labels, place, probabilities, class_weight, lse, entropy = kept
    x, copied = as_matrix(logits)
    out = x if in_place or copied else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    V = 0 if place is not None else x.shape[1]
    columns = VocabColumns(0, V, place, targets=_targets(probabilities, class_weight))
    _ROWS[use_triton].row_gradients(x, out, labels, terms, lse, entropy, incoming, columns)
    # not a view, as autograd sees it: of logits that were written over nobody could read one
    return out if out.dim() == logits.dim() else torch.ops.aten._unsafe_view(out, logits.shape)
