"""The row loss of linear_divergence: the teacher's logits, and what kernels or PyTorch do with both heads' rows.

Ranks that share the vocabulary exchange rows' statistics, five numbers a row, and for jsd two more.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onepass.distributed.collectives import Pending, start_all_gather, start_all_reduce
from onepass.ops.loss.head.autograd import head_function
from onepass.ops.loss.head.chunks import Chunks, TokenChunk
from onepass.ops.loss.head.operands import (
    Head,
    HeadTensors,
    LogitsBlock,
    head_of,
    make_logits,
    new_logits,
    operand_bytes,
    padded_rows,
)
from onepass.ops.loss.head.plan import machine_speed
from onepass.ops.loss.head.row_loss import MADE_IN_FORWARD, Plan
from onepass.ops.loss.head.steps import HeadOps
from onepass.ops.loss.head.sums import Needs
from onepass.ops.loss.linear_divergence import kernels
from onepass.ops.loss.linear_divergence import rows as by_pytorch
from onepass.ops.loss.linear_divergence.formula import PLANES, DivergenceOptions, finish_jsd, merge_statistics
from onepass.ops.loss.linear_divergence.plan import DivergenceInputs, DivergencePlan, make_plan
from onepass.ops.loss.linear_divergence.rows import LogitRows


class TeacherRows(NamedTuple):
    """What is known of the tokens, beside the student's hidden states."""

    teacher: Tensor  # [..., E]
    teacher_weight: Tensor
    teacher_bias: Tensor | None
    labels: Tensor  # [N]
    place: Tensor | None


class FoundDivergences(NamedTuple):
    losses: Tensor  # [N]
    numbers: Tensor  # [PLANES, N]
    teacher_logits: Tensor | None  # those that wait


class KeptDivergences(NamedTuple):
    """What backward needs of `FoundDivergences`."""

    numbers: Tensor
    teacher_logits: Tensor | None


class DivergenceGradients(NamedTuple):
    """The incoming gradients of rows' divergences, [N]."""

    incoming: Tensor


class DivergenceRows:
    """A `RowLoss`: see ops/loss/head/row_loss.py. The head is the student's."""

    overlaps = False  # a chunk's logits are read again when the ranks' statistics are there

    def __init__(
        self, head: Head, rows: TeacherRows, options: DivergenceOptions, mode: str, kept: KeptDivergences | None = None,
        incoming: DivergenceGradients | None = None,
    ) -> None:  # fmt: skip
        teacher = HeadTensors(rows.teacher, rows.teacher_weight, rows.teacher_bias)
        self.head, self.teacher = head, head_of(teacher, rows.place, options, options.teacher_product)
        self.labels, self.terms, self.shard, self.incoming = rows.labels, options.terms, head.shard, incoming
        self.rows: Any = kernels if head.use_triton else by_pytorch
        self.writes, self.made = mode in MADE_IN_FORWARD, kept is not None  # the gradient in forward; the teacher's logits
        self.buffer: Tensor | None = None
        if kept is not None:
            self.numbers, self.waiting = kept
        else:
            self.waiting = new_logits(self.teacher, head.tokens, head.columns) if mode.startswith("keep") else None
            self.found = _new_found(head.hidden, head.tokens)._replace(teacher_logits=self.waiting)
            self.numbers = self.found.numbers

    @staticmethod
    def plan(
        tensors: HeadTensors, rows: TeacherRows, options: DivergenceOptions, needs: Needs, main_grad: Tensor | None,
        mode: str | None, kept: KeptDivergences | None = None,
    ) -> DivergencePlan:  # fmt: skip
        if kept is not None:
            options, mode = options._replace(reduction="none"), mode if kept.teacher_logits is None else None
        return plan_call(tensors, rows.teacher_weight, options, needs, mode)

    @staticmethod
    def forward_pieces(head: Head, options: DivergenceOptions, plan: Plan | None = None) -> tuple[int, int]:
        return head.tokens if plan is None else plan.rows, head.columns

    @staticmethod
    def empty(tensors: HeadTensors, rows: TeacherRows, options: DivergenceOptions) -> FoundDivergences:
        return _new_found(tensors.hidden, rows.labels.numel())

    def read(self, chunk: TokenChunk, logits: LogitsBlock) -> Tensor | None:
        self.both = self._both(chunk, logits)
        if self.shard is not None:
            return self.rows.row_statistics(self.both, self.terms)  # type: ignore[no-any-return]
        self.rows.whole_rows(self.both, self.terms, self._numbers(chunk), chunk.take(self.found.losses), self.writes)
        return None

    def exchange(self, parts: list[Any]) -> Pending | None:
        return None if self.shard is None else start_all_gather(parts[0], self.shard.group)

    def finish(self, chunk: TokenChunk, logits: LogitsBlock, sent: Pending | None) -> None:
        if self.shard is None or sent is None:
            return
        numbers = self._numbers(chunk)
        losses = merge_statistics(sent.wait(), self.both.labels, self.terms, numbers)
        if self.terms.kind == "jsd":
            sums = start_all_reduce(self.rows.mixture_sums(self.both, self.terms, numbers), self.shard.group).wait()
            losses = finish_jsd(sums, self.both.labels, self.terms, numbers)
        chunk.put(losses, self.found.losses)
        if self.writes:
            self.rows.row_gradients(self.both, self.terms, numbers, None)

    def gradient(self, chunk: TokenChunk | Chunks, logits: LogitsBlock) -> None:
        assert self.incoming is not None
        incoming = chunk.take(self.incoming.incoming)
        self.rows.row_gradients(self._both(chunk, logits), self.terms, self._numbers(chunk), incoming)

    def _both(self, chunk: TokenChunk | Chunks, logits: LogitsBlock) -> LogitRows:
        """Both heads' logits of a chunk. The teacher's are made, unless they wait already."""
        teacher, n = self.teacher, logits.x.shape[0]
        if self.waiting is None and self.buffer is None:
            self.buffer = new_logits(teacher, n, teacher.columns)  # the first chunk is the largest
        x = chunk.take(self.waiting) if self.waiting is not None else self.buffer
        assert x is not None
        if self.made and self.waiting is not None:
            x = x[:, : teacher.columns]
        else:
            x = make_logits(teacher, chunk.take(teacher.hidden), 0, teacher.columns, (x, None)).x
        return LogitRows(logits.x, logits.out, x, chunk.take(self.labels), logits.room)

    def _numbers(self, chunk: TokenChunk | Chunks) -> Tensor:
        return self.numbers if isinstance(chunk, Chunks) or chunk.whole else self.numbers[:, chunk.part]


