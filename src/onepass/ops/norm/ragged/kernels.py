"""Both norms of many tensors of different widths at once: one launch forward, one backward.

Each tensor, a lane, has rows of its own width, wherever they lie. The kernels find a lane's addresses in a table on the device,
as distances from the first lane's; so slices of one tensor have the same table wherever it lies. A program works on tiles of
about the same number of values whatever the width: the kernel holds a branch for each power of two that is there, and each lane
takes the branch of the least that is not below its width. Rows of more than PIECE are read in pieces, again from the caches.

Forward   a program has one tile. A list says which lane and rows of a span of rows each program has: for more rows there are more
          spans, and the list is the same.
Backward  a lane's rows fall to as many programs as its width is of all widths; each sums dweight and dbias of its rows, and the
          last of a lane's programs to arrive add those up, in their order. Wide lanes come first: their last sums are hidden by
          the others' work.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onepass.kernels.column_reduce import join_helpers, leave_helpers, share_strips
from onepass.kernels.device_tables import device_zeros
from onepass.kernels.language import device_function, tl
from onepass.kernels.launch import Bound, grid_of, kernel
from onepass.kernels.rows import aligned, load_block, load_scale, load_vector
from onepass.ops.norm.ragged.lanes import LanePlan, Lanes, addresses, check_gradients, check_lanes, layout_of, plan_for
from onepass.runtime.sizes import ceil_div, processors

PIECE = tl.constexpr(2048)  # the longest row of one tile
LONG = tl.constexpr(12)  # the kind of longer rows; other kinds are the exponents of their powers of two
_NARROWEST = 4  # of those: no tile is less than 16 wide
_SPAN = 64  # rows of the tallest tile
_RESIDENT = 3  # programs of the backward a multiprocessor
_TURNS = tl.constexpr(4)  # tiles that are worth a program with sums of its own
_FORWARD_TILE = _BACKWARD_TILE = 2048  # values
_SHARE_S, _SHARE_H = 128, 32  # strips and columns of a tile of the last sums
_LAUNCHES = 4  # programs of the backward, for each that runs at a time: lanes share them out more evenly


class _ForwardLane(NamedTuple):
    """Where a lane's rows and vectors begin, and how far its rows are apart. What there is none of is None."""

    x_ptr: Any
    x_row: Any
    weight_ptr: Any
    bias_ptr: Any
    y_ptr: Any
    y_row: Any
    mean_ptr: Any
    rstd_ptr: Any
    width: Any


class _BackwardLane(NamedTuple):
    """The same of backward."""

    dy_ptr: Any
    dy_row: Any
    x_ptr: Any
    x_row: Any
    weight_ptr: Any
    mean_ptr: Any
    rstd_ptr: Any
    dx_ptr: Any
    dx_row: Any
    width: Any


@device_function
def _place(M, width, column, TOTAL, PACKED: tl.constexpr):
    """Return where a lane begins in a tensor of all, side by side or one after the other, and how far its rows are apart."""
    if PACKED:
        return column, TOTAL
    else:
        return M * column, width


@device_function
def _forward_tile(lane, M, first, eps, BLOCK_M: tl.constexpr, WIDTH: tl.constexpr):
    columns = tl.arange(0, WIDTH)
    within = columns < lane.width
    rows = first + tl.arange(0, BLOCK_M)
    real = rows < M
    inside = real[:, None] & within[None, :]
    x = load_block(lane.x_ptr, rows, columns, lane.x_row, inside)
    weight = load_scale(lane.weight_ptr, columns, within, False)[None, :]
    bias = load_vector(lane.bias_ptr, columns, within)[None, :]
    H = lane.width.to(tl.float32)
    if lane.mean_ptr is not None:
        mean = tl.sum(x, 1) / H
        x = tl.where(within[None, :], x - mean[:, None], 0.0)
        tl.store(lane.mean_ptr + rows, mean, mask=real)
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, 1) / H + eps)
    tl.store(lane.rstd_ptr + rows, rstd, mask=real)
    at = (rows * lane.y_row)[:, None] + columns[None, :]
    tl.store(lane.y_ptr + at, x * rstd[:, None] * weight + bias, mask=inside)


