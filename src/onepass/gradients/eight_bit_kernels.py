"""Device functions of moments in eight bits: `gradients/eight_bits.py`, of tiles whose rows are blocks.

Shifts and comparisons run at half the rate of sums and products, and a sum with a shift or a minimum is one instruction.
"""

from __future__ import annotations

from onepass.gradients import eight_bits as codes_of
from onepass.kernels.language import device_function, tl
from onepass.kernels.sigmoid import reciprocal_approx

_CUT = tl.constexpr(codes_of.CUT)
_BASE, _BASE_SQ = tl.constexpr(codes_of.BASE), tl.constexpr(codes_of.BASE_SQ)
_ZERO, _ZERO_SQ = tl.constexpr(codes_of.number_at(codes_of.BASE)), tl.constexpr(codes_of.number_at(codes_of.BASE_SQ))
_SHARE, _SHARE_SQ = tl.constexpr(1.0 / codes_of.MOST), tl.constexpr(1.0 / codes_of.MOST_SQ)
_NAN_BITS = tl.constexpr(codes_of.BASE + (codes_of.NAN << codes_of.CUT))
_UNIT, _DRAWN = tl.constexpr(1 << codes_of.CUT), tl.constexpr((1 << codes_of.CUT) - 1)
_UPPER = tl.constexpr(32 - codes_of.CUT)
_CODE_BITS, _SIGN_BIT = tl.constexpr(codes_of.NAN << codes_of.CUT), tl.constexpr(-(1 << 31))
_LARGEST, _FLOOR, _BELOW = tl.constexpr(codes_of.LARGEST), tl.constexpr(codes_of.FLOOR), tl.constexpr(codes_of.BELOW)
_STEP, _ROW = tl.constexpr(codes_of.STEP), tl.constexpr(codes_of.ROW)
_FIRST_HASH, _SECOND_HASH = map(tl.constexpr, codes_of.HASHES)
_PLACE, _PLACE_2, _PLACE_4 = (tl.constexpr(pow(codes_of.PLACE, power, 1 << 32)) for power in (1, 2, 4))
_TOGETHER = tl.constexpr(codes_of.DRAWN_TOGETHER)


@device_function
def decode(codes, scale):
    word = codes.to(tl.int32)
    bits = ((word << _CUT) & _CODE_BITS) | _BASE
    values = tl.fma(bits.to(tl.float32, bitcast=True), scale, -_ZERO * scale)
    values = (values.to(tl.int32, bitcast=True) | (word & _SIGN_BIT)).to(tl.float32, bitcast=True)
    return tl.where(bits == _NAN_BITS, float("nan"), values)


@device_function
def encode(values, draw):
    """Return codes drawn from the two beside each number, and the rows' scales."""
    magnitude = tl.abs(values)
    scale = _scale(magnitude, _SHARE)
    bits = tl.fma(magnitude, _inverse(scale)[:, None], _ZERO).to(tl.uint32, bitcast=True)
    code = tl.minimum(bits + draw, _NAN_BITS) >> _CUT
    sign = (values.to(tl.uint32, bitcast=True) >> 24) & 128
    return (code | sign).to(tl.int8), scale


@device_function
def decode_sq(codes, scale):
    bits = (codes.to(tl.int32) << _CUT) + _BASE_SQ
    return tl.fma(bits.to(tl.float32, bitcast=True), scale, -_ZERO_SQ * scale)


@device_function
def encode_sq(values, draw):
    """Return codes drawn from the two beside each number, and the rows' scales."""
    scale = _scale(values, _SHARE_SQ)
    bits = tl.fma(values, _inverse(scale)[:, None], _ZERO_SQ).to(tl.uint32, bitcast=True)
    least = tl.minimum(values.to(tl.uint32, bitcast=True) + _BASE_SQ, _BASE_SQ + _UNIT)  # code 1 from 2^-126 on
    return (tl.maximum(bits + draw, least) >> _CUT).to(tl.uint8), scale


@device_function
def _scale(magnitude, SHARE: tl.constexpr):
    """Return the scales of rows: SHARE of the largest, NaN apart, in 21 bits."""
    most = tl.minimum(tl.max(magnitude, 1), _LARGEST) * SHARE
    return ((most.to(tl.int32, bitcast=True) + 4) & -8).to(tl.float32, bitcast=True)


@device_function
def _inverse(scale):
    """1 / scale, or 0. Of a scale below 2^-126 it is 2^126, so that codes are too small rather than inf."""
    return tl.where(scale > 0, reciprocal_approx(tl.maximum(scale, _FLOOR)) * _BELOW, 0.0)


@device_function
def draws(first, at, row, step):
    """Return two numbers of _CUT bits for each place in the parameter of this row: first, a multiple of _TOGETHER, and at."""
    x = (first // _TOGETHER + at // _TOGETHER).to(tl.uint32) + step.to(tl.uint32) * _STEP + row.to(tl.uint32) * _ROW
    x = (x ^ (x >> 16)) * _FIRST_HASH
    x = (x ^ (x >> 15)) * _SECOND_HASH
    x ^= x >> 16
    # constants, where a thread's numbers have one hash
    x *= tl.where(at & 1 != 0, _PLACE, 1) * tl.where(at & 2 != 0, _PLACE_2, 1) * tl.where(at & 4 != 0, _PLACE_4, 1)
    return x & _DRAWN, x >> _UPPER
