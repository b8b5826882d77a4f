"""The gradients of a head's operands: products with the gradient of logits, summed over chunks, blocks of columns and ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from onepass.distributed.collectives import Pending, start_all_reduce, start_reduce_scatter
from onepass.gradients.main_grad import add_gradient
from onepass.ops.loss.head.chunks import TokenChunk
from onepass.ops.loss.head.operands import Head, HeadTensors, LogitsBlock, hidden_gradient, low_gradient, multiply, wide_type


class Gradients(NamedTuple):
    """The gradients of hidden (this rank's part), weight (which may be main_grad), bias, and LoRA's a and b.

    They are None where they are not needed. A tensor narrower than fp32 gets whole sums only.
    """

    hidden: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    lora_a: Tensor | None = None
    lora_b: Tensor | None = None


class Needs(NamedTuple):
    """Which gradients are needed."""

    need_hidden: bool
    need_weight: bool
    need_bias: bool
    need_lora_a: bool = False
    need_lora_b: bool = False


def new_gradients(
    tensors: HeadTensors, needs: Needs, hidden: torch.dtype, weight: torch.dtype, target: Tensor | None
) -> Gradients:
    """Memory for gradients: hidden's, [tokens, D], and the weight's of these types; the others are small, and sums in fp32.

    target: where the weight's goes to instead, or None.
    """
    x, head_weight, _, a, b = tensors
    tokens = x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    return Gradients(
        torch.empty_like(tokens, dtype=hidden) if needs.need_hidden else None,
        torch.empty_like(head_weight, dtype=weight) if needs.need_weight and target is None else None,
        x.new_empty(head_weight.shape[0], dtype=wide_type(x)) if needs.need_bias else None,
        torch.empty_like(a, dtype=wide_type(a)) if a is not None and needs.need_lora_a else None,
        torch.empty_like(b, dtype=wide_type(b)) if b is not None and needs.need_lora_b else None,
    )


class HiddenSum:
    """hidden's gradient, summed over blocks and ranks. Ranks communicate under the product for the weight's gradient.

    With LoRA also what goes through a, and a's own gradient.
    """

    def __init__(self, head: Head, into: Gradients, blocks: int) -> None:
        self.head, self.into, self.blocks = head, into.hidden, blocks
        self.sums = self.adapter = None
        self.under_way: list[tuple[Tensor, Pending]] = []
        if head.lora is not None and (into.hidden is not None or into.lora_a is not None):
            self.adapter = AdapterSum(head, into.lora_a, head.tokens, blocks)
        if self.into is not None and blocks > 1 and (head.shard is not None or self.into.dtype != wide_type(self.into)):
            self.sums = self.into.new_empty(head.tokens, self.into.shape[1], dtype=wide_type(self.into))

    def add(self, chunk: TokenChunk, logits: LogitsBlock, block: int, hidden: Tensor | None) -> None:
        """Add one block's part. hidden: the chunk's, for a's gradient; None leaves that to `add_a`."""
        low = None if self.adapter is None else self.adapter.add(logits, chunk.places, block)
        if self.into is not None:
            self._add(chunk, logits, block, low, chunk.own(self.into))
        if self.adapter is not None and low is not None and hidden is not None:
            self.adapter.add_a(low, hidden)

    def _add(self, chunk: TokenChunk, logits: LogitsBlock, block: int, low: Tensor | None, into: Tensor) -> None:
        head, last = self.head, block == self.blocks - 1
        dtype = into.dtype if head.lora is None else wide_type(into)  # with LoRA two products are rounded together
        if self.sums is not None:
            sums = self.sums[chunk.places]
        elif head.ranks > 1 or dtype != into.dtype:
            sums = into.new_empty(logits.out.shape[0], into.shape[1], dtype=dtype)
        else:
            sums = into
        hidden_gradient(head, logits, sums, block > 0)
        if low is not None:
            assert head.lora is not None
            multiply(low, head.lora.a, sums, True)
        if last and head.ranks > 1:
            self.under_way.append((into, start_reduce_scatter(sums.to(into.dtype), head.shard.group)))  # type: ignore[union-attr]
        elif last:
            if sums is not into:
                into.copy_(sums)
            if head.shard is not None:
                self.under_way.append((into, start_all_reduce(into, head.shard.group)))

    def finish(self) -> None:
        for into, pending in self.under_way:
            total = pending.wait()
            if total.data_ptr() != into.data_ptr():
                into.copy_(total)
        if self.adapter is not None:
            self.adapter.finish()


class WeightSum:
    """The gradients of weight, bias and LoRA's b, of one block or all, summed over chunks."""

    def __init__(self, head: Head, into: Gradients, chunks: int, keep: bool, first: int, columns: int) -> None:
        """keep: add to the weight's gradient that is there already."""
        part = (into.weight, into.bias, into.lora_b)
        if columns < head.columns:
            part = tuple(None if t is None else t[first : first + columns] for t in part)  # type: ignore[assignment]
        self.head, (self.weight, self.bias, self.lora_b) = head, part
        self.keep, self.begun = keep, False
        self.sums = self.weight
        if self.weight is not None and chunks > 1 and self.weight.dtype != wide_type(self.weight):
            self.sums, self.keep = torch.empty_like(self.weight, dtype=wide_type(self.weight)), False  # 16 bits are rounded once
        self.add_at_end = keep

    def add(self, d: Tensor, hidden: Tensor) -> None:
        if self.bias is not None:  # before the weight's gradient, which may be main_grad: this one takes memory
            sums = d.sum(0, dtype=self.bias.dtype)
            self.bias.add_(sums) if self.begun else self.bias.copy_(sums)
        if self.lora_b is not None:
            add_gradient(self.lora_b, d, self.head.low(hidden), self.begun)
        if self.sums is not None:
            keep = self.begun or self.keep
            if self.sums.dtype == d.dtype and not keep:
                torch.mm(d.t(), hidden, out=self.sums)
            else:
                add_gradient(self.sums, d, hidden, keep)
        self.begun = True

    def finish(self) -> None:
        if self.sums is not self.weight:
            assert self.sums is not None and self.weight is not None
            add_gradient(self.weight, self.sums, None, self.add_at_end)


def describe_partial(keep: bool) -> AbstractContextManager[None]:
    """With `keep`, say so where memory runs out between two additions to main_grad: it has part of a gradient then."""
    return _partial_described() if keep else nullcontext()


@contextmanager
def _partial_described() -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise torch.OutOfMemoryError(
            f"{error}\nweight.main_grad may have a part of this call's gradient: clear it before the next step. A smaller "
            "chunk_bytes needs less memory"
        ) from error


class AdapterSum:
    """The gradient by `hidden @ a.T` of all tokens, summed over blocks, and a's, summed over chunks and ranks."""

    def __init__(self, head: Head, into: Tensor | None, tokens: int, blocks: int) -> None:
        """into: a's gradient, in fp32, or None where it is not needed."""
        assert head.lora is not None
        self.head, self.into, self.blocks, self.begun, self.scale = head, into, blocks, False, head.lora.scale
        self.sums = head.hidden.new_empty(tokens, head.lora.a.shape[0], dtype=wide_type(head.hidden))

    def add(self, logits: LogitsBlock, places: slice, block: int) -> Tensor | None:
        """Add one block's part. Return the tokens' gradient after the last one."""
        low_gradient(self.head, logits, self.sums[places], block > 0)
        return self.rounded(places) if block == self.blocks - 1 else None

    def rounded(self, places: slice) -> Tensor:
        """The gradient as an operand of the products for hidden's and a's, with the scale."""
        return (self.sums[places] * self.scale).to(self.head.hidden.dtype)  # type: ignore[no-any-return]

    def add_a(self, low: Tensor, hidden: Tensor) -> None:
        if self.into is not None:
            add_gradient(self.into, low, hidden, self.begun)
            self.begun = True

    def finish(self) -> None:
        """Sum a's gradient over ranks, each of which has that of its columns."""
        if self.into is not None and self.head.shard is not None:
            self.into.copy_(start_all_reduce(self.into, self.head.shard.group).wait())
