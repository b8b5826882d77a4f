"""LoRA adapters of one weight as two matrices: one launch casts and joins them, and one takes their gradients apart.

Shapes   adapter i: a [groups, r_i, K], b [groups, N_i, r_i]. Joined: a [groups, R, K], the rows of all adapters, and
         b [groups, N, R], whose columns of adapter i are zeros outside of the weight's rows that it changes. Where groups is 0
         none of these has that dimension.
Bytes    each adapter is read once, in its type, and the matrices are written once, in the product's. A launch takes four.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onepass.kernels.language import device_function, tl, triton_unsupported
from onepass.kernels.launch import Bound, Grid, kernel
from onepass.runtime.dispatch import needs_dispatcher, registered
from onepass.runtime.sizes import ceil_div

_AT_ONCE = 4  # adapters of a launch
_BLOCK = 2048  # numbers of a program


class AdapterShapes(NamedTuple):
    """Sizes of adapters that share products."""

    groups: int  # 0: none, and no such dimension
    ranks: tuple[int, ...]
    rows: tuple[tuple[int, int], ...]  # of the weight, which each adapter changes
    K: int
    N: int

    def columns(self) -> list[slice]:
        """Each adapter's columns of t."""
        ends = [sum(self.ranks[: i + 1]) for i in range(len(self.ranks))]
        return [slice(end - rank, end) for rank, end in zip(self.ranks, ends, strict=True)]


# ---- the kernel ----


@device_function
def _copy_a(part_ptr, a_ptr, places, group, K, R, RANK, UNPACK: tl.constexpr):
    """Rows of one adapter follow each other in both. a_ptr: the adapter's first row in the matrix."""
    if part_ptr is not None:
        size = RANK * K
        inside, part, whole = places < size, part_ptr + group * size + places, a_ptr + group * R * K + places
        if UNPACK:
            tl.store(part, tl.load(whole, mask=inside), mask=inside)
        else:
            tl.store(whole, tl.load(part, mask=inside), mask=inside)


@device_function
def _copy_b(part_ptr, b_ptr, places, group, N, R, RANK, FIRST, LAST, UNPACK: tl.constexpr):
    """Rows of one adapter are short, and R apart in the matrix. b_ptr: its first column there."""
    if part_ptr is not None:
        row, column = places // RANK, places % RANK
        inside = row < N
        own = inside & (row >= FIRST) & (row < LAST)
        part = part_ptr + (group * (LAST - FIRST) + row - FIRST) * RANK + column
        whole = b_ptr + (group * N + row) * R + column
        if UNPACK:
            tl.store(part, tl.load(whole, mask=own), mask=own)
        else:
            tl.store(whole, tl.load(part, mask=own, other=0.0), mask=inside)


