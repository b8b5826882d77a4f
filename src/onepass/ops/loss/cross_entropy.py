"""cross_entropy: the loss of logits that are in memory already, with the vocabulary on one rank or divided over a group's.

Formula  a row's loss = (1 - a) (lse - z[label]) + a (lse - mean(z)) + z_loss lse^2, with lse = logsumexp(z) and a the
         label_smoothing; their mean over the rows that are kept, their sum, or the rows' own. fp32 inside, and the loss is fp32.
Shapes   logits [..., V], labels [...]. With tp_group the logits are this rank's [..., V_rank], and V is the sum over its ranks.
         M rows.
Saves    the logits as they are, labels, each row's lse.
Bytes    forward reads the logits; backward reads them and writes their gradient, beside them or over them. Ignored rows are not
         read.
Ranks    exchange how many columns they have, and their statistics of each row: two small gathers in forward, none in backward.
Kernels  ops/loss/row_kernels.py: linear_cross_entropy shares them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from onepass.kernels.language import triton_unsupported
from onepass.kernels.layout import as_rows
from onepass.ops.loss import row_formula, row_kernels
from onepass.ops.loss.formula import LossTerms, lse_type, reduce_losses, row_losses
from onepass.ops.loss.reduction import (
    can_validate_labels,
    check_labels,
    check_reduction,
    check_terms,
    reduce_rows,
    row_gradient,
    validate_labels,
)
from onepass.ops.loss.row_functions import PLANES
from onepass.ops.loss.row_kernels import (
    GRADIENT_EACH,
    GRADIENT_TILE,
    STATISTICS_EACH,
    STATISTICS_TILE,
    RowGradients,
    row_tiles,
)
from onepass.ops.loss.sharding import shard_cross_entropy
from onepass.parallel.collectives import group_of_several
from onepass.parallel.vocab_shards import start_gather_parts, vocab_range
from onepass.runtime.backend import NATIVE, choose, run_other
from onepass.runtime.checks import check_floating
from onepass.runtime.dispatch import fast_apply, needs_dispatcher, needs_grad, not_twice_differentiable, under_functorch
from onepass.runtime.op import Call, Registered, define_op
from onepass.runtime.sharding import has_dtensor, run_on_shards

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
    """The formula, for every type: of fp64 logits it is the tests' oracle."""
    terms = LossTerms(ignore_index, label_smoothing, z_loss)
    return reduce_losses(row_losses(logits, labels, terms).loss, labels, ignore_index, None, reduction)


# ---- rows: by the kernels, or by PyTorch ----


_ROWS: tuple[Any, Any] = row_formula, row_kernels


def _matrix(logits: Tensor) -> tuple[Tensor, bool]:
    """Logits as [rows, columns], and whether that is a copy."""
    x, _ = as_rows(logits)
    return x if x.dim() == 2 else x.view(logits.shape[:-1].numel(), logits.shape[-1]), x is not logits


def _statistics(logits: Tensor, labels: Tensor, place: Tensor | None, terms: LossTerms, use_triton: bool) -> Tensor:
    """[parts, PLANES, rows]."""
    x, _ = _matrix(logits)
    V = 0 if place is not None else x.shape[1]
    return _ROWS[use_triton].row_statistics(x, labels, terms, (), 0, V, place)  # type: ignore[no-any-return]


def _finish(
    parts: Tensor, labels: Tensor, place: Tensor | None, V: int, logits: torch.dtype, terms: LossTerms, use_triton: bool
) -> tuple[Tensor, Tensor]:
    found = _ROWS[use_triton].finish_losses(parts, labels, terms, (), V, logits, place)
    return found.loss, found.logsumexp


def _whole_losses(logits: Tensor, labels: Tensor, terms: LossTerms, use_triton: bool) -> tuple[Tensor, Tensor]:
    parts = _statistics(logits, labels, None, terms, use_triton)
    return _finish(parts, labels, None, logits.shape[-1], logits.dtype, terms, use_triton)


def _partial_statistics(logits: Tensor, labels: Tensor, place: Tensor, terms: LossTerms, use_triton: bool) -> Tensor:
    """[1, PLANES, rows], of this rank's columns."""
    parts = _statistics(logits, labels, place, terms, use_triton)
    return row_kernels.merge_statistics(parts, terms, ()) if use_triton else parts


def _all_planes(logits: Tensor, labels: Tensor, place: Tensor, terms: LossTerms, use_triton: bool) -> Tensor:
    """`_partial_statistics` with zeros in unused planes: what a graph's op returns must be the same every time."""
    part = _partial_statistics(logits, labels, place, terms, use_triton)
    part[:, 3 if not terms.smoothing else 4 :].zero_()
    return part


def _partial_losses(
    parts: Tensor, labels: Tensor, place: Tensor, logits: torch.dtype, terms: LossTerms, use_triton: bool
) -> tuple[Tensor, Tensor]:
    """Losses from all ranks' statistics."""
    return _finish(parts, labels, place, 0, logits, terms, use_triton)


