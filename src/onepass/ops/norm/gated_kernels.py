"""gated_rms_norm's kernels: short rows in registers, several to a program. Backward sums the weight's gradient as it goes.

With a = act(z), h = x and d = dy a where the norm comes first, else h = x a and d = dy; n = h / rms(h), g = d weight, means over
the row:
    y = n weight, times a where the norm comes first
    dh = (g - n mean(g n)) / rms(h),  dweight = sum over rows of d n
    the norm first: dx = dh, dz = dy n weight act'(z);  the gate first: dx = dh a, dz = dh x act'(z)
A row's two sums, of h^2 and of g h, need nothing of each other, so rms(h) is not kept: to find it again costs a few shuffles.
`gated_output` and `gated_gradients` are functions of fp32 blocks, so that a product can make its rows by them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from onepass.gradients.places import Place, empty_gradient
from onepass.kernels.language import device_function, tl
from onepass.kernels.launch import Bound, kernel
from onepass.kernels.layout import Groups, as_groups, groups_of
from onepass.kernels.rows import aligned, block_offsets, inside_row, known_align, load_block, load_scale
from onepass.kernels.scratch import new_scratch, stream_scratch
from onepass.kernels.sigmoid import LOG2_E, sigmoid
from onepass.ops.norm.backward import finish_sums
from onepass.runtime.sizes import ceil_div, power_of_two, processors, shared_memory

WIDEST = 8192  # columns that a program of 512 threads holds of x, z and dy
WIDEST_REBUILT = 2048  # columns of which backward makes y again, too: a thread has no registers for that of wider rows


class GatedNormOptions(NamedTuple):
    """What gated_rms_norm takes besides tensors."""

    eps: float
    zero_centered_gamma: bool
    activation: str
    norm_before_gate: bool
    groups: int  # of a row: each is normalised by itself


# ---- rows ----


@device_function
def gate_and_slope(z, SILU: tl.constexpr):
    """Return act(z) and act'(z), of SiLU or of the sigmoid."""
    s, rest = sigmoid(-LOG2_E * z)
    if SILU:
        return z * s, tl.fma(z * s, rest, s)
    else:
        return s, s * rest


@device_function
def inverse_rms(h, eps, H: tl.constexpr):
    """Return 1 / rms of each row [BLOCK_M, 1]. Outside of rows h is 0."""
    return (1.0 / tl.sqrt(tl.sum(h * h, 1) / H + eps))[:, None]


@device_function
def gated_output(x, z, weight, eps, H: tl.constexpr, NORM_FIRST: tl.constexpr, SILU: tl.constexpr):
    gate, _ = gate_and_slope(z, SILU)
    h = x if NORM_FIRST else x * gate
    n = h * inverse_rms(h, eps, H)
    return n * weight * gate if NORM_FIRST else n * weight


@device_function
def gated_gradients(dy, x, z, weight, eps, H: tl.constexpr, NORM_FIRST: tl.constexpr, SILU: tl.constexpr):
    """Return dx, dz, and d and n: dweight is the sum of d * n over rows."""
    gate, slope = gate_and_slope(z, SILU)
    h = x if NORM_FIRST else x * gate
    d = dy * gate if NORM_FIRST else dy
    dslope = dy * slope if NORM_FIRST else x * slope
    rstd = inverse_rms(h, eps, H)
    product = (tl.sum(d * weight * h, 1) / H)[:, None] * rstd
    n = h * rstd
    dh = tl.fma(h, -product * rstd, d * weight) * rstd
    if NORM_FIRST:
        return dh, n * weight * dslope, d, n
    else:
        return dh * gate, dh * dslope, d, n


# ---- kernels ----