@kernel
def _pack_kernel(
    a_ptr, b_ptr, a0_ptr, b0_ptr, a1_ptr, b1_ptr, a2_ptr, b2_ptr, a3_ptr, b3_ptr,
    K, N, R, AT0, RANK0, FIRST0, LAST0, AT1, RANK1, FIRST1, LAST1, AT2, RANK2, FIRST2, LAST2, AT3, RANK3, FIRST3, LAST3,
    UNPACK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """AT: an adapter's first column of t. FIRST, LAST: its rows of the weight. UNPACK: from the matrices to the adapters."""
    matrix, group = tl.program_id(1), tl.program_id(2).to(tl.int64)
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if matrix == 0:
        _copy_a(a0_ptr, a_ptr + AT0 * K, places, group, K, R, RANK0, UNPACK)
    elif matrix == 1:
        _copy_b(b0_ptr, b_ptr + AT0, places, group, N, R, RANK0, FIRST0, LAST0, UNPACK)
    elif matrix == 2:
        _copy_a(a1_ptr, a_ptr + AT1 * K, places, group, K, R, RANK1, UNPACK)
    elif matrix == 3:
        _copy_b(b1_ptr, b_ptr + AT1, places, group, N, R, RANK1, FIRST1, LAST1, UNPACK)
    elif matrix == 4:
        _copy_a(a2_ptr, a_ptr + AT2 * K, places, group, K, R, RANK2, UNPACK)
    elif matrix == 5:
        _copy_b(b2_ptr, b_ptr + AT2, places, group, N, R, RANK2, FIRST2, LAST2, UNPACK)
    elif matrix == 6:
        _copy_a(a3_ptr, a_ptr + AT3 * K, places, group, K, R, RANK3, UNPACK)
    else:
        _copy_b(b3_ptr, b_ptr + AT3, places, group, N, R, RANK3, FIRST3, LAST3, UNPACK)


@lru_cache(1024)
def _plan(shapes: AdapterShapes, unpack: bool) -> list[tuple[Grid, Bound, int]]:
    """Return a grid and a bound kernel for each four adapters, and how many pointers to add."""
    groups, ranks, rows, K, N = shapes
    each = list(zip([columns.start for columns in shapes.columns()], ranks, rows, strict=True))
    launches = []
    for first in range(0, len(each), _AT_ONCE):
        some = each[first : first + _AT_ONCE]
        sizes = [size for at, rank, span in some for size in (at, rank, *span)]
        missing = _AT_ONCE - len(some)
        largest = max([rank for _, rank, _ in some]) * max(K, N)
        bound = _pack_kernel.bind(K, N, sum(ranks), *sizes, *[0] * (4 * missing), unpack, _BLOCK)
        launches.append(((ceil_div(largest, _BLOCK), 2 * len(some), groups or 1), bound, 2 * missing))
    return launches


def _launch(
    tensors: Sequence[Tensor | None], a: Tensor | None, b: Tensor | None, shapes: AdapterShapes, unpack: bool
) -> None:  # fmt: skip
    a, b, first = b if a is None else a, a if b is None else b, 0  # a matrix that has no parts is not read
    for grid, launch, missing in _plan(shapes, unpack):
        launch(grid, a, b, *tensors[first : first + 2 * _AT_ONCE], *(None,) * missing)
        first += 2 * _AT_ONCE


# ---- what is called ----


def _empty(like: Tensor, dtype: torch.dtype, shapes: AdapterShapes) -> tuple[Tensor, Tensor]:
    lead, R = (shapes.groups,) if shapes.groups else (), sum(shapes.ranks)
    return like.new_empty((*lead, R, shapes.K), dtype=dtype), like.new_empty((*lead, shapes.N, R), dtype=dtype)


def _pack(tensors: Sequence[Tensor], dtype: torch.dtype, shapes: AdapterShapes) -> tuple[Tensor, Tensor]:
    a, b = _empty(tensors[0], dtype, shapes)
    if triton_unsupported(a) is None:
        _launch([tensor.contiguous() for tensor in tensors], a, b, shapes, False)
        return a, b
    b.zero_()
    for own_a, own_b, columns, rows in _each(tensors, shapes):
        a[..., columns, :] = own_a
        b[..., slice(*rows), columns] = own_b
    return a, b


def _unpack(da: Tensor | None, db: Tensor | None, dtypes: Sequence[torch.dtype], shapes: AdapterShapes) -> list[Tensor]:
    """Return the gradients of each adapter, of these types, in memory of their own."""
    found = _unpack_fake(da, db, dtypes, shapes)
    if triton_unsupported(found[0]) is None:
        tensors: list[Tensor | None] = [None] * (2 * len(shapes.ranks))
        tensors[_given(da, db)] = found
        _launch(tensors, da, db, shapes, True)
        return found
    each = zip(shapes.columns(), shapes.rows, strict=True)
    parts = [part for columns, rows in each for part in (_part(da, columns, slice(None)), _part(db, slice(*rows), columns))]
    for into, part in zip(found, parts[_given(da, db)], strict=True):
        into.copy_(part)
    return found


def _part(matrix: Tensor | None, rows: slice, columns: slice) -> Any:
    return None if matrix is None else matrix[..., rows, columns]


def _given(da: Tensor | None, db: Tensor | None) -> slice:
    """Return which of the adapters' tensors have a gradient: all, those of a, or those of b."""
    return slice(None) if da is not None and db is not None else slice(0 if db is None else 1, None, 2)


def _unpack_fake(da: Tensor | None, db: Tensor | None, dtypes: Sequence[torch.dtype], shapes: AdapterShapes) -> list[Tensor]:
    lead, like = (shapes.groups,) if shapes.groups else (), db if da is None else da
    assert like is not None
    spans = zip(shapes.ranks, shapes.rows, strict=True)
    sizes = [size for rank, (first, last) in spans for size in ((rank, shapes.K), (last - first, rank))]
    return [like.new_empty((*lead, *size), dtype=dtype) for size, dtype in zip(sizes[_given(da, db)], dtypes, strict=True)]


def _each(tensors: Sequence[Tensor], shapes: AdapterShapes) -> Iterator[tuple[Tensor, Tensor, slice, tuple[int, int]]]:
    return zip(tensors[::2], tensors[1::2], shapes.columns(), shapes.rows, strict=True)


# ---- registered ops: a shape's fields are numbers and lists there ----

_SHAPES = "int groups, int[] ranks, int[] bounds, int K, int N"


def _shapes(groups: int, ranks: Sequence[int], bounds: Sequence[int], K: int, N: int) -> AdapterShapes:
    return AdapterShapes(groups, tuple(ranks), tuple(zip(bounds[::2], bounds[1::2], strict=True)), K, N)


def _types(names: Sequence[str]) -> list[torch.dtype]:
    return [getattr(torch, name) for name in names]


def _flat(shapes: AdapterShapes) -> tuple[int, list[int], list[int], int, int]:
    groups, ranks, rows, K, N = shapes
    return groups, list(ranks), [bound for span in rows for bound in span], K, N


_pack_op = registered(
    f"pack_adapters(Tensor[] tensors, ScalarType dtype, {_SHAPES}) -> (Tensor, Tensor)",
    lambda tensors, dtype, *flat: _pack(tensors, dtype, _shapes(*flat)),
    lambda tensors, dtype, *flat: _empty(tensors[0], dtype, _shapes(*flat)),
)
_unpack_op = registered(
    f"unpack_adapters(Tensor? da, Tensor? db, str[] dtypes, {_SHAPES}) -> Tensor[]",  # to PyTorch 2.9 a ScalarType[] is numbers
    lambda da, db, dtypes, *flat: _unpack(da, db, _types(dtypes), _shapes(*flat)),
    lambda da, db, dtypes, *flat: _unpack_fake(da, db, _types(dtypes), _shapes(*flat)),
)


def pack_adapters(tensors: Sequence[Tensor], dtype: torch.dtype, shapes: AdapterShapes) -> tuple[Tensor, Tensor]:
    """Return both matrices of `tensors`, a and b of each adapter in turn."""
    if needs_dispatcher(*tensors):
        return _pack_op(list(tensors), dtype, *_flat(shapes))  # type: ignore[no-any-return]
    return _pack(tensors, dtype, shapes)


def unpack_adapters(
    da: Tensor | None, db: Tensor | None, dtypes: Sequence[torch.dtype], shapes: AdapterShapes
) -> list[Tensor]:  # fmt: skip
    """Return the adapters' parts of both matrices, or of the one that is given, each of its type."""
    if needs_dispatcher(da, db):
        return _unpack_op(da, db, [str(dtype).removeprefix("torch.") for dtype in dtypes], *_flat(shapes))  # type: ignore[no-any-return]
    return _unpack(da, db, dtypes, shapes)
