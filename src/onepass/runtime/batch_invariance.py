"""Whether a row's bits may depend on what else is in its batch.

Where an op chooses kernels by the number of rows, it asks `invariant()` and takes what suits any number. What can't keep the
promise says so by `refuse`. `kernels/invariant_product.py` turns it on and off, with the products.
"""

from __future__ import annotations

from onepass.runtime.process_setting import ProcessSetting

INVARIANT = ProcessSetting("batch_invariant", False)


def invariant() -> bool:
    """Whether each row must have the same bits whatever else is in its batch."""
    return INVARIANT.process if not INVARIANT.has_blocks else INVARIANT.in_thread()


def refuse(what: str, why: str) -> None:
    """Raise where the promise is in force and `what` can't keep it."""
    if invariant():
        raise RuntimeError(f"{what} can't run under onepass.batch_invariant(): {why}")
