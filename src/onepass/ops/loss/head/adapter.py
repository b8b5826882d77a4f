"""The gradients that go through LoRA's b: of what a gives, and so of hidden and of a."""

from __future__ import annotations

from torch import Tensor

from onepass.distributed.collectives import start_all_reduce
from onepass.gradients.main_grad import add_gradient
from onepass.ops.loss.head.operands import Head, LogitsBlock, low_gradient, wide_type


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
        return (self.sums[places] * self.scale).to(self.head.hidden.dtype)

    def add_a(self, low: Tensor, hidden: Tensor) -> None:
        if self.into is not None:
            add_gradient(self.into, low, hidden, self.begun)
            self.begun = True

    def finish(self) -> None:
        """Sum a's gradient over ranks, each of which has that of its columns."""
        if self.into is not None and self.head.shard is not None:
            self.into.copy_(start_all_reduce(self.into, self.head.shard.group).wait())
