"""The tiles of causal_conv1d's kernels: from the shape, never by trial."""

from __future__ import annotations

from typing import NamedTuple

import torch

from onepass.runtime.sizes import ceil_div, power_of_two, processors

WIDEST_HEAD, PIECES, MOST_ROWS = 256, 3, 2**31 - 2**16  # rows' numbers have 31 bits, and chunks end past the last
# Columns, values of a warp, rows a turn (half as many of fp32, or where W > 4), and warps a multiprocessor (8 where W > 4). These
# are a multiple of 4, as a quarter of the registers belongs to a quarter of the warps. Backward holds sums and gradients, too.
FORWARD_COLUMNS, FORWARD_VALUES, FORWARD_ROWS, FORWARD_WARPS = 128, 128, 6, 16
BACKWARD_COLUMNS, BACKWARD_VALUES, BACKWARD_ROWS, BACKWARD_WARPS = 128, 128, 8, 8
FEWEST_WARPS = 8  # a thread has no more than 255 registers
LEAST_ROWS = 32  # of a chunk


class ConvOptions(NamedTuple):
    """What causal_conv1d takes besides tensors, as the kernels know it."""

    silu: bool
    eps: float
    first: int  # columns of the pieces
    second: int
    third: int
    normed: int  # a bit a piece: its heads are normalised
    head: int  # their width, or 0

    @property
    def sizes(self) -> list[int]:
        return [size for size in (self.first, self.second, self.third) if size]


class ConvTiles(NamedTuple):
    heads: int  # of a tile
    head: int  # columns of one
    tiles: int  # across x
    num_warps: int
    rows: int  # of a turn
    resident: int  # programs a multiprocessor

    @property
    def block(self) -> int:
        return power_of_two(self.head)

    @property
    def is_in_warp(self) -> bool:
        """Whether a tile is one head of 128 columns in a warp."""
        return self.heads == self.num_warps == 1 and self.head == 128

    def are_whole(self, options: ConvOptions) -> bool:
        """Whether no tile has columns that a piece has not."""
        return self.block == self.head and not any(size % (self.heads * self.head) for size in options.sizes)


def _tiles(options: ConvOptions, W: int, size: int, columns: int, values: int, rows: int, warps: int) -> ConvTiles:
    head = options.head or columns
    heads = max(1, columns // power_of_two(head))
    tiles = sum(ceil_div(piece, heads * head) for piece in options.sizes)
    num_warps = max(1, heads * power_of_two(head) // values)
    warps, rows = warps if W <= 4 else FEWEST_WARPS, rows if size == 2 and W <= 4 else rows // 2
    return ConvTiles(heads, head, tiles, num_warps, rows, max(1, warps // num_warps))


def forward_tiles(options: ConvOptions, W: int, size: int) -> ConvTiles:
    """`size`: bytes of a value of x."""
    return _tiles(options, W, size, FORWARD_COLUMNS, FORWARD_VALUES, FORWARD_ROWS, FORWARD_WARPS)


def backward_tiles(options: ConvOptions, W: int, size: int) -> ConvTiles:
    return _tiles(options, W, size, BACKWARD_COLUMNS, BACKWARD_VALUES, BACKWARD_ROWS, BACKWARD_WARPS)


def chunk_rows(M: int, tiles: ConvTiles, device: torch.device) -> int:
    """Return the rows of a chunk, a multiple of a turn's, so that all chunks of all tiles run at the same time."""
    chunks = max(1, tiles.resident * processors(device) // tiles.tiles)
    return ceil_div(max(LEAST_ROWS, ceil_div(M, chunks)), tiles.rows) * tiles.rows
