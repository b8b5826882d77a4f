"""cross_entropy: the loss of logits that are there already, with the vocabulary on one rank or divided over those of a group.

Formula  a row's loss = (1 - a) (lse - z[label]) + a (lse - mean(z)) + z_loss lse^2, with lse = logsumexp(z) and a the
         label_smoothing; their mean over the rows that are kept, their sum, or the rows' own. fp32 inside, and the loss is fp32.
Shapes   logits [..., V], labels [...]. With tp_group the logits are this rank's [..., V_rank], and V is the sum over its ranks.
         M rows.
Saves    the logits as they are, labels, each row's lse.
Bytes    forward reads the logits, backward reads them and writes their gradient, beside them or over them. Rows that are ignored
         are not read.
Ranks    tell each other how many columns they have, and what they found of each row: two small gathers, and none in backward.
Kernels  kernels/softmax_rows.py: linear_cross_entropy shares them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from onepass.kernels import softmax_formula_rows, softmax_rows
from onepass.kernels.cross_entropy_formula import Terms, lse_type, reduced, row_losses
from onepass.kernels.losses import (
    can_look,
    check_labels,
    check_reduction,
    check_terms,
    look_at_labels,
    reduced_rows,
    row_gradient,
)
from onepass.kernels.softmax_pieces import PLANES
from onepass.kernels.softmax_rows import (
    GRADIENT_EACH,
    GRADIENT_TILE,
    STATISTICS_EACH,
    STATISTICS_TILE,
    Incoming,
    tiles_of,
)
from onepass.parallel.collectives import with_others
from onepass.parallel.vocabulary import gathered_parts, vocab_place
from onepass.runtime.backend import NATIVE, choose, register_op, run_other
from onepass.runtime.checks import check_floating
from onepass.runtime.dispatch import bare_apply, needs_grad, once, registered, transformed, watched
from onepass.runtime.lang import no_triton
from onepass.runtime.layout import as_rows

_TYPES = (torch.bfloat16, torch.float32, torch.float16)


def cross_entropy_reference(
    logits: Tensor,
    labels: Tensor,
    *,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """The formula, for every type: fp64 logits make it the oracle."""
    terms = Terms(ignore_index, label_smoothing, z_loss)
    return reduced(row_losses(logits, labels, terms).loss, labels, terms, None, reduction)


# ---- rows: by the kernels, or by PyTorch ----


def _rows(native: bool) -> Any:
    """Whose statistics and gradients."""
    return softmax_rows if native else softmax_formula_rows


def _matrix(logits: Tensor) -> tuple[Tensor, bool]:
    """[rows, columns], and whether it is a copy."""
    x, _ = as_rows(logits)
    return x if x.dim() == 2 else x.view(logits.shape[:-1].numel(), logits.shape[-1]), x is not logits


def _statistics(logits: Tensor, labels: Tensor, place: Tensor | None, terms: Terms, native: bool) -> Tensor:
    """[parts, PLANES, rows]."""
    x, _ = _matrix(logits)
    V = 0 if place is not None else x.shape[1]
    return _rows(native).statistics(x, labels, terms, False, 0, V, place)  # type: ignore[no-any-return]


def _finished(
    parts: Tensor, labels: Tensor, place: Tensor | None, V: int, logits: torch.dtype, terms: Terms, native: bool
) -> tuple[Tensor, Tensor]:
    """Each row's loss and logsumexp."""
    found = _rows(native).finished(parts, labels, terms, False, V, logits, place)
    return found.loss, found.logsumexp


def _whole_rows(logits: Tensor, labels: Tensor, terms: Terms, native: bool) -> tuple[Tensor, Tensor]:
    parts = _statistics(logits, labels, None, terms, native)
    return _finished(parts, labels, None, logits.shape[-1], logits.dtype, terms, native)


def _own_part(logits: Tensor, labels: Tensor, place: Tensor, terms: Terms, native: bool) -> Tensor:
    """[1, PLANES, rows], of this rank's columns."""
    parts = _statistics(logits, labels, place, terms, native)
    return softmax_rows.merged(parts, terms, False) if native else parts


