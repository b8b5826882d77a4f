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
from onepass.product.prologue import Inputs, Needs, Prologue
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
        found, first = [], 0
        for count in row_counts:
            tensors = dict(self.tensors)
            for name in ("codes", "inverse"):
                if name in tensors:
                    tensors[name] = tensors[name][first : first + count]
            if "transposed" in tensors:
                tensors["transposed"] = tensors["transposed"][:, first : first + count]
            found.append(FP8FrozenWeight((count, self.shape[1]), self.dtype, tensors, self.options))
            first += count
        return found

    def describe(self) -> str:
        layouts = "both layouts" if "transposed" in self.tensors else "rows"
        return f"codes of {layouts} in eight bits"

    def describe_products(self) -> str:
        return f"products in eight bits ({self.recipe.types}; {self.recipe.scaling} scales) of a weight's {self.describe()}"

    def decode_into(self, out: Tensor) -> None:
        out.copy_(dequantise(*self.row_codes(), out.dtype))


def freeze_weight(
    weight: Tensor | Sequence[Tensor] | nn.Module, precision: Precision = "fp8", *, layouts: int = 2
) -> FrozenWeight:  # fmt: skip
    """Return a frozen weight as codes for products in eight bits, which linear layers take in the place of the plain one.

        for layer in (attention.qkv, attention.out):
            onepass.freeze_weight(layer)       # layer.weight has 2 bytes a number, and no others
        y = onepass.linear(x, layer.weight, lora=adapter)

    The codes are made once. What is written to the plain weight afterwards is not seen.

    Args:
        weight: ``[N, K]``, both multiples of 16, without a gradient. Several become one weight with the rows of all. The weight
            of a module is replaced, and its memory is freed where nobody else has it.
        precision: ``fp8`` or an `onepass.FP8Recipe`, by which the products run.
        layouts: 2 keeps the codes by rows and transposed. 1 keeps rows alone, half the memory, and backward transposes them,
            which takes 2 bytes a number to read and write. Scales by row need 2.
    """
    plain: Any = weight.weight if isinstance(weight, nn.Module) else weight
    recipe = recipe_of(precision)
    if recipe is None:
        raise ValueError("precision must be 'fp8' or an FP8Recipe, but is None")
    if layouts not in (1, 2):
        raise ValueError(f"layouts must be 1 or 2, but is {layouts!r}")
    if layouts == 1 and recipe.scaling == "row":
        raise ValueError("layouts must be 2 with scales by row: those of the transpose are others")
    parts = [plain] if isinstance(plain, Tensor) else list(plain)
    for part in parts:
        _check_part(part)
    with torch.no_grad():
        frozen = _made(parts[0] if len(parts) == 1 else torch.cat(parts), recipe, layouts)
    if isinstance(weight, nn.Module):
        weight.weight = nn.Parameter(frozen, requires_grad=False)
        return weight.weight  # type: ignore[return-value]
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
        self, prologue: Prologue, inputs: Inputs, weight: Any, bias: Any, needs: Needs, start: Start | None = None
    ) -> Forward:  # fmt: skip
        return _forward(self, prologue, inputs, weight, bias, needs, start)  # type: ignore[no-any-return]

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
