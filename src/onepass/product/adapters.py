"""A layer's adapters as one pair of matrices, a [R, K] and b [N, R], and the six products that they take part in.

Forward   t = scale * rows @ a.T; y starts from t @ b.T + bias.
Backward  u = scale * dy @ b; the rows' gradient starts from u @ a; da = u.T @ rows; db = dy.T @ t, both in fp32 or wider.
Plain     cuBLAS has all of them. Where scales differ each adapter has its parts of t and u.
Masked    adapters by document, or with dropout: kernels/low_rank.py has those that need its kernels.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass.distributed.collectives import start_all_gather
from onepass.distributed.tensor_parallel import TPLayout
from onepass.kernels.adapter_pack import AdapterShapes
from onepass.kernels.device_tables import device_table
from onepass.kernels.low_rank import NO_DROPOUT, RowDropout, lora_expand, lora_gradient, lora_shrink
from onepass.kernels.philox import Seed, as_tensor, draw_seed, threshold_of
from onepass.product.lora import LoRA, check_ends_of


class AdapterPlan(NamedTuple):
    """How the adapters of a layer share products, and these products where all rows have the same adapters."""

    shapes: AdapterShapes
    is_one: bool  # there is one adapter, of all of the weight's rows: a and b are its own
    scale: float | None  # of all, or None where they have several
    parts: tuple[tuple[slice, slice, float], ...]  # each adapter's columns of t, its rows of the weight, and its scale

    def low_rank(self, rows: Tensor, a: Tensor) -> Tensor:
        """Return t, [M, R]."""
        if self.scale is not None:
            return _scaled(rows, a.t(), self.scale)
        t = rows.new_empty(rows.shape[0], a.shape[0])
        for columns, _, scale in self.parts:
            _scaled(rows, a[columns].t(), scale, t[:, columns])
        return t

    def expand(self, t: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
        """Return what y starts from, [M, N]."""
        return F.linear(t, b, bias)

    def low_rank_gradient(self, dy: Tensor, b: Tensor, first_row: int | None) -> Tensor:
        """Return u, [M, R]."""
        if self.scale is not None:
            return _scaled(dy, b, self.scale)
        u = dy.new_empty(dy.shape[0], b.shape[1])
        for columns, rows, scale in self.parts:
            _scaled(dy[:, rows], b[rows, columns], scale, u[:, columns])
        return u

    def rows_gradient(self, u: Tensor, a: Tensor, came: Tensor | None) -> Tensor:
        """Return what the rows' gradient starts from, [M, K]."""
        return u @ a if came is None else torch.addmm(came, u, a)

    def gradient_of_a(self, u: Tensor, rows: Tensor, first_row: int | None) -> Tensor:
        return _wide_product(u, rows)

    def gradient_of_b(self, dy: Tensor, t: Tensor, first_row: int | None) -> Tensor:
        return _wide_product(dy, t)


