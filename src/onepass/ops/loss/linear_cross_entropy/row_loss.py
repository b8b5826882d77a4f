"""The row loss of linear_cross_entropy: how a call is planned, and what kernels or PyTorch do with its rows of logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onepass.distributed.collectives import Pending, start_all_gather
from onepass.kernels.layout import as_matrix
from onepass.ops.loss import row_formula, row_kernels, whole_row_kernels
from onepass.ops.loss.formula import LossOptions, RowLosses, lse_type
from onepass.ops.loss.head.chunks import Chunks, TokenChunk
from onepass.ops.loss.head.operands import Head, HeadTensors, LogitsBlock, operand_bytes, padded_rows, wide_type
from onepass.ops.loss.head.plan import HeadPlan, PlanInputs, machine_speed, make_plan
from onepass.ops.loss.head.row_loss import MADE_IN_FORWARD, Plan
from onepass.ops.loss.head.steps import HeadOps
from onepass.ops.loss.head.sums import Needs
from onepass.ops.loss.reduction import row_gradient
from onepass.ops.loss.row_kernels import RowGradients
from onepass.ops.loss.targets import VocabColumns, as_targets
from onepass.runtime.batch_invariance import invariant


class TokenRows(NamedTuple):
    """What is known of the tokens that are computed, beside hidden states."""

    labels: Tensor  # [N], of the whole sequence
    token_weight: Tensor | None  # [N], fp32; times labels' class weights where there are no masses
    mean_scale: Tensor | None  # the factor of a mean
    place: Tensor | None  # this rank's, in a vocabulary that several share
    bits: Tensor | None  # which of this rank's columns their distributions have, [N or 1, bytes]
    probabilities: Tensor | None  # [..., V] of this rank's columns, where labels are probabilities
    class_weight: Tensor | None  # [V], where masses are made of it

    def masses(self) -> bool:
        return self.probabilities is not None or self.class_weight is not None


class KeptNumbers(NamedTuple):
    """What backward needs of what forward found of rows, [N]."""

    lse: Tensor
    row_entropy: Tensor | None


class CrossEntropyRows:
    """A `RowLoss`: see ops/loss/head/row_loss.py."""

    overlaps = True

    def __init__(
        self, head: Head, rows: TokenRows, options: LossOptions, mode: str, kept: KeptNumbers | None = None,
        incoming: RowGradients | None = None,
    ) -> None:  # fmt: skip
        self.head, self.labels, self.bits, self.incoming = head, rows.labels, rows.bits, incoming
        mixed = None if rows.probabilities is None else as_matrix(rows.probabilities)[0]
        self.targets = as_targets(mixed, rows.class_weight)
        self.terms, self.stats = options.terms, options.statistics()
        self.rows: Any = row_kernels if head.use_triton else row_formula
        self.found: Any = None if kept is None else RowLosses(kept.lse, kept.lse, None, kept.row_entropy)  # losses aren't read
        self.adopts = mode == "keep_logits"  # memory that a graph's op may not return, as losses and statistics share it
        self.read_and_write = None
        if mode in MADE_IN_FORWARD:
            known = mode == "known_grad_scale"
            upstream = options.grad_scale if known and options.grad_scale is not None else 1.0
            one = torch.full((), upstream, dtype=wide_type(head.hidden), device=head.hidden.device)
            scale = rows.mean_scale if known else None
            self.incoming = RowGradients(row_gradient(one, "sum", head.tokens, scale, rows.token_weight))
            if head.shard is None and self.bits is None and self.targets is None:  # one rank's whole rows, by one kernel
                whole: Any = whole_row_kernels if head.use_triton else row_formula
                self.read_and_write = whole.row_statistics_and_gradients

    @staticmethod
    def plan(
        tensors: HeadTensors, rows: TokenRows, options: LossOptions, needs: Needs, main_grad: Tensor | None, mode: str | None,
        kept: KeptNumbers | None = None,
    ) -> HeadPlan:  # fmt: skip
        if kept is not None:  # a promise was kept in forward, or not at all
            options = options._replace(grad_scale=None)
        return plan_call(tensors, rows.labels.shape[0], options, needs, main_grad, mode)

    @staticmethod
    def forward_pieces(head: Head, options: LossOptions, plan: Plan | None = None) -> tuple[int, int]:
        """Those of a call without gradients, for the same bits. If logits wait, one number for all is made in one piece."""
        if (plan is None or plan.mode == "keep_logits") and options.reduction != "none" and not options.stats:
            return head.tokens, head.columns
        nothing, low_rank = Needs(False, False, False), 0 if head.lora is None else head.lora.a.shape[0]
        inputs = _plan_inputs(head.tokens, head.hidden.shape[1], head.columns, options, nothing, None, None, low_rank)
        pieces = make_plan(inputs, machine_speed(head.hidden.device, inputs.size))
        return pieces.rows, pieces.columns

    @staticmethod
    def empty(tensors: HeadTensors, rows: TokenRows, options: LossOptions) -> RowLosses:
        product = options.product
        logits = torch.promote_types(product, torch.float32) if options.wide else product
        return _empty_rows(tensors.hidden, rows.labels.shape[0], options.statistics(), logits, rows.masses())

    def read(self, chunk: TokenChunk, logits: LogitsBlock) -> Tensor:
        labels = chunk.take(self.labels)
        if self.read_and_write is not None and self.incoming is not None:
            g = chunk.take(self.incoming.loss)
            return self.read_and_write(  # type: ignore[no-any-return]
                logits.x, logits.out, labels, self.terms, self.stats, g, *self._room(logits)
            )
        columns = self._columns(chunk, logits)
        return self.rows.row_statistics(logits.x, labels, self.terms, self.stats, columns)  # type: ignore[no-any-return]

    def exchange(self, parts: list[Tensor]) -> Pending:
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        if self.head.shard is None:
            return Pending(whole)
        return start_all_gather(self.rows.merge_statistics(whole, self.terms, self.stats), self.head.shard.group)

    def finish(self, chunk: TokenChunk, logits: LogitsBlock, sent: Pending) -> None:
        head, labels = self.head, chunk.take(self.labels)
        columns = VocabColumns(0, head.columns, head.place, targets=self.targets)
        done: RowLosses = self.rows.finish_losses(sent.wait(), labels, self.terms, self.stats, head.logits, columns)
        if self.adopts and chunk.whole:
            self.found = done
        else:
            self._put(chunk, done)
        if self.incoming is not None and self.read_and_write is None:
            g = RowGradients(chunk.take(self.incoming.loss), mass=done.mass)
            self._write(chunk, logits, labels, done.logsumexp, None, g)

    def _put(self, chunk: TokenChunk, done: RowLosses) -> None:
        head = self.head
        if self.found is None:
            self.found = _empty_rows(head.hidden, head.tokens, self.stats, head.logits, self.targets is not None)
        for into, values in zip(self.found, done, strict=True):
            if into is not None and values is not None:
                chunk.put(values, into)

    def gradient(self, chunk: TokenChunk | Chunks, logits: LogitsBlock) -> None:
        assert self.found is not None and self.incoming is not None
        known = self.labels, self.found.logsumexp, self.found.entropy, *self.incoming
        labels, lse, entropy, *each = (None if t is None else chunk.take(t) for t in known)
        self._write(chunk, logits, labels, lse, entropy, RowGradients(*each))  # type: ignore[arg-type]

    def _write(
        self, chunk: TokenChunk | Chunks, logits: LogitsBlock, labels: Tensor, lse: Tensor, entropy: Tensor | None,
        incoming: RowGradients,
    ) -> None:  # fmt: skip
        columns = self._columns(chunk, logits)
        self.rows.row_gradients(logits.x, logits.out, labels, self.terms, lse, entropy, incoming, columns)

    def _columns(self, chunk: TokenChunk | Chunks, logits: LogitsBlock) -> VocabColumns:
        bits = self.bits if self.bits is None or self.bits.shape[0] == 1 else chunk.take(self.bits)
        targets = self.targets
        if targets is not None and targets.probabilities is not None:
            targets = targets._replace(probabilities=chunk.take(targets.probabilities))
        return VocabColumns(logits.first, self.head.columns, self.head.place, bits, targets, logits.room)

    def _room(self, logits: LogitsBlock) -> tuple[int, ...]:
        """The kernels' last argument, which the formula has not."""
        return (logits.room,) if self.head.use_triton else ()


