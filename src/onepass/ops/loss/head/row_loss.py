"""What a head's logits are for: a loss of each row, and its gradient, made of a chunk's logits as long as they exist.

A row loss has the tensors of all tokens that it needs beside logits, and keeps what it finds of them. The passes give it chunks
of tokens, and blocks of logits where the vocabulary is divided too. Forward reads each block once (`read`), tells the ranks that
share the vocabulary (`exchange`) and finishes a chunk (`finish`), with the gradient where that is wanted already. Backward wants
the gradient alone (`gradient`), of logits that waited or were made again.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from onepass.ops.loss.head.chunks import Chunks, TokenChunk
from onepass.ops.loss.head.operands import Head, HeadTensors, LogitsBlock
from onepass.ops.loss.head.sums import Needs

MADE_IN_FORWARD = ("grad_in_forward", "known_grad_scale")  # modes of a plan; the others are keep_logits, recompute, loss_only


class Plan(Protocol):
    """How a call is divided."""

    @property
    def mode(self) -> str: ...
    @property
    def rows(self) -> int: ...  # tokens at a time
    @property
    def columns(self) -> int: ...  # of the vocabulary at a time


class RowLoss(Protocol):
    """One call's rows. Its class is the row loss."""

    overlaps: bool  # ranks' statistics travel under the next chunk's product, and two chunks' logits are in memory meanwhile
    found: Any  # what forward found of the rows, a record of tensors that begins with the losses

    def __init__(self, head: Head, rows: Any, options: Any, mode: str, kept: Any = None, incoming: Any = None) -> None:
        """Take what is known of all tokens.

        Args:
            head: the head, in the products' types.
            rows: the row loss's own record of tensors, with `labels` [N] and `place`, as `VocabShard` has it.
            options: `HeadOptions`, and its own.
            mode: the plan's. In `MADE_IN_FORWARD` forward makes the gradient too.
            kept: in backward, the record of what forward found and backward needs.
            incoming: in backward, the record of rows' incoming gradients.
        """

    @staticmethod
    def plan(
        tensors: HeadTensors, rows: Any, options: Any, needs: Needs, main_grad: Tensor | None, mode: str | None, kept: Any = None
    ) -> Plan:
        """Divide a call. mode: the only one that will do, or None."""

    @staticmethod
    def forward_pieces(head: Head, options: Any, plan: Plan | None = None) -> tuple[int, int]:
        """Return tokens and columns at a time of a forward that makes no gradients. plan: None for one whose logits wait."""

    @staticmethod
    def empty(tensors: HeadTensors, rows: Any, options: Any) -> Any:
        """Return `found` without values."""

    def read(self, chunk: TokenChunk, logits: LogitsBlock) -> Tensor | None:
        """Return a block's statistics. Of whole rows losses and gradient may be written at once."""

    def exchange(self, parts: list[Any]) -> Any:
        """Start gathering the ranks' statistics of a chunk, from those of its blocks."""

    def finish(self, chunk: TokenChunk, logits: LogitsBlock, sent: Any) -> None:
        """Keep a chunk's losses. Write the gradient of its logits too, if that is made in forward and `read` did not."""

    def gradient(self, chunk: TokenChunk | Chunks, logits: LogitsBlock) -> None:
        """Write the gradient of logits, by what forward found and by the incoming gradients."""
