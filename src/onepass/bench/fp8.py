"""Products in eight bits: onepass's recipes and the peers' layers as contenders, and the rounding that they are judged by.

Updates   Every call is the only one of a step: its weights count as updated, so that onepass sets its delayed scales. onepass
          makes a weight's codes in each forward and again, transposed, in backward. torchao casts its weights in each forward,
          Transformer Engine does unless it is told that a microbatch is not the first.
History   The runner makes some steps before it times a contender: in a layer's first step delayed scales are measured.
Peers     torchao: `convert_to_float8_training` by the recipes tensorwise and rowwise, norm and activation compiled with it.
          Transformer Engine: its module with DelayedScaling of the same history, under its autocast.
Errors    onepass is judged by operands that PyTorch rounds to eight bits, each at the scale of its own magnitude, with products
          in fp32. Formats are hybrid: e4m3, and e5m2 for gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from onepass.bench.model import BenchCase, Call, Contender, Result
from onepass.bench.options import short
from onepass.bench.peers import compiled, imported, with_parameters
from onepass.runtime.dispatch import fast_apply
from onepass.runtime.fp8 import E4M3, E5M2, dequantise, finite_amax, quantise, scale_for
from onepass.runtime.fp8_recipe import FP8Recipe, Precision

_RECIPE = FP8Recipe()


def reference(case: BenchCase) -> str:
    """Return the name of the row that times are relative to: onepass in the case's type."""
    return f"onepass {short(case.dtype)}"


# ---- onepass ----


def ours(case: BenchCase, make: Callable[[BenchCase, Precision], Call], weights: Sequence[int]) -> list[Contender]:
    """Return onepass's rows.

    Args:
        make: returns the call at a precision.
        weights: places of the products' weights among the case's tensors.
    """

    def first_of_a_step(recipe: FP8Recipe) -> Callable[[BenchCase], Call]:
        return lambda case: _after_an_update(make(case, recipe), weights)

    return [
        Contender("onepass", first_of_a_step(_RECIPE), ours=True),
        Contender("onepass current", first_of_a_step(FP8Recipe("current")), ours=True),
        Contender("onepass row", first_of_a_step(FP8Recipe("row")), ours=True),
        Contender(reference(case), lambda case: make(case, None), ours=True),
    ]


def _after_an_update(call: Call, weights: Sequence[int]) -> Call:
    def updated(*tensors: Tensor) -> Result:
        increment_version([tensors[place] for place in weights])
        return call(*tensors)

    return updated


# ---- peers ----


def torchao(layers: Callable[[BenchCase], nn.Module], names: tuple[str, ...]) -> list[Contender]:
    """Return torchao's rows.

    Args:
        layers: returns plain layers, whose parameters get the values of the case.
        names: of these parameters, in the order of the case's tensors after x.
    """

    def made_by(recipe: str) -> Callable[[BenchCase], Call]:
        def make(case: BenchCase) -> Call:
            convert, config = (imported("torchao.float8", name) for name in ("convert_to_float8_training", "Float8LinearConfig"))
            with torch.device("meta"):
                plain = layers(case)
            module = convert(plain, config=config.from_recipe_name(recipe))
            return with_parameters(module, names, compiled(module))

        return make

    return [Contender(f"torchao {recipe}", made_by(recipe), "torchao", compiles=True) for recipe in ("tensorwise", "rowwise")]


def transformer_engine(
    module: str, sizes: Callable[[BenchCase], tuple[int, ...]], names: tuple[str, ...], **options: Any
) -> Contender:
    """Return Transformer Engine's row.

    Args:
        module: the name of its class.
        sizes, options: the class's arguments.
        names: of its parameters, in the order of the case's tensors after x.
    """

    def make(case: BenchCase) -> Call:
        engine = "transformer_engine.pytorch"
        layer = imported(engine, module)(*sizes(case), bias=False, params_dtype=case.dtype, **options)
        scaling, formats = (imported("transformer_engine.common.recipe", name) for name in ("DelayedScaling", "Format"))
        recipe = scaling(
            margin=_RECIPE.margin, fp8_format=formats.HYBRID, amax_history_len=_RECIPE.amax_history_len,
            amax_compute_algo=_RECIPE.amax_compute_algo,
        )  # fmt: skip
        try:
            autocast, argument = imported(engine, "autocast"), "recipe"
        except AttributeError:  # before 2.8
            autocast, argument = imported(engine, "fp8_autocast"), "fp8_recipe"
        call, chosen = with_parameters(layer, names), {"enabled": True, argument: recipe}

        def in_fp8(*tensors: Tensor) -> Result:
            with autocast(**chosen):
                result: Result = call(*tensors)
            return result

        return in_fp8

    return Contender("Transformer Engine", make, "Transformer Engine")


class SwiGLU(nn.Module):
    """The activation as a module, for torchao's layers."""

    def forward(self, x: Tensor) -> Tensor:
        gate, linear = x.chunk(2, -1)
        return nn.functional.silu(gate) * linear


# ---- what errors are judged by ----


def baseline_linear(case: BenchCase, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return a product in the case's dtype, of operands that are rounded once: to that dtype, or to eight bits."""
    if case.fp8:
        return rounded_linear(x, weight).to(case.dtype)
    return nn.functional.linear(x.to(case.dtype), weight, bias)


def rounded_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return x @ weight.T in fp32 of operands in eight bits. Its gradients are products of such too."""
    product: Tensor = _apply_rounded(x, weight)
    return product


class _RoundedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        x8, weight8 = _rounded(x, E4M3), _rounded(weight, E4M3)
        ctx.save_for_backward(x8, weight8)
        return x8 @ weight8.t()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        (x8, weight8), dy8 = ctx.saved_tensors, _rounded(dy, E5M2)
        return dy8 @ weight8, dy8.t() @ x8


_apply_rounded = fast_apply(_RoundedLinear)


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    scale = scale_for(finite_amax(x), dtype)
    return dequantise(quantise(x, scale, dtype), 1 / scale)
