"""Which elements dropout drops: the seed, the number of an element's row and its column decide, and nothing else.

Tiles, strides, the GPU, the rank that has the row, kernels or PyTorch make no difference.

Eight neighbours of a row, from a column divisible by eight on, share one block of Philox 4x32, a bijection of 128-bit counters
that a 64-bit key selects. The key is the seed, the counter (column / 8, row's low half, row's high half, 0). Each neighbour has a
half of one of the four 32-bit words, low halves first, and is dropped where that half is below a threshold of 0 to 65536.
Seven rounds instead of the usual ten: the fewest with which Philox's authors saw no failure in BigCrush. The first two depend on
either the row or the column, so a block computes them once for each row and each column.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from onepass.kernels.device_tables import is_capturing
from onepass.kernels.language import device_function, tl
from onepass.runtime.batch_invariance import refuse
from onepass.runtime.checks import check_number
from onepass.runtime.dispatch import needs_dispatcher, under_functorch
from onepass.runtime.process_setting import ProcessSetting, SettingChange

GROUP = 8  # neighbours that share a block
STEPS = 65536  # of a probability
Seed = Tensor | int  # [1] int64 on the device, or below 2**63

_ROUNDS = 7
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85  # what the key's halves grow by from round to round
_LOW = 0xFFFFFFFF

# ---- probabilities ----


def threshold_of(name: str, p: float) -> int:
    """Return the threshold nearest to p. Only p = 1 drops everything: otherwise what is kept must have a scale."""
    check_number(name, p)
    if not 0 <= p <= 1:
        raise ValueError(f"{name} must be a probability, from 0 to 1, but is {p!r}")
    return STEPS if p == 1 else min(round(p * STEPS), STEPS - 1)


def scale_of(threshold: int) -> float:
    """Return the scale of kept elements: exactly one over the probability of keeping."""
    return 0.0 if threshold == STEPS else STEPS / (STEPS - threshold)


def probability(threshold: int) -> tuple[int | None, float | None]:
    """Return the threshold and the scale for a kernel; None where nothing is dropped."""
    return (threshold, scale_of(threshold)) if threshold else (None, None)


# ---- device functions ----

_ROUNDS_TL = tl.constexpr(_ROUNDS)
_MULTIPLIER_0, _MULTIPLIER_1 = tl.constexpr(_MULTIPLIERS[0]), tl.constexpr(_MULTIPLIERS[1])
_WEYL_0, _WEYL_1 = tl.constexpr(_WEYL[0]), tl.constexpr(_WEYL[1])
_GROUP_TL = tl.constexpr(GROUP)


@device_function
def load_seed(seed_ptr, SEED):
    """Return the seed as int64: a number, or from memory, where a graph draws another one at each replay."""
    if seed_ptr is not None:
        return tl.load(seed_ptr)
    else:
        return SEED.to(tl.int64)


@device_function
def _philox(c0, c1, c2, c3, k0, k1):
    """Return four words. The counter's words may have the shape of rows, columns or both: they broadcast."""
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
def keep_mask(seed, rows, first, threshold, BLOCK_H: tl.constexpr):
    """Return which elements of a block are kept. rows: int64 numbers; first: its first column, divisible by eight."""
    groups = first // _GROUP_TL + tl.arange(0, BLOCK_H // _GROUP_TL)
    c0, c1 = groups.to(tl.uint32)[None, :], rows.to(tl.uint32)[:, None]
    c2 = (rows >> 32).to(tl.uint32)[:, None]
    w0, w1, w2, w3 = _philox(c0, c1, c2, tl.zeros_like(c0), seed.to(tl.uint32), (seed >> 32).to(tl.uint32))
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # [rows, groups, word // 2, word % 2]
    low, high = (words & 0xFFFF).to(tl.int32), (words >> 16).to(tl.int32)
    return tl.reshape(tl.join(low >= threshold, high >= threshold), (rows.shape[0], BLOCK_H))


@device_function
def apply_dropout(values, seed, rows, first, threshold, scale, BLOCK_H: tl.constexpr):
    """Return a block's values, scaled where they are kept and 0 elsewhere."""
    return tl.where(keep_mask(seed, rows, first, threshold, BLOCK_H), values * scale, 0.0)


