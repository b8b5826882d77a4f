"""The prologue of activation_linear: act(x + activation_bias), weighed by token, as rows or as codes. x is kept, as `save` says.

Backward is one pass: it makes the gradients of x, activation_bias and token_weight, and writes the activation again over its
gradient. Before a product in eight bits it writes the activation's codes, transposed, and x's gradient as codes where the product
that made x takes those; elsewhere the activation's codes come from a pass of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onepass.gradients.main_grad import GradRequest
from onepass.gradients.vectors import KernelTargets, VectorGrads
from onepass.ops.activation import fp8, kernels
from onepass.ops.activation.activations import activation_of
from onepass.ops.activation.formula import ActivationOptions, activation_formula
from onepass.ops.activation.fp8_kernels import ActivationNeeds
from onepass.ops.activation.lora_backward import WIDEST_RANK, lora_backward
from onepass.product.fp8.gradient import FP8Gradient
from onepass.product.fp8.in_graph import LOOKS_AT_A_STATE, forward_fake, forward_in_graph
from onepass.product.fp8.prologue import Codes
from onepass.product.fp8.weight import FP8Weight
from onepass.product.lora import LowRankRows
from onepass.product.prologue import Inputs, Kept, Needs, PrologueGradients
from onepass.runtime import saved
from onepass.runtime.dispatch import cast
from onepass.runtime.formula import formula_gradients, run_formula
from onepass.runtime.fp8 import FP8Target, transposed_width
from onepass.runtime.fp8_recipe import FP8Recipe
from onepass.runtime.op import Registered


class ActivationRows(NamedTuple):
    """The activation. Inputs: x, activation_bias, token_weight. Kept: the last two, and x as it is stored.

    Before them comes t where x was made by a product with adapters, `low_rank_rows`.
    """

    options: ActivationOptions
    use_triton: bool
    stored: saved.SavedFormat
    dtype: torch.dtype  # the product's
    gradient_consumer: FP8Weight | None = None  # the state of the product that made x and takes its gradient as codes
    low_rank_rows: LowRankRows | None = None  # of the product with adapters that made x

    vectors: tuple[str, ...] = ("activation_bias",)
    returns: tuple[bool, bool] = (False, False)

    # ---- forward ----

    def rows(self, inputs: Inputs, needs: Needs) -> tuple[Tensor, Kept]:
        x, bias, token_weight = inputs
        assert x is not None
        if self.use_triton and self.stored.save == "fp8" and needs is not None and any(needs[:4]):
            rows, *kept = kernels.forward_fp8(x, bias, token_weight, None, self.options, self.dtype)
            return rows, (bias, token_weight, *kept)
        return self._activation(x, bias, token_weight), self._kept(inputs, needs)

    def _activation(self, x: Tensor, bias: Tensor | None, token_weight: Tensor | None) -> Tensor:
        if self.use_triton:
            return kernels.forward(x, bias, token_weight, None, None, self.options, self.dtype)  # type: ignore[no-any-return]
        return activation_by_formula(x, bias, token_weight, self.options, self.dtype)

    def _kept(self, inputs: Inputs, needs: Needs) -> Kept:
        x, bias, token_weight = inputs
        assert x is not None
        asked = needs is not None and any(needs[:4])  # by more than the layer's bias
        t = () if self.low_rank_rows is None else (self.low_rank_rows.take(),)
        return (*t, bias, token_weight, *(saved.pack(x, self.stored) if asked else ()))

    def codes(self, inputs: Inputs, target: FP8Target, needs: Needs) -> tuple[Codes, Kept]:
        x, bias, token_weight = inputs
        assert x is not None
        return self._codes(x, bias, token_weight, target), self._kept(inputs, needs)

    def _codes(self, x: Tensor, bias: Tensor | None, token_weight: Tensor | None, target: FP8Target) -> Codes:
        codes, inverse = fp8.activation_codes(x, bias, token_weight, self.options, target, use_triton=self.use_triton)
        return codes.view(-1, codes.shape[-1]), inverse

    def in_graph(self, inputs: Inputs, *product: Any, needs: Needs) -> tuple[Sequence[Any], Kept]:
        weights, biases, recipe = product
        found = _forward_op(*inputs, weights, biases, self.options, self.use_triton, self.dtype, needs is not None, recipe)
        return found, self._kept(inputs, needs)

    # ---- backward ----

    def rows_again(self, kept: Kept) -> Tensor:
        rows = self.backward(kept, None, None, None, (GradRequest.SKIP,) * 3, rebuild=True).rows
        assert rows is not None
        return rows

    def codes_again(self, kept: Kept, target: FP8Target) -> Codes:
        return self._codes(*self._unpacked(kept), target)

    def _unpacked(self, kept: Kept) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the inputs, x as it was stored."""
        bias, token_weight, *packed = self._without_t(kept)
        return saved.unpack(tuple(packed), self.stored), bias, token_weight  # type: ignore[arg-type]  # those are there

    def transposed_codes(self, kept: Kept, target: FP8Target) -> Tensor:
        rest = target.scale, self.options, self.use_triton, target.dtype
        transposed: Tensor = _transposed_op(*self._unpacked(kept), *rest)
        return transposed

    def backward(
        self, kept: Kept, vectors: VectorGrads | None, drows: Tensor | None, dx: Tensor | None, requests: Sequence[GradRequest],
        *, rebuild: bool = False, target: FP8Target | None = None, ours: bool = True, u: Tensor | None = None,
    ) -> PrologueGradients:  # fmt: skip
        needs = tuple([request is not GradRequest.SKIP for request in requests])
        if drows is not None and target is not None and needs[0] and self.gradient_consumer is not None:
            return self._backward_in_codes(kept, vectors, drows, needs, target, self.gradient_consumer)
        if drows is None and not rebuild:
            return PrologueGradients((None, None, None))
        bias, token_weight, *packed = self._without_t(kept)
        if u is not None and drows is not None and needs == (True, False, False) and self._multiplies(packed, u):
            x = saved.unpack(tuple(packed), self.stored)  # type: ignore[arg-type]  # they are there
            t = None if self.low_rank_rows is None else kept[0]
            t = None if t is None or t.shape[1] > WIDEST_RANK else t
            dx, da, db = lora_backward(drows, x, bias, token_weight, u, t, self.options)
            if self.low_rank_rows is not None and db is not None:
                self.low_rank_rows.mark_gradient(dx, db)
            return PrologueGradients((dx, None, None), da=da)
        backward: Any = backward_by_kernels if self.use_triton else backward_by_formula
        product = self.dtype if rebuild else None
        found = backward(vectors, drows, tuple(packed), bias, token_weight, self.options, self.stored, needs, product)
        return PrologueGradients(found[1:4], found[0], found[4])

    def _without_t(self, kept: Kept) -> Kept:
        return kept if self.low_rank_rows is None else kept[1:]

    def _multiplies(self, packed: Sequence[Tensor | None], u: Tensor) -> bool:
        """Whether the kernel takes u."""
        if not self.use_triton or self.stored.save != "input" or u.shape[1] > WIDEST_RANK or u.dtype.itemsize > 2:
            return False
        if self.options.interleaved:
            return False
        return all(tensor is not None and tensor.dtype is u.dtype for tensor in packed) and self.stored.dtype is u.dtype

    def _backward_in_codes(
        self, kept: Kept, vectors: VectorGrads | None, drows: Tensor, needs: Sequence[bool], target: FP8Target,
        consumer: FP8Weight,
    ) -> PrologueGradients:  # fmt: skip
        """Make x's gradient in eight bits for the product that made x, and the activation's codes in the same pass."""
        x, bias, token_weight = self._unpacked(kept)
        if vectors is not None:
            (bias,) = vectors.wide(bias)
        given = drows, x, bias, token_weight, self.options
        run = partial(fp8.activation_backward_codes, *given, use_triton=self.use_triton)
        x_target, inverse = consumer.gradient_target(partial(run, y_target=None, needs=ActivationNeeds(dx_transposed=False)))
        found = run(x_target, target, ActivationNeeds(dbias=needs[1], dtoken_weight=needs[2]))
        assert found.dx is not None and found.dx_transposed is not None and found.y_transposed is not None
        dx = FP8Gradient(found.dx, found.dx_transposed, inverse, x.dtype, consumer)
        return PrologueGradients((dx, found.dbias, found.dtoken_weight), transposed=found.y_transposed)