def _logits_gradient(
    logits: Tensor, labels: Tensor, place: Tensor | None, lse: Tensor, g: Tensor, terms: LossTerms, use_triton: bool,
    in_place: bool = False,
) -> Tensor:  # fmt: skip
    """Return the gradient, of the logits' shape: over the logits, over the copy that had to be made, or in new memory."""
    x, copied = _matrix(logits)
    out = x if in_place or copied else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    V = 0 if place is not None else x.shape[1]
    _ROWS[use_triton].row_gradients(x, out, labels, terms, lse, None, RowGradients(g), 0, V, place)
    return out if out.dim() == logits.dim() else out.view(logits.shape)


# ---- registered ops ----


def _losses_fake(labels: Tensor, logits: torch.dtype) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(logits, torch.float32)
    return labels.new_empty(labels.shape, dtype=wide), labels.new_empty(labels.shape, dtype=lse_type(logits))


def _partial_statistics_fake(logits: Tensor, labels: Tensor, *_: Any) -> Tensor:
    return logits.new_empty(1, PLANES, labels.shape[0], dtype=torch.promote_types(logits.dtype, torch.float32))


whole_losses = Registered(
    "cross_entropy(Tensor logits, Tensor labels, LossTerms terms, bool use_triton) -> (Tensor, Tensor)",
    _whole_losses,
    lambda logits, labels, *_: _losses_fake(labels, logits.dtype),
    LossTerms,
)
partial_statistics = Registered(
    "cross_entropy_part(Tensor logits, Tensor labels, Tensor place, LossTerms terms, bool use_triton) -> Tensor",
    _partial_statistics,
    _partial_statistics_fake,
    LossTerms,
    dispatched=_all_planes,
)
partial_losses = Registered(
    "cross_entropy_finish(Tensor parts, Tensor labels, Tensor place, ScalarType logits, LossTerms terms, bool use_triton) "
    "-> (Tensor, Tensor)",
    _partial_losses,
    lambda parts, labels, place, logits, *_: _losses_fake(labels, logits),
    LossTerms,
)
logits_gradient = Registered(
    "cross_entropy_gradient(Tensor logits, Tensor labels, Tensor? place, Tensor lse, Tensor g, LossTerms terms, bool use_triton) "
    "-> Tensor",
    _logits_gradient,
    lambda logits, *_: logits.new_empty(logits.shape),
    LossTerms,
)


# ---- autograd ----


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, group: dist.ProcessGroup | None, reduction: str, terms: LossTerms,
        in_place: bool, use_triton: bool,
    ) -> Tensor:  # fmt: skip
        loss, flat, lse, scale, place = _forward(logits, labels, group, reduction, terms, use_triton)
        ctx.options, ctx.overwritten = (reduction, terms, in_place, use_triton), False
        ctx.save_for_backward(logits, flat, lse, scale, place)
        return loss

    @staticmethod
    @not_twice_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        reduction, terms, in_place, use_triton = ctx.options
        if in_place:
            if ctx.overwritten:
                raise RuntimeError(
                    "cross_entropy(inplace_backward=True) can go backward once: its logits have held their gradient since"
                )
            ctx.overwritten = True
        logits, labels, lse, scale, place = ctx.saved_tensors
        g = row_gradient(dy, reduction, labels.shape[0], scale)
        dlogits = logits_gradient(logits, labels, place, lse, g, terms, use_triton, in_place=in_place)
        if in_place:
            torch.autograd.graph.increment_version(logits)  # an op that has saved them for its backward raises
        return dlogits, None, None, None, None, None, None


_apply = fast_apply(_CrossEntropy)


