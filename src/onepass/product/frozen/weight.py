"""A frozen weight that is kept in few bits, and decoded where a product takes it: forward and, for dx, backward.

Memory   the decoded weight is memory of one call, which PyTorch's allocator hands from layer to layer: no stream, thread or CUDA
         graph shares a buffer that another writes. Backward decodes again. Nothing of the weight's size is saved.
Others   the weight is a tensor of a product's type and of shape [N, K]. Operators of PyTorch get it decoded, so that formulas and
         tools work. Copies, moves to a device and torch.save have the codes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from onepass.distributed.tensor_parallel import Start, TPLayout
from onepass.gradients.deferred import DeferredWgrad
from onepass.product.precision import FROZEN
from onepass.product.product import Forward, OutputGradient, PlainProduct, Product
from onepass.product.prologue import Inputs, Keep, Needs, Prologue
from onepass.runtime.dispatch import under_functorch
from onepass.runtime.fp8_recipe import Precision

aten = torch.ops.aten


class FrozenWeight(Tensor):
    """A weight [N, K] in few bits, which has no gradient.

    Args:
        shape: of the weight.
        dtype: that it has for others. A product gets it decoded to the product's type, with one rounding.
        tensors: what it is made of, by their names. Those that are None are left out.
        options: what else that takes, hashable.
    """

    tensors: Mapping[str, Tensor]
    options: tuple[Any, ...]
    is_decoded = True  # for its products

    @staticmethod
    def __new__(cls, shape: Any, dtype: torch.dtype, tensors: Mapping[str, Tensor | None], options: tuple[Any, ...] = ()) -> Any:
        there = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        device = next(iter(there.values())).device
        for name, tensor in there.items():
            if tensor.device != device:
                raise ValueError(f"{name} of a frozen weight must be on {device}, as its codes, but is on {tensor.device}")
        made: Any = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        made.tensors, made.options = there, options
        for name, tensor in there.items():
            setattr(made, name, tensor)  # compilers ask for attributes
        return made

    # ---- what a kind says ----

    def describe(self) -> str:
        """Return its kind, for `explain`."""
        raise NotImplementedError

    def describe_products(self) -> str:
        return f"{self.describe()}, decoded for each product by PyTorch"

    def decode_into(self, out: Tensor) -> None:
        """Write the weight to a contiguous tensor."""
        raise NotImplementedError

    # ---- for products ----

    def decoded(self, dtype: torch.dtype) -> Tensor:
        """Return the weight as a plain tensor, rounded once."""
        out = torch.empty(self.shape, dtype=dtype, device=self.device)
        self.decode_into(out)
        return out

    # ---- for PyTorch ----

    def map_tensors(self, function: Callable[[Tensor], Tensor], dtype: torch.dtype | None = None) -> Any:
        """Return a weight of what a function makes of its tensors."""
        tensors = {name: function(tensor) for name, tensor in self.tensors.items()}
        return type(self)(self.shape, dtype or self.dtype, tensors, self.options)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({tuple(self.shape)}, {self.dtype}, {self.describe()}, device={str(self.device)!r})"

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        return list(self.tensors), (self.shape, self.dtype, self.options)

    @classmethod
    def __tensor_unflatten__(cls, tensors: dict[str, Tensor], context: tuple[Any, ...], size: Any, stride: Any) -> FrozenWeight:
        shape, dtype, options = context
        return cls(shape, dtype, tensors, options)  # type: ignore[no-any-return]

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if func in _KEEP_CODES:
            return _KEEP_CODES[func](*args, **kwargs)
        if func._schema.is_mutable and isinstance(args[0], FrozenWeight):
            hint = "freeze another, or, to merge adapters, save them and merge them into the model as it was loaded"
            raise RuntimeError(f"a frozen weight is kept in few bits and can't be written in place: {hint}")
        args, kwargs = tree_map_only(FrozenWeight, lambda weight: weight.decoded(weight.dtype), (args, kwargs))
        return func(*args, **kwargs)


# ---- operators that leave it in few bits ----


def _converted(
    weight: FrozenWeight, *, dtype: torch.dtype | None = None, device: Any = None, non_blocking: bool = False, **_: Any
) -> FrozenWeight:  # fmt: skip
    """Move the weight. Another type is what others see of it: its codes and scales keep theirs."""

    def move(tensor: Tensor) -> Any:
        seen_as = dtype if isinstance(tensor, FrozenWeight) else None
        return aten._to_copy.default(tensor, dtype=seen_as, device=device, non_blocking=non_blocking)

    return weight.map_tensors(move, dtype)  # type: ignore[no-any-return]


def _copied(weight: Any, source: Any, non_blocking: bool = False) -> Any:
    """Copy the codes of a weight of the same kind, as `load_state_dict` does."""
    if type(weight) is not type(source) or weight.options != source.options or weight.shape != source.shape:
        raise RuntimeError(f"only a weight of its kind and shape can be copied to {weight!r}, but not {type(source).__name__}")
    for name, tensor in weight.tensors.items():
        tensor.copy_(source.tensors[name], non_blocking)
    return weight


_KEEP_CODES: dict[Any, Callable[..., Any]] = {
    aten.detach.default: lambda weight: weight.map_tensors(aten.detach.default),
    aten.alias.default: lambda weight: weight.map_tensors(aten.detach.default),
    aten.clone.default: lambda weight, **_: weight.map_tensors(aten.clone.default),
    aten._to_copy.default: _converted,
    aten.copy_.default: lambda weight, source, non_blocking=False: (
        _copied(weight, source, non_blocking)
        if isinstance(weight, FrozenWeight)
        else weight.copy_(source.decoded(weight.dtype), non_blocking)
    ),
}


# ---- the product ----


class DecodedProduct(PlainProduct):
    """A product in the rows' type by a weight that is decoded for it: a `Product`, and its own `ProductCall`."""

    __slots__ = ()

    def forward(
        self, prologue: Prologue, inputs: Inputs, weight: Any, bias: Any, needs: Needs, start: Start | None = None,
        keep: Keep | None = None,
    ) -> Forward:  # fmt: skip
        return super().forward(prologue, inputs, _decoded(weight, prologue.dtype), bias, needs, start, keep)

    def output_gradient(
        self, dy: Tensor, weight: Any, came: Tensor | None, asks_rows: bool, asks_weight: bool, *, later: bool, ours: bool = False
    ) -> OutputGradient:  # fmt: skip
        weight = _decoded(weight, dy.dtype) if asks_rows else None
        return super().output_gradient(dy, weight, came, asks_rows, asks_weight, later=later, ours=ours)


def _decoded(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Decode a weight. Hooks on what autograd saves may have done so."""
    return weight.decoded(dtype) if isinstance(weight, FrozenWeight) else weight


def decoded_product(
    precision: Precision, x: Tensor, weight: Tensor, layout: TPLayout | None, deferred: DeferredWgrad | None
) -> Product:  # fmt: skip
    """Return the product by a weight that is decoded."""
    check_frozen(weight)
    if precision is not None:
        raise ValueError("precision must be None with a weight that is decoded: its products are in x's type")
    return DecodedProduct(layout)


def check_frozen(weight: Tensor) -> None:
    if weight.requires_grad:
        raise ValueError("weight must not require grad: it is kept in few bits, and has no gradient")
    if under_functorch():
        raise RuntimeError(
            "weight must be a plain tensor under vmap and functional derivatives: these can't follow how it is decoded"
        )


def define_frozen(kind: type[FrozenWeight], product: Callable[..., Product] = decoded_product) -> None:
    """Enter a kind of weight, and what makes its product."""
    FROZEN[kind] = product
