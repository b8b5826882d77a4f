"""Operands of eight-bit products in kernels: scales, codes, what is noted beside, and the transpose.

Codes are made by integer arithmetic where the GPU's instruction can't be had: the same bits on every GPU (Triton's own casts need
sm_89) and in the interpreter. There is one scale a row, or a tensor; runtime/fp8.py has the formula.

A program that writes transposed codes has its tile as four parts: rows 0, 4, 8, ..., rows 1, 5, 9, ... and so on. Codes of four
neighbouring rows are one 32-bit number then, which is what goes through shared memory to the transposed layout. Single bytes take
four times as many accesses there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from onepass.kernels.language import PTX, device_function, tl
from onepass.runtime.fp8 import SLOTS

QUAD = tl.constexpr(4)  # rows whose codes are one number
TILE_M, TILE_H = 64, 64  # of passes that write transposed codes


# ---- scales and codes ----


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


# ---- what is noted ----


def new_notes(device: torch.device | str) -> tuple[Tensor, Tensor, Tensor]:
    """Return zeros for a target's `amax`, `saturated` and `underflowed`.

    Counts are int64: a long evaluation, in which nothing starts them anew, counts past 2^31.
    """
    saturated, underflowed = torch.zeros(2, SLOTS, dtype=torch.int64, device=device).unbind()
    return torch.zeros(SLOTS, dtype=torch.int32, device=device), saturated, underflowed


@device_function
def largest_of(sizes):
    """Return the largest of a tile of magnitudes, an infinity too, but no NaN unless all are."""
    return tl.max(tl.max(sizes, 1), 0)


@device_function
def is_rare(largest, scale, E5M2: tl.constexpr):
    """Return whether a tile has numbers that saturate or infinities."""
    if PTX:
        return past_largest(largest * scale, E5M2) | (largest != largest)
    else:
        return True  # maxima of the interpreter may be NaN


@device_function
def tile_codes(x, scale, rare, E5M2: tl.constexpr):
    """Return a tile's codes. Where nothing `is_rare` the instruction that rounds is all that is needed."""
    if PTX:
        if rare:  # noqa: SIM108 - Triton's conditional expressions run both sides
            codes = operand_codes(x, scale, E5M2)
        else:
            codes = rounded_codes(x * scale, E5M2)
        return codes
    else:
        return operand_codes(x, scale, E5M2)


@device_function
def note_tiles(
    amax_ptr, saturated_ptr, underflowed_ptr, largest, rare, tiles, COUNT: tl.constexpr, scale, E5M2: tl.constexpr,
    SLOTS: tl.constexpr,
):  # fmt: skip
    """Raise a slot to the largest finite magnitude of COUNT tiles. Count their finite numbers that saturate, and those that round
    to zero in small tiles."""
    slot = (tl.program_id(0) + tl.program_id(1) * 7) % SLOTS
    if rare:
        largest = 0.0
        past = 0
        for i in tl.static_range(COUNT):
            largest = tl.maximum(largest, largest_of(finite_sizes(tiles[i])))
            past += tl.sum(saturated_count(tiles[i], scale, E5M2), 0)
        tl.atomic_add(saturated_ptr + slot, past, sem="relaxed")
    if underflowed_ptr is not None:  # noqa: SIM102 - known when it is compiled
        if is_low(largest, scale, E5M2):
            lost = 0
            for i in tl.static_range(COUNT):
                lost += tl.sum(underflow_count(tiles[i], scale, E5M2), 0)
            tl.atomic_add(underflowed_ptr + slot, lost, sem="relaxed")
    # of numbers that aren't negative, bits are in their order; a fence would wait for the tile's stores
    tl.atomic_max(amax_ptr + slot, largest.to(tl.int32, bitcast=True), sem="relaxed")


@device_function
def note_amax(amax_ptr, saturated_ptr, underflowed_ptr, x, scale, E5M2: tl.constexpr, SLOTS: tl.constexpr):
    """Note a tile whose codes were made otherwise."""
    largest = largest_of(tl.abs(x))
    rare = is_rare(largest, scale, E5M2)
    note_tiles(amax_ptr, saturated_ptr, underflowed_ptr, largest, rare, (x,), 1, scale, E5M2, SLOTS)


# ---- the transpose ----


@device_function
def packed_codes(packed, codes, PART: tl.constexpr):
    """Return four rows' codes as numbers, after those of one part have joined."""
    return packed | (codes.to(tl.uint32) << (8 * PART))


@device_function
def store_transposed(transposed_ptr, packed, quads, columns, M, within, MULTIPLE: tl.constexpr):
    """Store a tile's transpose in a matrix whose rows are as long as M, up to a multiple. Codes after the last row are zeros.

    `transposed_ptr`: of int32. `quads`: which fours of rows the tile has.
    """
    long = (M + (MULTIPLE - 1)) // MULTIPLE * (MULTIPLE // 4)
    at = columns[:, None].to(tl.int64) * long + quads[None, :]
    tl.store(transposed_ptr + at, tl.trans(packed).to(tl.int32, bitcast=True), mask=within[:, None] & (quads < long)[None, :])
