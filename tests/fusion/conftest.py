"""Fixtures for tests of fusion: a reset compiler, and a machine with given launch costs."""

import pytest
import torch
from fusion.programs import FREE_COPIES

import onepass.fusion.backend
from onepass.fusion.cost import LaunchCost


@pytest.fixture(autouse=True)
def anew():
    """Reset torch.compile: compiled functions of other tests count against its limit of recompilations."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def machine(monkeypatch):
    """Set the machine's costs instead of measuring them, so that tests don't depend on timing."""

    def use(found: LaunchCost) -> None:
        monkeypatch.setattr(onepass.fusion.backend, "machine_of", lambda device: found)

    use(FREE_COPIES)
    return use