# ---- by PyTorch ----


def _philox_formula(c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor, k0: Seed, k1: Seed) -> tuple[Tensor, ...]:
    """`_philox` with 32-bit words in int64. Products wrap around, and their lower 64 bits are right."""
    for _ in range(_ROUNDS):
        a, b = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (b >> 32) & _LOW ^ c1 ^ k0, b & _LOW, (a >> 32) & _LOW ^ c3 ^ k1, a & _LOW
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return c0, c1, c2, c3


def keep_mask_formula(seed: Seed, rows: Tensor, H: int, threshold: int) -> Tensor:
    """Return which elements of rows of H columns are kept. `rows` has the rows' numbers, in any shape."""
    groups = torch.arange(-(-H // GROUP), device=rows.device)
    rows = rows.unsqueeze(-1)
    counter = groups, rows & _LOW, (rows >> 32) & _LOW, torch.zeros_like(groups)
    words = _philox_formula(*counter, seed & _LOW, (seed >> 32) & _LOW)
    halves = [half >= threshold for word in words for half in (word & 0xFFFF, word >> 16)]
    return torch.stack(halves, -1).flatten(-2)[..., :H]


def row_numbers(x: Tensor) -> Tensor:
    """Return the numbers of x's rows, in row-major order."""
    lead = x.shape[:-1]
    return torch.arange(prod(lead), device=x.device).view(lead)


def dropout_formula(values: Tensor, seed: Seed, rows: Tensor, threshold: int) -> Tensor:
    return torch.where(keep_mask_formula(seed, rows, values.shape[-1], threshold), values * scale_of(threshold), 0.0)


# ---- seeds ----

_TOP = 1 << 62  # set in all numbers: Triton would compile kernels again for numbers of 32 bits
_STEP = 0x9E3779B97F4A7C15  # 2**64 over the golden ratio: keeps offsets of one seed, and of nearby seeds, apart
_TAKEN = 4  # generators count random numbers in fours
_on_device = ProcessSetting("seeds_on_device", False)


def seeds_on_device(on: bool = True) -> SettingChange[bool]:
    """Let eager calls draw seeds as a CUDA graph does, from now on or, as a context manager, within the block.

    A replay and the call that it stands for then drop the same elements. Each seed costs an eager call a small kernel.
    """
    return _on_device.change(on)


def _as_graphs_do() -> bool:
    return _on_device.process if not _on_device.has_blocks else _on_device.in_thread()


def draw_seed(x: Tensor, *others: Tensor | None) -> Tensor | int:
    """Draw a seed below 2**63 for a call on these tensors: a number, or [1] int64 on x's device. It advances the generator.

    torch.manual_seed repeats a seed, and so does restoring a generator's state, as activation checkpointing does. In plain eager
    mode on a GPU the CPU reads the generator's offset and advances it, and the seed is a number. Nothing is launched or kept.
    Under CUDA graphs, compilers, transforms and `seeds_on_device` a kernel makes a tensor, and each replay draws a new seed.
    """
    refuse("dropout", "which numbers of a row are dropped depends on its place")
    # needs_dispatcher: a graph that is traced must draw the seed itself
    if x.is_cuda and not (_as_graphs_do() or needs_dispatcher(x, *others) or under_functorch() or is_capturing(x.device)):
        generator: Any = torch.cuda.default_generators[x.get_device()]
        place = generator.get_offset()
        generator.set_offset(place + _TAKEN)
        return _mix(generator.initial_seed(), place)
    return torch.randint((1 << 63) - 1, (1,), dtype=torch.int64, device=x.device)


def _mix(seed: int, place: int) -> int:
    """Mix a generator's seed and offset into one number. It is a key: neighbouring keys give unrelated bits."""
    return (seed + (place // _TAKEN + 1) * _STEP) & (_TOP - 1) | _TOP


def as_tensor(seed: Tensor | int, device: torch.device) -> Tensor:
    """Return the seed as a tensor on the device."""
    return seed if isinstance(seed, Tensor) else torch.full((1,), seed, dtype=torch.int64, device=device)