def _new_found(like: Tensor, tokens: int) -> FoundDivergences:
    wide = torch.promote_types(like.dtype, torch.float32)
    return FoundDivergences(like.new_empty(tokens, dtype=wide), like.new_empty(PLANES, tokens, dtype=wide), None)


def plan_call(
    tensors: HeadTensors, teacher_weight: Tensor, options: DivergenceOptions, needs: Needs, mode: str | None = None
) -> DivergencePlan:
    """Divide a call. mode: the only one that will do, as in a compiled graph, or None: logits may wait."""
    through_lora = needs.need_lora_a or needs.need_lora_b  # whose products read the gradient of logits, as hidden's does
    product, teacher, weight = options.product, options.teacher_product, tensors.weight
    beside = options.wide and product.itemsize < 4  # fp32 logits of narrower operands: the gradient has its own memory
    V, D = weight.shape
    inputs = DivergenceInputs(
        math.prod(tensors.hidden.shape[:-1]), D, V, weight.element_size(),
        V * (4 + product.itemsize if beside else product.itemsize),
        V * (max(4, teacher.itemsize) if options.wide else teacher.itemsize),
        needs.need_hidden or through_lora, needs.need_weight or needs.need_bias, options.reduction != "none",
        mode is not None or beside, options.group != "", options.chunk_bytes,
    )  # fmt: skip
    plan = make_plan(inputs, machine_speed(tensors.hidden.device, product.itemsize).budget)
    padded = padded_rows(weight, options.use_triton) * (D * product.itemsize + teacher_weight.shape[1] * teacher.itemsize)
    low_rank = 0 if tensors.lora_a is None else tensors.lora_a.shape[0]
    return plan._replace(bytes=plan.bytes + padded + operand_bytes(plan.rows, weight, low_rank, product.itemsize))


OPS = HeadOps(
    "linear_divergence", DivergenceRows, DivergenceOptions, TeacherRows, KeptDivergences, DivergenceGradients,
    "Tensor, Tensor, Tensor?",
)  # fmt: skip
apply = head_function(OPS)
