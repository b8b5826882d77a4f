"""Device functions of moments in eight bits: `gradients/eight_bits.py`, of tiles whose rows are blocks.

Roots are powers of two of logarithms. Small whole numbers become fp32 and go back by adding 1.5 * 2^23, in whose last bits they
lie: the unit that converts is the one that has logarithms, and 10 of its instructions a value take as long as the bytes.
"""

from __future__ import annotations

from onepass.kernels.language import PTX, device_function, tl
from onepass.kernels.sigmoid import exp2_approx

_LARGEST = tl.constexpr(3.4028234663852886e38)
_WHOLE = tl.constexpr(12582912.0)  # 1.5 * 2^23
_WHOLE_BITS = tl.constexpr(0x4B400000)


@device_function
def decode(codes, scale):
    root = _from_whole(codes) * (1.0 / 127.0)
    values = root * tl.abs(root) * (root * root) * scale
    return tl.where(codes == -128, float("nan"), values)


@device_function
def encode(values, draw):
    """Return codes drawn from the two beside each number, the rows' scales, and which values are finite."""
    magnitude = tl.abs(values)
    finite = magnitude <= _LARGEST
    magnitude = tl.where(finite, magnitude, 0.0)
    scale = tl.max(magnitude, 1)
    code = _drawn(magnitude * _inverse(scale)[:, None], draw, 4, 127)
    code = tl.where(values < 0, -code, code)
    return tl.where(finite, _to_whole(code), -128).to(tl.int8), scale, finite


@device_function
def decode_sq(codes, scale):
    return _power(_from_whole(codes) * (1.0 / 255.0), 8) * scale


@device_function
def encode_sq(values, finite, draw):
    """Return codes drawn from the two beside each number, and the rows' scales. finite: 0 is stored elsewhere."""
    values = tl.where(finite, tl.minimum(values, _LARGEST), 0.0)
    scale = tl.max(values, 1)
    ratio = values * _inverse(scale)[:, None]
    code = _drawn(ratio, draw, 8, 255)
    return _to_whole(tl.maximum(code, tl.where(ratio > 0, 1.0, 0.0))).to(tl.uint8), scale


@device_function
def _drawn(ratio, draw, POWER: tl.constexpr, MOST: tl.constexpr):
    """Return one of the two codes beside each ratio's root, the upper one where draw is below the part that leads there."""
    code = tl.minimum(_below(_root(ratio, 1.0 / POWER) * MOST), MOST - 1.0)
    low, high = _power(code * (1.0 / MOST), POWER), _power(code * (1.0 / MOST) + 1.0 / MOST, POWER)
    return code + tl.where(ratio - low > draw * (high - low), 1.0, 0.0)


@device_function
def draws(place, row, step):
    """Return two numbers from 0 to 1, 1 not included, of each place in the parameter of this row, and a step."""
    x = place.to(tl.uint32) + step.to(tl.uint32) * 0x9E3779B1 + row.to(tl.uint32) * 0x85EBCA6B
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 16)) * 0x2C1B3C6D
    x ^= x >> 16
    return _of_bits(x >> 9), _of_bits((x * 0x9E3779B1) >> 9)


@device_function
def _of_bits(x):
    """Return the number from 0 to 1 of these 23 bits."""
    return (x | 0x3F800000).to(tl.float32, bitcast=True) - 1.0


@device_function
def _below(x):
    """Return the whole number below x, or x itself or the one below that where x is whole."""
    return (x - 0.5 + _WHOLE) - _WHOLE


@device_function
def _from_whole(codes):
    return (codes.to(tl.int32) + _WHOLE_BITS).to(tl.float32, bitcast=True) - _WHOLE


@device_function
def _to_whole(x):
    """Round to a whole number, as int32."""
    return (x + _WHOLE).to(tl.int32, bitcast=True) - _WHOLE_BITS


@device_function
def _root(x, exponent):
    """x to the power of exponent, and 0 of 0."""
    if PTX:
        logarithm = tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        logarithm = tl.log2(x)
    return exp2_approx(logarithm * exponent)


@device_function
def _power(x, POWER: tl.constexpr):
    """The fourth or the eighth power."""
    square = x * x
    fourth = square * square
    if POWER == 4:
        return fourth
    else:
        return fourth * fourth


@device_function
def _inverse(scale):
    """1 / scale, or 0. Of a scale below 2^-126 it is 2^126, so that codes are too small rather than inf."""
    return tl.where(scale > 0, 1.0 / tl.maximum(scale, 1.1754943508222875e-38), 0.0)
