"""LoRA beside a layer's weight: a `Product` around the layer's own, as if the weight were weight + scale * b @ a.

Forward   t = scale * rows @ a.T, [M, R]; y = t @ b.T + bias, to which the layer's product is added. In 16 bits cuBLAS rounds the
          product and adds it; in eight bits t @ b.T is added to y.
Backward  u = scale * dy @ b, [M, R]. u @ a is where dy @ weight is added; da = u.T @ rows and db = dy.T @ t are fp32.
Saves     t, and a and b in the product's type, beside what the layer saves when its weight is trained. A weight that asks for no
          gradient makes none.
Several   adapters of one weight share these products: a and b have the rows and the columns of all (kernels/adapter_pack.py). One
          adapter of the product's type is its own a and b. Adapters of other scales have parts of t and u by themselves.
Ranks     have parts of b's rows with the weight's rows, or of a's columns with its columns; the other matrix is whole on each. u
          or t is then summed over them, and where they divide rows too, the gradient of the whole matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass.distributed.collectives import start_all_gather, start_all_reduce
from onepass.distributed.tensor_parallel import TPLayout, rows_of, start_sum
from onepass.gradients.deferred import DeferredWgrad
from onepass.gradients.main_grad import GradRequest, VectorSums, in_fsdp, main_grad_of
from onepass.kernels.adapter_pack import AdapterShapes, pack_adapters, unpack_adapters
from onepass.product.lora import LoRA
from onepass.product.product import Forward, OutputGradient, Product, ProductCall
from onepass.product.prologue import Inputs, Kept, Needs, Prologue

SKIP = GradRequest.SKIP


class AdapterPlan(NamedTuple):
    """How the adapters of a layer share their products."""

    shapes: AdapterShapes
    is_one: bool  # there is one adapter, of all of the weight's rows: a and b are its own
    scale: float | None  # of all, or None where they have several
    parts: tuple[tuple[slice, slice, float], ...]  # each adapter's columns of t, its rows of the weight, and its scale


def _plan_of(adapters: tuple[tuple[int, float, tuple[int, int] | None], ...], K: int, N: int) -> AdapterPlan:
    """Return the plan of adapters of these ranks, scales and rows."""
    ranks, scales, spans = zip(*adapters, strict=True)
    shapes = AdapterShapes(0, ranks, tuple([span or (0, N) for span in spans]), K, N)
    is_one = len(ranks) == 1 and shapes.rows[0] == (0, N)
    parts = zip(shapes.columns, [slice(*rows) for rows in shapes.rows], map(float, scales), strict=True)
    return AdapterPlan(shapes, is_one, float(scales[0]) if len(set(scales)) == 1 else None, tuple(parts))


_cached_plan_of = lru_cache(maxsize=4096)(_plan_of)  # to make one takes 10 us of a call; a compiler warns of caches


class LoRAProduct(NamedTuple):
    """A layer's product, and what its adapters add.

    The adapters' tensors, a and b of each in turn, are arguments of the autograd Function. `bind` takes those of a call.
    """

    base: Product
    plan: AdapterPlan
    num_adapters: int  # their tensors
    deferred: DeferredWgrad | None
    takes_unrounded: bool
    tensors: Sequence[Tensor] = ()
    needs: Sequence[bool] = ()

    num_weights: int = 1

    @classmethod
    def around(cls, base: Product, adapters: Sequence[LoRA], weight: Tensor) -> LoRAProduct:
        """Return a layer's product with its adapters."""
        plan_of = _plan_of if torch.compiler.is_compiling() else _cached_plan_of
        N, K = weight.shape
        plan = plan_of(tuple([(a.shape[0], scale, rows) for a, _, scale, rows in adapters]), K, N)
        return cls(base, plan, 2 * len(adapters), base.deferred, base.takes_unrounded)

    def rows_in(self, x_type: torch.dtype, dtype: torch.dtype) -> Prologue:
        return self.base.rows_in(x_type, dtype)

    def bind(self, tensors: Sequence[Tensor], needs: Sequence[bool]) -> LoRAProduct:
        return LoRAProduct(*self[:5], tensors, needs)

    def forward(
        self, prologue: Prologue, inputs: Inputs, weight: Any, bias: Any, needs: Needs, start: Any = None
    ) -> Forward:  # fmt: skip
        plan, tensors, dtype = self.plan, self.tensors, prologue.dtype
        if plan.is_one and tensors[0].dtype is dtype and tensors[1].dtype is dtype:
            a, b = tensors
        else:
            a, b = pack_adapters(tensors, dtype, plan.shapes)
        t: Any = None

        def start_with_adapters(rows: Tensor, N: int, bias: Tensor | None) -> Tensor:
            nonlocal t
            t = _low_rank(rows_of(rows), a, plan)
            return F.linear(t, b, bias)

        if needs is not None and True in self.needs[::2]:  # the gradient of a takes the rows, as the weight's does
            needs = (*needs[:-2], True, needs[-1])
        y, rows, kept, base = self.base.forward(prologue, inputs, weight, bias, needs, start_with_adapters)
        places = [main_grad_of(tensor) if need else None for tensor, need in zip(tensors, self.needs, strict=False)]
        call: Any = LoRACall(base, plan, tensors, places)
        return y, rows, (*kept, t, a, b), call

    def mark_output(self, y: Tensor, bias: Tensor | None) -> None:
        """Codes alone would not do: the adapters take y's gradient, too."""


