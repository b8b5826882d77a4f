"""cross_entropy: the loss of logits that are in memory already, with the vocabulary on one rank or divided over a group's.

Formula  a row's loss = (1 - a) (lse - z[label]) + a (lse - mean(z)) + z_loss lse^2, with lse = logsumexp(z) and a the
         label_smoothing; their mean over the rows that are kept, their sum, or the rows' own. fp32 inside, and the loss is fp32.
         With a softcap z = softcap * tanh(logits / softcap). With class weights and probabilities as ops/loss/targets.py says.
Shapes   logits [..., V], labels [...] or probabilities [..., V], weight [V]. With tp_group logits and probabilities are this
         rank's [..., V_rank], and V is the sum over its ranks. M rows.
Saves    the logits as they are, labels or probabilities, each row's lse.
Bytes    forward reads the logits; backward reads them and writes their gradient, beside them or over them. Ignored rows are not
         read. Probabilities are read both times.
Ranks    exchange how many columns they have, and their statistics of each row: two small gathers in forward, none in backward.
Kernels  ops/loss/row_kernels.py: linear_cross_entropy shares them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, overload

import torch
import torch.distributed as dist
from torch import Tensor

from onepass.distributed.collectives import group_of_several, start_all_gather, vocab_range
from onepass.kernels.language import kernels_unsupported
from onepass.ops.loss import logit_rows
from onepass.ops.loss.formula import (
    DIFFERENTIABLE_STATISTICS,
    LossTerms,
    NamedStats,
    RowLosses,
    Stats,
    check_statistics,
    lse_type,
    make_stats,
    reduce_losses,
    row_losses,
)
from onepass.ops.loss.logit_rows import LogitsKept
from onepass.ops.loss.reduction import (
    can_validate_labels,
    check_labels,
    check_reduction,
    check_terms,
    reduce_rows,
    row_gradient,
    validate_labels,
)
from onepass.ops.loss.row_functions import planes_of
from onepass.ops.loss.row_kernels import (
    GRADIENT_EACH,
    GRADIENT_TILE,
    STATISTICS_EACH,
    STATISTICS_TILE,
    RowGradients,
    row_tiles,
)
from onepass.ops.loss.sharding import shard_cross_entropy
from onepass.ops.loss.targets import Targets, as_targets, check_class_weight, has_masses, row_weights, split_labels
from onepass.runtime.backend import NATIVE, choose, run_other
from onepass.runtime.checks import check_floating
from onepass.runtime.dispatch import fast_apply, needs_dispatcher, needs_grad, not_twice_differentiable, under_functorch
from onepass.runtime.op import Call, Registered, define_op
from onepass.runtime.sharding import has_dtensor, run_on_shards

_TYPES = (torch.bfloat16, torch.float32, torch.float16)


class CrossEntropyCall(NamedTuple):
    """The arguments of a call but its backend, in the order of the public signature."""

    logits: Tensor
    labels: Tensor
    tp_group: dist.ProcessGroup | None = None
    reduction: str = "mean"
    ignore_index: int = -100
    weight: Tensor | None = None
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float | None = None
    return_stats: bool | Sequence[str] = False
    inplace_backward: bool = False

    def terms(self) -> LossTerms:
        """Check the terms of a row's loss, and return them."""
        return check_terms(self.ignore_index, self.label_smoothing, self.z_loss, self.softcap)


def cross_entropy_reference(logits: Tensor, labels: Tensor, **options: Any) -> Any:
    """Return one rank's loss, or (loss, stats), by the formula, for every type: of fp64 logits it is the tests' oracle.

    options: those of `cross_entropy`.
    """
    return _formula(CrossEntropyCall(logits, labels, tp_group=None, **options))


def _formula(call: CrossEntropyCall) -> Any:
    names, terms = check_statistics(call.return_stats), call.terms()
    labels, probabilities = split_labels(call.labels)
    masses = probabilities, call.weight
    targets = Targets(*masses) if has_masses(*masses, terms.smoothing) else None
    rows = row_losses(call.logits, labels, terms, names, targets=targets)
    weights = row_weights(labels, terms.ignore_index, *masses, terms.smoothing)
    loss = reduce_losses(rows.loss, labels, terms.ignore_index, weights.of_losses, call.reduction, weights.of_mean)
    return (loss, make_stats(call.return_stats, [rows.statistic(name, terms) for name in names])) if names else loss


# ---- registered ops ----


