"""Histories of layers in eight bits: no error is silent, and fuzzing finds those that would be."""

import re

import pytest
import torch
from ops.calls import backends

from onepass.ops.activation import fp8 as activation_fp8
from onepass.ops.norm.norm_rows import NormRows
from onepass.product import function
from onepass.product.fp8.weight import FP8Weight
from onepass.runtime.fp8 import E5M2, dequantise, finite_amax, quantise, scale_for
from onepass.runtime.fp8_recipe import FP8Recipe
from onepass.testing import fuzz_histories
from onepass.testing.fuzz import fuzz_cases
from onepass.testing.fuzz_histories import HISTORIES, LAYERS, RECIPES, run_history

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CASES = {"torch": 80, "triton": 20}  # ten seconds of CPU


@backends
def test_no_error_is_silent(backend):
    tally = fuzz_cases(HISTORIES, run_history, CASES[backend], device=DEVICE, backends=(backend,))
    assert not tally.failed, "\n".join(f"{f.line}: {f.what}: {f.failures}" for f in tally.failed)
    assert tally.ran[backend] == CASES[backend]


@pytest.mark.parametrize("counts", ("fp8_saturations", "fp8_underflows"))
def test_an_error_that_is_not_counted_is_found(counts, monkeypatch):
    monkeypatch.setattr(fuzz_histories, counts, lambda layer: {})
    assert any(run_history(seed, device=DEVICE, backends=("torch",)).failures for seed in range(CASES["torch"]))


# Three steps of an MLP in fp32. Before the second its second weight grows: the gradient that the activation hands over is past
# its scale, and the third step has another. A recipe with a margin, so that nothing else saturates.
MLP_STEPS = list(LAYERS).index("MLP"), RECIPES.index(FP8Recipe(margin=2)), 0, 0, 0, 2
LARGER_GRADIENT = (*MLP_STEPS, *(0, 0, 0, 0, 0, 0), *(0, 0, 0, 0, 1, 1), *(0, 0, 0, 0, 0, 0))


def _scale_of_the_call_before(state, target, inverse):
    before = vars(state).get("before", inverse)
    state.before = inverse
    return target, before


def _count_nothing(state, target, inverse):
    saturated, underflowed = torch.zeros_like(target.saturated), torch.zeros_like(target.saturated)
    return target._replace(saturated=saturated, underflowed=underflowed), inverse


@pytest.mark.parametrize("broken", (_scale_of_the_call_before, _count_nothing))
def test_a_gradient_in_codes_that_is_wrong_or_not_counted_is_found(broken, monkeypatch):
    def run():
        return run_history(0, LARGER_GRADIENT, device=DEVICE, backends=("torch",)).failures

    assert not run()
    stock = FP8Weight.gradient_target
    monkeypatch.setattr(FP8Weight, "gradient_target", lambda state, how: broken(state, *stock(state, how)))
    assert run()


def _bias_of_codes(monkeypatch):
    def column_sums(dy, stock=function.column_sums):
        scale = scale_for(finite_amax(dy), E5M2)
        return stock(dy if dy.dtype is torch.float64 else dequantise(quantise(dy, scale, E5M2), 1 / scale))

    monkeypatch.setattr(function, "column_sums", column_sums)


def _norm_weight_of_rows(monkeypatch):
    def backward(rows, kept, *args, stock=NormRows.backward, **options):
        made = stock(rows, kept, *args, **options)
        dx, dweight, *more = made.inputs
        return made if rows.dtype is torch.float64 else made._replace(inputs=(dx, dweight * kept[1], *more))

    monkeypatch.setattr(NormRows, "backward", backward)


def _activation_bias_of_scaled_codes(monkeypatch):
    def backward(*args, stock=activation_fp8.activation_backward_codes, **options):
        found = stock(*args, **options)
        return found if found.dbias is None else found._replace(dbias=found.dx.float().sum(0).to(found.dbias.dtype))

    monkeypatch.setattr(activation_fp8, "activation_backward_codes", backward)


@pytest.mark.parametrize("broken", (_bias_of_codes, _norm_weight_of_rows, _activation_bias_of_scaled_codes))
def test_a_vectors_gradient_that_is_wrong_is_found(broken, monkeypatch):
    """Of the product in eight bits alone: what it is judged by, in fp64, is as it was."""
    broken(monkeypatch)
    found = (run_history(seed, device=DEVICE, backends=("torch",)).failures for seed in range(CASES["torch"]))
    failures = next(filter(None, found))
    assert all(re.search(r"d[a-z_.\d]*(bias|norm_weight): off", words) for words in failures), failures


def test_a_vectors_gradient_whose_terms_cancel_is_judged_by_their_size():
    """Of one row whose numbers lie far apart, the norm's is almost one number: 0.27 of its size is a rounding of its terms."""
    assert not run_history(2298, backends=("torch",)).failures
