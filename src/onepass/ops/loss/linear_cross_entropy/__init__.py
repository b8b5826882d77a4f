"""linear_cross_entropy: the loss of hidden states under a language model's head, without a tensor of all logits.

Formula  logits = logit_scale * (hidden @ weight.T + bias), then softcap * tanh(logits / softcap), then logits / temperature; a
         row's loss as in ops/loss/formula.py, times its token_weight; their mean over the rows that are kept, their sum,
         or the rows' own. With lora the weight is weight + lora.scale * b @ a.
Shapes   hidden [..., D], weight [V, D], bias [V], labels and token_weight [...]. N tokens.
Saves    hidden, weight, bias, labels and a few numbers a token; beside them, as the plan says, logits or finished gradients.
Bytes    N V elements of logits are written by the product, read for the statistics, and read and written as their own gradient,
         a chunk at a time; the weight's gradient is read and written once more a chunk. With lora the weight is read once more a
         chunk, and the gradient of logits twice.
Files    ops/loss/head has the products, the plan and the loops over chunks; row_loss.py is what is done to rows of logits,
         autograd.py the gradients' times. cross_entropy shares the kernels: ops/loss/row_kernels.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, overload

import torch
import torch.distributed as dist
from torch import Tensor

from onepass.distributed.collectives import group_of_several
from onepass.gradients.deferred import DeferredWgrad, check_deferred
from onepass.kernels.language import kernels_unsupported
from onepass.ops.loss.formula import (
    LossOptions,
    LossTerms,
    NamedStats,
    Stats,
    check_statistics,
    make_stats,
    reduce_losses,
    row_losses,
)
from onepass.ops.loss.head.operands import HeadTensors
from onepass.ops.loss.head.sums import Needs
from onepass.ops.loss.kept_rows import KeptRows, can_count
from onepass.ops.loss.linear_cross_entropy.autograd import apply
from onepass.ops.loss.linear_cross_entropy.row_loss import plan_call
from onepass.ops.loss.lora import cast_lora, check_lora, head_logits
from onepass.ops.loss.reduction import (
    can_validate_labels,
    check_labels,
    check_logits,
    check_reduction,
    check_terms,
    validate_labels,
)
from onepass.ops.loss.sharding import shard_linear_cross_entropy
from onepass.ops.loss.targets import (
    Targets,
    allowed_columns,
    check_class_weight,
    check_vocab_mask,
    has_masses,
    packed_mask,
    row_weights,
    split_labels,
)
from onepass.product.lora import LoRA
from onepass.runtime.backend import NATIVE, choose, run_other
from onepass.runtime.checks import check_floating, check_linear, check_number, check_per_token
from onepass.runtime.dispatch import cast, needs_dispatcher, needs_grad, product_type, under_functorch
from onepass.runtime.op import Call, define_op
from onepass.runtime.sharding import has_dtensor, run_on_shards


class LinearCrossEntropyCall(NamedTuple):
    """The arguments of a call but its backend, in the order of the public signature."""

    hidden: Tensor
    weight: Tensor
    labels: Tensor
    tp_group: dist.ProcessGroup | None = None
    reduction: str = "mean"
    ignore_index: int = -100
    sequence_parallel: bool = False
    bias: Tensor | None = None
    lora: LoRA | None = None
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float | None = None
    logit_scale: float = 1.0
    temperature: float = 1.0
    token_weight: Tensor | None = None
    class_weight: Tensor | None = None
    logits_dtype: torch.dtype | None = None
    grad_scale: float | None = None
    chunk_bytes: int | None = None
    return_stats: bool | Sequence[str] = False
    rows: KeptRows | None = None
    vocab_mask: Tensor | None = None
    deferred: DeferredWgrad | None = None

    def terms(self) -> LossTerms:
        """Check the terms of a row's loss, and return them."""
        last = self.softcap, self.logit_scale, self.temperature
        return check_terms(self.ignore_index, self.label_smoothing, self.z_loss, *last)


