"""Divergences of two rows of logits: the formula, for every type, and the options of the op."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from onepass.ops.loss.formula import LossTerms, finished_logits

KINDS = ("forward_kl", "reverse_kl", "jsd")


class DivergenceTerms(NamedTuple):
    """What a row's divergence is, for which the rows' kernels are bound."""

    ignore_index: int = -100
    kind: str = "forward_kl"
    beta: float = 0.5  # the teacher's part of jsd's mixture
    temperature: float = 1.0
    softcap: float = 0.0  # 0: none
    teacher_softcap: float = 0.0

    @property
    def student(self) -> LossTerms:
        """The student's logits as `finished_logits` takes them: capped, then divided by the temperature."""
        return LossTerms(softcap=self.softcap / self.temperature, scale=1 / self.temperature)

    @property
    def teacher(self) -> LossTerms:
        return LossTerms(softcap=self.teacher_softcap / self.temperature, scale=1 / self.temperature)


class DivergenceOptions(NamedTuple):
    """What linear_divergence takes besides tensors: `DivergenceTerms`, written out for registered ops, and the rest."""

    ignore_index: int
    kind: str
    beta: float
    temperature: float
    softcap: float
    teacher_softcap: float
    reduction: str
    wide: bool  # keep logits in fp32
    use_triton: bool
    product: torch.dtype  # type of the operands of the student's products
    teacher_product: torch.dtype
    group: str  # name of a process group of several ranks, or ""
    chunk_bytes: int | None
    lora_scale: float = 1.0  # of the student

    @property
    def terms(self) -> DivergenceTerms:
        return DivergenceTerms(*self[:6])

    @property
    def sequence(self) -> bool:
        return False

    @property
    def grad_scale(self) -> None:
        return None

    def differentiable(self) -> list[str]:
        return []


def row_divergences(student: Tensor, teacher: Tensor, labels: Tensor, terms: DivergenceTerms) -> Tensor:
    """Divergences of rows [..., V] of products, 0 in rows that are ignored. A column with a probability of 0 adds nothing."""
    s, t = _log_softmax(student, terms.student), _log_softmax(teacher, terms.teacher)
    if terms.kind == "forward_kl":
        divergences = _divergence(t, s)
    elif terms.kind == "reverse_kl":
        divergences = _divergence(s, t)
    else:
        some = torch.maximum(s, t) > -math.inf  # of two infinities logaddexp has no derivative
        parts = torch.where(some, t, 0.0) + math.log(terms.beta), torch.where(some, s, 0.0) + math.log1p(-terms.beta)
        mixture = torch.logaddexp(*parts)
        divergences = terms.beta * _divergence(t, mixture) + (1 - terms.beta) * _divergence(s, mixture)
    return torch.where(labels != terms.ignore_index, divergences, 0.0)


def _log_softmax(product: Tensor, terms: LossTerms) -> Tensor:
    return finished_logits(product.to(torch.promote_types(product.dtype, torch.float32)), terms).log_softmax(-1)


def _divergence(p: Tensor, q: Tensor) -> Tensor:
    """KL(p || q) of logarithms of probabilities."""
    never = p == -math.inf
    return torch.where(never, 0.0, p.exp() * torch.where(never, 0.0, p - q)).sum(-1)


# ---- numbers of rows ----

# What gradients need of each row besides its logits, [PLANES, rows] in fp32 or wider. A finished logit z of the student has the
# logarithm (z - base) - log_total; one number for both would lose bits to the size of logits. The teacher has two such numbers.
# `mean` is the KL that the student's own logarithms are compared with; forward_kl has none. Ranks that share the vocabulary
# exchange as many numbers: largest logit and sum of exponentials above it of the student, of the teacher, and `cross`.
PLANES = 5


def merge_statistics(parts: Tensor, labels: Tensor, terms: DivergenceTerms, rows: Tensor) -> Tensor:
    """Write the numbers of `rows` from statistics [ranks, PLANES, rows] of parts of the vocabulary. Return the divergences.

    `cross` is the sum of e (a - b): e are exponentials of the head whose probabilities weigh the divergence, a its finished
    logits above their largest, b the other head's. jsd has none: what follows from `mixture_sums` is missing yet.
    """
    student, teacher = _merged(parts[:, 0], parts[:, 1]), _merged(parts[:, 2], parts[:, 3])
    rows[0], rows[1], rows[2], rows[3] = student.base, student.total.log(), teacher.base, teacher.total.log()
    rows[4] = 0
    if terms.kind == "jsd":
        return torch.zeros_like(rows[4])
    reverse = terms.kind == "reverse_kl"
    own, other = (student, teacher) if reverse else (teacher, student)
    cross = torch.where(own.worth == 0, 0.0, own.worth * (parts[:, 4] + (own.shift - other.shift) * own.totals)).sum(0)
    divergences = cross / own.total + (other.total.log() - own.total.log())
    if reverse:
        rows[4] = divergences
    return torch.where(labels != terms.ignore_index, divergences, 0.0)


class _Merged(NamedTuple):
    base: Tensor  # the largest of all logits; 0 where there is none
    total: Tensor  # of exponentials above it
    totals: Tensor  # of each part, above the part's own
    shift: Tensor  # from the base to each part's own
    worth: Tensor  # of a part's exponentials


def _merged(largest: Tensor, totals: Tensor) -> _Merged:
    base = finite_base(largest.amax(0))
    worth = (largest - base).exp()
    return _Merged(base, (worth * totals).sum(0), totals, finite_base(largest) - base, worth)


def finite_base(largest: Tensor) -> Tensor:
    """What exponentials are taken above: the largest logit, or 0 where all are -inf."""
    return torch.where(largest == -math.inf, 0.0, largest)


def finish_jsd(sums: Tensor, labels: Tensor, terms: DivergenceTerms, rows: Tensor) -> Tensor:
    """Put the student's of `mixture_sums` [2, rows] into `rows`, and return the divergences."""
    rows[4] = sums[0]
    return torch.where(labels != terms.ignore_index, terms.beta * sums[1] + (1 - terms.beta) * sums[0], 0.0)
