"""Scales of a layer's eight-bit operands: what they come from, when they change, and what is kept of them."""

from functools import partial

import pytest
import torch

from onepass.gradients import fp8_scales
from onepass.gradients.fp8_scales import ROLES, FP8Scales
from onepass.kernels.fp8_cast import cast_tensor
from onepass.kernels.language import triton
from onepass.runtime.fp8 import E4M3, E5M2, largest
from onepass.runtime.fp8_recipe import FP8Recipe, recipe_of
from onepass.testing.mutants import mutate

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def note(scales, **amaxes):
    """Note magnitudes as passes do."""
    for role, amax in amaxes.items():
        place = ROLES.index(role)
        scales.amax[place, 3] = torch.tensor(amax, device=DEVICE).view(torch.int32)
        scales.saturated[place, 5] = 2


def formula_refresh(scales, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(fp8_scales, "triton_unsupported", lambda x: "the formula is wanted")
        scales.refresh()


@pytest.mark.parametrize("format", ("hybrid", "e4m3"))
@pytest.mark.parametrize("algorithm", ("max", "most_recent"))
@pytest.mark.parametrize("margin", (0, 3))
def test_scales_follow_magnitudes(algorithm, format, margin):
    scales = FP8Scales(FP8Recipe(format=format, margin=margin, amax_history_len=3, amax_compute_algo=algorithm), DEVICE)
    seen = []
    for step in range(8):
        amax = (100.0, 3.0, 0.5, 7.0, 0.0, 2.0, 1e-30, 1.0)[step]
        note(scales, input=amax, gradient=amax)
        seen.append(amax)
        before = scales.factors[:, 0].clone()
        scales.refresh()
        expected = max(seen[-3:]) if algorithm == "max" else amax
        for role, dtype in (("input", E4M3), ("gradient", E5M2 if format == "hybrid" else E4M3)):
            place = ROLES.index(role)
            if not expected:
                assert scales.factors[place, 0] == before[place]
                continue
            scaled = expected * scales.factors[place, 0].double() * 2**margin
            assert scaled <= largest(dtype)
            assert scaled * 2 > largest(dtype) or scales.factors[place, 0] == 2.0**126
            assert scales.factors[place, 0] * scales.factors[place, 4] == 1
        assert scales.factors[ROLES.index("weight"), 0] == 1  # noted nothing
        assert not scales.amax.any() and not scales.saturated.any()
    assert scales.saturations() == {"input": 16, "weight": 0, "gradient": 16}


@pytest.mark.skipif(triton is None, reason="triton is not installed")
def test_kernel_and_formula_agree(monkeypatch):
    recipe = FP8Recipe(amax_history_len=5, margin=1)
    ours, formula = FP8Scales(recipe, DEVICE), FP8Scales(recipe, DEVICE)
    for amax in (1.75, 1.7500001, 3e38, 1e-45, 1e-38, 0.0, 448.0):
        for scales in (ours, formula):
            note(scales, input=amax, gradient=2 * amax if amax < 1e38 else amax, weight=amax)
        ours.refresh()
        formula_refresh(formula, monkeypatch)
        for name, tensor in ours.state_dict().items():
            assert tensor.equal(formula.state_dict()[name]), (name, amax)
        assert ours.factors.equal(formula.factors)


@pytest.mark.skipif(triton is None, reason="triton is not installed")
def test_a_second_forward_changes_nothing():
    """A region that is run again notes the same magnitudes, and codes keep their bits until the refresh."""
    x = torch.randn(64, 32, device=DEVICE) * 5
    once, twice = (FP8Scales(FP8Recipe(), DEVICE) for _ in range(2))
    for scales, runs in ((once, 1), (twice, 2)):
        scales.start("input", partial(cast_tensor, x))
        codes = [cast_tensor(x, scales.target("input"))[0] for _ in range(runs)]
        assert codes[0].view(torch.uint8).equal(codes[-1].view(torch.uint8))
        scales.refresh()
    assert once.factors.equal(twice.factors) and once.history.equal(twice.history)


def test_a_tensor_starts_from_itself_once():
    scales = FP8Scales(FP8Recipe(), DEVICE)
    large, small = (partial(cast_tensor, torch.tensor([[size]], device=DEVICE)) for size in (100.0, 1.0))
    scales.start("input", large)
    first = scales.factors.clone()
    scales.start("input", small)
    assert scales.factors.equal(first) and first[:, 0].tolist() == [4.0, 1.0, 1.0]
    found = scales.measure("input", small)
    assert found[0] == 256 and found[4] == 1 / 256
    assert scales.factors.equal(first) and not scales.amax.any() and not scales.history.any()


def test_cublas_can_read_every_inverse():
    scales = FP8Scales(FP8Recipe(), DEVICE)
    for role in ROLES:
        scale, inverse = scales.factors_of(role)
        assert inverse.data_ptr() % 16 == 0 and scale.numel() == 1


def test_a_state_goes_on_with_the_same_bits():
    recipe = FP8Recipe(amax_history_len=4)
    scales, resumed = FP8Scales(recipe, DEVICE), FP8Scales(recipe, DEVICE)
    for amax in (3.0, 50.0):
        note(scales, input=amax)
        scales.refresh()
    resumed.load_state_dict({name: tensor.clone() for name, tensor in scales.state_dict().items()})
    for each in (scales, resumed):
        note(each, input=1.0)
        each.refresh()
    for name, tensor in scales.state_dict().items():
        assert tensor.equal(resumed.state_dict()[name]), name
    with pytest.raises(ValueError, match="amax_history_len must be 4 as in the state, but is 16"):
        FP8Scales(FP8Recipe(), DEVICE).load_state_dict(scales.state_dict())


MUTANTS = {
    "slots are kept": ("tl.store(amax_ptr + slots, 0)", "tl.store(amax_ptr + slots, tl.load(amax_ptr + slots))"),
    "one step for ever": ("step + 1", "step"),
    "history forgets": ("(lanes < LENGTH) & (lanes != place)", "lanes < 0"),
    "no margin": (" - MARGIN", ""),
    "the next type's range": ("role >= E5M2_FROM", "role > E5M2_FROM"),
    "0 sets a scale": ("amax > 0.0", "amax >= 0.0"),
    "counts are lost": ("tl.load(total_ptr + role) + past", "past"),
    "the inverse is the scale": ("power_of_two(254 - biased)", "power_of_two(biased)"),
}


@pytest.mark.skipif(triton is None, reason="triton is not installed")
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_found(name, monkeypatch):
    mutant = mutate(fp8_scales, "_refresh_kernel", *MUTANTS[name], entry=fp8_scales)
    recipe = FP8Recipe(amax_history_len=3, margin=2)
    theirs, formula = mutant.FP8Scales(recipe, DEVICE), FP8Scales(recipe, DEVICE)
    for amax in (100.0, 3.0, 1.0, 0.0, 0.0, 0.0, 0.0):
        for scales in (theirs, formula):
            note(scales, input=amax, gradient=amax)
        theirs.refresh()
        formula_refresh(formula, monkeypatch)
        if any(not tensor.equal(formula.state_dict()[name]) for name, tensor in theirs.state_dict().items()):
            return
        if not theirs.factors.equal(formula.factors):
            return
    raise AssertionError("not found")


# ---- recipes ----


def test_recipes_are_checked():
    assert recipe_of(None) is None and recipe_of("fp8") == FP8Recipe()
    assert recipe_of(FP8Recipe(scaling="row")).has_wgrad is False
    with pytest.raises(ValueError, match="precision must be None, 'fp8' or an FP8Recipe, but is 'fp4'"):
        recipe_of("fp4")
    for wrong, words in (
        ({"scaling": "mx"}, "scaling must be one of delayed, current, row, but is 'mx'"),
        ({"format": "e5m2"}, "format must be one of hybrid, e4m3, but is 'e5m2'"),
        ({"margin": 9}, "margin must be a whole number from 0 to 8, but is 9"),
        ({"margin": True}, "margin must be a whole number"),
        ({"amax_history_len": 0}, "amax_history_len must be a whole number from 1 to 65536, but is 0"),
        ({"amax_compute_algo": "mean"}, "amax_compute_algo must be one of max, most_recent, but is 'mean'"),
    ):
        with pytest.raises(ValueError, match=words):
            FP8Recipe(**wrong)
    with pytest.raises(TypeError, match="wgrad must be True or False, but is 1"):
        FP8Recipe(wgrad=1)