def linear_cross_entropy_reference(
    hidden: Tensor, weight: Tensor, labels: Tensor, reduction: str = "mean", ignore_index: int = -100, **options: Any
) -> Any:
    """Return one rank's loss, or (loss, stats), by the formula, for every type.

    options: those of `linear_cross_entropy`. What only says how to compute the loss has no effect.
    """
    return _formula(LinearCrossEntropyCall(hidden, weight, labels, None, reduction, ignore_index, **options))


def _formula(call: LinearCrossEntropyCall) -> Any:
    names, terms, V = check_statistics(call.return_stats), call.terms(), call.weight.shape[0]
    labels, probabilities = split_labels(call.labels)
    allowed = None if call.vocab_mask is None else allowed_columns(packed_mask(call.vocab_mask), 0, V)
    if allowed is not None:
        allowed = allowed[0] if len(allowed) == 1 else allowed.view(*labels.shape, V)
    masses = probabilities, call.class_weight
    targets = Targets(*masses) if has_masses(*masses, terms.smoothing) else None
    rows = row_losses(head_logits(call.hidden, call.weight, call.bias, call.lora), labels, terms, names, allowed, targets)
    weights = None if call.token_weight is None else call.token_weight.reshape(labels.shape)
    weights, of_mean = row_weights(labels, terms.ignore_index, *masses, terms.smoothing, weights)
    loss = reduce_losses(rows.loss, labels, terms.ignore_index, weights, call.reduction, of_mean)
    return (loss, make_stats(call.return_stats, [rows.statistic(name, terms) for name in names])) if names else loss


# ---- the public function: check, choose a backend, run ----


def _unsupported(hidden: Tensor) -> str | None:
    """Why the kernels can't take this call, or None."""
    reason = kernels_unsupported("hidden", hidden)
    if reason is None and product_type(hidden) is torch.float64:
        reason = "the kernels compute in fp32, and hidden is fp64"
    return reason


def _variant(call: Call) -> str:
    """How the call is divided, by either backend, and the time and memory that this is expected to take."""
    options, group = _checked(LinearCrossEntropyCall(**vars(call)))
    labels, probabilities = split_labels(call.labels)
    lora = (None, None) if call.lora is None else call.lora[:2]
    needs = Needs(
        needs_grad(call.hidden), needs_grad(call.weight) and call.deferred is None, needs_grad(call.bias), *map(needs_grad, lora)
    )
    main_grad = getattr(call.weight, "main_grad", None)
    main_grad = main_grad if isinstance(main_grad, Tensor) else None
    rows = _rows_to_compute(call.hidden, call.weight, labels, options, group, call.rows)
    selection = None if rows is None else rows.selection(0, call.hidden.device)
    tokens = labels.numel() if selection is None else selection.whole.shape[0]
    description = f"{tokens} of {labels.numel()} rows" if selection is not None else "all rows"
    if has_masses(probabilities, call.class_weight, options.smoothing):
        description += ", their probabilities" if probabilities is not None else ", class weights"
        description += " read beside the logits, for statistics and for gradients"
    if rows is None and probabilities is None:
        description += _ignored_too(call) if call.rows is None else ": how many are kept is not known here"
    low_rank = 0 if call.lora is None else call.lora.a.shape[0]
    plan = plan_call(HeadTensors(call.hidden, call.weight, call.bias, *lora), tokens, options, needs, main_grad)
    return f"{description}; {plan}{f'; LoRA of rank {low_rank}' if low_rank else ''}"


def _ignored_too(call: Call) -> str:
    """Say how many rows are computed though they are ignored, and what leaves them out. It waits for the labels."""
    if not can_count(call.labels):
        return ": fewer with rows=onepass.kept_rows(labels), outside of graphs"
    ignored = int((call.labels == call.ignore_index).sum())
    return f", {ignored} of {call.labels.numel()} ignored: rows=onepass.kept_rows(labels) leaves those out" if ignored else ""


