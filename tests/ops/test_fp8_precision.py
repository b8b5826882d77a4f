"""Ops with `precision=`: how far results are from fp64, of which inputs, and that formulas and kernels agree."""

import hashlib
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ops.calls import backends, needs_triton, relative
from ops.fp8_calls import (
    BF16,
    CASES,
    DEVICE,
    FP16,
    FP32,
    ONE_OF_EACH,
    RECIPES,
    K,
    N,
    cases,
    check_decibels,
    collect,
    decibels,
    one_of_each,
    recipes,
)  # fmt: skip

import onepass
from onepass.runtime.fp8 import dequantise, quantise

KINDS = ("delayed", "row", "current, e4m3", "16-bit wgrad")  # of recipes: all scalings and both types of gradients
dtypes = pytest.mark.parametrize("dtype", (BF16, FP16, FP32), ids=str)


@backends
@cases
def test_results_are_near_fp64(case, backend):
    for name in ("delayed", "row"):
        tensors, dys = case.draw()
        found = case.results(tensors, dys, precision=RECIPES[name], backend=backend)
        check_decibels(found, case.exact(tensors, dys), RECIPES[name])
        for each, value in found.items():
            assert value.dtype == (BF16 if isinstance(each, int) else tensors[each].dtype)


@backends
@one_of_each
@recipes
def test_every_recipe_is_near_fp64(case, recipe, backend):
    tensors, dys = case.draw()
    check_decibels(case.results(tensors, dys, precision=recipe, backend=backend), case.exact(tensors, dys), recipe)


@backends
@one_of_each
@dtypes
def test_every_type_is_near_fp64(case, dtype, backend):
    tensors, dys = case.draw(dtype)
    found = case.results(tensors, dys, precision="fp8", backend=backend)
    check_decibels(found, case.exact(tensors, dys), RECIPES["delayed"])
    assert all(value.dtype == dtype for value in found.values())


@backends
@one_of_each
@pytest.mark.parametrize("name", ("delayed", "row", "16-bit wgrad"))
@pytest.mark.parametrize("given", (FP32, BF16), ids=str)
def test_autocast_keeps_fp32_weights_and_their_gradients(case, given, name, backend):
    tensors, dys = case.draw(FP32)
    for each in ("x", "residual"):
        if each in tensors:
            tensors[each] = tensors[each].detach().to(given).requires_grad_()
    with torch.autocast(DEVICE.type, BF16):
        ys = case(tensors, precision=RECIPES[name], backend=backend)
    assert ys[0].dtype == BF16
    found = collect(ys, tensors, [dy.to(y.dtype) for dy, y in zip(dys, ys, strict=False)])
    check_decibels(found, case.exact(tensors, dys), RECIPES[name])
    assert all(value.dtype == tensors[each].dtype for each, value in found.items() if isinstance(each, str))


@needs_triton
@cases
def test_formulas_and_kernels_agree(case):
    for dtype in (BF16, FP32):
        tensors, dys = case.draw(dtype)
        by_formula = case.results(tensors, dys, precision="fp8", backend="torch")
        tensors, dys = case.draw(dtype)
        by_kernels = case.results(tensors, dys, precision="fp8", backend="triton")
        for name, value in by_kernels.items():
            assert decibels(value, by_formula[name]) > 40, name


# ---- each product beside fp32 arithmetic on the same operands ----


@recipes
def test_products_are_those_of_fp32_arithmetic(recipe):
    kind = FP32 if DEVICE.type == "cpu" else BF16  # tensor cores keep fewer bits of a sum than fp32 has, and more than bf16
    tensors, (dy, *_) = CASES["linear, no bias"].draw(kind)
    x, weight = tensors.values()
    found = CASES["linear, no bias"].results(tensors, [dy], precision=recipe, backend="torch")

    def rounded(role, t):
        dtype, rows = weight.fp8.scales.type_of(role), t.detach().float().reshape(-1, t.shape[-1])
        sizes = rows.abs().amax(1, keepdim=True) if recipe.scaling == "row" else rows.abs().amax()
        scale = torch.exp2(torch.floor(torch.log2(torch.finfo(dtype).max / sizes)))
        return dequantise(quantise(rows, scale, dtype), 1 / scale)

    x_rows, w_rows, dy_rows = rounded("input", x), rounded("weight", weight), rounded("gradient", dy)
    w_across = rounded("weight", weight.t()).t() if recipe.scaling == "row" else w_rows
    wide = (dy.float().reshape(-1, N), x.detach().float().reshape(-1, K))
    pairs = {0: (x_rows, w_rows.t()), "x": (dy_rows, w_across), "weight": (dy_rows.t(), x_rows)}
    if not recipe.has_wgrad:
        pairs["weight"] = wide[0].t(), wide[1]
    for name, (a, b) in pairs.items():
        exact = a.double() @ b.double()
        ours = found[name].reshape(exact.shape)
        assert relative(ours, exact) <= 1.25 * relative((a @ b).to(kind), exact) + 1e-7, name


