"""The operands of a head's passes, and the products that make logits and take their gradient.

Logits are [tokens, columns] in a buffer whose rows are a multiple of 64 columns apart. A vocabulary of an odd size gets a copy of
its weight with zeros after the last row. Products of odd sizes are several times slower.

With LoRA logits are one product, [hidden, scale * hidden @ a.T] by [weight, b], so that they are rounded once. That weight exists
for a few thousand columns at a time, in memory that they share.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]

from onepass.ops.loss.lora import cast_lora
from onepass.ops.loss.row_functions import APART
from onepass.product.lora import LoRA
from onepass.runtime.dispatch import cast
from onepass.runtime.sizes import ceil_div

_EVEN = 8  # products whose sizes are multiples of this run at full speed
_JOINED = 4224  # columns of a weight and LoRA's b side by side: as 33 tiles of 128, in whole waves on 132 multiprocessors
_CPU_COLUMNS = 4096  # columns widened at a time: a CPU can't sum 16-bit products in fp32


def wide_type(t: Tensor) -> torch.dtype:
    """Type of sums over elements of `t`."""
    return torch.promote_types(t.dtype, torch.float32)


class VocabShard(NamedTuple):
    """This rank's part of a vocabulary that several ranks share."""

    group: dist.ProcessGroup
    sequence: bool  # each rank has its part of the tokens
    place: Tensor  # [2] on the device: this rank's first column, and the size of the whole vocabulary


class HeadTensors(NamedTuple):
    """What logits are made of, as a call has it."""

    hidden: Tensor  # [..., D]
    weight: Tensor
    bias: Tensor | None = None
    lora_a: Tensor | None = None
    lora_b: Tensor | None = None


class HeadOptions(Protocol):
    """What a head reads of an op's options."""

    @property
    def product(self) -> torch.dtype: ...  # type of the products' operands
    @property
    def wide(self) -> bool: ...  # keep logits in fp32
    @property
    def use_triton(self) -> bool: ...
    @property
    def group(self) -> str: ...  # name of a process group of several ranks, or ""
    @property
    def sequence(self) -> bool: ...  # each of them has its part of the tokens
    @property
    def lora_scale(self) -> float: ...
    @property
    def reduction(self) -> str: ...
    @property
    def grad_scale(self) -> float | None: ...  # the promised incoming gradient

    def differentiable(self) -> list[str]: ...  # what is returned beside the loss and can be differentiated


@dataclass
class Head:
    """The operands of all passes, in the products' type."""

    hidden: Tensor  # [tokens, D], of this rank's part of the sequence
    weight: Tensor  # [V, D], V of this rank
    bias: Tensor | None
    wide: bool
    use_triton: bool
    shard: VocabShard | None = None
    lora: LoRA | None = None  # b of this rank's columns
    own: Tensor | None = None  # numbers of hidden's rows that are computed, gathered chunk by chunk; None for all

    def __post_init__(self) -> None:
        self.columns = self.weight.shape[0]
        self.logits = wide_type(self.hidden) if self.wide else self.hidden.dtype
        # an operand of products; None where it takes the logits' place
        self.narrow_gradient = None if self.logits == self.hidden.dtype else self.hidden.dtype
        self.ranks = self.shard.group.size() if self.shard is not None and self.shard.sequence else 1
        self.own_tokens = (self.hidden if self.own is None else self.own).shape[0]  # of this rank's part
        self.tokens = self.own_tokens * self.ranks
        if padded_rows(self.weight, self.use_triton):
            self.weight, self.bias = _padded(self.weight), None if self.bias is None else _padded(self.bias)
            self.lora = None if self.lora is None else self.lora._replace(b=_padded(self.lora.b))
        self._joined: Tensor | None = None

    @property
    def place(self) -> Tensor | None:
        return None if self.shard is None else self.shard.place

    def low(self, hidden: Tensor) -> Tensor:
        """Return `scale * hidden @ a.T`, an operand of two products: it is rounded once."""
        assert self.lora is not None
        product = hidden.new_empty(hidden.shape[0], self.lora.a.shape[0], dtype=wide_type(hidden))
        _product(hidden, self.lora.a, None, product)
        return product.mul_(self.lora.scale).to(hidden.dtype)

    def operand(self, hidden: Tensor) -> Tensor:
        """Return hidden states with `low` beside them, and a 1 for the bias, as `joined` has its columns."""
        low = self.low(hidden)
        width, rank = hidden.shape[1], low.shape[1]
        x = hidden.new_zeros(hidden.shape[0], self._width())
        x[:, :width], x[:, width : width + rank] = hidden, low
        if self.bias is not None:
            x[:, width + rank] = 1
        return x

    def joined(self, first: int, last: int) -> Tensor:
        """Return the weight's rows with b's and the bias's beside them, until the next call."""
        assert self.lora is not None
        width, rank = self.lora.a.shape[1], self.lora.a.shape[0]
        if self._joined is None:
            self._joined = self.weight.new_zeros(min(_JOINED, self.weight.shape[0]), self._width())
        joined = self._joined[: last - first]
        joined[:, :width], joined[:, width : width + rank] = self.weight[first:last], self.lora.b[first:last]
        if self.bias is not None:
            joined[:, width + rank] = self.bias[first:last]
        return joined

    def _width(self) -> int:
        """Columns of both. Those after the last are zeros."""
        assert self.lora is not None
        rank, width = self.lora.a.shape
        return ceil_div(width + rank + (self.bias is not None), _EVEN) * _EVEN


