"""Gradient buffers without memory between steps, which activations have then: `MainGrads(release=True)`.

The tensors stay, main_grad and all that was made of it: the storage under them is emptied after an optimizer's step, and has
memory again when a first gradient comes. Whoever adds to a main_grad asks here before. What was not written in this step yet is
no zeros: large gradients that come first are written over it, which saves writing zeros and reading them.
"""

from __future__ import annotations

import operator
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from contextlib import suppress

import torch
from torch import Tensor

_LARGE = 1 << 20  # bytes of a gradient that is worth a look at whether it is the first
_by_storage: dict[int, ReleasedBuffer] = {}


def storage_of(tensor: Tensor) -> int:
    """Which storage it lies in, whatever memory that has."""
    return tensor.untyped_storage()._cdata  # type: ignore[no-any-return]


def buffer_of(main_grad: Tensor) -> ReleasedBuffer | None:
    """What it lies in, if that is one of these."""
    return _by_storage.get(storage_of(main_grad)) if _by_storage else None


def ready(main_grad: Tensor) -> Tensor:
    """The same, with memory for this step under it: what was added so far, zeros elsewhere."""
    buffer = buffer_of(main_grad)
    if buffer is not None:
        buffer.ready(main_grad)
    return main_grad


def with_memory(main_grad: Tensor) -> Tensor:
    """The same, to be divided into parts, each of which is added to by who asks whether it comes first."""
    buffer = buffer_of(main_grad)
    if buffer is not None:
        buffer.come()
    return main_grad


def comes_first(main_grad: Tensor) -> bool:
    """Whether nothing was added to it in this step, nor zeros written: what comes now is to be written over it, whole, and then
    to be told of by `was_written`."""
    buffer = buffer_of(main_grad)
    return buffer is not None and buffer.comes_first(main_grad)


def was_written(main_grad: Tensor) -> None:
    """What came first is there."""
    buffer = buffer_of(main_grad)
    if buffer is not None:
        buffer.was_written(main_grad)


def check_no_copy(given: Tensor, main_grad: Tensor | None) -> None:
    """Raise where a compiled graph adds to a copy of main_grad, of which what is unwritten is no zeros."""
    if _by_storage and main_grad is not None and buffer_of(main_grad) is not buffer_of(given):
        raise RuntimeError(
            "main_grad of MainGrads with release=True must be added to in place, but a compiler copied it before, as all but "
            "Inductor do: compile with that, or make MainGrads without release=True"
        )


class ReleasedBuffer:
    """A flat buffer, whose whole storage is its own. It has memory, zeros, until the first `release`.

    Args:
        flat: the buffer.
        main_grads: the views of it that are parameters' gradients, as they lie.
        together: of those that lie one after another, which they are, and the view of all that ops may know as one.
    """

    def __init__(self, flat: Tensor, main_grads: Iterable[Tensor], together: Iterable[tuple[Sequence[Tensor], Tensor]]) -> None:
        self._flat, self._storage = flat, flat.untyped_storage()
        self._bytes, self.has_memory = self._storage.nbytes(), True
        # all views now, as none can be made of what has no memory
        self._large = {int(each.storage_offset()): each for each in main_grads if each.nbytes >= _LARGE}
        self._starts = list(self._large)
        ends = [0, *(start + each.numel() for start, each in self._large.items())]
        self._rest = [flat[end:start] for end, start in zip(ends, [*self._large, flat.numel()], strict=True) if end < start]
        self._together = list(together)
        self._unwritten: dict[int, Tensor] = {}  # of the large ones, by where they begin
        self._home = self._stream()  # where its memory came: to what that stream uses next it goes back
        self._streams: set[int] = set()  # those that have waited for it to come
        _by_storage[storage_of(flat)] = self

    def forget(self) -> None:
        """It has memory from now on, for backwards of graphs that are there still; it goes with the last of its views."""
        with suppress(RuntimeError):  # no memory: those backwards would have had none either
            self.ready(self._flat)
        _by_storage.pop(storage_of(self._flat), None)

    # ---- memory ----

    def release(self) -> None:
        """Give the memory back, when all that the current stream and those it waits for are to do with it is done."""
        self.check_no_capture()
        if not self.has_memory:  # `zero_` finds it so after an optimizer's step
            return
        here = self._stream()
        if self._home is not None and here is not None and here != self._home:
            self._home.wait_stream(here)
        self._resize(0)
        self.has_memory = False
        self._unwritten.clear()
        self._streams.clear()

    def come(self) -> None:
        """Memory for the current stream, to whose activations it goes back, if it is the first."""
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
        self.has_memory = True  # last: another thread may look

    def _resize(self, size: int) -> None:
        if self._storage.resizable():  # numpy's arrays have made it stay as it is, where a checkpoint was saved from a CPU
            self._storage.resize_(size)

    def check_no_capture(self) -> None:
        """Raise where what is done to the buffer would go into a CUDA graph."""
        if self._flat.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "MainGrads with release=True gives its buffers' memory back after each step, of which a CUDA graph's replays "
                "know nothing: make it without release=True to capture what adds to main_grad, or steps by it"
            )

    # ---- gradients ----

    def ready(self, part: Tensor) -> None:
        self.come()
        for start, large in self._overlapping(part):
            with torch.no_grad():  # here, as it takes longer than all else where there is nothing to write
                large.zero_()
            del self._unwritten[start]

    def comes_first(self, part: Tensor) -> bool:
        self.come()
        overlapping = self._overlapping(part)
        if not overlapping:
            return False
        (first, _), (last, its) = overlapping[0], overlapping[-1]
        start = part.storage_offset()
        covered = sum(large.numel() for _, large in overlapping)
        whole = (first, last + its.numel(), covered) == (start, start + part.numel(), part.numel())
        if not (whole and part.is_contiguous()):  # of one, or of several as one
            self.ready(part)
            return False
        return True

    def was_written(self, part: Tensor) -> None:
        for start, _ in self._overlapping(part):
            del self._unwritten[start]

    def _overlapping(self, part: Tensor) -> list[tuple[int, Tensor]]:
        """What of the unwritten the part has something of, in their order. Asked for each gradient, so not of all there are."""
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
        """Those that are known as one, in this order."""
        for each, alias in self._together:
            if len(each) == len(main_grads) and all(map(operator.is_, each, main_grads)):
                return alias
        return None
