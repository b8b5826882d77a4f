"""validate(): the checks that cost a synchronisation or a collective, off unless asked for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

_on = False


@contextlib.contextmanager
def _restore(before: bool) -> Iterator[None]:
    global _on
    try:
        yield
    finally:
        _on = before


def validate(on: bool = True) -> contextlib.AbstractContextManager[None]:
    """Turn the costly checks on (or off), from now on or, as a context manager, within the block.

        onepass.validate()                 # everything from here
        with onepass.validate(): ...       # and back to what it was

    They look at the values of tensors, so each waits for the GPU: for finding a fault, not for training. The switch holds for
    the whole process, all threads; compiled code is not looked into.
    """
    global _on
    before, _on = _on, on
    return _restore(before)


def validating() -> bool:
    return _on
