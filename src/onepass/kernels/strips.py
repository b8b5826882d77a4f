"""Column sums that need no second kernel: each program sums its strip of rows, the last to arrive sum the strips.

One program alone sums what belongs to its tile of columns (`arrive`, `sum_strips`). Where programs own whole rows, the last few
to arrive share the columns between them (`join`, `share_strips`, `leave`), or all do, where all run at the same time. Those who
wait are few enough (`some_helpers`) that there is room on the GPU for the ones they wait for.
"""

from __future__ import annotations

from typing import NamedTuple

from onepass.kernels import meeting
from onepass.runtime.lang import device_function, tl


class Tiles(NamedTuple):
    """How a pass over rows is cut, in tiles of block_m rows and block_h columns; in backward a program goes down a strip."""

    block_m: int
    block_h: int
    across: int  # column tiles
    down: int  # blocks of rows in forward, strips of rows in backward
    rows: int  # of a strip, in backward
    num_warps: int
    stages: int = 1


@device_function
def arrive(arrived_ptr, tile):
    """Whether this program, after storing its partials, is the last of its column tile: then it sees everybody's."""
    tl.debug_barrier()  # all of this program's partials are written before it counts itself in
    return tl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel") == tl.num_programs(1) - 1


@device_function
def sum_strips(
    partial_ptr, out_ptr, columns, STRIPS, WIDTH, inside, ADD: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_H: tl.constexpr
):  # fmt: skip
    """The strips' partials, which lie WIDTH apart, of these columns into out, summed in the order of strips whoever came last.

    ADD: to what is in out, a main_grad, in fp32 and rounded once.
    """
    total = tl.zeros([BLOCK_S, BLOCK_H], tl.float32)
    for first in range(0, STRIPS, BLOCK_S):
        strips = first + tl.arange(0, BLOCK_S)
        mask = (strips < STRIPS)[:, None] & inside[None, :]
        at = partial_ptr + strips[:, None] * WIDTH + columns[None, :]
        total += tl.load(at, mask=mask, other=0.0, cache_modifier=".cg")  # others wrote it: not from this multiprocessor's L1
    result = tl.sum(total, 0)
    if ADD:
        result += tl.load(out_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + columns, result, mask=inside)


@device_function
def some_helpers():
    """How many of the programs share the last sums: at most half, so that two kernels at their ends leave each other room."""
    return tl.maximum(1, tl.minimum(128, tl.num_programs(0) // 2))


@device_function
def join(arrived_ptr, programs, helpers):
    """After storing its partials: this program's number among the helpers (the last to arrive), once all have; else negative."""
    tl.debug_barrier()  # all of this program's partials are written before it counts itself in
    helper = tl.atomic_add(arrived_ptr, 1, sem="acq_rel") - (programs - helpers)
    if helper >= 0:
        while tl.atomic_add(arrived_ptr, 0, sem="acquire") < programs:
            meeting.others_go_on()
    return helper


@device_function
def share_strips(
    partial_ptr, out_ptr, other_ptr, helper, helpers, STRIPS, H,
    ADD: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """`share_tiles`, in tiles of one strip and many columns where that is fewer loads after each other: few strips, wide rows.

    Of half as many helpers as strips, one has about H / (16 STRIPS) tiles of 32 columns, or one wide tile of STRIPS turns.
    """
    if STRIPS * STRIPS * 16 <= H:  # a quarter of what a tile may hold: more of it spills
        share_tiles(partial_ptr, out_ptr, other_ptr, helper, helpers, STRIPS, H, ADD, 1, BLOCK_S * BLOCK_H // 4)
    else:
        share_tiles(partial_ptr, out_ptr, other_ptr, helper, helpers, STRIPS, H, ADD, BLOCK_S, BLOCK_H)


@device_function
def share_tiles(
    partial_ptr, out_ptr, other_ptr, helper, helpers, STRIPS, H,
    ADD: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """This helper's share of the H columns of out and of other, or of the one that is not None: each the sum, in their order, of
    its STRIPS partials, which are rows of out's columns and then other's; to be put there, or ADDed to what is there."""
    WIDTH = H * 2 if out_ptr is not None and other_ptr is not None else H
    if out_ptr is not None:
        _share(partial_ptr, out_ptr, helper, helpers, STRIPS, WIDTH, H, ADD, BLOCK_S, BLOCK_H)
    if other_ptr is not None:
        _share(partial_ptr + WIDTH - H, other_ptr, helper, helpers, STRIPS, WIDTH, H, ADD, BLOCK_S, BLOCK_H)


@device_function
def _share(
    partial_ptr, out_ptr, helper, helpers, STRIPS, WIDTH, H, ADD: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_H: tl.constexpr
):  # fmt: skip
    for tile in range(helper, tl.cdiv(H, BLOCK_H), helpers):
        columns = tile * BLOCK_H + tl.arange(0, BLOCK_H)
        sum_strips(partial_ptr, out_ptr, columns, STRIPS, WIDTH, columns < H, ADD, BLOCK_S, BLOCK_H)


@device_function
def leave(arrived_ptr, helpers):
    """Whether this helper is the last to leave, when the two counters have been set back to zero."""
    tl.debug_barrier()
    last = tl.atomic_add(arrived_ptr + 1, 1, sem="acq_rel") == helpers - 1
    if last:
        tl.store(arrived_ptr, 0)
        tl.store(arrived_ptr + 1, 0)
    return last
