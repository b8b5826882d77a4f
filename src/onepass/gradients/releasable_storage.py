"""Gradient buffers whose memory activations use between steps: `MainGrads(release=True)`.

The tensors stay: main_grad and its views. An optimizer's step empties the storage under them, and a step's first gradient
allocates it again. Code that adds to a main_grad calls this module before. Memory that no gradient has reached in this step holds
no zeros: a large first gradient overwrites it, which saves writing zeros and reading them.
"""

from __future__ import annotations

import operator
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from contextlib import suppress

import torch
from torch import Tensor

_LARGE = 1 << 20  # bytes of a gradient from which on first writes are tracked; smaller ones are cleared
_by_storage: dict[int, ReleasableBuffer] = {}


def storage_id(tensor: Tensor) -> int:
    """Return the identity of a tensor's storage, whatever memory that has."""
    return tensor.untyped_storage()._cdata  # type: ignore[no-any-return]


def buffer_of(main_grad: Tensor) -> ReleasableBuffer | None:
    """Return the releasable buffer in which main_grad lies, or None."""
    return _by_storage.get(storage_id(main_grad)) if _by_storage else None


def ensure_written(main_grad: Tensor) -> Tensor:
    """Return main_grad with its memory allocated: it holds what was added in this step, and zeros elsewhere."""
    buffer = buffer_of(main_grad)
    if buffer is not None:
        buffer.ensure_written(main_grad)
    return main_grad


def ensure_allocated(main_grad: Tensor) -> Tensor:
    """Return main_grad with its memory allocated but not cleared: each write to a part must check `is_first_write`."""
    buffer = buffer_of(main_grad)
    if buffer is not None:
        buffer.allocate()
    return main_grad


def is_first_write(main_grad: Tensor) -> bool:
    """Whether main_grad was neither written nor cleared in this step. If so, overwrite all of it, then call `mark_written`."""
    buffer = buffer_of(main_grad)
    return buffer is not None and buffer.is_first_write(main_grad)


def mark_written(main_grad: Tensor) -> None:
    """Note that main_grad's first gradient was written."""
    buffer = buffer_of(main_grad)
    if buffer is not None:
        buffer.mark_written(main_grad)


def check_no_copy(given: Tensor, main_grad: Tensor | None) -> None:
    """Raise where a compiled graph adds to a copy of main_grad, whose unwritten memory holds no zeros."""
    if _by_storage and main_grad is not None and buffer_of(main_grad) is not buffer_of(given):
        raise RuntimeError(
            "main_grad of MainGrads with release=True must be added to in place, but a compiler copied it before, as all but "
            "Inductor do: compile with that, or make MainGrads without release=True"
        )


