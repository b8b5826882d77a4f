"""LoRA beside a layer's weight: y gains scale * rows @ a.T @ b.T, as if the weight were weight + scale * b @ a.

Forward   t = scale * rows @ a.T, [M, r]; y = t @ b.T + bias, to which the layer's product is added. In 16 bits cuBLAS rounds the
          product and adds it; in eight bits t @ b.T is added to y.
Backward  u = scale * dy @ b, [M, r]. u @ a is where dy @ weight is added; da = u.T @ rows and db = dy.T @ t are fp32.
Saves     t, and a and b in the product's type, beside what the layer saves when its weight is trained. A weight that asks for no
          gradient makes none.
Several   adapters of one weight share t, u and da: a is concatenated. Each changes all of the weight's rows or some of them.
Ranks     have parts of b's rows with the weight's rows, or of a's columns with its columns; the other matrix is whole on each. u
          or t is then summed over them, and where they divide rows too, the gradient of the whole matrix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass.distributed.collectives import start_all_gather, start_all_reduce
from onepass.distributed.tensor_parallel import Start, TPLayout, rows_of, start_sum
from onepass.gradients.deferred import DeferredWgrad
from onepass.gradients.main_grad import GradRequest, VectorSums, main_grad_of
from onepass.product.product import Forward, OutputGradient, Product, ProductCall
from onepass.product.prologue import Inputs, Kept, Needs, Prologue, PrologueGradients
from onepass.runtime.checks import check_device, check_floating, check_number
from onepass.runtime.dispatch import cast, under_autocast

SKIP = GradRequest.SKIP


class LoRA(NamedTuple):
    """What LoRA adds to a linear layer of rows x: ``scale * (x @ a.T) @ b.T``.

    Of a layer that PEFT has wrapped: ``LoRA(layer.lora_A["default"].weight, layer.lora_B["default"].weight,
    layer.scaling["default"])``, beside ``layer.base_layer.weight``.

    Args:
        a: ``[r, K]``, of x's type or fp32, which is rounded to the product's type. Its gradient has its own type. With a tp_group
            it is whole on every rank, and so is its gradient, or has this rank's columns, as the weight does.
        b: ``[N, r]``, of the same types: this rank's rows, or all of them, as of the weight.
        scale: multiplies the product of both; alpha / r, or alpha / sqrt(r) for rsLoRA.
        rows: ``(first, last)``, the weight's rows that it changes, where several layers are one weight. b has as many. None: all.
    """

    a: Tensor
    b: Tensor
    scale: float = 1.0
    rows: tuple[int, int] | None = None


Adapters = LoRA | Sequence[LoRA] | None


def check_adapter(
    name: str, lora: object, x: Tensor, weight: Tensor, like: str = "x", fields: Sequence[str] | None = None
) -> LoRA:  # fmt: skip
    """Return `lora`. Raise unless it goes with the weight and what it multiplies. `fields`: the names of a, b and the scale."""
    if not isinstance(lora, LoRA):
        raise TypeError(f"{name} must be an onepass.LoRA or None, but is a {type(lora).__name__}")
    named_a, named_b, named_scale = fields or (f"{name}.a", f"{name}.b", f"{name}.scale")
    N, K = weight.shape
    if lora.rows is not None:
        first, last = lora.rows
        if not 0 <= first < last <= N:
            raise ValueError(f"{name}.rows must be two of the weight's {N} rows, the first below the last, but is {lora.rows}")
        N = last - first
    rank = lora.a.shape[0] if isinstance(lora.a, Tensor) and lora.a.dim() else "r"
    for named, value, shape in ((named_a, lora.a, (rank, K)), (named_b, lora.b, (N, rank))):
        check_floating(named, value)
        if value.shape != shape:
            raise ValueError(f"{named} must have shape ({shape[0]}, {shape[1]}), but has {tuple(value.shape)}")
        if value.dtype not in (x.dtype, torch.float32) and not under_autocast(x):
            raise TypeError(f"{named} must have {like}'s type {x.dtype} or fp32, but is {value.dtype}")
        check_device(named, value, x, like)
    if rank == 0:
        raise ValueError(f"{named_a} must have at least one row, but has shape {tuple(lora.a.shape)}")
    check_number(named_scale, lora.scale)
    if not -math.inf < lora.scale < math.inf:
        raise ValueError(f"{named_scale} must be finite, but is {lora.scale!r}")
    return lora


def adapters_of(lora: Adapters) -> Sequence[LoRA]:
    """Return a layer's adapters, none or several."""
    if lora is None:
        return ()
    return [lora] if isinstance(lora, LoRA) else lora


