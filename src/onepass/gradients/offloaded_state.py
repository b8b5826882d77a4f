"""An optimizer's state in the host's memory, which passes through a little of the device's.

A passage's state comes to the device, is stepped there, and goes back. Two streams of their own copy: while one is stepped the
next comes, and the one before goes. In backward, where gradients come in the passages' order, they wait for nothing but PCIe.
"""

from __future__ import annotations

import math
import mmap
import time
import weakref
from typing import Any

import torch
from torch import Tensor

from onepass.kernels.device_tables import is_capturing

SLOTS = 3  # passages on the device: one that is stepped, the next, and the one before


class Passage:
    """State that is on the device together. Tensors of the host and of the device are added before its first use."""

    def __init__(self, ring: StateRing, number: int) -> None:
        self._ring, self.number = weakref.ref(ring), number
        self.pairs: list[tuple[Tensor, Tensor]] = []  # the host's, the device's
        self.come: Any = None  # the events of its last way to the device, and back
        self.gone: Any = None

    def add(self, stored: Tensor, used: Tensor) -> None:
        self.pairs.append((stored, used))

    @property
    def ring(self) -> StateRing:
        ring = self._ring()
        assert ring is not None  # the optimizer has both
        return ring


class StateRing:
    """An optimizer's passages on one device, and its memory for three of them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.passages: list[Passage] = []
        self._slots: list[Tensor] = []
        self._there: set[Passage] = set()
        self._streams: Any = None
        self._stored: list[Tensor] = []
        if device.type == "cuda":
            self._streams = torch.cuda.Stream(device), torch.cuda.Stream(device)
            weakref.finalize(self, _unpin, self._streams, self._stored).atexit = False

    def host_memory(self, dtype: torch.dtype, count: int) -> Tensor:
        """Return zeros of the host, to which the device copies beside kernels."""
        if not count:
            return torch.zeros(0, dtype=dtype, device="cpu")
        pages = mmap.mmap(-1, count * dtype.itemsize)  # of its own: whole ones are pinned
        memory = torch.frombuffer(pages, dtype=dtype)
        if self._streams is not None:
            _pin(memory)
        self._stored.append(memory)
        return memory

    def add_passage(self, size: int) -> tuple[Passage, Tensor]:
        """Return a new passage, and memory of the device for it, which it shares with others."""
        slot = len(self.passages) % SLOTS
        if slot == len(self._slots):
            self._slots.append(torch.zeros(size, dtype=torch.uint8, device=self.device))
        elif self._slots[slot].numel() < size:
            self.settle()  # copies may be under way
            self._slots[slot].untyped_storage().resize_(size)  # views stay: tables of addresses are made after the last passage
            self._slots[slot] = self._slots[slot].as_strided((size,), (1,))
        if self._streams is not None:  # the memory may be another's until the current stream has come here, which also clears it
            self._streams[0].wait_stream(torch.cuda.current_stream(self.device))
        passage = Passage(self, len(self.passages))
        self.passages.append(passage)
        return passage, self._slots[slot][:size]

    def enter(self, passage: Passage) -> None:
        """Let the current stream have a passage's state on the device."""
        if is_capturing(self.device):
            raise RuntimeError("a step with offload can't be captured in a CUDA graph: leave offload None")
        self._fetch(passage)
        if self._streams is not None:
            torch.cuda.current_stream(self.device).wait_event(passage.come)

    def leave(self, passage: Passage) -> None:
        """Send a passage's state back after what the current stream does, and let the next two come."""
        back = None if self._streams is None else self._streams[1]
        if back is not None:
            back.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(back):
            for stored, used in passage.pairs:
                stored.copy_(used, non_blocking=True)
            passage.gone = None if back is None else back.record_event()
        for more in range(1, SLOTS):
            self._fetch(self.passages[(passage.number + more) % len(self.passages)])

    def _fetch(self, passage: Passage) -> None:
        if passage in self._there:
            return
        before = [other for other in self._there if other.number % SLOTS == passage.number % SLOTS]
        self._there.difference_update(before)
        self._there.add(passage)
        come = None if self._streams is None else self._streams[0]
        for other in (*before, passage):
            if come is not None and other.gone is not None:
                come.wait_event(other.gone)
        with torch.cuda.stream(come):
            for stored, used in passage.pairs:
                used.copy_(stored, non_blocking=True)
            passage.come = None if come is None else come.record_event()

    def settle(self) -> None:
        """Wait until the host's memory has the state, and forget what lies on the device: it may be written."""
        for stream in self._streams or ():
            stream.synchronize()
        self._there.clear()

    @property
    def bytes(self) -> int:
        """What passes in a step, each way."""
        return sum(stored.nbytes for passage in self.passages for stored, _ in passage.pairs)

    def rate(self) -> float:
        """Measure the bytes a second of copies to the device, with nothing beside them."""
        self.settle()
        if not self.passages:
            return math.inf
        largest = max(self.passages, key=lambda each: sum(stored.nbytes for stored, _ in each.pairs))
        begun = time.perf_counter()
        self._fetch(largest)
        for stream in self._streams or ():
            stream.synchronize()
        return sum(stored.nbytes for stored, _ in largest.pairs) / max(time.perf_counter() - begun, 1e-9)


class StateRings(dict[torch.device, StateRing]):
    """An optimizer's rings by device, which are made as parameters ask for them. Without offload there are none."""

    def __init__(self, offload: object) -> None:
        if offload not in (None, "state"):
            raise ValueError(f"offload must be None or 'state', but is {offload!r}")
        super().__init__()
        self._offloads = offload is not None

    def of(self, device: torch.device) -> StateRing | None:
        if self._offloads and device not in self:
            self[device] = StateRing(device)
        return self.get(device)

    def settle(self) -> None:
        """Let the host's memory have what is offloaded, for reading and writing."""
        for ring in self.values():
            ring.settle()


def _pin(memory: Tensor) -> None:
    """Lock the memory's pages. PyTorch's own pinned memory would be rounded up to a power of two."""
    if error := int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)):
        raise RuntimeError(
            f"offload must have memory of the host that can be pinned, but CUDA's error is {error} at {memory.nbytes:,} bytes"
        )


def _unpin(streams: Any, stored: list[Tensor]) -> None:
    for stream in streams:
        stream.synchronize()
    for memory in stored:
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
