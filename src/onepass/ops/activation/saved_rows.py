"""How kernels load an activation's input and store it for backward, as it is or as e4m3 codes with an exponent a run of columns.

A row has PARTS parts of H columns each: one, or the two halves of a gated activation's input.
Codes are made by integer arithmetic: the same bits on every GPU (Triton's own casts need sm_89) and in the interpreter.
runtime/saved.py has the scheme, and the PyTorch formula that these functions equal bit for bit.
"""

from __future__ import annotations

from onepass.kernels.language import device_function, tl


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


@device_function
def load_rows(
    x_ptr, exponents_ptr, rows, columns, H, X_ROW, inside,
    PART: tl.constexpr, PARTS: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """Load a block of one part in fp32; from fp8 codes where there are exponents."""
    x = tl.load(x_ptr + rows[:, None] * X_ROW + (columns + PART * H)[None, :], mask=inside, other=0)
    if exponents_ptr is not None:
        runs = tl.cdiv(H, RUN)
        at = rows[:, None] * (runs * PARTS) + (columns // RUN + PART * runs)[None, :]
        return fp8_decode(x, tl.load(exponents_ptr + at, mask=inside, other=1))
    else:
        return x.to(tl.float32)


@device_function
def load_pairs(x_ptr, rows, first, H, X_ROW, real, BLOCK_H: tl.constexpr):
    """Load a block of gates and of what they multiply in fp32, which alternate along a row."""
    columns = 2 * first + tl.arange(0, 2 * BLOCK_H)
    x = tl.load(x_ptr + rows[:, None] * X_ROW + columns[None, :], mask=real[:, None] & (columns < 2 * H)[None, :], other=0.0)
    return tl.split(tl.reshape(x.to(tl.float32), (x.shape[0], BLOCK_H, 2)))


@device_function
def store_pairs(x_ptr, gate, linear, rows, first, H, real, BLOCK_H: tl.constexpr):
    columns = 2 * first + tl.arange(0, 2 * BLOCK_H)
    x = tl.reshape(tl.join(gate, linear), (gate.shape[0], 2 * BLOCK_H))
    tl.store(x_ptr + rows[:, None] * (2 * H) + columns[None, :], x, mask=real[:, None] & (columns < 2 * H)[None, :])


@device_function
def store_fp8_rows(
    codes_ptr, exponents_ptr, x, rows, tile, M, H, PART: tl.constexpr, PARTS: tl.constexpr, RUN: tl.constexpr
):  # fmt: skip
    """Store a tile of one part's columns as fp8 codes, with the exponents of its runs."""
    BLOCK_H: tl.constexpr = x.shape[1]
    exponents = fp8_exponents(x, RUN)
    codes = fp8_encode(x, exponents, RUN)
    real = (rows < M)[:, None]
    columns = tile * BLOCK_H + tl.arange(0, BLOCK_H)
    at = rows[:, None] * (H * PARTS) + (columns + PART * H)[None, :]
    tl.store(codes_ptr + at, codes, mask=real & (columns < H)[None, :])
    runs = tl.cdiv(H, RUN)
    run = tile * (BLOCK_H // RUN) + tl.arange(0, BLOCK_H // RUN)
    at = rows[:, None] * (runs * PARTS) + (run + PART * runs)[None, :]
    tl.store(exponents_ptr + at, exponents.to(tl.uint8), mask=real & (run < runs)[None, :])
