"""The kernels of a bias and an activation, and the registered ops that launch them.

They compute ops/activation/formula.py's formula and dropout. Backward can also write y again, in dy's place: activation_linear
keeps x only. Where an adapter's gradient alone asks for y, da = u.T @ y, backward makes that, and y is never written. So it makes
db = dx.T @ t of an adapter of the layer that made x, which then need not read dx. A gated activation's linear half is the second
of x, or a tensor of its own, `linear`, beside the gate x. PAIRS: both alternate in x, of which there is nothing but dx and y.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from onepass.gradients.vectors import KernelTargets, VectorGrads
from onepass.kernels.column_reduce import ColumnTiles, arrive, column_sum, sum_strips
from onepass.kernels.language import device_function, tl, triton_unsupported
from onepass.kernels.launch import Bound, Grid, grid_of, kernel
from onepass.kernels.layout import as_rows
from onepass.kernels.philox import GROUP, apply_dropout, load_seed, probability
from onepass.kernels.rows import aligned, known_align, load_vector
from onepass.kernels.scratch import new_scratch, stream_scratch
from onepass.ops.activation.activations import Activation, activation_of
from onepass.ops.activation.formula import ActivationOptions
from onepass.ops.activation.saved_rows import load_pairs, load_rows, store_fp8_rows, store_pairs
from onepass.runtime.dispatch import under_functorch
from onepass.runtime.op import Registered
from onepass.runtime.saved import FP8_RUN, fp8_empty
from onepass.runtime.sizes import ceil_div, power_of_two, processors

Rows = tuple[int, int, int | None]  # how far rows of dy, of x and of the linear part are apart
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]  # dx, dbias, dweight, y, dlinear

# ---- kernels: load, go to fp32 at once, store in the storage type ----


@device_function
def clamp_halves(gate, linear, clamp):
    return tl.where(gate > clamp, clamp, gate), tl.where(linear > clamp, clamp, tl.where(linear < -clamp, -clamp, linear))


@kernel
def _forward_kernel(
    x_ptr, bias_ptr, weight_ptr, y_ptr, codes_ptr, exponents_ptr, seed_ptr, linear_ptr, M, SEED, H, X_ROW, LINEAR_ROW,
    clamp, offset, threshold, scale,
    ACT: tl.constexpr, GATED: tl.constexpr, PAIRS: tl.constexpr, RUN: tl.constexpr, ALIGN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    PARTS: tl.constexpr = 2 if GATED else 1
    H, X_ROW = aligned(H, ALIGN), aligned(X_ROW, ALIGN)
    tile = tl.program_id(0)
    columns = tile * BLOCK_H + tl.arange(0, BLOCK_H)
    block = tl.program_id(1).to(tl.int64) + 65535 * tl.program_id(2)
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = (rows < M)[:, None] & (columns < H)[None, :]
    if PAIRS:
        x, x2 = load_pairs(x_ptr, rows, tile * BLOCK_H, H, X_ROW, rows < M, BLOCK_H)
    else:
        x = load_rows(x_ptr, None, rows, columns, H, X_ROW, inside, 0, PARTS, RUN)
    z = x + load_vector(bias_ptr, columns, columns < H)[None, :]
    if codes_ptr is not None:
        store_fp8_rows(codes_ptr, exponents_ptr, x, rows, tile, M, H, 0, PARTS, RUN)
    if GATED:
        if linear_ptr is not None:
            x2 = load_rows(linear_ptr, None, rows, columns, H, aligned(LINEAR_ROW, ALIGN), inside, 0, 1, RUN)
        elif not PAIRS:
            x2 = load_rows(x_ptr, None, rows, columns, H, X_ROW, inside, 1, PARTS, RUN)
        linear = x2 + load_vector(bias_ptr, columns + H, columns < H)[None, :]
        if codes_ptr is not None:
            store_fp8_rows(codes_ptr, exponents_ptr, x2, rows, tile, M, H, 1, PARTS, RUN)
        if clamp is not None:
            z, linear = clamp_halves(z, linear, clamp)
        if offset is not None:
            linear += offset
        y = ACT(z) * linear
    else:
        y = ACT(z)
    if weight_ptr is not None:
        y *= tl.load(weight_ptr + rows, mask=rows < M, other=0.0).to(tl.float32)[:, None]
    if threshold is not None:
        y = apply_dropout(y, load_seed(seed_ptr, SEED), rows, tile * BLOCK_H, threshold, scale, BLOCK_H)
    tl.store(y_ptr + rows[:, None] * H + columns[None, :], y, mask=inside)


@kernel
def _backward_kernel(
    dy_ptr, x_ptr, exponents_ptr, bias_ptr, weight_ptr, dx_ptr, y_ptr, dbias_ptr, partial_ptr, arrived_ptr, dweight_ptr,
    seed_ptr, linear_ptr, dlinear_ptr, u_ptr, da_ptr, t_ptr, db_ptr,
    M, ROWS, SEED, H, DY_ROW, X_ROW, LINEAR_ROW, R, T, clamp, offset, threshold, scale,
    ACT: tl.constexpr, DERIVATIVE: tl.constexpr, MASKS: tl.constexpr, GATED: tl.constexpr, PAIRS: tl.constexpr,
    RUN: tl.constexpr, ALIGN: tl.constexpr, ADD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    PARTS: tl.constexpr = 2 if GATED else 1
    H, DY_ROW, X_ROW = aligned(H, ALIGN), aligned(DY_ROW, ALIGN), aligned(X_ROW, ALIGN)
    tile, strip = tl.program_id(0), tl.program_id(1).to(tl.int64)
    columns = tile * BLOCK_H + tl.arange(0, BLOCK_H)
    within = (columns < H)[None, :]
    bias = load_vector(bias_ptr, columns, columns < H)[None, :]
    dbias = tl.zeros([BLOCK_M, BLOCK_H], tl.float32)
    if GATED:
        bias2 = load_vector(bias_ptr, columns + H, columns < H)[None, :]
        dbias2 = tl.zeros([BLOCK_M, BLOCK_H], tl.float32)
    if threshold is not None:
        seed = load_seed(seed_ptr, SEED)
    if u_ptr is not None:
        ranks = tl.arange(0, BLOCK_R)
        da = tl.zeros([BLOCK_R, BLOCK_H], tl.float32)
    if t_ptr is not None:
        of_t = tl.arange(0, BLOCK_T)
        db = tl.zeros([BLOCK_H, BLOCK_T], tl.float32)
        db2 = db
    for first in tl.range(0, ROWS, BLOCK_M, num_stages=STAGES):
        rows = strip * ROWS + first + tl.arange(0, BLOCK_M)  # ROWS is a multiple of BLOCK_M: strips don't overlap
        real = rows < M
        inside = real[:, None] & within
        rows = tl.minimum(rows, M - 1)  # past the end the last row again, with dy 0
        dy = tl.load(dy_ptr + rows[:, None] * DY_ROW + columns[None, :], mask=inside, other=0.0).to(tl.float32)
        if PAIRS:
            z, linear = load_pairs(x_ptr, rows, tile * BLOCK_H, H, X_ROW, real, BLOCK_H)
        else:
            z = load_rows(x_ptr, exponents_ptr, rows, columns, H, X_ROW, within, 0, PARTS, RUN) + bias
        if threshold is not None:
            dy = apply_dropout(dy, seed, rows, tile * BLOCK_H, threshold, scale, BLOCK_H)
        if GATED:
            if linear_ptr is not None:
                linear = load_rows(linear_ptr, None, rows, columns, H, aligned(LINEAR_ROW, ALIGN), within, 0, 1, RUN) + bias2
            elif not PAIRS:
                linear = load_rows(x_ptr, exponents_ptr, rows, columns, H, X_ROW, within, 1, PARTS, RUN) + bias2
            if clamp is not None:  # the boundary itself passes gradient, NaN does not
                passes, passes2 = z <= clamp, (linear <= clamp) & (linear >= -clamp)
                z, linear = clamp_halves(z, linear, clamp)
            if offset is not None:
                linear += offset
        if dweight_ptr is not None or y_ptr is not None or u_ptr is not None:
            y = ACT(z) * linear if GATED else ACT(z)
        if dweight_ptr is not None:
            at = dweight_ptr + tile * M.to(tl.int64) + rows
            tl.store(at, tl.sum(tl.where(inside, y * dy, 0.0), 1), mask=real)
        if weight_ptr is not None:
            weight = tl.load(weight_ptr + rows).to(tl.float32)[:, None]
            dy *= weight
            if y_ptr is not None or u_ptr is not None:
                y *= weight
        derivative = DERIVATIVE(z)
        dz = dy * derivative
        if GATED:
            dz *= linear
        if MASKS:
            dz = tl.where(derivative == 0.0, 0.0, dz)
        if GATED:
            dz2 = dy * ACT(z)
            if clamp is not None:
                dz, dz2 = tl.where(passes, dz, 0.0), tl.where(passes2, dz2, 0.0)
            if dlinear_ptr is not None:
                tl.store(dlinear_ptr + rows[:, None] * H + columns[None, :], dz2, mask=inside)
            if PAIRS and dx_ptr is not None:
                store_pairs(dx_ptr, dz, dz2, rows, tile * BLOCK_H, H, real, BLOCK_H)
            elif dx_ptr is not None and linear_ptr is None:
                tl.store(dx_ptr + rows[:, None] * (2 * H) + (columns + H)[None, :], dz2, mask=inside)
            dbias2 += tl.where(inside, dz2, 0.0)
        if dx_ptr is not None and not PAIRS:
            DX_ROW = H if linear_ptr is not None else PARTS * H
            tl.store(dx_ptr + rows[:, None] * DX_ROW + columns[None, :], dz, mask=inside)
        if y_ptr is not None:  # after dx, which had to wait for all of dy: y may take its place
            tl.store(y_ptr + rows[:, None] * H + columns[None, :], y, mask=inside)
        if u_ptr is not None:
            u = tl.load(u_ptr + rows[:, None] * R + ranks[None, :], mask=(ranks < R)[None, :], other=0.0)
            da = tl.dot(tl.trans(u), tl.where(inside, y, 0.0).to(u.dtype), da)
        if t_ptr is not None:
            t = tl.load(t_ptr + rows[:, None] * T + of_t[None, :], mask=(of_t < T)[None, :], other=0.0)
            db = tl.dot(tl.trans(tl.where(inside, dz, 0.0).to(t.dtype)), t, db)
            if GATED:
                db2 = tl.dot(tl.trans(tl.where(inside, dz2, 0.0).to(t.dtype)), t, db2)
        dbias += tl.where(inside, dz, 0.0)  # past the end dy is 0, but 0 times an infinite derivative is NaN
    if u_ptr is not None:
        at = da_ptr + strip * R * H + ranks[:, None] * H + columns[None, :]
        tl.store(at, da, mask=(ranks < R)[:, None] & within)
    if t_ptr is not None:
        at = db_ptr + (strip * (PARTS * H) + columns[:, None]) * T + of_t[None, :]
        inside_b = tl.trans(within) & (of_t < T)[None, :]
        tl.store(at, db, mask=inside_b)
        if GATED:
            tl.store(at + H * T, db2, mask=inside_b)
    if dbias_ptr is not None:
        at = partial_ptr + strip * (PARTS * H) + columns
        tl.store(at, tl.sum(dbias, 0), mask=columns < H)
        if GATED:
            tl.store(at + H, tl.sum(dbias2, 0), mask=columns < H)
        if arrive(arrived_ptr, tile):
            strips = tl.num_programs(1)
            sum_strips(partial_ptr, dbias_ptr, columns, strips, PARTS * H, columns < H, ADD, BLOCK_S, BLOCK_H)
            if GATED:
                sum_strips(partial_ptr, dbias_ptr, columns + H, strips, PARTS * H, columns < H, ADD, BLOCK_S, BLOCK_H)
            tl.store(arrived_ptr + tile, 0)


# ---- tiles: from the shape and the device, never by trial ----


def _forward_tiles(M: int, H: int, fp8: bool) -> ColumnTiles:
    """Give a thread 8 values where tiles are full or rows short, 16 where the last tile of each row is partly idle."""
    block_h = min(power_of_two(H), 512)
    values = 1024 if H <= 64 or H % 512 == 0 or fp8 else 2048
    if fp8 and H <= FP8_RUN:  # encoding takes registers, and whole runs
        block_h, values = FP8_RUN, 512
    return ColumnTiles(values // block_h, block_h, ceil_div(H, block_h), ceil_div(M, values // block_h), 0, 4)


def _backward_tiles(M: int, H: int, gated: bool, fp8: bool, multiprocessors: int) -> ColumnTiles:
    """Return as many strips as the GPU holds programs at a time, each with the loads of three blocks in flight."""
    if H <= 64:
        block_h = FP8_RUN if fp8 else power_of_two(H)
        block_m, num_warps, resident, stages = 2048 // block_h, 8, 2, 4
    elif gated and not fp8 and ceil_div(H, 512) * 512 <= 1.05 * H:
        block_m, block_h, num_warps, resident, stages = 4, 512, 4, 2, 3
    else:
        block_m, block_h, num_warps, resident, stages = 8, 128, 2, 6, 3
    if fp8:  # decoding takes registers: fewer values a thread
        block_m, num_warps, stages = block_m // 2, max(num_warps, 4), 1
    across = ceil_div(H, block_h)
    strips = max(1, min(ceil_div(M, block_m), resident * multiprocessors // across))
    rows = ceil_div(ceil_div(M, strips), block_m) * block_m
    return ColumnTiles(block_m, block_h, across, ceil_div(M, rows), rows, num_warps, stages)


def _widen_to_groups(t: ColumnTiles, threshold: int) -> ColumnTiles:
    """Widen tiles to GROUP columns, which share random bits: as many values, of fewer rows at a time."""
    if not threshold or t.block_h >= GROUP:
        return t
    return t._replace(block_m=max(1, t.block_m * t.block_h // GROUP), block_h=GROUP)


@lru_cache(1024)
def _bind_forward(
    act: Activation, H: int, x_row: int, linear_row: int | None, options: ActivationOptions, block_m: int, block_h: int,
    num_warps: int,
) -> Bound:  # fmt: skip
    numbers = options.clamp, options.linear_offset, *probability(options.threshold)
    align = known_align(H, x_row, linear_row or 0)
    fixed = H, x_row, linear_row, *numbers, act.forward, act.gated, options.interleaved, FP8_RUN, align, block_m, block_h
    bound: Bound = _forward_kernel.bind(*fixed, num_warps=num_warps)
    return bound


@lru_cache(4096)
def _forward_plan(
    act: Activation, M: int, H: int, x_row: int, linear_row: int | None, fp8: bool, options: ActivationOptions
) -> tuple[Grid, Bound]:  # fmt: skip
    """`options`: without a seed."""
    threshold = options.threshold
    tiles = _widen_to_groups(_forward_tiles(M, H, fp8), threshold)
    if threshold and not fp8 and tiles.block_h == 512 and not H % 1024:  # a thread's two rows share their columns' random work
        tiles = tiles._replace(block_h=1024, across=H // 1024)
    bound = _bind_forward(act, H, x_row, linear_row, options, tiles.block_m, tiles.block_h, tiles.num_warps)
    return grid_of(tiles.across, ceil_div(M, tiles.block_m)), bound


@lru_cache(1024)
def bind_backward(
    act: Activation, H: int, rows: Rows, options: ActivationOptions, add: bool,
    tile: tuple[int, int, int, int], ranks: tuple[int, int] = (0, 0),
) -> Bound:  # fmt: skip
    (dy_row, x_row, linear_row), (block_m, block_h, num_warps, stages) = rows, tile
    block_s = max(1, 1024 * num_warps // block_h)  # the last program sums 32 values a thread at once
    blocks = block_m, block_h, block_s, *[max(16, power_of_two(rank)) for rank in ranks]  # what tensor cores take
    bound: Bound = _backward_kernel.bind(
        H, dy_row, x_row, linear_row, *ranks, options.clamp, options.linear_offset, *probability(options.threshold),
        act.forward, act.derivative, act.masks, act.gated, options.interleaved, FP8_RUN,
        known_align(H, dy_row, x_row, linear_row or 0), add, *blocks, stages, num_warps=num_warps,
    )  # fmt: skip
    return bound


@lru_cache(4096)
def _backward_plan(
    act: Activation, M: int, H: int, rows: Rows, fp8: bool, options: ActivationOptions, add: bool, device: torch.device
) -> tuple[ColumnTiles, Bound]:  # fmt: skip
    """`options`: without a seed."""
    t = _widen_to_groups(_backward_tiles(M, H, act.gated, fp8, processors(device)), options.threshold)
    if options.interleaved:  # pairs are taken apart and joined in registers
        t = t._replace(num_warps=2 * t.num_warps)
    tile = t.block_m, t.block_h, t.num_warps, t.stages
    return t, bind_backward(act, H, rows, options, add, tile)


# ---- launches ----


def _of_call(options: ActivationOptions) -> tuple[Activation, ActivationOptions, int | None]:
    """Return the activation, the options that a plan is for, and the seed."""
    number = options.seed_number
    return activation_of(options.activation), options if number is None else options._replace(seed_number=None), number


def activation_forward(
    x: Tensor, bias: Tensor | None, weight: Tensor | None, seed: Tensor | None, linear: Tensor | None,
    options: ActivationOptions, y_type: torch.dtype, codes: Tensor | None = None, exponents: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return y, and write x's fp8 codes and exponents into `codes` and `exponents`."""
    act, options, number = _of_call(options)
    W = x.shape[-1]
    M = x.numel() // W
    H = W // act.parts if linear is None else W
    linear_row = None
    if linear is not None:
        linear, linear_row = as_rows(linear)
    if x.is_contiguous() and H == W:
        x_row, y = W, torch.empty_like(x, dtype=y_type)
    else:
        x, x_row = as_rows(x)
        y = x.new_empty((M, H) if x.dim() == 2 else (*x.shape[:-1], H), dtype=y_type)
    grid, launch = _forward_plan(act, M, H, x_row, linear_row, codes is not None, options)
    launch(grid, x, bias, weight, y, codes, exponents, seed, linear, M, number)
    return y


