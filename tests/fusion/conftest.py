"""What every test of fusion starts from: nothing compiled yet, and a machine whose figures are given."""

import pytest
import torch
from fusion.programs import FREE_COPIES

import onepass.fusion.backend
from onepass.fusion.cost import LaunchCost


@pytest.fixture(autouse=True)
def anew():
    """Compiled functions of other tests count against PyTorch's limit of recompilations."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def machine(monkeypatch):
    """Fix what the machine can do: the clock decides nothing."""

    def use(found: LaunchCost) -> None:
        monkeypatch.setattr(onepass.fusion.backend, "machine_of", lambda device: found)

    use(FREE_COPIES)
    return use