def check_adapters(lora: Adapters, x: Tensor, weight: Tensor) -> Sequence[LoRA]:
    """Return a layer's adapters in the order of the rows that they change. Raise where one doesn't go with the layer."""
    if lora is None:
        return ()
    if isinstance(lora, LoRA) or not isinstance(lora, Sequence):
        return [check_adapter("lora", lora, x, weight)]
    adapters = [check_adapter(f"lora[{i}]", one, x, weight) for i, one in enumerate(lora)]
    whole = (0, weight.shape[0])
    ordered = sorted(adapters, key=lambda one: one.rows or whole)
    for one, after in pairwise(ordered):
        before, rows = one.rows or whole, after.rows or whole
        if rows != before and rows[0] < before[1]:
            raise ValueError(f"lora must change the same rows of the weight or others, but {before} and {rows} overlap")
    return ordered


def add_adapters(y: Tensor, rows: Tensor, adapters: Sequence[LoRA]) -> Tensor:
    """Return y and what adapters add to it, by the formula, for every type."""
    for a, b, scale, part in adapters:
        added = scale * F.linear(F.linear(rows, a.to(rows.dtype)), b.to(rows.dtype))
        y = y + (added if part is None else F.pad(added, (part[0], y.shape[-1] - part[1])))
    return y


def describe_adapters(lora: Adapters) -> str:
    """Return what `explain` says of them after the products."""
    ranks = ", ".join(str(one.a.shape[0]) for one in adapters_of(lora))
    return f", LoRA of rank {ranks} around them" if ranks else ""


# ---- the product ----


class _Part(NamedTuple):
    """Adapters that follow each other, of one scale, which change the same columns of y."""

    of_t: slice  # its columns, and u's
    of_y: slice
    adapters: slice
    scale: float


def _parts_of(adapters: tuple[tuple[int, float, tuple[int, int] | None], ...], N: int) -> tuple[_Part, ...]:
    """Return the parts of adapters of these ranks, scales and rows."""
    parts: list[_Part] = []
    end = 0
    for i, (rank, scale, rows) in enumerate(adapters):
        of_y, at, first = slice(*(rows or (0, N))), end, i
        if parts and (parts[-1].of_y, parts[-1].scale) == (of_y, scale):
            joined = parts.pop()
            at, first = joined.of_t.start, joined.adapters.start
        end += rank
        parts.append(_Part(slice(at, end), of_y, slice(first, i + 1), float(scale)))
    return tuple(parts)


_cached_parts_of = lru_cache(maxsize=4096)(_parts_of)  # to make them takes 5 us of a call; a compiler warns of caches


