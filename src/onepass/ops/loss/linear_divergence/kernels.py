"""Rows of two heads' logits: their normalisers, their divergence, and its gradient in the student's place.

One program a row, in up to three sweeps over both logits: normalisers, together with the sum that makes a KL of them; for jsd the
two KLs of its mixture; the gradient. Each sweep goes the other way than the one before: what was read last comes from the
multiprocessor's own cache, and much of the rest from the L2. Where ranks share the vocabulary each sweep is a launch.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onepass.kernels.language import PTX, device_function, tl
from onepass.kernels.launch import Bound, kernel
from onepass.kernels.rows import aligned, known_align
from onepass.ops.loss.linear_divergence import rows as by_pytorch
from onepass.ops.loss.linear_divergence.formula import KINDS, PLANES, DivergenceTerms
from onepass.ops.loss.linear_divergence.rows import LogitRows
from onepass.ops.loss.row_functions import (
    APART,
    LOG2_E,
    finished_logit,
    gradient_of,
    numbers_of,
    probability_under,
    store_gradients,
)
from onepass.runtime.sizes import power_of_two

NORMALISERS, MIXTURE, GRADIENT = 1, 2, 3  # sweeps, from BEGIN to END
LOG_2 = tl.constexpr(0.6931471805599453)
GROUP = tl.constexpr(8)  # neighbours that a thread sums: no piece has fewer
FORWARD_KL, REVERSE_KL, JSD = (tl.constexpr(i) for i in range(3))  # as in KINDS


# ---- pieces of a row ----


class _Heads(NamedTuple):
    """One row's logits of both heads, and the terms of their divergence. A scale of 1, or no cap, is None."""

    x_ptr: Any
    teacher_ptr: Any
    scale: Any
    cap: Any
    teacher_cap: Any
    beta: Any


class _Normalisers(NamedTuple):
    """What makes logarithms of probabilities: (z - base) - log_total."""

    base: Any
    log_total: Any
    teacher_base: Any
    teacher_log_total: Any


@device_function
def _finished(x_ptr, columns, scale, cap, W: tl.constexpr, ROOM: tl.constexpr, MASKED: tl.constexpr, POLICY: tl.constexpr):
    """A piece as stored, and its finished logits: -inf past the row's end. POLICY: evict_last where another sweep follows."""
    if MASKED:
        x = tl.load(x_ptr + columns, mask=columns < ROOM, other=0.0, eviction_policy=POLICY)
        return x, tl.where(columns < W, finished_logit(x, scale, cap), float("-inf"))
    else:
        x = tl.load(x_ptr + columns, eviction_policy=POLICY)
        return x, finished_logit(x, scale, cap)


@device_function
def _both(heads, columns, W: tl.constexpr, ROOM: tl.constexpr, MASKED: tl.constexpr, POLICY: tl.constexpr):
    """A piece of the student's as stored, and both heads' finished logits."""
    x, zs = _finished(heads.x_ptr, columns, heads.scale, heads.cap, W, ROOM, MASKED, POLICY)
    _, zt = _finished(heads.teacher_ptr, columns, heads.scale, heads.teacher_cap, W, ROOM, MASKED, POLICY)
    return x, zs, zt


@device_function
def _log_probs(heads, numbers, columns, W: tl.constexpr, ROOM: tl.constexpr, MASKED: tl.constexpr, POLICY: tl.constexpr):
    """A piece of the student's as stored, and the logarithms of both heads' probabilities."""
    x, zs, zt = _both(heads, columns, W, ROOM, MASKED, POLICY)
    return x, (zs - numbers.base) - numbers.log_total, (zt - numbers.teacher_base) - numbers.teacher_log_total


@device_function
def _base(largest):
    return tl.where(largest == float("-inf"), 0.0, largest)


