"""validate(): the checks that cost a synchronisation or a collective, off unless asked for."""

from __future__ import annotations

from onepass.runtime.process_setting import ProcessSetting

_on = False


def _put(on: bool) -> None:
    global _on
    _on = on


def validate(on: bool = True) -> ProcessSetting[bool]:
    """Turn the costly checks on (or off), from now on or, as a context manager, within the block.

        onepass.validate()                 # everything from here
        with onepass.validate(): ...       # and back to what it was

    They look at the values of tensors, so each waits for the GPU: for finding a fault, not for training. The switch holds for
    the whole process, all threads; compiled code is not looked into.
    """
    return ProcessSetting(_put, _on, on)


def validating() -> bool:
    return _on
