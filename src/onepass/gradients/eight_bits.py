"""Moments in eight bits: blocks of 256 numbers with a scale each, in codes that are the upper bits of an fp32 number.

    exp_avg     = sign * scale * (F(c) - F(0))     c has 7 bits, 4 of an exponent and 3 behind it; the largest is NaN
    exp_avg_sq  = scale * (F(c) - F(0))            c has 8 bits, 5 of an exponent and 3 behind it
    F(c)        = 2^first * 2^(c // 8) * (1 + (c % 8) / 8)
    scale       = the block's largest magnitude over that of the largest code

A block's moments differ by orders of magnitude, and an update divides by the root of the second. Steps from code to code are
6 to 12 % of a number, and towards 0 get equal (2e-6 of the block's largest, and 3e-11 of second moments), as F(0) is subtracted.
Encoding is one product and sum, and a cut of bits; decoding is no more (docs/notes/0012 compares other codes). A second moment is
0 only where it was: a step would be too large.

A number's code is drawn from the two beside it: random bits are added below the cut, so that its mean is right. Rounded to
nearest, second moments would stand still, as they change by 1 - beta2 a step, less than half a code. The draws are a hash of the
place in the parameter, the parameter and the step: the same steps have the same bits, on every rank that has the parameter.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 256
CUT = 20  # bits of fp32 that no code has
DRAWN_TOGETHER = 8  # numbers of one hash
BASE, BASE_SQ = 0x40000000, 0x30000000  # the bits of F(0)
NAN = 127
HASHES = 0x7FEB352D, 0x846CA68B
STEP, ROW, PLACE = 0x9E3779B1, 0x85EBCA6B, 0x2C9277B5
FLOOR = 2.0**-126  # the smallest second moment that never becomes 0
LARGEST = torch.finfo(torch.float32).max
BELOW = 1.0 - 2.0**-20  # of the block's largest, so that its code is never drawn past the last
_BITS = 0xFFFFFFFF


def number(code: int, base: int) -> float:
    """Return F(code) - F(0)."""
    exponent = (base >> 23) - 127
    return 2.0**exponent * (2.0 ** (code // 8) * (1 + code % 8 / 8) - 1)


MOST, MOST_SQ = number(NAN - 1, BASE), number(255, BASE_SQ)


def decode(codes: Tensor, scale: Tensor) -> Tensor:
    """Return exp_avg in fp32, in the codes' shape."""
    magnitude = codes.int() & 0x7F
    values = _scaled(magnitude, scale, BASE)
    return torch.where(codes < 0, -values, values).masked_fill_(magnitude == NAN, torch.nan)


def encode(values: Tensor, codes: Tensor, scale: Tensor, draws: Tensor | None = None) -> None:
    """Write codes and scale of exp_avg. values are fp32, whole blocks. draws: CUT bits for each, which choose between two codes.
    None rounds to nearest, so that what was decoded has its codes again."""
    code = _codes(values.abs(), scale, NAN - 1, BASE, draws) - (BASE >> CUT)
    code = code.masked_fill_(~values.isfinite(), NAN)
    codes.copy_(code - 128 * values.signbit())


def decode_sq(codes: Tensor, scale: Tensor) -> Tensor:
    """Return exp_avg_sq in fp32, in the codes' shape."""
    return _scaled(codes.int(), scale, BASE_SQ)


def encode_sq(values: Tensor, codes: Tensor, scale: Tensor, draws: Tensor | None = None) -> None:
    """Write codes and scale of exp_avg_sq, as `encode` does. Of NaN a code is any."""
    code = _codes(values, scale, 255, BASE_SQ, draws) & 0xFF
    codes.copy_(torch.where(values >= FLOOR, code.clamp(min=1), code))


def _scaled(code: Tensor, scale: Tensor, base: int) -> Tensor:
    values = ((code << CUT) + base).view(torch.float32) - number_at(base)
    return values.view(-1, BLOCK).mul_(scale.view(-1, 1)).view_as(values)


def number_at(base: int) -> float:
    """Return F(0)."""
    return 2.0 ** ((base >> 23) - 127)


def _codes(values: Tensor, scale: Tensor, last: int, base: int, draws: Tensor | None) -> Tensor:
    """Write the scales, and return codes with the bits of F(0) above them. last: the largest number's code."""
    code = _codes_below(values, scale, last, base, draws)
    if draws is not None:
        return code
    # what was decoded has its codes again, also where a draw gave the largest number the last code but one
    wrong = ~_are_exact(values, code, scale, base)
    if wrong.any():
        lower = torch.empty_like(scale)
        other = _codes_below(values, lower, last - 1, base, draws)
        better = wrong & _are_exact(values, other, lower, base)
        scale.view(-1).copy_(torch.where(better, lower.view(-1), scale.view(-1)))
        code = torch.where(better.view(-1, 1), other.view(-1, BLOCK), code.view(-1, BLOCK)).view_as(code)
    return code


def _are_exact(values: Tensor, code: Tensor, scale: Tensor, base: int) -> Tensor:
    """Whether all finite values of a block are what their codes are decoded to."""
    back = _scaled(code - (base >> CUT), scale, base)
    return ((back == values) | ~values.isfinite()).view(-1, BLOCK).all(1)


def _codes_below(values: Tensor, scale: Tensor, last: int, base: int, draws: Tensor | None) -> Tensor:
    rows = values.view(-1, BLOCK)
    largest = rows.nan_to_num(0.0).amax(1).mul_(1.0 / number(last, base))
    scale.view(-1).copy_(((largest.view(torch.int32) + 4) & -8).view(torch.float32))  # 21 bits: decoded numbers have it again
    inverse = torch.where(scale > 0, BELOW / scale.clamp(min=FLOOR), 0.0)
    bits = (rows * inverse.view(-1, 1) + number_at(base)).view(torch.int32).view_as(values)
    return (bits + (1 << CUT - 1 if draws is None else draws)) >> CUT


def draws_of(place: Tensor, row: int, step: Tensor) -> tuple[Tensor, Tensor]:
    """Return two numbers of CUT bits for each place in the parameter of this row, and a step. Neighbours share a hash, of which
    each has another multiple."""
    x = (place // DRAWN_TOGETHER + step.long() * STEP + row * ROW) & _BITS
    for shift, factor in zip((16, 15), HASHES, strict=True):
        x = ((x ^ (x >> shift)) * factor) & _BITS
    x = x ^ (x >> 16)
    powers = torch.tensor([pow(PLACE, k, 1 << 32) for k in range(DRAWN_TOGETHER)], device=place.device)
    x = (x * powers[place % DRAWN_TOGETHER]) & _BITS
    return (x & ((1 << CUT) - 1)).int(), (x >> (32 - CUT)).int()