def _check(call: Call) -> None:
    _checked(LinearCrossEntropyCall(**vars(call)))
    check_deferred(call.deferred, call.weight)


def _checked(call: LinearCrossEntropyCall) -> tuple[LossOptions, dist.ProcessGroup | None]:
    """Raise where an argument is wrong; return the options, and the group if there are others in it."""
    hidden, weight, labels, tp_group = call[:4]
    check_floating("hidden", hidden)
    check_reduction(call.reduction)
    terms, product = call.terms(), product_type(hidden)
    check_logits(product, call.logits_dtype, call.chunk_bytes)
    if call.grad_scale is not None:
        check_number("grad_scale", call.grad_scale, optional=True)
        if not -math.inf < call.grad_scale < math.inf:  # isfinite would break a compiled graph
            raise ValueError(f"grad_scale must be finite, but is {call.grad_scale!r}")
        if call.deferred is not None:
            raise ValueError("grad_scale and deferred exclude each other: the gradient is made in forward, or in flush()")
    group = group_of_several(tp_group, "tp_group")
    if hidden.dim() == 0:
        raise ValueError("hidden must have at least one dimension, but is a scalar")
    check_linear(hidden, hidden.shape[-1], weight, call.bias, "hidden")
    check_lora("lora", call.lora, hidden, weight)
    if call.lora is not None and call.deferred is not None:
        raise ValueError("lora and deferred exclude each other: flush() makes logits again without it")
    V = weight.shape[0]
    if V == 0 and group is None:
        raise ValueError(f"weight must have at least one row, a token's, but has shape {tuple(weight.shape)}")
    stats = check_statistics(call.return_stats, isinstance(labels, Tensor) and labels.is_floating_point(), V)
    tokens, sequence = hidden.shape[:-1], call.sequence_parallel and group is not None
    if sequence:
        assert group is not None
        if not tokens:
            raise ValueError(f"hidden must have a first dimension that the ranks share, but has shape {tuple(hidden.shape)}")
        tokens = torch.Size([tokens[0] * group.size(), *tokens[1:]])
    check_labels(labels, tokens, hidden.device, call.ignore_index, "hidden", columns=V)
    check_class_weight("class_weight", call.class_weight, V if group is None else None, hidden.device)
    labels, probabilities = split_labels(labels)
    if probabilities is not None:
        for name, value in (("vocab_mask", call.vocab_mask), ("rows", call.rows)):
            if value is not None:
                raise ValueError(f"{name} and labels that are probabilities exclude each other: no column and no row is left out")
    if call.token_weight is not None:
        check_per_token("token_weight", call.token_weight, labels.unsqueeze(-1))
    if call.vocab_mask is not None:
        check_vocab_mask(call.vocab_mask, labels, V, hidden.device)
        for name, asked in (("label_smoothing", terms.smoothing), ("mean_logit", "mean_logit" in stats)):
            if asked:
                raise ValueError(f"vocab_mask and {name} exclude each other: a mean over the vocabulary is not over its columns")
    if call.rows is not None:
        _check_rows(call.rows, labels, call.ignore_index, group.size() if sequence and group is not None else 1)
    wide = call.logits_dtype is not None and call.logits_dtype != product
    name = "" if group is None else group.group_name
    return LossOptions(
        *terms, call.reduction, wide, True, product, name, sequence,
        None if call.grad_scale is None else float(call.grad_scale), call.chunk_bytes, ",".join(stats),
        1.0 if call.lora is None else float(call.lora.scale),
    ), group  # fmt: skip


def _check_rows(rows: KeptRows, labels: Tensor, ignore_index: int, parts: int) -> None:
    if not isinstance(rows, KeptRows):
        raise TypeError(f"rows must be what kept_rows returned, but is a {type(rows).__name__}")
    if rows.labels.numel() != labels.numel():
        raise ValueError(f"rows must be those of these {labels.numel()} labels, but is of {rows.labels.numel()}")
    if rows.ignore_index != ignore_index:
        raise ValueError(f"rows must be made with ignore_index {ignore_index}, but is with {rows.ignore_index}")
    if rows.parts != parts:
        raise ValueError(f"rows must be made for {parts} parts of the sequence, as tp_group says, but is for {rows.parts}")


