"""Column sums, mostly without a second kernel: each program sums its strip of rows, and the last to arrive sum the strips.

Where programs own tiles of columns, the last program of a tile sums its strips (`arrive`, `sum_strips`). Where programs own whole
rows, the last few to arrive share the columns (`join_helpers`, `share_strips`, `leave_helpers`); where all programs run at the
same time, all share them. So few programs wait (`helper_count`) that the GPU has room for those they wait for. `column_sum` is a
kernel of its own, for gradients whose kernel can't finish its sums.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from torch import Tensor

from onepass.kernels import grid_sync
from onepass.kernels.language import device_function, tl
from onepass.kernels.launch import Bound, kernel
from onepass.runtime.sizes import ceil_div


class ColumnTiles(NamedTuple):
    """Tiles of block_m rows and block_h columns. In backward a program goes down a strip of rows."""

    block_m: int
    block_h: int
    across: int  # column tiles
    down: int  # blocks of rows in forward, strips of rows in backward
    rows: int  # rows of a strip, in backward
    num_warps: int
    stages: int = 1


@device_function
def arrive(arrived_ptr, tile):
    """Count this program in after it stored its partials. Return whether it is its tile's last, and sees all partials."""
    return arrive_at(arrived_ptr + tile, tl.num_programs(1))


@device_function
def arrive_at(counter_ptr, programs):
    """`arrive` of this many programs at a counter of their own."""
    tl.debug_barrier()  # all of this program's partials are written before it counts itself in
    return tl.atomic_add(counter_ptr, 1, sem="acq_rel") == programs - 1


@device_function
def add_strips(partial_ptr, columns, STRIPS, WIDTH, inside, BLOCK_S: tl.constexpr, BLOCK_H: tl.constexpr):
    """Return the sums of the strips' partials of these columns, in the order of strips. Partials are WIDTH apart."""
    total = tl.zeros([BLOCK_S, BLOCK_H], tl.float32)
    for first in range(0, STRIPS, BLOCK_S):
        strips = first + tl.arange(0, BLOCK_S)
        mask = (strips < STRIPS)[:, None] & inside[None, :]
        at = partial_ptr + strips[:, None] * WIDTH + columns[None, :]
        total += tl.load(at, mask=mask, other=0.0, cache_modifier=".cg")  # others wrote it: not from this multiprocessor's L1
    return tl.sum(total, 0)


@device_function
def sum_strips(
    partial_ptr, out_ptr, columns, STRIPS, WIDTH, inside, ADD: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_H: tl.constexpr
):  # fmt: skip
    """Store `add_strips` in out. ADD: add to out, a main_grad, in fp32 and round once."""
    result = add_strips(partial_ptr, columns, STRIPS, WIDTH, inside, BLOCK_S, BLOCK_H)
    if ADD:
        result += tl.load(out_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + columns, result, mask=inside)


@device_function
def helper_count():
    """Return how many programs share the last sums: at most half, so that two ending kernels leave each other room."""
    return tl.maximum(1, tl.minimum(128, tl.num_programs(0) // 2))


@device_function
def join_helpers(arrived_ptr, programs, helpers):
    """Count this program in after it stored its partials.

    The last to arrive are the helpers: they wait for all, and get their number among them. Others get a negative number.
    """
    tl.debug_barrier()  # all of this program's partials are written before it counts itself in
    helper = tl.atomic_add(arrived_ptr, 1, sem="acq_rel") - (programs - helpers)
    if helper >= 0:
        while tl.atomic_add(arrived_ptr, 0, sem="acquire") < programs:
            grid_sync.yield_to_programs()
    return helper


@device_function
def share_strips(
    partial_ptr, out_ptr, other_ptr, helper, helpers, STRIPS, H,
    ADD: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """`share_tiles`; with few strips and wide rows in tiles of one strip and many columns, which makes fewer loads in sequence.

    With half as many helpers as strips, a helper has about H / (16 STRIPS) tiles of 32 columns, half as many of 64, or one wide
    tile of STRIPS turns.
    """
    if STRIPS * STRIPS * 16 <= H:  # 4 or 8 values a thread at a time: more of them spill
        share_tiles(partial_ptr, out_ptr, other_ptr, helper, helpers, STRIPS, H, ADD, 1, 8 * BLOCK_S)
    else:
        share_tiles(partial_ptr, out_ptr, other_ptr, helper, helpers, STRIPS, H, ADD, BLOCK_S, BLOCK_H)


@device_function
def share_tiles(
    partial_ptr, out_ptr, other_ptr, helper, helpers, STRIPS, H,
    ADD: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Sum this helper's share of the H columns of out and of other, or of the one that is not None.

    Each column is the sum of its STRIPS partials, in their order. A row of partials has out's columns, then other's. ADD: add to
    what is there.
    """
    WIDTH = H * 2 if out_ptr is not None and other_ptr is not None else H
    if out_ptr is not None:
        share_columns(partial_ptr, out_ptr, helper, helpers, STRIPS, WIDTH, H, ADD, BLOCK_S, BLOCK_H)
    if other_ptr is not None:
        share_columns(partial_ptr + WIDTH - H, other_ptr, helper, helpers, STRIPS, WIDTH, H, ADD, BLOCK_S, BLOCK_H)


@device_function
def share_columns(
    partial_ptr, out_ptr, helper, helpers, STRIPS, WIDTH, H, ADD: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_H: tl.constexpr
):  # fmt: skip
    """Sum this helper's share of out's H columns, each of its STRIPS partials. Rows of partials are WIDTH apart."""
    for tile in range(helper, tl.cdiv(H, BLOCK_H), helpers):
        columns = tile * BLOCK_H + tl.arange(0, BLOCK_H)
        sum_strips(partial_ptr, out_ptr, columns, STRIPS, WIDTH, columns < H, ADD, BLOCK_S, BLOCK_H)


@device_function
def leave_helpers(arrived_ptr, helpers):
    """Return whether this helper is the last to leave. The last one sets the two counters back to zero."""
    tl.debug_barrier()
    last = tl.atomic_add(arrived_ptr + 1, 1, sem="acq_rel") == helpers - 1
    if last:
        tl.store(arrived_ptr, 0)
        tl.store(arrived_ptr + 1, 0)
    return last


# ---- sums in a kernel of their own ----

BLOCK_S, BLOCK_M = 128, 16  # 6 us for 132 x 4096 on an H200, where PyTorch's sum and cast take 16


@kernel
def _column_sum_kernel(partial_ptr, out_ptr, S, M, BLOCK_S: tl.constexpr, BLOCK_M: tl.constexpr):
    columns = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    total = tl.zeros([BLOCK_S, BLOCK_M], tl.float32)
    for first in range(0, S, BLOCK_S):
        rows = first + tl.arange(0, BLOCK_S)
        inside = (rows < S)[:, None] & (columns < M)[None, :]
        total += tl.load(partial_ptr + rows.to(tl.int64)[:, None] * M + columns[None, :], mask=inside, other=0.0)
    tl.store(out_ptr + columns, tl.sum(total, 0), mask=columns < M)


@lru_cache
def _bound() -> Bound:
    bound: Bound = _column_sum_kernel.bind(BLOCK_S, BLOCK_M, num_warps=8)
    return bound


def column_sum(partial: Tensor, out: Tensor) -> Tensor:
    """Sum fp32 partials [S, M] over S into out [M], always in the same order."""
    S, M = partial.shape
    _bound()((ceil_div(M, BLOCK_M), 1, 1), partial, out, S, M)
    return out
