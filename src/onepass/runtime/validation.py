"""validate(): the checks that cost a synchronisation or a collective, off unless asked for."""

from __future__ import annotations

from onepass.runtime.process_setting import ProcessSetting, SettingChange

_checks = ProcessSetting("validate", False)


def validate(on: bool = True) -> SettingChange[bool]:
    """Turn the costly checks on (or off), from now on or, as a context manager, within the block.

        onepass.validate()                 # everything from here
        with onepass.validate(): ...       # and back to what it was

    They look at the values of tensors, so each waits for the GPU: for finding a fault, not for training. Compiled code is not
    looked into. From now on means the whole process, all threads; a block is its thread's own, as `use_backend`'s is.
    """
    return _checks.change(on)


def validating() -> bool:
    return _checks.process if not _checks.has_blocks else _checks.in_thread()