def activation_forward_fp8(
    x: Tensor, bias: Tensor | None, weight: Tensor | None, seed: Tensor | None, options: ActivationOptions, y_type: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return y, and x as fp8 codes and their exponents."""
    codes, exponents = fp8_empty(x, activation_of(options.activation).parts)
    return activation_forward(x, bias, weight, seed, None, options, y_type, codes, exponents), codes, exponents


def activation_backward(
    dy: Tensor, x: Tensor, exponents: Tensor | None, bias: Tensor | None, weight: Tensor | None, seed: Tensor | None,
    linear: Tensor | None, options: ActivationOptions, need_dx: bool, need_dbias: bool, need_dweight: bool, need_dlinear: bool,
    dx_type: torch.dtype, y_type: torch.dtype | None,
    *, into_dy: bool = False, into: Tensor | None = None, keep_scratch: bool = True,
) -> Gradients:  # fmt: skip
    """Return dx, dbias, dweight, y where `y_type` asks for it, and dlinear. x may be fp8 codes: y is then that of what they hold.

    Args:
        into_dy: dy is the caller's own, contiguous and of type `y_type`: y may be written over it.
        into: a contiguous tensor that dbias, which is needed, is added to.
    """
    act, options, number = _of_call(options)
    dy, dy_row = as_rows(dy)
    x, x_row = as_rows(x)
    H = dy.shape[-1]
    M = dy.numel() // H
    device = x.device
    linear_row = None
    if linear is not None:
        linear, linear_row = as_rows(linear)
    shape = act, M, H, (dy_row, x_row, linear_row), exponents is not None
    tiles, launch = _backward_plan(*shape, options, into is not None, device)
    dx = y = dbias = partials = arrived = dweight = row_sums = dlinear = None
    if need_dx:
        dx = torch.empty_like(x, dtype=dx_type, memory_format=torch.contiguous_format)
    if need_dlinear:
        dlinear = torch.empty_like(dy, dtype=dx_type, memory_format=torch.contiguous_format)
    if y_type is not None:
        y = dy if into_dy and need_dx and _has_thread_per_value(tiles) else dy.new_empty(dy.shape, dtype=y_type)
    if need_dbias:
        assert bias is not None
        dbias = torch.empty_like(bias) if into is None else into
        partials, arrived = (stream_scratch if keep_scratch else new_scratch)(tiles.down * H * act.parts, tiles.across, device)
    if need_dweight:
        assert weight is not None
        dweight = torch.empty_like(weight)
        one = tiles.across == 1  # it sees whole rows
        row_sums = dweight if one else torch.empty((tiles.across, M), dtype=torch.float32, device=device)
    grid = tiles.across, tiles.down, 1
    given = dy, x, exponents, bias, weight, dx, y, dbias, partials, arrived, row_sums, seed, linear, dlinear
    launch(grid, *given, None, None, None, None, M, tiles.rows, number)
    if dweight is not None and row_sums is not None and row_sums is not dweight:
        column_sum(row_sums, dweight)
    return dx, dbias, dweight, y, dlinear


def _has_thread_per_value(tiles: ColumnTiles) -> bool:
    """Whether one thread has each value of a block. Of several, one could read a value of dy after another wrote y there."""
    return tiles.block_m * tiles.block_h >= 32 * tiles.num_warps


# ---- registered ops ----


def _forward_fake(
    x: Tensor, bias: Any, weight: Any, seed: Any, linear: Any, options: ActivationOptions, y_type: torch.dtype
) -> Tensor:
    parts = activation_of(options.activation).parts if linear is None else 1
    return x.new_empty((*x.shape[:-1], x.shape[-1] // parts), dtype=y_type)


def _forward_fp8_fake(
    x: Tensor, bias: Any, weight: Any, seed: Any, options: ActivationOptions, y_type: torch.dtype
) -> tuple[Tensor, ...]:
    y = _forward_fake(x, bias, weight, seed, None, options, y_type)
    return y, *fp8_empty(x, activation_of(options.activation).parts)


def _backward_fake(
    dy: Tensor, x: Tensor, exponents: Any, bias: Any, weight: Any, seed: Any, linear: Any, options: ActivationOptions, *needs: Any
) -> Gradients:
    need_dx, need_dbias, need_dweight, need_dlinear, dx_type, y_type = needs
    return (
        dy.new_empty(x.shape, dtype=dx_type) if need_dx else None,
        bias.new_empty(bias.shape) if need_dbias else None,
        weight.new_empty(weight.shape) if need_dweight else None,
        None if y_type is None else dy.new_empty(dy.shape, dtype=y_type),
        dy.new_empty(dy.shape, dtype=dx_type) if need_dlinear else None,
    )


forward = Registered(
    "bias_activation(Tensor x, Tensor? bias, Tensor? token_weight, Tensor? seed, Tensor? linear, ActivationOptions options, "
    "ScalarType y_type) -> Tensor",
    activation_forward,
    _forward_fake,
    ActivationOptions,
)
forward_fp8 = Registered(
    "bias_activation_fp8(Tensor x, Tensor? bias, Tensor? token_weight, Tensor? seed, ActivationOptions options, "
    "ScalarType y_type) -> (Tensor, Tensor, Tensor)",
    activation_forward_fp8,
    _forward_fp8_fake,
    ActivationOptions,
)
backward = Registered(
    "bias_activation_backward(Tensor dy, Tensor x, Tensor? exponents, Tensor? bias, Tensor? token_weight, Tensor? seed, "
    "Tensor? linear, ActivationOptions options, bool need_dx, bool need_dbias, bool need_dweight, bool need_dlinear, "
    "ScalarType dx_type, ScalarType? y_type) -> (Tensor?, Tensor?, Tensor?, Tensor?, Tensor?)",
    activation_backward,
    _backward_fake,
    ActivationOptions,
    dispatched=partial(activation_backward, keep_scratch=False),
)


def backward_into(
    grads: VectorGrads | None, dy: Tensor, x: Tensor, exponents: Tensor | None, bias: Tensor | None, weight: Tensor | None,
    seed: Tensor | None, linear: Tensor | None, *rest: Any, into_dy: bool = False,
) -> tuple[KernelTargets | None, Gradients]:  # fmt: skip
    """`backward`, with dbias added to its main_grad where `grads` can: to what comes first."""
    if grads is None:
        return None, backward(dy, x, exponents, bias, weight, seed, linear, *rest, into_dy=into_dy)
    into = grads.into(dy, x, exponents, bias, weight, seed, linear)
    if into is None:
        (bias,) = grads.wide(bias)
    target = None if into is None else into.tensors[0]
    return into, backward(dy, x, exponents, bias, weight, seed, linear, *rest, into_dy=into_dy, into=target)


def rebuild_activation(
    x: Tensor, exponents: Tensor | None, bias: Tensor | None, weight: Tensor | None,
    options: ActivationOptions, y_type: torch.dtype,
) -> Tensor:  # fmt: skip
    """Return y of the x that was kept, without a gradient."""
    if exponents is None:
        return forward(x, bias, weight, None, None, options, y_type)  # type: ignore[no-any-return]
    dy = x.new_zeros((*x.shape[:-1], x.shape[-1] // activation_of(options.activation).parts), dtype=y_type)
    no_gradients = False, False, False, False
    y: Tensor = backward(dy, x, exponents, bias, weight, None, None, options, *no_gradients, y_type, y_type)[3]
    return y


# ---- what can be said of a call ----


def activation_unsupported(x: Tensor, act: Activation) -> str | None:
    """Return why the kernels can't take this call, or None."""
    if x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"x is {x.dtype}"
    if act.forward is None:
        return f"activation {act.name!r} was registered without Triton functions"
    if under_functorch():
        return "vmap, a functional derivative or forward-mode differentiation is in force"
    return triton_unsupported(x)


def activation_variant(x: Tensor, act: Activation, save: str, linear: Tensor | None = None) -> str:
    """Describe the kernels of a call and their tiles."""
    H = x.shape[-1] // (act.parts if linear is None else 1)
    M = x.numel() // max(x.shape[-1], 1)
    if not M * H:
        return "the PyTorch formula, as there is nothing to do"
    fp8 = save == "fp8"
    forward, backward = _forward_tiles(M, H, fp8), _backward_tiles(M, H, act.gated, fp8, processors(x.device))
    return (
        f"forward in blocks of {forward.block_m} x {forward.block_h}, {forward.down * forward.across} programs; "
        f"backward in {backward.down} strips of {backward.rows} rows x {backward.across} tiles of {backward.block_h} columns, "
        f"{backward.down * backward.across} programs, the bias gradient in the same kernel; x saved as {save!r}"
    )