def head_of(
    tensors: HeadTensors, place: Tensor | None, options: HeadOptions, product: torch.dtype, own: Tensor | None = None
) -> Head:
    """Cast the operands to the products' type. place: as `VocabShard` has it. own: as `Head` has it."""
    hidden, weight, bias, lora_a, lora_b = tensors
    group: Any = options.group  # to type checkers a name is of a type of its own
    tokens = hidden.reshape(hidden.shape[:-1].numel(), hidden.shape[-1])
    if own is not None and tokens.dtype != product:  # rather a copy of these than of all
        tokens, own = tokens.index_select(0, own), None
    shard = None if place is None else VocabShard(_resolve_process_group(group), options.sequence, place)
    bias = None if bias is None else cast(bias, product)
    lora = None if lora_a is None or lora_b is None else cast_lora(LoRA(lora_a, lora_b, options.lora_scale), product)
    return Head(cast(tokens, product), cast(weight, product), bias, options.wide, options.use_triton, shard, lora, own)


def pads(x: Tensor) -> bool:
    """Whether products are faster there with rooms of logits, and rows of a weight, of whole multiples of APART."""
    return x.is_cuda


def padded_rows(weight: Tensor, use_triton: bool) -> int:
    """Rows of a padded copy of the weight, whose products are faster; 0 if the weight needs none."""
    V = weight.shape[0]
    return ceil_div(V, APART) * APART if use_triton and V % _EVEN and pads(weight) else 0


def operand_bytes(rows: int, weight: Tensor, low_rank: int, size: int) -> int:
    """Bytes of LoRA's operands of a chunk of so many tokens."""
    V, D = weight.shape
    return (rows + min(V, _JOINED)) * (D + low_rank) * size if low_rank else 0


def _padded(t: Tensor) -> Tensor:
    """Copy `t` with zeros after its last row."""
    V = t.shape[0]
    padded = t.new_empty(ceil_div(V, APART) * APART, *t.shape[1:])
    padded[:V] = t
    padded[V:] = 0
    return padded


# ---- products ----


class LogitsBlock(NamedTuple):
    """Logits of some rows and some columns."""

    x: Tensor
    out: Tensor  # where their gradient is written, which may be x
    room: int  # columns that may be written: those after the last are zeros in the gradient
    first: int  # number of the first column


def block_of_all(head: Head, logits: Tensor) -> LogitsBlock:
    """All logits of all tokens, with the columns after the last."""
    x = logits[:, : head.columns]
    return LogitsBlock(x, x, logits.shape[1], 0)


def new_buffer(head: Head, rows: int, columns: int) -> tuple[Tensor, Tensor | None]:
    """Allocate logits, and their gradient if it has another type."""
    return new_logits(head, rows, columns), None if head.narrow_gradient is None else new_logits(
        head, rows, columns, head.narrow_gradient
    )


def new_logits(head: Head, rows: int, columns: int, dtype: torch.dtype | None = None) -> Tensor:
    """Allocate logits, or their gradient, of another type.

    With a bias, rows have no gap: cuBLAS adds a bias before it rounds only where the result is contiguous. Elsewhere it rounds
    the product and then the sum, up to 1.4 times the error. With LoRA the bias is an operand's column.
    """
    # on a CPU PyTorch's bf16 products read what lies between rows, and NaN there comes into the result
    width = ceil_div(columns, APART) * APART if pads(head.hidden) else columns
    if head.bias is not None and head.lora is None:
        width = min(width, max(columns, head.weight.shape[0]))
    return head.hidden.new_empty(rows, width, dtype=dtype or head.logits)


