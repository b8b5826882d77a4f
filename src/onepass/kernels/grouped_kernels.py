"""Grouped products of rows in bf16 by Triton, for Hopper: each row with its group's matrix.

Shapes   a [M, K], b [G, N, K], as it is or the transpose of a contiguous [G, K, N]; ends [G] int32; y [M, N].
Tiles    of y. As many programs as there are multiprocessors take them in turn, group by group: those that run at the same time
         share a group's matrix and rows in the L2. No host knows how many rows a group has, so a kernel lists the tiles.
Ahead    a program's tiles are one loop for the compiler: the next tile's operands are fetched while one is stored.
Edges    a tile at a group's end reads rows of the next group, and doesn't store what it makes of them.
Sums     in fp32, in the order of K.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from onepass.kernels.language import device_function, tl, triton_unsupported
from onepass.kernels.launch import Bound, kernel
from onepass.runtime.dispatch import has_address
from onepass.runtime.sizes import ceil_div, compute_capability, power_of_two, processors

_MOST_GROUPS = 1024
_ALIGNED = 16  # bytes, of addresses and rows that the copy engine takes
_LEAST_ROWS = 128  # of a group on average: shorter groups fill no tiles
_WIDEST = 16384  # columns of y: wider ones' matrices would leave the L2 between two rows of tiles
_CAPABILITY = 9, 0  # what it was measured on
_BLOCK = 128  # rows of a tile, which has twice as many columns
BLOCK_K = tl.constexpr(64)  # of a step's operands, of which three are fetched ahead


@kernel
def _list_kernel(ends_ptr, list_ptr, G, BLOCK_M: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_T: tl.constexpr):
    """List one group's tiles after those of the groups before: its number, the tile's first row, and where the group's rows end.

    An entry has room for four numbers. The first says how many tiles there are.
    """
    own, groups = tl.program_id(0), tl.arange(0, BLOCK_G)
    inside = groups < G
    end = tl.load(ends_ptr + groups, mask=inside, other=0)
    start = tl.load(ends_ptr + groups - 1, mask=inside & (groups > 0), other=0)
    tiles = (end - start + BLOCK_M - 1) // BLOCK_M
    before = tl.sum(tl.where(groups < own, tiles, 0), 0)
    if own == 0:
        tl.store(list_ptr, tl.sum(tiles, 0))
    end, start = tl.sum(tl.where(groups == own, end, 0), 0), tl.sum(tl.where(groups == own, start, 0), 0)
    count = (end - start + BLOCK_M - 1) // BLOCK_M
    for first in range(0, count, BLOCK_T):
        tile = first + tl.arange(0, BLOCK_T)
        at, there = list_ptr + (1 + before + tile) * 4, tile < count
        tl.store(at, own, mask=there)
        tl.store(at + 1, start + tile * BLOCK_M, mask=there)
        tl.store(at + 2, end, mask=there)


@device_function
def _store(y_ptr, y, row, end, column, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr):
    """Store a tile in two halves, which take half as much shared memory on their way."""
    left, right = tl.split(tl.permute(tl.reshape(y, [BLOCK_M, 2, BLOCK_M]), [0, 2, 1]))
    rows, columns = row + tl.arange(0, BLOCK_M), column + tl.arange(0, BLOCK_M)
    at, own = y_ptr + rows.to(tl.int64)[:, None] * WIDTH + columns[None, :], (rows < end)[:, None]
    tl.store(at, left.to(y_ptr.dtype.element_ty), mask=own & (columns < WIDTH)[None, :])
    tl.store(at + BLOCK_M, right.to(y_ptr.dtype.element_ty), mask=own & (columns + BLOCK_M < WIDTH)[None, :])


@kernel
def _grouped_rows_kernel(
    a_ptr, b_ptr, list_ptr, y_ptr, M, G,
    N: tl.constexpr, K: tl.constexpr, TRANSPOSED: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    BLOCK_N: tl.constexpr = 2 * BLOCK_M
    ACROSS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    a = tl.make_tensor_descriptor(a_ptr, [M, K], [K, 1], [BLOCK_M, BLOCK_K])
    if TRANSPOSED:  # in memory b is [G, K, N]
        b = tl.make_tensor_descriptor(b_ptr, [G, K, N], [N * K, N, 1], [1, BLOCK_K, BLOCK_N])
    else:
        b = tl.make_tensor_descriptor(b_ptr, [G, N, K], [N * K, K, 1], [1, BLOCK_N, BLOCK_K])
    for tile in tl.range(tl.program_id(0), tl.load(list_ptr) * ACROSS, tl.num_programs(0), flatten=True):
        entry = list_ptr + (1 + tile // ACROSS) * 4
        group, row, end = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
        column = tile % ACROSS * BLOCK_N
        y = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k in tl.range(0, K, BLOCK_K, num_stages=3):  # zeros past K
            x = a.load([row, k])
            if TRANSPOSED:
                w = tl.reshape(b.load([group, k, column]), [BLOCK_K, BLOCK_N])
            else:
                w = tl.trans(tl.reshape(b.load([group, column, k]), [BLOCK_N, BLOCK_K]))
            y = tl.dot(x, w, y)
        _store(y_ptr, y, row, end, column, N, BLOCK_M)


# ---- tiles, and calls ----


@lru_cache(256)
def _plan(G: int, N: int, K: int, transposed: bool) -> tuple[Bound, Bound]:
    return _list_kernel.bind(G, _BLOCK, power_of_two(G), 32), _grouped_rows_kernel.bind(G, N, K, transposed, _BLOCK, num_warps=8)


def triton_multiplies(a: Tensor, b: Tensor, rows: int) -> bool:
    """Whether so many rows like a's are multiplied with b [G, N, K] here."""
    return _takes(a, b, rows, b.shape[0]) and b.shape[1] <= _WIDEST and (b.is_contiguous() or b.mT.is_contiguous())


def _takes(a: Tensor, b: Tensor, rows: int, groups: int) -> bool:
    """Whether operands are of bf16, on a GPU for which this was measured, and groups neither many nor short."""
    return (
        all([has_address(x) and x.data_ptr() % _ALIGNED == 0 for x in (a, b)])
        and a.dtype is torch.bfloat16
        and triton_unsupported(a) is None
        and compute_capability(a.device) == _CAPABILITY
        and rows >= _LEAST_ROWS * groups
        and groups <= _MOST_GROUPS
        and a.is_contiguous()
    )


def multiply_rows(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """Return a @ b[g].T for each group's rows. b, or its transpose, is contiguous."""
    (M, K), (G, N, _) = a.shape, b.shape
    transposed = not b.is_contiguous()
    tiles, rows = _plan(G, N, K, transposed)
    listed = a.new_empty(1 + ceil_div(M, _BLOCK) + G, 4, dtype=torch.int32)
    y = a.new_empty(M, N)
    tiles((G, 1, 1), ends, listed)
    rows((processors(a.device), 1, 1), a, b, listed, y, M)
    return y
