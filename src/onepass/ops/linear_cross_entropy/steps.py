"""What one call of linear_cross_entropy does in forward, and in a backward that makes gradients itself."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from onepass.kernels.cross_entropy_formula import RowLosses, Terms
from onepass.kernels.losses import row_gradient
from onepass.kernels.softmax_rows import Incoming
from onepass.ops.linear_cross_entropy.head import Head, Logits, Spread, padded_rows, wide_type
from onepass.ops.linear_cross_entropy.passes import (
    Gradients,
    gradients_again,
    gradients_of_kept,
    losses,
    losses_and_gradients,
)
from onepass.ops.linear_cross_entropy.plan import Asked, Plan, machine_of, plan_of
from onepass.parallel.deferred import DeferredWgrad
from onepass.runtime.dispatch import cast


class Call(NamedTuple):
    """All that is asked for, beside tensors."""

    terms: Terms
    reduction: str
    wide: bool  # logits in fp32
    native: bool
    product: torch.dtype
    group: dist.ProcessGroup | None  # of several ranks
    sequence: bool
    grad_scale: float | None
    chunk_bytes: int | None
    full: bool
    deferred: DeferredWgrad | None


class Rows(NamedTuple):
    """What is kept of the tokens: labels, weights in fp32, what a mean is multiplied by, and this rank's place."""

    labels: Tensor
    token_weight: Tensor | None
    scale: Tensor | None
    place: Tensor | None


Needs = tuple[bool, bool, bool]  # whose gradient is asked for: hidden's, the weight's, the bias's


def plan_call(
    hidden: Tensor, weight: Tensor, labels: Tensor, call: Call, needs: Needs, main_grad: Tensor | None, way: str | None = None
) -> Plan:
    size = call.product.itemsize
    to_plan = Asked(
        labels.numel(), weight.shape[1], weight.shape[0], size, call.wide and size < 4, needs[0], needs[1] or needs[2],
        call.reduction != "none", main_grad is not None and main_grad.dtype is torch.float32, call.grad_scale is not None, way,
        call.group is not None, call.chunk_bytes,
    )  # fmt: skip
    plan = plan_of(to_plan, machine_of(hidden.device, size))
    padded = padded_rows(weight, call.native)
    return replace(plan, bytes=plan.bytes + padded * weight.shape[1] * size) if padded else plan


def head_of(hidden: Tensor, weight: Tensor, bias: Tensor | None, rows: Rows, call: Call) -> Head:
    """Operands in the product's type."""
    tokens = cast(hidden.reshape(hidden.shape[:-1].numel(), hidden.shape[-1]), call.product)
    spread = None if call.group is None or rows.place is None else Spread(call.group, call.sequence, rows.place)
    bias = None if bias is None else cast(bias, call.product)
    return Head(tokens, cast(weight, call.product), bias, rows.labels, call.terms, call.wide, call.native, spread)


def first_step(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, rows: Rows, call: Call, plan: Plan, needs: Needs, into: Tensor | None,
    apart: bool,
) -> tuple[RowLosses, Gradients, Logits | None]:
    """What is known of the rows, gradients that wait, and logits that do.

    into: where the weight's gradient is added at once. apart: else it will go to a place of its own, and is rounded there only.
    """
    head = head_of(hidden, weight, bias, rows, call)
    if plan.way not in ("forward", "promised"):
        found, logits = losses(head, plan, call.full)
        return found, Gradients(None, None, None), logits if plan.way == "keep" else None
    promised, wide = plan.way == "promised", wide_type(head.hidden)
    kind = weight.dtype if promised and not apart else wide_type(weight)
    waiting = Gradients(
        torch.empty_like(head.hidden, dtype=call.product if promised else wide) if needs[0] else None,
        torch.empty_like(weight, dtype=kind) if needs[1] and into is None else None,
        head.hidden.new_empty(head.columns, dtype=wide) if needs[2] else None,
    )
    one = torch.full((), call.grad_scale if promised and call.grad_scale is not None else 1.0, dtype=wide, device=hidden.device)
    g = row_gradient(one, "sum", head.tokens, rows.scale if promised else None, rows.token_weight)
    sums = waiting if into is None else waiting._replace(weight=into)
    return losses_and_gradients(head, plan, call.full, g, sums, into is not None), waiting, None


def made_again(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, rows: Rows, lse: Tensor, entropy: Tensor | None, incoming: Incoming,
    call: Call, needs: Needs, apart: bool, place: Tensor | None = None, kept: Logits | None = None,
) -> Gradients:  # fmt: skip
    """hidden's gradient [tokens, D], and sums for the weight's and the bias's; the weight's not where it is added to its place.
    Of the logits that were kept, or of logits that are made again."""
    head = head_of(hidden, weight, bias, rows, call)
    into = _room_for(head, weight, needs, apart, place)
    found = RowLosses(lse, lse, None, entropy)  # nobody asks for the losses again
    if kept is not None:
        gradients_of_kept(head, kept, found, incoming, into, place is not None)
    else:
        plan = plan_call(hidden, weight, rows.labels, call._replace(grad_scale=None), needs, place, "again")
        gradients_again(head, plan, found, incoming, into, place is not None)
    return into if place is None else into._replace(weight=None)


def _room_for(head: Head, weight: Tensor, needs: Needs, apart: bool, place: Tensor | None) -> Gradients:
    kind = wide_type(weight) if apart else weight.dtype
    return Gradients(
        torch.empty_like(head.hidden) if needs[0] else None,
        place if place is not None else torch.empty_like(weight, dtype=kind) if needs[1] else None,
        head.hidden.new_empty(head.columns, dtype=wide_type(head.hidden)) if needs[2] else None,
    )