class MaskedAdapters(NamedTuple):
    """The same products where each document has adapters of its own, or dropout drops some of their rows' numbers.

    `first_row` is the number of the first of these rows where a rank has some of them, and None where it has all.
    """

    scale: float
    dropout: RowDropout
    ends: Tensor | None
    scales: Tensor | None  # [documents, R], beside `scale`
    seed: Tensor | None

    def low_rank(self, rows: Tensor, a: Tensor) -> Tensor:
        check_ends_of(self.ends, rows.shape[0])
        return lora_shrink(rows, a.mT, self.ends, self.scales, self.seed, self.scale, self.dropout)  # type: ignore[no-any-return]

    def expand(self, t: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
        if self.ends is None:
            return F.linear(t, b, bias)
        return lora_expand(t, b, bias, self.ends, None, NO_DROPOUT)  # type: ignore[no-any-return]

    def low_rank_gradient(self, dy: Tensor, b: Tensor, first_row: int | None) -> Tensor:
        ends = self._ends_from(first_row, dy.shape[0])
        return lora_shrink(dy, b, ends, self.scales, None, self.scale, NO_DROPOUT)  # type: ignore[no-any-return]

    def rows_gradient(self, u: Tensor, a: Tensor, came: Tensor | None) -> Tensor:
        return lora_expand(u, a.mT, came, self.ends, self.seed, self.dropout)  # type: ignore[no-any-return]

    def gradient_of_a(self, u: Tensor, rows: Tensor, first_row: int | None) -> Tensor:
        ends, dropout = self._ends_from(first_row, rows.shape[0]), self.dropout._replace(first_row=first_row or 0)
        return lora_gradient(u, rows, ends, self.seed, False, dropout)  # type: ignore[no-any-return]

    def gradient_of_b(self, dy: Tensor, t: Tensor, first_row: int | None) -> Tensor:
        if self.ends is None:
            return _wide_product(dy, t)
        return lora_gradient(t, dy, self._ends_from(first_row, dy.shape[0]), None, True, NO_DROPOUT)  # type: ignore[no-any-return]

    def _ends_from(self, first_row: int | None, M: int) -> Tensor | None:
        return self.ends if self.ends is None or first_row is None else (self.ends - first_row).clamp_(0, M)


def _scaled(first: Tensor, second: Tensor, scale: float, out: Tensor | None = None) -> Tensor:
    """Return scale * first @ second, rounded once."""
    if torch.compiler.is_compiling():
        product = first @ second * scale
        return product if out is None else out.copy_(product)
    if out is None:
        if scale == 1.0:
            return first @ second
        watched = torch._C._len_torch_dispatch_stack()  # by a mode whose tensors a cache must not keep
        zero = first.new_empty(1) if watched else _zero(first.dtype, first.device)
        return torch.addmm(zero, first, second, beta=0, alpha=scale)
    return torch.addmm(out, first, second, beta=0, alpha=scale, out=out)


@lru_cache
def _zero(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a number that products with beta=0 do not read."""
    return torch.zeros(1, dtype=dtype, device=device)


def _wide_product(first: Tensor, second: Tensor) -> Tensor:
    """Return first.T @ second in fp32 or wider."""
    if first.dtype.itemsize > 2:
        return first.t() @ second
    if first.is_cuda:
        return torch.mm(first.t(), second, out_dtype=torch.float32)
    return first.t().float() @ second.float()


# ---- what a call's adapters are ----


def plan_of(adapters: Sequence[LoRA], weight: Tensor) -> AdapterPlan:
    N, K = weight.shape
    ends = adapters[0].ends
    make = _plan_of if torch.compiler.is_compiling() else _cached_plan_of
    each = tuple([(a.shape[-2], scale if type(scale) is float else _number(scale), rows) for a, _, scale, rows, _, _ in adapters])
    return make(each, 0 if ends is None else ends.shape[0], K, N)


def _number(scale: Any) -> float | None:
    return float(scale) if isinstance(scale, (int, float)) else None


def _plan_of(
    adapters: tuple[tuple[int, float | None, tuple[int, int] | None], ...], documents: int, K: int, N: int
) -> AdapterPlan:  # fmt: skip
    """Return the plan of adapters of these ranks, scales and rows. A scale of None is one for each document."""
    ranks, scales, spans = zip(*adapters, strict=True)
    shapes = AdapterShapes(documents, ranks, tuple([span or (0, N) for span in spans]), K, N)
    parts = zip(shapes.columns(), [slice(*rows) for rows in shapes.rows], scales, strict=True)
    is_one = len(ranks) == 1 and shapes.rows[0] == (0, N)
    return AdapterPlan(shapes, is_one, scales[0] if len(set(scales)) == 1 else None, tuple(parts))


_cached_plan_of = lru_cache(maxsize=4096)(_plan_of)  # to make one takes 10 us of a call; a compiler warns of caches


def mask_of(
    adapters: Sequence[LoRA], plan: AdapterPlan, x: Tensor, layout: TPLayout | None
) -> tuple[RowDropout, tuple[Tensor | None, Tensor | None, Tensor | None]]:
    """Return what is dropped, and the ends, scales and seed that `MaskedAdapters` takes. Collective with dropout over ranks."""
    threshold = threshold_of("dropout", adapters[0].dropout)
    scales = _scales_of(adapters, plan, x.device) if plan.scale is None else None
    seed: Any = _seed_of(x, layout) if threshold else None
    number = seed if type(seed) is int else None
    ends = adapters[0].ends
    ends = ends if ends is None else ends.contiguous()
    return RowDropout(threshold, number), (ends, scales, seed if number is None else None)


def _seed_of(x: Tensor, layout: TPLayout | None) -> Seed:
    """Draw a seed. Ranks that have the same rows drop the same numbers, those of other columns drop others."""
    seed = draw_seed(x)
    if layout is None:
        return seed
    if not layout.by_row:
        return start_all_gather(as_tensor(seed, x.device), layout.group).wait()[:1]
    mine = 0x9E3779B97F4A7C15 * (layout.group.rank() + 1) % (1 << 61)
    return (as_tensor(seed, x.device) ^ mine) if isinstance(seed, Tensor) else seed ^ mine


def _scales_of(adapters: Sequence[LoRA], plan: AdapterPlan, device: torch.device) -> Tensor:
    """Return each document's scale of each column of t, [documents, R]."""
    documents = plan.shapes.groups or 1
    if any(isinstance(adapter.scale, Tensor) for adapter in adapters):
        each = [torch.as_tensor(adapter.scale, dtype=torch.float32, device=device) for adapter in adapters]
        columns = [scale.view(-1, 1).expand(documents, rank) for scale, rank in zip(each, plan.shapes.ranks, strict=True)]
        return torch.cat(columns, 1)
    numbers = []
    for e in range(documents):
        for adapter, rank in zip(adapters, plan.shapes.ranks, strict=True):
            scale: Any = adapter.scale
            numbers += [float(scale if isinstance(scale, (int, float)) else scale[e])] * rank
    if torch.compiler.is_compiling():
        return torch.tensor(numbers, dtype=torch.float64, device=device).view(documents, -1)
    bits = struct.unpack(f"{len(numbers)}q", struct.pack(f"{len(numbers)}d", *numbers))
    return device_table(bits, device).view(torch.float64).view(documents, -1)
