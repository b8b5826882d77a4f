"""Products of rows with low-rank matrices of their document, or of rows that dropout drops: no library has these.

Shapes   x [M, C], t [M, R], w [C, R] or a document's own [E, C, R], with any strides.
         ends [E] int32 or int64: where each document's rows end. It may have none. Rows after the last end belong to no document.
Shrink   t = scale * dropout(x) @ w.
Expand   y = start + dropout(t @ w.T), where start is a bias [C], a matrix [M, C] or nothing: x's gradient is dropped as x was.
Gradient dw = t.T @ dropout(x) of each document, in fp32 or wider.
Dropout  takes no memory: the seed, the row and the column decide (kernels/philox.py). Its scale multiplies fp32 sums.
Bytes    x is read once, y written once. Rows of a tile that has several documents are multiplied once for each.
Wrong    ends that fall, or pass M, make all results NaN; no kernel reads or writes outside of its tensors.
The formulas, for CPUs and fp64, read the ends on the host.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onepass.kernels.column_reduce import arrive_at
from onepass.kernels.grouped_product import group_rows
from onepass.kernels.language import device_function, tl, triton_unsupported
from onepass.kernels.launch import Bound, Grid, grid_of, kernel
from onepass.kernels.layout import as_rows
from onepass.kernels.philox import apply_dropout, dropout_formula, keep_mask, load_seed, probability
from onepass.kernels.rows import aligned, known_align
from onepass.kernels.scratch import new_scratch, stream_scratch
from onepass.runtime.batch_invariance import invariant
from onepass.runtime.op import Registered
from onepass.runtime.sizes import ceil_div, power_of_two, processors


class RowDropout(NamedTuple):
    """Which numbers of rows are dropped, beside a seed in memory."""

    threshold: int = 0  # of 65536; 0: nothing is dropped
    number: int | None = None  # the seed, where it is not in memory
    first_row: int = 0  # the number of the first row


NO_DROPOUT = RowDropout()

# ---- kernels ----


@device_function
def _load_ends(ends_ptr, M, E, BLOCK_E: tl.constexpr):
    """Return all ends, in int64, and whether they are wrong."""
    lanes = tl.arange(0, BLOCK_E)
    inside = lanes < E
    ends = tl.load(ends_ptr + lanes, mask=inside, other=0x7FFFFFFF).to(tl.int64)
    before = tl.load(ends_ptr + lanes - 1, mask=inside & (lanes > 0), other=0).to(tl.int64)
    return ends, tl.max((inside & ((ends < before) | (ends > M))).to(tl.int32), 0) > 0


@device_function
def _documents_of(ends_ptr, rows, M, E, BLOCK_E: tl.constexpr):
    """Return each row's document, E where it has none, the first and the last of these, and whether the ends are wrong."""
    ends, wrong = _load_ends(ends_ptr, M, E, BLOCK_E)
    documents = tl.sum((ends[None, :] <= rows[:, None]).to(tl.int64), 1)
    documents = tl.where(rows < M, documents, E)
    last = tl.max(tl.where(documents < E, documents, -1), 0)
    return documents, tl.min(documents, 0), tl.where(wrong, -1, last), wrong


@device_function
def _size_of(ends_ptr, e, size):
    """Return `size`, or 0 where the document has no rows: then there is nothing to multiply."""
    begin = tl.load(ends_ptr + e - 1, mask=e > 0, other=0)
    return tl.where(tl.load(ends_ptr + e) > begin, size, 0)


