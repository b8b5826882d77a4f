"""Rows as they are: the prologue of a plain linear layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from onepass.gradients.main_grad import GradRequest
from onepass.gradients.vectors import VectorGrads
from onepass.product.prologue import Inputs, Kept, Needs, PrologueGradients
from onepass.runtime.checks import FLOATING
from onepass.runtime.fp8 import FP8Target


class Rows(NamedTuple):
    """x, rounded to the product's type."""

    x_type: torch.dtype
    dtype: torch.dtype  # the product's

    vectors: tuple[str, ...] = ()
    returns: tuple[bool, bool] = (False, False)

    def rows(self, inputs: Inputs, needs: Needs) -> tuple[Tensor, Kept]:
        x, dtype = inputs[0], self.dtype
        assert x is not None
        rows = x if x.dtype is dtype else x.to(dtype)  # no call of `cast` or `rows_again`: a plain layer feels each
        return rows, ((x,) if needs is not None and needs[1] else (None,))

    def rows_again(self, kept: Kept) -> Tensor:
        (x,) = kept
        assert x is not None
        return x if x.dtype is self.dtype else x.to(self.dtype)

    def backward(
        self, kept: Kept, vectors: VectorGrads | None, drows: Tensor | None, dx: Tensor | None, requests: Sequence[GradRequest],
        *, rebuild: bool = False, target: FP8Target | None = None, ours: bool = True, u: Tensor | None = None,
    ) -> PrologueGradients:  # fmt: skip
        dx = drows if drows is None or drows.dtype is self.x_type else drows.to(self.x_type)
        return PrologueGradients((dx,), None, self.rows_again(kept)) if rebuild else PrologueGradients((dx,))


_ROWS = {dtype: Rows(dtype, dtype) for dtype in FLOATING}  # to make one takes .5 us of a call's 20


def rows_in(x_type: torch.dtype, dtype: torch.dtype) -> Rows:
    """Return rows of one type for a product of another."""
    return _ROWS[dtype] if x_type is dtype else Rows(x_type, dtype)