# ---- by kernels, or by the formula where there are none ----


def activation_by_formula(
    x: Tensor, bias: Tensor | None, token_weight: Tensor | None, options: ActivationOptions, product: torch.dtype,
    save: str = "input",
) -> Tensor:  # fmt: skip
    """Return the activation by PyTorch, over blocks of rows on a CPU. It can be differentiated, and keeps x only."""
    formula = partial(_rounded_formula, options=options, product=product)
    parts = activation_of(options.activation).parts
    result: Tensor = run_formula(formula, save, x, shared=(bias,), per_row=(token_weight,), parts=parts)
    return result


def _rounded_formula(
    x: Tensor, bias: Tensor | None, token_weight: Tensor | None, *, options: ActivationOptions, product: torch.dtype
) -> Tensor:
    return cast(activation_formula(x, bias, token_weight, options), product)


def backward_by_kernels(
    grads: VectorGrads | None, dy: Tensor | None, kept: tuple[Tensor, ...], bias: Tensor | None, token_weight: Tensor | None,
    options: ActivationOptions, stored: saved.SavedFormat, needs: Sequence[bool], product: torch.dtype | None,
) -> tuple[KernelTargets | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Return what the kernel added to, the needed gradients of x, bias and token_weight, and the activation, if `product` is its
    type.

    dy belongs to the caller alone: the activation is written over it.
    """
    x, exponents = kept if stored.save == "fp8" else (saved.unpack(kept, stored), None)
    if dy is None:
        assert product is not None
        return None, None, None, None, kernels.rebuild_activation(x, exponents, bias, token_weight, options, product)
    into, found = kernels.backward_into(
        grads, dy, x, exponents, bias, token_weight, None, None, options, *needs, False, stored.dtype, product, into_dy=True
    )
    return into, *found[:4]


def backward_by_formula(
    grads: VectorGrads | None, dy: Tensor | None, kept: tuple[Tensor, ...], bias: Tensor | None, token_weight: Tensor | None,
    options: ActivationOptions, stored: saved.SavedFormat, needs: Sequence[bool], product: torch.dtype | None,
) -> tuple[KernelTargets | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """The same by PyTorch, which adds to no main_grad."""
    if grads is not None:
        (bias,) = grads.wide(bias)
    given = saved.unpack(kept, stored), bias, token_weight
    if dy is None:
        assert product is not None
        return None, None, None, None, activation_by_formula(*given, options, product)
    formula = partial(activation_by_formula, options=options, product=dy.dtype)
    activated, (dx, dbias, dtoken_weight) = formula_gradients(formula, given, needs, dy)
    return None, dx, dbias, dtoken_weight, activated


# ---- registered ----


def _forward(
    x: Tensor, bias: Tensor | None, token_weight: Tensor | None, weights: Sequence[Tensor], biases: Sequence[Tensor],
    options: ActivationOptions, use_triton: bool, product: torch.dtype, noted: bool, recipe: FP8Recipe,
) -> Sequence[Tensor | None]:  # fmt: skip
    stored = saved.saved_format(x, "input", activation_of(options.activation).parts)
    prologue = ActivationRows(options, use_triton, stored, product)
    return forward_in_graph(prologue, (x, bias, token_weight), weights, biases, recipe, noted)[0]


def _forward_fake(
    x: Tensor, bias: Tensor | None, token_weight: Tensor | None, weights: Sequence[Tensor], biases: Sequence[Tensor],
    options: ActivationOptions, use_triton: bool, product: torch.dtype, noted: bool, recipe: FP8Recipe,
) -> Sequence[Tensor | None]:  # fmt: skip
    return forward_fake(x, weights, recipe, product)


_forward_op = Registered(
    "activation_linear_fp8(Tensor x, Tensor? bias, Tensor? token_weight, Tensor[] weights, Tensor[] biases, "
    "ActivationOptions options, bool use_triton, ScalarType product, bool noted, FP8Recipe recipe) -> "
    "(Tensor, Tensor, Tensor?, Tensor?)",
    _forward,
    _forward_fake,
    ActivationOptions,
    FP8Recipe,
    tags=LOOKS_AT_A_STATE,
)


def _transposed(
    x: Tensor, bias: Tensor | None, token_weight: Tensor | None, scale: Tensor, options: ActivationOptions, use_triton: bool,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    target = FP8Target(dtype, scale)
    found = fp8.activation_backward_codes(None, x, bias, token_weight, options, None, target, use_triton=use_triton)
    assert found.y_transposed is not None
    return found.y_transposed


def _transposed_fake(x: Tensor, *rest: Any) -> Tensor:
    parts = activation_of(rest[3].activation).parts
    return x.new_empty((x.shape[-1] // parts, transposed_width(x)), dtype=rest[-1])


_transposed_op = Registered(
    "activation_codes_transposed(Tensor x, Tensor? bias, Tensor? token_weight, Tensor scale, ActivationOptions options, "
    "bool use_triton, ScalarType dtype) -> Tensor",
    _transposed,
    _transposed_fake,
    ActivationOptions,
)
