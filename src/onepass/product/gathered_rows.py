"""Rows of tokens in their experts' order: the prologue of a grouped product whose rows are gathered.

Kept is x, not its rows: backward gathers them again for the weight's gradient, and sums the rows' gradient by token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from onepass.gradients.main_grad import GradRequest
from onepass.gradients.vectors import VectorGrads
from onepass.kernels.fp8_cast import cast_rows
from onepass.kernels.token_rows import spread_rows, sum_rows
from onepass.product.fp8.prologue import Codes
from onepass.product.prologue import Inputs, Kept, Needs, PrologueGradients
from onepass.runtime.dispatch import cast
from onepass.runtime.fp8 import FP8Target


class GatheredRows(NamedTuple):
    """x[tokens], rounded to the product's type. Inputs: x, tokens, and each token's rows (kernels/token_rows.py)."""

    x_type: torch.dtype
    dtype: torch.dtype  # the product's

    vectors: tuple[str, ...] = ()
    returns: tuple[bool, bool] = (False, False)

    def rows(self, inputs: Inputs, needs: Needs) -> tuple[Tensor, Kept]:
        return self._gathered(*inputs), self._kept(inputs, needs)

    def _gathered(self, x: Tensor | None, tokens: Tensor | None, places: Tensor | None) -> Tensor:
        assert x is not None
        return spread_rows(cast(x, self.dtype), tokens, places)  # type: ignore[no-any-return]

    def _kept(self, inputs: Inputs, needs: Needs) -> Kept:
        x, tokens, places = inputs
        if needs is None:
            return ()
        return x if needs[3] else None, tokens, places  # the weight's gradient takes x

    def codes(self, inputs: Inputs, target: FP8Target, needs: Needs) -> tuple[Codes, Kept]:
        x, tokens, places = inputs
        assert x is not None and tokens is not None
        codes, inverse = cast_rows(x, target.dtype)
        assert inverse is not None
        gathered = spread_rows(codes.view(torch.uint8), tokens, places).view(target.dtype)
        return (gathered, inverse.view(-1).index_select(0, tokens)), self._kept(inputs, needs)

    def rows_again(self, kept: Kept) -> Tensor:
        return self._gathered(*kept)

    def backward(
        self, kept: Kept, vectors: VectorGrads | None, drows: Tensor | None, dx: Tensor | None, requests: Sequence[GradRequest],
        *, rebuild: bool = False, target: FP8Target | None = None, ours: bool = True, u: Tensor | None = None,
    ) -> PrologueGradients:  # fmt: skip
        dx = None if drows is None else cast(sum_rows(drows, kept[2], None), self.x_type)
        return PrologueGradients((dx, None, None), None, self.rows_again(kept) if rebuild else None)
