"""Histories of layers in eight bits: no error is silent, and fuzzing finds those that would be."""

import pytest
import torch
from ops.calls import backends

from onepass.testing import fuzz_histories
from onepass.testing.fuzz import fuzz_cases
from onepass.testing.fuzz_histories import HISTORIES, run_history

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
