"""How rows are multiplied by a layer's weight: the protocol, and the product in the rows' own type.

Forward makes y of a prologue's rows. Backward makes the rows' gradient of dy, and the weight's of dy and the rows, which it puts
in main_grad, hands to autograd, or keeps for `DeferredWgrad`. distributed/tensor_parallel.py says how ranks divide it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from onepass.distributed.tensor_parallel import Start, TPLayout, row_gradients, rows_of, start_gather, tp_product
from onepass.gradients.main_grad import GradRequest, weight_gradient
from onepass.product.prologue import Inputs, Keep, Kept, Needs, Prologue, PrologueGradients
from onepass.product.rows import rows_in
from onepass.runtime.dispatch import add_matmul, cast
from onepass.runtime.fp8 import FP8Target

if TYPE_CHECKING:
    from onepass.gradients.deferred import DeferredWgrad


class ProductCall(Protocol):
    """The backward of one call.

    Over ranks call `start_input` first, so that rows come under their gradient's product; then `output_gradient`, start the sum
    of the rows' gradient, and make the weight's under that.
    """

    @property
    def layout(self) -> TPLayout | None: ...

    @property
    def deferred(self) -> DeferredWgrad | None: ...

    @property
    def target(self) -> FP8Target | None:
        """What the weight's gradient takes the rows' codes for, transposed, or None where it takes the rows themselves."""

    def start_input(
        self, prologue: Prologue, kept: Kept, made: PrologueGradients | None, *, later: bool
    ) -> Callable[[], Any]:  # fmt: skip
        """Return what makes the rows' operand of the weight's gradient. Where ranks have parts of the rows, gather them.

        Args:
            made: by the prologue's backward, or None where that comes after.
            later: the gradient is deferred, and `flush` gathers.
        """

    def output_gradient(
        self, dy: Tensor, weight: Any, came: Tensor | None, asks_rows: bool, asks_weight: bool, *, later: bool, ours: bool = False
    ) -> OutputGradient:  # fmt: skip
        """Make the rows' gradient, with what `came` for them otherwise. Collective where dy's rows are gathered.

        A column-parallel layer's is a term of a sum over the ranks. `ours`: what came may be written.
        """

    def weight_gradient(
        self, dy: Any, rows: Callable[[], Any], weight: Tensor, main_grad: Tensor | None, request: GradRequest, *, later: bool
    ) -> Tensor | None:  # fmt: skip
        """Put the weight's gradient, or where it is deferred its operands, where it belongs. Return what autograd gets."""


# plain tuples: a NamedTuple takes .5 us of a call's 20
OutputGradient = tuple[Tensor | None, Any]  # the rows' gradient, and what the weight's takes of dy
Forward = tuple[Tensor, Tensor | None, Kept, ProductCall]  # y, rows where they were made, what the prologue keeps, its backward


class Product(Protocol):
    """How forward multiplies."""

    @property
    def takes_unrounded(self) -> bool:
        """Whether it rounds the rows itself, so that formulas hand them over in fp32."""

    @property
    def deferred(self) -> DeferredWgrad | None: ...

    @property
    def num_weights(self) -> int:
        """How many weights it takes, as one that has all their rows. Gradients of several go to autograd."""

    def rows_in(self, x_type: torch.dtype, dtype: torch.dtype) -> Prologue:
        """Return the prologue of rows as they are, of one type, for a product of another."""

    @property
    def num_adapters(self) -> int:
        """How many tensors of adapters it takes after the weight and the bias (product/lora_product.py)."""

    def forward(
        self, prologue: Prologue, inputs: Inputs, weight: Any, bias: Any, needs: Needs, start: Start | None = None,
        keep: Keep | None = None,
    ) -> Forward:  # fmt: skip
        """Multiply. Of several weights `weight` and `bias` are tuples. `start` makes what the product is added to.

        `keep` takes what the prologue keeps, before the product. Without it that comes after, as in `Forward`.
        """

    def mark_output(self, y: Tensor, bias: Tensor | None) -> None:
        """Let the backward of the op that takes y know what this product takes as its gradient."""


class PlainProduct(NamedTuple):
    """A product in the rows' type, by PyTorch. Forward leaves nothing behind: it is its own `ProductCall`."""

    layout: TPLayout | None = None
    deferred: DeferredWgrad | None = None

    target: None = None
    takes_unrounded: bool = False
    num_weights: int = 1
    num_adapters: int = 0

    def rows_in(self, x_type: torch.dtype, dtype: torch.dtype) -> Prologue:
        return rows_in(x_type, dtype)

    def forward(
        self, prologue: Prologue, inputs: Inputs, weight: Any, bias: Any, needs: Needs, start: Start | None = None,
        keep: Keep | None = None,
    ) -> Forward:  # fmt: skip
        rows, kept = prologue.rows(inputs, needs)
        if keep is not None:
            keep(kept)
        return tp_product(rows, weight, bias, self.layout, start), rows, kept, self

    def mark_output(self, y: Tensor, bias: Tensor | None) -> None:
        pass

    def start_input(
        self, prologue: Prologue, kept: Kept, made: PrologueGradients | None, *, later: bool
    ) -> Callable[[], Tensor]:  # fmt: skip
        if made is not None and made.rows is not None:
            rows = made.rows
            return lambda: rows
        rows = prologue.rows_again(kept)
        return (lambda: rows) if later else start_gather(rows, self.layout).wait

    def output_gradient(
        self, dy: Tensor, weight: Tensor | None, came: Tensor | None, asks_rows: bool, asks_weight: bool, *, later: bool,
        ours: bool = False,
    ) -> OutputGradient:  # fmt: skip
        weight = cast(weight, dy.dtype) if asks_rows and weight is not None else None
        if came is None or weight is None or (self.layout is not None and self.layout.gathers_dy):
            whole, drows = row_gradients(dy, weight, asks_weight and not later, self.layout)
            return drows if came is None or drows is None else drows.add_(came.view(drows.shape)), dy if later else whole
        rows = rows_of(dy)  # one rounding for both
        started = came if came.dim() == 2 else came.reshape(rows.shape[0], weight.shape[1])
        drows = add_matmul(started, rows, weight) if ours else started.addmm(rows, weight)
        return drows if came.dim() == 2 else drows.view(came.shape), dy

    def weight_gradient(
        self, dy: Tensor, rows: Callable[[], Tensor], weight: Tensor, main_grad: Tensor | None, request: GradRequest,
        *, later: bool,
    ) -> Tensor | None:  # fmt: skip
        if later:
            assert self.deferred is not None
            return self.deferred.keep(dy, rows(), weight, main_grad, self.layout)
        return weight_gradient(rows_of(dy), rows_of(rows()), weight, main_grad, request)
