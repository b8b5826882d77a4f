"""softmax's kernels: whole rows in registers, several narrow ones to a program."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from onepass.kernels.language import device_function, tl
from onepass.kernels.launch import Bound, kernel
from onepass.kernels.layout import as_rows
from onepass.kernels.rows import aligned, inside_row, known_align, still_packed
from onepass.runtime.sizes import ceil_div, power_of_two

WIDEST = 16384  # columns of a row that one program holds: 32 values for each of 512 threads
LOG2_E = tl.constexpr(1.4426950408889634)


class SoftmaxOptions(NamedTuple):
    scale: float
    causal: bool


# ---- kernels ----


@device_function
def _reached(columns, last, RUN: tl.constexpr):
    """Which columns of rows that end at `last` are loaded: whole runs of 16 bytes, so that loads stay wide."""
    return (columns // RUN * RUN)[None, :] <= last[:, None]


@device_function
def _mask_rows(rows, lies, LEVELS: tl.constexpr):
    """Where the mask's rows start: ROW apart, MIDDLE_STEP after every INNER of them, OUTER_STEP after every MIDDLE of those."""
    INNER, MIDDLE, ROW, MIDDLE_STEP, OUTER_STEP = lies
    if LEVELS == 1:
        return rows.to(tl.int64) * ROW
    else:
        outer = rows // INNER
        start = (rows - outer * INNER).to(tl.int64) * ROW
        if LEVELS == 2:
            return start + outer.to(tl.int64) * MIDDLE_STEP
        else:
            outermost = outer // MIDDLE
            middle = (outer - outermost * MIDDLE).to(tl.int64)
            return start + middle * MIDDLE_STEP + outermost.to(tl.int64) * OUTER_STEP


