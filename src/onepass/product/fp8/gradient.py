"""A gradient in eight bits, from the op that makes it to the backward of the product that takes it.

An activation's backward can write d x as codes and transposed, which is what the product before it multiplies. autograd hands on
tensors of the output's type, so the codes travel as a tensor that says it has that type. Any other operator sees it converted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from onepass.runtime.fp8 import dequantise

if TYPE_CHECKING:
    from onepass.distributed.tensor_parallel import TPLayout
    from onepass.product.fp8.weight import FP8Weight


class FP8Gradient(Tensor):
    """A gradient that is kept as codes and their transpose at one scale, and converted where somebody else looks at it.

    Args:
        codes: of the gradient's shape.
        transposed: the codes of its transpose, as `runtime.fp8.transpose` has them.
        inverse: of the scale, of one element.
        dtype: the type that the gradient has for others.
        state: of the product whose scale the codes have.
    """

    codes: Tensor
    transposed: Tensor
    inverse_scale: Tensor
    state: FP8Weight

    @staticmethod
    def __new__(cls, codes: Tensor, transposed: Tensor, inverse: Tensor, dtype: torch.dtype, state: FP8Weight) -> FP8Gradient:
        made: FP8Gradient = Tensor._make_wrapper_subclass(cls, codes.shape, dtype=dtype, device=codes.device)
        made.codes, made.transposed, made.inverse_scale, made.state = codes, transposed, inverse, state
        return made

    def converted(self) -> Tensor:
        """Return the gradient as a plain tensor."""
        return dequantise(self.codes, self.inverse_scale, self.dtype)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"FP8Gradient({self.converted()!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func._schema.is_mutable:
            raise RuntimeError("this gradient is kept in eight bits and can't be written in place: clone it before")
        args, kwargs = tree_map_only(FP8Gradient, FP8Gradient.converted, (args, kwargs or {}))
        return func(*args, **kwargs)


# ---- who takes one ----


def takes_fp8_gradient(y: Tensor, state: FP8Weight, bias: Tensor | None, layout: TPLayout | None) -> None:
    """Mark a product's output: the backward of the next op may hand its gradient over in eight bits.

    A bias needs the sums of a gradient that was not rounded, and where ranks have rows of it, all of them share a scale. A
    compiled graph hands over plain tensors.
    """
    if torch.compiler.is_compiling():
        return
    if bias is None and (layout is None or not layout.gathers_dy):
        y.takes_fp8_gradient = state, y._version  # type: ignore[attr-defined]


def gradient_consumer(x: Tensor) -> FP8Weight | None:
    """Return the state of the product that made x, if it takes its gradient in eight bits. A view or a changed x has none."""
    if torch.compiler.is_compiling():
        return None
    state, version = getattr(x, "takes_fp8_gradient", (None, None))
    return state if state is not None and state.takes_codes and version == x._version else None