def _gradient(
    logits: Tensor, labels: Tensor, place: Tensor | None, lse: Tensor, g: Tensor, terms: Terms, native: bool, over: bool
) -> Tensor:
    """Of the logits' shape: over the logits, or over the copy that had to be made of them, or in a tensor of its own."""
    x, copied = _matrix(logits)
    out = x if over or copied else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    V = 0 if place is not None else x.shape[1]
    _rows(native).gradient(x, out, labels, terms, lse, None, Incoming(g), 0, V, place)
    return out if out.dim() == logits.dim() else out.view(logits.shape)


# ---- registered: opaque to the compiler, visible to checkpointing ----


def _own(losses: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Kernels put them in one tensor, which graphs take for two."""
    return losses.clone(), lse.clone()


def _whole_part(logits: Tensor, labels: Tensor, place: Tensor, terms: Terms, native: bool) -> Tensor:
    """All planes written: those that nobody asked for are zeros, as what a graph's op returns must be the same every time."""
    part = _own_part(logits, labels, place, terms, native)
    part[:, 3 if not terms.smoothing else 4 :].zero_()
    return part


def _rows_fake(labels: Tensor, logits: torch.dtype) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(logits, torch.float32)
    return labels.new_empty(labels.shape, dtype=wide), labels.new_empty(labels.shape, dtype=lse_type(logits))


_TERMS = "int ignore_index, float smoothing, float z_loss, bool native"
_rows_op = registered(
    f"cross_entropy(Tensor logits, Tensor labels, {_TERMS}) -> (Tensor, Tensor)",
    lambda logits, labels, *terms, **_: _own(*_whole_rows(logits, labels, Terms(*terms[:3]), terms[3])),
    lambda logits, labels, *_: _rows_fake(labels, logits.dtype),
)
_part_op = registered(
    f"cross_entropy_part(Tensor logits, Tensor labels, Tensor place, {_TERMS}) -> Tensor",
    lambda logits, labels, place, *terms: _whole_part(logits, labels, place, Terms(*terms[:3]), terms[3]),
    lambda logits, labels, *_: logits.new_empty(
        1, PLANES, labels.shape[0], dtype=torch.promote_types(logits.dtype, torch.float32)
    ),
)
_finish_op = registered(
    f"cross_entropy_finish(Tensor parts, Tensor labels, Tensor place, ScalarType logits, {_TERMS}) -> (Tensor, Tensor)",
    lambda parts, labels, place, logits, *terms: _own(*_finished(parts, labels, place, 0, logits, Terms(*terms[:3]), terms[3])),
    lambda parts, labels, place, logits, *_: _rows_fake(labels, logits),
)
_gradient_op = registered(
    f"cross_entropy_gradient(Tensor logits, Tensor labels, Tensor? place, Tensor lse, Tensor g, {_TERMS}) -> Tensor",
    lambda logits, labels, place, lse, g, *terms: _gradient(logits, labels, place, lse, g, Terms(*terms[:3]), terms[3], False),
    lambda logits, *_: logits.new_empty(logits.shape),
)


def _losses(
    logits: Tensor, labels: Tensor, place: Tensor | None, group: dist.ProcessGroup | None, terms: Terms, native: bool
) -> tuple[Tensor, Tensor]:
    """Each row's loss and logsumexp, of the whole vocabulary."""
    seen = watched(logits, labels)
    said = *terms[:3], native
    if group is None or place is None:
        return _rows_op(logits, labels, *said) if seen else _whole_rows(logits, labels, terms, native)
    part = _part_op(logits, labels, place, *said) if seen else _own_part(logits, labels, place, terms, native)
    parts = gathered_parts(part, group).wait()
    if seen:
        return _finish_op(parts, labels, place, logits.dtype, *said)  # type: ignore[no-any-return]
    return _finished(parts, labels, place, 0, logits.dtype, terms, native)


# ---- autograd ----


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, group: dist.ProcessGroup | None, reduction: str, terms: Terms,
        over: bool, native: bool,
    ) -> Tensor:  # fmt: skip
        loss, flat, lse, scale, place = _forward(logits, labels, group, reduction, terms, native)
        ctx.call, ctx.spent = (reduction, terms, over, native), False
        ctx.save_for_backward(logits, flat, lse, scale, place)
        return loss

    @staticmethod
    @once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        reduction, terms, over, native = ctx.call
        if over:
            if ctx.spent:
                raise RuntimeError(
                    "cross_entropy(inplace_backward=True) can go backward once: its logits have held their gradient since"
                )
            ctx.spent = True
        logits, labels, lse, scale, place = ctx.saved_tensors
        g = row_gradient(dy, reduction, labels.shape[0], scale)
        if watched(logits, dy):
            dlogits = _gradient_op(logits, labels, place, lse, g, *terms[:3], native)
        else:
            dlogits = _gradient(logits, labels, place, lse, g, terms, native, over)
        if over:
            torch.autograd.graph.increment_version(logits)  # whoever has saved them for a backward of its own is told
        return dlogits, None, None, None, None, None, None


