"""Which elements dropout drops: by a seed, the number of an element's row and its column alone.

So the same are dropped whatever the tile, the strides, the GPU or the rank that has the row; by kernels, and by PyTorch.

Eight neighbours of a row, from a column divisible by eight on, share one block of Philox 4x32, a bijection of 128-bit counters
that a 64-bit key picks: the key is the seed, the counter (column / 8, row's low half, row's high half, 0). Of its four words of
32 bits each neighbour has a half, the low one first; it is dropped where that is below a threshold of 0 to 65536.
Seven rounds instead of the usual ten: the fewest with which Philox's authors saw no failure in BigCrush. In a block of rows and
columns the first two are a row's or a column's work only.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from onepass.runtime.checks import check_number
from onepass.runtime.lang import device_function, tl

GROUP = 8  # neighbours that share a block
STEPS = 65536  # of a probability
Seed = Tensor | int  # [1] int64 on the device, or below 2**63

_ROUNDS = 7
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85  # what the key's halves grow by from round to round
_LOW = 0xFFFFFFFF

# ---- probabilities ----


def threshold_of(name: str, p: float) -> int:
    """The threshold that comes next to p; none but p = 1 drops everything, as nothing could be scaled by what is kept."""
    check_number(name, p)
    if not 0 <= p <= 1:
        raise ValueError(f"{name} must be a probability, from 0 to 1, but is {p!r}")
    return STEPS if p == 1 else min(round(p * STEPS), STEPS - 1)


def scale_of(threshold: int) -> float:
    """What is kept grows by this: one over how probably that is, exactly."""
    return 0.0 if threshold == STEPS else STEPS / (STEPS - threshold)


def probability(threshold: int) -> tuple[int | None, float | None]:
    """The threshold and the scale as kernels take them: without any where nothing is dropped."""
    return (threshold, scale_of(threshold)) if threshold else (None, None)


def dropout_options(seed: Seed | None, threshold: int) -> dict[str, Any]:
    """What a call that may drop something is given: nothing more than others where it doesn't."""
    return {} if seed is None else {"seed": seed, "threshold": threshold}


def seed_and_sizes(seed: Seed | None, *sizes: int) -> tuple[Any, ...]:
    """A kernel's last tensor, the sizes and a number: the seed is one of the two."""
    return (None, *sizes, seed) if isinstance(seed, int) else (seed, *sizes, None)


# ---- device functions ----

_ROUNDS_TL = tl.constexpr(_ROUNDS)
_MULTIPLIER_0, _MULTIPLIER_1 = tl.constexpr(_MULTIPLIERS[0]), tl.constexpr(_MULTIPLIERS[1])
_WEYL_0, _WEYL_1 = tl.constexpr(_WEYL[0]), tl.constexpr(_WEYL[1])
_GROUP_TL = tl.constexpr(GROUP)


@device_function
def load_seed(seed_ptr, SEED):
    """The seed as int64: a number, or where a graph may want another one at each replay, in memory."""
    if seed_ptr is not None:
        return tl.load(seed_ptr)
    else:
        return SEED.to(tl.int64)


@device_function
def _philox(c0, c1, c2, c3, k0, k1):
    """Words of one shape each, which may be of rows, of columns or of both: they are broadcast where they meet."""
    for _ in tl.static_range(_ROUNDS_TL):
        a = c0.to(tl.uint64) * _MULTIPLIER_0
        b = c2.to(tl.uint64) * _MULTIPLIER_1
        c0 = (b >> 32).to(tl.uint32) ^ c1 ^ k0
        c1 = b.to(tl.uint32)
        c2 = (a >> 32).to(tl.uint32) ^ c3 ^ k1
        c3 = a.to(tl.uint32)
        k0 += _WEYL_0
        k1 += _WEYL_1
    return c0, c1, c2, c3


@device_function
def kept(seed, rows, first, threshold, BLOCK_H: tl.constexpr):
    """Which of a block's elements are kept: its rows' numbers (int64), and BLOCK_H columns from one divisible by eight on."""
    groups = first // _GROUP_TL + tl.arange(0, BLOCK_H // _GROUP_TL)
    c0, c1 = groups.to(tl.uint32)[None, :], rows.to(tl.uint32)[:, None]
    c2 = (rows >> 32).to(tl.uint32)[:, None]
    w0, w1, w2, w3 = _philox(c0, c1, c2, tl.zeros_like(c0), seed.to(tl.uint32), (seed >> 32).to(tl.uint32))
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # [rows, groups, word // 2, word % 2]
    low, high = (words & 0xFFFF).to(tl.int32), (words >> 16).to(tl.int32)
    return tl.reshape(tl.join(low >= threshold, high >= threshold), (rows.shape[0], BLOCK_H))


@device_function
def dropped(values, seed, rows, first, threshold, scale, BLOCK_H: tl.constexpr):
    """The values of a block, scaled where they are kept and 0 elsewhere."""
    return tl.where(kept(seed, rows, first, threshold, BLOCK_H), values * scale, 0.0)


# ---- the same by PyTorch ----


def _philox_formula(c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor, k0: Seed, k1: Seed) -> tuple[Tensor, ...]:
    """Words of 32 bits in int64, whose products wrap around: their lower 64 bits are right."""
    for _ in range(_ROUNDS):
        a, b = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (b >> 32) & _LOW ^ c1 ^ k0, b & _LOW, (a >> 32) & _LOW ^ c3 ^ k1, a & _LOW
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return c0, c1, c2, c3


def kept_formula(seed: Seed, rows: Tensor, H: int, threshold: int) -> Tensor:
    """Which elements of rows of H columns are kept; rows has their numbers, in any shape."""
    groups = torch.arange(-(-H // GROUP), device=rows.device)
    rows = rows.unsqueeze(-1)
    counter = groups, rows & _LOW, (rows >> 32) & _LOW, torch.zeros_like(groups)
    words = _philox_formula(*counter, seed & _LOW, (seed >> 32) & _LOW)
    halves = [half >= threshold for word in words for half in (word & 0xFFFF, word >> 16)]
    return torch.stack(halves, -1).flatten(-2)[..., :H]


def row_numbers(x: Tensor) -> Tensor:
    """Of x's rows, in the order in which they would lie."""
    lead = x.shape[:-1]
    return torch.arange(prod(lead), device=x.device).view(lead)


def dropped_formula(values: Tensor, seed: Seed, rows: Tensor, threshold: int) -> Tensor:
    return torch.where(kept_formula(seed, rows, values.shape[-1], threshold), values * scale_of(threshold), 0.0)
