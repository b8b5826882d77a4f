"""The forward and the backward of linear_divergence as registered ops, which plan a call and run its passes."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]

from onepass.ops.loss.linear_cross_entropy.head import VocabShard, operand_bytes, padded_rows, wide_type
from onepass.ops.loss.linear_cross_entropy.passes import Gradients
from onepass.ops.loss.linear_cross_entropy.plan import machine_speed
from onepass.ops.loss.linear_cross_entropy.steps import Needs, new_lora_gradients
from onepass.ops.loss.linear_divergence.formula import PLANES, DivergenceOptions
from onepass.ops.loss.linear_divergence.passes import (
    HeadOperands,
    HeadPair,
    WaitingLogits,
    divergences,
    gradients,
    new_waiting,
    pair_of,
)
from onepass.ops.loss.linear_divergence.plan import DivergenceInputs, DivergencePlan, make_plan
from onepass.ops.loss.lora import LoRA
from onepass.runtime.op import Registered


def plan_call(
    student: Tensor, weight: Tensor, teacher_weight: Tensor, options: DivergenceOptions, needs: Needs, in_graph: bool = False,
    lora_a: Tensor | None = None,
) -> DivergencePlan:  # fmt: skip
    through_lora = needs.need_lora_a or needs.need_lora_b  # whose products read the gradient of logits, as hidden's does
    product, teacher = options.product, options.teacher_product
    beside = options.wide and product.itemsize < 4  # fp32 logits of narrower operands: the gradient has its own memory
    V, D = weight.shape
    inputs = DivergenceInputs(
        math.prod(student.shape[:-1]), D, V, weight.element_size(),
        V * (4 + product.itemsize if beside else product.itemsize),
        V * (max(4, teacher.itemsize) if options.wide else teacher.itemsize),
        needs.need_hidden or through_lora, needs.need_weight or needs.need_bias, options.reduction != "none", in_graph or beside,
        options.group != "", options.chunk_bytes,
    )  # fmt: skip
    plan = make_plan(inputs, machine_speed(student.device, product.itemsize).budget)
    padded = padded_rows(weight, options.use_triton) * (D * product.itemsize + teacher_weight.shape[1] * teacher.itemsize)
    low_rank = 0 if lora_a is None else lora_a.shape[0]
    return plan._replace(bytes=plan.bytes + padded + operand_bytes(plan.rows, weight, low_rank, product.itemsize))


def _pair(
    student: HeadOperands, teacher: HeadOperands, labels: Tensor, place: Tensor | None, options: DivergenceOptions
) -> HeadPair:
    group: Any = options.group  # to type checkers a name is of a type of its own
    shard = None if place is None else VocabShard(_resolve_process_group(group), False, place)
    return pair_of(student, teacher, labels, options, shard)


def _new_gradients(
    pair: HeadPair, lora_a: Tensor | None, lora_b: Tensor | None, needs: Needs, dtype: torch.dtype
) -> Gradients:
    """Memory for sums, fp32 or wider; hidden's gradient, which no sum over chunks makes, has `dtype`."""
    head = pair.student
    wide = wide_type(head.hidden)
    return Gradients(
        torch.empty_like(head.hidden, dtype=dtype) if needs.need_hidden else None,
        head.hidden.new_empty(head.columns, head.hidden.shape[1], dtype=wide) if needs.need_weight else None,
        head.hidden.new_empty(head.columns, dtype=wide) if needs.need_bias else None,
        *new_lora_gradients(lora_a, lora_b, needs),
    )


def _fake_gradients(
    hidden: Tensor, weight: Tensor, lora_a: Tensor | None, lora_b: Tensor | None, needs: Needs, dtype: torch.dtype
) -> Gradients:
    tokens = hidden.reshape(math.prod(hidden.shape[:-1]), hidden.shape[-1])
    return Gradients(
        torch.empty_like(tokens, dtype=dtype) if needs.need_hidden else None,
        weight.new_empty(weight.shape, dtype=wide_type(hidden)) if needs.need_weight else None,
        hidden.new_empty(weight.shape[0], dtype=wide_type(hidden)) if needs.need_bias else None,
        *new_lora_gradients(lora_a, lora_b, needs),
    )


# ---- forward ----


