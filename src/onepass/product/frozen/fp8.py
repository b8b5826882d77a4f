"""freeze_weight: a frozen weight's codes for products in eight bits, made once and for all.

A product in eight bits of a plain weight makes its codes in each call, by rows in forward and transposed in backward, as nothing
says whether a weight was written. Here the codes are the weight, and nothing else is.

Layouts   2 bytes a number keep both. 1 byte keeps the rows' codes, which backward transposes (kernels/fp8_transpose.py). With a
          scale a row the transpose has other scales, and other codes: both are kept.
Rows      are cast as the recipe says, and so is y's gradient. Scales and codes are those that a call of the plain weight makes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from onepass.distributed.tensor_parallel import Start, TPLayout
from onepass.gradients.deferred import DeferredWgrad
from onepass.kernels.fp8_cast import cast_columns, cast_rows, cast_tensor
from onepass.kernels.fp8_transpose import transpose_codes
from onepass.product.fp8.rows import FP8Rows
from onepass.product.fp8.scales import FP8Factors, FP8Scales, factors_of
from onepass.product.frozen.weight import DecodedProduct, FrozenWeight, check_frozen, define_frozen
from onepass.product.precision import PRODUCTS
from onepass.product.product import Forward, Product
from onepass.product.prologue import Inputs, Keep, Needs, Prologue
from onepass.runtime.checks import check_floating
from onepass.runtime.dispatch import PLAIN
from onepass.runtime.fp8 import E4M3, MULTIPLE, FP8Target, check_gpu, dequantise, fits_fp8
from onepass.runtime.fp8_recipe import FP8Recipe, Precision, recipe_of


class FP8FrozenWeight(FrozenWeight):
    """Codes in e4m3, by rows and perhaps transposed, at a scale that all share or at scales of rows and of columns.

    `options`: the recipe.
    """

    codes: Tensor
    is_decoded = False

    @property
    def recipe(self) -> FP8Recipe:
        return self.options[0]  # type: ignore[no-any-return]

    @property
    def factors(self) -> FP8Factors | None:
        """The scale that all codes share, or None."""
        row = self.tensors.get("scale")
        return None if row is None else factors_of(row)

    def row_codes(self) -> tuple[Tensor, Tensor]:
        """Return the rows' codes, and the inverse of their scale or scales."""
        factors = self.factors
        return self.codes, self.tensors["inverse"] if factors is None else factors.inverse

    def transposed_codes(self) -> tuple[Tensor, Tensor]:
        """Return the codes of the transpose, and the inverse of their scale or scales."""
        factors, codes = self.factors, self.tensors.get("transposed")
        codes = transpose_codes(self.codes) if codes is None else codes.contiguous()  # a part's are not
        return codes, self.tensors["transposed_inverse"] if factors is None else factors.inverse

    def parts(self, row_counts: Sequence[int]) -> list[FP8FrozenWeight]:
        """Return the weights that this one is of, in the same memory."""
        found: list[FP8FrozenWeight] = []
        first = 0
        for count in row_counts:
            tensors = dict(self.tensors)
            for name, dim in _DIVIDED.items():
                if name in tensors:
                    tensors[name] = tensors[name].narrow(dim, first, count)
            found.append(FP8FrozenWeight((count, self.shape[1]), self.dtype, tensors, self.options))
            first += count
        return found

    @classmethod
    def join(cls, parts: Sequence[Any]) -> FP8FrozenWeight:
        """Return the weight that these are `parts` of, in their order. Raise where they don't lie so."""
        first, tensors = parts[0], {}
        for name in first.tensors:
            of_parts = [part.tensors.get(name) for part in parts]
            tensors[name] = _whole_of(of_parts, _DIVIDED.get(name))
            if tensors[name] is None or any(part.options != first.options for part in parts):
                raise ValueError("weights must be parts of one weight in eight bits to be joined: freeze them together")
        return cls((sum(part.shape[0] for part in parts), first.shape[1]), first.dtype, tensors, first.options)  # type: ignore[no-any-return]

    def describe(self) -> str:
        layouts = "both layouts" if "transposed" in self.tensors else "rows"
        return f"codes of {layouts} in eight bits"

    def describe_products(self) -> str:
        return f"products in eight bits ({self.recipe.types}; {self.recipe.scaling} scales) of a weight's {self.describe()}"

    def decode_into(self, out: Tensor) -> None:
        out.copy_(dequantise(*self.row_codes(), out.dtype))


_DIVIDED = {"codes": 0, "inverse": 0, "transposed": 1}  # the dimension of the weight's rows


def _whole_of(parts: Sequence[Tensor | None], dim: int | None) -> Tensor | None:
    """Return the tensor whose parts along a dimension these are, one after another, or which all are; or None."""
    first, size = parts[0], 0
    assert first is not None
    storage, step = first.untyped_storage().data_ptr(), 0 if dim is None else first.stride(dim)
    for part in parts:
        if part is None or part.untyped_storage().data_ptr() != storage or part.stride() != first.stride():
            return None
        if part.storage_offset() != first.storage_offset() + size * step:
            return None
        size += 0 if dim is None else part.shape[dim]
    if dim is None:
        return first
    shape = [size if i == dim else n for i, n in enumerate(first.shape)]
    return first.as_strided(shape, first.stride())