class ReleasableBuffer:
    """A flat buffer with a storage of its own. It has memory, with zeros, until the first `release`.

    Args:
        flat: the buffer.
        main_grads: its views that are parameters' gradients, sorted by offset.
        together: pairs of adjacent main_grads and the view over all of them, which ops may add to as one.
    """

    def __init__(self, flat: Tensor, main_grads: Iterable[Tensor], together: Iterable[tuple[Sequence[Tensor], Tensor]]) -> None:
        self._flat, self._storage = flat, flat.untyped_storage()
        self._bytes, self.has_memory = self._storage.nbytes(), True
        # make all views now: a storage without memory allows none
        self._large = {int(each.storage_offset()): each for each in main_grads if each.nbytes >= _LARGE}
        self._starts = list(self._large)
        ends = [0, *(start + each.numel() for start, each in self._large.items())]
        self._rest = [flat[end:start] for end, start in zip(ends, [*self._large, flat.numel()], strict=True) if end < start]
        self._together = list(together)
        self._unwritten: dict[int, Tensor] = {}  # large main_grads, by offset
        self._home = self._stream()  # the stream that allocated the memory, to which it is freed
        self._streams: set[int] = set()  # streams that have waited for the allocation
        _by_storage[storage_id(flat)] = self

    def detach_views(self) -> None:
        """Keep memory from now on, for backwards of graphs that are alive; the last view frees it."""
        with suppress(RuntimeError):  # out of memory: those backwards would have had none either
            self.ensure_written(self._flat)
        _by_storage.pop(storage_id(self._flat), None)

    # ---- memory ----

    def release(self) -> None:
        """Free the memory, after the current stream and those it waits for have finished with it."""
        self.check_no_capture()
        if not self.has_memory:  # so `zero_` finds it after an optimizer's step
            return
        here = self._stream()
        if self._home is not None and here is not None and here != self._home:
            self._home.wait_stream(here)
        self._resize(0)
        self.has_memory = False
        self._unwritten.clear()
        self._streams.clear()

    def allocate(self) -> None:
        """Allocate the memory on the current stream, or make that stream wait for who did."""
        self.check_no_capture()
        if not self.has_memory:
            self._home = self._stream()
            self._fill()
        if self._home is None:
            return
        here = torch._C._cuda_getCurrentRawStream(self._flat.get_device())
        if here not in self._streams:
            if here != self._home.cuda_stream:
                torch.cuda.current_stream(self._flat.device).wait_stream(self._home)
            self._streams.add(here)

    def _stream(self) -> torch.cuda.Stream | None:
        return torch.cuda.current_stream(self._flat.device) if self._flat.is_cuda else None

    @torch.no_grad()
    def _fill(self) -> None:
        self._resize(self._bytes)
        self._unwritten = dict(self._large)
        if self._rest:
            torch._foreach_zero_(self._rest)
        self.has_memory = True  # last: other threads read it

    def _resize(self, size: int) -> None:
        if self._storage.resizable():  # not after .numpy(), as when a checkpoint was saved from a CPU
            self._storage.resize_(size)

    def check_no_capture(self) -> None:
        """Raise where work on the buffer would go into a CUDA graph."""
        if self._flat.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "MainGrads with release=True gives its buffers' memory back after each step, of which a CUDA graph's replays "
                "know nothing: make it without release=True to capture what adds to main_grad, or steps by it"
            )

    # ---- gradients ----

    def ensure_written(self, part: Tensor) -> None:
        self.allocate()
        for start, large in self._overlapping(part):
            with torch.no_grad():  # inside the loop: it takes longer than all else where there is nothing to write
                large.zero_()
            del self._unwritten[start]

    def is_first_write(self, part: Tensor) -> bool:
        self.allocate()
        overlapping = self._overlapping(part)
        if not overlapping:
            return False
        (first, _), (last, its) = overlapping[0], overlapping[-1]
        start = part.storage_offset()
        covered = sum(large.numel() for _, large in overlapping)
        whole = (first, last + its.numel(), covered) == (start, start + part.numel(), part.numel())
        if not (whole and part.is_contiguous()):  # not exactly one gradient or several adjacent ones
            self.ensure_written(part)
            return False
        return True

    def mark_written(self, part: Tensor) -> None:
        for start, _ in self._overlapping(part):
            del self._unwritten[start]

    def _overlapping(self, part: Tensor) -> list[tuple[int, Tensor]]:
        """Return unwritten slices that overlap `part`, sorted by offset. By binary search: it runs once a gradient."""
        found: list[tuple[int, Tensor]] = []
        if not self._unwritten or not part.numel():
            return found
        start = part.storage_offset()
        stop = start + sum((size - 1) * stride for size, stride in zip(part.shape, part.stride(), strict=True)) + 1
        for at in range(max(0, bisect_right(self._starts, start) - 1), bisect_left(self._starts, stop)):
            each = self._unwritten.get(self._starts[at])
            if each is not None and start < self._starts[at] + each.numel():
                found.append((self._starts[at], each))
        return found

    def alias_of(self, main_grads: Sequence[Tensor]) -> Tensor | None:
        """Return the view over exactly these main_grads in this order, or None."""
        for each, alias in self._together:
            if len(each) == len(main_grads) and all(map(operator.is_, each, main_grads)):
                return alias
        return None
