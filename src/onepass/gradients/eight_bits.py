"""Moments in eight bits: blocks of 256 numbers with a scale each, in fourth and eighth powers.

    exp_avg     = scale * sign(c) * (|c| / 127)^4     c from -127 to 127; -128 is NaN, and what is not finite becomes it
    exp_avg_sq  = scale * (c / 255)^8                 c from 0 to 255; only 0 is 0, as a root of 0 would make a step too large
    scale       = the largest magnitude of the block

A block's moments differ by orders of magnitude, and an update divides by the root of the second. Powers give each number much
the same relative error over that range (docs/notes/0012 compares other codes), and codes are roots of roots: no table is read.

A number's code is drawn from the two beside it, so that its mean is right. Rounded to nearest small ones would stand still: a
second moment changes by 1 - beta2 a step, less than half a code, and a first moment below code 19 by less than half a code of its
own, so that a weight whose gradient has become 0 would go on for ever. The draws are a hash of the place in the parameter, the
parameter and the step: the same steps have the same bits, on every rank that has the parameter.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 256
_MOST, _MOST_SQ = 127, 255  # codes
_NAN = -128
_LARGEST = torch.finfo(torch.float32).max
_BITS = 0xFFFFFFFF


def _blocks_of(x: Tensor) -> Tensor:
    return x.view(-1, BLOCK)


def decode(codes: Tensor, scale: Tensor) -> Tensor:
    """Return exp_avg in fp32, in the codes' shape."""
    root = codes.float().div_(_MOST)
    values = root.square().square_() * root.sign()
    return torch.where(codes == _NAN, torch.nan, _blocks_of(values).mul_(scale.view(-1, 1)).view_as(values))


def encode(values: Tensor, codes: Tensor, scale: Tensor, draws: Tensor | None = None) -> None:
    """Write codes and scale of exp_avg. values are fp32, whole blocks. draws: a number from 0 to 1 for each, which chooses
    between two codes. None rounds to nearest, so that what was decoded has its codes again."""
    rows = _blocks_of(values)
    finite = rows.isfinite()
    rows = rows.masked_fill(~finite, 0.0)
    ratio, most = _ratios(rows.abs())
    code = _drawn(ratio, ratio.sqrt().sqrt_().mul_(_MOST), _MOST, 4, draws)
    _blocks_of(codes).copy_((code * rows.sign()).masked_fill_(~finite, _NAN))
    scale.view(-1, 1).copy_(most)


def decode_sq(codes: Tensor, scale: Tensor) -> Tensor:
    """Return exp_avg_sq in fp32, in the codes' shape."""
    values = codes.float().div_(_MOST_SQ).pow_(8)
    return _blocks_of(values).mul_(scale.view(-1, 1)).view_as(values)


def encode_sq(values: Tensor, codes: Tensor, scale: Tensor, draws: Tensor | None = None) -> None:
    """Write codes and scale of exp_avg_sq, as `encode` does."""
    ratio, most = _ratios(_blocks_of(values).nan_to_num(0.0, posinf=_LARGEST))
    code = _drawn(ratio, ratio.sqrt().sqrt_().sqrt_().mul_(_MOST_SQ), _MOST_SQ, 8, draws)
    _blocks_of(codes).copy_(torch.where(ratio > 0, code.clamp_(min=1), 0.0))
    scale.view(-1, 1).copy_(most)


def _ratios(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return magnitudes over their block's largest, and that."""
    most = rows.amax(1, keepdim=True)
    return torch.where(most > 0, rows / most, 0.0), most


def _drawn(ratio: Tensor, root: Tensor, most: int, power: int, draws: Tensor | None) -> Tensor:
    """Return the codes of ratios, whose roots are in units of codes."""
    if draws is None:
        return root.round_()
    code = root.floor_().clamp_(max=most - 1)
    low, high = ((code + more).div_(most).pow_(power) for more in (0, 1))
    return code + ((ratio - low) > draws.view_as(ratio) * (high - low))


def draws_of(place: Tensor, row: int, step: Tensor) -> tuple[Tensor, Tensor]:
    """Return two numbers from 0 to 1, 1 not included, of each place in the parameter of this row, and a step."""
    x = (place + step.long() * 0x9E3779B1 + row * 0x85EBCA6B) & _BITS
    for factor in (0x7FEB352D, 0x2C1B3C6D):
        x = ((x ^ (x >> 16)) * factor) & _BITS
    x = x ^ (x >> 16)
    first, second = ((each >> 9).float() * 2.0**-23 for each in (x, x * 0x9E3779B1 & _BITS))
    return first, second
