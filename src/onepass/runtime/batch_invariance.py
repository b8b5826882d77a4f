"""Whether a row's bits may depend on what else is in its batch.

    onepass.batch_invariant()                 # from here on a row's result, and its part of a gradient, depend on that row alone
    with onepass.batch_invariant(): ...       # and back to what it was

Where an op chooses kernels by the number of rows, it asks `invariant()` and takes what suits any number. What can't keep the
promise says so by `refuse`.
"""

from __future__ import annotations

from onepass.runtime.process_setting import ProcessSetting, SettingChange

_invariant = ProcessSetting("batch_invariant", False)


def batch_invariant(on: bool = True) -> SettingChange[bool]:
    """Give each row the same bits whatever else is in its batch, from now on or, as a context manager, within the block.

    A row is a token, and for attention a document. Its results and its inputs' gradients then depend neither on the number of
    rows nor on its place among them. The gradients of weights depend on the rows and their order. As with `validate`, from now
    on means the whole process, and a block is its thread's own.
    """
    return _invariant.change(on)


def invariant() -> bool:
    """Whether the promise is in force."""
    return _invariant.process if not _invariant.has_blocks else _invariant.in_thread()


def refuse(what: str, why: str) -> None:
    """Raise where the promise is in force and `what` can't keep it."""
    if invariant():
        raise RuntimeError(f"{what} can't run under onepass.batch_invariant(): {why}")