# ---- layouts and sizes ----


@backends
@one_of_each
@pytest.mark.parametrize(
    ("lead", "name"),
    (((1,), "delayed"), ((), "row"), ((3,), "16-bit wgrad"), ((17, 1), "row"), ((3, 25), "delayed"), ((2, 3, 5), "16-bit wgrad")),
    ids=str,
)
def test_any_number_of_rows(case, lead, name, backend):
    """Few rows have no noise to average: bars are lower, and one row's norm weight has single products."""
    tensors, dys = case.draw(lead=lead)
    found = case.results(tensors, dys, precision=RECIPES[name], backend=backend)
    for each, value in found.items():
        assert value.shape == (dys[each].shape if isinstance(each, int) else tensors[each].shape)
    check_decibels(found, case.exact(tensors, dys), RECIPES[name], more=-3)


@backends
@one_of_each
def test_no_rows(case, backend):
    tensors, dys = case.draw(lead=(2, 0))
    parameters = {name: t for name, t in tensors.items() if t.numel()}
    found = case.results(tensors, dys, precision="fp8", backend=backend)
    assert found[0].shape == (2, 0, N)
    assert not any(found[name].any() for name in parameters)
    assert not hasattr(tensors["weight"], "fp8")


@pytest.mark.parametrize("sizes", ((96, 72), (88, 64), (1, 16)), ids=str)
@backends
def test_sizes_that_are_no_multiples_of_16_run_in_16_bits(sizes, backend):
    features, width = sizes
    x, weight, norm_weight = torch.randn(5, width), torch.randn(features, width), torch.randn(width)
    x, weight, norm_weight = (t.to(DEVICE, BF16) for t in (x, weight, norm_weight))
    said = f"products in their own type, as the weight's sizes, {features} x {width}, are not multiples of 16"
    for function, given in (
        (onepass.linear, (x, weight)),
        (onepass.norm_linear, (x, norm_weight, weight)),
        (onepass.activation_linear, (x, weight, None, "gelu")),
    ):
        found = function(*given, precision="fp8", backend=backend)
        assert found.equal(function(*given, backend=backend))
        assert said in str(onepass.explain(function, *given, precision="fp8", backend=backend))


# ---- what is no number ----


@backends
@one_of_each
@pytest.mark.parametrize(("kind", "bad"), [*((kind, math.nan) for kind in KINDS), ("row", math.inf), ("16-bit wgrad", math.inf)])
def test_nan_and_infinities_never_become_numbers(case, kind, bad, backend):
    """Each element that bf16 products lose is lost here too, and where one scale serves all no other is."""
    for place in ("x", "weight", "dy"):
        tensors, dys = case.draw()
        with torch.no_grad():
            (dys[0] if place == "dy" else tensors[place])[..., 3, 5] = bad
        exact = case.results(tensors, dys, backend=backend)
        found = case.results(tensors, dys, precision=RECIPES[kind], backend=backend)
        for name, value in found.items():
            lost, gone = ~exact[name].isfinite(), ~value.isfinite()
            assert (gone | ~lost).all(), (place, name)
            if case is CASES["linear"] and bad is math.nan:
                assert gone.equal(lost), (place, name)


# ---- the same bits ----


def digest():
    """Return a digest of all results, by every recipe."""
    found = hashlib.sha256()
    for case in ONE_OF_EACH.values():
        for recipe in RECIPES.values():
            for value in case.results(*case.draw(), precision=recipe, backend="torch").values():
                found.update(value.float().cpu().numpy().tobytes())
    return found.hexdigest()


def test_another_process_has_equal_bits():
    script = f"import sys; sys.path.insert(0, {str(Path(__file__).parents[1])!r}); import conftest\n"
    script += "from ops.test_fp8_precision import digest; print(digest())"
    other = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert other.stdout.strip() == digest(), other.stderr
