"""The product of a linear layer in eight bits, forward and backward, on one rank or over those of a group.

Forward casts x, and multiplies it by the weight's codes. Backward casts dy in both layouts, and multiplies it by the weight's
transposed codes and by x's, which are cast again from x: what is kept is what a 16-bit product keeps. Rows that the ranks of a
group have are gathered as codes (product/fp8/weight.py has the table), and transposed where they arrive. Sums over ranks are in
16 bits.

A deferred gradient keeps its operands as transposed codes, or by rows where `flush` gathers them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from onepass.distributed.collectives import start_all_gather
from onepass.distributed.tensor_parallel import Start, TPLayout, rows_of, start_gather, start_sum
from onepass.gradients.main_grad import (
    GradientKind,
    GradRequest,
    as_op,
    overwrite_main_grad,
    put_gradient,
)
from onepass.gradients.releasable_storage import is_first_write, mark_written
from onepass.kernels.cublaslt import scaled_product
from onepass.kernels.fp8_cast import cast_rows, cast_tensor
from onepass.product.fp8.gradient import FP8Gradient, takes_fp8_gradient
from onepass.product.fp8.prologue import FP8Prologue
from onepass.product.fp8.rows import FP8Rows
from onepass.product.fp8.scales import FP8Factors
from onepass.product.fp8.updates import Version
from onepass.product.fp8.weight import FP8Operand, FP8Weight, PendingOperand, add_multiplied, multiply, transposed_weight
from onepass.product.product import Forward, OutputGradient, PlainProduct
from onepass.product.prologue import Inputs, Keep, Kept, Needs, Prologue, PrologueGradients
from onepass.runtime.dispatch import registered
from onepass.runtime.fp8 import E4M3, FP8Target
from onepass.runtime.op import Registered

if TYPE_CHECKING:
    from onepass.gradients.deferred import DeferredWgrad


# ---- the weight's gradient ----


def _add_product(main_grad: Tensor, a: Tensor, a_inverse: Tensor, b: Tensor, b_inverse: Tensor) -> None:
    """Add a @ b.T to main_grad. A step's first gradient overwrites one whose memory comes with it."""
    first = is_first_write(main_grad)
    scaled_product(a, a_inverse, b, b_inverse, main_grad.dtype, out=main_grad, add=not first)
    if first:
        mark_written(main_grad)


def _product(a: Tensor, a_inverse: Tensor, b: Tensor, b_inverse: Tensor, weight: Tensor) -> Tensor:
    return scaled_product(a, a_inverse, b, b_inverse, weight.dtype)


def _product_fake(a: Tensor, a_inverse: Tensor, b: Tensor, b_inverse: Tensor, weight: Tensor) -> Tensor:
    return weight.new_empty(a.shape[0], b.shape[0])


def _overwrite(a: Tensor, a_inverse: Tensor, b: Tensor, b_inverse: Tensor, weight: Any) -> Tensor:
    """Write over the main_grad of Megatron-FSDP."""
    operands = a, a_inverse, b, b_inverse
    return overwrite_main_grad(weight, lambda main_grad: scaled_product(*operands, main_grad.dtype, out=main_grad))


_OPERANDS = "Tensor a, Tensor a_inverse, Tensor b, Tensor b_inverse, Tensor weight"
_overwrite_op = registered(
    f"overwrite_fp8_gradient({_OPERANDS}) -> Tensor", _overwrite, lambda *operands: torch.empty_like(operands[-1])
)
_add_op = registered(f"add_fp8_gradient(Tensor(a!) main_grad, {_OPERANDS}) -> ()", as_op(_add_product), lambda *_: None)
_product_op = Registered(f"fp8_gradient({_OPERANDS}) -> Tensor", _product, _product_fake)
PRODUCT = GradientKind(_product_op, _overwrite, _overwrite_op, _add_product, _add_op)


class _DeferredFP8Product:
    """A weight's gradient that is made of eight-bit operands in `flush` (gradients/deferred.py).

    Args:
        dy, x: transposed, or this rank's rows of the one whose rows the layout divides. Their scales are copied: those of the
            layer may be the next step's by then.
    """

    def __init__(self, dy: FP8Operand, x: FP8Operand, layout: TPLayout | None) -> None:
        self.layout = layout
        self.tensors = {"dy": dy.codes, "dy's scale": dy.inverse.clone(), "x": x.codes, "x's scale": x.inverse.clone()}

    def check(self) -> None:
        pass

    def start(self) -> tuple[PendingOperand | None, PendingOperand | None]:
        if self.layout is None:
            return None, None
        (dy, x), group = self._operands(), self.layout.group
        dy_comes, x_comes = self.layout.gathers_dy, self.layout.gathers_x
        return PendingOperand(dy, group) if dy_comes else None, PendingOperand(x, group) if x_comes else None

    def add(self, coming: tuple[PendingOperand | None, PendingOperand | None], main_grad: Tensor) -> None:
        own = self._operands()
        dy, x = (mine if each is None else each.wait().transposed() for mine, each in zip(own, coming, strict=True))
        _add_product(main_grad, *dy, *x)

    def _operands(self) -> tuple[FP8Operand, FP8Operand]:
        dy, dy_inverse, x, x_inverse = self.tensors.values()
        return FP8Operand(dy, dy_inverse), FP8Operand(x, x_inverse)


