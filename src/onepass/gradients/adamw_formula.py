"""A step of AdamW in PyTorch's operators, and fp32 masters that are a bf16 weight and 16 bits more.

    weight = the bits of master + 2^15, without the lower 16       low = the lower 16, as a signed number
    master = the bits of weight, 16 up, + low

The weight is the bf16 nearest to the master; ties go away from zero. So 2^16 masters round to each weight, and low tells them
apart. With ties to even, every other weight would have 2^16 + 1 masters, and one would be lost. All NaN are stored as one number:
the NaN that kernels make would round to -0. A carry past the largest bf16 makes the weight inf, as rounding does, and keeps the
master.

A weight may be written by others. Its master is then what was written and the low bits of before: at most half a unit in the
weight's last place away. With zeros and infinities old low bits may make a NaN, and there the master is the weight itself. An
fp16 weight that is not its master rounded is the new master.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onepass.gradients.eight_bits import BLOCK, decode, decode_sq, draws_of, encode, encode_sq
from onepass.gradients.written_weights import follow_weight
from onepass.runtime.sizes import ceil_div

_A_THREADS = 1 << 16  # values of a block for each thread: intermediates stay in the cache


class AdamWSlice(NamedTuple):
    """A stretch of a parameter, its gradient and its state. Each tensor is one-dimensional and contiguous. Gradients are of fp32
    or bf16, moments too, or they are codes of 8 bits with a scale for each `eight_bits.BLOCK`."""

    weight: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    rest: Tensor | None  # int16: the low bits of a bf16 weight's master. fp32: an fp16 weight's master. None: it has no master
    row: int  # the parameter's place in its stepper's count of steps
    scale: Tensor | None = None  # of moments in 8 bits
    scale_sq: Tensor | None = None
    first: int = 0  # its first number's place in this rank's part of the parameter

    def part(self, start: int, stop: int) -> AdamWSlice:
        weight, grad, exp_avg, exp_avg_sq = (each[start:stop] for each in self[:4])
        rest = None if self.rest is None else self.rest[start:stop]
        blocks = slice(start // BLOCK, ceil_div(stop, BLOCK))
        scale, scale_sq = (None if each is None else each[blocks] for each in (self.scale, self.scale_sq))
        return AdamWSlice(weight, grad, exp_avg, exp_avg_sq, rest, self.row, scale, scale_sq, self.first + start)

    def read(self, kind: str) -> Tensor:
        """Return the master, exp_avg or exp_avg_sq in fp32: a copy, or its memory where that is fp32."""
        if kind == "master":
            return master_of(self)
        if self.scale is None or self.scale_sq is None:
            stored: Tensor = getattr(self, kind)
            return stored.float()
        return decode(self.exp_avg, self.scale) if kind == "exp_avg" else decode_sq(self.exp_avg_sq, self.scale_sq)

    def write(self, kind: str, values: Tensor, draws: Tensor | None = None) -> None:
        """Store fp32 numbers of a kind. Codes are drawn, or rounded to nearest without draws. Weights follow their masters."""
        if kind == "master":
            store_master(self, values)
        elif self.scale is None or self.scale_sq is None:
            _put(getattr(self, kind), values)
        elif kind == "exp_avg":
            encode(values, self.exp_avg, self.scale, draws)
        else:
            encode_sq(values, self.exp_avg_sq, self.scale_sq, draws)

    def moments(self) -> tuple[Tensor, Tensor]:
        """Return both in fp32."""
        return self.read("exp_avg"), self.read("exp_avg_sq")

    def put_moments(self, exp_avg: Tensor, exp_avg_sq: Tensor, step: Tensor) -> None:
        """Store fp32 numbers after a step of AdamW, by which codes are drawn."""
        draws: tuple[Tensor | None, Tensor | None] = (None, None)
        if self.scale is not None:
            places = torch.arange(self.first, self.first + exp_avg.numel(), device=exp_avg.device)
            draws = draws_of(places, self.row, step)
        self.write("exp_avg", exp_avg, draws[0])
        self.write("exp_avg_sq", exp_avg_sq, draws[1])

    @property
    def split(self) -> bool:
        """Whether the masters are stored in two parts: the weight, and bits beside it."""
        return self.rest is not None and self.rest.dtype is torch.int16


def joined_master(weight: Tensor, low: Tensor, into: Tensor | None = None) -> Tensor:
    """Return the fp32 masters of bf16 weights. `into`: int32 memory for them."""
    bits = weight.new_empty(weight.shape, dtype=torch.int32) if into is None else into
    bits.copy_(weight.view(torch.int16)).bitwise_left_shift_(16).add_(low)
    master = bits.view(torch.float32)
    if not master.is_cpu or master.sum().isnan():  # looking for NaN takes longer than all else
        torch.where(master.isnan(), weight, master, out=master)
    return master


def store_master(stretch: AdamWSlice, master: Tensor) -> None:
    """Write weights by their fp32 masters, and what is kept beside them."""
    if stretch.split:
        _split_(stretch.weight, stretch.rest, master.clone())  # type: ignore[arg-type]
        return
    for out in (stretch.weight, stretch.rest):
        if out is not None and out is not master:
            out.copy_(master)


def _split_(weight: Tensor, low: Tensor, master: Tensor) -> None:
    """Invert `joined_master`. Overwrites master."""
    if not master.is_cpu or not master.sum().isfinite():  # masking NaN takes longer than all else
        master.masked_fill_(master.isnan(), torch.nan)
    bits = master.view(torch.int32)
    low.copy_(bits)  # drops the upper bits
    weight.view(torch.int16).copy_(bits.add_(0x8000).bitwise_right_shift_(16))


def master_of(stretch: AdamWSlice) -> Tensor:
    """Return the fp32 masters of the weights as they are now: their storage where they are stored whole, else a copy."""
    if stretch.split:
        return joined_master(stretch.weight, stretch.rest)  # type: ignore[arg-type]
    if stretch.rest is not None:
        follow_weight(stretch.weight, stretch.rest)
    return stretch.weight if stretch.rest is None else stretch.rest


def _blocks(stretch: AdamWSlice) -> Iterator[AdamWSlice]:
    size = _A_THREADS * torch.get_num_threads()
    for start in range(0, stretch.weight.numel(), size):
        yield stretch.part(start, start + size)


def step_formula(stretches: Iterable[AdamWSlice], steps: Sequence[Tensor], factor: Tensor | None, **options: Any) -> None:
    """Step all slices of one group by torch's fused AdamW, with gradients times factor. `steps`, by rows, include this one."""
    whole: list[AdamWSlice] = []
    blocks: list[AdamWSlice] = []
    for stretch in stretches:
        if stretch.rest is None and factor is None and len({each.dtype for each in stretch[:4]}) == 1:
            whole.append(stretch)
        else:
            blocks += _blocks(stretch)
    if whole:
        _fused(whole, steps, options)
    if not blocks:
        return
    # one allocation for all blocks: new pages cost more than the arithmetic
    most = max(block.weight.numel() for block in blocks)
    grads, bits = (blocks[0].grad.new_empty(most, dtype=dtype) for dtype in (torch.float32, torch.int32))
    for block in blocks:
        size = block.weight.numel()
        grad = block.grad.float() if factor is None else grads[:size].copy_(block.grad).mul_(factor)
        master = joined_master(block.weight, block.rest, bits[:size]) if block.split else master_of(block).float()  # type: ignore[arg-type]
        exp_avg, exp_avg_sq = block.moments()
        _fused([AdamWSlice(master, grad, exp_avg, exp_avg_sq, None, block.row)], steps, options)
        block.put_moments(exp_avg, exp_avg_sq, steps[block.row])
        if block.split:
            _split_(block.weight, block.rest, master)  # type: ignore[arg-type]
        else:
            _put(block.weight, master)


def _put(kept: Tensor, made: Tensor) -> None:
    if kept is not made:
        kept.copy_(made)


def _fused(stretches: list[AdamWSlice], steps: Sequence[Tensor], options: dict[str, Any]) -> None:
    weights, grads, exp_avgs, exp_avg_sqs, _, rows, *_ = map(list, zip(*stretches, strict=True))
    counts = [steps[row] for row in rows]
    torch._fused_adamw_(weights, grads, exp_avgs, exp_avg_sqs, [], counts, amsgrad=False, maximize=False, **options)
