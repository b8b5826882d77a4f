"""Column sums that need no second kernel: each program sums its strip of rows, the last to arrive sums the strips."""

from __future__ import annotations

from onepass.runtime.lang import device_function, tl


@device_function
def arrive(arrived_ptr, tile):
    """Whether this program, after storing its partials, is the last of its column tile: then it sees everybody's."""
    tl.debug_barrier()  # all of this program's partials are written before it counts itself in
    return tl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel") == tl.num_programs(1) - 1


@device_function
def sum_strips(partial_ptr, out_ptr, columns, WIDTH, inside, BLOCK_S: tl.constexpr, BLOCK_H: tl.constexpr):
    """The strips' partials of these columns into out, summed in the order of strips whoever came last."""
    total = tl.zeros([BLOCK_S, BLOCK_H], tl.float32)
    for first in range(0, tl.num_programs(1), BLOCK_S):
        strips = first + tl.arange(0, BLOCK_S)
        mask = (strips < tl.num_programs(1))[:, None] & inside[None, :]
        at = partial_ptr + strips[:, None] * WIDTH + columns[None, :]
        total += tl.load(at, mask=mask, other=0.0, cache_modifier=".cg")  # others wrote it: not from this multiprocessor's L1
    tl.store(out_ptr + columns, tl.sum(total, 0), mask=inside)