@device_function
def _in_groups(z):
    """Neighbours, one thread's each."""
    return tl.reshape(z, [z.shape[0] // GROUP, GROUP])


@device_function
def _raise_base(z, largest):
    """Count a piece z of groups in. Return the groups' largest, by how much the base moves down, the factor of what has been
    counted, the piece above the new base, and its exponentials."""
    most = tl.maximum(largest, tl.max(z, 1))
    base = _base(most)
    above = z - base[:, None]
    return most, _base(largest) - base, tl.exp2((largest - base) * LOG2_E), above, tl.exp2(above * LOG2_E)


@device_function
def _on_base(cross, total, worth, shift):
    """A sum of e (a - b) above other bases: `shift` is how much a's moves down more than b's."""
    return tl.where(worth == 0, 0.0, worth * (cross + shift * total))


@device_function
def _add_piece(zs, zt, largest, total, teacher_largest, teacher_total, cross, KIND: tl.constexpr):
    most, moved, worth, a, e = _raise_base(_in_groups(zs), largest)
    teacher_most, teacher_moved, teacher_worth, b, f = _raise_base(_in_groups(zt), teacher_largest)
    if KIND == FORWARD_KL:
        cross = _on_base(cross, teacher_total, teacher_worth, teacher_moved - moved)
        cross += tl.sum(tl.where(f == 0, 0.0, f * (b - a)), 1)
    if KIND == REVERSE_KL:
        cross = _on_base(cross, total, worth, moved - teacher_moved)
        cross += tl.sum(tl.where(e == 0, 0.0, e * (a - b)), 1)
    return most, total * worth + tl.sum(e, 1), teacher_most, teacher_total * teacher_worth + tl.sum(f, 1), cross


@device_function
def _log(x, ROUGH: tl.constexpr):
    """ROUGH: within 2e-7, by one instruction of a GPU instead of twenty, for logits of 16 bits."""
    if ROUGH and PTX:
        log2 = tl.inline_asm_elementwise("lg2.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
        return log2 * LOG_2
    else:
        return tl.log(x)


@device_function
def _mixture(ls, lt, beta, ROUGH: tl.constexpr):
    """Both heads' probabilities, and the logarithms of their ratios to the mixture: from the larger of the two, as a small one of
    them is 0 in fp32 before its logarithm matters to nobody."""
    teachers = lt > ls
    most = tl.where(teachers, lt, ls)
    ratio = tl.exp2(-tl.abs(tl.where(most == float("-inf"), 0.0, lt - ls)) * LOG2_E)
    larger = tl.exp2(most * LOG2_E)
    smaller = larger * ratio
    mixed = _log(tl.where(teachers, beta + (1.0 - beta) * ratio, (1.0 - beta) + beta * ratio), ROUGH)
    s, t = tl.where(teachers, smaller, larger), tl.where(teachers, larger, smaller)
    return s, t, (ls - most) - mixed, (lt - most) - mixed


@device_function
def _gradients(heads, x, ls, lt, g, mean, KIND: tl.constexpr):
    if KIND == FORWARD_KL:
        d = tl.exp2(ls * LOG2_E) - tl.exp2(lt * LOG2_E)
    elif KIND == REVERSE_KL:
        s = tl.exp2(ls * LOG2_E)
        d = tl.where(s == 0, 0.0, s * ((ls - lt) - mean))
    else:
        s, _, above, _ = _mixture(ls, lt, heads.beta, x.dtype != tl.float32)
        d = tl.where(s == 0, 0.0, s * (above - mean))
    return gradient_of(x, 0.0, d, g, None, None, heads.scale, heads.cap)


# ---- rows ----


@device_function
def _normalisers(heads, W: tl.constexpr, ROOM: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr, POLICY: tl.constexpr):
    """First sweep, to the right: statistics of a row, as `merge_statistics` takes them."""
    LAST: tl.constexpr = (W - 1) // BLOCK * BLOCK  # where the last piece begins
    lanes = tl.arange(0, BLOCK)
    largest = tl.full([BLOCK // GROUP], float("-inf"), tl.float32)
    teacher_largest = tl.full([BLOCK // GROUP], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK // GROUP], tl.float32)
    teacher_total = tl.zeros([BLOCK // GROUP], tl.float32)
    cross = tl.zeros([BLOCK // GROUP], tl.float32)
    for begin in range(0, LAST, BLOCK):
        columns = begin + lanes
        _, zs, zt = _both(heads, columns, W, ROOM, False, POLICY)
        largest, total, teacher_largest, teacher_total, cross = _add_piece(
            zs, zt, largest, total, teacher_largest, teacher_total, cross, KIND
        )
    _, zs, zt = _both(heads, LAST + lanes, W, ROOM, LAST + BLOCK > W, POLICY)
    largest, total, teacher_largest, teacher_total, cross = _add_piece(
        zs, zt, largest, total, teacher_largest, teacher_total, cross, KIND
    )
    most, teacher_most = tl.max(largest, 0), tl.max(teacher_largest, 0)
    worth, teacher_worth = probability_under(largest, most), probability_under(teacher_largest, teacher_most)
    shift = (_base(teacher_largest) - _base(teacher_most)) - (_base(largest) - _base(most))
    if KIND == FORWARD_KL:
        cross = _on_base(cross, teacher_total, teacher_worth, shift)
    if KIND == REVERSE_KL:
        cross = _on_base(cross, total, worth, -shift)
    return most, tl.sum(worth * total, 0), teacher_most, tl.sum(teacher_worth * teacher_total, 0), tl.sum(cross, 0)


@device_function
def _mixture_piece(heads, numbers, columns, W: tl.constexpr, ROOM: tl.constexpr, MASKED: tl.constexpr, POLICY: tl.constexpr):
    """A piece's part of KL(student || M) and of KL(teacher || M), in groups."""
    x, ls, lt = _log_probs(heads, numbers, columns, W, ROOM, MASKED, POLICY)
    s, t, above, teacher_above = _mixture(ls, lt, heads.beta, x.dtype != tl.float32)
    own = tl.where(s == 0, 0.0, s * above)
    teachers = tl.where(t == 0, 0.0, t * teacher_above)
    return tl.sum(_in_groups(own), 1), tl.sum(_in_groups(teachers), 1)


@device_function
def _gradient_piece(
    heads, numbers, out_ptr, columns, g, mean, W: tl.constexpr, ROOM: tl.constexpr, KIND: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    x, ls, lt = _log_probs(heads, numbers, columns, W, ROOM, MASKED, "evict_first")
    store_gradients(out_ptr, columns, _gradients(heads, x, ls, lt, g, mean, KIND), W, ROOM, MASKED)


@device_function
def _row(
    heads, out_ptr, numbers_ptr, sums_ptr, loss_ptr, far, sums_far, g,
    W: tl.constexpr, ROOM: tl.constexpr, KIND: tl.constexpr, BEGIN: tl.constexpr, END: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The sweeps from BEGIN to END of one row."""
    LAST: tl.constexpr = (W - 1) // BLOCK * BLOCK
    LATER: tl.constexpr = END == 3 or (KIND == JSD and END == 2)  # the first sweep is not the last
    lanes = tl.arange(0, BLOCK)
    mean = 0.0
    if BEGIN == 1:
        most, total, teacher_most, teacher_total, kl = _normalisers(
            heads, W, ROOM, KIND, BLOCK, "evict_last" if LATER else "evict_first"
        )
        base, log_total, teacher_base, teacher_log_total = most, total, teacher_most, teacher_total
        if END > 1:
            base, teacher_base = _base(most), _base(teacher_most)
            log_total, teacher_log_total = tl.log(total), tl.log(teacher_total)
            if KIND == FORWARD_KL:
                kl = kl / teacher_total + (log_total - teacher_log_total)
            if KIND == REVERSE_KL:
                kl = kl / total + (teacher_log_total - log_total)
                mean = kl
        tl.store(numbers_ptr, base)
        tl.store(numbers_ptr + far, log_total)
        tl.store(numbers_ptr + 2 * far, teacher_base)
        tl.store(numbers_ptr + 3 * far, teacher_log_total)
        if END == 1:
            tl.store(numbers_ptr + 4 * far, kl)
    else:
        base = tl.load(numbers_ptr)
        log_total = tl.load(numbers_ptr + far)
        teacher_base = tl.load(numbers_ptr + 2 * far)
        teacher_log_total = tl.load(numbers_ptr + 3 * far)
    numbers = _Normalisers(base, log_total, teacher_base, teacher_log_total)
    if KIND == JSD and BEGIN <= 2 and END >= 2:
        POLICY: tl.constexpr = "evict_last" if END == 3 else "evict_first"
        own, teachers = _mixture_piece(heads, numbers, LAST + lanes, W, ROOM, LAST + BLOCK > W, POLICY)  # to the left
        for back in range(BLOCK, LAST + BLOCK, BLOCK):
            more, teachers_more = _mixture_piece(heads, numbers, LAST - back + lanes, W, ROOM, False, POLICY)
            own += more
            teachers += teachers_more
        mean, kl = tl.sum(own, 0), tl.sum(teachers, 0)
        if BEGIN == 2:
            tl.store(sums_ptr, mean)
            tl.store(sums_ptr + sums_far, kl)
        kl = heads.beta * kl + (1.0 - heads.beta) * mean
    if BEGIN == 1 and END > 1:
        tl.store(loss_ptr, kl)
        tl.store(numbers_ptr + 4 * far, mean)
    if END == 3:
        if BEGIN == 3:
            mean = tl.load(numbers_ptr + 4 * far)
        if KIND == JSD:
            g *= 1.0 - heads.beta
        RIGHT: tl.constexpr = KIND == JSD and BEGIN == 1  # the third sweep
        if not RIGHT:
            _gradient_piece(heads, numbers, out_ptr, LAST + lanes, g, mean, W, ROOM, KIND, LAST + BLOCK > W)
        for at in range(0, LAST, BLOCK):
            columns = (at if RIGHT else LAST - BLOCK - at) + lanes
            _gradient_piece(heads, numbers, out_ptr, columns, g, mean, W, ROOM, KIND, False)
        if RIGHT:
            _gradient_piece(heads, numbers, out_ptr, LAST + lanes, g, mean, W, ROOM, KIND, LAST + BLOCK > W)


@kernel
def _divergence_kernel(
    x_ptr, out_ptr, teacher_ptr, labels_ptr, g_ptr, numbers_ptr, sums_ptr, loss_ptr,
    M, S,  # rows; the numbers of a row are S apart
    X_ROW, OUT_ROW, TEACHER_ROW, scale, cap, teacher_cap, beta, ignore,
    W: tl.constexpr, ROOM: tl.constexpr, KIND: tl.constexpr, BEGIN: tl.constexpr, END: tl.constexpr,
    PLANES: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    X_ROW, OUT_ROW, TEACHER_ROW = aligned(X_ROW, ALIGN), aligned(OUT_ROW, ALIGN), aligned(TEACHER_ROW, ALIGN)
    row = tl.program_id(0).to(tl.int64)
    far = S.to(tl.int64)
    counts = tl.load(labels_ptr + row).to(tl.int64) != ignore
    if counts:
        g = 1.0 if g_ptr is None else tl.load(g_ptr + row)
        heads = _Heads(x_ptr + row * X_ROW, teacher_ptr + row * TEACHER_ROW, scale, cap, teacher_cap, beta)
        _row(
            heads, None if out_ptr is None else out_ptr + row * OUT_ROW, numbers_ptr + row,
            None if sums_ptr is None else sums_ptr + row, None if loss_ptr is None else loss_ptr + row, far, M, g,
            W, ROOM, KIND, BEGIN, END, BLOCK,
        )  # fmt: skip
    else:  # its logits are not read
        if BEGIN == 1:
            for plane in range(PLANES):
                tl.store(numbers_ptr + plane * far + row, 0.0)
        if sums_ptr is not None:
            tl.store(sums_ptr + row, 0.0)
            tl.store(sums_ptr + M + row, 0.0)
        if loss_ptr is not None:
            tl.store(loss_ptr + row, 0.0)
        if out_ptr is not None:
            for begin in range(0, ROOM, BLOCK):
                columns = begin + tl.arange(0, BLOCK)
                tl.store(out_ptr + row * OUT_ROW + columns, tl.zeros([BLOCK], tl.float32), mask=columns < ROOM)


# ---- launches ----


class PieceTiles(NamedTuple):
    """Columns of a piece, warps, and how many programs share a multiprocessor's registers; 0: as many as fit."""

    block: int
    num_warps: int
    resident: int


def tiles_of_rows(W: int, kind: str, gradient: bool) -> PieceTiles:
    """Tiles by measurement, and pieces as wide as a row's room. With a gradient one program fills a multiprocessor: what it reads
    again should stay in caches."""
    if W <= 4096:
        return PieceTiles(power_of_two(max(W, APART)), max(1, power_of_two(W) // 512), 0)
    if kind == "jsd":
        return PieceTiles(4096, 16, 1)  # it has more to hold for each column
    if not gradient:
        return PieceTiles(4096, 8, 2)
    return PieceTiles(8192, 32 if kind == "forward_kl" else 16, 1)


@lru_cache(1024)
def _plan(W: int, room: int, strides: tuple[int, int, int], terms: DivergenceTerms, begin: int, end: int) -> Bound:
    tiles = tiles_of_rows(W, terms.kind, end == GRADIENT)
    numbers = *numbers_of(terms.student), terms.teacher.softcap or None, terms.beta
    bound: Bound = _divergence_kernel.bind(
        *strides, *numbers, terms.ignore_index, W, room, KINDS.index(terms.kind), begin, end,
        PLANES, known_align(*strides), tiles.block, num_warps=tiles.num_warps, resident=tiles.resident,
    )  # fmt: skip
    return bound


def _launch(
    logits: LogitRows, terms: DivergenceTerms, begin: int, end: int, numbers: Tensor, incoming: Tensor | None = None,
    sums: Tensor | None = None, losses: Tensor | None = None,
) -> None:  # fmt: skip
    M, W = logits.student.shape
    strides = logits.student.stride(0), logits.out.stride(0), logits.teacher.stride(0)
    out = logits.out if end == GRADIENT else None
    launch = _plan(W, logits.room, strides, terms, begin, end)
    launch((M, 1, 1), logits.student, out, logits.teacher, logits.labels, incoming, numbers, sums, losses, M, numbers.stride(0))


# The functions of rows.py, of [rows, columns] with evenly spaced rows and contiguous columns. A rank may have no columns.


def row_statistics(logits: LogitRows, terms: DivergenceTerms) -> Tensor:
    """[1, PLANES, rows] of these columns, for `merge_statistics`."""
    if not logits.student.shape[1]:
        return by_pytorch.row_statistics(logits, terms)
    parts = logits.student.new_empty(1, PLANES, logits.student.shape[0], dtype=torch.float32)
    _launch(logits, terms, NORMALISERS, NORMALISERS, parts[0])
    return parts


def mixture_sums(logits: LogitRows, terms: DivergenceTerms, rows: Tensor) -> Tensor:
    """[2, rows]: these columns' part of KL(student || M) and of KL(teacher || M)."""
    sums = rows.new_empty(2, rows.shape[1])
    if not logits.student.shape[1]:
        return sums.zero_()
    _launch(logits, terms, MIXTURE, MIXTURE, rows, sums=sums)
    return sums


def row_gradients(logits: LogitRows, terms: DivergenceTerms, rows: Tensor, incoming: Tensor | None) -> None:
    """Write the gradient of the student's logits. `incoming` are the gradients of rows' divergences; None: 1."""
    if logits.student.shape[1]:
        _launch(logits, terms, GRADIENT, GRADIENT, rows, incoming)


def whole_rows(logits: LogitRows, terms: DivergenceTerms, rows: Tensor, losses: Tensor, gradient: bool) -> None:
    """Write rows' numbers and divergences, and with `gradient` the gradient of the sum of these."""
    _launch(logits, terms, NORMALISERS, GRADIENT if gradient else MIXTURE, rows, losses=losses)
