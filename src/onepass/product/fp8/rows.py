"""Rows as they are, for a product in eight bits: a cast."""

from __future__ import annotations

import torch
from torch import Tensor

from onepass.distributed.tensor_parallel import rows_of
from onepass.kernels.fp8_cast import cast_rows, cast_tensor
from onepass.product.fp8.prologue import Codes
from onepass.product.prologue import Inputs, Kept, Needs
from onepass.product.rows import Rows
from onepass.runtime.fp8 import FP8Target, transposed_width
from onepass.runtime.op import Registered


class FP8Rows(Rows):
    """Rows as they are, for a product in eight bits."""

    __slots__ = ()

    def codes(self, inputs: Inputs, target: FP8Target, needs: Needs) -> tuple[Codes, Kept]:
        return self.codes_again(inputs, target), kept_rows(inputs[0], needs)

    def codes_again(self, kept: Kept, target: FP8Target) -> Codes:
        (x,) = kept
        assert x is not None
        if target.scale is None:
            return cast_rows(rows_of(x), target.dtype)
        codes, _ = cast_tensor(rows_of(x), target)
        assert codes is not None
        return codes, None

    def transposed_codes(self, kept: Kept, target: FP8Target) -> Tensor:
        (x,) = kept
        assert x is not None and target.scale is not None
        transposed: Tensor = _transposed_op(rows_of(x), target.scale, target.dtype)
        return transposed


def kept_rows(x: Tensor | None, needs: Needs) -> Kept:
    """Return x where the weight's gradient needs it."""
    return (x if needs is not None and needs[1] else None,)


def _transposed(rows: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    _, transposed = cast_tensor(rows, FP8Target(dtype, scale), codes=False, transposed=True)
    assert transposed is not None
    return transposed


_transposed_op = Registered(
    "fp8_cast_transposed(Tensor rows, Tensor scale, ScalarType dtype) -> Tensor",
    _transposed,
    lambda rows, scale, dtype: rows.new_empty((rows.shape[-1], transposed_width(rows)), dtype=dtype),
)
