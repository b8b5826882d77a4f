"""Memory that outlives a call, allocated where no CUDA graph's pool can claim it.

While a graph is warmed up or recorded, what its thread allocates may come from the graph's own memory, on whichever stream; kept
beyond the call it would be found there, or be written over by a replay. Another thread allocates from the common memory. It also
has no modes of the caller's: what it makes is a plain tensor under inference_mode and fake tensors too.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

_T = TypeVar("_T")
_workers: dict[int, tuple[ThreadPoolExecutor, torch.cuda.Stream]] = {}


def persistent_alloc(make: Callable[[], _T], device: torch.device) -> _T:
    """What `make` gives, its memory common; the current stream waits for what was launched to make it."""
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
    found = _workers.get(device.index)
    if found is None:
        worker = ThreadPoolExecutor(1, thread_name_prefix="onepass-lasting")
        found = _workers[device.index] = worker, worker.submit(torch.cuda.Stream, device).result()
    return found
