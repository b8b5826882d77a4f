"""The functions of ops/loss/row_kernels.py by PyTorch, for machines without the kernels.

Statistics and gradients are fp32, or fp64 of fp64 logits. Gradients overwrite logits of that type; others are widened first.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from onepass.ops.loss.formula import LossTerms, RowLosses, as_row_losses, finished_logits, lse_type
from onepass.ops.loss.row_functions import planes_of
from onepass.ops.loss.row_kernels import RowGradients
from onepass.ops.loss.targets import VocabColumns, allowed_columns, target_mass, weights_at
from onepass.runtime.batch_invariance import rows_at_a_time


def _finished(x: Tensor, terms: LossTerms) -> Tensor:
    """Finished logits in fp32 or wider: x itself if they are just that."""
    z = x.to(torch.promote_types(x.dtype, torch.float32))
    return finished_logits(z, terms) if terms.softcap or terms.scale != 1 else z


def _places(labels: Tensor, terms: LossTerms, columns: VocabColumns, W: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return each row's label as a column of these logits or 0, whether it is one of them, and whether it counts at all."""
    first, V, place, *_ = columns
    begin, size = (first, V) if place is None else (first + place[0], place[1])
    counts = (labels != terms.ignore_index) & (labels >= 0) & (labels < size)
    column = labels.long() - begin
    mine = counts & (column >= 0) & (column < W)
    return torch.where(mine, column, 0), mine, counts


_BLOCK, _LARGE_BLOCK = 1 << 19, 1 << 26  # logits at a time: on a CPU, whose caches hold them, and elsewhere


