"""Histories of layers in eight bits: no error is silent, and fuzzing finds those that would be."""

import pytest
import torch
from ops.calls import backends

from onepass.gradients.fp8_weight import FP8Weight
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
