"""Calls that launch the kernels which several families share, in every form that is shipped."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from onepass.kernels import decode, fp8, fp8_cast, fp8_transpose
from onepass.kernels.adapter_pack import AdapterShapes, pack_adapters, unpack_adapters
from onepass.runtime.fp8 import E4M3, E5M2, FP8Target
from onepass.runtime.samples import CoveringCall, meta


def covering_calls() -> Iterator[CoveringCall]:
    """Casts by row, by column and by tensor: both types, rows that are held and read again, even and odd multiples of 16.

    Adapters of one layer of Llama 8B, of other types and ranks, and of documents.
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
