"""Fixtures that record kernel launches."""

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
    """Record each launch's varying arguments."""
    return _watched(monkeypatch, lambda bound, args: args)


@pytest.fixture
def kernels_launched(monkeypatch):
    """Record each launch's kernel name."""
    return _watched(monkeypatch, lambda bound, args: bound.kernel.jit.fn.__name__)
