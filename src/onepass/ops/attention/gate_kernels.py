"""The kernels of gated attention: y times the sigmoid of each head's gate, which lies beside its query in qkv.

With s the gate's sigmoid:  forward  out = y s;  backward  dy = dout s,  dgate = dout y s (1 - s).
dgate goes to its place in qkv's gradient, where attention's own kernels put the others: no parts are joined.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from onepass.kernels.language import device_function, tl
from onepass.kernels.launch import Bound, grid_of, kernel
from onepass.kernels.layout import as_rows
from onepass.kernels.rows import aligned, inside_row, known_align
from onepass.kernels.sigmoid import LOG2_E, sigmoid
from onepass.ops.attention.formula import AttentionOptions, gates_of
from onepass.ops.attention.layout import as_readable
from onepass.runtime.op import Registered
from onepass.runtime.sizes import ceil_div, power_of_two

_VALUES = 2048  # of a tile: 16 a thread


@device_function
def _tile(M, SHAPE: tl.constexpr):
    """Return the program's rows [tokens, 1] and columns [1, H], where a gate's columns lie in qkv, and what is inside."""
    H: tl.constexpr = SHAPE[0]
    D: tl.constexpr = SHAPE[1]
    BLOCK_M: tl.constexpr = SHAPE[3]
    BLOCK_H: tl.constexpr = SHAPE[4]
    columns = (tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H))[None, :]
    block = tl.program_id(1).to(tl.int64) + 65535 * tl.program_id(2)
    rows = (block * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    return rows, columns, columns // D * (2 * D) + columns % D, (rows < M) & inside_row(columns, H, H % BLOCK_H == 0)


@kernel
def _gate_forward_kernel(
    y_ptr, gate_ptr, out_ptr,  # y and out: M rows of H columns; gate: D of each 2 D columns
    M, GATE_ROW,
    SHAPE: tl.constexpr,  # H, D, the alignment of rows, and the tile's tokens and columns
):  # fmt: skip
    rows, columns, beside, inside = _tile(M, SHAPE)
    at = rows * SHAPE[0] + columns
    y = tl.load(y_ptr + at, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + rows * aligned(GATE_ROW, SHAPE[2]) + beside, mask=inside, other=0.0).to(tl.float32)
    s, _ = sigmoid(-LOG2_E * gate)
    tl.store(out_ptr + at, y * s, mask=inside)


@kernel
def _gate_backward_kernel(
    dout_ptr, y_ptr, gate_ptr, dy_ptr, dgate_ptr,  # as in forward, and their gradients
    M, DOUT_ROW, GATE_ROW, DGATE_ROW,
    SHAPE: tl.constexpr,
):  # fmt: skip
    rows, columns, beside, inside = _tile(M, SHAPE)
    at = rows * SHAPE[0] + columns
    dout = tl.load(dout_ptr + rows * aligned(DOUT_ROW, SHAPE[2]) + columns, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + rows * aligned(GATE_ROW, SHAPE[2]) + beside, mask=inside, other=0.0).to(tl.float32)
    if dgate_ptr is not None:  # before all stores, which loads don't pass
        y = tl.load(y_ptr + at, mask=inside, other=0.0).to(tl.float32)
    s, rest = sigmoid(-LOG2_E * gate)
    dy = dout * s
    tl.store(dy_ptr + at, dy, mask=inside)
    if dgate_ptr is not None:
        tl.store(dgate_ptr + rows * aligned(DGATE_ROW, SHAPE[2]) + beside, dy * y * rest, mask=inside)


@lru_cache(1024)
def _tiles(H: int) -> tuple[int, int]:
    """Return the tokens and the columns of a tile."""
    block_h = min(power_of_two(H), 1024)
    return _VALUES // block_h, block_h


@lru_cache(4096)
def _bind(backward: bool, rows: tuple[int, ...], H: int, D: int) -> Bound:
    """rows: how far those of each tensor that is not dense are apart."""
    bound: Bound = (_gate_backward_kernel if backward else _gate_forward_kernel).bind(
        *rows, (H, D, known_align(*rows), *_tiles(H))
    )
    return bound


def _launch(tensors: tuple[Tensor | None, ...], rows: tuple[int, ...], y: Tensor, D: int) -> None:
    H, (block_m, block_h) = y.shape[-1], _tiles(y.shape[-1])
    M = y.numel() // H
    _bind(len(rows) > 1, rows, H, D)(grid_of(ceil_div(H, block_h), ceil_div(M, block_m)), *tensors, M)


# ---- calls ----


def _gate(y: Tensor, qkv: Tensor, options: AttentionOptions) -> Tensor:
    """Return y [B, S, heads D], which is dense, times the sigmoid of qkv's gates."""
    qkv, row = as_rows(as_readable(qkv))
    gates, out = gates_of(qkv, options), torch.empty_like(y)
    _launch((y, gates, out), (row,), y, gates.shape[-1])
    return out


gate_op = Registered(
    "attention_gated(Tensor y, Tensor qkv, AttentionOptions options) -> Tensor",
    _gate,
    lambda y, *_: torch.empty_like(y),
    AttentionOptions,
)


def ungate(dout: Tensor, y: Tensor, qkv: Tensor, dqkv: Tensor | None, options: AttentionOptions) -> Tensor:
    """Return y's gradient, of the gradient of what `gate_op` returned, and write the gates' to their place in dqkv.

    16 bytes of qkv and dout can be read at a time; y and dqkv are dense. Without dqkv the gates get none.
    """
    (qkv, row), (dout, dout_row) = as_rows(qkv), as_rows(dout)
    gates, dy = gates_of(qkv, options), torch.empty_like(y)
    dgates = None if dqkv is None else gates_of(dqkv, options)
    _launch((dout, y, gates, dy, dgates), (dout_row, row, options.every * gates.shape[-1]), y, gates.shape[-1])
    return dy