# ---- small products ----


def _low_rank(rows: Tensor, a: Tensor, plan: AdapterPlan) -> Tensor:
    """Return t, [M, R]."""
    if plan.scale is not None:
        return _scaled(rows, a.t(), plan.scale)
    t = rows.new_empty(rows.shape[0], a.shape[0])
    for columns, _, scale in plan.parts:
        _scaled(rows, a[columns].t(), scale, t[:, columns])
    return t


def _low_rank_gradient(dy: Tensor, b: Tensor, plan: AdapterPlan) -> Tensor:
    """Return u, [M, R]."""
    if plan.scale is not None:
        return _scaled(dy, b, plan.scale)
    u = dy.new_empty(dy.shape[0], b.shape[1])
    for columns, rows, scale in plan.parts:
        _scaled(dy[:, rows], b[rows, columns], scale, u[:, columns])
    return u


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


# ---- its backward ----


class LoRACall(NamedTuple):
    """The backward of one call, which may be run more than once."""

    base: ProductCall
    plan: AdapterPlan
    parameters: Sequence[Tensor]
    main_grads: Sequence[Tensor | None]

    @property
    def layout(self) -> TPLayout | None:
        return self.base.layout

    def of_pass(self, kept: Kept, requests: Sequence[GradRequest]) -> tuple[LoRAPass, Kept]:
        """Return a `ProductCall` of a pass that wants these gradients of the adapters, and what the prologue has kept."""
        return LoRAPass(self, kept[-3:], requests), kept[:-3]


class LoRAPass:
    """One pass of backward: a `ProductCall` around the layer's own."""

    def __init__(self, call: LoRACall, saved: Sequence[Any], requests: Sequence[GradRequest]) -> None:
        base, self.plan, self.parameters, self.main_grads = call
        self.base, self.requests = base, requests
        self.t, self.a, self.b = saved
        of_a, of_b = requests[::2], requests[1::2]
        self.asks_a, self.asks_b = of_a.count(SKIP) < len(of_a), of_b.count(SKIP) < len(of_b)
        self.layout, self.deferred, self.target = base.layout, base.deferred, base.target
        self.start_input, self.weight_gradient = base.start_input, base.weight_gradient
        self.u: Tensor | None = None

    def output_gradient(
        self, dy: Tensor, weight: Any, came: Tensor | None, asks_rows: bool, asks_weight: bool, *, later: bool, ours: bool = False
    ) -> OutputGradient:  # fmt: skip
        """Make u, and start the rows' gradient with u @ a."""
        layout, a = self.layout, self.a
        if asks_rows or self.asks_a:
            self.u = _low_rank_gradient(rows_of(dy), self.b, self.plan)
            if layout is not None and layout.gathers_dy:
                self.u = start_all_gather(self.u, layout.group).wait()
        if asks_rows:
            assert self.u is not None
            came, ours = self.u @ a if came is None else torch.addmm(rows_of(came), self.u, a), True
            if dy.dim() != 2 and (layout is None or not layout.gathers_dy):
                came = came.view(*dy.shape[:-1], a.shape[1])
        return self.base.output_gradient(dy, weight, came, asks_rows, asks_weight, later=later, ours=ours)

    def gradients(self, dy: Tensor, rows: Callable[[], Tensor]) -> list[VectorSums | None]:
        """Return the gradients of a and b of each adapter, and where they belong. Collective over ranks.

        In fp32 or wider, or where autograd gets them in their own type.

        Args:
            rows: makes this rank's rows.
        """
        layout, da, db = self.layout, None, None
        if self.asks_a:
            assert self.u is not None
            u = self.u if layout is None or layout.by_row else start_sum(self.u, layout).wait()
            da = _wide_product(u, rows_of(rows()))
            da = da if layout is None or not layout.gathers_x else start_all_reduce(da, layout.group).wait()
        if self.asks_b:
            t = self.t if layout is None or not layout.by_row else start_sum(self.t.clone(), layout).wait()
            db = _wide_product(rows_of(dy), t)
            db = db if layout is None or not layout.gathers_dy else start_all_reduce(db, layout.group).wait()
        of_adapters = zip(self._of_each(da, db), self.parameters, self.main_grads, self.requests, strict=True)
        return [None if each[0] is None else (each[0], *each[1:]) for each in of_adapters]

    def _of_each(self, da: Tensor | None, db: Tensor | None) -> Sequence[Tensor | None]:
        """Take both matrices apart. What autograd gets is rounded in the same pass."""
        wide = self.t.dtype if self.t.dtype.itemsize > 2 else torch.float32
        places = zip(self.parameters, self.main_grads, strict=True)
        dtypes = [one.dtype if place is None and not in_fsdp(one) else wide for one, place in places]
        if self.plan.is_one and (da is None or dtypes[0] is wide) and (db is None or dtypes[1] is wide):
            return da, db
        sums: list[Tensor | None] = [None] * len(dtypes)
        asked = slice(None) if da is not None and db is not None else slice(0 if db is None else 1, None, 2)
        sums[asked] = unpack_adapters(da, db, dtypes[asked], self.plan.shapes)
        return sums
