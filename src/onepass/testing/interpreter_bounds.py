"""Raise where an interpreted kernel reads or writes memory that is not its tensors'.

The interpreter uses addresses as they are. A value too far is read in silence, as on a GPU, and a value written too far breaks
whatever this process keeps there: later, elsewhere, another way each time.

A kernel may access the whole storage of each tensor among its arguments, and of tensors whose distance (`kernels/layout.py`)
from another was asked for. Only `onepass.testing.interpreter` uses this module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from onepass.kernels import layout

_Ends = list[tuple[int, int]]  # where pieces of memory begin, sorted, and how far those up to each reach


def _tensors(arguments: Any) -> Iterator[Tensor]:
    if isinstance(arguments, Tensor):
        yield arguments
    elif isinstance(arguments, (list, tuple)):
        for each in arguments:
            yield from _tensors(each)


def _ends(pieces: dict[int, int]) -> _Ends:
    found, reach = [], 0
    for begin in sorted(pieces):
        reach = max(reach, begin + pieces[begin])  # storages may lie within others
        found.append((begin, reach))
    return found


def _outside(addresses: Any, width: int, ends: _Ends) -> Any:
    """Return which values of `width` bytes are in none of the pieces."""
    if not ends:
        return np.ones(addresses.shape, bool)
    begins, stops = np.array(ends, np.uint64).T
    piece = np.searchsorted(begins, addresses, side="right")
    return (piece == 0) | (addresses + np.uint64(width) > stops[np.maximum(piece, 1) - 1])


def _in_one(first: int, last: int, ends: _Ends) -> bool:
    """Whether the bytes from first to before last are in one of the pieces."""
    return any(begin <= first and last <= stop for begin, stop in ends)


class OutOfBoundsError(AssertionError):
    """A kernel's access that a GPU would not refuse."""


class Reach:
    """The memory that kernels may access: of one launch, and of tensors that kernels reach by their distance."""

    def __init__(self) -> None:
        self.kernel = ""
        self.given: _Ends = _ends({})
        self.noted: dict[int, tuple[int, StorageWeakRef]] = {}  # bytes by address. Others may get a freed tensor's memory
        self.noted_ends: _Ends | None = None

    def launch(self, kernel: str, arguments: Any) -> None:
        self.kernel = kernel
        storages = [tensor.untyped_storage() for tensor in _tensors(arguments)]
        self.given = _ends({storage.data_ptr(): storage.nbytes() for storage in storages})
        freed = [begin for begin, (_, storage) in self.noted.items() if storage.expired()]
        for begin in freed:
            del self.noted[begin]
        if freed:
            self.noted_ends = None

    def note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self.noted[storage.data_ptr()], self.noted_ends = (storage.nbytes(), StorageWeakRef(storage)), None

    def check(self, what: str, pointers: Any, mask: Any) -> None:
        addresses = np.asarray(pointers.data).reshape(-1)
        if mask is not None and not np.logical_and.reduce(kept := np.asarray(mask.data), axis=None):
            addresses = addresses[np.broadcast_to(kept, np.shape(pointers.data)).reshape(-1)]
        width = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        if not addresses.size:
            return
        first, last = int(np.minimum.reduce(addresses)), int(np.maximum.reduce(addresses))  # .min() takes twice as long
        if _in_one(first, last + width, self.given):
            return
        outside = _outside(addresses, width, self.given)
        if self.noted and outside.any():
            if self.noted_ends is None:
                self.noted_ends = _ends({begin: size for begin, (size, _) in self.noted.items()})
            outside &= _outside(addresses, width, self.noted_ends)
        if outside.any():
            raise OutOfBoundsError(f"{self.kernel} {what} {outside.sum()} of {addresses.size} values outside of its tensors")


reached = Reach()


def noting(distance: Callable[[Tensor, Tensor], int]) -> Callable[[Tensor, Tensor], int]:
    """Wrap `layout.distance`: note the memory of tensors that a kernel reaches."""

    def note(tensor: Tensor, base: Tensor) -> int:
        reached.note(tensor)
        return distance(tensor, base)

    return note


def cause_of(error: BaseException) -> BaseException:
    """Return the access out of bounds that an interpreter's error is about, or the error: each function wraps it once more."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, OutOfBoundsError):
        found = found.__cause__
    return found or error


def _checking(what: str, stock: Callable[..., Any], pointers_at: int, mask_at: int | None) -> Callable[..., Any]:
    """Wrap a builder's access of memory, which has pointers and a mask at these places of its arguments."""

    def access(self: Any, *arguments: Any, **options: Any) -> Any:
        reached.check(what, arguments[pointers_at], None if mask_at is None else arguments[mask_at])
        return stock(self, *arguments, **options)

    return access


def install(builder: Any) -> None:
    vars(layout)["distance"] = noting(layout.distance)
    builder.create_masked_load = _checking("reads", builder.create_masked_load, 0, 1)
    builder.create_masked_store = _checking("writes", builder.create_masked_store, 0, 2)
    builder.create_atomic_cas = _checking("updates", builder.create_atomic_cas, 0, None)
    builder.create_atomic_rmw = _checking("updates", builder.create_atomic_rmw, 1, 3)