def _unshared(rows: RowLosses) -> tuple[Tensor | None, ...]:
    """Tensors that share no memory, as a graph's op must return."""
    return tuple(None if t is None else t.clone() for t in rows)


def _losses_fake(labels: Tensor, logits: torch.dtype, stats: str, masses: bool) -> tuple[Tensor | None, ...]:
    wide, names = torch.promote_types(logits, torch.float32), (*logit_rows.names_of(stats), *["mass"] * masses)
    kinds = {"loss": wide, "logsumexp": lse_type(logits), "correct": torch.bool}
    needed = ("loss", "logsumexp", *names)
    return tuple(labels.new_empty(labels.shape, dtype=kinds.get(f, wide)) if f in needed else None for f in RowLosses._fields)


def _whole_losses_fake(
    logits: Tensor, labels: Tensor, probabilities: Tensor | None, class_weight: Tensor | None, terms: LossTerms, stats: str,
    use_triton: bool,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    return _losses_fake(labels, logits.dtype, stats, as_targets(probabilities, class_weight) is not None)


def _partial_statistics_fake(
    logits: Tensor, labels: Tensor, place: Tensor, probabilities: Tensor | None, class_weight: Tensor | None, *_: Any
) -> Tensor:  # fmt: skip
    planes = planes_of(as_targets(probabilities, class_weight))
    return logits.new_empty(1, planes, labels.shape[0], dtype=torch.promote_types(logits.dtype, torch.float32))


# Tensors of `RowLosses`; those that may be None are declared so and told apart by `stats`, as `Registered` takes one without rows
# for None.
_ROW_LOSSES = "(" + ", ".join(["Tensor"] * len(RowLosses._fields)) + ")"
whole_losses = Registered(
    "cross_entropy(Tensor logits, Tensor labels, Tensor? probabilities, Tensor? class_weight, LossTerms terms, str stats, "
    f"bool use_triton) -> {_ROW_LOSSES}",
    logit_rows.whole_losses,
    _whole_losses_fake,
    LossTerms,
    dispatched=lambda *args: _unshared(logit_rows.whole_losses(*args)),
)
partial_statistics = Registered(
    "cross_entropy_part(Tensor logits, Tensor labels, Tensor place, Tensor? probabilities, Tensor? class_weight, "
    "LossTerms terms, str stats, bool use_triton) -> Tensor",
    logit_rows.partial_statistics,
    _partial_statistics_fake,
    LossTerms,
    dispatched=logit_rows.all_planes,
)
partial_losses = Registered(
    "cross_entropy_finish(Tensor parts, Tensor labels, Tensor place, Tensor? class_weight, ScalarType logits, bool masses, "
    f"LossTerms terms, str stats, bool use_triton) -> {_ROW_LOSSES}",
    logit_rows.partial_losses,
    lambda parts, labels, place, class_weight, logits, masses, terms, stats, *_: _losses_fake(labels, logits, stats, masses),
    LossTerms,
    dispatched=lambda *args: _unshared(logit_rows.partial_losses(*args)),
)
logits_gradient = Registered(
    "cross_entropy_gradient(LogitsKept kept, RowGradients incoming, LossTerms terms, bool use_triton) -> Tensor",
    logit_rows.logits_gradient,
    lambda kept, *_: kept.logits.new_empty(kept.logits.shape),
    LogitsKept,
    RowGradients,
    LossTerms,
)


# ---- autograd ----


class _CrossEntropy(torch.autograd.Function):
    """Outputs: the loss, and the statistics that are named."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, probabilities: Tensor | None, class_weight: Tensor | None,
        group: dist.ProcessGroup | None, reduction: str, terms: LossTerms, stats: str, in_place: bool, use_triton: bool,
    ) -> Any:  # fmt: skip
        outputs, saved = _forward(logits, labels, probabilities, class_weight, group, reduction, terms, stats, use_triton)
        ctx.options, ctx.overwritten = (reduction, terms, stats, in_place, use_triton), False
        ctx.save_for_backward(logits, *saved)
        if not stats:
            return outputs[0]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(
            *(t for name, t in zip(logit_rows.names_of(stats), outputs[1:], strict=True) if name not in DIFFERENTIABLE_STATISTICS)
        )
        return outputs

    @staticmethod
    @not_twice_differentiable
    def backward(ctx: Any, dy: Tensor | None, *dstats: Tensor | None) -> tuple[Tensor | None, ...]:
        reduction, terms, stats, in_place, use_triton = ctx.options
        if in_place:
            if ctx.overwritten:
                raise RuntimeError(
                    "cross_entropy(inplace_backward=True) can go backward once: its logits have held their gradient since"
                )
            ctx.overwritten = True
        logits, labels, probabilities, class_weight, lse, entropy, mass, weight, scale, place = ctx.saved_tensors
        if dy is None:
            g = torch.zeros_like(lse, dtype=torch.promote_types(logits.dtype, torch.float32))
        else:
            g = row_gradient(dy, reduction, labels.shape[0], scale, weight)
        came = {
            name: t.reshape(-1).contiguous() for name, t in zip(logit_rows.names_of(stats), dstats, strict=True) if t is not None
        }
        kept = LogitsKept(logits, labels, place, probabilities, class_weight, lse, entropy)
        incoming = RowGradients(g, mass=mass, **came)
        dlogits = logits_gradient(kept, incoming, terms, use_triton, in_place=in_place)
        if in_place:
            torch.autograd.graph.increment_version(logits)  # an op that has saved them for its backward raises
        return dlogits, *(None,) * 9


_apply = fast_apply(_CrossEntropy)


def _forward(
    logits: Tensor, labels: Tensor, probabilities: Tensor | None, class_weight: Tensor | None, group: dist.ProcessGroup | None,
    reduction: str, terms: LossTerms, stats: str, use_triton: bool,
) -> tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]]:  # fmt: skip
    """Return the loss and statistics; and for backward the labels in one dimension, what masses are made of, rows' logsumexp,
    entropy, mass and weights, a mean's scale, and this rank's place."""
    place = None if group is None else vocab_range(logits.shape[-1], group, logits.device)
    if can_validate_labels(labels):
        V = logits.shape[-1] if place is None else int(place[1])
        validate_labels(labels, V, terms.ignore_index)
        check_class_weight("weight", class_weight, V, logits.device)
    flat = labels.reshape(labels.numel()).contiguous()
    weights = row_weights(flat, terms.ignore_index, probabilities, class_weight, terms.smoothing)
    masses = has_masses(probabilities, class_weight, terms.smoothing)
    class_weight = class_weight.contiguous() if masses and class_weight is not None else None
    if group is None or place is None:
        losses_of_rows = whole_losses(logits, flat, probabilities, class_weight, terms, stats, use_triton)
    else:
        part = partial_statistics(logits, flat, place, probabilities, class_weight, terms, stats, use_triton)
        parts, of_label = start_all_gather(part, group).wait(), None if probabilities is not None else class_weight
        losses_of_rows = partial_losses(parts, flat, place, of_label, logits.dtype, masses, terms, stats, use_triton)
    rows, scale, of_losses = RowLosses(*losses_of_rows), None, weights.of_losses
    if reduction == "none":
        losses = rows.loss
        if of_losses is not None:
            losses = reduce_losses(losses, flat, terms.ignore_index, of_losses, reduction)
        loss = losses.view(labels.shape).clone()  # its own memory: people multiply it in place by a mask
    else:
        # Where a compiler or a mode sees the call, PyTorch reduces: it sees operators, which it may fuse, but no kernel.
        by_kernel = use_triton and not needs_dispatcher(logits, labels)
        ignore, of_mean = terms.ignore_index, weights.of_mean
        loss, scale = reduce_rows(rows.loss, flat, ignore, reduction, of_losses, by_kernel, of_mean=of_mean)
    named = {name: rows.statistic(name, terms) for name in logit_rows.names_of(stats)}
    # copies: backward needs the logsumexp and the entropy, so nobody else may write to them
    outputs = [t.to(t.dtype if t.dtype is torch.bool else rows.loss.dtype).view(labels.shape).clone() for t in named.values()]
    entropy, mass = named.get("entropy"), rows.mass if masses else None
    return (loss, *outputs), (flat, probabilities, class_weight, rows.logsumexp, entropy, mass, of_losses, scale, place)


# ---- the public function: check, choose a backend, run ----


def _unsupported(logits: Tensor) -> str | None:
    """Why the kernels can't take this call, or None."""
    if logits.dtype not in _TYPES:
        return f"logits is {logits.dtype}"
    return kernels_unsupported("logits", logits)


def _variant(call: Call) -> str:
    """Which kernels a call runs, and their tiles."""
    if not call.labels.numel():
        return "the PyTorch formula, as there is nothing to do"
    ahead = row_tiles(call.logits.shape[-1], STATISTICS_TILE, STATISTICS_EACH)
    back = row_tiles(call.logits.shape[-1], GRADIENT_TILE, GRADIENT_EACH)
    description = f"forward with {ahead.used} programs a row, tiles of {ahead.tile} columns"
    description += ", the ranks' statistics in one gather" if group_of_several(call.tp_group) is not None else ""
    description += f"; backward with {back.used} programs a row, tiles of {back.tile} columns"
    description += ", the gradient over the logits" if call.inplace_backward else ", the gradient in memory of its own"
    description += "; keeps the logits and their rows' logsumexp"
    if has_masses(split_labels(call.labels)[1], call.weight, call.label_smoothing):
        what = "probabilities" if call.labels.is_floating_point() else "class weights and smoothing"
        return f"{description}; {what} are read beside the logits, both times"
    return description if call.weight is None else f"{description}; class weights are the rows' weights"


def _checked(call: CrossEntropyCall) -> tuple[dist.ProcessGroup | None, LossTerms, str]:
    """Raise where an argument is wrong; return the group if there are others in it, the terms of the loss, and the names of the
    statistics with commas between."""
    logits, labels, tp_group = call[:3]
    check_floating("logits", logits)
    group = group_of_several(tp_group, "tp_group")
    if logits.dim() == 0 or (group is None and logits.shape[-1] == 0):
        raise ValueError(f"logits must have a last dimension of at least 1, but has shape {tuple(logits.shape)}")
    V = logits.shape[-1]
    check_labels(labels, logits.shape[:-1], logits.device, call.ignore_index, columns=V)
    check_class_weight("weight", call.weight, V if group is None else None, logits.device)
    check_reduction(call.reduction)
    terms = call.terms()
    stats = ",".join(check_statistics(call.return_stats, labels.is_floating_point(), V))
    if call.inplace_backward and needs_grad(logits) and not torch.compiler.is_compiling():
        whole = logits._base if logits._is_view() and logits._base is not None else logits
        if whole.is_leaf and whole.requires_grad:
            raise ValueError(
                "logits must be made by an op for inplace_backward to write over them, but is a leaf that requires grad, "
                "or a view of one: its values would be lost"
            )
    return group, terms, stats


@overload
def cross_entropy(
    logits: Tensor, labels: Tensor, tp_group: dist.ProcessGroup | None = ..., reduction: str = ..., ignore_index: int = ...,
    *, weight: Tensor | None = ..., label_smoothing: float = ..., z_loss: float = ..., softcap: float | None = ...,
    return_stats: Literal[False] = ..., inplace_backward: bool = ..., backend: str | None = ...,
) -> Tensor: ...  # fmt: skip
@overload
def cross_entropy(
    logits: Tensor, labels: Tensor, tp_group: dist.ProcessGroup | None = ..., reduction: str = ..., ignore_index: int = ...,
    *, weight: Tensor | None = ..., label_smoothing: float = ..., z_loss: float = ..., softcap: float | None = ...,
    return_stats: Literal[True], inplace_backward: bool = ..., backend: str | None = ...,
) -> tuple[Tensor, Stats]: ...  # fmt: skip
@overload
def cross_entropy(
    logits: Tensor, labels: Tensor, tp_group: dist.ProcessGroup | None = ..., reduction: str = ..., ignore_index: int = ...,
    *, weight: Tensor | None = ..., label_smoothing: float = ..., z_loss: float = ..., softcap: float | None = ...,
    return_stats: Sequence[str], inplace_backward: bool = ..., backend: str | None = ...,
) -> tuple[Tensor, NamedStats]: ...  # fmt: skip
@overload
def cross_entropy(
    logits: Tensor, labels: Tensor, tp_group: dist.ProcessGroup | None = ..., reduction: str = ..., ignore_index: int = ...,
    *, weight: Tensor | None = ..., label_smoothing: float = ..., z_loss: float = ..., softcap: float | None = ...,
    return_stats: bool | Sequence[str], inplace_backward: bool = ..., backend: str | None = ...,
) -> Tensor | tuple[Tensor, Stats | NamedStats]: ...  # fmt: skip
def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    tp_group: dist.ProcessGroup | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    *,
    weight: Tensor | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    return_stats: bool | Sequence[str] = False,
    inplace_backward: bool = False,
    backend: str | None = None,
) -> Any:
    """The cross-entropy of logits and the tokens that are right: `torch.nn.functional.cross_entropy`, in fp32 whatever they are.

    It is differentiable once; `cross_entropy_reference`, a plain formula, can be differentiated again.

    Args:
        logits: ``[..., V]``. With a ``tp_group``, this rank's ``[..., V_rank]``.
        labels: ``[...]``, int32 or int64, from 0 to V - 1 or ``ignore_index``. Others raise on a CPU and under
            `onepass.validate()`; on a GPU, and compiled, their rows' loss is NaN, and their gradient zeros. Of a floating type
            and the logits' shape they are probabilities, and no row is ignored; they get no gradient.
        tp_group: the ranks that each have some columns of the logits, in the order of the ranks. A rank may have any number of
            columns, or none. Labels and the loss are whole, and the same on all ranks. Forward is collective.
        reduction: ``none`` returns each row's loss, ``mean`` the mean over rows that are not ignored (0 if all are), ``sum`` the
            sum.
        ignore_index: rows with this label have no loss and no gradient, and are not read.
        weight: ``[V]``, a number for each class, whole on every rank. As in F.cross_entropy it multiplies each class's part of a
            row's loss, and a mean divides by the sum of the labels' weights; of probabilities by the number of rows. A row's
            z_loss is multiplied by its label's weight.
        label_smoothing: from 0 to 1: this part of each row's target is spread evenly over the whole vocabulary. Megatron spreads
            it over the other tokens: its a is a V / (V - 1) here.
        z_loss: this times logsumexp(logits)^2 is added to each row's loss.
        softcap: the loss is of ``softcap * tanh(logits / softcap)``, as in Gemma; None leaves the logits.
        return_stats: names of statistics of each row that are returned too, of ``logsumexp, log_prob, entropy, correct,
            log_sum_sq_probs, mean_logit, z_loss``. Only these are computed; the first three are differentiable. True is the
            first four. Those of an ignored row are 0. Probabilities have no ``log_prob`` and no ``correct``.
        inplace_backward: backward writes the gradient over the logits (over a copy if their rows are not evenly spaced), which
            saves memory of their size. An op that has saved the logits for its own backward then raises, and code that reads them
            finds the gradient. A second backward raises. The logits can't be a leaf that requires grad. Compiled, under vmap and
            the like and under dispatch modes, the gradient has its own memory.
        backend: ``auto``, ``triton``, ``torch`` or a registered name; None leaves it to `use_backend` and ONEPASS_BACKEND.

    Returns:
        The loss in fp32 (fp64 of fp64): a number, or for ``none`` one a row. With return_stats, (loss, stats): a named tuple of
        all four, or, where statistics are named, of all seven with None for those that are not.
    """
    call = CrossEntropyCall(
        logits, labels, tp_group, reduction, ignore_index, weight, label_smoothing, z_loss, softcap, return_stats,
        inplace_backward,
    )  # fmt: skip
    if has_dtensor(logits, labels):
        return run_on_shards("cross_entropy", **call._asdict(), backend=backend)
    group, terms, stats = _checked(call)
    chosen = choose("cross_entropy", backend, _unsupported(logits))
    if chosen not in NATIVE:
        return run_other("cross_entropy", chosen, **call._asdict())
    if group is not None and under_functorch():
        raise RuntimeError(
            "cross_entropy over a tp_group can't follow vmap, functional derivatives or forward-mode differentiation"
        )
    labels, probabilities = split_labels(labels)
    use_triton = chosen == "triton" and labels.numel() > 0
    # Compilers, modes and transforms choose by themselves what to keep of a formula, and differentiate it.
    if group is None and not use_triton and (under_functorch() or needs_dispatcher(logits, labels)):
        if can_validate_labels(labels):
            validate_labels(labels, logits.shape[-1], ignore_index)
        return _formula(call)
    of_rows = labels, probabilities, weight, group, reduction, terms, stats
    if needs_grad(logits):
        in_place = inplace_backward and not torch.compiler.is_compiling()
        outputs = _apply(logits, *of_rows, in_place, use_triton)
    else:
        outputs = _forward(logits, *of_rows, use_triton)[0]
        outputs = outputs if stats else outputs[0]
    return (outputs[0], make_stats(return_stats, outputs[1:])) if stats else outputs


define_op(
    cross_entropy,
    check=lambda call: _checked(CrossEntropyCall(**vars(call))),
    unsupported=lambda call: _unsupported(call.logits),
    variant=_variant,
    sharding=shard_cross_entropy,
)
