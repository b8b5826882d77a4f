"""frozen_weight: weights in few bits of other packages, as one that onepass's linear layers take."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from onepass.product.frozen.four_bits import bitsandbytes_four_bits, torchao_four_bits
from onepass.product.frozen.int8 import bitsandbytes_int8, torchao_int8
from onepass.product.frozen.joined import join
from onepass.product.frozen.weight import FrozenWeight

_KINDS = "bitsandbytes' Params4bit or Int8Params, torchao's NF4Tensor or Int8Tensor, an onepass.FrozenWeight"


class _Made(dict[Any, Any]):
    """What was made of a weight before, which the weight carries. Copies and pickles of the weight don't have it."""

    def __reduce__(self) -> Any:
        return _Made, ()

    def __deepcopy__(self, memo: Any) -> _Made:
        return _Made()


def frozen_weight(*weights: Tensor | nn.Module, dtype: torch.dtype | None = None) -> FrozenWeight:
    """Return weights in few bits as one frozen weight, which linear layers take in the place of a plain one.

        qkv = onepass.frozen_weight(attention.q_proj, attention.k_proj, attention.v_proj)
        y = onepass.norm_linear(x, norm.weight, qkv, lora=[...])

    Nothing of a weight's size is copied: what is written into a layer's codes is seen by the next call. The result is kept with
    the first weight, and made anew where one has another memory, so that this may be called for each product.

    Args:
        weights: layers or their weights, whose rows follow each other. bitsandbytes' ``Linear4bit`` (NF4 or FP4, with or without
            double quantisation) and ``Linear8bitLt``, torchao's ``NF4Tensor`` and ``Int8Tensor`` (weights alone), or what this
            returned. Of a ``Linear8bitLt`` the layer, which has the scales.
        dtype: the type of the rows that it is multiplied by. None is the type that the weight was quantised from, which
            ``Linear8bitLt`` doesn't know.
    """
    if not weights:
        raise ValueError("weights must be one or more, but are none")
    with torch._C.DisableTorchFunctionSubclass():  # an attribute of others' tensors takes 1 us otherwise
        sources = [_source_of(weight) for weight in weights]
        first = sources[0][0]
        if len(sources) == 1 and isinstance(first, FrozenWeight):
            return first if dtype in (None, first.dtype) else first.to(dtype)  # type: ignore[return-value]
        made = getattr(first, "onepass_frozen", None)
        if made is None:
            made = first.onepass_frozen = _Made()
        key = tuple([source[1] for source in sources])
        known = made.get((len(sources), dtype))
        if known is not None and known[0] == key:
            return known[1]  # type: ignore[no-any-return]
    frozen = join([make(*of_it, dtype=dtype) for _, _, make, *of_it in sources])
    made[len(sources), dtype] = key, frozen
    return frozen


def _source_of(given: Any) -> tuple[Any, ...]:
    """Return a weight, a key that is another when its memory is or its scales are, what makes a frozen weight, and of what.

    What is made holds the memory, so that no key is another's.
    """
    module: Any = given if isinstance(given, nn.Module) else None
    weight: Any = given if module is None else module._parameters.get("weight")
    if hasattr(weight, "bnb_quantized"):
        state = weight.quant_state or getattr(module, "quant_state", None)
        of_scales = state and (id(state.absmax), *_versions(state.offset))
        return weight, (weight.data_ptr(), of_scales), bitsandbytes_four_bits, weight, state
    kind = type(weight).__name__
    if isinstance(weight, FrozenWeight):
        return weight, id(weight), frozen_weight, weight
    if hasattr(weight, "has_fp16_weights"):
        scale = weight.SCB
        if scale is None and module is not None:
            scale = module.state.SCB  # where its first forward has put it
        return weight, (weight.data_ptr(), id(scale)), bitsandbytes_int8, weight, scale
    if kind == "Int8Tensor":
        return weight, (id(weight.qdata), id(weight.scale), *_versions(weight, weight.qdata, weight.scale)), torchao_int8, weight
    if kind == "NF4Tensor":
        scales = weight.quantized_scalers, weight.quantization_factor, weight.scaler_mean
        return weight, (id(weight.quantized_data), id(scales[0]), *_versions(weight, *scales)), torchao_four_bits, weight
    what = f"{kind} of {weight.dtype}" if isinstance(weight, Tensor) else type(given).__name__
    raise TypeError(f"weights must be {_KINDS}, or layers of these, but one is a {what}")


def _versions(*tensors: Tensor | None) -> Iterator[int]:
    """Yield what is another once a tensor was written, as by a load: of those that a weight has copies of.

    A write to a subclass changes its own version, and none of its parts'.
    """
    for tensor in tensors:
        if isinstance(tensor, Tensor) and not tensor.is_inference():
            yield tensor._version