def make_logits(head: Head, hidden: Tensor, first: int, columns: int, buffer: tuple[Tensor, Tensor | None]) -> LogitsBlock:
    """Multiply some rows by some columns, into the buffer."""
    n = hidden.shape[0]
    last = min(first + columns, head.columns)
    whole = last == head.columns and head.weight.shape[0] > head.columns  # includes the rows of zeros
    room = (head.weight.shape[0] if whole else last) - first
    x = buffer[0][:n, :room]
    if head.lora is not None:
        _products_with_lora(head, hidden, first, x)
    else:
        part = slice(first, first + room)
        if head.bias is not None:  # the last block of columns may be narrower than the others, and has no gap either
            x = buffer[0].view(-1)[: n * room].view(n, room)
        _product(hidden, head.weight[part], None if head.bias is None else head.bias[part], x)
    x = x[:, : last - first]
    return LogitsBlock(x, x if buffer[1] is None else buffer[1][:n, : last - first], room, first)


def _products_with_lora(head: Head, hidden: Tensor, first: int, out: Tensor) -> None:
    """Each part of the columns by one product: two, added up, would be rounded twice."""
    operand, columns = head.operand(hidden), out.shape[1]
    parts = max(1, ceil_div(columns, _JOINED))
    step = min(_JOINED, max(1, ceil_div(ceil_div(columns, parts), 128) * 128))
    for at in range(0, columns, step):
        end = min(at + step, columns)
        _product(operand, head.joined(first + at, first + end), None, out[:, at:end])


def _product(hidden: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    if out.dtype == hidden.dtype:
        torch.mm(hidden, weight.t(), out=out) if bias is None else torch.addmm(bias, hidden, weight.t(), out=out)
    elif hidden.is_cuda:
        torch.mm(hidden, weight.t(), out_dtype=out.dtype, out=out)
        if bias is not None:
            out += bias
    else:
        rows = hidden.to(out.dtype)
        for at in range(0, weight.shape[0], _CPU_COLUMNS):
            part = slice(at, at + _CPU_COLUMNS)
            torch.mm(rows, weight[part].to(out.dtype).t(), out=out[:, part])
        if bias is not None:
            out += bias


def hidden_gradient(head: Head, logits: LogitsBlock, into: Tensor, add: bool = False) -> None:
    """Multiply the gradient of logits by the weight, into or onto `into`; sums are fp32 if `into` is."""
    d = _gradient_and_padding(logits)
    multiply(d, head.weight[logits.first : logits.first + d.shape[1]], into, add)


def low_gradient(head: Head, logits: LogitsBlock, into: Tensor, add: bool) -> None:
    """Multiply the gradient of logits by LoRA's b, as `hidden_gradient` by the weight."""
    assert head.lora is not None
    d = _gradient_and_padding(logits)
    multiply(d, head.lora.b[logits.first : logits.first + d.shape[1]], into, add)


def multiply(d: Tensor, matrix: Tensor, into: Tensor, add: bool) -> None:
    """Multiply, into or onto `into`; sums are fp32 if `into` is."""
    if not d.shape[1] and not add:  # a rank without columns: a CPU's product of none writes nothing in 16 bits
        into.zero_()
    elif into.dtype == d.dtype:
        torch.addmm(into, d, matrix, beta=float(add), out=into) if add else torch.mm(d, matrix, out=into)
    elif d.is_cuda:
        if add:
            torch.addmm(into, d, matrix, out_dtype=into.dtype, out=into)
        else:
            torch.mm(d, matrix, out_dtype=into.dtype, out=into)
    else:
        for at in range(0, d.shape[1], _CPU_COLUMNS):
            part = slice(at, at + _CPU_COLUMNS)
            # in place: autocast would round the result of addmm
            into.addmm_(d[:, part].to(into.dtype), matrix[part].to(into.dtype), beta=float(add or at > 0))


def _gradient_and_padding(logits: LogitsBlock) -> Tensor:
    """The gradient with the columns of zeros after its last."""
    n, columns = logits.out.shape
    return logits.out if logits.room == columns else logits.out.as_strided((n, logits.room), logits.out.stride())
