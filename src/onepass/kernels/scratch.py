"""Scratch memory that the kernels of one stream share: partial sums, and counters of the programs that have arrived.

The last program of a kernel to arrive can do the work that needs all partial results, which saves a second kernel. Each program
adds 1 to a counter as it ends, and the last one sets it back to 0: the same zeros serve every later call. The counters are
integers, so the result does not depend on which program is last. Kernels of one stream run one after the other and can share the
memory (a few MiB). It is kept, which saves an allocation a call.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

_LEAST = 1 << 16
_kept: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}


def stream_scratch(floats: int, counters: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the current stream's scratch: at least `floats` fp32 of any value, and `counters` int32 zeros to keep zeros."""
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():  # a graph may run on any stream: it gets its own
        return new_scratch(floats, counters, device)
    index = device.index
    key = index, torch._C._cuda_getCurrentRawStream(index)
    kept = _kept.get(key)
    if kept is None or kept[0].numel() < floats or kept[1].numel() < counters:
        kept = _kept[key] = persistent_alloc(lambda: new_scratch(max(floats, _LEAST), max(counters, _LEAST), device), device)
        for memory in kept:
            memory.record_stream(torch.cuda.current_stream(device))
    return kept


def new_scratch(floats: int, counters: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Allocate scratch for one call, as in graphs, whose memory must not outlive them."""
    return (
        torch.empty(floats, dtype=torch.float32, device=device),
        torch.zeros(counters, dtype=torch.int32, device=device),
    )


# ---- memory that outlives a call ----

_T = TypeVar("_T")
_workers: dict[int, tuple[ThreadPoolExecutor, torch.cuda.Stream]] = {}


def persistent_alloc(make: Callable[[], _T], device: torch.device) -> _T:
    """Return what `make` gives, in memory that no CUDA graph's pool can claim. The current stream waits for its launches.

    While a graph is warmed up or recorded, what its thread allocates may come from the graph's own memory, on whichever stream;
    kept beyond the call it would be found there, or be written over by a replay. Another thread allocates from the common memory.
    It also has no modes of the caller's: what it makes is a plain tensor under inference_mode and fake tensors too.
    """
    if device.type != "cuda":
        return make()
    worker, side = _worker(device)

    def on_the_side() -> _T:
        with torch.cuda.device(device), torch.cuda.stream(side):
            return make()

    made = worker.submit(on_the_side).result()
    torch.cuda.current_stream(device).wait_stream(side)
    return made


def persistent_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream on which lasting things are made."""
    return _worker(device)[1]


def _worker(device: torch.device) -> tuple[ThreadPoolExecutor, torch.cuda.Stream]:
    pair = _workers.get(device.index)
    if pair is None:
        worker = ThreadPoolExecutor(1, thread_name_prefix="onepass-lasting")
        pair = _workers[device.index] = worker, worker.submit(torch.cuda.Stream, device).result()
    return pair