def _rows_to_compute(
    hidden: Tensor, weight: Tensor, labels: Tensor, options: LossOptions, group: dist.ProcessGroup | None, rows: KeptRows | None
) -> KeptRows | None:
    """Return which rows are computed, or None for all. Where labels are on a CPU their number is known at once."""
    if not can_count(labels) or needs_dispatcher(hidden, weight, labels):
        return None
    if rows is None:
        on_cpu = labels.device.type == "cpu"
        return KeptRows(labels, options.ignore_index, group.size() if options.sequence and group else 1) if on_cpu else None
    if can_validate_labels(labels):
        wrong = rows.mismatch(labels)
        if wrong is not None and wrong:
            raise ValueError(f"rows must be those of these labels, but other labels are ignored than kept_rows saw ({rows})")
    return rows


@overload
def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, tp_group: dist.ProcessGroup | None = ..., reduction: str = ...,
    ignore_index: int = ..., sequence_parallel: bool = ..., *, bias: Tensor | None = ..., lora: LoRA | None = ...,
    label_smoothing: float = ..., z_loss: float = ..., softcap: float | None = ..., logit_scale: float = ...,
    temperature: float = ..., token_weight: Tensor | None = ..., class_weight: Tensor | None = ...,
    logits_dtype: torch.dtype | None = ..., grad_scale: float | None = ..., chunk_bytes: int | None = ...,
    return_stats: Literal[False] = ..., rows: KeptRows | None = ..., vocab_mask: Tensor | None = ...,
    deferred: DeferredWgrad | None = ..., backend: str | None = ...,
) -> Tensor: ...  # fmt: skip
@overload
def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, tp_group: dist.ProcessGroup | None = ..., reduction: str = ...,
    ignore_index: int = ..., sequence_parallel: bool = ..., *, bias: Tensor | None = ..., lora: LoRA | None = ...,
    label_smoothing: float = ..., z_loss: float = ..., softcap: float | None = ..., logit_scale: float = ...,
    temperature: float = ..., token_weight: Tensor | None = ..., class_weight: Tensor | None = ...,
    logits_dtype: torch.dtype | None = ..., grad_scale: float | None = ..., chunk_bytes: int | None = ...,
    return_stats: Literal[True], rows: KeptRows | None = ..., vocab_mask: Tensor | None = ...,
    deferred: DeferredWgrad | None = ..., backend: str | None = ...,
) -> tuple[Tensor, Stats]: ...  # fmt: skip
@overload
def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, tp_group: dist.ProcessGroup | None = ..., reduction: str = ...,
    ignore_index: int = ..., sequence_parallel: bool = ..., *, bias: Tensor | None = ..., lora: LoRA | None = ...,
    label_smoothing: float = ..., z_loss: float = ..., softcap: float | None = ..., logit_scale: float = ...,
    temperature: float = ..., token_weight: Tensor | None = ..., class_weight: Tensor | None = ...,
    logits_dtype: torch.dtype | None = ..., grad_scale: float | None = ..., chunk_bytes: int | None = ...,
    return_stats: Sequence[str], rows: KeptRows | None = ..., vocab_mask: Tensor | None = ...,
    deferred: DeferredWgrad | None = ..., backend: str | None = ...,
) -> tuple[Tensor, NamedStats]: ...  # fmt: skip
@overload
def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, tp_group: dist.ProcessGroup | None = ..., reduction: str = ...,
    ignore_index: int = ..., sequence_parallel: bool = ..., *, bias: Tensor | None = ..., lora: LoRA | None = ...,
    label_smoothing: float = ..., z_loss: float = ..., softcap: float | None = ..., logit_scale: float = ...,
    temperature: float = ..., token_weight: Tensor | None = ..., class_weight: Tensor | None = ...,
    logits_dtype: torch.dtype | None = ..., grad_scale: float | None = ..., chunk_bytes: int | None = ...,
    return_stats: bool | Sequence[str], rows: KeptRows | None = ..., vocab_mask: Tensor | None = ...,
    deferred: DeferredWgrad | None = ..., backend: str | None = ...,
) -> Tensor | tuple[Tensor, Stats | NamedStats]: ...  # fmt: skip
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    tp_group: dist.ProcessGroup | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    sequence_parallel: bool = False,
    *,
    bias: Tensor | None = None,
    lora: LoRA | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float = 1.0,
    token_weight: Tensor | None = None,
    class_weight: Tensor | None = None,
    logits_dtype: torch.dtype | None = None,
    grad_scale: float | None = None,
    chunk_bytes: int | None = None,
    return_stats: bool | Sequence[str] = False,
    rows: KeptRows | None = None,
    vocab_mask: Tensor | None = None,
    deferred: DeferredWgrad | None = None,
    backend: str | None = None,
) -> Any:
    """The cross-entropy of a language model's head: of ``softcap * tanh(logit_scale * (hidden @ weight.T + bias) / softcap)``.
    It makes a tensor of all logits only if there is memory for it.

    Args:
        hidden: ``[..., D]``. With sequence_parallel, this rank's part of the first dimension.
        weight: ``[V, D]``, of hidden's type. With a tp_group, this rank's rows, any number of them.
        labels: ``[...]``, int32 or int64, of the whole sequence and the whole vocabulary. A label out of range raises on a CPU
            and under `validate`; on a GPU its row's loss is NaN, and it contributes no gradient. Of a floating type and the
            logits' shape (with a tp_group, of this rank's columns) they are probabilities, as in `cross_entropy`.
        tp_group: the ranks that share the vocabulary. hidden's gradient is summed over them.
        reduction: ``none``, ``sum`` or ``mean``. The mean divides by the number of rows that are kept, or by the sum of their
            token weights, and is 0 if there are none.
        ignore_index: rows with this label have no loss.
        sequence_parallel: hidden and its gradient are divided along the first dimension; labels and the loss are whole.
        bias: ``[V]``, of hidden's type, or None.
        lora: an `onepass.LoRA` ``(a, b, scale)``: the weight is ``weight + scale * b @ a``, which is never made.
        label_smoothing: as in F.cross_entropy, over the whole vocabulary.
        z_loss: this times logsumexp squared is added to a row's loss, before its weight and the reduction.
        softcap: bounds the logits' size; None leaves them.
        logit_scale: multiplies the products.
        temperature: divides the logits, after the softcap.
        token_weight: ``[...]`` or ``[..., 1]``: multiplies each row's loss.
        class_weight: ``[V]``, the `weight` of `cross_entropy`, whole on every rank. A label's multiplies its token's weight.
        logits_dtype: ``torch.float32`` never rounds a logit; None keeps them in the operands' type, as eager code does.
        grad_scale: the caller's promise that the loss's incoming gradient will be this number. Gradients are then finished in
            forward, the weight's straight in ``weight.main_grad`` if there is one. If the promise is broken, a CPU raises and a
            GPU returns NaN in hidden's gradient.
        chunk_bytes: a budget for logits and fp32 sums; None takes a part of the GPU's memory. vmap and functional derivatives
            follow the plain formula, which makes all logits at once.
        return_stats: names of statistics of each token that are returned too, of ``logsumexp, log_prob, entropy, correct,
            log_sum_sq_probs, mean_logit, z_loss``. Only these are computed; the first three are differentiable. True is the
            first four. Those of an ignored token are 0.
        rows: what `kept_rows` found of these labels: rows that are ignored are then not computed, and their gradients are zeros.
            On a CPU that needs no rows. On a GPU all are computed without, as well as compiled and captured. Of other labels
            they raise on a CPU and under `validate`; on a GPU the loss is NaN.
        vocab_mask: the columns that the distribution has, if not the whole vocabulary: bools ``[V]`` or ``[..., V]``, or as bits
            ``[V / 8, rounded up]`` or ``[..., that]`` of uint8, the lowest first. With a tp_group, of this rank's columns.
            Other columns have no probability and no gradient. A label among them has a log_prob of -inf; a row without any
            column is NaN.
        deferred: keeps the operands of the weight's gradient until its `flush`. The weight must carry main_grad.
        backend: ``auto``, ``triton``, ``torch`` or a registered name; None leaves it to `use_backend` and ONEPASS_BACKEND.

    Returns:
        The loss in fp32 (of fp64 operands in fp64), a scalar or of labels' shape; with return_stats, (loss, stats): a named
        tuple of all four, or, where statistics are named, of all seven with None for those that are not.
    """
    call = LinearCrossEntropyCall(
        hidden, weight, labels, tp_group, reduction, ignore_index, sequence_parallel, bias, lora, label_smoothing, z_loss,
        softcap, logit_scale, temperature, token_weight, class_weight, logits_dtype, grad_scale, chunk_bytes, return_stats, rows,
        vocab_mask, deferred,
    )  # fmt: skip
    if has_dtensor(hidden, weight):
        return run_on_shards("linear_cross_entropy", **call._asdict(), backend=backend)
    options, group = _checked(call)
    deferred = check_deferred(deferred, weight)
    chosen = choose("linear_cross_entropy", backend, _unsupported(hidden))
    if chosen not in NATIVE:
        return run_other("linear_cross_entropy", chosen, **call._asdict() | {"deferred": deferred})
    labels, probabilities = split_labels(labels)
    if group is None:
        validate_labels(labels, weight.shape[0], ignore_index)
    if chosen != "triton":
        options = options._replace(use_triton=False)
    if under_functorch():
        for name, value in (("tp_group", group), ("grad_scale", grad_scale), ("deferred", deferred)):
            if value is not None:
                raise RuntimeError(
                    f"linear_cross_entropy with {name} can't follow vmap, functional derivatives or forward-mode differentiation"
                )
        return _by_formula(call, options)
    a, b = (None, None) if lora is None else lora[:2]
    if not needs_grad(hidden, weight, bias, token_weight, a, b):  # a Function can't tell, and makes gradients in forward
        hidden, weight = hidden.detach(), weight.detach()
        bias, token_weight, a, b = (None if t is None else t.detach() for t in (bias, token_weight, a, b))
    bits = None if vocab_mask is None else packed_mask(vocab_mask)
    kept = _rows_to_compute(hidden, weight, labels, options, group, rows)
    outputs = apply(
        hidden, weight, bias, a, b, token_weight, labels, bits, probabilities, class_weight, options, group, deferred, kept
    )
    return (outputs[0], make_stats(return_stats, outputs[1:])) if options.stats else outputs


def _by_formula(call: LinearCrossEntropyCall, options: LossOptions) -> Any:
    """Run the plain formula for transforms, which have to see every step."""
    product = options.product
    dtype = torch.promote_types(product, torch.float32) if options.wide else product
    hidden, weight = (cast(cast(t, product), dtype) for t in (call.hidden, call.weight))
    bias = None if call.bias is None else cast(cast(call.bias, product), dtype)
    with torch.autocast(hidden.device.type, enabled=False):
        return _formula(call._replace(hidden=hidden, weight=weight, bias=bias, lora=cast_lora(call.lora, product, dtype)))


define_op(
    linear_cross_entropy,
    check=_check,
    unsupported=lambda call: _unsupported(call.hidden),
    variant=_variant,
    sharding=shard_linear_cross_entropy,
    formula=_variant,
    samples_module="onepass.ops.loss.samples",
)
