"""Moments in eight bits: blocks of 256 numbers with a scale each, in fourth and eighth powers.

    exp_avg     = scale * sign(c) * (|c| / 127)^4     c from -127 to 127; -128 is NaN, and what is not finite becomes it
    exp_avg_sq  = scale * (c / 255)^8                 c from 0 to 255; only 0 is 0, as a root of 0 would make a step too large
    scale       = the largest magnitude of the block

A block's moments differ by orders of magnitude, and an update divides by the root of the second. Powers give each number much
the same relative error over that range (docs/notes/0012 compares other codes), and codes are roots of roots: no table is read.

exp_avg is rounded to nearest. A second moment changes by 1 - beta2 a step, less than half a code: rounded to nearest it would
stand still. Its code is drawn from the two beside it, so that its mean is right. The draw is a hash of the place and the step:
the same steps have the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 256
MOST, MOST_SQ = 127, 255  # codes
_NAN = -128
_LARGEST = torch.finfo(torch.float32).max


def blocks_of(x: Tensor) -> Tensor:
    return x.view(-1, BLOCK)


def decode(codes: Tensor, scale: Tensor) -> Tensor:
    """Return exp_avg in fp32, in the codes' shape."""
    root = codes.float().div_(MOST)
    values = root.square().square_() * root.sign()
    values = torch.where(codes == _NAN, torch.nan, blocks_of(values).mul_(scale.view(-1, 1)).view_as(values))
    return values


def encode(values: Tensor, codes: Tensor, scale: Tensor) -> None:
    """Write codes and scale of exp_avg. values are fp32, whole blocks."""
    rows = blocks_of(values)
    finite = rows.isfinite()
    rows = rows.masked_fill(~finite, 0.0)
    most = rows.abs().amax(1, keepdim=True)
    root = _ratio(rows.abs(), most).sqrt_().sqrt_()
    rounded = root.mul_(MOST).round_() * rows.sign()
    blocks_of(codes).copy_(rounded.masked_fill_(~finite, _NAN))
    scale.view(-1, 1).copy_(most)


def decode_sq(codes: Tensor, scale: Tensor) -> Tensor:
    """Return exp_avg_sq in fp32, in the codes' shape."""
    values = _eighth_power(codes.float().div_(MOST_SQ))
    return blocks_of(values).mul_(scale.view(-1, 1)).view_as(values)


def encode_sq(values: Tensor, codes: Tensor, scale: Tensor, draws: Tensor | None = None) -> None:
    """Write codes and scale of exp_avg_sq. draws: a number from 0 to 1 for each, which chooses between two codes. None rounds to
    nearest, so that what was decoded has its codes again."""
    rows = blocks_of(values).nan_to_num(0.0, posinf=_LARGEST)
    most = rows.amax(1, keepdim=True)
    ratio = _ratio(rows, most)
    root = ratio.sqrt().sqrt_().sqrt_().mul_(MOST_SQ)
    if draws is None:
        code = root.round_()
    else:
        code = root.floor_().clamp_(max=MOST_SQ - 1)
        low, high = (_eighth_power((code + more) / MOST_SQ) for more in (0, 1))
        code += (ratio - low) > draws.view_as(ratio) * (high - low)
    blocks_of(codes).copy_(torch.where(ratio > 0, code.clamp_(min=1), 0.0))
    scale.view(-1, 1).copy_(most)


def draws_of(place: Tensor, step: Tensor) -> Tensor:
    """Return a number from 0 to 1, 1 not included, of each place and a step."""
    x = (place + step.long() * 0x9E3779B1) & 0xFFFFFFFF
    for factor in (0x7FEB352D, 0x2C1B3C6D):
        x = ((x ^ (x >> 16)) * factor) & 0xFFFFFFFF
    return (x >> 8).float() * 2.0**-24


def _ratio(rows: Tensor, most: Tensor) -> Tensor:
    return torch.where(most > 0, rows / most, 0.0)


def _eighth_power(x: Tensor) -> Tensor:
    return x.square().square_().square_()
