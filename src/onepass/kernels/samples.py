"""Calls that launch the kernels which several families share, in every form that is shipped."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from onepass.kernels import decode, fp8, fp8_cast, fp8_transpose
from onepass.kernels.adapter_pack import AdapterShapes, pack_adapters, unpack_adapters
from onepass.kernels.document_positions import document_positions
from onepass.kernels.grouped_kernels import multiply_rows
from onepass.kernels.low_rank import NO_DROPOUT, RowDropout, lora_expand, lora_gradient, lora_shrink
from onepass.kernels.mapped_rows import order_by_map, spread_by_map, sum_by_map
from onepass.kernels.token_rows import order_rows, spread_rows, sum_rows
from onepass.runtime.fp8 import E4M3, E5M2, FP8Target
from onepass.runtime.samples import SEED, THRESHOLD, CoveringCall, meta


def covering_calls() -> Iterator[CoveringCall]:
    """Casts by row, by column and by tensor: both types, rows that are held and read again, even and odd multiples of 16.

    Adapters of one layer of Llama 8B, of other types and ranks, of documents and with dropout.
    Decoding: blocks of all sizes, whole and not, scales that are codes and not; groups of a row, of several and of parts.
    """
    for width in (2048, 4096, 14336, 28672, 5008):
        for dtype in (torch.bfloat16, torch.float32):
            for to in (E4M3, E5M2):
                yield _cast_call(width, dtype, to)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        yield CoveringCall("decode 4 bits and int8", dtype, partial(_decode, dtype))
    for spans in (((0, 4096),), ((0, 14336), (14336, 28672)), ((0, 4096), (4096, 5120), (5120, 6144))):
        for of_adapters in (torch.float32, torch.bfloat16):
            yield _pack_call(AdapterShapes(0, (16,) * len(spans), spans, 4096, spans[-1][1]), of_adapters)
    yield _pack_call(AdapterShapes(0, (3, 5), ((0, 1), (1, 777)), 5000, 777), torch.float16)
    yield _pack_call(AdapterShapes(8, (16,) * 4, ((0, 4096),) * 4, 4096, 4096), torch.float32)


    bf16, fp32 = torch.bfloat16, torch.float32
    for rank, width, dtype in ((16, 4096, bf16), (256, 14336, bf16), (3, 777, bf16), (48, 6144, fp32)):
        yield _low_rank_call(width, rank, 8, dtype)
        yield _low_rank_call(width, rank, 0, dtype, RowDropout(THRESHOLD, SEED))
        yield _low_rank_call(width, rank, 8, dtype, RowDropout(THRESHOLD))
    yield _low_rank_call(4096, 16, 8, torch.float16)
    yield _low_rank_call(5760, 1, 32, bf16)
    for tokens, experts, k, width, dtype in (
        (16384, 128, 8, 2048, bf16), (16384, 8, 2, 4096, bf16), (4096, 384, 6, 7168, bf16), (777, 5, 1, 33, torch.float16),
        (16384, 32, 4, 2880, fp32),
    ):  # fmt: skip
        yield _experts_rows_call(tokens, experts, k, width, dtype)
    yield CoveringCall("positions of 8 documents", fp32, _positions)
    for groups, N, K in ((64, 2816, 2048), (64, 2048, 1408), (128, 1536, 2048), (8, 4096, 14336), (32, 2880, 2880)):
        yield CoveringCall(f"products of {groups} groups, {N}x{K}", bf16, partial(_groups, groups, N, K), 90)


def _groups(groups: int, N: int, K: int) -> Tensor:
    x, ends = meta(98304, K, dtype=torch.bfloat16), torch.empty(groups, dtype=torch.int32, device="meta")
    with torch.no_grad():
        multiply_rows(x, meta(groups, N, K, dtype=torch.bfloat16), ends)
        multiply_rows(x, meta(groups, K, N, dtype=torch.bfloat16).mT, ends)
    return x


def _positions() -> Tensor:
    document_positions(torch.empty(9, dtype=torch.int32, device="meta"), 4096)
    return meta(1, dtype=torch.float32)


def _experts_rows_call(tokens: int, experts: int, k: int, width: int, dtype: torch.dtype) -> CoveringCall:
    def run() -> Tensor:
        x = meta(tokens * k, width, dtype=dtype)
        chosen = torch.empty(tokens, k, dtype=torch.int64, device="meta")
        with torch.no_grad():
            for weights in (meta(tokens, k, dtype=torch.float32), meta(tokens, k, dtype=dtype)):
                _, owners, places, _ = order_rows(chosen, weights, experts)
            sum_rows(x, places, None)
            spread_rows(x[:tokens], owners, places)
            order = order_by_map(torch.empty(tokens, experts, dtype=torch.bool, device="meta"), tokens * k)
            sum_by_map(x, order)
            spread_by_map(x[:tokens], order)
        return x

    return CoveringCall(f"rows of {tokens} tokens, {k} of {experts} experts, {width} wide", dtype, run)


def _low_rank_call(width: int, rank: int, groups: int, dtype: torch.dtype, dropout: RowDropout = NO_DROPOUT) -> CoveringCall:
    """Both matrices of an adapter, of documents or of all rows. The seed is a number or in memory."""

    def run() -> Tensor:
        lead = (groups,) if groups else ()
        x, bias, t = meta(8192, width, dtype=dtype), meta(width, dtype=dtype), meta(8192, rank, dtype=dtype)
        a, b = meta(*lead, rank, width, dtype=dtype), meta(*lead, width, rank, dtype=dtype)
        seed = torch.empty(1, dtype=torch.int64, device="meta") if dropout.threshold and dropout.number is None else None
        ends, scales = None, None
        if groups:
            ends = torch.empty(groups, dtype=torch.int32, device="meta")
            scales = torch.empty(groups, rank, dtype=torch.float32, device="meta")
        with torch.no_grad():
            for scale in (scales, None):
                lora_shrink(x, a.mT, ends, scale, seed, 2.0, dropout)
                lora_shrink(x, b, ends, scale, seed, 2.0, dropout)
            for start in (None, bias, x):
                lora_expand(t, a.mT, start, ends, seed, dropout)
                lora_expand(t, b, start, ends, seed, dropout)
            lora_gradient(t, x, ends, seed, False, dropout)
            lora_gradient(t, x, ends, seed, True, dropout)
        return x

    label = f"adapters of rank {rank}, {width} wide{', by documents' if groups else ''}{', dropout' if dropout.threshold else ''}"
    return CoveringCall(f"{label}{', seed in memory' if dropout.threshold and dropout.number is None else ''}", dtype, run)


def _pack_call(shapes: AdapterShapes, of_adapters: torch.dtype) -> CoveringCall:
    def run() -> Tensor:
        x, lead = meta(8, shapes.K, dtype=torch.bfloat16), (shapes.groups,) if shapes.groups else ()
        tensors = []
        for rank, (first, last) in zip(shapes.ranks, shapes.rows, strict=True):
            tensors += [meta(*lead, rank, shapes.K, dtype=of_adapters, requires_grad=False)]
            tensors += [meta(*lead, last - first, rank, dtype=of_adapters, requires_grad=False)]
        a, b = pack_adapters(tensors, x.dtype, shapes)
        da, db = a.float(), b.float()
        for of_a, of_b, count in ((da, db, 2), (da, None, 1), (None, db, 1)):
            unpack_adapters(of_a, of_b, [of_adapters] * (count * len(shapes.ranks)), shapes)
        return x

    label = f"{len(shapes.ranks)} adapters of {shapes.N}x{shapes.K}{f', {shapes.groups} groups' if shapes.groups else ''}"
    return CoveringCall(label, of_adapters, run)


def _cast_call(width: int, dtype: torch.dtype, to: torch.dtype) -> CoveringCall:
    def run() -> Tensor:
        x, scale = meta(8192, width, dtype=dtype), torch.empty((), device="meta")
        noted = fp8.new_notes("meta")
        fp8_cast.cast_rows(x.detach(), to)
        fp8_cast.cast_columns(x.detach().view(2, 4096, width))
        fp8_cast.cast_tensor(x.detach(), FP8Target(to, scale, *noted), transposed=True)
        fp8_cast.cast_tensor(x.detach(), FP8Target(to, scale, *noted[:2]))
        codes, _ = fp8_cast.cast_tensor(x.detach(), FP8Target(to, scale))
        assert codes is not None
        fp8_transpose.transpose_codes(codes)
        return x

    return CoveringCall(f"fp8 cast 8192x{width} {'e5m2' if to is E5M2 else 'e4m3'}", dtype, run, 89)


def _decode(dtype: torch.dtype) -> Tensor:
    def empty(*shape: int, of: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(*shape, dtype=of, device="meta")

    for K in (4096, 4098):
        out, codes, table = empty(4096, K, of=dtype), empty(2048 * K, of=torch.uint8), empty(273)
        for block in (64, 4096):
            blocks = out.numel() // block
            decode.decode_four_bits(out, codes, table, empty(blocks), None, block, 1)
            decode.decode_four_bits(out, codes, table, empty(blocks, of=torch.uint8), empty(blocks // 256), block, 256)
        for groups, factor in ((4096, 1 / 127), (4096, None), (32 * K, None)):
            decode.decode_int8(out, empty(4096, K, of=torch.int8), empty(groups), factor)
    return meta(1, dtype=dtype)
