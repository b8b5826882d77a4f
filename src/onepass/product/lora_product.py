"""LoRA beside a layer's weight: a `Product` around the layer's own, as if the weight were weight + scale * b @ a.

Forward   t @ b.T + bias is what the layer's product is added to (product/adapters.py). cuBLAS rounds the product to 16 bits and
          adds it, in eight bits too.
Backward  u @ a is where dy @ weight is added.
Saves     t, and a and b in the product's type, beside what the layer saves when its weight is trained; a seed where it is in
          memory, and no mask. A weight that asks for no gradient makes none.
Several   adapters of one weight share these products: a and b have the rows and the columns of all (kernels/adapter_pack.py). One
          adapter of the product's type is its own a and b.
Ranks     have parts of b's rows with the weight's rows, or of a's columns with its columns; the other matrix is whole on each. u
          or t is then summed over them, and where they divide rows too, the gradient of the whole matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onepass.distributed.collectives import start_all_gather, start_all_reduce
from onepass.distributed.tensor_parallel import Start, TPLayout, rows_of, start_sum
from onepass.gradients.deferred import DeferredWgrad
from onepass.gradients.main_grad import GradRequest, VectorSums, in_fsdp, main_grad_of
from onepass.kernels.adapter_pack import pack_adapters, unpack_adapters
from onepass.kernels.low_rank import RowDropout
from onepass.product.adapters import AdapterPlan, MaskedAdapters, mask_of, plan_of
from onepass.product.lora import WITH_ADAPTERS, LoRA, LowRankRows, are_masked
from onepass.product.product import Forward, OutputGradient, Product, ProductCall
from onepass.product.prologue import Inputs, Keep, Kept, Needs, Prologue

SKIP = GradRequest.SKIP


class LoRAProduct(NamedTuple):
    """A layer's product, and what its adapters add.

    Tensors of adapters are arguments of the autograd Function: a and b of each in turn, and where there are documents or dropout
    their ends, scales and seed, or None. `bind` takes those of a call.
    """

    base: Product
    plan: AdapterPlan
    dropout: RowDropout | None  # None: neither documents nor dropout
    num_adapters: int  # their tensors
    deferred: DeferredWgrad | None
    takes_unrounded: bool
    low_rank_rows: LowRankRows | None  # None: whoever makes y's gradient makes nothing else
    tensors: Sequence[Any] = ()
    needs: Sequence[bool] = ()

    num_weights: int = 1

    @classmethod
    def around(
        cls, base: Any, adapters: Sequence[LoRA], x: Tensor, weight: Tensor
    ) -> tuple[LoRAProduct, list[Tensor | None]]:  # fmt: skip
        """Return a layer's product with its adapters, and the tensors that it takes."""
        plan, dropout, layout = plan_of(adapters, weight), None, getattr(base, "layout", None)
        tensors: list[Tensor | None] = [tensor for adapter in adapters for tensor in adapter[:2]]
        if are_masked(adapters):
            dropout, more = mask_of(adapters, plan, x, layout)
            tensors += more
        alone = dropout is None and layout is None and not torch.compiler.is_compiling()
        rows = LowRankRows() if alone else None
        return cls(base, plan, dropout, len(tensors), base.deferred, base.takes_unrounded, rows), tensors

    def rows_in(self, x_type: torch.dtype, dtype: torch.dtype) -> Prologue:
        return self.base.rows_in(x_type, dtype)

    def bind(self, tensors: Sequence[Any], needs: Sequence[bool]) -> LoRAProduct:
        return LoRAProduct(*self[:7], tensors, needs)

    def forward(
        self, prologue: Prologue, inputs: Inputs, weight: Any, bias: Any, needs: Needs, start: Start | None = None,
        keep: Keep | None = None,
    ) -> Forward:  # fmt: skip
        tensors, own_needs, dtype = self.tensors, self.needs, prologue.dtype
        products, mask = self.plan, ()  # type: Any, Sequence[Any]
        if self.dropout is not None:
            mask, tensors, own_needs = tensors[-3:], tensors[:-3], own_needs[:-3]
            products = _masked(self.plan, self.dropout, mask)
        if self.plan.is_one and tensors[0].dtype is dtype and tensors[1].dtype is dtype:
            a, b = tensors
        else:
            a, b = pack_adapters(tensors, dtype, self.plan.shapes)
        t: Any = None
        of_prologue: list[Tensor | None] = []

        def start_with_adapters(rows: Tensor, N: int, bias: Tensor | None) -> Tensor:
            nonlocal t
            t = products.low_rank(rows_of(rows), a)
            if keep is not None:
                keep((*of_prologue, t, a, b, *mask))
            return products.expand(t, b, bias)  # type: ignore[no-any-return]

        if needs is not None and True in own_needs[::2]:  # the gradient of a takes the rows, as the weight's does
            needs = (*needs[:-2], True, needs[-1])
        y, rows, kept, base = self.base.forward(
            prologue, inputs, weight, bias, needs, start_with_adapters, None if keep is None else of_prologue.extend
        )
        if self.low_rank_rows is not None and True in own_needs[1::2]:
            self.low_rank_rows.t = t
        places = [main_grad_of(tensor) if need else None for tensor, need in zip(tensors, own_needs, strict=False)]
        call: Any = LoRACall(base, self.plan, self.dropout, tensors, places, self.low_rank_rows)
        return y, rows, (*kept, t, a, b, *mask), call

    def mark_output(self, y: Tensor, bias: Tensor | None) -> None:
        """The adapters take y's gradient, too: codes alone would not do."""
        if self.low_rank_rows is not None:
            self.low_rank_rows.mark(y)


