"""Weights in four bits: NF4 and FP4 of bitsandbytes, and NF4 of torchao. None of these packages is imported."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onepass.kernels.decode import decode_four_bits
from onepass.product.frozen.weight import FrozenWeight, define_frozen
from onepass.runtime.checks import FLOATING
from onepass.runtime.sizes import ceil_div

QUANT_TYPES = ("nf4", "fp4")
BLOCK_SIZES = tuple(32 << i for i in range(8))


class FourBitWeight(FrozenWeight):
    """Codes of a table of 16 numbers, and a scale a block, which may be a code of the same table (kernels/decode.py).

    `options`: what the codes are of, how many share a scale, and how many scales share one of theirs.
    """

    codes: Tensor
    table: Tensor
    absmax: Tensor

    def describe(self) -> str:
        return f"{self.options[0]} in blocks of {self.options[1]}"

    def decode_into(self, out: Tensor) -> None:
        nested_scale = self.tensors.get("nested_scale")
        decode_four_bits(out, self.codes, self.table, self.absmax, nested_scale, *self.options[1:])


def bitsandbytes_four_bits(weight: Any, state: Any, dtype: torch.dtype | None) -> FourBitWeight:
    """Take the codes of a `Params4bit` and its `QuantState` as they are."""
    if state is None:
        raise ValueError("weight must be quantised, but its quant_state is None: move its layer to a device first")
    if state.quant_type not in QUANT_TYPES:
        raise ValueError(f"weight's quant_type must be one of {', '.join(QUANT_TYPES)}, but is {state.quant_type!r}")
    if getattr(state, "packing_format_for_cpu", False):
        raise ValueError("weight must be in bitsandbytes' own layout, but is packed for products on a CPU: call train() before")
    shape, block = tuple(state.shape), state.blocksize
    if len(shape) != 2:
        raise ValueError(f"weight must have two dimensions, but its quant_state has shape {shape}")
    if block not in BLOCK_SIZES:
        raise ValueError(f"weight's blocksize must be one of {', '.join(map(str, BLOCK_SIZES))}, but is {block}")
    codes, count, nested = weight.detach().contiguous().view(torch.uint8).view(-1), shape[0] * shape[1], state.state2
    sizes = {"data": (codes, ceil_div(count, 2)), "absmax": (state.absmax, ceil_div(count, block)), "code": (state.code, 16)}
    if nested is not None:
        sizes["absmax of state2"] = nested.absmax, ceil_div(ceil_div(count, block), nested.blocksize)
        sizes["code of state2"] = nested.code, 256
    for name, (tensor, size) in sizes.items():
        if tensor.numel() != size:
            raise ValueError(f"weight's {name} must have {size} elements for shape {shape}, but has {tensor.numel()}")
    if nested is None:
        tensors = {"codes": codes, "table": state.code.float(), "absmax": state.absmax.float()}
    else:
        table = torch.cat([part.float().flatten() for part in (state.code, nested.code, state.offset)])
        tensors = {"codes": codes, "table": table, "absmax": state.absmax, "nested_scale": nested.absmax.float()}
    blocks = state.quant_type, block, 1 if nested is None else nested.blocksize
    return FourBitWeight(shape, dtype or _floating(state.dtype), tensors, blocks)  # type: ignore[no-any-return]


def torchao_four_bits(weight: Any, dtype: torch.dtype | None) -> FourBitWeight:
    """Take the codes of an `NF4Tensor`. Its scales are decoded here, to half a bit a number: they are rounded between."""
    if weight.requires_grad:
        raise ValueError("weight must not require grad: it is kept in few bits, and has no gradient")
    scales = weight.dequantize_scalers(weight.quantized_scalers, weight.quantization_factor, weight.scaler_block_size)
    tensors = {"codes": weight.quantized_data.view(-1), "table": weight.nf4.float(), "absmax": scales.float().view(-1)}
    return FourBitWeight(weight.shape, dtype or _floating(weight.dtype), tensors, ("nf4", weight.block_size, 1))  # type: ignore[no-any-return]


def _floating(dtype: object) -> Any:
    if dtype not in FLOATING:
        raise TypeError(f"weight's type must be a floating-point type, but is {dtype}")
    return dtype


define_frozen(FourBitWeight)
