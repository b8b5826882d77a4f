"""e4m3 numbers by integer arithmetic: the same bits on every GPU (Triton's own casts need sm_89) and in the interpreter.

runtime/saved.py has the scheme, and the PyTorch formula that these functions equal bit for bit.
"""

from __future__ import annotations

from onepass.kernels.language import PTX, device_function, tl


@device_function
def fp8_exponents(values, RUN: tl.constexpr):
    """Return the biased exponent (int32, 1 to 247) of each run of RUN columns of a block [R, C]: [R, C // RUN]."""
    size: tl.constexpr = values.shape[1] // RUN
    finite = tl.where(tl.abs(values) < float("inf"), tl.abs(values), 0.0)
    largest = tl.max(tl.reshape(finite, (values.shape[0], size, RUN)), 2)
    exponents = ((largest.to(tl.int32, bitcast=True) + 0x1FFFFF) >> 23) - 8
    return tl.where(exponents < 1, 1, exponents)


@device_function
def fp8_encode(values, exponents, RUN: tl.constexpr):
    """Return the codes (uint8) of a block [R, C] with its runs' biased exponents."""
    size: tl.constexpr = values.shape[1] // RUN
    down = ((254 - exponents) << 23).to(tl.float32, bitcast=True)
    runs = tl.reshape(values, (values.shape[0], size, RUN))
    scaled = tl.reshape(runs * down[:, :, None], values.shape)
    bits = scaled.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    size_bits = bits & 0x7FFFFFFF
    # round to nearest even at the third bit of the mantissa; below 2**-6 the steps are 2**-9, as those of 2**14 + t are
    normal = ((size_bits + 0x7FFFF + ((size_bits >> 20) & 1)) >> 20) - (120 << 3)
    small = (tl.abs(scaled) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(size_bits < 0x3C800000, small, normal)
    return tl.where(size_bits < 0x7F800000, code | sign, 0x7F).to(tl.uint8)  # infinities and NaN of either sign are one NaN


@device_function
def fp8_decode(codes, exponents):
    """Return the values (fp32) of codes with their biased exponents, one exponent a code."""
    codes, exponents = codes.to(tl.int32), exponents.to(tl.int32)
    level = (codes >> 3) & 15
    mantissa = codes & 7
    normal = ((level + 120) << 23 | mantissa << 20).to(tl.float32, bitcast=True)
    size = tl.where(level == 0, mantissa.to(tl.float32) * 0.001953125, normal)
    size *= (exponents << 23).to(tl.float32, bitcast=True)
    size = tl.minimum(size, 3.4028234663852886e38)  # the type's largest numbers round up past it
    size = tl.where((codes & 0x7F) == 0x7F, float("nan"), size)
    return tl.where(codes >= 128, -size, size)


# ---- operands of products: one scale a row, or a tensor; runtime/fp8.py has the formula ----


@device_function
def scale_exponents(amax, E5M2: tl.constexpr):
    """Return the biased exponents (int32) of the powers of two that bring these to the type's largest number; of 1 where 0."""
    return tl.where(amax == 0.0, 127, exponents_below(amax, 269 if E5M2 else 262))


@device_function
def exponents_below(amax, top):
    """Return the same of an amax that is not 0; `top` is 262 for e4m3, 269 for e5m2, less a margin."""
    biased = top - ((amax.to(tl.int32, bitcast=True) + 0x1FFFFF) >> 23)
    return tl.where(biased < 1, 1, tl.where(biased > 253, 253, biased))


@device_function
def power_of_two(biased):
    """Return the fp32 number with this biased exponent."""
    return (biased << 23).to(tl.float32, bitcast=True)


@device_function
def finite_sizes(x):
    """Return magnitudes for a maximum, which passes over what isn't finite: it is NaN on a GPU, else 0."""
    if PTX:
        return tl.abs(x) + x * 0.0  # one instruction, where a comparison and a selection are two
    else:
        return tl.where(tl.abs(x) < float("inf"), tl.abs(x), 0.0)


@device_function
def saturated_count(x, scale, E5M2: tl.constexpr):
    """Return how many finite numbers of a block are past the type's largest number once scaled, along the last axis."""
    finite = tl.abs(x) < float("inf")
    return tl.sum((finite & past_largest(tl.abs(x) * scale, E5M2)).to(tl.int32), len(x.shape) - 1)


@device_function
def underflow_count(x, scale, E5M2: tl.constexpr):
    """Return how many numbers of a block round to zero once scaled and are none, along the last axis."""
    zero_to = (2.0**-17 if E5M2 else 2.0**-10) / scale  # of the program: scaled numbers would be held until they are codes
    return tl.sum(((tl.abs(x) <= zero_to) & (x != 0.0)).to(tl.int32), len(x.shape) - 1)


@device_function
def is_low(largest, scale, E5M2: tl.constexpr):
    """Return whether what rounds to zero can matter to a tile or row of this largest magnitude, as runtime/fp8.py has it."""
    return (largest > 0.0) & (largest * scale < (2.0**-5 if E5M2 else 4.0))


@device_function
def past_largest(sizes, E5M2: tl.constexpr):
    """Return which scaled magnitudes are past the type's largest number."""
    return sizes > (57344.0 if E5M2 else 448.0)


@device_function
def rounded_codes(scaled, E5M2: tl.constexpr):
    """Return the codes that the GPU's instruction makes: finite values and infinities saturate.

    Four codes are one register. ptxas 12.8 reads pairs too early where they are stored and taken apart as well, which is what a
    cast of Triton's comes to.
    """
    return tl.inline_asm_elementwise(
        """{
        .reg .b16 low, high;
        cvt.rn.satfinite.e5m2x2.f32 low, $2, $1;
        cvt.rn.satfinite.e5m2x2.f32 high, $4, $3;
        mov.b32 $0, {low, high};
        }"""
        if E5M2
        else """{
        .reg .b16 low, high;
        cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
        cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
        mov.b32 $0, {low, high};
        }""",
        "=r,f,f,f,f", [scaled], tl.uint8, True, 4,
    )  # fmt: skip


@device_function
def operand_codes(x, scale, E5M2: tl.constexpr):
    """Return the codes (uint8) of fp32 x times a scale. Finite values saturate; e4m3 has one NaN for NaN and infinities."""
    scaled = x * scale
    infinite: tl.constexpr = 0x7C if E5M2 else 0x7F
    if PTX:  # the instruction makes the largest number of an infinity
        if E5M2:
            codes = rounded_codes(scaled, True)
            sign = tl.where(x < 0.0, 0x80, 0).to(tl.uint8)
            return tl.where(tl.abs(x) == float("inf"), sign | infinite, codes)
        else:
            return rounded_codes(scaled + x * 0.0, False)  # NaN of an infinity
    else:
        bits = scaled.to(tl.int32, bitcast=True)
        sign = (bits >> 24) & 0x80
        size = bits & 0x7FFFFFFF
        kept: tl.constexpr = 2 if E5M2 else 3  # bits of the mantissa
        bias: tl.constexpr = 15 if E5M2 else 7
        most: tl.constexpr = 0x47600000 if E5M2 else 0x43E00000  # 57344, 448
        normal_from: tl.constexpr = 0x38800000 if E5M2 else 0x3C800000  # 2**-14, 2**-6
        shifter: tl.constexpr = 128.0 if E5M2 else 16384.0  # its neighbours are as far apart as the type's subnormal numbers
        shifter_bits: tl.constexpr = 0x43000000 if E5M2 else 0x46800000
        held = tl.where(size > most, most, size)
        shift: tl.constexpr = 23 - kept
        normal = ((held + ((1 << (shift - 1)) - 1) + ((held >> shift) & 1)) >> shift) - ((127 - bias) << kept)
        small = (tl.abs(scaled) + shifter).to(tl.int32, bitcast=True) - shifter_bits
        code = tl.where(held < normal_from, small, normal)
        code = tl.where(tl.abs(x) == float("inf"), infinite, code)
        return (tl.where(x == x, code, 0x7F) | sign).to(tl.uint8)