@device_function
def _softmax_rows(
    x_ptr, mask_ptr, y_ptr, M, S, C, X_ROW, scale, mask_lies, MASK_LEVELS: tl.constexpr, MASK_COLUMN: tl.constexpr,
    CAUSAL: tl.constexpr, WHOLE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """BLOCK_M rows, of which all that is left in lies in the first BLOCK_C columns."""
    PARTLY: tl.constexpr = CAUSAL or mask_ptr is not None  # some scores are left out
    RUN: tl.constexpr = 128 // x_ptr.dtype.element_ty.primitive_bitwidth
    columns = tl.arange(0, BLOCK_C)
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    narrow_rows = rows.to(M.dtype)  # a division of 64 bits takes a hundred instructions
    real = (rows < M)[:, None]
    inside = real & inside_row(columns, C, WHOLE)[None, :]
    reached, last = inside, tl.zeros([BLOCK_M], tl.int32) + C - 1
    if CAUSAL:
        last = tl.minimum((narrow_rows % S).to(tl.int32), C - 1)
        reached = inside & _reached(columns, last, RUN)
    x = tl.load(x_ptr + rows[:, None] * X_ROW + columns[None, :], mask=reached, other=0.0, eviction_policy="evict_first")
    z = x.to(tl.float32) * scale
    if CAUSAL or not WHOLE:
        z = tl.where(columns[None, :] > last[:, None], float("-inf"), z)
    if mask_ptr is not None:
        at = _mask_rows(narrow_rows, mask_lies, MASK_LEVELS)
        at, there = at[:, None], real
        if MASK_COLUMN:  # and not one for a whole row
            # contiguous no further than a thread has of x: else threads exchange what they read
            at, there = tl.max_contiguous(at + columns[None, :], [1, RUN]), reached
        z = tl.where(tl.load(mask_ptr + at, mask=there, other=True), float("-inf"), z)
    e = tl.exp2((z - tl.max(z, 1)[:, None]) * LOG2_E)
    total = tl.sum(e, 1)
    y_at = y_ptr + rows[:, None] * C + columns[None, :]
    inverse = 1.0 / total
    inverse = tl.fma(inverse, tl.fma(-total, inverse, 1.0), inverse)  # `/` may be two units off, which dx would show
    tl.store(y_at, e * inverse[:, None], mask=inside)
    if PARTLY:
        # What is left out is 0 by now, but in rows that are NaN: that hold NaN or +inf, or -inf alone, or have nothing left in.
        # Those are rare, and to remember what is left out takes two instructions a value: it is found out again.
        nan = total != total
        if tl.max(nan.to(tl.int32), 0) > 0:
            tl.debug_barrier()  # after the store above
            left_out = columns[None, :] > tl.where(nan, last, BLOCK_C)[:, None]
            if mask_ptr is not None:
                left_out = left_out | tl.load(mask_ptr + at, mask=there & nan[:, None], other=False)
            tl.store(y_at, tl.where(left_out, 0.0, float("nan")), mask=inside & nan[:, None])


@kernel
def _softmax_kernel(
    x_ptr, mask_ptr, y_ptr, M, S,  # S: rows of a matrix, which causal rows are counted in
    C, X_ROW, scale,
    MASK_INNER, MASK_MIDDLE, MASK_ROW, MASK_MIDDLE_STEP, MASK_OUTER_STEP,  # rows of the mask: see _mask_rows
    MASK_LEVELS: tl.constexpr, MASK_COLUMN: tl.constexpr, CAUSAL: tl.constexpr, WHOLE: tl.constexpr,
    ALIGN: tl.constexpr, MASK_ALIGN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    C, X_ROW, MASK_ROW = aligned(C, ALIGN), aligned(X_ROW, ALIGN), aligned(MASK_ROW, MASK_ALIGN)
    MASK_MIDDLE_STEP, MASK_OUTER_STEP = aligned(MASK_MIDDLE_STEP, MASK_ALIGN), aligned(MASK_OUTER_STEP, MASK_ALIGN)
    lies = MASK_INNER, MASK_MIDDLE, MASK_ROW, MASK_MIDDLE_STEP, MASK_OUTER_STEP
    if CAUSAL and BLOCK_M == 1:
        HALF: tl.constexpr = BLOCK_C // 2
        if tl.program_id(0) % S < HALF:  # columns that are not read take their time too: these are left away
            _softmax_rows(
                x_ptr, mask_ptr, y_ptr, M, S, C, X_ROW, scale, lies, MASK_LEVELS, MASK_COLUMN, True, True, BLOCK_M, HALF
            )  # fmt: skip
            columns = HALF + tl.arange(0, HALF)
            zeros = tl.zeros([HALF], tl.float32)
            tl.store(y_ptr + tl.program_id(0).to(tl.int64) * C + columns, zeros, mask=columns < C)
        else:
            _softmax_rows(
                x_ptr, mask_ptr, y_ptr, M, S, C, X_ROW, scale, lies, MASK_LEVELS, MASK_COLUMN, True, WHOLE, BLOCK_M, BLOCK_C
            )  # fmt: skip
    else:
        _softmax_rows(
            x_ptr, mask_ptr, y_ptr, M, S, C, X_ROW, scale, lies, MASK_LEVELS, MASK_COLUMN, CAUSAL, WHOLE, BLOCK_M, BLOCK_C
        )  # fmt: skip


@kernel
def _softmax_backward_kernel(
    dy_ptr, y_ptr, dx_ptr, M, S,  # S: rows of a matrix, which causal rows are counted in
    C, DY_ROW, Y_ROW, scale,
    CAUSAL: tl.constexpr, WHOLE: tl.constexpr, ALIGN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    C, DY_ROW, Y_ROW = aligned(C, ALIGN), aligned(DY_ROW, ALIGN), aligned(Y_ROW, ALIGN)
    RUN: tl.constexpr = 128 // y_ptr.dtype.element_ty.primitive_bitwidth
    columns = tl.arange(0, BLOCK_C)
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = (rows < M)[:, None] & inside_row(columns, C, WHOLE)[None, :]
    reached = inside
    if CAUSAL:
        reached = inside & _reached(columns, rows.to(M.dtype) % S, RUN)
    y = tl.load(y_ptr + rows[:, None] * Y_ROW + columns[None, :], mask=reached, other=0.0)
    dy = tl.load(dy_ptr + rows[:, None] * DY_ROW + columns[None, :], mask=reached, other=0.0)
    # what is left out counts for nothing, were dy inf or NaN there
    total = tl.sum(tl.where(y.to(tl.float32) == 0, 0.0, y.to(tl.float32) * dy.to(tl.float32)), 1)
    y, dy = still_packed(y).to(tl.float32), still_packed(dy).to(tl.float32)
    dx = tl.where(y == 0, 0.0, y * (dy - total[:, None])) * scale
    tl.store(dx_ptr + rows[:, None] * C + columns[None, :], dx, mask=inside)


# ---- how a mask lies ----


class MaskLayout(NamedTuple):
    """Rows of a mask over all rows of x, as `_mask_rows` finds them. A stride is 0 where the mask is broadcast.

    The column stride is 1 or 0.
    """

    levels: int
    inner: int
    middle: int
    row: int
    middle_step: int
    outer_step: int
    column: int

    @property
    def align(self) -> int:
        return known_align(self.row, self.middle_step, self.outer_step)


_NO_MASK = MaskLayout(0, 1, 1, 0, 0, 0, 0)


@lru_cache(4096)
def mask_layout(shape: tuple[int, ...], stride: tuple[int, ...], x_shape: tuple[int, ...]) -> MaskLayout | None:
    """The layout of a mask that is broadcast to x's shape; None where its rows lie in more than three levels or are not rows."""
    missing = len(x_shape) - len(shape)
    steps = [0] * missing + [0 if size == 1 else step for size, step in zip(shape, stride, strict=True)]
    levels: list[tuple[int, int]] = []  # sizes and strides, the innermost last; neighbours that lie evenly are one
    for size, step in zip(x_shape[:-1], steps[:-1], strict=True):
        if size == 1:
            continue
        if levels and levels[-1][1] == size * step:
            size *= levels.pop()[0]
        levels.append((size, step))
    if len(levels) > 3 or steps[-1] > 1:
        return None
    (_, outer_step), (middle, middle_step), (inner, row) = [(1, 0)] * (3 - len(levels)) + levels
    return MaskLayout(max(1, len(levels)), inner, middle, row, middle_step, outer_step, steps[-1])


def _mask_as_rows(mask: Tensor, shape: torch.Size) -> tuple[Tensor, MaskLayout]:
    """The mask where it lies, or else a copy, which is of x's size where nothing less will do."""
    lies = mask_layout(mask.shape, mask.stride(), shape)
    if lies is None:
        mask = mask.contiguous()
        lies = mask_layout(mask.shape, mask.stride(), shape)
    if lies is None:
        mask = mask.expand(shape).contiguous()
        lies = mask_layout(mask.shape, mask.stride(), shape)
        assert lies is not None
    return mask, lies


# ---- tiles: from the shape, never by trial ----


class SoftmaxTiles(NamedTuple):
    block_m: int  # rows a program
    block_c: int
    num_warps: int
    resident: int = 0  # programs a multiprocessor: the assembler is told to leave registers for so many, 32 warps in all


def softmax_tiles(C: int) -> SoftmaxTiles:
    """32 values a thread: what a thread does once, as to reduce and to divide, is a third of its work with half as many."""
    block_c = power_of_two(C)
    if block_c <= 1024:
        return SoftmaxTiles(2048 // block_c, block_c, 2)
    num_warps = block_c // 1024
    return SoftmaxTiles(1, block_c, num_warps, 32 // num_warps)


@lru_cache(4096)
def _forward_plan(C: int, x_row: int, mask: MaskLayout, options: SoftmaxOptions) -> tuple[int, Bound]:
    """Rows a program, and the kernel."""
    tiles, align = softmax_tiles(C), known_align(C, x_row)
    spills = align == 1 or (mask.levels and (options.causal or tiles.block_c > C))  # in the registers that `resident` leaves
    bound: Bound = _softmax_kernel.bind(
        C, x_row, options.scale, *mask[1:-1], mask.levels, mask.column, options.causal, tiles.block_c == C, align, mask.align,
        tiles.block_m, tiles.block_c, num_warps=tiles.num_warps, resident=0 if spills else tiles.resident,
    )  # fmt: skip
    return tiles.block_m, bound


@lru_cache(4096)
def _backward_plan(C: int, dy_row: int, y_row: int, wide: bool, options: SoftmaxOptions) -> tuple[int, Bound]:
    """Rows a program, and the kernel. `wide`: y is fp32."""
    tiles, align = softmax_tiles(C), known_align(C, dy_row, y_row)
    spills = align == 1 or wide
    bound: Bound = _softmax_backward_kernel.bind(
        C, dy_row, y_row, options.scale, options.causal, tiles.block_c == C, align,
        tiles.block_m, tiles.block_c, num_warps=tiles.num_warps, resident=0 if spills else tiles.resident,
    )  # fmt: skip
    return tiles.block_m, bound


# ---- calls ----


def softmax_forward(x: Tensor, mask: Tensor | None, options: SoftmaxOptions) -> Tensor:
    C = x.shape[-1]
    M = x.numel() // C
    S = x.shape[-2] if options.causal else 1
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    lies = _NO_MASK
    if mask is not None:
        mask, lies = _mask_as_rows(mask, x.shape)
    x, x_row = as_rows(x)
    block_m, launch = _forward_plan(C, x_row, lies, options)
    launch((ceil_div(M, block_m), 1, 1), x, mask, y, M, S)
    return y


def softmax_backward(dy: Tensor, y: Tensor, options: SoftmaxOptions) -> Tensor:
    C = y.shape[-1]
    M = y.numel() // C
    S = y.shape[-2] if options.causal else 1
    dx = torch.empty_like(y, memory_format=torch.contiguous_format)
    dy, dy_row = as_rows(dy)
    y, y_row = as_rows(y)
    block_m, launch = _backward_plan(C, dy_row, y_row, y.dtype is torch.float32, options)
    launch((ceil_div(M, block_m), 1, 1), dy, y, dx, M, S)
    return dx