WITH_ADAPTERS[LoRA] = LoRAProduct.around


def _masked(plan: AdapterPlan, dropout: RowDropout, mask: Sequence[Any]) -> MaskedAdapters:
    """Return the products of documents, or with dropout. `mask`: the ends, scales and seed."""
    return MaskedAdapters(1.0 if plan.scale is None else plan.scale, dropout, *mask)


# ---- its backward ----


class LoRACall(NamedTuple):
    """The backward of one call, which may be run more than once."""

    base: ProductCall
    plan: AdapterPlan
    dropout: RowDropout | None
    parameters: Sequence[Tensor]
    main_grads: Sequence[Tensor | None]
    low_rank_rows: LowRankRows | None

    @property
    def layout(self) -> TPLayout | None:
        return self.base.layout

    def of_pass(self, kept: Kept, requests: Sequence[GradRequest]) -> tuple[LoRAPass, Kept]:
        """Return a `ProductCall` of a pass that wants these gradients of the adapters, and what the prologue has kept."""
        count = 3 if self.dropout is None else 6
        return LoRAPass(self, kept[-count:], requests), kept[:-count]


class LoRAPass:
    """One pass of backward: a `ProductCall` around the layer's own."""

    def __init__(self, call: LoRACall, saved: Sequence[Any], requests: Sequence[GradRequest]) -> None:
        base, plan, dropout, self.parameters, self.main_grads, self.low_rank_rows = call
        self.base, self.plan, self.no_mask = base, plan, [None] * (len(requests) - len(call.parameters))
        self.t, self.a, self.b, *mask = saved
        self.products: Any = plan if dropout is None else _masked(plan, dropout, mask)
        self.requests = requests = requests[: len(call.parameters)]
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
            rows = rows_of(dy)
            divided = layout is not None and layout.gathers_dy
            self.u = self.products.low_rank_gradient(rows, self.b, self._first_row(rows, divided))
            if divided and layout is not None:
                self.u = start_all_gather(self.u, layout.group).wait()
        if asks_rows:
            came, ours = self.products.rows_gradient(self.u, a, None if came is None else rows_of(came)), True
            if dy.dim() != 2 and (layout is None or not layout.gathers_dy):
                came = came.view(*dy.shape[:-1], a.shape[-1])
        return self.base.output_gradient(dy, weight, came, asks_rows, asks_weight, later=later, ours=ours)

    def _first_row(self, rows: Tensor, divided: bool) -> int | None:
        """Return the number of this rank's first row where ranks have divided them."""
        return self.layout.group.rank() * rows.shape[0] if divided and self.layout is not None else None

    @property
    def u_of_rows(self) -> Tensor | None:
        """u, where a's gradient is u.T @ rows and nothing else."""
        return self.u if self.asks_a and isinstance(self.products, AdapterPlan) else None

    def gradients(self, dy: Tensor, rows: Callable[[], Tensor], da: Tensor | None) -> list[VectorSums | None]:
        """Return the gradients of a and b of each adapter, and where they belong. Collective over ranks.

        In fp32 or wider, or where autograd gets them in their own type.

        Args:
            rows: makes this rank's rows.
            da: `u_of_rows` times the rows, where the prologue's backward has made that.
        """
        layout, db = self.layout, None
        if self.asks_a and da is None:
            assert self.u is not None
            u = self.u if layout is None or layout.by_row else start_sum(self.u, layout).wait()
            own, divided = rows_of(rows()), layout is not None and layout.gathers_x
            da = self.products.gradient_of_a(u, own, self._first_row(own, divided))
            da = start_all_reduce(da, layout.group).wait() if divided and layout is not None else da
        if self.asks_b and self.low_rank_rows is not None:
            db = self.low_rank_rows.gradient_beside(dy)
        if self.asks_b and db is None:
            t = self.t if layout is None or not layout.by_row else start_sum(self.t.clone(), layout).wait()
            own, divided = rows_of(dy), layout is not None and layout.gathers_dy
            db = self.products.gradient_of_b(own, t, self._first_row(own, divided))
            db = start_all_reduce(db, layout.group).wait() if divided and layout is not None else db
        of_adapters = zip(self._of_each(da, db), self.parameters, self.main_grads, self.requests, strict=True)
        return [None if each[0] is None else (each[0], *each[1:]) for each in of_adapters] + self.no_mask

    def _of_each(self, da: Tensor | None, db: Tensor | None) -> Sequence[Tensor | None]:
        """Take both matrices apart. What autograd gets is rounded in the same pass."""
        wide = self.t.dtype if self.t.dtype.itemsize > 2 else torch.float32
        places = zip(self.parameters, self.main_grads, strict=True)
        dtypes = [one.dtype if place is None and not in_fsdp(one) else wide for one, place in places]
        if self.plan.is_one and (da is None or dtypes[0] is wide) and (db is None or dtypes[1] is wide):
            return da, db
        sums: list[Tensor | None] = [None] * len(dtypes)
        if da is None and db is None:
            return sums
        asked = slice(None) if da is not None and db is not None else slice(0 if db is None else 1, None, 2)
        sums[asked] = unpack_adapters(da, db, dtypes[asked], self.plan.shapes)
        return sums