@kernel
def _gated_forward_kernel(
    x_ptr, z_ptr, weight_ptr, y_ptr,  # x, z and y: M rows of GROUPS groups of H columns; weight: one such row
    M, X_ROW, X_GAP, Z_ROW, Z_GAP, eps,
    X_INNER: tl.constexpr, Z_INNER: tl.constexpr, H: tl.constexpr, GROUPS: tl.constexpr, NORM_FIRST: tl.constexpr,
    SILU: tl.constexpr, CENTERED: tl.constexpr, ALIGN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    X_ROW, Z_ROW = aligned(X_ROW, ALIGN), aligned(Z_ROW, ALIGN)
    if X_INNER:
        X_GAP = aligned(X_GAP, ALIGN)
    if Z_INNER:
        Z_GAP = aligned(Z_GAP, ALIGN)
    group = tl.program_id(1) * H
    columns = tl.arange(0, BLOCK_H)
    within = inside_row(columns, H, H == BLOCK_H)
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = (rows < M)[:, None] & within[None, :]
    x = load_block(x_ptr + group, rows, columns, X_ROW, inside, X_GAP, X_INNER)
    z = load_block(z_ptr + group, rows, columns, Z_ROW, inside, Z_GAP, Z_INNER)
    weight = load_scale(weight_ptr + group if weight_ptr is not None else None, columns, within, CENTERED)[None, :]
    y = gated_output(x, z, weight, eps, H, NORM_FIRST, SILU)
    tl.store(y_ptr + group + rows[:, None] * (GROUPS * H) + columns[None, :], y, mask=inside)


@kernel
def _gated_backward_kernel(
    dy_ptr, x_ptr, z_ptr, weight_ptr, dx_ptr, dz_ptr, dweight_ptr, y_ptr,  # as in forward, and their gradients; y may be dy
    partial_ptr, arrived_ptr,  # of each group: a row of sums a program, and two counters
    M, ROWS,  # ROWS: of all M rows, those of a program
    DY_ROW, DY_GAP, X_ROW, X_GAP, Z_ROW, Z_GAP, eps,
    DY_INNER: tl.constexpr, X_INNER: tl.constexpr, Z_INNER: tl.constexpr, DZ_AS_Z: tl.constexpr, H: tl.constexpr,
    GROUPS: tl.constexpr, NORM_FIRST: tl.constexpr, SILU: tl.constexpr, CENTERED: tl.constexpr, ADD: tl.constexpr,
    ALIGN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr, STAGES: tl.constexpr, SHARE_S: tl.constexpr,
    SHARE_H: tl.constexpr,
):  # fmt: skip
    DY_ROW, X_ROW, Z_ROW = aligned(DY_ROW, ALIGN), aligned(X_ROW, ALIGN), aligned(Z_ROW, ALIGN)
    if DY_INNER:
        DY_GAP = aligned(DY_GAP, ALIGN)
    if X_INNER:
        X_GAP = aligned(X_GAP, ALIGN)
    if Z_INNER:
        Z_GAP = aligned(Z_GAP, ALIGN)
    program, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    group = tl.program_id(1) * H
    columns = tl.arange(0, BLOCK_H)
    within = inside_row(columns, H, H == BLOCK_H)
    weight = load_scale(weight_ptr + group if weight_ptr is not None else None, columns, within, CENTERED)[None, :]
    dweight = tl.zeros([BLOCK_M, BLOCK_H], tl.float32)
    # each turn, all programs of a group together take the next programs * BLOCK_M rows; ROWS of all fall to each
    for first in tl.range(program * BLOCK_M, ROWS * programs.to(tl.int64), programs * BLOCK_M, num_stages=STAGES):
        rows = first + tl.arange(0, BLOCK_M)
        inside = (rows < M)[:, None] & within[None, :]
        dy = load_block(dy_ptr + group, rows, columns, DY_ROW, inside, DY_GAP, DY_INNER)
        x = load_block(x_ptr + group, rows, columns, X_ROW, inside, X_GAP, X_INNER)
        z = load_block(z_ptr + group, rows, columns, Z_ROW, inside, Z_GAP, Z_INNER)
        dx, dz, d, n = gated_gradients(dy, x, z, weight, eps, H, NORM_FIRST, SILU)
        at = group + rows[:, None] * (GROUPS * H) + columns[None, :]
        if dx_ptr is not None:
            tl.store(dx_ptr + at, dx, mask=inside)
        if dz_ptr is not None:
            z_at = group + block_offsets(rows, columns, Z_ROW, Z_GAP, Z_INNER)
            tl.store(dz_ptr + (z_at if DZ_AS_Z else at), dz, mask=inside)
        if y_ptr is not None:
            tl.store(y_ptr + at, gated_output(x, z, weight, eps, H, NORM_FIRST, SILU), mask=inside)
        dweight = tl.fma(d, n, dweight)
    if dweight_ptr is not None:
        finish_sums(
            dweight_ptr + group, None, partial_ptr + group.to(tl.int64) * programs, arrived_ptr + 2 * tl.program_id(1),
            (dweight,), (), H, ADD, SHARE_S, SHARE_H,
        )  # fmt: skip


# ---- tiles: from the shape and the device, never by trial ----


class GatedNormTiles(NamedTuple):
    block_m: int  # rows a program, or in backward at a time
    block_h: int
    num_warps: int
    stages: int = 1
    resident: int = 0  # programs a multiprocessor


def gated_forward_tiles(H: int, size: int) -> GatedNormTiles:
    """32 values of x a thread, 16 of fp32, as short rows of the other norms. `size`: bytes of a value of x."""
    block_h = power_of_two(H)
    values = 1024 if size == 2 else 512  # of a warp
    num_warps = max(2, block_h // values)
    return GatedNormTiles(max(1, values * num_warps // block_h), block_h, num_warps)


def gated_backward_tiles(H: int, row_bytes: int, room: int) -> GatedNormTiles:
    """16 values of each tensor a thread, and as many turns' rows on their way as `room`, the shared memory for them, holds.

    `row_bytes`: of a row of x, z and dy.
    """
    block_h = power_of_two(H)
    num_warps = max(4, block_h // 512)
    block_m = 512 * num_warps // block_h
    resident = 3 if num_warps == 4 else 16 // num_warps  # several rows take more than 128 registers a thread
    stages = min(3, 1 + room // resident // (block_m * row_bytes))
    return GatedNormTiles(block_m, block_h, num_warps, max(1, stages), resident)


@lru_cache(4096)
def _forward_plan(width: int, x_lies: Groups, z_lies: Groups, size: int, options: GatedNormOptions) -> tuple[int, Bound]:
    """Return the rows of a program, and the kernel. `width`: of a whole row of x."""
    eps, centered, activation, norm_first, groups = options
    H = width // groups
    tiles = gated_forward_tiles(H, size)
    (x_row, x_gap, x_inner), (z_row, z_gap, z_inner) = x_lies, z_lies
    align = known_align(x_row, x_gap or 0, z_row, z_gap or 0)
    bound: Bound = _gated_forward_kernel.bind(
        x_row, x_gap, z_row, z_gap, eps, x_inner, z_inner, H, groups, norm_first, activation == "silu", centered, align,
        tiles.block_m, tiles.block_h, num_warps=tiles.num_warps, fused=False,
    )  # fmt: skip
    return tiles.block_m, bound


def backward_tiles_for(x: Tensor, z: Tensor, options: GatedNormOptions) -> GatedNormTiles:
    H = x.shape[-1] // options.groups
    room = shared_memory(x.device) - 16384  # what sums need, and more
    return gated_backward_tiles(H, H * (2 * x.element_size() + z.element_size()), room)


@lru_cache(4096)
def _backward_plan(
    width: int, lies: tuple[Groups, ...], dz_as_z: bool, tiles: GatedNormTiles, options: GatedNormOptions, sums: bool, add: bool
) -> Bound:  # fmt: skip
    """`lies`: of dy, x and z; `dz_as_z`: dz lies as z does."""
    eps, centered, activation, norm_first, groups = options
    H = width // groups
    align = known_align(*(row for row, _, _ in lies), *(gap or 0 for _, gap, _ in lies))
    bound: Bound = _gated_backward_kernel.bind(
        *(size for row, gap, _ in lies for size in (row, gap)), eps, *(inner for _, _, inner in lies), dz_as_z,
        H, groups, norm_first, activation == "silu", centered, add, align,
        tiles.block_m, tiles.block_h, tiles.stages if sums else 1, 128, 8 * tiles.num_warps,
        num_warps=tiles.num_warps, resident=tiles.resident if sums else 0, fused=False,
    )  # fmt: skip
    return bound


# ---- calls ----


def gated_forward(x: Tensor, z: Tensor, weight: Tensor | None, options: GatedNormOptions) -> Tensor:
    width = x.shape[-1]
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    x, x_lies = as_groups(x, True)
    z, z_lies = as_groups(z, True)
    block_m, launch = _forward_plan(width, x_lies, z_lies, x.element_size(), options)
    M = x.numel() // width
    launch((ceil_div(M, block_m), options.groups, 1), x, z, weight, y, M)
    return y


def gated_backward(
    dy: Tensor, x: Tensor, z: Tensor, weight: Tensor | None, options: GatedNormOptions, *needs: bool,
    into: Sequence[Tensor | None] | None = None, into_dy: bool = False, place: Place | None = None, keep_scratch: bool = True,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Return dx, dz, dweight, and y again in dy's type: each where it is needed.

    Args:
        into: a contiguous tensor that dweight is added to.
        into_dy: y may be written over dy.
        place: dz's, if z is read where it lies.
    """
    need_dx, need_dz, need_dweight, rebuild = needs
    width, groups = x.shape[-1], options.groups
    M = x.numel() // width
    tiles = backward_tiles_for(x, z, options)
    dx = torch.empty_like(x, memory_format=torch.contiguous_format) if need_dx else None
    dz = empty_gradient(z, place if groups_of(z, True) is not None else None) if need_dz else None
    dweight = None
    if need_dweight:
        assert weight is not None
        dweight = torch.empty_like(weight) if into is None else into[0]
    y = None
    if rebuild:
        y = dy if into_dy and dy.is_contiguous() else torch.empty_like(dy, memory_format=torch.contiguous_format)
    dy, dy_lies = as_groups(dy, True)
    x, x_lies = as_groups(x, True)
    z, z_lies = as_groups(z, True)
    dz_as_z = dz is not None and not dz.is_contiguous()
    launch = _backward_plan(width, (dy_lies, x_lies, z_lies), dz_as_z, tiles, options, need_dweight, into is not None)
    blocks = programs = ceil_div(M, tiles.block_m)
    partial = arrived = None
    if need_dweight:  # else a program takes no second turn, as nothing is kept from turn to turn
        programs = min(blocks, max(1, tiles.resident * processors(x.device) // groups))
        partial, arrived = (stream_scratch if keep_scratch else new_scratch)(programs * width, 2 * groups, x.device)
    rows = ceil_div(blocks, programs) * tiles.block_m
    launch((programs, groups, 1), dy, x, z, weight, dx, dz, dweight, y, partial, arrived, M, rows)
    return dx, dz, dweight, y
