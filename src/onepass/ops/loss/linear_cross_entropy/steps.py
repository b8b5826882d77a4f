"""The forward and the backward of linear_cross_entropy as registered ops, which plan a call and run its passes.

Called directly, forward runs whichever mode the planner finds cheapest. A graph has to know what its ops return before sizes are
known, so there the mode follows from the options alone (`_graph_mode`); the planner still divides the call when the op runs.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]

from onepass.gradients.main_grad import GradRequest, accumulation_target
from onepass.kernels.layout import as_matrix
from onepass.ops.loss.formula import LossOptions, RowLosses
from onepass.ops.loss.linear_cross_entropy.head import (
    Head,
    VocabShard,
    operand_bytes,
    padded_rows,
    to_global_rows,
    to_local_rows,
    wide_type,
)
from onepass.ops.loss.linear_cross_entropy.passes import (
    Gradients,
    empty_rows,
    gradients_of_kept_logits,
    losses,
    losses_and_gradients,
    make_all_logits,
    recompute_gradients,
)
from onepass.ops.loss.linear_cross_entropy.plan import HeadPlan, PlanInputs, machine_speed, make_plan
from onepass.ops.loss.lora import LoRA, cast_lora
from onepass.ops.loss.reduction import row_gradient
from onepass.ops.loss.row_kernels import RowGradients
from onepass.ops.loss.targets import as_targets
from onepass.runtime.dispatch import cast
from onepass.runtime.op import Registered


class Needs(NamedTuple):
    """Which gradients are needed."""

    need_hidden: bool
    need_weight: bool
    need_bias: bool
    need_lora_a: bool = False
    need_lora_b: bool = False


Accumulate = tuple[Tensor, Tensor | None, GradRequest]  # the weight, its main_grad and how the pass asks for its gradient


def _plan_inputs(
    N: int, D: int, V: int, options: LossOptions, needs: Needs, main_grad: Tensor | None, mode: str | None, low_rank: int
) -> PlanInputs:  # fmt: skip
    size, promised = options.product.itemsize, options.grad_scale is not None
    through_lora = needs.need_lora_a or needs.need_lora_b  # whose products read the gradient of logits, as hidden's does
    return PlanInputs(
        N, D, V, size, options.wide and size < 4, needs.need_hidden or through_lora, needs.need_weight or needs.need_bias,
        options.reduction != "none" and (promised or not options.differentiable()),
        main_grad is not None and main_grad.dtype is torch.float32, promised, mode, options.group != "", options.chunk_bytes,
        low_rank,
    )  # fmt: skip


def plan_call(
    hidden: Tensor, weight: Tensor, tokens: int, options: LossOptions, needs: Needs, main_grad: Tensor | None,
    mode: str | None = None, low_rank: int = 0,
) -> HeadPlan:  # fmt: skip
    inputs = _plan_inputs(tokens, weight.shape[1], weight.shape[0], options, needs, main_grad, mode, low_rank)
    plan = make_plan(inputs, machine_speed(hidden.device, inputs.size))
    beside = padded_rows(weight, options.use_triton) * weight.shape[1] * inputs.size
    beside += operand_bytes(min(plan.rows, tokens), weight, low_rank, inputs.size)
    return replace(plan, bytes=plan.bytes + beside) if beside else plan


def _forward_pieces(head: Head, keep: bool) -> tuple[int, int]:
    """Rows and columns at a time of a forward that makes no gradients: those of a call without gradients, for the same bits.

    keep: logits wait. Then a number that is one for all tokens is made in one piece.
    """
    options = head.options
    if keep and options.reduction != "none" and not options.stats:
        return head.tokens, head.columns
    nothing, low_rank = Needs(False, False, False), 0 if head.lora is None else head.lora.a.shape[0]
    inputs = _plan_inputs(head.tokens, head.hidden.shape[1], head.columns, options, nothing, None, None, low_rank)
    plan = make_plan(inputs, machine_speed(head.hidden.device, inputs.size))
    return plan.rows, plan.columns


def head_of(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, lora_a: Tensor | None, lora_b: Tensor | None, labels: Tensor,
    place: Tensor | None, bits: Tensor | None, probabilities: Tensor | None, class_weight: Tensor | None, options: LossOptions,
    own: Tensor | None = None,
) -> Head:  # fmt: skip
    """Cast the operands to the products' type. own: as `Head` has it."""
    product = options.product
    group: Any = options.group  # to type checkers a name is of a type of its own
    tokens = hidden.reshape(hidden.shape[:-1].numel(), hidden.shape[-1])
    if own is not None and tokens.dtype != product:  # rather a copy of these than of all
        tokens, own = tokens.index_select(0, own), None
    tokens = cast(tokens, product)
    shard = None if place is None else VocabShard(_resolve_process_group(group), options.sequence, place)
    bias = None if bias is None else cast(bias, product)
    lora = None if lora_a is None or lora_b is None else LoRA(lora_a, lora_b, options.lora_scale)
    targets = as_targets(None if probabilities is None else as_matrix(probabilities)[0], class_weight)
    return Head(tokens, cast(weight, product), bias, labels, options, shard, bits, cast_lora(lora, product), targets, own)


