"""Weights in int8: of bitsandbytes and torchao. None of these packages is imported.

bitsandbytes multiplies int8 by int8, and columns of x with outliers in 16 bits. Here the weight is decoded, and products are in
x's type: x is not quantised, and there are no outliers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onepass.kernels.decode import decode_int8
from onepass.product.frozen.weight import FrozenWeight, define_frozen

_OF_127 = 7.874015718698502e-3  # 1 / 127 as bitsandbytes writes it


class Int8Weight(FrozenWeight):
    """Codes, and a scale of each group of numbers that follow each other. `options`: a factor of all, or None."""

    codes: Tensor
    scale: Tensor

    def describe(self) -> str:
        return "int8"

    def decode_into(self, out: Tensor) -> None:
        decode_int8(out, self.codes, self.scale, *self.options)


def bitsandbytes_int8(weight: Any, scale: Tensor | None, dtype: torch.dtype | None) -> Int8Weight:
    """Take the codes of an `Int8Params`, and the largest magnitudes of its rows, as they are."""
    if weight.dtype is not torch.int8:
        raise TypeError(f"weight must be quantised to int8, but is {weight.dtype}: move its layer to a device first")
    if scale is None:
        raise ValueError("weight's SCB must be its rows' largest magnitudes, but is None: the layer has them, so pass that")
    if scale.shape != weight.shape[:1]:
        raise ValueError(f"weight's SCB must have {weight.shape[0]} elements, as weight has rows, but has {scale.numel()}")
    if dtype is None:
        raise ValueError("dtype must be given for weights in int8 of bitsandbytes, which have no other type")
    return Int8Weight(weight.shape, dtype, {"codes": weight.detach().contiguous(), "scale": scale.float()}, (_OF_127,))  # type: ignore[no-any-return]


def torchao_int8(weight: Any, dtype: torch.dtype | None) -> Int8Weight:
    """Take the codes of an `Int8Tensor` as they are."""
    if weight.act_quant_kwargs is not None or weight.act_pre_scale is not None:
        raise ValueError("weight must be quantised alone, but is an Int8Tensor whose x is quantised or scaled too")
    if weight.zero_point is not None and bool(weight.zero_point.any()):
        raise ValueError("weight must be quantised symmetrically, but is an Int8Tensor that has zero points")
    rows, columns = weight.block_size
    if rows != 1 and (rows, columns) != tuple(weight.shape):
        raise ValueError(f"weight must have scales of rows, of parts of rows or one, but its block_size is {weight.block_size}")
    tensors = {"codes": weight.qdata.contiguous(), "scale": weight.scale.float().contiguous()}
    return Int8Weight(weight.shape, dtype or weight.dtype, tensors, (None,))  # type: ignore[no-any-return]


define_frozen(Int8Weight)
