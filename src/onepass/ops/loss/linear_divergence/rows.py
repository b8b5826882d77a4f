"""The functions of kernels.py by PyTorch, for machines without the kernels. Intermediate results are of a few rows at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from onepass.ops.loss.formula import LossTerms, finished_logits
from onepass.ops.loss.linear_divergence.formula import (
    PLANES,
    DivergenceTerms,
    finish_jsd,
    finite_base,
    merge_statistics,
)
from onepass.runtime.batch_invariance import rows_at_a_time

_BLOCK, _LARGE_BLOCK = 1 << 17, 1 << 26  # logits of each head at a time: on a CPU, whose caches hold them, and elsewhere


class LogitRows(NamedTuple):
    """Both heads' logits of some rows, [rows, columns] each, and where the student's gradient is written, which may be its
    logits. `room`: columns that may be read and written; those after the last get zeros."""

    student: Tensor
    out: Tensor
    teacher: Tensor
    labels: Tensor
    room: int

    def blocks(self) -> Iterator[tuple[slice, LogitRows]]:
        most = max(1, (_BLOCK if self.student.device.type == "cpu" else _LARGE_BLOCK) // max(1, self.student.shape[1]))
        step = rows_at_a_time(self.student, most)
        for at in range(0, self.student.shape[0], step):
            part = slice(at, at + step)
            student, out, teacher, labels = (t[part] for t in self[:4])
            yield part, LogitRows(student, out, teacher, labels, self.room)


def row_statistics(logits: LogitRows, terms: DivergenceTerms) -> Tensor:
    """[1, PLANES, rows] of these columns, for `merge_statistics`."""
    parts = [_statistics(some, terms) for _, some in logits.blocks()]
    return torch.cat(parts, -1) if parts else logits.student.new_empty(1, PLANES, 0, dtype=_wide(logits.student))


def _statistics(logits: LogitRows, terms: DivergenceTerms) -> Tensor:
    dtype = _wide(logits.student)
    if not logits.student.shape[1]:
        largest = torch.full(logits.labels.shape, -torch.inf, dtype=dtype, device=logits.student.device)
        zero = torch.zeros_like(largest)
        return torch.stack([largest, zero, largest, zero, zero]).unsqueeze(0)
    largest, above, e = _above_largest(logits.student, terms.student)
    teacher_largest, teacher_above, teacher_e = _above_largest(logits.teacher, terms.teacher)
    own, a, b = (e, above, teacher_above) if terms.kind == "reverse_kl" else (teacher_e, teacher_above, above)
    totals = e.sum(-1), teacher_e.sum(-1)
    cross = totals[0] if terms.kind == "jsd" else torch.where(own == 0, 0.0, own * (a - b)).sum(-1)
    return torch.stack([each.to(dtype) for each in (largest, totals[0], teacher_largest, totals[1], cross)]).unsqueeze(0)


def _wide(t: Tensor) -> torch.dtype:
    return torch.promote_types(t.dtype, torch.float32)


def _finished(x: Tensor, terms: LossTerms) -> Tensor:
    z: Tensor = finished_logits(x.to(_wide(x)), terms)
    return z


def _above_largest(x: Tensor, terms: LossTerms) -> tuple[Tensor, Tensor, Tensor]:
    z = _finished(x, terms)
    largest = z.amax(-1)
    above = z - finite_base(largest).unsqueeze(-1)
    return largest, above, above.exp()


def _logarithms(x: Tensor, terms: LossTerms, numbers: Tensor) -> Tensor:
    """Logarithms of probabilities."""
    return (_finished(x, terms) - numbers[0].unsqueeze(-1)) - numbers[1].unsqueeze(-1)


def _mixture(ls: Tensor, lt: Tensor, terms: DivergenceTerms) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Both heads' probabilities, and the logarithms of their ratios to the mixture, as in kernels.py."""
    teachers, beta = lt > ls, terms.beta
    most = torch.where(teachers, lt, ls)
    ratio = (-torch.where(most == -torch.inf, 0.0, lt - ls).abs()).exp()
    larger = most.exp()
    smaller = larger * ratio
    mixed = torch.where(teachers, beta + (1 - beta) * ratio, (1 - beta) + beta * ratio).log()
    s, t = torch.where(teachers, smaller, larger), torch.where(teachers, larger, smaller)
    return s, t, (ls - most) - mixed, (lt - most) - mixed


def mixture_sums(logits: LogitRows, terms: DivergenceTerms, rows: Tensor) -> Tensor:
    """[2, rows]: these columns' part of KL(student || M) and of KL(teacher || M)."""
    sums = rows.new_zeros(2, rows.shape[1])
    for part, some in logits.blocks():
        ls = _logarithms(some.student, terms.student, rows[:2, part])
        lt = _logarithms(some.teacher, terms.teacher, rows[2:4, part])
        s, t, above, teacher_above = _mixture(ls, lt, terms)
        sums[0, part] = torch.where(s == 0, 0.0, s * above).sum(-1)
        sums[1, part] = torch.where(t == 0, 0.0, t * teacher_above).sum(-1)
    return sums


def row_gradients(logits: LogitRows, terms: DivergenceTerms, rows: Tensor, incoming: Tensor | None) -> None:
    """Write the gradient of the student's logits. `incoming` are the gradients of rows' divergences; None: 1."""
    for part, some in logits.blocks():
        ls = _logarithms(some.student, terms.student, rows[:2, part])
        lt = _logarithms(some.teacher, terms.teacher, rows[2:4, part])
        if terms.kind == "forward_kl":
            d = ls.exp() - lt.exp()
        else:
            reverse = terms.kind == "reverse_kl"
            s, _, above, _ = (ls.exp(), lt, ls - lt, lt) if reverse else _mixture(ls, lt, terms)
            d = torch.where(s == 0, 0.0, s * (above - rows[4, part].unsqueeze(-1)))
            d = d if reverse else d * (1 - terms.beta)
        if incoming is not None:
            d *= incoming[part].unsqueeze(-1)
        if terms.softcap:
            d *= 1 - torch.tanh(some.student.to(d.dtype) / terms.softcap).square()
        some.out.copy_(d / terms.temperature)
        some.out.masked_fill_((some.labels == terms.ignore_index).unsqueeze(-1), 0.0)


def whole_rows(logits: LogitRows, terms: DivergenceTerms, rows: Tensor, losses: Tensor, gradient: bool) -> None:
    """Write rows' numbers and divergences, and with `gradient` the gradient of the sum of these."""
    losses.copy_(merge_statistics(row_statistics(logits, terms), logits.labels, terms, rows))
    if terms.kind == "jsd":
        losses.copy_(finish_jsd(mixture_sums(logits, terms, rows), logits.labels, terms, rows))
    if gradient:
        row_gradients(logits, terms, rows, None)
