from __future__ import annotations

from collections.abc import Iterator

import pytest

import onepass
from onepass.bench import runner
from onepass.gradients import fp8_scales
from onepass.kernels import fp8_cast
from onepass.runtime import ceilings


@pytest.fixture
def one_round(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make a run take seconds: time everything once, flush a smaller cache in between, and never use Triton's interpreter."""
    monkeypatch.setattr(runner, "ROUNDS", 1)
    monkeypatch.setattr(runner, "CPU_ROUNDS", 1)
    monkeypatch.setattr(runner, "CPU_ROUNDS_QUICK", 1)
    monkeypatch.setattr(ceilings, "_CPU_FLUSH_BYTES", 1 << 20)
    for module in (fp8_cast, fp8_scales):  # which no backend chooses
        monkeypatch.setattr(module, "triton_unsupported", lambda x: "too slow for this test")
    with onepass.use_backend("torch"):
        yield
