"""Device functions of moments in eight bits: `gradients/eight_bits.py`, of tiles whose rows are blocks."""

from __future__ import annotations

from onepass.kernels.language import device_function, tl

_LARGEST = tl.constexpr(3.4028234663852886e38)


@device_function
def decode(codes, scale):
    root = codes.to(tl.float32) * (1.0 / 127.0)
    square = root * root
    values = square * square * scale
    return tl.where(codes == -128, float("nan"), tl.where(codes < 0, -values, values))


@device_function
def encode(values):
    """Return codes, and the rows' scales."""
    magnitude = tl.abs(values)
    finite = magnitude <= _LARGEST
    magnitude = tl.where(finite, magnitude, 0.0)
    scale = tl.max(magnitude, 1)
    root = tl.sqrt(tl.sqrt(magnitude * _inverse(scale)[:, None]))
    rounded = (root * 127.0 + 0.5).to(tl.int32)
    rounded = tl.where(values < 0, -rounded, rounded)
    return tl.where(finite, rounded, -128).to(tl.int8), scale


@device_function
def decode_sq(codes, scale):
    return _eighth_power(codes.to(tl.int32).to(tl.float32) * (1.0 / 255.0)) * scale


@device_function
def encode_sq(values, place, step):
    """Return codes drawn from the two beside each number, and the rows' scales."""
    values = tl.where(values == values, tl.minimum(values, _LARGEST), 0.0)
    scale = tl.max(values, 1)
    ratio = values * _inverse(scale)[:, None]
    code = tl.minimum((tl.sqrt(tl.sqrt(tl.sqrt(ratio))) * 255.0).to(tl.int32), 254)
    low = _eighth_power(code.to(tl.float32) * (1.0 / 255.0))
    high = _eighth_power((code + 1).to(tl.float32) * (1.0 / 255.0))
    code += tl.where(ratio - low > _draw(place, step) * (high - low), 1, 0)
    return tl.where(ratio > 0, tl.maximum(code, 1), 0).to(tl.uint8), scale


@device_function
def _eighth_power(x):
    square = x * x
    fourth = square * square
    return fourth * fourth


@device_function
def _inverse(scale):
    """1 / scale, or 0. Of a scale below 2^-126 it is 2^126, so that codes are too small rather than inf."""
    return tl.where(scale > 0, 1.0 / tl.maximum(scale, 1.1754943508222875e-38), 0.0)


@device_function
def _draw(place, step):
    """Return a number from 0 to 1, 1 not included, of each place and a step."""
    x = place.to(tl.uint32) + step.to(tl.uint32) * 0x9E3779B1
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 16)) * 0x2C1B3C6D
    return (x >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08