def _empty_rows(like: Tensor, rows: int, stats: tuple[str, ...], logits: torch.dtype, masses: bool) -> RowLosses:
    """Allocate losses, the logsumexp, the named statistics and masses; `logits` is the logits' type."""
    kinds = {"loss": wide_type(like), "logsumexp": lse_type(logits)}
    more = (name for name in (*stats, *["mass"] * masses) if name not in ("logsumexp", "z_loss"))
    kinds |= {name: torch.bool if name == "correct" else wide_type(like) for name in more}
    return RowLosses(**{name: like.new_empty(rows, dtype=kind) for name, kind in kinds.items()})


# ---- plans ----


def _plan_inputs(
    N: int, D: int, V: int, options: LossOptions, needs: Needs, main_grad: Tensor | None, mode: str | None, low_rank: int
) -> PlanInputs:  # fmt: skip
    size, promised = options.product.itemsize, options.grad_scale is not None
    through_lora = needs.need_lora_a or needs.need_lora_b  # whose products read the gradient of logits, as hidden's does
    return PlanInputs(
        N, D, V, size, options.wide and size < 4, needs.need_hidden or through_lora, needs.need_weight or needs.need_bias,
        options.reduction != "none" and (promised or not options.differentiable()),
        main_grad is not None and main_grad.dtype is torch.float32, promised, mode, options.group != "", options.chunk_bytes,
        low_rank, invariant(),
    )  # fmt: skip


def plan_call(
    tensors: HeadTensors, tokens: int, options: LossOptions, needs: Needs, main_grad: Tensor | None, mode: str | None = None
) -> HeadPlan:
    """Divide a call of so many tokens. mode: the only one that will do, or None."""
    weight, low_rank = tensors.weight, 0 if tensors.lora_a is None else tensors.lora_a.shape[0]
    inputs = _plan_inputs(tokens, weight.shape[1], weight.shape[0], options, needs, main_grad, mode, low_rank)
    plan = make_plan(inputs, machine_speed(tensors.hidden.device, inputs.size))
    beside = padded_rows(weight, options.use_triton) * weight.shape[1] * inputs.size
    beside += operand_bytes(min(plan.rows, tokens), weight, low_rank, inputs.size)
    return replace(plan, bytes=plan.bytes + beside) if beside else plan


OPS = HeadOps(
    "linear_cross_entropy", CrossEntropyRows, LossOptions, TokenRows, KeptNumbers, RowGradients,
    ", ".join(["Tensor"] * 8),
)  # fmt: skip