class LoRAProduct(NamedTuple):
    """A layer's product, and what its adapters add: a `Product` around another.

    The adapters' tensors, a and b of each in turn, are arguments of the autograd Function. `bind` takes those of a call.
    """

    base: Product
    parts: tuple[_Part, ...]
    num_adapters: int = 0  # their tensors
    tensors: Sequence[Tensor] = ()
    needs: Sequence[bool] = ()

    deferred: DeferredWgrad | None = None
    takes_unrounded: bool = False
    num_weights: int = 1

    @classmethod
    def around(cls, base: Product, adapters: Sequence[LoRA], weight: Tensor) -> LoRAProduct:
        """Return a layer's product with its adapters, which are in the order of the rows that they change."""
        parts_of = _parts_of if torch.compiler.is_compiling() else _cached_parts_of
        parts = parts_of(tuple([(a.shape[0], scale, rows) for a, _, scale, rows in adapters]), weight.shape[0])
        return cls(base, parts, 2 * len(adapters), (), (), base.deferred, base.takes_unrounded)

    def rows_in(self, x_type: torch.dtype, dtype: torch.dtype) -> Prologue:
        return self.base.rows_in(x_type, dtype)

    def bind(self, tensors: Sequence[Tensor], needs: Sequence[bool]) -> LoRAProduct:
        return self._replace(tensors=tensors, needs=needs)

    def forward(
        self, prologue: Prologue, inputs: Inputs, weight: Any, bias: Any, needs: Needs, start: Start | None = None
    ) -> Forward:  # fmt: skip
        a, b = self._operands(prologue.dtype)
        t: list[Tensor] = []

        def start_with_adapters(rows: Tensor, N: int, bias: Tensor | None) -> Tensor:
            t.append(_low_rank(rows_of(rows), a, self.parts))
            return _expanded(t[0], b, self.parts, N, bias)

        if any(self.needs[::2]):  # the gradient of a takes the rows, as the weight's does
            assert needs is not None
            needs = (*needs[:-2], True, needs[-1])
        y, rows, kept, base = self.base.forward(prologue, inputs, weight, bias, needs, start_with_adapters)
        places = [main_grad_of(one) if need else None for one, need in zip(self.tensors, self.needs, strict=False)]
        call: Any = LoRACall(base, self.parts, self.tensors, places)
        return y, rows, (*kept, t[0], a, *b), call

    def _operands(self, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
        """Return a of all adapters, and b of each part."""
        a, b = ([cast(one, dtype) for one in self.tensors[i::2]] for i in (0, 1))
        return a[0] if len(a) == 1 else torch.cat(a), [_joined(b[part.adapters]) for part in self.parts]

    def mark_output(self, y: Tensor, bias: Tensor | None) -> None:
        """Codes alone would not do: the adapters take y's gradient, too."""


def _joined(b: Sequence[Tensor]) -> Tensor:
    return b[0] if len(b) == 1 else torch.cat(tuple(b), 1)


def _low_rank(rows: Tensor, a: Tensor, parts: Sequence[_Part]) -> Tensor:
    """Return t, [M, r]."""
    if len(parts) == 1 or len({part.scale for part in parts}) == 1:
        return _scaled(rows, a.t(), parts[0].scale)
    t = rows.new_empty(rows.shape[0], a.shape[0])
    for part in parts:
        _scaled(rows, a[part.of_t].t(), part.scale, t[:, part.of_t])
    return t


def _low_rank_gradient(dy: Tensor, b: Sequence[Tensor], parts: Sequence[_Part]) -> Tensor:
    """Return u, [M, r]."""
    if len(parts) == 1:
        return _scaled(_columns(dy, parts[0].of_y), b[0], parts[0].scale)
    u = dy.new_empty(len(dy), parts[-1].of_t.stop)
    for part, of_part in zip(parts, b, strict=True):
        _scaled(dy[:, part.of_y], of_part, part.scale, u[:, part.of_t])
    return u


def _scaled(first: Tensor, second: Tensor, scale: float, out: Tensor | None = None) -> Tensor:
    """Return scale * first @ second, rounded once."""
    if torch.compiler.is_compiling():
        product = first @ second * scale
        return product if out is None else out.copy_(product)
    if out is None:
        if scale == 1.0:
            return first @ second
        out = first.new_empty(first.shape[0], second.shape[1])
    return torch.addmm(out, first, second, beta=0, alpha=scale, out=out)


def _columns(t: Tensor, columns: slice) -> Tensor:
    return t if columns.stop - columns.start == t.shape[1] else t[:, columns]


def _expanded(t: Tensor, b: Sequence[Tensor], parts: Sequence[_Part], N: int, bias: Tensor | None) -> Tensor:
    """Return what adapters add to y, [M, N], and the bias."""
    if len(parts) == 1 and parts[0].of_y == slice(0, N):
        return F.linear(t, b[0], bias)
    y = t.new_zeros(len(t), N) if bias is None else bias.repeat(len(t), 1)
    for part, of_part in zip(parts, b, strict=True):
        y[:, part.of_y].addmm_(t[:, part.of_t], of_part.t())
    return y


# ---- its backward ----


class LoRACall(NamedTuple):
    """The backward of one call, which may be run more than once."""

    base: ProductCall
    parts: tuple[_Part, ...]
    parameters: Sequence[Tensor]
    main_grads: Sequence[Tensor | None]

    @property
    def layout(self) -> TPLayout | None:
        return self.base.layout

    def of_pass(self, kept: Kept, requests: Sequence[GradRequest]) -> tuple[LoRAPass, Kept]:
        """Return a `ProductCall` of a pass that wants these gradients of the adapters, and what the prologue has kept."""
        own = len(kept) - 2 - len(self.parts)
        return LoRAPass(self, kept[own:], requests), kept[:own]


class LoRAPass:
    """One pass of backward: a `ProductCall` around the layer's own."""

    def __init__(self, call: LoRACall, saved: Sequence[Any], requests: Sequence[GradRequest]) -> None:
        self.call, self.base, self.requests = call, call.base, requests
        self.t, self.a, *self.b = saved
        self.asks_a, self.asks_b = (any([request is not SKIP for request in requests[i::2]]) for i in (0, 1))
        self.layout, self.deferred, self.target = self.base.layout, self.base.deferred, self.base.target
        self.u: Tensor | None = None

    def start_input(
        self, prologue: Prologue, kept: Kept, made: PrologueGradients | None, *, later: bool
    ) -> Callable[[], Any]:  # fmt: skip
        return self.base.start_input(prologue, kept, made, later=later)

    def output_gradient(
        self, dy: Tensor, weight: Any, came: Tensor | None, asks_rows: bool, asks_weight: bool, *, later: bool, ours: bool = False
    ) -> OutputGradient:  # fmt: skip
        """Make u, and start the rows' gradient with u @ a."""
        layout, a = self.layout, self.a
        if asks_rows or self.asks_a:
            self.u = _low_rank_gradient(rows_of(dy), self.b, self.call.parts)
            if layout is not None and layout.gathers_dy:
                self.u = start_all_gather(self.u, layout.group).wait()
        if asks_rows:
            assert self.u is not None
            came, ours = self.u @ a if came is None else torch.addmm(rows_of(came), self.u, a), True
            if dy.dim() != 2 and (layout is None or not layout.gathers_dy):
                came = came.view(*dy.shape[:-1], a.shape[1])
        return self.base.output_gradient(dy, weight, came, asks_rows, asks_weight, later=later, ours=ours)

    def weight_gradient(
        self, dy: Any, rows: Callable[[], Any], weight: Tensor, main_grad: Tensor | None, request: GradRequest, *, later: bool
    ) -> Tensor | None:  # fmt: skip
        return self.base.weight_gradient(dy, rows, weight, main_grad, request, later=later)

    def gradients(self, dy: Tensor, rows: Callable[[], Tensor]) -> list[VectorSums | None]:
        """Return the gradients of a and b of each adapter, in fp32 or wider, and where they belong. Collective over ranks.

        Args:
            rows: makes this rank's rows.
        """
        layout, parameters = self.layout, self.call.parameters
        sums: list[Tensor | None] = [None] * len(parameters)
        if self.asks_a:
            assert self.u is not None
            u = self.u if layout is None or layout.by_row else start_sum(self.u, layout).wait()
            da = _summed(_wide_product(u, rows_of(rows())), layout, layout is not None and layout.gathers_x)
            sums[::2] = [da] if len(parameters) == 2 else da.split([a.shape[0] for a in parameters[::2]])
        if self.asks_b:
            t = self.t if layout is None or not layout.by_row else start_sum(self.t.clone(), layout).wait()
            sums[1::2] = [db for part in self.call.parts for db in self._gradients_of_b(rows_of(dy), t, part)]
        of_adapters = zip(sums, parameters, self.call.main_grads, self.requests, strict=True)
        return [None if each[0] is None else (each[0], *each[1:]) for each in of_adapters]

    def _gradients_of_b(self, dy: Tensor, t: Tensor, part: _Part) -> Sequence[Tensor]:
        layout = self.layout
        product = _wide_product(_columns(dy, part.of_y), _columns(t, part.of_t))
        db = _summed(product, layout, layout is not None and layout.gathers_dy)
        ranks = [b.shape[1] for b in self.call.parameters[1::2][part.adapters]]
        return [db] if len(ranks) == 1 else db.split(ranks, 1)


def _wide_product(first: Tensor, second: Tensor) -> Tensor:
    """Return first.T @ second in fp32 or wider."""
    if first.dtype.itemsize > 2:
        return first.t() @ second
    if first.is_cuda:
        return torch.mm(first.t(), second, out_dtype=torch.float32)
    return first.t().float() @ second.float()


def _summed(gradient: Tensor, layout: TPLayout | None, divided: bool) -> Tensor:
    """Sum a gradient over ranks that have divided the rows it is made of."""
    return gradient if layout is None or not divided else start_all_reduce(gradient, layout.group).wait()
