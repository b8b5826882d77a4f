"""The passes of linear_divergence: chunks of tokens, both heads' products, and the rows' kernels between them.

Ranks that share the vocabulary exchange rows' statistics, five numbers a row, and for jsd two more. hidden's gradient is summed
over them under the product for the weight's gradient.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onepass.gradients.main_grad import add_gradient
from onepass.ops.loss.formula import LossOptions
from onepass.ops.loss.linear_cross_entropy.adapter import AdapterSum
from onepass.ops.loss.linear_cross_entropy.head import (
    Head,
    LogitsBlock,
    VocabShard,
    hidden_gradient,
    make_logits,
    multiply,
    new_buffer,
    new_logits,
    wide_type,
)
from onepass.ops.loss.linear_cross_entropy.passes import Gradients
from onepass.ops.loss.linear_divergence import kernels
from onepass.ops.loss.linear_divergence import rows as by_pytorch
from onepass.ops.loss.linear_divergence.formula import (
    PLANES,
    DivergenceOptions,
    DivergenceTerms,
    finish_jsd,
    merge_statistics,
)
from onepass.ops.loss.linear_divergence.rows import LogitRows
from onepass.ops.loss.lora import LoRA, cast_lora
from onepass.parallel.collectives import Pending, start_all_reduce
from onepass.parallel.vocab_shards import start_gather_parts
from onepass.runtime.dispatch import cast

# ---- both heads ----


class HeadOperands(NamedTuple):
    """What one head's logits are made of."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    lora: LoRA | None = None


class HeadPair(NamedTuple):
    student: Head
    teacher: Head
    labels: Tensor  # [N]
    terms: DivergenceTerms
    use_triton: bool

    @property
    def tokens(self) -> int:
        return self.labels.shape[0]

    @property
    def rows(self) -> Any:
        return kernels if self.use_triton else by_pytorch

    @property
    def shard(self) -> VocabShard | None:
        return self.student.shard


def pair_of(
    student: HeadOperands, teacher: HeadOperands, labels: Tensor, options: DivergenceOptions, shard: VocabShard | None
) -> HeadPair:  # fmt: skip
    """Cast the operands to the products' types."""
    heads = [
        _head_of(operands, labels, options, product, shard)
        for operands, product in ((student, options.product), (teacher, options.teacher_product))
    ]
    return HeadPair(heads[0], heads[1], labels, options.terms, options.use_triton)


def _head_of(
    operands: HeadOperands, labels: Tensor, options: DivergenceOptions, product: torch.dtype, shard: VocabShard | None
) -> Head:
    hidden, weight, bias, lora = operands
    tokens = cast(hidden.reshape(labels.shape[0], hidden.shape[-1]), product)
    plain = _head_options(options, product)
    bias = None if bias is None else cast(bias, product)
    return Head(tokens, cast(weight, product), bias, labels, plain, shard, lora=cast_lora(lora, product))


@lru_cache(1024)
def _head_options(options: DivergenceOptions, product: torch.dtype) -> LossOptions:
    return LossOptions(
        ignore_index=options.ignore_index, smoothing=0.0, z_loss=0.0, softcap=0.0, scale=1.0, reduction=options.reduction,
        wide=options.wide, use_triton=options.use_triton, product=product, group=options.group, sequence=False, grad_scale=None,
        chunk_bytes=None, stats="",
    )  # fmt: skip


# ---- chunks ----


def _chunk_of(t: Tensor, chunk: slice) -> Tensor:
    """The chunk's tokens of a tensor [tokens, ...]; a view takes microseconds, and is not made of all tokens."""
    return t if chunk.stop - chunk.start == t.shape[0] else t[chunk]


# ---- logits ----


class WaitingLogits(NamedTuple):
    """Logits that wait for backward, [N, columns and room]; None for those that don't."""

    student: Tensor | None = None
    teacher: Tensor | None = None


class _LogitChunks:
    """Both heads' logits, chunk by chunk: in a chunk's buffer, or in memory for all tokens where they wait."""

    def __init__(
        self, pair: HeadPair, rows: int, waiting: WaitingLogits, made: tuple[bool, bool] = (False, False)
    ) -> None:  # fmt: skip
        """made: the student's and the teacher's logits that wait are there already."""
        self.pair, self.waiting, self.made = pair, waiting, made
        self.chunks = [slice(at, min(at + rows, pair.tokens)) for at in range(0, pair.tokens, max(1, rows))]
        most, (student, teacher) = min(rows, pair.tokens), waiting
        x = new_logits(pair.teacher, most, pair.teacher.columns) if teacher is None else teacher
        own = new_buffer(pair.student, most, pair.student.columns) if student is None else (student, None)
        self.buffers = [own, (x, None)]

    def of(self, chunk: slice) -> tuple[LogitsBlock, LogitRows]:
        """The student's logits, which hold their gradient after a call of the rows' kernels, and both heads'."""
        student, teacher = (
            self._block(head, chunk, buffer, kept, made)
            for head, buffer, kept, made in zip(
                (self.pair.student, self.pair.teacher), self.buffers, self.waiting, self.made, strict=True
            )
        )
        return student, LogitRows(student.x, student.out, teacher.x, _chunk_of(self.pair.labels, chunk), student.room)

    def _block(
        self, head: Head, chunk: slice, buffer: tuple[Tensor, Tensor | None], kept: Tensor | None, made: bool
    ) -> LogitsBlock:
        if kept is None:
            return make_logits(head, _chunk_of(head.hidden, chunk), 0, head.columns, buffer)
        if not made:
            return make_logits(head, _chunk_of(head.hidden, chunk), 0, head.columns, (_chunk_of(kept, chunk), None))
        x = kept[chunk, : head.columns]
        return LogitsBlock(x, x, max(head.columns, head.weight.shape[0]), 0)


