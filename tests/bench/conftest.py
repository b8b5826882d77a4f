from __future__ import annotations

import pytest

from onepass.bench import runner
from onepass.runtime import ceilings


@pytest.fixture
def one_round(monkeypatch: pytest.MonkeyPatch, by_formula: None) -> None:
    """Make a run take seconds: time everything once, flush a smaller cache in between, and never use Triton's interpreter.

    A copy whose speed is the ceiling is of a megabyte.
    """
    copy = ceilings.copy_step
    monkeypatch.setattr(ceilings, "copy_step", lambda device, moved: copy(device, min(moved, 1 << 20)))
    monkeypatch.setattr(runner, "ROUNDS", 1)
    monkeypatch.setattr(runner, "ROUNDS_QUICK", 1)
    monkeypatch.setattr(runner, "CPU_ROUNDS", 1)
    monkeypatch.setattr(runner, "CPU_ROUNDS_QUICK", 1)
    monkeypatch.setattr(ceilings, "_CPU_FLUSH_BYTES", 1 << 20)