@kernel
def _shrink_kernel(
    x_ptr, w_ptr, t_ptr, ends_ptr, scales_ptr, seed_ptr, partial_ptr, arrived_ptr,
    M, FIRST, SEED, X_ROW, C, R, W_E, W_C, W_R, E, scale, threshold,
    ALIGN: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """PARTS programs share a row's columns. The last to arrive adds their sums, in order."""
    X_ROW, C = aligned(X_ROW, ALIGN), aligned(C, ALIGN)
    block = tl.program_id(1).to(tl.int64) + 65535 * tl.program_id(2)
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    part = tl.program_id(0) % PARTS
    r = tl.program_id(0) // PARTS * BLOCK_R + tl.arange(0, BLOCK_R)
    OWN = tl.cdiv(C, PARTS * BLOCK_C) * BLOCK_C  # columns
    first, last = 0, 0
    if ends_ptr is not None:
        documents, first, last, wrong = _documents_of(ends_ptr, rows, M, E, BLOCK_E)
    if threshold is not None:
        seed = load_seed(seed_ptr, SEED)
    t = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
    for e in range(first, last + 1):
        width = tl.minimum((part + 1) * OWN, C)
        if ends_ptr is not None:
            width = _size_of(ends_ptr, e, width)
        own = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
        for left in range(part * OWN, width, BLOCK_C):
            c = left + tl.arange(0, BLOCK_C)
            x = tl.load(x_ptr + rows[:, None] * X_ROW + c[None, :], mask=(rows < M)[:, None] & (c < C)[None, :], other=0.0)
            if threshold is not None:
                x = tl.where(keep_mask(seed, rows + FIRST, left, threshold, BLOCK_C), x, 0.0)
            at = w_ptr + e * W_E + c[:, None] * W_C + r[None, :] * W_R
            w = tl.load(at, mask=(c < C)[:, None] & (r < R)[None, :], other=0.0)
            own = tl.dot(x, w, own, input_precision="ieee")
        if scales_ptr is not None:
            own *= tl.load(scales_ptr + e * R + r, mask=r < R, other=0.0).to(tl.float32)[None, :]
        t = own if ends_ptr is None else tl.where((documents == e)[:, None], own, t)
    inside, at, last_one = (rows < M)[:, None] & (r < R)[None, :], rows[:, None] * R + r[None, :], True
    if PARTS > 1:
        tl.store(partial_ptr + part * M.to(tl.int64) * R + at, t, mask=inside)
        tile = arrived_ptr + block * (tl.num_programs(0) // PARTS) + tl.program_id(0) // PARTS
        last_one = arrive_at(tile, PARTS)
        if last_one:
            t = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
            for other in tl.static_range(PARTS):  # others wrote it: not from this multiprocessor's L1
                t += tl.load(partial_ptr + other * M.to(tl.int64) * R + at, mask=inside, other=0.0, cache_modifier=".cg")
            tl.store(tile, 0)
    if last_one:
        t *= scale
        if ends_ptr is not None:
            t = tl.where(wrong, float("nan"), t)
        tl.store(t_ptr + at, t, mask=inside)


@kernel
def _expand_kernel(
    t_ptr, w_ptr, y_ptr, start_ptr, ends_ptr, seed_ptr, M, FIRST, SEED,
    C, R, W_E, W_C, W_R, START_ROW, E, threshold, scale,
    ALIGN: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    """A program has several blocks of columns, for which it finds its rows' documents once."""
    C = aligned(C, ALIGN)
    block = tl.program_id(1).to(tl.int64) + 65535 * tl.program_id(2)
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    first, last = 0, 0
    if ends_ptr is not None:
        documents, first, last, wrong = _documents_of(ends_ptr, rows, M, E, BLOCK_E)
    if threshold is not None:
        seed = load_seed(seed_ptr, SEED)
    for own_block in range(BLOCKS):
        left = (tl.program_id(0) * BLOCKS + own_block) * BLOCK_C
        c = left + tl.arange(0, BLOCK_C)
        inside = (rows < M)[:, None] & (c < C)[None, :]
        y = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
        for e in range(first, last + 1):
            rank = R
            if ends_ptr is not None:
                rank = _size_of(ends_ptr, e, R) if last > first else R
            own = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
            for low in range(0, rank, BLOCK_R):
                r = low + tl.arange(0, BLOCK_R)
                t = tl.load(t_ptr + rows[:, None] * R + r[None, :], mask=(rows < M)[:, None] & (r < R)[None, :], other=0.0)
                at = w_ptr + e * W_E + c[None, :] * W_C + r[:, None] * W_R
                w = tl.load(at, mask=(r < R)[:, None] & (c < C)[None, :], other=0.0)
                own = t.to(tl.float32) * w.to(tl.float32) if BLOCK_R == 1 else tl.dot(t, w, own, input_precision="ieee")
            y = own if ends_ptr is None else tl.where((documents == e)[:, None], own, y)
        if threshold is not None:
            y = apply_dropout(y, seed, rows + FIRST, left, threshold, scale, BLOCK_C)
        if ends_ptr is not None:
            y = tl.where(wrong, float("nan"), y)
        if start_ptr is not None:
            y += tl.load(start_ptr + rows[:, None] * START_ROW + c[None, :], mask=inside, other=0.0).to(tl.float32)
        tl.store(y_ptr + rows[:, None] * C + c[None, :], y, mask=inside)


@kernel
def _gradient_kernel(
    t_ptr, x_ptr, dw_ptr, ends_ptr, seed_ptr, M, ROWS, FIRST, SEED, X_ROW, C, R, DW_C, DW_R, E, threshold, scale,
    ALIGN: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    X_ROW, C = aligned(X_ROW, ALIGN), aligned(C, ALIGN)
    left = tl.program_id(0) * BLOCK_C
    c = left + tl.arange(0, BLOCK_C)
    r = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    e = tl.program_id(2).to(tl.int64)  # the document; without ends, a strip of ROWS rows
    if ends_ptr is not None:
        begin = tl.maximum(tl.load(ends_ptr + e - 1, mask=e > 0, other=0), 0).to(tl.int32)  # in x though wrong
        end = tl.minimum(tl.load(ends_ptr + e), M).to(tl.int32)
    else:
        begin = e * ROWS
        end = tl.minimum(begin + ROWS, M)
    if threshold is not None:
        seed = load_seed(seed_ptr, SEED)
    dw = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
    for top in range(begin, end, BLOCK_M):
        rows = (top + tl.arange(0, BLOCK_M)).to(tl.int64)
        t = tl.load(t_ptr + rows[:, None] * R + r[None, :], mask=(rows < end)[:, None] & (r < R)[None, :], other=0.0)
        x = tl.load(x_ptr + rows[:, None] * X_ROW + c[None, :], mask=(rows < end)[:, None] & (c < C)[None, :], other=0.0)
        if threshold is not None:
            x = tl.where(keep_mask(seed, rows + FIRST, left, threshold, BLOCK_C), x, 0.0)
        dw = tl.dot(tl.trans(t), x, dw, input_precision="ieee")
    if threshold is not None:
        dw *= scale
    if ends_ptr is not None:
        _, wrong = _load_ends(ends_ptr, M, E, BLOCK_E)
        dw = tl.where(wrong, float("nan"), dw)
    at = dw_ptr + e * C * R + r[:, None] * DW_R + c[None, :] * DW_C
    tl.store(at, dw, mask=(r < R)[:, None] & (c < C)[None, :])


# ---- tiles: from the shape and the device, never by trial ----

_LEAST = 16  # sizes that tensor cores take
_EXPAND_BLOCKS = 4  # of columns, of a program that looks for documents first


def _rank_block(R: int, most: int) -> int:
    return min(max(_LEAST, power_of_two(R)), most)


Sizes = tuple[int, ...]


@lru_cache(1024)
def _bind_shrink(C: int, R: int, strides: Sizes, factors: tuple[float, int], groups: Sizes, tile: Sizes, parts: int) -> Bound:
    x_row, *of_w = strides
    (scale, threshold), (E, block_e) = factors, groups
    dropped, keep_scale = probability(threshold)
    sizes = x_row, C, R, *of_w, E, scale * (keep_scale or 1.0), dropped
    bound: Bound = _shrink_kernel.bind(*sizes, known_align(x_row, C), block_e, *tile, parts)
    return bound


@lru_cache(4096)
def _shrink_plan(
    shape: Sizes, strides: Sizes, scale: float, threshold: int, groups: Sizes, wide: bool, multiprocessors: int
) -> tuple[Bound, Grid, int]:
    """Return the bound kernel, its grid, and how many programs share a row: one where multiprocessors are 0.

    Blocks of few rows, as nothing else is parallel.
    """
    M, C, R = shape
    both = bool(groups[0] and threshold)  # more would not fit in registers
    block_r = _rank_block(R, 32 if wide else 64 if both else 128)
    block_m = 16 if wide and both else 32 if wide or threshold or block_r > 32 or C % 16 else 64  # of any width: registers
    block_c = 32 if wide and both else 64 if wide or both or block_r > 64 else 128
    across, down, parts = ceil_div(R, block_r), ceil_div(M, block_m), 1
    while parts < 8 and parts * across * down * block_m <= 64 * multiprocessors and 8 * parts * block_c <= C:
        parts *= 2
    bound = _bind_shrink(C, R, strides, (scale, threshold), groups, (block_m, block_c, block_r), parts)
    return bound, grid_of(parts * across, down), parts


@lru_cache(1024)
def _expand_plan(C: int, R: int, strides: Sizes, threshold: int, groups: Sizes, wide: bool) -> tuple[Bound, int, int]:
    *of_w, start_row = strides
    E, block_e = groups
    several = bool(E and not threshold and not wide and C % 16 == 0)  # blocks: of others registers have no room
    block_m, block_c, block_r = (32, 64, _LEAST) if wide else (64, 64 if several else 128, _rank_block(R, 64))
    if R == 1 and not wide:
        block_m, block_r = 32, 1
    blocks = _EXPAND_BLOCKS if several else 1
    tile = known_align(C, start_row), block_e, block_m, block_c, block_r, blocks
    sizes = C, R, *of_w, start_row, E, *probability(threshold)
    bound = _expand_kernel.bind(*sizes, *tile, num_warps=4 if wide or several else 8)
    return bound, block_m, ceil_div(C, block_c * blocks)


@lru_cache(1024)
def _gradient_plan(
    C: int, R: int, strides: Sizes, threshold: int, groups: Sizes, wide: bool
) -> tuple[Bound, int, tuple[int, int]]:  # fmt: skip
    x_row, dw_c, dw_r = strides
    E, block_e = groups
    block_m, block_c, block_r = (32, 64, _rank_block(R, 32)) if wide else (64, 64, _rank_block(R, 128))
    sizes = x_row, C, R, dw_c, dw_r, E, *probability(threshold)
    bound = _gradient_kernel.bind(*sizes, known_align(x_row, C), block_e, block_m, block_c, block_r)
    return bound, block_m, (ceil_div(C, block_c), ceil_div(R, block_r))


# ---- launches, and formulas where no kernel can run ----


def _by_formula(x: Tensor) -> bool:
    return x.dtype.itemsize > 4 or triton_unsupported(x) is not None


def _of_matrices(w: Tensor) -> Sizes:
    """Return the strides of [E, C, R] or [C, R]."""
    return w.stride() if w.dim() == 3 else (0, *w.stride())


def _groups(ends: Tensor | None) -> Sizes:
    return (0, 1) if ends is None else (ends.shape[0], power_of_two(ends.shape[0]))


def lora_shrink_forward(
    x: Tensor, w: Tensor, ends: Tensor | None, scales: Tensor | None, seed: Tensor | None, scale: float, dropout: RowDropout,
    *, keep_scratch: bool = True,
) -> Tensor:  # fmt: skip
    """Return t in x's type. `scales` [E, R] multiply it beside `scale`."""
    if _by_formula(x):
        return _shrink_formula(x, w, ends, scales, seed, scale, dropout)
    M, C, R = x.shape[0], *w.shape[-2:]
    t = x.new_empty(M, R)
    x, x_row = as_rows(x)
    strides, wide = (x_row, *_of_matrices(w)), x.dtype.itemsize > 2
    if not M:
        return t
    plan = (M, C, R), strides, scale, dropout.threshold, _groups(ends), wide, 0 if invariant() else processors(x.device)
    launch, grid, parts = _shrink_plan(*plan)
    scratch: tuple[Tensor | None, ...] = (None, None)
    if parts > 1:
        scratch = (stream_scratch if keep_scratch else new_scratch)(parts * M * R, grid[0] * grid[1] * grid[2], x.device)
    launch(grid, x, w, t, ends, scales, seed, *scratch, M, dropout.first_row, dropout.number)
    return t


def lora_expand_forward(
    t: Tensor, w: Tensor, start: Tensor | None, ends: Tensor | None, seed: Tensor | None, dropout: RowDropout
) -> Tensor:  # fmt: skip
    """Return y in t's type."""
    if _by_formula(t):
        return _expand_formula(t, w, start, ends, seed, dropout)
    M, C, R = t.shape[0], *w.shape[-2:]
    y, start_row = t.new_empty(M, C), 0
    if start is not None:  # a bias's one row is all rows'
        start, row = as_rows(start)
        start_row = row if start.dim() == 2 else 0
    strides, wide = (*_of_matrices(w), start_row), t.dtype.itemsize > 2
    launch, block_m, across = _expand_plan(C, R, strides, dropout.threshold, _groups(ends), wide)
    if M:
        launch(grid_of(across, ceil_div(M, block_m)), t, w, y, start, ends, seed, M, dropout.first_row, dropout.number)
    return y


def lora_gradient_forward(
    t: Tensor, x: Tensor, ends: Tensor | None, seed: Tensor | None, transposed: bool, dropout: RowDropout
) -> Tensor:  # fmt: skip
    """Return dw, [R, C] or [E, R, C]; `transposed`: [C, R] or [E, C, R]."""
    if _by_formula(x):
        return _gradient_formula(t, x, ends, seed, transposed, dropout)
    M, C, R = *x.shape, t.shape[1]
    strides = (R, 1) if transposed else (1, C)
    x, x_row = as_rows(x)
    wide = x.dtype.itemsize > 2
    launch, block_m, grid = _gradient_plan(C, R, (x_row, *strides), dropout.threshold, _groups(ends), wide)
    if ends is None:  # strips of rows that make four programs a multiprocessor
        count = max(1, min(ceil_div(M, 4 * block_m), 4 * processors(x.device) // (grid[0] * grid[1])))
    else:
        count = ends.shape[0]
    parts = x.new_empty((count, *((C, R) if transposed else (R, C))), dtype=torch.float32)
    launch((*grid, count), t, x, parts, ends, seed, M, ceil_div(M, count), dropout.first_row, dropout.number)
    return parts if ends is not None else parts[0] if count == 1 else parts.sum(0)


def _parts(ends: Tensor | None) -> Iterable[tuple[int, slice]]:
    """Return each document and its rows."""
    return [(0, slice(None))] if ends is None else enumerate(group_rows(ends))


def _of_document(w: Tensor, e: int) -> Tensor:
    return w if w.dim() == 2 else w[e]


def _wide(x: Tensor, seed: Tensor | None, dropout: RowDropout) -> Tensor:
    """Return x in fp32 or wider, after dropout."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    if not dropout.threshold:
        return x
    number = seed if dropout.number is None else dropout.number
    assert number is not None
    rows = torch.arange(x.shape[0], device=x.device) + dropout.first_row
    return dropout_formula(x, number, rows, dropout.threshold)


def _shrink_formula(
    x: Tensor, w: Tensor, ends: Tensor | None, scales: Tensor | None, seed: Tensor | None, scale: float, dropout: RowDropout
) -> Tensor:  # fmt: skip
    rows = _wide(x, seed, dropout)
    t = rows.new_zeros(x.shape[0], w.shape[-1])
    for e, part in _parts(ends):
        own = rows[part] @ _of_document(w, e).to(rows.dtype) * scale
        t[part] = own if scales is None else own * scales[e].to(rows.dtype)
    return t.to(x.dtype)


def _expand_formula(
    t: Tensor, w: Tensor, start: Tensor | None, ends: Tensor | None, seed: Tensor | None, dropout: RowDropout
) -> Tensor:  # fmt: skip
    wide = _wide(t, None, NO_DROPOUT)
    y = wide.new_zeros(t.shape[0], w.shape[-2])
    for e, part in _parts(ends):
        torch.mm(wide[part], _of_document(w, e).t().to(wide.dtype), out=y[part])
    y = _wide(y, seed, dropout)
    return (y if start is None else y + start).to(t.dtype)


def _gradient_formula(
    t: Tensor, x: Tensor, ends: Tensor | None, seed: Tensor | None, transposed: bool, dropout: RowDropout
) -> Tensor:  # fmt: skip
    wide, low = _wide(x, seed, dropout), _wide(t, None, NO_DROPOUT)
    first, second = (wide, low) if transposed else (low, wide)
    of_documents = [first[part].t() @ second[part] for _, part in _parts(ends)]
    return of_documents[0] if ends is None else torch.stack(of_documents)


# ---- registered ops ----


def _gradient_fake(t: Tensor, x: Tensor, ends: Tensor | None, seed: Any, transposed: bool, dropout: RowDropout) -> Tensor:
    R, C = t.shape[1], x.shape[1]
    lead = () if ends is None else (ends.shape[0],)
    shape = (*lead, C, R) if transposed else (*lead, R, C)
    return x.new_empty(shape, dtype=torch.promote_types(x.dtype, torch.float32))


lora_shrink = Registered(
    "lora_shrink(Tensor x, Tensor w, Tensor? ends, Tensor? scales, Tensor? seed, float scale, RowDropout dropout) -> Tensor",
    lora_shrink_forward,
    lambda x, w, *rest: x.new_empty(x.shape[0], w.shape[-1]),
    RowDropout,
    dispatched=partial(lora_shrink_forward, keep_scratch=False),
)
lora_expand = Registered(
    "lora_expand(Tensor t, Tensor w, Tensor? start, Tensor? ends, Tensor? seed, RowDropout dropout) -> Tensor",
    lora_expand_forward,
    lambda t, w, *rest: t.new_empty(t.shape[0], w.shape[-2]),
    RowDropout,
)
lora_gradient = Registered(
    "lora_gradient(Tensor t, Tensor x, Tensor? ends, Tensor? seed, bool transposed, RowDropout dropout) -> Tensor",
    lora_gradient_forward,
    _gradient_fake,
    RowDropout,
)
