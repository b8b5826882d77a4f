"""What kernels/softmax_rows.py does, by PyTorch: the same calls, for machines without the kernels.

Statistics and gradients are made in fp32, or in fp64 of such logits; logits of that type are overwritten, others widened.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from onepass.kernels.cross_entropy_formula import RowLosses, Terms, finished_logits, lse_type, told
from onepass.kernels.softmax_pieces import PLANES
from onepass.kernels.softmax_rows import Incoming


def _finished(x: Tensor, terms: Terms) -> Tensor:
    """In a wide type. The logits themselves, where nothing has to be done to them."""
    z = x.to(torch.promote_types(x.dtype, torch.float32))
    return finished_logits(z, terms) if terms.softcap or terms.scale != 1 else z


def _places(labels: Tensor, terms: Terms, first: int, V: int, place: Tensor | None, W: int) -> tuple[Tensor, Tensor, Tensor]:
    """Each row's label as a column of these logits, if it is one of them; whether it is; and whether it counts at all."""
    begin, size = (first, V) if place is None else (first + place[0], place[1])
    counts = (labels != terms.ignore_index) & (labels >= 0) & (labels < size)
    column = labels.long() - begin
    mine = counts & (column >= 0) & (column < W)
    return torch.where(mine, column, 0), mine, counts


_BLOCK, _LARGE_BLOCK = 1 << 19, 1 << 26  # logits taken at a time, on a CPU, whose caches hold them, and elsewhere


