"""Scales of a layer's eight-bit operands: what they come from, when they change, and what is kept of them."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import onepass
from onepass.kernels import fp8_cast
from onepass.kernels.fp8_cast import cast_tensor
from onepass.kernels.language import triton
from onepass.product.fp8 import scales as fp8_scales
from onepass.product.fp8.scales import ROLES, FP8Scales
from onepass.runtime.fp8 import E4M3, E5M2, largest
from onepass.runtime.fp8_recipe import FP8Recipe, recipe_of
from onepass.testing.mutants import mutate

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def note(scales, **amaxes):
    """Note magnitudes as passes do."""
    for role, amax in amaxes.items():
        place = ROLES.index(role)
        scales.amax[place, 3] = torch.tensor(amax, device=DEVICE).view(torch.int32)
        scales.noted[:, place, 5] = torch.tensor((2, 3), device=DEVICE)


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
        assert not scales.amax.any() and not scales.noted.any()
    assert scales.counts().tolist() == [[16, 0, 16], [24, 0, 24]]


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
        targets = [scales.target("input", scales.measure("input", partial(cast_tensor, x)), True) for _ in range(runs)]
        codes = [cast_tensor(x, target)[0] for target in targets]
        assert codes[0].view(torch.uint8).equal(codes[-1].view(torch.uint8))
        scales.refresh()
    assert once.factors.equal(twice.factors) and once.history.equal(twice.history)


def cast_of(size):
    return partial(cast_tensor, torch.tensor([[size]], device=DEVICE))


def formula_measure(scales, role, run, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(fp8_scales, "triton_unsupported", lambda x: "the formula is wanted")
        return scales.measure(role, run)


@pytest.mark.parametrize("role", ROLES)
def test_a_tensor_has_a_scale_of_its_own_until_a_history_sets_one(role, monkeypatch):
    """Of its own in each call: neither zeros nor a first call without a step fix it. The weight has it always."""
    scales = FP8Scales(FP8Recipe(margin=1), DEVICE)
    largest = 57344 if role == "gradient" else 448
    for size, power in ((0.0, 1.0), (largest / 4, 2.0), (largest * 2.0**-40, 2.0**39), (0.0, 1.0)):
        for measure in (scales.measure, partial(formula_measure, scales, monkeypatch=monkeypatch)):
            assert [factor.item() for factor in measure(role, cast_of(size))[:2]] == [power, 1 / power]
        assert not scales.stands(role) and not scales.amax.any() and not scales.noted.any()
    scales.refresh()  # of a step that has noted nothing
    assert not scales.stands(role)
    note(scales, **{role: largest / 2})
    scales.measure(role, cast_of(1.0))
    scales.refresh()
    for measure in (scales.measure, partial(formula_measure, scales, monkeypatch=monkeypatch)):
        assert measure(role, cast_of(largest / 8)).scale.item() == (4.0 if role == "weight" else 1.0)


def test_a_host_that_learns_late_changes_nothing():
    """What a history sets is chosen on the device: measuring once more gives the same factors."""
    scales = FP8Scales(FP8Recipe(), DEVICE)
    note(scales, input=100.0)
    scales.refresh()
    assert not scales.stands("input")  # nothing was measured, so nobody asked
    assert scales.measure("input", cast_of(1.0)).scale.item() == scales.factors_of("input").scale.item() == 4.0
    scales.refresh()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    assert scales.stands("input") and not scales.stands("gradient")


def test_cublas_can_read_every_inverse():
    scales = FP8Scales(FP8Recipe(), DEVICE)
    for role in ROLES:
        scale, inverse, _ = scales.factors_of(role)
        assert inverse.data_ptr() % 16 == 0 and scale.numel() == 1


def test_a_state_goes_on_with_the_same_bits():
    recipe = FP8Recipe(amax_history_len=4)
    scales, resumed = FP8Scales(recipe, DEVICE), FP8Scales(recipe, DEVICE)
    for amax in (3.0, 50.0):
        note(scales, input=amax)
        scales.refresh()
    resumed.load_state_dict({name: tensor.clone() for name, tensor in scales.state_dict().items()})
    assert resumed.stands("input") and not resumed.stands("gradient")
    for each in (scales, resumed):
        note(each, input=1.0)
        each.refresh()
    for name, tensor in scales.state_dict().items():
        assert tensor.equal(resumed.state_dict()[name]), name
    with pytest.raises(ValueError, match="amax_history_len must be 4 as in the state, but is 16"):
        FP8Scales(FP8Recipe(), DEVICE).load_state_dict(scales.state_dict())


def test_a_state_of_before_is_taken():
    """It has no counts of what rounds to zero, and scales that were measured before any step."""
    scales = FP8Scales(FP8Recipe(), DEVICE)
    state = {**scales.state_dict(), "started": torch.tensor([True, True, False]), "scale": torch.full((3,), 64.0)}
    del state["underflowed"]
    scales.noted.fill_(1)
    scales.load_state_dict(state)
    assert not scales.stands("input") and not scales.counts().any()
    scales.load_state_dict({**state, "steps": torch.ones(3, dtype=torch.int64)})
    assert scales.stands("input") and scales.measure("input", cast_of(1.0)).scale.item() == 64


def note_many(scales):
    """Note counts that one more pass raises above 2^31."""
    scales.noted.fill_(2**31 - 1)
    cast_tensor(torch.full((8, 16), 1e9, device=DEVICE), scales.target("input", scales.factors_of("input"), True))
    cast_tensor(torch.full((8, 16), 1e-9, device=DEVICE), scales.target("input", scales.factors_of("input"), True))


@pytest.mark.parametrize("backend", ("kernel", "formula"))
def test_counts_go_on_past_32_bits(backend, monkeypatch):
    """As in a long evaluation, in which nothing refreshes them. A state of before may have counts of 32 bits."""
    if backend == "formula":
        monkeypatch.setattr(fp8_cast, "triton_unsupported", lambda x: "the formula is wanted")
    scales, expected = FP8Scales(FP8Recipe(), DEVICE), 64 * (2**31 - 1) + 128
    note_many(scales)
    assert scales.counts()[:, 0].tolist() == [expected, expected] == fp8_scales.counts_of([scales])[0, :, 0].tolist()
    if backend == "formula":
        formula_refresh(scales, monkeypatch)
    else:
        scales.refresh()
    assert scales.total[:, 0].tolist() == [expected, expected] and not scales.noted.any()
    older = {name: t.int() if name in fp8_scales.KINDS else t for name, t in FP8Scales(FP8Recipe(), DEVICE).state_dict().items()}
    scales.load_state_dict(older)
    note_many(scales)
    assert scales.counts()[:, 0].tolist() == [expected, expected] and scales.state_dict()["saturated"][0] == expected


def test_ranks_share_counts_past_32_bits(monkeypatch):
    scales = [FP8Scales(FP8Recipe(), DEVICE) for _ in range(2)]
    for each in scales:
        note_many(each)
    counts = fp8_scales.counts_of(scales)
    monkeypatch.setattr(dist, "all_gather", lambda everywhere, own, group: [each.copy_(own) for each in everywhere])
    fp8_scales.share_notes(scales, SimpleNamespace(size=lambda: 2))
    assert fp8_scales.counts_of(scales).equal(2 * counts)


MUTANTS = {
    "slots are kept": ("tl.store(amax_ptr + role * SLOTS + lanes, 0)", "tl.store(amax_ptr + role, 0)"),
    "counts are kept": ("tl.store(noted_ptr + slots, 0)", "tl.store(noted_ptr + slots, tl.load(noted_ptr + slots))"),
    "a history that nobody knows of": ("tl.store(row + STANDS, 1.0)", "tl.store(row + STANDS, 0.0)"),
    "one step for ever": ("step + 1", "step"),
    "history forgets": ("(steps < LENGTH) & (steps != place)", "steps < 0"),
    "no margin": (" - MARGIN", ""),
    "the next type's range": ("role >= E5M2_FROM", "role > E5M2_FROM"),
    "0 sets a scale": ("amax > 0.0", "amax >= 0.0"),
    "counts are lost": ("tl.load(total) + count", "count"),
    "the inverse is the scale": ("power_of_two(254 - biased)", "power_of_two(biased)"),
}


MEASURED = {
    "a history is passed over": ("tl.load(factors_ptr + STANDS) > 0.0", "amax < 0.0"),
    "its inverse is another's": ("tl.load(factors_ptr + INVERSE)", "inverse"),
    "no margin": (" - MARGIN", ""),
    "the other type's range": ("269 if E5M2 else 262", "262"),
    "0 has the largest scale": ("amax > 0.0", "amax >= 0.0"),
}


def differs(ours, formula, monkeypatch):
    """Whether scales of kernels have other numbers than the formula's, in steps of these magnitudes."""
    for amax in (100.0, 3.0, 1.0, 0.0, 0.0, 0.0, 0.0):
        measured = []
        for scales, measure in ((ours, ours.measure), (formula, partial(formula_measure, formula, monkeypatch=monkeypatch))):
            note(scales, input=amax, gradient=amax)
            measured.append([factor.item() for role in ROLES for factor in measure(role, cast_of(amax))[:2]])
        ours.refresh()
        formula_refresh(formula, monkeypatch)
        states = [scales.state_dict() for scales in (ours, formula)]
        if measured[0] != measured[1] or any(not tensor.equal(states[1][name]) for name, tensor in states[0].items()):
            return True
        if not ours.factors.equal(formula.factors):
            return True
    return False