@device_function
def _forward_long(lane, row, eps):
    """One row, in pieces that are read again for each of its statistics."""
    lanes = tl.arange(0, PIECE)
    x_ptr = lane.x_ptr + row * lane.x_row
    y_ptr = lane.y_ptr + row * lane.y_row
    width = lane.width
    H = width.to(tl.float32)
    mean = 0.0
    if lane.mean_ptr is not None:
        sums = tl.zeros([PIECE], tl.float32)
        for start in range(0, width, PIECE):
            sums += tl.load(x_ptr + start + lanes, mask=start + lanes < width, other=0.0).to(tl.float32)
        mean = tl.sum(sums, 0) / H
        tl.store(lane.mean_ptr + row, mean)
    squares = tl.zeros([PIECE], tl.float32)
    for start in range(0, width, PIECE):
        within = start + lanes < width
        x = tl.load(x_ptr + start + lanes, mask=within, other=0.0).to(tl.float32)
        if lane.mean_ptr is not None:
            x = tl.where(within, x - mean, 0.0)
        squares += x * x
    rstd = 1.0 / tl.sqrt(tl.sum(squares, 0) / H + eps)
    tl.store(lane.rstd_ptr + row, rstd)
    for start in range(0, width, PIECE):
        columns = start + lanes
        within = columns < width
        x = tl.load(x_ptr + columns, mask=within, other=0.0).to(tl.float32)
        if lane.mean_ptr is not None:
            x -= mean
        y = x * rstd * load_scale(lane.weight_ptr, columns, within, False)
        tl.store(y_ptr + columns, y + load_vector(lane.bias_ptr, columns, within), mask=within)


@kernel
def _lanes_forward_kernel(
    x_ptr, weight_ptr, bias_ptr, y_ptr, mean_ptr, rstd_ptr, lanes_ptr, at_ptr,
    M, L, SPAN, TOTAL, eps, PACKED: tl.constexpr, KINDS: tl.constexpr, TILE: tl.constexpr, TALLEST: tl.constexpr,
    ALIGN: tl.constexpr,
):  # fmt: skip
    # of lanes: [kind, width, column, x's row] x L, then each program's lane and first row; at: [x, weight, bias] x L
    mine = tl.load(lanes_ptr + 4 * L + tl.program_id(0))
    number = mine >> 32
    span = tl.program_id(1) + 65535 * tl.program_id(2).to(tl.int64)
    first = span * SPAN + (mine & 0xFFFFFFFF)
    if first < M:
        lanes_ptr += number
        at_ptr += number
        kind = tl.load(lanes_ptr)
        width = aligned(tl.load(lanes_ptr + L), ALIGN)
        column = aligned(tl.load(lanes_ptr + 2 * L), ALIGN)
        x_row = aligned(tl.load(lanes_ptr + 3 * L), ALIGN)
        x_at = aligned(tl.load(at_ptr), ALIGN)
        weight_at = aligned(tl.load(at_ptr + L), ALIGN)
        bias_at = aligned(tl.load(at_ptr + 2 * L), ALIGN)
        stats_at = number * M
        y_at, y_row = _place(M, width, column, aligned(TOTAL, ALIGN), PACKED)
        lane = _ForwardLane(
            x_ptr + x_at, x_row, None if weight_ptr is None else weight_ptr + weight_at,
            None if bias_ptr is None else bias_ptr + bias_at, y_ptr + y_at, y_row,
            None if mean_ptr is None else mean_ptr + stats_at, rstd_ptr + stats_at, width,
        )  # fmt: skip
        for k in tl.static_range(4, 12):
            if (KINDS >> k) & 1:  # noqa: SIM102  (known to the compiler; what follows is not)
                if kind == k:
                    _forward_tile(
                        lane, M, first, eps,
                        (TALLEST if TILE >> k > TALLEST else TILE >> k) if TILE >> k else 1, 1 << k,  # 3.5: max is no constant
                    )  # fmt: skip
        if KINDS >> 12:  # noqa: SIM102  (the bit of LONG, the last)
            if kind == LONG:
                _forward_long(lane, first, eps)


