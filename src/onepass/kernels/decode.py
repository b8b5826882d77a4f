"""Decode weights of few bits: the numbers that codes and their blocks' scales stand for, rounded once to a product's type.

Four bits   value = table[code] * scale[block]. The first code of a byte is the high one. Scales may be codes themselves:
            scale[block] = table[16 + absmax[block]] * nested_scale[block of blocks] + table[272], an offset.
Int8        value = code * scale[group], times a factor where there is one.
Products and sums are rounded to fp32 in this order, as bitsandbytes has them. Blocks and groups follow each other in memory.

Bytes       half a byte or one is read of a number, with what the scales take, and two written in 16 bits.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from onepass.kernels.language import tl, triton_unsupported
from onepass.kernels.launch import Bound, grid_of, kernel
from onepass.runtime.op import Registered
from onepass.runtime.sizes import ceil_div, power_of_two

_TILE = 4096  # numbers of a program


@kernel
def _four_bits_kernel(
    out_ptr, codes_ptr, table_ptr, absmax_ptr, nested_scale_ptr, M,
    BLOCK: tl.constexpr, NESTED_BLOCK: tl.constexpr, WHOLE: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """WHOLE: the last block is a whole one."""
    blocks = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    there = blocks * BLOCK < M
    scale = tl.load(absmax_ptr + blocks, mask=there, other=0)
    if nested_scale_ptr is not None:
        nested = tl.load(nested_scale_ptr + blocks // NESTED_BLOCK, mask=there, other=0.0)
        scale = tl.load(table_ptr + 16 + scale.to(tl.int32)) * nested + tl.load(table_ptr + 272)
    places = blocks[:, None] * (BLOCK // 2) + tl.arange(0, BLOCK // 2)[None, :]
    inside = there[:, None] if WHOLE else places * 2 < M
    pairs = tl.load(codes_ptr + places, mask=inside, other=0).to(tl.int32)
    first = tl.load(table_ptr + (pairs >> 4)) * scale[:, None]
    second = tl.load(table_ptr + (pairs & 15)) * scale[:, None]
    places = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = there[:, None] if WHOLE else places < M
    tl.store(out_ptr + places, tl.reshape(tl.join(first, second), (BLOCKS, BLOCK)), mask=inside)


@kernel
def _int8_kernel(
    out_ptr, codes_ptr, scale_ptr, M,
    LENGTH, FACTOR: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """M groups of LENGTH numbers."""
    groups = (tl.program_id(1).to(tl.int64) + 65535 * tl.program_id(2)) * GROUPS + tl.arange(0, GROUPS)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = (groups < M)[:, None] & (columns < LENGTH)[None, :]
    scale = tl.load(scale_ptr + groups, mask=groups < M, other=0.0)
    places = groups[:, None] * LENGTH + columns[None, :]
    values = tl.load(codes_ptr + places, mask=inside, other=0).to(tl.float32) * scale[:, None]
    if FACTOR is not None:
        values *= FACTOR
    tl.store(out_ptr + places, values, mask=inside)


@lru_cache(64)
def _four_bits_plan(block: int, nested_block: int, whole: bool) -> tuple[int, Bound]:
    blocks = max(1, _TILE // block)
    bound: Bound = _four_bits_kernel.bind(block, nested_block, whole, blocks, num_warps=4, fused=False)
    return block * blocks, bound


@lru_cache(1024)
def _int8_plan(length: int, factor: float | None) -> tuple[int, int, Bound]:
    block = min(_TILE, power_of_two(length))
    groups = _TILE // block
    bound: Bound = _int8_kernel.bind(length, factor, groups, block, num_warps=4)
    return groups, block, bound


def _four_bits_formula(
    codes: Tensor, table: Tensor, absmax: Tensor, nested_scale: Tensor | None, count: int, block: int, nested_block: int
) -> Tensor:  # fmt: skip
    scale = absmax
    if nested_scale is not None:
        scale = table[16 + absmax.int()] * nested_scale.repeat_interleave(nested_block)[: len(absmax)] + table[272]
    return table[torch.stack((codes >> 4, codes & 15), 1).flatten()[:count].int()] * scale.repeat_interleave(block)[:count]


def _decode_four_bits(
    out: Tensor, codes: Tensor, table: Tensor, absmax: Tensor, nested_scale: Tensor | None, block: int, nested_block: int
) -> None:  # fmt: skip
    count = out.numel()
    tensors = codes, table, absmax, nested_scale
    if triton_unsupported(out) is not None:
        out.view(-1).copy_(_four_bits_formula(*tensors, count, block, nested_block))
    elif count:
        of_program, launch = _four_bits_plan(block, nested_block, count % block == 0)
        launch((ceil_div(count, of_program), 1, 1), out, *tensors, count)


def _decode_int8(out: Tensor, codes: Tensor, scale: Tensor, factor: float | None) -> None:
    count, groups = out.numel(), scale.numel()
    if triton_unsupported(out) is not None:
        values = codes.view(groups, -1) * scale.view(groups, 1)
        out.view(groups, -1).copy_(values if factor is None else values * factor)
    elif count:
        length = count // groups
        of_program, block, launch = _int8_plan(length, factor)
        launch(grid_of(ceil_div(length, block), ceil_div(groups, of_program)), out, codes, scale, groups)


decode_four_bits = Registered(
    "decode_four_bits(Tensor(a!) out, Tensor codes, Tensor table, Tensor absmax, Tensor? nested_scale, int block, "
    "int nested_block) -> ()",
    _decode_four_bits,
    lambda *_: None,
)
decode_int8 = Registered(
    "decode_int8(Tensor(a!) out, Tensor codes, Tensor scale, float? factor) -> ()", _decode_int8, lambda *_: None
)