def freeze_weight(
    weight: Tensor | nn.Module | Sequence[Tensor | nn.Module], precision: Precision = "fp8", *, layouts: int = 2
) -> FrozenWeight:  # fmt: skip
    """Return a frozen weight as codes for products in eight bits, which linear layers take in the place of the plain one.

        for layer in (attention.qkv, attention.out):
            onepass.freeze_weight(layer)       # layer.weight has 2 bytes a number, and no others
        y = onepass.linear(x, layer.weight, lora=adapter)

    The codes are made once. What is written to the plain weight afterwards is not seen.

    Args:
        weight: ``[N, K]``, both multiples of 16, without a gradient. Several become one weight with the rows of all. The weight
            of a module is replaced, and its memory is freed where nobody else has it. Modules that are frozen together share one
            memory, and `frozen_weight` of them returns the whole.
        precision: ``fp8`` or an `onepass.FP8Recipe`, by which the products run.
        layouts: 2 keeps the codes by rows and transposed. 1 keeps rows alone, half the memory, and backward transposes them,
            which takes 2 bytes a number to read and write. Scales by row need 2.
    """
    sources = list(weight) if isinstance(weight, Sequence) else [weight]
    recipe = recipe_of(precision)
    if recipe is None:
        raise ValueError("precision must be 'fp8' or an FP8Recipe, but is None")
    if layouts not in (1, 2):
        raise ValueError(f"layouts must be 1 or 2, but is {layouts!r}")
    if layouts == 1 and recipe.scaling == "row":
        raise ValueError("layouts must be 2 with scales by row: those of the transpose are others")
    parts: list[Any] = [each.weight if isinstance(each, nn.Module) else each for each in sources]
    for part in parts:
        _check_part(part)
    with torch.no_grad():
        frozen = _made(parts[0] if len(parts) == 1 else torch.cat(parts), recipe, layouts)
    divided = frozen.parts([len(part) for part in parts]) if len(parts) > 1 else [frozen]
    for source, part in zip(sources, divided, strict=True):
        if isinstance(source, nn.Module):
            source.weight = nn.Parameter(part, requires_grad=False)
    return frozen


def _check_part(weight: Tensor) -> None:
    check_floating("weight", weight)
    if type(weight) not in PLAIN:
        raise TypeError(f"weight must be a plain tensor, but is a {type(weight).__name__}")
    if weight.requires_grad:
        raise ValueError("weight must not require grad: as codes it has no gradient")
    if weight.dtype is torch.float64:
        raise TypeError("weight must be fp32, bf16 or fp16, but is fp64")
    if weight.dim() != 2 or not weight.numel() or not fits_fp8(weight.shape):
        raise ValueError(f"weight must have shape (N, K), multiples of {MULTIPLE}, but has {tuple(weight.shape)}")
    check_gpu("precision", weight)


def _made(weight: Tensor, recipe: FP8Recipe, layouts: int) -> FP8FrozenWeight:
    weight = weight.detach()
    tensors: dict[str, Tensor | None]
    if recipe.scaling == "row":
        (codes, inverse), (transposed, of_columns) = cast_rows(weight), cast_columns(weight)
        tensors = {"codes": codes, "inverse": inverse, "transposed": transposed, "transposed_inverse": of_columns}
    else:
        factors = FP8Scales(recipe, weight.device).measure("weight", partial(cast_tensor, weight, codes=False))
        of_rows, across = cast_tensor(weight, FP8Target(E4M3, factors.scale), transposed=layouts == 2)
        tensors = {"codes": of_rows, "scale": factors.row, "transposed": across}
    return FP8FrozenWeight(weight.shape, weight.dtype, tensors, (recipe,))  # type: ignore[no-any-return]


# ---- the product ----


class FrozenFP8Product(NamedTuple):
    """A product in eight bits by codes that are kept: a `Product`. It breaks a compiled graph, which can't see scales change."""

    recipe: FP8Recipe
    layout: TPLayout | None = None

    deferred: None = None
    takes_unrounded: bool = True
    num_weights: int = 1
    num_adapters: int = 0

    def rows_in(self, x_type: torch.dtype, dtype: torch.dtype) -> Prologue:
        return FP8Rows(x_type, dtype)

    def forward(
        self, prologue: Prologue, inputs: Inputs, weight: Any, bias: Any, needs: Needs, start: Start | None = None,
        keep: Keep | None = None,
    ) -> Forward:  # fmt: skip
        return _forward(self, prologue, inputs, weight, bias, needs, start, keep)  # type: ignore[no-any-return]

    def mark_output(self, y: Tensor, bias: Tensor | None) -> None:
        """The gradient's transposed codes, which another op would write, are for a weight's gradient."""


def _forward_now(product: FrozenFP8Product, prologue: Prologue, inputs: Inputs, weight: Any, *rest: Any) -> Forward:
    made = PRODUCTS[FP8Recipe](product.recipe, weight, product.layout, None)
    return made.forward(prologue, inputs, weight, *rest)


_forward: Any = torch._disable_dynamo(_forward_now)  # type: ignore[attr-defined]


def frozen_fp8_product(
    precision: Precision, x: Tensor, weight: Any, layout: TPLayout | None, deferred: DeferredWgrad | None
) -> Product:  # fmt: skip
    """Return the product by the recipe that the weight was frozen for."""
    check_frozen(weight)
    recipe = recipe_of(precision)
    if recipe is not None and recipe != weight.recipe:
        raise ValueError(f"precision must be None or that which the weight was frozen for, {weight.recipe}, but is {precision!r}")
    check_gpu("precision", x)
    return FrozenFP8Product(weight.recipe, layout) if x.numel() else DecodedProduct(layout)


define_frozen(FP8FrozenWeight, frozen_fp8_product)