def _blocks(x: Tensor) -> Iterator[slice]:
    """Slices of rows, so that intermediate results are never of the logits' size."""
    rows, columns = x.shape
    step = rows_at_a_time(x, max(1, (_BLOCK if x.device.type == "cpu" else _LARGE_BLOCK) // max(1, columns)))
    yield from (slice(at, at + step) for at in range(0, max(rows, 1), step))


def _mass(labels: Tensor, terms: LossTerms, of: VocabColumns, z: Tensor) -> Tensor:
    """The masses of the columns of some rows' logits z."""
    first, V, place, _, targets, _ = of
    assert targets is not None
    columns, size = torch.arange(first, first + z.shape[1], device=z.device), V if place is None else place[1]
    columns = columns if place is None else columns + place[0]
    if targets.probabilities is not None:
        targets = targets._replace(probabilities=targets.probabilities[:, first : first + z.shape[1]])
    return target_mass(targets, labels, terms.smoothing, columns, size, z.dtype)


def row_statistics(x: Tensor, labels: Tensor, terms: LossTerms, stats: tuple[str, ...], columns: VocabColumns) -> Tensor:
    """[1, planes, rows]."""
    parts = [_statistics(x[rows], labels[rows], terms, stats, columns.of_rows(rows)) for rows in _blocks(x)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def _statistics(x: Tensor, labels: Tensor, terms: LossTerms, stats: tuple[str, ...], columns: VocabColumns) -> Tensor:
    (M, W), (first, _, place, bits, targets, _) = x.shape, columns
    z = _finished(x, terms)
    if bits is not None:
        z = z.masked_fill(~allowed_columns(bits, first, W), -torch.inf)
    parts = z.new_zeros(1, planes_of(targets), M)
    part = parts[0]
    if W == 0:
        part[0] = -torch.inf
        return parts
    column, mine, _ = _places(labels, terms, columns, W)
    part[0] = z.amax(-1)
    base = torch.where(part[0] == -torch.inf, 0.0, part[0]).unsqueeze(-1)
    part[2] = torch.where(mine, z.gather(-1, column.unsqueeze(-1)).squeeze(-1), 0.0)
    if terms.smoothing or "mean_logit" in stats:
        part[3] = z.sum(-1)
    if targets is not None:
        mass = _mass(labels, terms, columns, z)
        part[7], part[8] = (mass * z).sum(-1), mass.sum(-1)
    under = z - base
    e = under.exp() if "entropy" in stats else under.exp_()
    part[1] = e.sum(-1)
    if "entropy" in stats:
        part[4] = torch.where(e > 0, e * under, 0.0).sum(-1)
    if "correct" in stats:
        best = z.argmax(-1) + first  # not together with the maximum, which takes ten times as long on a CPU
        part[5] = best if place is None else best + place[0]
    if "log_sum_sq_probs" in stats:
        part[6] = e.square_().sum(-1)
    return parts


def merge_statistics(parts: Tensor, terms: LossTerms, stats: tuple[str, ...]) -> Tensor:
    """[1, planes, rows]."""
    m, sums, target, logits, surprise, first, squares, *masses = parts.unbind(1)
    largest = m.amax(0)
    worth = torch.where(m == -torch.inf, 0.0, (m - largest).exp())
    moved = torch.where(worth > 0, worth * (surprise + (m - largest) * sums), 0.0).sum(0)
    where = torch.where(m == largest, first, torch.inf).amin(0)
    total, squared = (worth * sums).sum(0), (worth.square() * squares).sum(0)
    added = [plane.sum(0) for plane in masses]
    return torch.stack([largest, total, target.sum(0), logits.sum(0), moved, where, squared, *added]).unsqueeze(0)


def finish_losses(
    parts: Tensor, labels: Tensor, terms: LossTerms, stats: tuple[str, ...], logits: torch.dtype, columns: VocabColumns
) -> RowLosses:
    """Compute rows' losses and statistics from all their parts; `logits` is the logits' type."""
    _, V, place, _, targets, _ = columns
    one = merge_statistics(parts, terms, stats) if len(parts) > 1 else parts
    largest, total, target, sum_of_logits, surprise, first, squares, *masses = one[0]
    size = V if place is None else place[1]
    kept, sound = labels != terms.ignore_index, (labels >= 0) & (labels < size)
    log_total = total.log()
    log_prob = (target - largest) - log_total  # no bit lost to the size of logits
    penalty = terms.z_loss * (largest + log_total).square() if terms.z_loss else None
    statistics: dict[str, Tensor] = {}
    if targets is None:
        loss = -(1 - terms.smoothing) * log_prob
        if terms.smoothing:
            loss = loss + terms.smoothing * ((largest - sum_of_logits / size) + log_total)
    else:
        weighted, mass = masses
        loss = mass * log_total + (mass * largest - weighted)
        if penalty is not None and targets.label_weight is not None:
            penalty = penalty * weights_at(targets.label_weight, labels).to(loss.dtype)
        statistics["mass"] = torch.where(kept & sound, mass, 0.0)
    if penalty is not None:
        loss = loss + penalty
    if "log_prob" in stats:
        statistics["log_prob"] = as_row_losses(log_prob, kept, sound)
    if "entropy" in stats:
        statistics["entropy"] = torch.where(kept, log_total - surprise / total, 0.0)
    if "correct" in stats:
        statistics["correct"] = kept & sound & (first == labels.to(first.dtype))
    if "log_sum_sq_probs" in stats:
        statistics["log_sum_sq_probs"] = torch.where(kept, squares.log() - 2 * log_total, 0.0)
    if "mean_logit" in stats:
        statistics["mean_logit"] = torch.where(kept, sum_of_logits / size, 0.0)
    lse = torch.where(kept, largest.to(lse_type(logits)) + log_total, 0.0)
    return RowLosses(as_row_losses(loss, kept, sound), lse, **statistics)


def row_gradients(
    x: Tensor, out: Tensor, labels: Tensor, terms: LossTerms, lse: Tensor, entropy: Tensor | None, incoming: RowGradients,
    columns: VocabColumns,
) -> None:  # fmt: skip
    """Write the gradient of the logits x to out, which may be x."""
    if x.numel():
        for rows in _blocks(x):
            some = (None if t is None else t[rows] for t in incoming)
            part = None if entropy is None else entropy[rows]
            each = RowGradients(*some)  # type: ignore[arg-type]
            own = columns.of_rows(rows)
            _gradient(x[rows], out[rows], labels[rows], terms, lse[rows], part, each, own)
            if own.bits is not None:
                out[rows].masked_fill_(~allowed_columns(own.bits, own.first, x.shape[1]), 0.0)


def _gradient(
    x: Tensor, out: Tensor, labels: Tensor, terms: LossTerms, lse: Tensor, entropy: Tensor | None, incoming: RowGradients,
    columns: VocabColumns,
) -> None:  # fmt: skip
    _, V, place, _, targets, _ = columns
    column, mine, counts = _places(labels, terms, columns, x.shape[1])
    rows = labels != terms.ignore_index
    g = torch.where(counts, incoming.loss, 0.0)
    kept, lse = lse, lse.to(g.dtype)
    if targets is None:
        a, t = g * (1 + 2 * terms.z_loss * lse), g * (terms.smoothing - 1)
    else:
        assert incoming.mass is not None
        penalty = 2 * terms.z_loss * lse
        if terms.z_loss and targets.label_weight is not None:
            penalty = torch.where(counts, penalty * weights_at(targets.label_weight, labels).to(g.dtype), 0.0)
        a, t = g * (incoming.mass + penalty), torch.zeros_like(g)
    needed = counts
    if incoming.log_prob is not None:
        more = torch.where(counts, incoming.log_prob, 0.0)
        a, t = a - more, t + more
    if incoming.logsumexp is not None:
        a, needed = a + incoming.logsumexp, rows
    if incoming.entropy is not None:
        assert entropy is not None
        a, needed = a - incoming.entropy * entropy, rows
    z = _finished(x, terms)
    ours = z.data_ptr() != x.data_ptr() or x.data_ptr() == out.data_ptr()
    d = z.sub_(lse.unsqueeze(-1)) if ours and not terms.softcap else z - lse.unsqueeze(-1)
    less = (lse - kept).exp().to(g.dtype)  # corrects for the logsumexp's rounding
    if incoming.entropy is not None:
        each = (a.unsqueeze(-1) - incoming.entropy.unsqueeze(-1) * d) * less.unsqueeze(-1)
        p = d.exp_()
        d = torch.where(p > 0, p * each, 0.0)
    else:
        d.exp_().mul_((a * less).unsqueeze(-1))
    if targets is not None:
        d -= g.unsqueeze(-1) * _mass(labels, terms, columns, d)
    elif terms.smoothing:
        d -= (g * terms.smoothing / (V if place is None else place[1])).unsqueeze(-1)
    d.scatter_add_(-1, column.unsqueeze(-1), torch.where(mine, t, 0.0).unsqueeze(-1).to(d.dtype))
    if terms.softcap:
        d *= 1 - torch.tanh(x.to(z.dtype) * (terms.scale / terms.softcap)).square()  # of z / softcap it would be less exact
    if terms.scale != 1:
        d *= terms.scale
    if d.data_ptr() != out.data_ptr():
        out.copy_(d)
    out.masked_fill_(~needed.unsqueeze(-1), 0.0)


def row_statistics_and_gradients(
    x: Tensor, out: Tensor, labels: Tensor, terms: LossTerms, stats: tuple[str, ...], incoming: Tensor
) -> Tensor:
    """Return the statistics of whole rows, and write their gradient to out, which may be x."""
    columns = VocabColumns(0, x.shape[1])
    parts = row_statistics(x, labels, terms, stats, columns)
    lse = parts[0, 0].to(lse_type(x.dtype)) + parts[0, 1].log()
    row_gradients(x, out, labels, terms, lse, None, RowGradients(incoming), columns)
    return parts
