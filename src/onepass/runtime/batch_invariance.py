"""Whether a row's bits may depend on what else is in its batch.

Where an op chooses kernels by the number of rows, it asks `invariant()` and takes what suits any number. What can't keep the
promise says so by `refuse`. `kernels/invariant_product.py` turns it on and off, with the products.
"""

from __future__ import annotations

import torch
from torch import Tensor

from onepass.runtime.process_setting import ProcessSetting

_FULL_ROWS = 64
_THREADED = 1 << 15  # numbers that PyTorch divides over threads

INVARIANT = ProcessSetting("batch_invariant", False)


def invariant() -> bool:
    """Whether each row must have the same bits whatever else is in its batch."""
    return INVARIANT.process if not INVARIANT.has_blocks else INVARIANT.in_thread()


def rows_at_a_time(x: Tensor, most: int, alone: bool = False) -> int:
    """Return how many of x's rows PyTorch's operators may take at once: `most`, or under the promise one, or 64 of short rows.

    On a CPU they compute what fills no vector of numbers in another way, and what is left of a thread's part. 64 short rows fill
    all vectors, and are one thread's. alone: never several.
    """
    if not invariant() or x.is_meta:
        return most
    if x.device.type != "cpu" and x.numel():
        refuse("PyTorch's formula on a GPU", "how it sums a row depends on how many rows there are")
    return 1 if alone or x.shape[-1] >= _THREADED // _FULL_ROWS else _FULL_ROWS


def how_rows_keep_their_bits(device: torch.device, backend: str) -> str:
    """Return what `explain` says of a call under the promise."""
    if device.type == "cpu":
        return "the same bits in any batch: products in blocks of 64 rows, formulas by the row or the document"
    kernels = "kernels by the row or the document" if backend == "triton" else "formulas that sum a row raise"
    return f"the same bits in any batch: products by cuBLASLt's algorithms that split no sum, {kernels}"


def refuse(what: str, why: str) -> None:
    """Raise where the promise is in force and `what` can't keep it."""
    if invariant():
        raise RuntimeError(f"{what} can't run under onepass.batch_invariant(): {why}")