def _forward(
    student: Tensor, student_weight: Tensor, student_bias: Tensor | None, lora_a: Tensor | None, lora_b: Tensor | None,
    teacher: Tensor, teacher_weight: Tensor, teacher_bias: Tensor | None, labels: Tensor, place: Tensor | None,
    options: DivergenceOptions, needs: Needs, *, in_graph: bool = False,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Return rows' divergences and numbers, the gradients of their sum where those are made already, and logits that wait."""
    lora = None if lora_a is None or lora_b is None else LoRA(lora_a, lora_b, options.lora_scale)
    heads = HeadOperands(student, student_weight, student_bias, lora), HeadOperands(teacher, teacher_weight, teacher_bias)
    pair = _pair(*heads, labels, place, options)
    plan = plan_call(student, student_weight, teacher_weight, options, needs, in_graph, lora_a)
    waiting = new_waiting(pair, plan.mode)
    into = None
    if plan.mode == "grad_in_forward":
        into = _new_gradients(pair, lora_a, lora_b, needs, wide_type(pair.student.hidden))
    losses, numbers = divergences(pair, plan.rows, waiting, into)
    return losses, numbers, *(into or Gradients(None, None, None)), *waiting


def _forward_in_graph(*args: Any) -> tuple[Tensor | None, ...]:
    return _forward(*args, in_graph=True)


def _forward_fake(
    student: Tensor, student_weight: Tensor, student_bias: Tensor | None, lora_a: Tensor | None, lora_b: Tensor | None,
    teacher: Tensor, teacher_weight: Tensor, teacher_bias: Tensor | None, labels: Tensor, place: Tensor | None,
    options: DivergenceOptions, needs: Needs,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    N, wide = labels.numel(), torch.promote_types(options.product, torch.float32)
    rows = (student.new_empty(*shape, N, dtype=wide) for shape in ((), (PLANES,)))
    made = Gradients(None, None, None)
    if options.reduction != "none":
        made = _fake_gradients(student, student_weight, lora_a, lora_b, needs, wide)
    return *rows, *made, None, None


# `Registered` takes an empty vector in the place of a `Tensor?` for None. The bias's gradient may have no rows: it is declared
# `Tensor`, and callers know by `needs` whether there is one.
forward = Registered(
    "linear_divergence_forward(Tensor student, Tensor student_weight, Tensor? student_bias, Tensor? lora_a, Tensor? lora_b, "
    "Tensor teacher, Tensor teacher_weight, Tensor? teacher_bias, Tensor labels, Tensor? place, DivergenceOptions options, "
    "Needs needs) -> (Tensor, Tensor, Tensor?, Tensor?, Tensor, Tensor?, Tensor?, Tensor?, Tensor?)",
    _forward,
    _forward_fake,
    DivergenceOptions,
    Needs,
    dispatched=_forward_in_graph,
)


# ---- backward ----


def _backward(
    student: Tensor, student_weight: Tensor, student_bias: Tensor | None, lora_a: Tensor | None, lora_b: Tensor | None,
    teacher: Tensor, teacher_weight: Tensor, teacher_bias: Tensor | None, labels: Tensor, place: Tensor | None,
    numbers: Tensor, incoming: Tensor, options: DivergenceOptions, needs: Needs, *, waiting: WaitingLogits = WaitingLogits(),  # noqa: B008
    used: bool = False,
) -> Gradients:  # fmt: skip
    """Return the gradients of rows' divergences, from logits that waited, unless an earlier pass has `used` them, or new ones."""
    lora = None if lora_a is None or lora_b is None else LoRA(lora_a, lora_b, options.lora_scale)
    heads = HeadOperands(student, student_weight, student_bias, lora), HeadOperands(teacher, teacher_weight, teacher_bias)
    pair = _pair(*heads, labels, place, options)
    of_rows = options._replace(reduction="none")
    plan = plan_call(student, student_weight, teacher_weight, of_rows, needs, waiting.teacher is None)
    into = _new_gradients(pair, lora_a, lora_b, needs, pair.student.hidden.dtype)
    gradients(pair, plan.rows, waiting, numbers, incoming, into, used)
    return into


def _backward_fake(
    student: Tensor, student_weight: Tensor, student_bias: Tensor | None, lora_a: Tensor | None, lora_b: Tensor | None,
    teacher: Tensor, teacher_weight: Tensor, teacher_bias: Tensor | None, labels: Tensor, place: Tensor | None,
    numbers: Tensor, incoming: Tensor, options: DivergenceOptions, needs: Needs,
) -> Gradients:  # fmt: skip
    return _fake_gradients(student, student_weight, lora_a, lora_b, needs, options.product)


backward = Registered(
    "linear_divergence_backward(Tensor student, Tensor student_weight, Tensor? student_bias, Tensor? lora_a, Tensor? lora_b, "
    "Tensor teacher, Tensor teacher_weight, Tensor? teacher_bias, Tensor labels, Tensor? place, Tensor numbers, "
    "Tensor incoming, DivergenceOptions options, Needs needs) -> (Tensor?, Tensor?, Tensor, Tensor?, Tensor?)",
    _backward,
    _backward_fake,
    DivergenceOptions,
    Needs,
)
