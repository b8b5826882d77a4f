"""What tests of several ops watch."""

import pytest

from onepass.kernels import launch


def _watched(monkeypatch, read):
    found = []
    stock = launch.Bound.__call__

    def called(bound, grid, *args):
        found.append(read(bound, args))
        return stock(bound, grid, *args)

    monkeypatch.setattr(launch.Bound, "__call__", called)
    return found


@pytest.fixture
def launched(monkeypatch):
    """Of each launch the arguments that vary."""
    return _watched(monkeypatch, lambda bound, args: args)


@pytest.fixture
def kernels_launched(monkeypatch):
    """Of each launch the kernel's name."""
    return _watched(monkeypatch, lambda bound, args: bound.kernel.jit.fn.__name__)