# ---- forward and backward ----


class FP8Call(NamedTuple):
    """What the backward of one call needs of its layer's state: a `ProductCall`."""

    state: FP8Weight
    version: Version
    x_inverse: Tensor  # and the scale that forward had for x, None where rows had their own
    x_scale: Tensor | None
    factors: FP8Factors | None  # of the weight in this call's forward, None where rows had their own
    layout: TPLayout | None = None
    deferred: DeferredWgrad | None = None

    @property
    def target(self) -> FP8Target | None:
        """What the weight's gradient takes x's codes for: forward's scale. Nothing is noted again."""
        return FP8Target(E4M3, self.x_scale) if self.state.recipe.has_wgrad else None

    def start_input(
        self, prologue: Any, kept: Kept, made: PrologueGradients | None, *, later: bool
    ) -> Callable[[], Any]:  # fmt: skip
        self.state.check_unchanged(self.version)
        target, inverse = self.target, self.x_inverse
        if target is None:
            return PlainProduct(self.layout).start_input(prologue, kept, made, later=later)
        if self.layout is None or not self.layout.gathers_x:
            return start_transposed(prologue, kept, made, target, inverse)
        own = FP8Operand(prologue.codes_again(kept, target)[0], inverse)
        if later:
            return lambda: own
        coming = PendingOperand(own, self.layout.group)
        return lambda: coming.wait().transposed()

    def output_gradient(
        self, dy: Tensor, weight: Tensor | None, came: Tensor | None, asks_rows: bool, asks_weight: bool, *, later: bool,
        ours: bool = False,
    ) -> OutputGradient:  # fmt: skip
        self.state.check_unchanged(self.version)
        in_fp8 = asks_weight and self.state.recipe.has_wgrad
        gathers = self.layout is not None and self.layout.gathers_dy
        into = rows_of(came) if came is not None and ours and not gathers else None
        if self.layout is not None and gathers:
            in_16_bits = asks_weight and not in_fp8
            drows, operand = self._gathered_output_gradient(dy, weight, self.layout, asks_rows, in_fp8, in_16_bits, later)
        elif isinstance(dy, FP8Gradient) and dy.state is self.state:
            drows = self._input_gradient(FP8Operand(rows_of(dy.codes), dy.inverse_scale), weight, dy, into) if asks_rows else None
            operand = FP8Operand(dy.transposed, dy.inverse_scale) if in_fp8 else dy
        elif asks_rows or in_fp8:
            codes, transposed = self.state.cast("gradient", rows_of(dy), codes=asks_rows, transposed=in_fp8)
            drows = None if codes is None else self._input_gradient(codes, weight, dy, into)
            operand = transposed if in_fp8 else dy
        else:
            drows, operand = None, dy
        return drows if came is None or drows is None or into is not None else drows.add_(came.view(drows.shape)), operand

    def _input_gradient(self, ours: FP8Operand, weight: Tensor | None, dy: Tensor, into: Tensor | None) -> Tensor:
        """Return dy @ weight, added to what came for the rows, if that may be written."""
        assert weight is not None
        across = transposed_weight(weight, self.factors)
        drows = multiply(ours, across, dy.dtype, fast=False) if into is None else add_multiplied(into, ours, across, fast=False)
        return drows.view(*dy.shape[:-1], -1)

    def _gathered_output_gradient(
        self, dy: Tensor, weight: Tensor | None, layout: TPLayout, asks_rows: bool, in_fp8: bool, in_16_bits: bool, later: bool
    ) -> OutputGradient:  # fmt: skip
        """The same of a dy whose rows the ranks have. They come under the product of this rank's own.

        Where the weight's gradient takes them in 16 bits, codes are not sent too: each rank makes them of what it gets.
        """
        rows, group = rows_of(dy), layout.group
        wide = start_all_gather(rows, group) if in_16_bits and not later else None
        if not (asks_rows or in_fp8):
            return None, rows if wide is None else wide.wait()
        own, _ = self.state.cast("gradient", rows)
        assert own is not None
        coming = PendingOperand(own, group) if wide is None and (asks_rows or not later) else None
        M, rank, ranks, drows = len(rows), group.rank(), group.size(), None
        if asks_rows:
            assert weight is not None
            across = transposed_weight(weight, self.factors)
            drows = dy.new_empty(M * ranks, across.codes.shape[0])
            multiply(own, across, dy.dtype, fast=False, out=drows[M * rank : M * (rank + 1)])
        whole = own
        if coming is not None:
            whole = coming.wait()
        elif wide is not None:
            rows = wide.wait()
            whole = _cast_as(own, rows)
        if drows is not None:
            for first, last in ((0, M * rank), (M * (rank + 1), M * ranks)):
                if first < last:
                    multiply(whole.part(first, last), across, dy.dtype, fast=False, out=drows[first:last])
            drows = drows.view(dy.shape[0] * ranks, *dy.shape[1:-1], -1)
        return drows, rows if not in_fp8 else own if later else whole.transposed()

    def weight_gradient(
        self, dy: Any, rows: Callable[[], Any], weight: Tensor, main_grad: Tensor | None, request: GradRequest, *, later: bool
    ) -> Tensor | None:  # fmt: skip
        if not self.state.recipe.has_wgrad:
            plain = PlainProduct(self.layout, self.deferred)
            return plain.weight_gradient(dy, rows, weight, main_grad, request, later=later)
        operand = rows()
        if later:
            assert self.deferred is not None
            return self.deferred.keep_work(_DeferredFP8Product(dy, operand, self.layout), weight, main_grad)
        return put_gradient(PRODUCT, (*dy, *operand), weight, main_grad, request)