def new_waiting(pair: HeadPair, mode: str) -> WaitingLogits:
    heads = (pair.student if mode == "keep_logits" else None, pair.teacher if mode.startswith("keep") else None)
    return WaitingLogits(*(None if head is None else new_logits(head, pair.tokens, head.columns) for head in heads))


# ---- sums of products ----


class _GradientSums:
    """The student's gradients, chunk by chunk."""

    def __init__(self, head: Head, into: Gradients) -> None:
        self.head, self.into, self.begun, self.adapter = head, into, False, None
        if head.lora is not None and (into.hidden is not None or into.lora_a is not None):
            self.adapter = AdapterSum(head, into.lora_a, head.tokens, 1)
        self.under_way: list[tuple[slice, Pending]] = []

    def add(self, chunk: slice, logits: LogitsBlock) -> None:
        head, d = self.head, logits.out
        low = None if self.adapter is None else self.adapter.add(logits, chunk, 0)
        if self.into.hidden is not None:
            product = _chunk_of(self.into.hidden, chunk)
            self._multiply(logits, low, product)
            if head.shard is not None:
                self.under_way.append((chunk, start_all_reduce(product, head.shard.group)))
        if self.into.bias is not None:
            sums = d.sum(0, dtype=self.into.bias.dtype)
            self.into.bias.add_(sums) if self.begun else self.into.bias.copy_(sums)
        if self.adapter is not None and low is not None:
            self.adapter.add_a(low, _chunk_of(head.hidden, chunk))
        if self.into.lora_b is not None:
            add_gradient(self.into.lora_b, d, head.low(_chunk_of(head.hidden, chunk)), self.begun)
        if self.into.weight is not None:
            add_gradient(self.into.weight, d, _chunk_of(head.hidden, chunk), self.begun)
        self.begun = True

    def _multiply(self, logits: LogitsBlock, low: Tensor | None, product: Tensor) -> None:
        """Write hidden's gradient. With LoRA it is two products, which are rounded together."""
        head = self.head
        if not head.columns:  # a rank without columns has no product, but a part in the sum
            product.zero_()
        elif low is None:
            hidden_gradient(head, logits, product)
        else:
            assert head.lora is not None
            sums = product if product.dtype == wide_type(product) else torch.empty_like(product, dtype=wide_type(product))
            hidden_gradient(head, logits, sums)
            multiply(low, head.lora.a, sums, True)
            if sums is not product:
                product.copy_(sums)

    def finish(self) -> None:
        if self.adapter is not None:
            self.adapter.finish()
        for chunk, pending in self.under_way:
            assert self.into.hidden is not None
            total = pending.wait()
            if total.data_ptr() != self.into.hidden[chunk].data_ptr():
                self.into.hidden[chunk] = total
        if not self.begun:  # there are no tokens
            for t in self.into[1:]:
                if t is not None:
                    t.zero_()


# ---- the passes ----


def divergences(
    pair: HeadPair, rows: int, waiting: WaitingLogits, into: Gradients | None = None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return rows' divergences and numbers, and write the gradients of the sum of divergences to `into`."""
    dtype = wide_type(pair.student.hidden)
    losses, numbers = (pair.student.hidden.new_empty(*shape, pair.tokens, dtype=dtype) for shape in ((), (PLANES,)))
    logits, sums = _LogitChunks(pair, rows, waiting), None if into is None else _GradientSums(pair.student, into)
    for chunk in logits.chunks:
        student, both = logits.of(chunk)
        if pair.shard is None:
            of_chunk = numbers if len(logits.chunks) == 1 else numbers[:, chunk]
            pair.rows.whole_rows(both, pair.terms, of_chunk, _chunk_of(losses, chunk), into is not None)
        else:
            losses[chunk] = _partial_rows(pair, both, numbers[:, chunk], pair.shard)
            if into is not None:
                pair.rows.row_gradients(both, pair.terms, numbers[:, chunk], None)
        if sums is not None:
            sums.add(chunk, student)
    if sums is not None:
        sums.finish()
    return losses, numbers


def _partial_rows(pair: HeadPair, logits: LogitRows, numbers: Tensor, shard: VocabShard) -> Tensor:
    """Write the numbers of rows whose vocabulary the ranks share, and return their divergences."""
    parts = start_gather_parts(pair.rows.row_statistics(logits, pair.terms), shard.group).wait()
    losses = merge_statistics(parts, logits.labels, pair.terms, numbers)
    if pair.terms.kind != "jsd":
        return losses
    sums = start_all_reduce(pair.rows.mixture_sums(logits, pair.terms, numbers), shard.group).wait()
    return finish_jsd(sums, logits.labels, pair.terms, numbers)


def gradients(
    pair: HeadPair, rows: int, waiting: WaitingLogits, numbers: Tensor, incoming: Tensor, into: Gradients, used: bool
) -> None:  # fmt: skip
    """Write the gradients to `into`, from the logits that waited or from new ones. `incoming`: of each row's divergence.

    used: the student's logits that waited hold their gradient. They are made again.
    """
    logits, sums = _LogitChunks(pair, rows, waiting, made=(not used, True)), _GradientSums(pair.student, into)
    for chunk in logits.chunks:
        student, both = logits.of(chunk)
        pair.rows.row_gradients(both, pair.terms, numbers[:, chunk], incoming[chunk])
        sums.add(chunk, student)
    sums.finish()
