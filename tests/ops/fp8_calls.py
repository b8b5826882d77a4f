"""Calls of ops with `precision=`, and how far their results are from fp64: shared by tests of products in eight bits."""

import importlib
import math
from typing import Any, NamedTuple

import pytest
import torch

import onepass
from onepass import FP8Recipe
from onepass.ops.activation.activation_linear import activation_linear_reference
from onepass.ops.linear.linear import linear_reference
from onepass.ops.norm.norm_linear import norm_linear_reference

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
OUTPUT, GRADIENT = 25, {"hybrid": 18, "e4m3": 24}  # decibels that results must have against fp64
K, N = 64, 48

RECIPES = {
    "delayed": FP8Recipe(),
    "current": FP8Recipe(scaling="current"),
    "row": FP8Recipe(scaling="row"),
    "16-bit wgrad": FP8Recipe(wgrad=False),
    "e4m3": FP8Recipe(format="e4m3"),
    "current, e4m3": FP8Recipe(scaling="current", format="e4m3"),
}
recipes = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
LINEAR = importlib.import_module("onepass.ops.linear.linear")  # the package has a function of this name


def fp8_names(library):
    """Return the names of the module that makes products in eight bits, of the package that `library` is an op of."""
    (make,) = library.product_for.__globals__["PRODUCTS"].values()
    return make.__globals__


class Case(NamedTuple):
    """A call: the names of its tensors, all of which need gradients, and its options."""

    function: Any
    reference: Any
    tensors: tuple[str, ...]
    options: dict[str, Any] = {}
    parts: int = 1  # of a row of x, 2 for a gated activation

    @property
    def is_norm(self):
        return self.function.__name__ == "norm_linear"

    def shape(self, name, lead):
        width = self.parts * K
        return {
            "x": (*lead, width),
            "residual": (*lead, width),
            "weight": (N, K),
            "bias": (N,),
            "norm_weight": (K,),
            "norm_bias": (K,),
            "activation_bias": (width,),
            "token_weight": lead,
        }[name]

    def draw(self, dtype=BF16, lead=(3, 7), seed=0):
        """Return the tensors by name, and by number the gradients of the outputs."""
        generator = torch.Generator().manual_seed(seed)
        tensors = {}
        for name in self.tensors:
            drawn = torch.randn(self.shape(name, lead), generator=generator) / (8 if name == "weight" else 1)
            tensors[name] = drawn.to(DEVICE, dtype).requires_grad_()
        return tensors, [torch.randn(*lead, width, generator=generator).to(DEVICE, dtype) for width in (N, K, K)]

    def __call__(self, tensors, **options):
        return tupled(self.function(**self.given(tensors), **self.options | options))

    def given(self, tensors):
        return {"norm_weight": None} | tensors if self.is_norm else tensors

    def exact(self, tensors, dys):
        """Return results and gradients in fp64, of residuals that are added in their own type."""
        leaves = {name: t.detach().double().requires_grad_() for name, t in tensors.items()}
        options = {name: value for name, value in self.options.items() if name != "save"}
        options |= {"stored": tensors["x"].dtype} if self.is_norm else {}
        return collect(tupled(self.reference(**self.given(leaves), **options)), leaves, [dy.double() for dy in dys])

    def results(self, tensors, dys, **options):
        return collect(self(tensors, **options), tensors, dys)


def tupled(found):
    return found if isinstance(found, tuple) else (found,)


def collect(ys, tensors, dys):
    """Return outputs by number and gradients by name."""
    asked = {name: t for name, t in tensors.items() if t.requires_grad}
    grads = torch.autograd.grad(ys, list(asked.values()), dys[: len(ys)])
    return {i: y.detach() for i, y in enumerate(ys)} | dict(zip(asked, grads, strict=True))


def _norm(*tensors, **options):
    return Case(onepass.norm_linear, norm_linear_reference, ("x", *tensors, "weight"), options)


def _activation(activation, *tensors, **options):
    parts = 2 if activation in ("swiglu", "quick_geglu") else 1
    options["activation"] = activation
    return Case(onepass.activation_linear, activation_linear_reference, ("x", "weight", *tensors), options, parts)


LAYER = {"norm": "layer_norm"}
CASES = {
    "linear": Case(onepass.linear, linear_reference, ("x", "weight", "bias")),
    "linear, no bias": Case(onepass.linear, linear_reference, ("x", "weight")),
    "rms": _norm("norm_weight", "bias"),
    "rms, no weight": _norm(),
    "rms, residual": _norm("norm_weight", "residual"),
    "rms, zero-centred": _norm("norm_weight", zero_centered_gamma=True),
    "rms, input": _norm("norm_weight", return_input=True),
    "layer": _norm("norm_weight", "norm_bias", "bias", **LAYER),
    "layer, no weight": _norm(**LAYER),
    "layer, norm output": _norm("norm_weight", "norm_bias", return_norm_output=True, **LAYER),
    "layer, all": _norm(
        "norm_weight",
        "norm_bias",
        "residual",
        "bias",
        return_norm_output=True,
        return_input=True,
        zero_centered_gamma=True,
        **LAYER,
    ),
    "swiglu": _activation("swiglu", "bias"),
    "gelu": _activation("gelu", "activation_bias"),
    "squared_relu": _activation("squared_relu", "token_weight"),
    "swiglu, all": _activation("quick_geglu", "bias", "activation_bias", "token_weight", clamp=1.5, linear_offset=1.0),
    "swiglu, save fp8": _activation("swiglu", "activation_bias", save="fp8"),
    "gelu, save offload": _activation("gelu", "bias", save="offload"),
}
cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
ONE_OF_EACH = {name: CASES[name] for name in ("linear", "rms", "layer, all", "swiglu, all")}
one_of_each = pytest.mark.parametrize("case", ONE_OF_EACH.values(), ids=ONE_OF_EACH)


def decibels(found, exact):
    exact = exact.double()
    lost = (found.double() - exact).square().sum().clamp(min=1e-300)
    return 10 * math.log10((exact.square().sum() / lost).item())


def check_decibels(found, exact, recipe, more=0):
    """Assert that outputs and gradients are as near fp64 as they must be, `more` decibels above the bars."""
    assert found.keys() == exact.keys()
    for name, value in found.items():
        least = OUTPUT if isinstance(name, int) else GRADIENT[recipe.format]
        assert decibels(value, exact[name]) >= least + more, name


def equal_bits(first, second):
    return first.keys() == second.keys() and all(value.equal(second[name]) for name, value in first.items())


def give_main_grads(tensors, value=0.0):
    """Give main_grad to all parameters: what has no rows."""
    named = {name: t for name, t in tensors.items() if name not in ("x", "residual", "token_weight")}
    for t in named.values():
        t.main_grad = torch.full(t.shape, value, device=DEVICE)
    return named
