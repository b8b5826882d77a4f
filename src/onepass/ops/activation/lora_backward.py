"""Activation's backward with the gradients of adapters in it: kernels.py's kernel, which then writes no rows.

da = u.T @ y, of the layer that multiplies y, and db = dx.T @ t, of the layer that made x. Both are sums of strips, in fp32.
Bytes    dy, x and dx, and strips of R and T numbers a column, where y would be written and read again, and dx read.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from onepass.kernels.column_reduce import ColumnTiles
from onepass.kernels.launch import Bound
from onepass.kernels.layout import as_rows
from onepass.ops.activation.activations import Activation, activation_of
from onepass.ops.activation.formula import ActivationOptions
from onepass.ops.activation.kernels import Rows, bind_backward
from onepass.runtime.op import Registered
from onepass.runtime.sizes import ceil_div, power_of_two, processors

_DOT = 16  # the least sizes that tensor cores multiply
WIDEST_RANK = 64  # of an adapter whose sums fit in registers beside the activation


def _lora_tiles(M: int, H: int, ranks: tuple[int, int], multiprocessors: int) -> ColumnTiles:
    """Return blocks that tensor cores take, in as many strips as the programs that stay on a multiprocessor make."""
    wide = max(ranks) > 32  # sums fill registers
    block_m, columns, num_warps, resident = (16, 64, 8, 4) if wide else (32, 64, 4, 3) if ranks[1] else (32, 128, 4, 2)
    block_h = max(_DOT, min(power_of_two(H), columns))
    across = ceil_div(H, block_h)
    strips = max(1, min(ceil_div(M, block_m), resident * multiprocessors // across))
    rows = ceil_div(ceil_div(M, strips), block_m) * block_m
    return ColumnTiles(block_m, block_h, across, ceil_div(M, rows), rows, num_warps, 3 if wide else 4)


@lru_cache(1024)
def _lora_plan(
    act: Activation, M: int, H: int, rows: Rows, ranks: tuple[int, int], options: ActivationOptions, device: torch.device
) -> tuple[ColumnTiles, Bound]:  # fmt: skip
    tiles = _lora_tiles(M, H, ranks, processors(device))
    tile = tiles.block_m, tiles.block_h, tiles.num_warps, tiles.stages
    return tiles, bind_backward(act, H, rows, options, False, tile, ranks)


def activation_lora_backward(
    dy: Tensor, x: Tensor, bias: Tensor | None, weight: Tensor | None, u: Tensor, t: Tensor | None, options: ActivationOptions
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return dx, da = u.T @ y, and db = dx.T @ t where there is t, both in fp32. y is rounded to u's type, and not written.

    u and t are rows of at most `WIDEST_RANK` numbers.
    """
    act = activation_of(options.activation)
    (dy, dy_row), (x, x_row), ranks = as_rows(dy), as_rows(x), (u.shape[1], 0 if t is None else t.shape[1])
    H, W = dy.shape[-1], x.shape[-1]
    M = dy.numel() // H
    plan = act, M, H, (dy_row, x_row, None), ranks, options, x.device
    tiles, launch = _lora_plan(*plan)
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    of_a = x.new_empty((tiles.down, ranks[0], H), dtype=torch.float32)
    of_b = None if t is None else x.new_empty((tiles.down, W, ranks[1]), dtype=torch.float32)
    given = dy, x, None, bias, weight, dx, None, None, None, None, None, None, None, None
    launch((tiles.across, tiles.down, 1), *given, u.contiguous(), of_a, t, of_b, M, tiles.rows, None)
    return dx, _sum_of_strips(of_a), None if of_b is None else _sum_of_strips(of_b)


def _sum_of_strips(parts: Tensor) -> Tensor:
    return parts[0] if parts.shape[0] == 1 else parts.sum(0)


def _lora_fake(
    dy: Tensor, x: Tensor, bias: Any, weight: Any, u: Tensor, t: Tensor | None, options: ActivationOptions
) -> tuple[Tensor, Tensor, Tensor | None]:
    da = x.new_empty((u.shape[1], dy.shape[-1]), dtype=torch.float32)
    db = None if t is None else x.new_empty((x.shape[-1], t.shape[1]), dtype=torch.float32)
    return dy.new_empty(x.shape), da, db


lora_backward = Registered(
    "bias_activation_lora_backward(Tensor dy, Tensor x, Tensor? bias, Tensor? token_weight, Tensor u, Tensor? t, "
    "ActivationOptions options) -> (Tensor, Tensor, Tensor?)",
    activation_lora_backward,
    _lora_fake,
    ActivationOptions,
)