def _blocks(x: Tensor) -> Iterator[slice]:
    """Of rows, so that what is made in between is never of the logits' size."""
    rows, columns = x.shape
    step = max(1, (_BLOCK if x.device.type == "cpu" else _LARGE_BLOCK) // max(1, columns))
    yield from (slice(at, at + step) for at in range(0, max(rows, 1), step))


def statistics(x: Tensor, labels: Tensor, terms: Terms, full: bool, first: int, V: int, place: Tensor | None = None) -> Tensor:
    """[1, PLANES, rows]."""
    parts = [_statistics(x[rows], labels[rows], terms, full, first, V, place) for rows in _blocks(x)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def _statistics(x: Tensor, labels: Tensor, terms: Terms, full: bool, first: int, V: int, place: Tensor | None) -> Tensor:
    M, W = x.shape
    z = _finished(x, terms)
    parts = z.new_zeros(1, PLANES, M)
    part = parts[0]
    if W == 0:
        part[0] = -torch.inf
        return parts
    column, mine, _ = _places(labels, terms, first, V, place, W)
    part[0] = z.amax(-1)
    base = torch.where(part[0] == -torch.inf, 0.0, part[0]).unsqueeze(-1)
    part[2] = torch.where(mine, z.gather(-1, column.unsqueeze(-1)).squeeze(-1), 0.0)
    if terms.smoothing:
        part[3] = z.sum(-1)
    under = z - base
    e = under.exp() if full else under.exp_()
    part[1] = e.sum(-1)
    if not full:
        return parts
    part[4] = torch.where(e > 0, e * under, 0.0).sum(-1)
    best = z.argmax(-1) + first  # apart from the maximum: both at once take ten times as long on a CPU
    part[5] = best if place is None else best + place[0]
    return parts


def merged(parts: Tensor, terms: Terms, full: bool) -> Tensor:
    """[1, PLANES, rows]."""
    m, sums, target, logits, surprise, first = parts.unbind(1)
    largest = m.amax(0)
    worth = torch.where(m == -torch.inf, 0.0, (m - largest).exp())
    moved = torch.where(worth > 0, worth * (surprise + (m - largest) * sums), 0.0).sum(0)
    where = torch.where(m == largest, first, torch.inf).amin(0)
    return torch.stack([largest, (worth * sums).sum(0), target.sum(0), logits.sum(0), moved, where]).unsqueeze(0)


def finished(
    parts: Tensor, labels: Tensor, terms: Terms, full: bool, V: int, logits: torch.dtype, place: Tensor | None = None
) -> RowLosses:
    """What is known of the rows, of all parts there are of them; `logits` is their type."""
    largest, total, target, sum_of_logits, surprise, first = (merged(parts, terms, full) if len(parts) > 1 else parts)[0]
    size = V if place is None else place[1]
    kept, sound = labels != terms.ignore_index, (labels >= 0) & (labels < size)
    log_total = total.log()
    log_prob = (target - largest) - log_total  # no bit lost to the size of logits
    loss = -(1 - terms.smoothing) * log_prob
    if terms.smoothing:
        loss = loss + terms.smoothing * ((largest - sum_of_logits / size) + log_total)
    if terms.z_loss:
        loss = loss + terms.z_loss * (largest + log_total).square()
    lse = largest.to(lse_type(logits)) + log_total
    if not full:
        return RowLosses(told(loss, kept, sound), lse)
    correct = kept & sound & (first == labels.to(first.dtype))
    return RowLosses(told(loss, kept, sound), lse, told(log_prob, kept, sound), log_total - surprise / total, correct)


def gradient(
    x: Tensor, out: Tensor, labels: Tensor, terms: Terms, lse: Tensor, entropy: Tensor | None, incoming: Incoming,
    first: int, V: int, place: Tensor | None = None,
) -> None:  # fmt: skip
    """Of the logits x, written to out, which may be x."""
    if x.shape[1]:
        for rows in _blocks(x):
            some = (None if t is None else t[rows] for t in incoming)
            part = None if entropy is None else entropy[rows]
            _gradient(x[rows], out[rows], labels[rows], terms, lse[rows], part, Incoming(*some), first, V, place)  # type: ignore[arg-type]


def _gradient(
    x: Tensor, out: Tensor, labels: Tensor, terms: Terms, lse: Tensor, entropy: Tensor | None, incoming: Incoming,
    first: int, V: int, place: Tensor | None,
) -> None:  # fmt: skip
    W = x.shape[1]
    column, mine, counts = _places(labels, terms, first, V, place, W)
    g = torch.where(counts, incoming.loss, 0.0)
    kept, lse = lse, lse.to(g.dtype)
    a, t = g * (1 + 2 * terms.z_loss * lse), g * (terms.smoothing - 1)
    needed = counts
    if incoming.log_prob is not None:
        more = torch.where(counts, incoming.log_prob, 0.0)
        a, t = a - more, t + more
    if incoming.logsumexp is not None:
        a, needed = a + incoming.logsumexp, torch.ones_like(counts)
    if incoming.entropy is not None:
        assert entropy is not None
        a, needed = a - incoming.entropy * entropy, torch.ones_like(counts)
    z = _finished(x, terms)
    ours = z.data_ptr() != x.data_ptr() or x.data_ptr() == out.data_ptr()
    d = z.sub_(lse.unsqueeze(-1)) if ours and not terms.softcap else z - lse.unsqueeze(-1)
    less = (lse - kept).exp().to(g.dtype)  # for what the logsumexp lost by rounding
    if incoming.entropy is not None:
        each = (a.unsqueeze(-1) - incoming.entropy.unsqueeze(-1) * d) * less.unsqueeze(-1)
        p = d.exp_()
        d = torch.where(p > 0, p * each, 0.0)
    else:
        d.exp_().mul_((a * less).unsqueeze(-1))
    if terms.smoothing:
        d -= (g * terms.smoothing / (V if place is None else place[1])).unsqueeze(-1)
    d.scatter_add_(-1, column.unsqueeze(-1), torch.where(mine, t, 0.0).unsqueeze(-1).to(d.dtype))
    if terms.softcap:
        d *= 1 - torch.tanh(x.to(z.dtype) * (terms.scale / terms.softcap)).square()  # of z / softcap it would be less exact
    if terms.scale != 1:
        d *= terms.scale
    if d.data_ptr() != out.data_ptr():
        out.copy_(d)
    out.masked_fill_(~needed.unsqueeze(-1), 0.0)


def statistics_and_gradient(
    x: Tensor, out: Tensor, labels: Tensor, terms: Terms, full: bool, incoming: Tensor, keep_scratch: bool = True
) -> Tensor:
    """The statistics, and the gradient in out, which may be x: of whole rows."""
    W = x.shape[1]
    parts = statistics(x, labels, terms, full, 0, W)
    lse = parts[0, 0].to(lse_type(x.dtype)) + parts[0, 1].log()
    gradient(x, out, labels, terms, lse, None, Incoming(incoming), 0, W)
    return parts
