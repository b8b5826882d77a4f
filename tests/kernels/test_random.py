"""Random bits: Philox's own test vectors, and the statistics of what is dropped, over rows, columns and seeds."""

import numpy
import pytest
import torch
from ops.dropout_add_oracle import halves, philox

from onepass.kernels import philox as random
from onepass.kernels.philox import _mix, keep_mask_formula, scale_of, threshold_of

ROWS, COLUMNS = 512, 2048
VECTORS = {  # of the paper's authors: counter and key, and the words after seven rounds and after ten
    "zeros": ("0 0 0 0 0 0", "5f6fb709 0d893f64 4f121f81 4f730a48", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    "ones": (" ".join(["ffffffff"] * 6), "5207ddc2 45165e59 4d8ee751 8c52f662", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    "pi": (
        "243f6a88 85a308d3 13198a2e 03707344 a4093822 299f31d0",
        "4dfccaba 190a87f0 c47362ba b6b5242a",
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
}


def words(text):
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize("name", VECTORS)
def test_known_answers(name, monkeypatch):
    given, seven, ten = map(words, VECTORS[name])
    for rounds, expected in ((7, seven), (10, ten)):
        assert [
            int(word) for word in philox(*(numpy.array(part, dtype=numpy.uint64) for part in (given[:4], given[4:])), rounds)
        ] == expected
        monkeypatch.setattr(random, "_ROUNDS", rounds)
        assert [int(word) for word in random._philox_formula(*(torch.tensor([word]) for word in given))] == expected


def drops(seed, p=0.25, first=0):
    """1 where an element is dropped."""
    rows = torch.arange(first, first + ROWS)
    return (~keep_mask_formula(seed, rows, COLUMNS, threshold_of("p", p))).double()


def sigmas(values, expected, deviation):
    """How far a mean is from what is expected, in its own standard deviations."""
    return abs(values.mean().item() - expected) / deviation * values.numel() ** 0.5


@pytest.mark.parametrize("p", [1e-4, 0.01, 0.1, 0.25, 0.5, 0.9, 0.9999])
def test_how_many_are_dropped(p):
    exact = threshold_of("p", p) / 65536
    for seed in (1, 1 << 62, _mix(0, 0)):
        found = drops(seed, p)
        deviation = (exact * (1 - exact)) ** 0.5
        assert sigmas(found, exact, deviation) < 5
        for dim in (0, 1):  # and in each column, and each row
            worst = (found.mean(dim) - exact).abs().max().item()
            assert worst / deviation * found.shape[dim] ** 0.5 < 5.5 + (0 if 0.01 < p < 0.99 else 3)  # rare ones are skewed
    assert abs(exact - p) <= 2**-17


def uncorrelated(a, b, p=0.25):
    """The mean product of two independent ones is 0."""
    return sigmas((a - p) * (b - p), 0.0, p * (1 - p)) < 5


def test_neighbours_rows_and_seeds_have_nothing_in_common():
    first = drops(_mix(0, 0))
    for step in (1, 2, 3, 4, 7, 8, 9, 16, 64, 128, 512, 1024):
        assert uncorrelated(first[:, step:], first[:, :-step]), step
    for step in (1, 2, 3, 8, 64, 256):
        assert uncorrelated(first[step:], first[:-step]), step
        assert uncorrelated(first[step:, step:], first[:-step, :-step]), step
    for seed in (_mix(0, 4), _mix(1, 0), _mix(0, 0) + 1, _mix(0, 0) + (1 << 32), _mix(0, 0) ^ (1 << 61)):
        assert uncorrelated(first, drops(seed)), seed
    for row in (ROWS, 1 << 31, 1 << 32, 1 << 45):
        assert uncorrelated(first, drops(_mix(0, 0), first=row)), row


def test_triples_of_neighbours_too():
    a = drops(_mix(7, 8), 0.5) - 0.5
    for steps in ((1, 2), (1, 3), (4, 8), (8, 16), (1, 8)):
        product = a[:, :-32] * a[:, steps[0] : steps[0] - 32] * a[:, steps[1] : steps[1] - 32]
        assert sigmas(product, 0.0, 0.125) < 5, steps


def test_halves_are_uniform():
    counts = torch.bincount(halves(_mix(3, 4), 0, ROWS, COLUMNS).flatten() >> 6, minlength=1024).double()
    expected = ROWS * COLUMNS / 1024
    chi = ((counts - expected) ** 2 / expected).sum().item()
    assert abs(chi - 1023) < 5 * (2 * 1023) ** 0.5


def test_the_formula_is_the_oracles():
    for seed, first in ((5, 0), (_mix(1, 4), 2**32 - 100), (2**63 - 1, 2**40)):
        expected = halves(seed, first, 200, 77) >= 20000
        assert torch.equal(keep_mask_formula(seed, torch.arange(first, first + 200), 77, 20000), expected)
        assert torch.equal(keep_mask_formula(torch.tensor([seed]), torch.arange(first, first + 200), 77, 20000), expected)


def test_probabilities_are_taken_to_the_next_step_and_none_but_one_drops_everything():
    assert [threshold_of("p", p) for p in (0, 0.0, 0.5, 1, 1.0)] == [0, 0, 32768, 65536, 65536]
    assert threshold_of("p", 1 - 1e-9) == 65535 and scale_of(65535) == 65536.0
    assert threshold_of("p", 1e-9) == 0 and scale_of(0) == 1.0 and scale_of(65536) == 0.0
    for p in torch.rand(200).tolist():
        threshold = threshold_of("p", p)
        assert abs(threshold / 65536 - p) <= 2**-17 + 1e-12 and scale_of(threshold) * (1 - threshold / 65536) == pytest.approx(
            1, abs=1e-15
        )