@device_function
def _backward_tiles(
    lane, partial_ptr, M, strip, strips, DWEIGHT: tl.constexpr, DBIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dx of every strips-th tile of a lane's rows, and the sums of those rows for dweight and dbias."""
    columns = tl.arange(0, WIDTH)
    within = columns < lane.width
    weight = load_scale(lane.weight_ptr, columns, within, False)[None, :]
    H = lane.width.to(tl.float32)
    dweight = tl.zeros([BLOCK_M, WIDTH], tl.float32)
    dbias = tl.zeros([BLOCK_M, WIDTH], tl.float32)
    for first in tl.range(strip * BLOCK_M, M, strips * BLOCK_M, num_stages=STAGES):
        rows = first + tl.arange(0, BLOCK_M)
        real = rows < M
        inside = real[:, None] & within[None, :]
        dy = load_block(lane.dy_ptr, rows, columns, lane.dy_row, inside)
        z = load_block(lane.x_ptr, rows, columns, lane.x_row, inside)
        rstd = tl.load(lane.rstd_ptr + rows, mask=real, other=0.0)[:, None]
        if lane.mean_ptr is not None:
            z -= tl.load(lane.mean_ptr + rows, mask=real, other=0.0)[:, None]
        z *= rstd  # outside the row this is no 0, but there dy is
        if DWEIGHT:
            dweight += dy * z
        if DBIAS:
            dbias += dy
        g = dy * weight
        dx = g - z * (tl.sum(g * z, 1) / H)[:, None]
        if lane.mean_ptr is not None:
            dx -= (tl.sum(g, 1) / H)[:, None]
        at = (rows * lane.dx_row)[:, None] + columns[None, :]
        tl.store(lane.dx_ptr + at, dx * rstd, mask=inside)
    if DWEIGHT:
        tl.store(partial_ptr + columns, tl.sum(dweight, 0), mask=within)
        partial_ptr += lane.width
    if DBIAS:
        tl.store(partial_ptr + columns, tl.sum(dbias, 0), mask=within)


@device_function
def _backward_long(lane, partial_ptr, M, strip, strips, DWEIGHT: tl.constexpr, DBIAS: tl.constexpr):
    """The same, a row at a time in pieces. There are no registers for sums this wide: the partials themselves are added to."""
    lanes = tl.arange(0, PIECE)
    width = lane.width
    H = width.to(tl.float32)
    for row in range(strip, M, strips):
        dys, xs, dxs = lane.dy_ptr + row * lane.dy_row, lane.x_ptr + row * lane.x_row, lane.dx_ptr + row * lane.dx_row
        rstd = tl.load(lane.rstd_ptr + row)
        mean = tl.load(lane.mean_ptr + row) if lane.mean_ptr is not None else 0.0
        products = tl.zeros([PIECE], tl.float32)
        sum_g = tl.zeros([PIECE], tl.float32)
        for start in range(0, width, PIECE):
            columns = start + lanes
            within = columns < width
            dy = tl.load(dys + columns, mask=within, other=0.0).to(tl.float32)
            z = (tl.load(xs + columns, mask=within, other=0.0).to(tl.float32) - mean) * rstd
            g = dy * load_scale(lane.weight_ptr, columns, within, False)
            products += g * z
            sum_g += g
            again = within & (row != strip)
            if DWEIGHT:
                so_far = tl.load(partial_ptr + columns, mask=again, other=0.0)
                tl.store(partial_ptr + columns, so_far + dy * z, mask=within)
            if DBIAS:
                at = partial_ptr + (width if DWEIGHT else 0) + columns
                tl.store(at, tl.load(at, mask=again, other=0.0) + dy, mask=within)
        product, mean_g = tl.sum(products, 0) / H, tl.sum(sum_g, 0) / H
        for start in range(0, width, PIECE):
            columns = start + lanes
            within = columns < width
            dy = tl.load(dys + columns, mask=within, other=0.0).to(tl.float32)
            z = (tl.load(xs + columns, mask=within, other=0.0).to(tl.float32) - mean) * rstd
            dx = dy * load_scale(lane.weight_ptr, columns, within, False) - z * product
            if lane.mean_ptr is not None:
                dx -= mean_g
            tl.store(dxs + columns, dx * rstd, mask=within)
        tl.debug_barrier()  # this row's sums are there before another thread adds the next row's


@kernel
def _lanes_backward_kernel(
    dy_ptr, x_ptr, weight_ptr, mean_ptr, rstd_ptr, dx_ptr, dweight_ptr, dbias_ptr, partial_ptr, arrived_ptr, lanes_ptr, at_ptr,
    M, L, TOTAL, PACKED: tl.constexpr, KINDS: tl.constexpr, TILE: tl.constexpr, TALLEST: tl.constexpr,
    STAGES: tl.constexpr, SHARE_S: tl.constexpr, SHARE_H: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    # of lanes: [kind, width, column, dy's row, x's row, strips, helpers, partials before] x L, then each program's lane and strip
    DWEIGHT: tl.constexpr = dweight_ptr is not None
    DBIAS: tl.constexpr = dbias_ptr is not None
    mine = tl.load(lanes_ptr + 8 * L + tl.program_id(0))
    number = mine >> 32
    strip = mine & 0xFFFFFFFF
    lanes_ptr += number
    at_ptr += number
    kind = tl.load(lanes_ptr)
    width = aligned(tl.load(lanes_ptr + L), ALIGN)
    column = aligned(tl.load(lanes_ptr + 2 * L), ALIGN)
    dy_row = aligned(tl.load(lanes_ptr + 3 * L), ALIGN)
    x_row = aligned(tl.load(lanes_ptr + 4 * L), ALIGN)
    tall = tl.where(kind == LONG, 1, tl.minimum(TALLEST, tl.maximum(1, TILE >> kind)))
    strips = tl.minimum(tl.load(lanes_ptr + 5 * L), tl.cdiv(M, tall * _TURNS))  # for fewer rows, fewer programs
    if strip < strips:
        dy_at = aligned(tl.load(at_ptr), ALIGN)
        x_at = aligned(tl.load(at_ptr + L), ALIGN)
        weight_at = aligned(tl.load(at_ptr + 2 * L), ALIGN)
        stats_at = number * M
        dx_at, dx_row = _place(M, width, column, aligned(TOTAL, ALIGN), PACKED)
        lane = _BackwardLane(
            dy_ptr + dy_at, dy_row, x_ptr + x_at, x_row, None if weight_ptr is None else weight_ptr + weight_at,
            None if mean_ptr is None else mean_ptr + stats_at, rstd_ptr + stats_at, dx_ptr + dx_at, dx_row, width,
        )  # fmt: skip
        SUMS: tl.constexpr = DWEIGHT + DBIAS
        partials = partial_ptr
        if SUMS > 0:
            partials += aligned(tl.load(lanes_ptr + 7 * L), ALIGN) * SUMS
        own = partials
        if SUMS > 0:
            own += strip * (width * SUMS)
        for k in tl.static_range(4, 12):
            if (KINDS >> k) & 1:  # noqa: SIM102  (known to the compiler; what follows is not)
                if kind == k:
                    _backward_tiles(
                        lane, own, M, strip, strips, DWEIGHT, DBIAS,
                        (TALLEST if TILE >> k > TALLEST else TILE >> k) if TILE >> k else 1, 1 << k, STAGES,  # 3.5: as forward
                    )  # fmt: skip
        if KINDS >> 12:  # noqa: SIM102  (the bit of LONG, the last)
            if kind == LONG:
                _backward_long(lane, own, M, strip, strips, DWEIGHT, DBIAS)
        if SUMS > 0:
            helpers = tl.minimum(tl.load(lanes_ptr + 6 * L), tl.maximum(1, strips // 2)).to(tl.int32)
            programs = strips.to(tl.int32)
            helper = join_helpers(arrived_ptr + 2 * number, programs, helpers)
            if helper >= 0:
                dweights = dweight_ptr
                dbiases = dbias_ptr
                if DWEIGHT:
                    dweights += column
                if DBIAS:
                    dbiases += column
                share_strips(partials, dweights, dbiases, helper, helpers, programs, width.to(tl.int32), False, SHARE_S, SHARE_H)
                leave_helpers(arrived_ptr + 2 * number, helpers)


# ---- who does what: from the lanes' widths and the device, never by trial ----


def kind_of(width: int) -> int:
    return max(_NARROWEST, (width - 1).bit_length()) if width <= PIECE.value else LONG.value


def _tall(kind: int, tile: int) -> int:
    """How many rows a tile of so many values has."""
    return 1 if kind == LONG.value else min(_SPAN, max(1, tile >> kind))


def forward_programs(widths: tuple[int, ...], tile: int) -> tuple[int, list[int]]:
    """The rows of a span, and its programs: lane and first row. Neighbours have the same rows of neighbouring lanes."""
    talls = [_tall(kind_of(width), tile) for width in widths]
    span = max(talls)
    programs = [(first, lane) for lane, tall in enumerate(talls) for first in range(0, span, tall)]
    return span, [lane << 32 | first for first, lane in sorted(programs)]


def backward_shares(widths: tuple[int, ...], multiprocessors: int) -> tuple[list[int], list[int]]:
    """How many programs each lane has, and how many of those may wait for each other at its end.

    One that waits has its place on the GPU, and the one it waits for may have none yet: so they are few in all.
    """
    costs = [max(width, 1 << min(kind_of(width), LONG.value - 1)) for width in widths]
    wanted, whole = _LAUNCHES * _RESIDENT * multiprocessors, sum(costs)
    strips = [max(1, round(wanted * cost / whole)) for cost in costs]
    helpers = [max(1, min(each // 2, multiprocessors // 2 * cost // whole)) for each, cost in zip(strips, costs, strict=True)]
    return strips, helpers


def _branches(widths: tuple[int, ...]) -> int:
    """The kinds that a kernel has branches for, a bit each."""
    return sum(1 << kind for kind in {kind_of(width) for width in widths})


def forward_plan(xs: Lanes, layer: bool, eps: float, packed: bool) -> LanePlan:
    x, layout = xs[0], layout_of(xs)
    widths = tuple(each.shape[-1] for each in xs)
    M, multiple = x.numel() // x.shape[-1], 16 // x.element_size()
    aligned = not _any_odd((*widths, *layout.rows), multiple)
    tile = _FORWARD_TILE if aligned and x.element_size() == 2 else _FORWARD_TILE // 2
    span, programs = forward_programs(widths, tile)
    columns = [0, *accumulate(widths)]
    lanes = (*map(kind_of, widths), *widths, *columns[:-1], *layout.rows, *programs)
    bounds = [
        _bound(_lanes_forward_kernel, 2, 0, len(xs), span, columns[-1], eps, packed, _branches(widths), tile, _SPAN, align)
        for align in (1, multiple)
    ]
    grid = grid_of(len(programs), ceil_div(M, span))
    return LanePlan(layout, M, columns[-1], grid, lanes, 0, multiple, aligned, bounds, {}, {})


def backward_plan(dys: Lanes, xs: Lanes, layer: bool, packed: bool) -> LanePlan:
    x, layout = xs[0], layout_of([*dys, *xs])
    widths = tuple(each.shape[-1] for each in xs)
    strips, helpers = backward_shares(widths, processors(x.device))
    columns, before = [0, *accumulate(widths)], [0, *accumulate(a * b for a, b in zip(strips, widths, strict=True))]
    widest_first = sorted(range(len(widths)), key=lambda lane: -widths[lane])
    programs = [lane << 32 | strip for lane in widest_first for strip in range(strips[lane])]
    lanes = (*map(kind_of, widths), *widths, *columns[:-1], *layout.rows, *strips, *helpers, *before[:-1], *programs)
    M, multiple = x.numel() // x.shape[-1], 16 // x.element_size()
    fixed = len(xs), columns[-1], packed, _branches(widths)
    many = layer and max(widths) > PIECE.value // 2
    bounds = [_backward_bound(fixed, x.element_size() > 2, many, align) for align in (1, multiple)]
    aligned = not _any_odd((*widths, *layout.rows), multiple)
    return LanePlan(layout, M, columns[-1], (len(programs), 1, 1), lanes, before[-1], multiple, aligned, bounds, {}, {})


def _backward_bound(fixed: tuple[Any, ...], wide: bool, many: bool, align: int) -> Bound:
    """`many` registers are needed: for two sums of a long row. Values that are loaded one by one need an address each: they get
    smaller tiles, and nothing is on its way beside."""
    tile, stages = (_BACKWARD_TILE // 2, 1) if align == 1 else (_BACKWARD_TILE, 4 if many and not wide else 3)
    resident = 2 if wide or many else _RESIDENT
    return _bound(_lanes_backward_kernel, 4, resident, *fixed, tile, _SPAN, stages, _SHARE_S, _SHARE_H, align)


def _any_odd(sizes: tuple[int, ...], multiple: int) -> bool:
    return any(size % multiple for size in sizes)


@lru_cache(1024)
def _bound(kernel: Any, num_warps: int, resident: int, *fixed: Any) -> Bound:
    bound: Bound = kernel.bind(*fixed, num_warps=num_warps, resident=resident)
    return bound


# ---- calls ----


def ragged_forward(
    xs: Lanes, weights: Lanes, biases: Lanes, layer: bool, eps: float, packed: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """y, and the rows' means (of LayerNorm) and 1 / deviation."""
    x, L = xs[0], len(xs)
    key = x.shape, x.dtype, x.device, L, layer, eps, packed
    plan, xs = plan_for(key, xs, lambda: check_lanes(xs), lambda: forward_plan(xs, layer, eps, packed))
    M = plan.M
    y = x.new_empty((*x.shape[:-1], plan.total) if packed else M * plan.total)
    rstd = x.new_empty((L, M), dtype=torch.float32)
    mean = torch.empty_like(rstd) if layer else None
    if M:
        (weights, biases), lanes, at, aligned = addresses(plan, (xs,), (weights, biases))
        plan.bounds[aligned](
            plan.grid, xs[0], weights[0] if weights else None, biases[0] if biases else None, y, mean, rstd, lanes, at, M
        )
    return y, x.new_empty(0, dtype=torch.float32) if mean is None else mean, rstd


def ragged_backward(
    dys: Lanes, xs: Lanes, weights: Lanes, mean: Tensor, rstd: Tensor, layer: bool, packed: bool, dweights: bool, dbiases: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dweight and dbias, the latter empty where they are not asked for."""
    x, L = xs[0], len(xs)
    vector_type = weights[0].dtype if weights else x.dtype
    key = x.shape, x.dtype, x.device, L, layer, packed, len(dys), dys[0].dtype, mean.shape, rstd.shape
    plan, given = plan_for(
        key, [*dys, *xs], lambda: check_gradients(dys, xs, mean, rstd, layer), lambda: backward_plan(dys, xs, layer, packed)
    )
    M, total = plan.M, plan.total
    dx = x.new_empty((*x.shape[:-1], total) if packed else M * total)
    make = x.new_empty if M else x.new_zeros
    dweight, dbias = (make(total if asked else 0, dtype=vector_type) for asked in (dweights, dbiases))
    if M:
        (weights,), lanes, at, aligned = addresses(plan, (given[:L], given[L:]), (weights,))
        weight, means = weights[0] if weights else None, mean.contiguous() if layer else None
        partial = arrived = None
        if dweights or dbiases:
            partial = x.new_empty(plan.partials * (dweights + dbiases), dtype=torch.float32)
            arrived = device_zeros(2 * L, x.device)
        plan.bounds[aligned](
            plan.grid, given[0], given[L], weight, means, rstd.contiguous(), dx, dweight if dweights else None,
            dbias if dbiases else None, partial, arrived, lanes, at, M,
        )  # fmt: skip
    return dx, dweight, dbias
