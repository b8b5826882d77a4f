"""Device functions of passes that write a tile's codes: what is noted beside, and the transpose.

A program that writes transposed codes has its tile as four parts: rows 0, 4, 8, ..., rows 1, 5, 9, ... and so on. Codes of four
neighbouring rows are one 32-bit number then, which is what goes through shared memory to the transposed layout. Single bytes take
four times as many accesses there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from onepass.kernels.fp8 import (
    finite_sizes,
    is_low,
    operand_codes,
    past_largest,
    rounded_codes,
    saturated_count,
    underflow_count,
)
from onepass.kernels.language import PTX, device_function, tl

SLOTS = 64  # of the largest magnitudes and of counts: programs don't queue for one address
QUAD = 4  # rows whose codes are one number
TILE_M, TILE_H = 64, 64  # of passes that write transposed codes


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