_apply = bare_apply(_CrossEntropy)


def _forward(
    logits: Tensor, labels: Tensor, group: dist.ProcessGroup | None, reduction: str, terms: Terms, native: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """The loss; and for backward the labels in one dimension, each row's logsumexp, a mean's scale, and this rank's place."""
    place = None if group is None else vocab_place(logits.shape[-1], group, logits.device)
    if can_look(labels):
        look_at_labels(labels, logits.shape[-1] if place is None else int(place[1]), terms.ignore_index)
    flat = labels.reshape(labels.numel()).contiguous()
    losses, lse = _losses(logits, flat, place, group, terms, native)
    loss, scale = reduced_rows(losses, flat, terms, reduction, native=native and not watched(logits, labels))
    if reduction == "none":
        loss = losses.view(labels.shape).clone()  # of its own: people multiply it in place by a mask
    return loss, flat, lse, scale, place


# ---- the public face: say what is wrong, choose who does it, return ----


def unsupported(logits: Tensor, *args: Any, **options: Any) -> str | None:
    """Why the kernels can't take this call, or None."""
    if logits.dtype not in _TYPES:
        return f"logits is {logits.dtype}"
    if transformed():
        return "vmap, a functional derivative or forward-mode differentiation is in force"
    reason = no_triton(logits)
    return None if reason is None else reason.replace("x is", "logits is")


def variant(
    logits: Tensor,
    labels: Tensor,
    tp_group: dist.ProcessGroup | None = None,
    *args: Any,
    inplace_backward: bool = False,
    **_: Any,
) -> str:
    """Which kernels a call runs, and their tiles."""
    if not labels.numel():
        return "the PyTorch formula, as there is nothing to do"
    ahead = tiles_of(logits.shape[-1], STATISTICS_TILE, STATISTICS_EACH)
    back = tiles_of(logits.shape[-1], GRADIENT_TILE, GRADIENT_EACH)
    said = f"forward with {ahead.used} programs a row, tiles of {ahead.tile} columns"
    said += ", the ranks' statistics in one gather" if with_others(tp_group) is not None else ""
    said += f"; backward with {back.used} programs a row, tiles of {back.tile} columns"
    said += ", the gradient over the logits" if inplace_backward else ", the gradient in memory of its own"
    return said + "; keeps the logits and their rows' logsumexp"


def _check(
    logits: Tensor, labels: Tensor, tp_group: dist.ProcessGroup | None = None, reduction: str = "mean", ignore_index: int = -100,
    *, label_smoothing: float = 0.0, z_loss: float = 0.0, inplace_backward: bool = False,
) -> None:  # fmt: skip
    _checked(logits, labels, tp_group, reduction, ignore_index, label_smoothing, z_loss, inplace_backward)


def _checked(
    logits: Tensor, labels: Tensor, tp_group: dist.ProcessGroup | None, reduction: str, ignore_index: int,
    label_smoothing: float, z_loss: float, over: bool,
) -> tuple[dist.ProcessGroup | None, Terms]:  # fmt: skip
    """The group, where there are others in it, and what the loss is made of."""
    check_floating("logits", logits)
    group = with_others(tp_group, "tp_group")
    if logits.dim() == 0 or (group is None and logits.shape[-1] == 0):
        raise ValueError(f"logits must have a last dimension of at least 1, but has shape {tuple(logits.shape)}")
    check_labels(labels, logits.shape[:-1], logits.device, ignore_index)
    check_reduction(reduction)
    terms = check_terms(ignore_index, label_smoothing, z_loss)
    if over and needs_grad(logits) and not torch.compiler.is_compiling():
        whole = logits._base if logits._is_view() and logits._base is not None else logits
        if whole.is_leaf and whole.requires_grad:
            raise ValueError(
                "logits must be made by an op for inplace_backward to write over them, but is a leaf that requires grad, "
                "or a view of one: its values would be lost"
            )
    return group, terms


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    tp_group: dist.ProcessGroup | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    inplace_backward: bool = False,
    backend: str | None = None,
) -> Tensor:
    """The cross-entropy of logits and the tokens that are right: `torch.nn.functional.cross_entropy`, in fp32 whatever they are.

    It is differentiable once; `cross_entropy_reference`, a plain formula, can be differentiated again.

    Args:
        logits: ``[..., V]``. With a ``tp_group``, this rank's ``[..., V_rank]``.
        labels: ``[...]``, int32 or int64, from 0 to V - 1 or ``ignore_index``. Others raise on a CPU and under
            `onepass.validate()`; on a GPU, and compiled, their rows' loss is NaN, and their gradient zeros.
        tp_group: the ranks that each have some columns of the logits, in the order of the ranks. As many as each has; it may have
            none. Labels and the loss are the whole, and the same on all ranks. Forward is collective.
        reduction: ``none``: each row's loss; ``mean``: over the rows that are not ignored, and 0 where all are; ``sum``.
        ignore_index: rows with this label have no loss and no gradient, and are not read.
        label_smoothing: from 0 to 1: so much of each row's target is spread evenly over the whole vocabulary. Megatron spreads it
            over the other tokens: its a is a V / (V - 1) here.
        z_loss: this times logsumexp(logits)^2 is added to each row's loss.
        inplace_backward: backward writes the gradient over the logits (a copy where their rows don't lie evenly spaced), which
            spares memory of their size. Nobody may need them by then: an op that has saved them for its own backward raises, and
            who reads them finds the gradient. A second backward raises. The logits can't be a leaf that requires grad. Compiled,
            under vmap and the like and under dispatch modes the gradient has memory of its own.
        backend: ``auto``, ``triton``, ``torch`` or a registered name; None leaves it to `use_backend` and ONEPASS_BACKEND.

    Returns:
        The loss in fp32 (fp64 of fp64): a number, or for ``none`` of labels' shape.
    """
    group, terms = _checked(logits, labels, tp_group, reduction, ignore_index, label_smoothing, z_loss, inplace_backward)
    chosen = choose("cross_entropy", backend, unsupported(logits))
    if chosen not in NATIVE:
        options = {"label_smoothing": label_smoothing, "z_loss": z_loss, "inplace_backward": inplace_backward}
        return run_other("cross_entropy", chosen, logits, labels, tp_group, reduction, ignore_index, **options)  # type: ignore[no-any-return]
    if group is not None and transformed():
        raise RuntimeError(
            "cross_entropy over a tp_group can't follow vmap, functional derivatives or forward-mode differentiation"
        )
    native = chosen == "triton" and labels.numel() > 0
    if group is None and not native and (transformed() or watched(logits, labels)):  # these see to what is kept by themselves
        if can_look(labels):
            look_at_labels(labels, logits.shape[-1], ignore_index)
        return reduced(row_losses(logits, labels, terms).loss, labels, terms, None, reduction)
    if not needs_grad(logits):
        return _forward(logits, labels, group, reduction, terms, native)[0]
    over = inplace_backward and not torch.compiler.is_compiling()
    return _apply(logits, labels, group, reduction, terms, over, native)  # type: ignore[no-any-return]


register_op(cross_entropy, _check, unsupported, variant)