def start_transposed(
    prologue: FP8Prologue, kept: Kept, made: PrologueGradients | None, target: FP8Target, inverse: Tensor
) -> Callable[[], FP8Operand]:
    """Return what makes the transpose of the rows' codes, unless the prologue's backward has made it."""
    if made is not None and made.transposed is not None:
        transposed = made.transposed
        return lambda: FP8Operand(transposed, inverse)
    return lambda: FP8Operand(prologue.transposed_codes(kept, target), inverse)


def _cast_as(own: FP8Operand, rows: Tensor) -> FP8Operand:
    """Cast rows at the scale that some of them have, or at their own."""
    if own.inverse.dim():
        return FP8Operand(*cast_rows(rows, own.codes.dtype))
    codes, _ = cast_tensor(rows, FP8Target(own.codes.dtype, 1 / own.inverse))  # of a power of two that is exact
    assert codes is not None
    return FP8Operand(codes, own.inverse)


class FP8Product(NamedTuple):
    """A product in eight bits by the recipe and the scales of a layer's state: a `Product`."""

    state: FP8Weight
    layout: TPLayout | None = None
    deferred: DeferredWgrad | None = None

    takes_unrounded: bool = True
    num_weights: int = 1
    num_adapters: int = 0

    def rows_in(self, x_type: torch.dtype, dtype: torch.dtype) -> Prologue:
        return FP8Rows(x_type, dtype)

    def forward(
        self, prologue: Any, inputs: Inputs, weight: Any, bias: Any, needs: Needs, start: Start | None = None,
        keep: Keep | None = None,
    ) -> Forward:  # fmt: skip
        state, layout, rows = self.state, self.layout, None
        state.update(weight)
        if prologue.returns[0]:  # by a pass of their own: codes are those of unrounded rows, whoever else takes these
            rows, kept = prologue.rows(inputs, needs)
            target, inverse = state.input_target(partial(prologue.codes_again, kept), noted=needs is not None)
            codes, inverses = prologue.codes_again(kept, target)
        else:
            target, inverse = state.input_target(partial(prologue.codes, inputs, needs=None), noted=needs is not None)
            (codes, inverses), kept = prologue.codes(inputs, target, needs)
        inverse = inverses if inverse is None else inverse
        x, dtype = inputs[0], prologue.dtype
        assert x is not None and inverse is not None
        whole = ours = FP8Operand(codes, inverse)
        shape = [*x.shape[:-1]]
        if layout is not None and layout.gathers_x:
            whole = PendingOperand(ours, layout.group).wait()
            shape[0] *= layout.group.size()
        if keep is not None:
            keep(kept)
        of_weight, factors = state.rows(weight)
        fast = dtype is not torch.float32  # its sums are off by 1e-4, which a 16-bit result does not show
        if start is None:
            y = multiply(whole, of_weight, dtype, fast=fast).view(*shape, -1)
        else:
            wide = prologue.rows(inputs, None)[0] if rows is None else rows
            started = start(start_gather(wide, layout).wait(), weight.shape[0], None)
            y = add_multiplied(started, whole, of_weight, fast=fast).view(*shape, -1)
        if layout is not None and layout.by_row:
            y = start_sum(y, layout).wait()
        call = FP8Call(state, state.version, ours.inverse, target.scale, factors, layout, self.deferred)
        return y if bias is None else y.add_(bias), rows, kept, call

    def mark_output(self, y: Tensor, bias: Tensor | None) -> None:
        takes_fp8_gradient(y, self.state, bias, self.layout)