def _rank_of(lora_a: Tensor | None) -> int:
    return 0 if lora_a is None else lora_a.shape[0]


def new_lora_gradients(lora_a: Tensor | None, lora_b: Tensor | None, needs: Needs) -> tuple[Tensor | None, Tensor | None]:
    """Memory for the gradients of LoRA's a and b, which are summed in fp32 wherever they go to: they are small."""
    return (
        torch.empty_like(lora_a, dtype=wide_type(lora_a)) if lora_a is not None and needs.need_lora_a else None,
        torch.empty_like(lora_b, dtype=wide_type(lora_b)) if lora_b is not None and needs.need_lora_b else None,
    )


# ---- forward ----


def _forward(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, lora_a: Tensor | None, lora_b: Tensor | None, labels: Tensor,
    token_weight: Tensor | None, mean_scale: Tensor | None, place: Tensor | None, bits: Tensor | None,
    probabilities: Tensor | None, class_weight: Tensor | None, options: LossOptions, needs: Needs, separate_sum: bool, *,
    accumulate: Accumulate | None = None, mode: str | None = None, own: Tensor | None = None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Return the `RowLosses`, the `Gradients` that are made already, and logits that wait.

    Args:
        separate_sum: the weight's gradient goes to main_grad, and is rounded there only.
        accumulate: finished gradients of the weight are added to main_grad at once, and dweight is None.
        mode: the only one that will do, or None.
        own: numbers of hidden's rows that are computed, where no gradient is needed; None for all.
    """
    main_grad = None if accumulate is None else accumulate[1]
    plan = plan_call(hidden, weight, labels.shape[0], options, needs, main_grad, mode, _rank_of(lora_a))
    head = head_of(hidden, weight, bias, lora_a, lora_b, labels, place, bits, probabilities, class_weight, options, own)
    if plan.mode not in ("grad_in_forward", "known_grad_scale"):
        keep = plan.mode == "keep_logits"
        found, logits = losses(head, *_forward_pieces(head, keep), keep)
        return *found, *Gradients(None, None, None), None if logits is None else to_global_rows(logits)
    known, wide = plan.mode == "known_grad_scale", wide_type(head.hidden)
    target = accumulation_target(*accumulate) if known and needs.need_weight and accumulate is not None else None
    kind = weight.dtype if known and not separate_sum else wide_type(weight)
    made = Gradients(
        torch.empty_like(head.hidden, dtype=options.product if known else wide) if needs.need_hidden else None,
        torch.empty_like(weight, dtype=kind) if needs.need_weight and target is None else None,
        head.hidden.new_empty(head.columns, dtype=wide) if needs.need_bias else None,
        *new_lora_gradients(lora_a, lora_b, needs),
    )
    incoming = options.grad_scale if known and options.grad_scale is not None else 1.0
    one = torch.full((), incoming, dtype=wide, device=hidden.device)
    g = row_gradient(one, "sum", head.tokens, mean_scale if known else None, token_weight)
    sums = made if target is None else made._replace(weight=target)
    return *losses_and_gradients(head, plan, g, sums, target is not None), *made, None


def _graph_mode(options: LossOptions, needs: Needs) -> str:
    if not any(needs):
        return "loss_only"
    if options.grad_scale is not None:
        return "known_grad_scale"
    # a graph sends zeros to statistics that nobody differentiates
    return "recompute" if options.reduction == "none" or options.differentiable() else "grad_in_forward"


def _forward_in_graph(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, lora_a: Tensor | None, lora_b: Tensor | None, labels: Tensor,
    token_weight: Tensor | None, mean_scale: Tensor | None, place: Tensor | None, bits: Tensor | None,
    probabilities: Tensor | None, class_weight: Tensor | None, options: LossOptions, needs: Needs, separate_sum: bool,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    return _forward(
        hidden, weight, bias, lora_a, lora_b, labels, token_weight, mean_scale, place, bits, probabilities, class_weight, options,
        needs, separate_sum, mode=_graph_mode(options, needs),
    )  # fmt: skip


def _tokens_like(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """[tokens, D], with the strides of the op's."""
    return torch.empty_like(hidden.reshape(math.prod(hidden.shape[:-1]), hidden.shape[-1]), dtype=dtype)


def _forward_fake(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, lora_a: Tensor | None, lora_b: Tensor | None, labels: Tensor,
    token_weight: Tensor | None, mean_scale: Tensor | None, place: Tensor | None, bits: Tensor | None,
    probabilities: Tensor | None, class_weight: Tensor | None, options: LossOptions, needs: Needs, separate_sum: bool,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    wide, product = wide_type(hidden), options.product
    logits = torch.promote_types(product, torch.float32) if options.wide else product
    masses = as_targets(probabilities, class_weight) is not None
    rows = empty_rows(hidden, labels.numel(), options.statistics(), logits, masses)
    mode = _graph_mode(options, needs)
    known = mode == "known_grad_scale"
    if mode not in ("grad_in_forward", "known_grad_scale"):
        needs = Needs(False, False, False)
    return (
        *rows,
        _tokens_like(hidden, product if known else wide) if needs.need_hidden else None,
        torch.empty_like(weight, dtype=weight.dtype if known and not separate_sum else wide_type(weight))
        if needs.need_weight
        else None,
        hidden.new_empty(weight.shape[0], dtype=wide) if needs.need_bias else None,
        *new_lora_gradients(lora_a, lora_b, needs),
        None,
    )


# `Registered` takes an empty vector in the place of a `Tensor?` for None. So results that may have no rows are declared `Tensor`;
# callers know by `stats` and `needs` whether there are such.
forward = Registered(
    "linear_cross_entropy_forward(Tensor hidden, Tensor weight, Tensor? bias, Tensor? lora_a, Tensor? lora_b, Tensor labels, "
    "Tensor? token_weight, Tensor? mean_scale, Tensor? place, Tensor? bits, Tensor? probabilities, Tensor? class_weight, "
    "LossOptions options, Needs needs, bool separate_sum) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor?, Tensor?, Tensor, Tensor?, Tensor?, Tensor?)",
    _forward,
    _forward_fake,
    LossOptions,
    Needs,
    dispatched=_forward_in_graph,
)


# ---- backward ----


def _backward(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, lora_a: Tensor | None, lora_b: Tensor | None, labels: Tensor,
    place: Tensor | None, bits: Tensor | None, probabilities: Tensor | None, class_weight: Tensor | None, lse: Tensor,
    entropy: Tensor | None, dloss: Tensor, dlse: Tensor | None, dlog_prob: Tensor | None, dentropy: Tensor | None,
    mass: Tensor | None, options: LossOptions, needs: Needs, separate_sum: bool, *,
    accumulate: Accumulate | None = None, logits: Tensor | None = None, used: bool = False,
) -> Gradients:  # fmt: skip
    """Return the gradients, hidden's as [tokens, D], from `logits` that waited or from recomputed ones.

    With `accumulate`, the weight's is added to main_grad if that can be done part by part, and dweight is None. `used` logits
    hold their gradient, unless that is narrower: they are made again in place, by forward's products.
    """
    head = head_of(hidden, weight, bias, lora_a, lora_b, labels, place, bits, probabilities, class_weight, options)
    target = accumulation_target(*accumulate) if needs.need_weight and accumulate is not None else None
    kind = wide_type(weight) if separate_sum else weight.dtype
    made = Gradients(
        torch.empty_like(head.hidden) if needs.need_hidden else None,
        torch.empty_like(weight, dtype=kind) if needs.need_weight and target is None else None,
        head.hidden.new_empty(head.columns, dtype=wide_type(head.hidden)) if needs.need_bias else None,
        *new_lora_gradients(lora_a, lora_b, needs),
    )
    sums = made if target is None else made._replace(weight=target)
    incoming = RowGradients(dloss, dlse, dlog_prob, dentropy, mass)
    found = RowLosses(lse, lse, None, entropy)  # the passes don't read losses
    if logits is not None:
        kept, (rows, columns) = to_local_rows(logits, head.columns), _forward_pieces(head, True)
        if used and head.narrow_gradient is None:
            make_all_logits(head, rows, columns, logits)
        gradients_of_kept_logits(head, rows, kept, found, incoming, sums, target is not None)
    else:
        options, rank = options._replace(grad_scale=None), _rank_of(lora_a)
        plan = plan_call(hidden, weight, labels.shape[0], options, needs, target, "recompute", rank)
        recompute_gradients(head, plan, found, incoming, sums, target is not None)
    return made


def _backward_fake(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, lora_a: Tensor | None, lora_b: Tensor | None, labels: Tensor,
    place: Tensor | None, bits: Tensor | None, probabilities: Tensor | None, class_weight: Tensor | None, lse: Tensor,
    entropy: Tensor | None, dloss: Tensor, dlse: Tensor | None, dlog_prob: Tensor | None, dentropy: Tensor | None,
    mass: Tensor | None, options: LossOptions, needs: Needs, separate_sum: bool,
) -> Gradients:  # fmt: skip
    return Gradients(
        _tokens_like(hidden, options.product) if needs.need_hidden else None,
        torch.empty_like(weight, dtype=wide_type(weight) if separate_sum else weight.dtype) if needs.need_weight else None,
        hidden.new_empty(weight.shape[0], dtype=wide_type(hidden)) if needs.need_bias else None,
        *new_lora_gradients(lora_a, lora_b, needs),
    )


backward = Registered(
    "linear_cross_entropy_backward(Tensor hidden, Tensor weight, Tensor? bias, Tensor? lora_a, Tensor? lora_b, Tensor labels, "
    "Tensor? place, Tensor? bits, Tensor? probabilities, Tensor? class_weight, Tensor lse, Tensor? entropy, Tensor dloss, "
    "Tensor? dlse, Tensor? dlog_prob, Tensor? dentropy, Tensor? mass, LossOptions options, Needs needs, bool separate_sum) -> "
    "(Tensor?, Tensor?, Tensor, Tensor?, Tensor?)",
    _backward,
    _backward_fake,
    LossOptions,
    Needs,
)