def _forward(
    logits: Tensor, labels: Tensor, group: dist.ProcessGroup | None, reduction: str, terms: LossTerms, use_triton: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return the loss, and for backward the labels in one dimension, rows' logsumexp, a mean's scale, and this rank's place."""
    place = None if group is None else vocab_range(logits.shape[-1], group, logits.device)
    if can_validate_labels(labels):
        validate_labels(labels, logits.shape[-1] if place is None else int(place[1]), terms.ignore_index)
    flat = labels.reshape(labels.numel()).contiguous()
    if group is None or place is None:
        losses, lse = whole_losses(logits, flat, terms, use_triton)
    else:
        parts = start_gather_parts(partial_statistics(logits, flat, place, terms, use_triton), group).wait()
        losses, lse = partial_losses(parts, flat, place, logits.dtype, terms, use_triton)
    if reduction == "none":
        loss, scale = losses.view(labels.shape).clone(), None  # its own memory: people multiply it in place by a mask
    else:
        # Where a compiler or a mode sees the call, PyTorch reduces: it sees operators, which it may fuse, but no kernel.
        by_kernel = use_triton and not needs_dispatcher(logits, labels)
        loss, scale = reduce_rows(losses, flat, terms.ignore_index, reduction, None, by_kernel)
    return loss, flat, lse, scale, place


# ---- the public function: check, choose a backend, run ----


def _unsupported(logits: Tensor) -> str | None:
    """Why the kernels can't take this call, or None."""
    if logits.dtype not in _TYPES:
        return f"logits is {logits.dtype}"
    if under_functorch():
        return "vmap, a functional derivative or forward-mode differentiation is in force"
    reason = triton_unsupported(logits)
    return None if reason is None else reason.replace("x is", "logits is")


def _variant(call: Call) -> str:
    """Which kernels a call runs, and their tiles."""
    if not call.labels.numel():
        return "the PyTorch formula, as there is nothing to do"
    ahead = row_tiles(call.logits.shape[-1], STATISTICS_TILE, STATISTICS_EACH)
    back = row_tiles(call.logits.shape[-1], GRADIENT_TILE, GRADIENT_EACH)
    said = f"forward with {ahead.used} programs a row, tiles of {ahead.tile} columns"
    said += ", the ranks' statistics in one gather" if group_of_several(call.tp_group) is not None else ""
    said += f"; backward with {back.used} programs a row, tiles of {back.tile} columns"
    said += ", the gradient over the logits" if call.inplace_backward else ", the gradient in memory of its own"
    return said + "; keeps the logits and their rows' logsumexp"


def _checked(
    logits: Tensor, labels: Tensor, tp_group: dist.ProcessGroup | None, reduction: str, ignore_index: int,
    label_smoothing: float, z_loss: float, inplace_backward: bool,
) -> tuple[dist.ProcessGroup | None, LossTerms]:  # fmt: skip
    """Raise where an argument is wrong; return the group if there are others in it, and the terms of the loss."""
    check_floating("logits", logits)
    group = group_of_several(tp_group, "tp_group")
    if logits.dim() == 0 or (group is None and logits.shape[-1] == 0):
        raise ValueError(f"logits must have a last dimension of at least 1, but has shape {tuple(logits.shape)}")
    check_labels(labels, logits.shape[:-1], logits.device, ignore_index)
    check_reduction(reduction)
    terms = check_terms(ignore_index, label_smoothing, z_loss)
    if inplace_backward and needs_grad(logits) and not torch.compiler.is_compiling():
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
        tp_group: the ranks that each have some columns of the logits, in the order of the ranks. A rank may have any number of
            columns, or none. Labels and the loss are whole, and the same on all ranks. Forward is collective.
        reduction: ``none`` returns each row's loss, ``mean`` the mean over rows that are not ignored (0 if all are), ``sum`` the
            sum.
        ignore_index: rows with this label have no loss and no gradient, and are not read.
        label_smoothing: from 0 to 1: this part of each row's target is spread evenly over the whole vocabulary. Megatron spreads
            it over the other tokens: its a is a V / (V - 1) here.
        z_loss: this times logsumexp(logits)^2 is added to each row's loss.
        inplace_backward: backward writes the gradient over the logits (over a copy if their rows are not evenly spaced), which
            saves memory of their size. An op that has saved the logits for its own backward then raises, and code that reads them
            finds the gradient. A second backward raises. The logits can't be a leaf that requires grad. Compiled, under vmap and
            the like and under dispatch modes, the gradient has its own memory.
        backend: ``auto``, ``triton``, ``torch`` or a registered name; None leaves it to `use_backend` and ONEPASS_BACKEND.

    Returns:
        The loss in fp32 (fp64 of fp64): a number, or for ``none`` of labels' shape.
    """
    if has_dtensor(logits, labels):
        return run_on_shards(  # type: ignore[no-any-return]
            "cross_entropy", logits=logits, labels=labels, tp_group=tp_group, reduction=reduction, ignore_index=ignore_index,
            label_smoothing=label_smoothing, z_loss=z_loss, inplace_backward=inplace_backward, backend=backend,
        )  # fmt: skip
    group, terms = _checked(logits, labels, tp_group, reduction, ignore_index, label_smoothing, z_loss, inplace_backward)
    chosen = choose("cross_entropy", backend, _unsupported(logits))
    if chosen not in NATIVE:
        return run_other(  # type: ignore[no-any-return]
            "cross_entropy", chosen, logits, labels, tp_group, reduction, ignore_index,
            label_smoothing=label_smoothing, z_loss=z_loss, inplace_backward=inplace_backward,
        )  # fmt: skip
    if group is not None and under_functorch():
        raise RuntimeError(
            "cross_entropy over a tp_group can't follow vmap, functional derivatives or forward-mode differentiation"
        )
    use_triton = chosen == "triton" and labels.numel() > 0
    # Compilers, modes and transforms choose by themselves what to keep of a formula, and differentiate it.
    if group is None and not use_triton and (under_functorch() or needs_dispatcher(logits, labels)):
        if can_validate_labels(labels):
            validate_labels(labels, logits.shape[-1], ignore_index)
        return reduce_losses(row_losses(logits, labels, terms).loss, labels, ignore_index, None, reduction)
    if not needs_grad(logits):
        return _forward(logits, labels, group, reduction, terms, use_triton)[0]
    in_place = inplace_backward and not torch.compiler.is_compiling()
    return _apply(logits, labels, group, reduction, terms, in_place, use_triton)  # type: ignore[no-any-return]


define_op(
    cross_entropy,
    check=lambda call: _checked(**vars(call)),
    unsupported=lambda call: _unsupported(call.logits),
    variant=_variant,
    sharding=shard_cross_entropy,
)
