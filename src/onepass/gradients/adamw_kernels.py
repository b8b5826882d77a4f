"""AdamW's kernels and their launches: one launch over many parameters, of which each program steps a chunk.

A chunk is a row of a table: its offsets in the weights, the gradients and the state, its length, its parameter and its place in
that. A second table has a row for each parameter, the scalars that follow from its group's options and from the number of its
steps. A first launch computes them in fp64 at each step: nothing depends on the host, and no number is compiled in.
`adamw_formula.py` says how masters are stored.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from onepass.gradients.adamw_formula import AdamWSlice
from onepass.gradients.eight_bit_kernels import decode, decode_sq, draws, encode, encode_sq
from onepass.gradients.eight_bits import BLOCK
from onepass.gradients.releasable_storage import storage_id
from onepass.kernels import layout
from onepass.kernels.language import device_function, tl
from onepass.kernels.launch import Bound, kernel
from onepass.kernels.rows import aligned
from onepass.kernels.sigmoid import reciprocal_approx
from onepass.runtime.sizes import ceil_div

OPTIONS = 5  # of a group: lr, beta1, beta2, eps, weight_decay
SCALARS = 16  # numbers in a parameter's row; not all are used
_ROWS = 32  # of a program that computes them: one a thread
_CHUNK, _WARPS = 16384, 4
_WIDE, _NARROW = 512, 1024  # values of a block: 16 bytes of fp32 a thread, and where all tensors have 16 bits, as many of those
_MULTIPLE = 8  # 16-bit values in 16 bytes
_PLACES = 6  # numbers in a chunk's row


# ---- kernels ----


@kernel
def _scalars_kernel(
    options_ptr, rows_ptr, steps_ptr, norm_ptr, scalars_ptr, ROWS, GROUPS, ROW: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Count the step of each parameter, and write its row of scalars. rows: its row, and its group."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < ROWS
    place = tl.load(rows_ptr + 2 * at, mask=inside, other=0)
    group = tl.load(rows_ptr + 2 * at + 1, mask=inside, other=0)
    step = tl.load(steps_ptr + place, mask=inside, other=0.0) + 1.0
    tl.debug_barrier()  # all threads have read it
    tl.store(steps_ptr + place, step, mask=inside)
    lr = tl.load(options_ptr + group, mask=inside, other=0.0)
    beta1 = tl.load(options_ptr + GROUPS + group, mask=inside, other=0.0)
    beta2 = tl.load(options_ptr + 2 * GROUPS + group, mask=inside, other=0.0)
    eps = tl.load(options_ptr + 3 * GROUPS + group, mask=inside, other=0.0)
    weight_decay = tl.load(options_ptr + 4 * GROUPS + group, mask=inside, other=0.0)
    factor = 1.0
    if norm_ptr is not None:
        max_norm = tl.load(options_ptr + 5 * GROUPS).to(tl.float32)
        factor = tl.div_rn(max_norm, tl.load(norm_ptr) + 1e-6)
        factor = tl.where(factor > 1.0, 1.0, factor)  # not a minimum, which loses NaN
    row = scalars_ptr + place * ROW
    tl.store(row, tl.zeros([BLOCK], tl.float32) + factor, mask=inside)
    tl.store(row + 1, (lr * weight_decay).to(tl.float32), mask=inside)
    tl.store(row + 2, _upper(beta1), mask=inside)
    tl.store(row + 3, (beta1 - _upper(beta1)).to(tl.float32), mask=inside)
    tl.store(row + 4, (1.0 - beta1).to(tl.float32), mask=inside)
    tl.store(row + 5, _upper(beta2), mask=inside)
    tl.store(row + 6, (beta2 - _upper(beta2)).to(tl.float32), mask=inside)
    tl.store(row + 7, (1.0 - beta2).to(tl.float32), mask=inside)
    tl.store(row + 8, (lr / _correction(beta1, step)).to(tl.float32), mask=inside)
    tl.store(row + 9, (1.0 / tl.sqrt(_correction(beta2, step))).to(tl.float32), mask=inside)
    tl.store(row + 10, eps.to(tl.float32), mask=inside)
    tl.store(row + 11, step, mask=inside)


@device_function
def _upper(beta):
    """Return the upper bits of an fp64 number, an fp32 number. One fp32 alone has 1 - .999 with a relative error of 1.3e-5."""
    return (beta.to(tl.int64, bitcast=True) >> 29 << 29).to(tl.float64, bitcast=True).to(tl.float32)


@device_function
def _correction(beta, step):
    """1 - beta^step."""
    return 1.0 - tl.exp(step.to(tl.float64) * tl.log(beta))


@kernel
def _adamw_kernel(
    weight_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, rest_ptr, scale_ptr, scale_sq_ptr, chunks_ptr, scalars_ptr,
    PLACES: tl.constexpr, ROW: tl.constexpr, ALIGN: tl.constexpr, SPLIT: tl.constexpr, ZERO: tl.constexpr, EXACT: tl.constexpr,
    BLOCK: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Step a chunk. EXACT: to the last bits of fp32. Moments of 16 bits take half as many instructions, which bind there. SCALED:
    how many numbers have a scale, of moments in 8 bits, which `gradients/eight_bits.py` defines."""
    chunk = chunks_ptr + tl.program_id(0).to(tl.int64) * PLACES
    weight_ptr += aligned(tl.load(chunk), ALIGN)
    grad_ptr += aligned(tl.load(chunk + 1), ALIGN)
    state_at = aligned(tl.load(chunk + 2), ALIGN)
    size = aligned(tl.load(chunk + 3).to(tl.int32), ALIGN)
    row = scalars_ptr + tl.load(chunk + 4) * ROW
    factor, decay = tl.load(row), tl.load(row + 1)
    beta1, beta1_low, weight1 = tl.load(row + 2), tl.load(row + 3), tl.load(row + 4)
    beta2, beta2_low, weight2 = tl.load(row + 5), tl.load(row + 6), tl.load(row + 7)
    step_size, correction, eps = tl.load(row + 8), tl.load(row + 9), tl.load(row + 10)
    if SCALED:
        number, first, count = tl.load(chunk + 4).to(tl.int32), tl.load(chunk + 5).to(tl.int32), tl.load(row + 11).to(tl.int32)
        root2 = tl.sqrt(weight2)
    for start in range(0, size, BLOCK):
        if SCALED:
            at = start + tl.arange(0, BLOCK // SCALED)[:, None] * SCALED + tl.arange(0, SCALED)[None, :]
            scale_at = (state_at + start) // SCALED + tl.arange(0, BLOCK // SCALED)
            scaled = start + tl.arange(0, BLOCK // SCALED) * SCALED < size
        else:
            at = start + tl.arange(0, BLOCK)
        inside = at < size
        state = state_at + at
        grad = tl.load(grad_ptr + at, mask=inside, other=0.0).to(tl.float32) * factor
        exp_avg = tl.load(exp_avg_ptr + state, mask=inside, other=0)
        exp_avg_sq = tl.load(exp_avg_sq_ptr + state, mask=inside, other=0)
        if SCALED:
            # times beta already, which is a product less
            exp_avg = decode(exp_avg, beta1 * tl.load(scale_ptr + scale_at, mask=scaled, other=0.0)[:, None])
            exp_avg_sq = decode_sq(exp_avg_sq, beta2 * tl.load(scale_sq_ptr + scale_at, mask=scaled, other=0.0)[:, None])
        exp_avg, exp_avg_sq = exp_avg.to(tl.float32), exp_avg_sq.to(tl.float32)
        master = _load_master(weight_ptr + at, rest_ptr, state, inside, SPLIT)

        if SCALED:
            exp_avg = tl.fma(weight1, grad, exp_avg)
            root = root2 * grad
            exp_avg_sq = tl.fma(root, root, exp_avg_sq)
        else:
            change, square = weight1 * grad, weight2 * grad * grad
            if EXACT:
                change = tl.fma(beta1_low, exp_avg, change)
                square = tl.fma(beta2_low, exp_avg_sq, square)
            exp_avg = tl.fma(beta1, exp_avg, change)
            exp_avg_sq = tl.fma(beta2, exp_avg_sq, square)
        if EXACT:
            step = tl.div_rn(step_size * exp_avg, tl.sqrt_rn(exp_avg_sq) * correction + eps)
        else:
            step = step_size * (exp_avg * reciprocal_approx(tl.fma(tl.sqrt(exp_avg_sq), correction, eps)))
        master = tl.fma(-decay, master, master) - step

        if SCALED:
            draw, draw_sq = draws(first + start, at - start, number, count)
            exp_avg, scale = encode(exp_avg, draw)
            exp_avg_sq, scale_sq = encode_sq(exp_avg_sq, draw_sq)
            tl.store(scale_ptr + scale_at, scale, mask=scaled)
            tl.store(scale_sq_ptr + scale_at, scale_sq, mask=scaled)
        tl.store(exp_avg_ptr + state, exp_avg, mask=inside)
        tl.store(exp_avg_sq_ptr + state, exp_avg_sq, mask=inside)
        _store_master(weight_ptr + at, rest_ptr, state, master, inside, SPLIT)
        if ZERO:
            tl.store(grad_ptr + at, tl.zeros_like(grad), mask=inside)


@device_function
def _load_master(weights, rest_ptr, state, inside, SPLIT: tl.constexpr):
    if SPLIT:
        low = tl.load(rest_ptr + state, mask=inside, other=0).to(tl.int32)
        upper = tl.load(weights, mask=inside, other=0).to(tl.int32) << 16
        master = (upper + low).to(tl.float32, bitcast=True)
        return tl.where(master == master, master, upper.to(tl.float32, bitcast=True))
    elif rest_ptr is not None:
        master = tl.load(rest_ptr + state, mask=inside, other=0.0)
        weight = tl.load(weights, mask=inside, other=0.0)
        return tl.where(master.to(weight.dtype) == weight, master, weight.to(tl.float32))
    else:
        return tl.load(weights, mask=inside, other=0.0).to(tl.float32)


@device_function
def _store_master(weights, rest_ptr, state, master, inside, SPLIT: tl.constexpr):
    if SPLIT:
        bits = tl.minimum(master.to(tl.int32, bitcast=True), 0x7FC00000)  # a GPU's NaN is 7FFFFFFF
        tl.store(rest_ptr + state, bits.to(tl.int16), mask=inside)
        tl.store(weights, ((bits + 0x8000) >> 16).to(tl.int16), mask=inside)
    else:
        if rest_ptr is not None:
            tl.store(rest_ptr + state, master, mask=inside)
        tl.store(weights, master, mask=inside)


# ---- plans ----


@dataclass
class AdamWBatch:
    """What one launch steps: the tensors from which offsets count, and the table of chunks."""

    tensors: tuple[Tensor | None, ...]  # weight, grad, exp_avg, exp_avg_sq, rest, both scales; bf16 weights as int16
    chunks: Tensor
    programs: int
    align: int
    sources: list[Tensor]  # one gradient in each storage; the first is tensors' own
    source_of: Tensor  # each chunk's index in sources
    apart: list[int]  # the sources' distances from the first, as in the table


def batches_of(stretches: Iterable[AdamWSlice]) -> list[AdamWBatch]:
    """Return a batch for each device, types, state's storage and alignment: whether slices start and end at multiples of 16
    bytes."""
    found: dict[tuple[Hashable, ...], list[AdamWSlice]] = {}
    for stretch in stretches:
        types = stretch.weight.dtype, stretch.grad.dtype, stretch.exp_avg.dtype, stretch.split
        kind = _is_even(stretch), storage_id(stretch.exp_avg), stretch.weight.device, types
        found.setdefault(kind, []).append(stretch)
    return [_batch(alike, _MULTIPLE if even else 1) for (even, *_), alike in found.items()]


def _is_even(stretch: AdamWSlice) -> bool:
    tensors = [t for t in stretch[:5] if t is not None]
    return not stretch.weight.numel() % _MULTIPLE and not any(t.data_ptr() % (_MULTIPLE * t.element_size()) for t in tensors)


def _batch(alike: list[AdamWSlice], align: int) -> AdamWBatch:
    first = alike[0]
    chunks, source_of = [], []
    numbers: dict[int, int] = {}  # storage to its index in sources
    sources: list[Tensor] = []
    for stretch in alike:
        source = numbers.setdefault(storage_id(stretch.grad), len(numbers))
        if source == len(sources):
            sources.append(stretch.grad)
        # exp_avg, exp_avg_sq and rest share a distance
        places = [layout.distance(mine, base) for mine, base in zip(stretch[:3], first[:3], strict=True)]
        for start in range(0, stretch.weight.numel(), _CHUNK):
            size = min(_CHUNK, stretch.weight.numel() - start)
            chunks.append([*(place + start for place in places), size, stretch.row, stretch.first + start])
            source_of.append(source)
    weight = first.weight.view(torch.int16) if first.split else first.weight
    table, which = (torch.tensor(each, dtype=torch.int64).to(first.weight.device) for each in (chunks, source_of))
    tensors = weight, *first[1:5], first.scale, first.scale_sq
    return AdamWBatch(tensors, table, len(chunks), align, sources, which, _distances(sources))


def _distances(sources: list[Tensor]) -> list[int]:
    return [layout.distance(each, sources[0]) for each in sources]


def _follow(batch: AdamWBatch) -> None:
    """Update the table where gradients' storages have new memory, as with `MainGrads(release=True)`, on the device."""
    apart = _distances(batch.sources)
    if apart != batch.apart:
        moved = torch.tensor([now - before for now, before in zip(apart, batch.apart, strict=True)], device="cpu")
        batch.chunks[:, 1].add_(moved.to(batch.chunks.device, non_blocking=True)[batch.source_of])
        batch.apart = apart


@lru_cache(64)
def _bind_scalars(groups: int) -> Bound:
    bound: Bound = _scalars_kernel.bind(groups, SCALARS, _ROWS, num_warps=1)
    return bound


@lru_cache(64)
def _bind_adamw(align: int, split: bool, zero: bool, moments: torch.dtype, narrow: bool) -> Bound:
    scaled = BLOCK if moments is torch.int8 else 0
    block = _NARROW if scaled or narrow else _WIDE
    exact = moments is torch.float32
    bound: Bound = _adamw_kernel.bind(_PLACES, SCALARS, align, split, zero, exact, block, scaled, num_warps=_WARPS)
    return bound


# ---- launches ----


def write_scalars(options: Tensor, rows: Tensor, steps: Tensor, norm: Tensor | None, scalars: Tensor) -> None:
    """Count a step of the parameters in rows, and write their scalars.

    options, fp64: each of OPTIONS for all groups, then max_norm, which is read where norm is given. rows, int64 ``[stepped, 2]``:
    a parameter's row in steps and scalars, and its group. scalars, fp32: SCALARS for each row.
    """
    bound, count = _bind_scalars(options.numel() // OPTIONS), rows.shape[0]
    bound((ceil_div(count, _ROWS), 1, 1), options, rows, steps, norm, scalars, count)


def step_batch(batch: AdamWBatch, scalars: Tensor, zero: bool) -> None:
    """Step the batch's weights. `zero`: clear their gradients."""
    if len(batch.sources) > 1:
        _follow(batch)
    _, grad, exp_avg, _, rest, *_ = batch.tensors
    assert grad is not None and exp_avg is not None
    split = rest is not None and rest.dtype is torch.int16
    narrow = grad.element_size() == exp_avg.element_size() == 2
    bound = _bind_adamw(batch.align, split, zero, exp_avg.dtype, narrow)
    bound((batch.programs, 1, 1), *batch.tensors, batch.chunks, scalars)