@pytest.mark.skipif(triton is None, reason="triton is not installed")
@pytest.mark.parametrize(
    ("kernel", "name"),
    [(kernel, name) for kernel, names in (("_refresh_kernel", MUTANTS), ("_measured_kernel", MEASURED)) for name in names],
)
def test_a_mutant_is_found(kernel, name, monkeypatch):
    how = (MUTANTS if kernel == "_refresh_kernel" else MEASURED)[name]
    mutant, recipe = mutate(fp8_scales, kernel, *how, entry=fp8_scales), FP8Recipe(amax_history_len=3, margin=2)
    assert not differs(FP8Scales(recipe, DEVICE), FP8Scales(recipe, DEVICE), monkeypatch)
    assert differs(mutant.FP8Scales(recipe, DEVICE), FP8Scales(recipe, DEVICE), monkeypatch)


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


@pytest.mark.parametrize("steps_late", (1, 3))
def test_a_host_that_is_steps_ahead_of_the_device_learns_of_a_history(steps_late, monkeypatch):
    """Then it measures inputs and gradients no more, however late each answer is."""
    measured = []  # by steps; the last is the one that runs

    class Event:
        def __init__(self):
            self.at = len(measured) + steps_late

        def query(self):
            return len(measured) >= self.at

        def synchronize(self):
            pass

    def ask(scales, ask=FP8Scales._ask):
        flags = ask(scales)
        flags._arrived = Event()
        return flags

    def counted(scales, role, run, measure=FP8Scales.measure):
        measured[-1] += role != "weight"
        return measure(scales, role, run)

    monkeypatch.setattr(FP8Scales, "_ask", ask)
    monkeypatch.setattr(FP8Scales, "measure", counted)
    layer = onepass.nn.Linear(32, 48, bias=False, precision="fp8", device=DEVICE)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)
    for _ in range(10):
        measured.append(0)
        layer(torch.randn(16, 32, device=DEVICE, requires_grad=True)).square().mean().backward()
        optimizer.step()
    assert measured[0] == 2 and measured[-3:] == [0, 0, 0], measured
